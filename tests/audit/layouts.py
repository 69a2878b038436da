"""Every layout of the specification as a healthy checkpoint, and every fault as a change of it.

One MoE layer, 8 experts, hidden 64, expert width 32, so that blocks of 16 and of 32 both fit.  A `Layout` says how a
role's tensor of an expert is called and stored; a fault is written once, in effective values, and applied to each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4viz.checkpoint import Checkpoint, Tensor, memory_checkpoint, tensor
from nvfp4viz.checkpoint.dtypes import DTYPES

HIDDEN, WIDTH, EXPERTS = 64, 32, 8
SIZES = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "gate_up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
ROLES = ("weight", "weight_scale", "weight_scale_2", "input_scale")
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 1, "num_experts": EXPERTS, "num_experts_per_tok": 2, "hidden_size": HIDDEN,
    "moe_intermediate_size": WIDTH,
}  # fmt: skip
MLP = "model.layers.0.mlp.experts"
PLAIN = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
FUSED = {"gate_up": "gate_up_proj", "down": "down_proj"}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}
MODELOPT = {role: role for role in ROLES}
CT = {
    "weight": "weight_packed", "weight_scale": "weight_scale", "weight_scale_2": "weight_global_scale",
    "input_scale": "input_global_scale",
}  # fmt: skip


def modelopt(algo: str = "NVFP4", exclude: tuple[str, ...] = ("lm_head", "*mlp.gate"), **more: Any) -> dict[str, Any]:
    """A sidecar as ModelOpt writes it."""
    body = {
        "quant_algo": algo, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": list(exclude), **more,
    }  # fmt: skip
    return {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": body}


def packed(fmt: str = "nvfp4-pack-quantized", group: int = 16, activations: bool = True) -> dict[str, Any]:
    """A `quantization_config` as compressed-tensors writes it."""
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": group, "symmetric": True}
    inputs = {"num_bits": 4, "type": "float", "dynamic": "local", "group_size": group} if activations else None
    groups = {"group_0": {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": groups, "ignore": ["re:.*mlp.gate$"]}


@dataclass(frozen=True)
class Layout:
    """One way to store experts.

    Attributes
    ----------
    arrangement
        ``"expert"``, ``"stacked"`` (vectors of scales) or ``"fused"`` (one scale a layer).
    block
        ``"NVFP4"`` or ``"MXFP4"``.
    roles
        Roles that a sound file of this layout has.
    """

    id: str
    dialect: str
    scheme: str
    config: dict[str, Any] | None = None
    quant: dict[str, Any] | None = None
    prefix: str = MLP
    disk: dict[str, str] = field(default_factory=lambda: PLAIN)
    suffixes: dict[str, str] = field(default_factory=lambda: MODELOPT)
    roles: tuple[str, ...] = ROLES
    arrangement: str = "expert"
    block: str = "NVFP4"
    divisors: bool = False
    projection_major: bool = False
    code_type: str = "U8"
    scale_type: str = "F8_E4M3"
    extra: Callable[[], dict[str, Tensor]] = dict
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.disk)

    @property
    def with_input(self) -> bool:
        return "input_scale" in self.roles

    def name(self, expert: int, kind: str, role: str) -> str:
        disk, suffix = self.disk[kind], self.suffixes[role]
        if self.arrangement == "expert":
            at = f"{disk}.{expert}" if self.projection_major else f"{expert}.{disk}"
            return f"{self.prefix}.{at}.{suffix}"
        separator = "." if self.arrangement == "stacked" else "_"
        return f"{self.prefix}.{disk}{separator}{suffix}" if suffix else f"{self.prefix}.{disk}"

    def names(self, kind: str, role: str) -> set[str]:
        return {self.name(expert, kind, role) for expert in range(EXPERTS)}

    @property
    def group(self) -> int:
        return 32 if self.block == "MXFP4" else 16

    def tensors(self) -> dict[str, Tensor]:
        """A healthy file."""
        return dict(_healthy(self.id))

    def open(self, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Checkpoint:
        config = changes.get("config", self.config)
        return memory_checkpoint(
            self.tensors() if tensors is None else tensors,
            config=config,
            hf_quant_config=changes.get("quant", self.quant),
        )

    def scalar(self, value: Any) -> Tensor:
        """A number in the shape in which this layout stores it."""
        return tensor(np.full((1,) if self.divisors else (), value, np.float32))

    def stored(self, value: float) -> np.float32:
        """An effective multiplier as the file has it."""
        with np.errstate(all="ignore"):
            return np.float32(1) / np.float32(value) if self.divisors else np.float32(value)

    def put(self, tensors: dict[str, Tensor], expert: int, kind: str, role: str, stored: Any) -> None:
        """Store a number for one expert (for all of them where the layout has one for all)."""
        name = self.name(expert, kind, role)
        if self.arrangement == "stacked":
            values = np.frombuffer(tensors[name].tobytes(), np.float32).copy()
            values[expert] = stored
            tensors[name] = tensor(values)
        else:
            tensors[name] = self.scalar(stored)

    def get(self, tensors: dict[str, Tensor], expert: int, kind: str, role: str) -> np.float32:
        values = np.frombuffer(tensors[self.name(expert, kind, role)].tobytes(), np.float32)
        return values[expert if self.arrangement == "stacked" else 0]


@cache
def _healthy(id: str) -> dict[str, Tensor]:
    layout = LAYOUTS[id]
    rng = np.random.default_rng(3)
    out: dict[str, Tensor] = {}
    parts: dict[tuple[str, str], list[Any]] = {}
    for kind in layout.kinds:
        rows, columns = SIZES[kind]
        for expert in range(EXPERTS):
            second = 1e-4 * (1 + 0.01 * expert + 0.1 * (kind == "down"))
            measured = (5e-3 if kind == "down" else 2e-3) * (1 + 0.07 * ((expert * 5) % 8))
            scales = rng.integers(0x30, 0x78, (rows, columns // layout.group), np.uint8)
            if layout.block == "MXFP4":
                scales = rng.integers(116, 124, scales.shape, np.uint8)
            parts.setdefault((kind, "weight"), []).append(rng.integers(0, 256, (rows, columns // 2), np.uint8))
            parts.setdefault((kind, "weight_scale"), []).append(scales)
            parts.setdefault((kind, "weight_scale_2"), []).append(layout.stored(second))
            parts.setdefault((kind, "input_scale"), []).append(layout.stored(measured))
    for (kind, role), values in parts.items():
        if role not in layout.roles:
            continue
        dtype = {"weight": layout.code_type, "weight_scale": layout.scale_type}.get(role)
        if layout.arrangement == "expert":
            for expert, value in enumerate(values):
                out[layout.name(expert, kind, role)] = layout.scalar(value) if dtype is None else typed(value, dtype)
        elif dtype is None:
            out[layout.name(0, kind, role)] = (
                tensor(np.float32(values)) if layout.arrangement == "stacked" else layout.scalar(values[0])
            )
        else:
            whole = np.stack(values)
            if layout.dialect == "gpt-oss" and role == "weight":
                whole = whole.reshape(EXPERTS, whole.shape[1], -1, 16)
            out[layout.name(0, kind, role)] = typed(whole, dtype)
    router = layout.prefix.rpartition(".")[0] + ".gate.weight"
    out[router] = tensor(rng.normal(size=(EXPERTS, HIDDEN)).astype(ml_dtypes.bfloat16))
    return {**out, **layout.extra()}


def twin(layout: Layout, seed: int) -> dict[str, Tensor]:
    """A healthy file with other numbers: measured activation scales over two decades, weight scales over one.

    Every other seed has them as calibration on BF16 activations leaves them: a maximum of 8 significant bits over 2688.
    """
    rng = np.random.default_rng([seed, len(layout.id)])
    tensors = layout.tensors()
    tied = {}
    for kind in layout.kinds:
        for expert in range(EXPERTS if layout.arrangement != "fused" else 1):
            for role in layout.roles[2:]:
                spread = np.exp(rng.uniform(-2.3, 2.3) if role == "input_scale" else rng.uniform(-1.1, 1.1))
                value = np.float32((3e-3 if role == "input_scale" else 1e-4) * spread)
                if seed % 2:
                    amax = np.frombuffer(np.float32(value * 2688).tobytes()[2:], np.uint16).astype(np.uint32) << 16
                    value = amax.view(np.float32)[0] / np.float32(2688)
                if role == "weight_scale_2" and kind in ("gate", "up"):
                    value = tied.setdefault(expert, value)
                layout.put(tensors, expert, kind, role, layout.stored(value))
    return tensors


def typed(values: Any, dtype: str) -> Tensor:
    return Tensor(dtype, np.shape(values), np.ascontiguousarray(values).tobytes())


def bf16(*shape: int) -> Tensor:
    return tensor(np.full(shape, 0.25, ml_dtypes.bfloat16))


# Types of scalar scales beside F32.
HALF = {"BF16": ml_dtypes.bfloat16, "F16": np.float16}


def in_type(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The same checkpoint with every F32 number in BF16, F16 or F64."""
    view = DTYPES[dtype].view
    return {name: tensor(item.array().astype(view)) if item.dtype == "F32" else item for name, item in tensors.items()}


def with_quant(section: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**CONFIG, **more, "quantization_config": section}


def fp8(name: str, suffix: str = "weight_scale", dtype: str = "F32") -> dict[str, Tensor]:
    """A module in FP8 with a block scale."""
    scale = tensor(np.ones((1, 1), np.float32)) if dtype == "F32" else typed(np.full((1, 1), 120, np.uint8), dtype)
    return {f"{name}.weight": typed(np.full((HIDDEN, HIDDEN), 0x38, np.uint8), "F8_E4M3"), f"{name}.{suffix}": scale}


def awq() -> dict[str, Tensor]:
    widths = {"gate_proj": HIDDEN, "up_proj": HIDDEN, "down_proj": WIDTH}
    return {
        f"{MLP}.{e}.{p}.pre_quant_scale": tensor(np.full(n, 0.5, ml_dtypes.bfloat16))
        for e in range(EXPERTS)
        for p, n in widths.items()
    }


def linear(name: str, rows: int = HIDDEN, columns: int = HIDDEN, second: float = 1e-4) -> dict[str, Tensor]:
    """An ordinary NVFP4 module of ModelOpt."""
    rng = np.random.default_rng(len(name))
    return {
        f"{name}.weight": typed(rng.integers(0, 256, (rows, columns // 2), np.uint8), "U8"),
        f"{name}.weight_scale": typed(rng.integers(0x30, 0x78, (rows, columns // 16), np.uint8), "F8_E4M3"),
        f"{name}.weight_scale_2": tensor(np.float32(second)),
        f"{name}.input_scale": tensor(np.float32(3e-3)),
    }


def ct_linear(name: str, rows: int = HIDDEN, columns: int = HIDDEN) -> dict[str, Tensor]:
    """The same module as compressed-tensors stores it."""
    out: dict[str, Tensor] = {}
    for key, item in linear(name, rows, columns).items():
        head, _, suffix = key.rpartition(".")
        scalar = suffix in ("weight_scale_2", "input_scale")
        out[f"{head}.{CT[suffix]}"] = (
            tensor(np.float32([1]) / np.frombuffer(item.tobytes(), np.float32)) if scalar else item
        )
    return out


def mx_draft() -> dict[str, Tensor]:
    """DeepSeek's draft experts, still in MXFP4, and attention in FP8."""
    out, rng = fp8("layers.0.attn.wq_a", "scale", "F8_E8M0"), np.random.default_rng(4)
    for expert in range(EXPERTS):
        for disk, (rows, columns) in (("w1", SIZES["gate"]), ("w3", SIZES["up"]), ("w2", SIZES["down"])):
            at = f"mtp.0.ffn.experts.{expert}.{disk}"
            out[f"{at}.weight"] = typed(rng.integers(0, 256, (rows, columns // 2), np.uint8), "I8")
            out[f"{at}.scale"] = typed(np.full((rows, columns // 32), 120, np.uint8), "F8_E8M0")
    return out


def mixed_linears() -> dict[str, Tensor]:
    """What stands beside NVFP4 experts in an allow-list: FP8 with its own input scale, and BF16 that nobody lists."""
    return {
        **fp8("model.layers.0.linear_attn.out_proj"),
        "model.layers.0.linear_attn.out_proj.input_scale": tensor(np.float32(0.04)),
        "model.layers.0.linear_attn.in_proj_a.weight": bf16(4, HIDDEN),
    }


MX = ("weight", "weight_scale")
NO_INPUT = ROLES[:3]
DSV4_QUANT = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
QUARK_QUANT = {
    "quant_method": "quark", "exclude": ["lm_head", "re:.*mlp.gate$"], "layer_quant_config": {},
    "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}},
}  # fmt: skip
# Two levels: a list each for weights and inputs.
TWO_LEVELS = [
    {"dtype": "fp4", "group_size": 16, "qscheme": "per_group"}, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
]  # fmt: skip
QUARK_NVFP4_QUANT = {**QUARK_QUANT, "global_quant_config": {"weight": TWO_LEVELS, "input_tensors": TWO_LEVELS}}
ALLOWED = {
    MLP: {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.0.linear_attn.out_proj": {"quant_algo": "FP8"},
}

LAYOUTS: dict[str, Layout] = {
    layout.id: layout
    for layout in (
        Layout("modelopt", "modelopt", "W4A4", CONFIG, modelopt()),
        Layout(
            "modelopt, shared expert", "modelopt", "W4A4", CONFIG, modelopt(),
            extra=lambda: {
                **linear("model.layers.0.mlp.shared_experts.gate_proj"),
                **linear("model.layers.0.mlp.shared_experts.up_proj"),
                **linear("model.layers.0.mlp.shared_experts.down_proj"),
            },
        ),
        Layout("projection-major", "modelopt", "W4A4", CONFIG, modelopt(), projection_major=True),
        Layout(
            "w1/w2/w3", "modelopt", "W4A4", CONFIG, modelopt(exclude=("*gate",)),
            prefix="model.layers.0.block_sparse_moe.experts", disk=W123,
        ),
        Layout(
            "non-gated", "modelopt", "W4A4", CONFIG, modelopt(exclude=("*gate",)),
            prefix="backbone.layers.0.mixer.experts", disk={"up": "up_proj", "down": "down_proj"},
        ),
        Layout(
            "Gemma 4, .moe.", "modelopt", "W4A4", {"text_config": CONFIG}, modelopt(exclude=("*gate",)),
            prefix="model.language_model.layers.0.moe.experts",
            extra=lambda: {
                "model.language_model.layers.0.router.per_expert_scale": tensor(np.zeros(EXPERTS, np.float32)),
                "model.language_model.layers.0.router.scale": tensor(np.zeros(HIDDEN, np.float32)),
                "model.language_model.layers.0.layer_scalar": tensor(np.float32([0.0])),
            },
        ),
        Layout(
            "Gemma 4, nvidia", "modelopt", "W4A4", {"text_config": CONFIG}, modelopt(exclude=("*gate",)),
            prefix="model.language_model.layers.0.experts",
        ),
        Layout(
            "Gemma 4, CT", "compressed-tensors", "W4A4", {"text_config": CONFIG, "quantization_config": packed()},
            prefix="model.language_model.layers.0.experts", suffixes=CT, divisors=True, notes=("loader.note",),
        ),
        Layout(
            "compressed-tensors", "compressed-tensors", "W4A4", with_quant(packed()), suffixes=CT, divisors=True,
            notes=("loader.note",),
        ),
        Layout(
            "compressed-tensors W4A16", "compressed-tensors", "W4A16", with_quant(packed(activations=False)),
            suffixes=CT, divisors=True, roles=NO_INPUT, notes=("loader.note", "scheme.weight-only"),
        ),
        Layout(
            "W4A16", "modelopt", "W4A16", CONFIG, modelopt("W4A16_NVFP4"), roles=NO_INPUT,
            notes=("scheme.weight-only",),
        ),
        Layout("NVFP4_AWQ", "modelopt", "W4A4", CONFIG, modelopt("NVFP4_AWQ"), extra=awq),
        Layout("W4A8", "modelopt", "W4A8", CONFIG, modelopt("W4A8_NVFP4_FP8")),
        Layout(
            "MIXED_PRECISION", "modelopt", "W4A4", CONFIG,
            modelopt("MIXED_PRECISION", exclude=(), quantized_layers=ALLOWED), extra=mixed_linears,
        ),
        Layout(
            "fused", "modelopt-fused", "W4A4", {"text_config": CONFIG}, modelopt(exclude=("*gate",)),
            prefix="model.language_model.layers.0.mlp.experts", disk=FUSED, suffixes={**MODELOPT, "weight": ""},
            arrangement="fused", notes=("loader.note",),
        ),
        Layout(
            "stacked", "modelopt-stacked", "W4A4", CONFIG, modelopt(exclude=("*gate",)), prefix="model.layers.0.moe",
            arrangement="stacked", notes=("loader.note",),
        ),
        Layout(
            "Inkling", "modelopt-stacked", "W4A16", CONFIG, modelopt("W4A16_NVFP4", exclude=("*gate",)),
            prefix="model.layers.0.mlp.experts", disk={"gate_up": "w13_weight", "down": "w2_weight"},
            suffixes={"weight": "", "weight_scale": "scale", "weight_scale_2": "scale2", "input_scale": "input_scale"},
            arrangement="stacked", roles=NO_INPUT, notes=("audit.partial",),
        ),
        Layout(
            "gpt-oss", "gpt-oss", "MXFP4", with_quant({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
            disk=FUSED, suffixes={"weight": "blocks", "weight_scale": "scales"}, roles=MX, arrangement="fused",
            block="MXFP4", scale_type="U8",
            extra=lambda: {
                f"{MLP}.gate_up_proj_bias": bf16(EXPERTS, 2 * WIDTH), f"{MLP}.down_proj_bias": bf16(EXPERTS, HIDDEN),
            },
        ),
        Layout(
            "DeepSeek V4", "deepseek-v4", "MXFP4", with_quant(DSV4_QUANT, expert_dtype="fp4"),
            prefix="layers.0.ffn.experts", disk=W123, suffixes={"weight": "weight", "weight_scale": "scale"}, roles=MX,
            block="MXFP4", code_type="I8", scale_type="F8_E8M0",
            extra=lambda: fp8("layers.0.ffn.shared_experts.w1", "scale", "F8_E8M0"),
        ),
        Layout(
            "DeepSeek V4, U8", "deepseek-v4", "MXFP4", with_quant(DSV4_QUANT, expert_dtype="fp4"),
            prefix="layers.0.ffn.experts", disk=W123, suffixes={"weight": "weight", "weight_scale": "scale"}, roles=MX,
            block="MXFP4", code_type="I8", scale_type="U8", notes=("format.ambiguous",),
        ),
        Layout(
            "DeepSeek V4, three formats", "mixed", "MIXED",
            with_quant({**DSV4_QUANT, "moe_quant_algo": "NVFP4"}), prefix="layers.0.ffn.experts", disk=W123,
            extra=mx_draft,
        ),
        Layout(
            "Quark", "quark", "MXFP4", with_quant(QUARK_QUANT), roles=MX, block="MXFP4", scale_type="U8",
        ),
        Layout(
            "Quark, quantizer names", "quark", "MXFP4", with_quant(QUARK_QUANT), roles=MX, block="MXFP4",
            suffixes={"weight": "weight", "weight_scale": "weight_quantizer.scale"}, scale_type="U8",
        ),
        Layout(
            "Quark, static FP8 inputs", "quark", "MXFP4", with_quant(QUARK_QUANT),
            roles=("weight", "weight_scale", "input_scale"), block="MXFP4", scale_type="U8",
        ),
        Layout(
            "gpt-oss, static FP8 inputs", "gpt-oss", "MXFP4", with_quant(QUARK_QUANT), disk=FUSED,
            suffixes={"weight": "blocks", "weight_scale": "scales", "input_scale": "input_scale"},
            roles=("weight", "weight_scale", "input_scale"), arrangement="fused", block="MXFP4", scale_type="U8",
        ),
        Layout(
            "Quark NVFP4", "quark", "W4A4", with_quant(QUARK_NVFP4_QUANT),
            suffixes={**MODELOPT, "input_scale": "input_scale_2"},
        ),
        Layout(
            "compressed-tensors MXFP4", "compressed-tensors", "MXFP4",
            with_quant(packed("mxfp4-pack-quantized", 32, activations=False)), suffixes=CT, roles=MX, block="MXFP4",
            scale_type="U8",
        ),
        Layout(
            "ModelOpt MXFP4", "modelopt", "MXFP4",
            with_quant({"quant_method": "modelopt", "quant_algo": "MXFP4", "ignore": ["*mlp.gate"]}), roles=MX,
            block="MXFP4", scale_type="U8",
        ),
    )
}  # fmt: skip
