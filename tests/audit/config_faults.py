"""Dialect × fault, where the configuration and the tensors contradict one another: labels, lists, groups and sizes.

The second half of `tests.audit.fault_matrix`: each fault as a change of a healthy layout, and what the audit must say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4viz.audit import Report, audit
from nvfp4viz.checkpoint import Tensor, tensor
from tests.audit.layouts import (
    ALLOWED,
    CT,
    EXPERTS,
    HIDDEN,
    MODELOPT,
    SIZES,
    WIDTH,
    Layout,
    bf16,
    ct_linear,
    linear,
    typed,
)

# code, severity, role, layer, projection, experts
Expected = tuple[str, str, str | None, int | None, str | None, tuple[int, ...] | None]
CONFLICT: Expected = ("config.conflict", "error", None, None, None, None)
TWO_LABELS: Expected = ("config.conflict", "backend", None, None, None, None)
DRAFT: Expected = ("config.conflict", "warn", None, None, None, None)


@dataclass(frozen=True)
class Case:
    """A broken checkpoint: tensors and what else changes, and the findings that it must have beside the layout's own
    notes."""

    tensors: dict[str, Tensor]
    expected: list[Expected]
    changes: dict[str, Any] | None = None

    def report(self, layout: Layout) -> Report:
        return audit(layout.open(self.tensors, **(self.changes or {})))


Built = Case | str


def section_of(layout: Layout) -> dict[str, Any]:
    """Its quantisation section, from whichever file has it."""
    if layout.quant is not None:
        return dict(layout.quant["quantization"])
    assert layout.config is not None
    return dict(layout.config["quantization_config"])


def with_section(layout: Layout, section: Mapping[str, Any], **top: Any) -> dict[str, Any]:
    """Changes that put another section in the old one's place, and other numbers into the configuration (None: out)."""
    config = dict(layout.config or {})
    inner = dict(config["text_config"]) if "text_config" in config else config
    for key, value in top.items():
        if value is None:
            inner.pop(key, None)
        else:
            inner[key] = value
    if "text_config" in config:
        config["text_config"] = inner
    if layout.quant is None:
        return {"config": {**config, "quantization_config": dict(section)}, "quant": None}
    return {"config": config, "quant": {"quantization": dict(section)}}


def exclude_key(section: Mapping[str, Any]) -> str | None:
    """What a section's exclude list is called, where it has one."""
    return next((k for k in ("exclude_modules", "exclude", "modules_to_not_convert", "ignore") if k in section), None)


def excluding(layout: Layout, *patterns: str) -> dict[str, Any]:
    """Changes that put further patterns into the exclude list."""
    section = section_of(layout)
    key = exclude_key(section) or "ignore"
    return with_section(layout, {**section, key: [*section.get(key, []), *patterns]})


def _called(layout: Layout, dtype: str, pattern: str | None = None) -> dict[str, Any] | str:
    """Changes after which the configuration calls the experts (or what a pattern means) by another number format."""
    section = section_of(layout)
    if layout.dialect == "quark":
        entry = {"weight": {"dtype": dtype, "qscheme": "per_tensor"}, "input_tensors": {"dtype": dtype}}
        key = "global_quant_config" if pattern is None else "layer_quant_config"
        return with_section(layout, {**section, key: entry if pattern is None else {pattern: entry}})
    if "config_groups" in section:
        bits, kind = (4 if dtype == "int4" else 8), ("float" if dtype.startswith("fp8") else "int")
        group = {"weights": {"num_bits": bits, "type": kind}, "targets": ["Linear"]}
        groups = {"group_0": group} if pattern is None else {
            "group_1": {**group, "targets": [f"re:{pattern}"]}, **section["config_groups"],
        }  # fmt: skip
        return with_section(layout, {**section, "config_groups": groups})
    if layout.dialect == "gpt-oss":
        return "its method names one format"
    algo = {"fp8_e4m3": "FP8", "int4": "INT4", "int8": "INT8"}[dtype]
    if section.get("quant_method") == "fp8":
        if "moe_quant_algo" in section:
            return with_section(layout, {**section, "moe_quant_algo": algo})
        return with_section(layout, section, expert_dtype=dtype)
    if "quantized_layers" in section:
        listed = {**section["quantized_layers"], (pattern or layout.prefix): {"quant_algo": algo}}
        return with_section(layout, {**section, "quantized_layers": listed})
    return with_section(layout, {**section, "quant_algo": algo})


def called(dtype: str) -> Callable[[Layout], Built]:
    def build(layout: Layout) -> Built:
        changes = _called(layout, dtype)
        return changes if isinstance(changes, str) else Case(layout.tensors(), [CONFLICT], changes)

    return build


def foreign_method(layout: Layout) -> Built:
    """Another exporter's method, with everything else of the configuration in place."""
    section = {**section_of(layout), "quant_method": "awq"}
    if layout.quant is not None:
        return "its file names no method"
    expected = [CONFLICT]
    if (layout.dialect == "quark" and layout.block == "MXFP4") or layout.id == "ModelOpt MXFP4":
        expected.append(("format.ambiguous", "info", "weight_scale", None, None, None))
    return Case(layout.tensors(), expected, with_section(layout, section))


def untargeted(layout: Layout) -> Built:
    """A list or groups that mean other modules only."""
    section = section_of(layout)
    if "config_groups" in section:
        groups = {"group_0": {**section["config_groups"]["group_0"], "targets": ["re:.*self_attn.*", "lm_head"]}}
        return Case(layout.tensors(), [CONFLICT], with_section(layout, {**section, "config_groups": groups}))
    if "quantized_layers" in section:
        listed = {name: entry for name, entry in ALLOWED.items() if name != layout.prefix}
        return Case(layout.tensors(), [CONFLICT], with_section(layout, {**section, "quantized_layers": listed}))
    return "its configuration means all modules"


def one_unlisted(layout: Layout) -> Built:
    section = section_of(layout)
    if "quantized_layers" not in section:
        return "no allow-list"
    listed = {
        f"{layout.prefix}.{e}.{disk}": {"quant_algo": "NVFP4"}
        for e in range(EXPERTS) for disk in layout.disk.values() if e != 5
    }  # fmt: skip
    rest = {name: entry for name, entry in ALLOWED.items() if name != layout.prefix}
    changes = with_section(layout, {**section, "quantized_layers": listed | rest})
    return Case(layout.tensors(), [("config.conflict", "warn", None, 0, None, (5,))], changes)


def _second(layout: Layout, sizes: Mapping[str, tuple[int, int]] = SIZES) -> dict[str, Tensor]:
    """The layout's layer once more as the layer after it, in other sizes."""
    router = layout.prefix.rpartition(".")[0] + ".gate.weight"
    out: dict[str, Tensor] = {router.replace("layers.0", "layers.1"): layout.tensors()[router]}
    for name, item in layout.tensors().items():
        if "layers.0" not in name or not name.startswith(layout.prefix) or name == router:
            continue
        kind = next((kind for kind, disk in layout.disk.items() if f".{disk}" in name), None)
        assert kind is not None
        role = next((role for role in layout.roles if layout.name(_expert_of(layout, name), kind, role) == name), None)
        if name.endswith("pre_quant_scale"):  # a number for each input
            item = tensor(np.full(sizes[kind][1], 0.5, ml_dtypes.bfloat16))
        out[name.replace("layers.0", "layers.1")] = item if role is None else _sized(layout, item, role, sizes[kind])
    return out


def _expert_of(layout: Layout, name: str) -> int:
    tail = name.removeprefix(f"{layout.prefix}.")
    return next((int(part) for part in tail.split(".") if part.isdigit()), 0)


def _sized(layout: Layout, item: Tensor, role: str, size: tuple[int, int]) -> Tensor:
    rows, columns = size
    shape = {"weight": (rows, columns // 2), "weight_scale": (rows, columns // layout.group)}.get(role)
    if shape is None:
        return item
    whole = shape if layout.arrangement == "expert" else (EXPERTS, *shape)
    data = np.full(whole, 0x38 if layout.block == "NVFP4" else 120, np.uint8)
    if role == "weight" and layout.dialect == "gpt-oss":
        data = data.reshape(*whole[:-1], -1, 16)
    return typed(data, item.dtype)


def _listing_second(layout: Layout) -> dict[str, Any]:
    section = section_of(layout)
    if "quantized_layers" in section:
        second = {layout.prefix.replace("layers.0", "layers.1"): ALLOWED[layout.prefix]}
        section["quantized_layers"] = {**section["quantized_layers"], **second}
    return section


def draft_called(layout: Layout) -> Built:
    """A second, quantised layer behind the last one, whose experts the configuration calls FP8."""
    if layout.id == "Inkling":
        return "its weights' names are not public"
    block = layout.prefix.replace("layers.0", "layers.1")
    if layout.dialect != "quark" and not {"config_groups", "quantized_layers"} & set(section_of(layout)):
        return "its configuration gives all experts one format"
    pattern = block if "quantized_layers" in section_of(layout) else f"*{block}*" if layout.dialect == "quark" else None
    changes = _called(layout, "fp8_e4m3", pattern or f".*{block}.*".replace(".layers.1.", r"\.layers\.1\."))
    assert not isinstance(changes, str)
    return Case({**layout.tensors(), **_second(layout)}, [DRAFT], changes)


def draft_unlisted(layout: Layout) -> Built:
    section = section_of(layout)
    if "quantized_layers" in section:
        return Case({**layout.tensors(), **_second(layout)}, [DRAFT])
    if "config_groups" not in section:
        return "its configuration means all modules"
    target = f"re:.*{layout.prefix}.*"
    groups = {"group_0": {**section["config_groups"]["group_0"], "targets": [target]}}
    changes = with_section(layout, {**section, "config_groups": groups})
    return Case({**layout.tensors(), **_second(layout)}, [DRAFT], changes)


def draft_excluded(layout: Layout) -> Built:
    """Quantised, and in the exclude list all the same."""
    section = section_of(layout)
    if "quantized_layers" in section:
        return "an allow-list excludes nothing"
    if layout.id == "Inkling":
        return "its weights' names are not public"
    if layout.dialect in ("deepseek-v4", "mixed"):
        return "excluded means its own MXFP4"
    changes = excluding(layout, "*gate", f"{layout.prefix.replace('layers.0', 'layers.1')}*")
    expected: list[Expected] = [("config.excluded-but-quantised", "warn", None, None, None, None)]
    return Case({**layout.tensors(), **_second(layout)}, expected, changes)


def other_stream(layout: Layout) -> Built:
    """A second layer for another hidden size, and a configuration that does not say one."""
    if layout.id == "Inkling":
        return "its weights' names are not public"
    wide = {kind: (2 * r if kind == "down" else r, c if kind == "down" else 2 * c) for kind, (r, c) in SIZES.items()}
    changes = with_section(layout, _listing_second(layout), hidden_size=None, num_hidden_layers=2)
    expected: list[Expected] = [("weight.shape", "error", "weight", 1, None, None)]
    return Case({**layout.tensors(), **_second(layout, wide)}, expected, changes)


def shared_size(layout: Layout) -> Built:
    """A shared expert twice as wide as the configuration says."""
    parent = layout.prefix.rpartition(".")[0]
    if parent.rpartition(".")[2] not in ("mlp", "ffn"):
        return "its family has no shared expert"
    tensors = {name: item for name, item in layout.tensors().items() if ".shared_expert" not in name}
    names = {"gate": "w1", "up": "w3", "down": "w2"} if parent.endswith("ffn") else {
        kind: f"{kind}_proj" for kind in ("gate", "up", "down")
    }  # fmt: skip
    for kind, disk in names.items():
        rows, columns = (HIDDEN, 2 * WIDTH) if kind == "down" else (2 * WIDTH, HIDDEN)
        tensors |= shared(layout, f"{parent}.shared_experts.{disk}", rows, columns)
    section = section_of(layout)
    key = exclude_key(section)
    if key is not None and layout.block == "MXFP4" and layout.dialect != "deepseek-v4":
        # Stored in BF16, which the list says.
        section[key] = [*section[key], f"{parent}.shared_experts"]
    if "quantized_layers" in section and layout.dialect != "mixed":
        named = {f"{parent}.shared_experts": {"quant_algo": layout.block, "group_size": 16}}
        section["quantized_layers"] = {**section["quantized_layers"], **named}
    return Case(tensors, [CONFLICT], with_section(layout, section, n_shared_experts=1))


def shared(layout: Layout, name: str, rows: int, columns: int) -> dict[str, Tensor]:
    """One ordinary module in the layout's own format, or in the one that its family keeps around the experts."""
    if layout.dialect in ("deepseek-v4", "mixed"):
        scale = np.full((-(-rows // 128), -(-columns // 128)), 120, np.uint8)
        weight = typed(np.full((rows, columns), 0x38, np.uint8), "F8_E4M3")
        return {f"{name}.weight": weight, f"{name}.scale": typed(scale, "F8_E8M0")}
    if layout.block == "MXFP4":
        return {f"{name}.weight": bf16(rows, columns)}
    tensors = ct_linear(name, rows, columns) if layout.divisors else linear(name, rows, columns)
    stored = tensors.pop(f"{name}.{(CT if layout.divisors else MODELOPT)['input_scale']}")
    return {**tensors, f"{name}.{layout.suffixes['input_scale']}": stored} if layout.with_input else tensors


def padding(layout: Layout) -> Built:
    """Two experts more than the configuration says."""
    router = layout.prefix.rpartition(".")[0] + ".gate.weight"
    tensors = layout.tensors()
    tensors[router] = bf16(EXPERTS - 2, HIDDEN)
    changes = with_section(layout, section_of(layout), num_experts=EXPERTS - 2)
    severity = "backend" if layout.arrangement == "expert" else "error"
    return Case(tensors, [("config.conflict", severity, None, None, None, None)], changes)


def fp8_beside(layout: Layout, rows: int, columns: int) -> dict[str, Tensor]:
    """A 64 × 64 module in FP8 beside the experts, with so many block scales, under the family's own names."""
    layer = layout.prefix.partition("layers.0")[0] + "layers.0"
    if layout.dialect in ("deepseek-v4", "mixed"):
        at, suffix = f"{layer}.attn.wq_a", "scale"
        scale = typed(np.full((rows, columns), 120, np.uint8), "F8_E8M0")
    else:
        at, suffix = f"{layer}.linear_attn.out_proj", "weight_scale"
        scale = typed(np.ones((rows, columns), np.float32), "F32")
    weight = typed(np.full((HIDDEN, HIDDEN), 0x38, np.uint8), "F8_E4M3")
    return {f"{at}.weight": weight, f"{at}.{suffix}": scale}


def fp8_blocks(layout: Layout) -> Built:
    """FP8 beside the experts with 128 × 4 scales, where its 128 × 128 blocks have one."""
    expected: list[Expected] = [("block-scale.group", "error", "weight_scale", 0, None, None)]
    return Case({**layout.tensors(), **fp8_beside(layout, 128, 4)}, expected)


def fp8_experts(layout: Layout) -> Built:
    """A second layer with experts in FP8, which the configuration knows; one has 3 × 4 scales for its one block."""
    return _fp8_layer(layout, (3, 4), ("block-scale.group", "error", "weight_scale", 1, "down", (3,)))


def fp8_expert_bare(layout: Layout) -> Built:
    """The same, and one has no scale."""
    return _fp8_layer(layout, None, ("scale.missing", "error", "weight_scale", 1, "down", (3,)))


def _fp8_layer(layout: Layout, odd: tuple[int, int] | None, expected: Expected) -> Built:
    if layout.arrangement != "expert":
        return "one tensor for all experts"
    block, section = layout.prefix.replace("layers.0", "layers.1"), section_of(layout)
    suffix = "scale" if layout.dialect in ("deepseek-v4", "mixed") else "weight_scale"
    tensors = layout.tensors()
    for kind, disk in layout.disk.items():
        for expert in range(EXPERTS):
            at = f"{block}.{disk}.{expert}" if layout.projection_major else f"{block}.{expert}.{disk}"
            shape = odd if (kind, expert) == ("down", 3) else (1, 1)
            tensors[f"{at}.weight"] = typed(np.full(SIZES[kind], 0x38, np.uint8), "F8_E4M3")
            if shape is not None:
                tensors[f"{at}.{suffix}"] = typed(np.ones(shape, np.float32), "F32")
            if "quantized_layers" in section and suffix == "weight_scale":
                # ModelOpt's FP8 quantises activations by stored scales.
                tensors[f"{at}.input_scale"] = typed(np.float32(0.01).reshape(()), "F32")
    if "quantized_layers" in section:
        section["quantized_layers"] = {**section["quantized_layers"], block: {"quant_algo": "FP8"}}
    else:
        key = exclude_key(section) or "ignore"
        section[key] = [*section.get(key, []), f"{block}*", f"re:.*{block}.*"]
    changes = with_section(layout, section, num_hidden_layers=2)
    return Case(tensors, [expected], changes)


def fp8_strategy(layout: Layout) -> Built:
    """FP8 in one block, of which a group says that each row has a scale."""
    section = section_of(layout)
    if "config_groups" not in section:
        return "its configuration has no strategy"
    eight = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["re:.*linear_attn.*"]}
    groups = {**section["config_groups"], "group_1": eight}
    changes = with_section(layout, {**section, "format": "mixed-precision", "config_groups": groups})
    expected: list[Expected] = [("block-scale.group", "error", "weight_scale", 0, None, None)]
    return Case({**layout.tensors(), **fp8_beside(layout, 1, 1)}, expected, changes)


def one_width(layout: Layout) -> Built:
    """Experts that are not as wide as `intermediate_size`, in a family that has no other key for them."""
    family = {"gpt-oss": "gpt_oss", "w1/w2/w3": "mixtral", "fused": "llama4_text"}.get(layout.id)
    if family is None:
        return "its family has a key for the experts alone"
    said = {"model_type": family, "intermediate_size": 4 * WIDTH, "moe_intermediate_size": None}
    return Case(layout.tensors(), [CONFLICT], with_section(layout, section_of(layout), **said))


def moe_algo(layout: Layout) -> Built:
    """``moe_quant_algo`` says another format than the list that names the experts."""
    section = section_of(layout)
    if layout.id == "DeepSeek V4, three formats":
        section["quantized_layers"] = {layout.prefix: {"quant_algo": "NVFP4"}}
        section["quant_algo"] = "MIXED_PRECISION"
    if "quantized_layers" not in section:
        return "no allow-list"
    return Case(layout.tensors(), [TWO_LABELS], with_section(layout, {**section, "moe_quant_algo": "MXFP4"}))


def stale_sidecar(layout: Layout) -> Built:
    """``config.json`` is right, and the older file, which TensorRT-LLM reads first, calls everything FP8."""
    section = section_of(layout)
    listed = section.get(exclude_key(section) or "ignore", [])
    older = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "group_size": None, "exclude_modules": listed}
    assert layout.config is not None
    config = {**layout.config, "quantization_config": {"quant_method": "modelopt", **section}}
    changes = {"config": config if layout.quant else layout.config, "quant": {"quantization": older}}
    return Case(layout.tensors(), [TWO_LABELS], changes)


def other_packing(layout: Layout) -> Built:
    """compressed-tensors' name for packed integers."""
    if layout.dialect != "compressed-tensors":
        return "its configuration names no packing"
    changes = with_section(layout, {**section_of(layout), "format": "pack-quantized"})
    return Case(layout.tensors(), [TWO_LABELS], changes)


def no_router(layout: Layout) -> Built:
    """A second layer with experts, and without the router that the first one has."""
    if layout.id == "Inkling":
        return "its weights' names are not public"
    second = _second(layout)
    [router] = [name for name in second if name.endswith(".gate.weight")]
    # Without a tensor of its own beside the experts it would be a piece of a layer.
    norm = router.partition(".1.")[0] + ".1.input_layernorm.weight"
    second[norm] = second.pop(router)
    changes = with_section(layout, _listing_second(layout), num_hidden_layers=2)
    expected: list[Expected] = [("scale.missing", "error", "weight", 1, None, None)]
    return Case({**layout.tensors(), **second}, expected, changes)


def router_of(rows: int, columns: int) -> Callable[[Layout], Built]:
    def build(layout: Layout) -> Built:
        router = layout.prefix.rpartition(".")[0] + ".gate.weight"
        expected: list[Expected] = [("weight.shape", "error", "weight", 0, None, None)]
        return Case({**layout.tensors(), router: bf16(rows, columns)}, expected)

    return build


CONFIG_FAULTS: dict[str, Callable[[Layout], Built]] = {
    **{f"experts called {dtype}": called(dtype) for dtype in ("fp8_e4m3", "int4", "int8")},
    "quant_method awq, the rest in place": foreign_method,
    "no group or list means the experts": untargeted,
    "an expert left out of an allow-list": one_unlisted,
    "quantised draft layer called FP8": draft_called,
    "quantised draft layer that nothing lists": draft_unlisted,
    "quantised draft layer excluded": draft_excluded,
    "a layer of another hidden size, none configured": other_stream,
    "shared expert of another width": shared_size,
    "more experts than the router has rows": padding,
    "FP8 block scales of another shape": fp8_blocks,
    "FP8 experts' block scales of another shape": fp8_experts,
    "an FP8 expert without its scale": fp8_expert_bare,
    "FP8 scales against a group's strategy": fp8_strategy,
    "experts of another width than intermediate_size": one_width,
    "moe_quant_algo against the allow-list": moe_algo,
    "hf_quant_config.json says FP8, config.json does not": stale_sidecar,
    "format of another packing": other_packing,
    "a layer without its router": no_router,
    "a router with half the rows": router_of(EXPERTS // 2, HIDDEN),
    "a router half as wide": router_of(EXPERTS, HIDDEN // 2),
}
