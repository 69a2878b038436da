"""Small checkpoints built in code: the BASE of the audit cases and its relatives.

One MoE layer, 4 experts, hidden 32, expert width 16.  Weights are seeded random codes and legal positive block scales,
so that a healthy fixture is healthy in every byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4viz.checkpoint import Checkpoint, Tensor, memory_checkpoint, tensor

HIDDEN, WIDTH, EXPERTS = 32, 16, 4
SHAPES = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
# A little per expert, as calibration leaves it.
VARY = (1.0, 1.1, 0.9, 1.05)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 1,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": WIDTH,
}
QUANT: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head", "*mlp.gate"],
    },
}
FLAT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "input_activations": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "*mlp.gate"],
}

Tensors = dict[str, Tensor]


def block_bytes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """E4M3 bytes of positive normal numbers."""
    return rng.integers(0x30, 0x78, shape, dtype=np.uint8)


def base(
    layers: int = 1,
    experts: int = EXPERTS,
    block: Callable[[int], str] = "model.layers.{}.mlp.experts".format,
    names: dict[str, str] | None = None,
    gated: bool = True,
    projection_major: bool = False,
    scalar_shape: tuple[int, ...] = (),
    seed: int = 0,
) -> Tensors:
    """ModelOpt W4A4 tensors of a healthy model."""
    rng = np.random.default_rng(seed)
    disk = names or {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    out: Tensors = {}
    for layer in range(layers):
        prefix = block(layer)
        router = prefix.removesuffix(".experts") + ".gate.weight"
        out[router] = tensor(rng.normal(size=(experts, HIDDEN)).astype(ml_dtypes.bfloat16))
        for expert in range(experts):
            for kind, (rows, columns) in SHAPES.items():
                if kind == "gate" and not gated:
                    continue
                tail = f"{disk[kind]}.{expert}" if projection_major else f"{expert}.{disk[kind]}"
                at = f"{prefix}.{tail}"
                scale = np.float32((5e-3 if kind == "down" else 2e-3) * VARY[expert % 4] * (1 + 0.01 * layer))
                out[f"{at}.weight"] = tensor(rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8))
                out[f"{at}.weight_scale"] = tensor(block_bytes(rng, (rows, columns // 16)), "F8_E4M3")
                second = np.float32(1e-4 * (1 + 0.002 * expert + 0.001 * (kind == "down")))
                out[f"{at}.weight_scale_2"] = tensor(np.full(scalar_shape, second))
                out[f"{at}.input_scale"] = tensor(np.full(scalar_shape, scale))
    return out


def ct_base(layers: int = 1, with_input: bool = True) -> Tensors:
    """The same as compressed-tensors stores it: other names, second-level scales as divisors, shape ``[1]``."""
    suffixes = {
        "weight": "weight_packed",
        "weight_scale": "weight_scale",
        "weight_scale_2": "weight_global_scale",
        "input_scale": "input_global_scale",
    }
    out: Tensors = {}
    for name, item in base(layers).items():
        head, _, suffix = name.rpartition(".")
        if ".experts." not in name:
            out[name] = item
        elif suffix in ("weight_scale_2", "input_scale"):
            if with_input or suffix == "weight_scale_2":
                out[f"{head}.{suffixes[suffix]}"] = tensor(np.float32([1 / item.data]))
        else:
            out[f"{head}.{suffixes[suffix]}"] = item
    return out


CT_QUANT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local", "group_size": 16},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}


def scalar(value: float) -> Tensor:
    return tensor(np.float32(value))


def set_scale(tensors: Tensors, expert: int, projection: str, role: str, value: float, layer: int = 0) -> Tensors:
    """The same with one scalar changed."""
    return {**tensors, f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.{role}": scalar(value)}


def without(tensors: Tensors, *parts: str) -> Tensors:
    """The same without every tensor whose name holds one of these parts."""
    return {name: item for name, item in tensors.items() if not any(part in name for part in parts)}


def opened(tensors: Tensors, config: Any = CONFIG, quant: Any = QUANT) -> Checkpoint:
    return memory_checkpoint(tensors, config=config, hf_quant_config=quant)


def raw_file(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4), **extra: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **extra}


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
