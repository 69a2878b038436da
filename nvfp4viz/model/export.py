"""Export tiny-moe as quantisers do: from BF16 tensors and calibration statistics to a checkpoint's tensors and configs.

``modelopt`` follows ModelOpt's unified export: codes, linear E4M3 block scales, ``weight_scale_2 = amax/2688`` shared
by gate and up (a server fuses them), ``input_scale = amax/2688`` of what the expert saw, and **no** ``input_scale`` for
an expert that saw nothing.  The other layouts are twins of the same weights.  NumPy only, no clock, no randomness:
equal input gives equal bytes on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import nvfp4viz
from nvfp4viz.checkpoint import Tensor, tensor
from nvfp4viz.model.calibrate import CalibrationStats
from nvfp4viz.model.config import PROJECTIONS, TinyMoeConfig
from nvfp4viz.quant import amax, global_scale, quantize

Array = npt.NDArray[Any]
Tensors = dict[str, Tensor]
PRODUCER = {"name": "nvfp4viz", "version": nvfp4viz.__version__}


def expert_weights(tensors: Mapping[str, Tensor], layer: int, expert: int) -> dict[str, Array]:
    """One expert's BF16 weights by projection, cut out of the fused tensors."""
    gate_up = tensors[f"model.layers.{layer}.experts.gate_up_proj"].array()[expert]
    half = gate_up.shape[0] // 2
    down = tensors[f"model.layers.{layer}.experts.down_proj"].array()[expert]
    return {"gate_proj": gate_up[:half], "up_proj": gate_up[half:], "down_proj": down}


def _places(config: TinyMoeConfig) -> Iterator[tuple[int, int]]:
    for layer in range(config.num_hidden_layers):
        for expert in range(config.num_experts):
            yield layer, expert


def dense_tensors(config: TinyMoeConfig, tensors: Mapping[str, Tensor]) -> Tensors:
    """What stays BF16."""
    return {name: tensors[name] for name in config.dense_shapes()}


def modelopt_tensors(config: TinyMoeConfig, tensors: Mapping[str, Tensor], stats: CalibrationStats | None) -> Tensors:
    """NVFP4 in ModelOpt's layout.

    Parameters
    ----------
    tensors
        The BF16 checkpoint's.
    stats
        Decides which experts get an ``input_scale``; None writes none at all (weight-only).
    """
    out = dense_tensors(config, tensors)
    for layer, expert in _places(config):
        weights = expert_weights(tensors, layer, expert)
        gate_up = global_scale(max(amax(weights["gate_proj"]), amax(weights["up_proj"])), "modelopt")
        second = {
            "gate_proj": gate_up,
            "up_proj": gate_up,
            "down_proj": global_scale(amax(weights["down_proj"]), "modelopt"),
        }
        for projection in PROJECTIONS:
            at = f"model.layers.{layer}.experts.{expert}.{projection}."
            q = quantize(weights[projection], recipe="modelopt", global_scale=second[projection], path="numpy")
            out[at + "weight"] = tensor(q.packed)
            out[at + "weight_scale"] = tensor(q.scales, "F8_E4M3")
            out[at + "weight_scale_2"] = tensor(np.float32(second[projection]))
            if stats is not None and stats.counts[layer, expert] > 0:
                seen = stats.input_amax[layer, expert, int(projection == "down_proj")]
                out[at + "input_scale"] = tensor(np.float32(global_scale(seen, "modelopt")))
    return out


def excluded_modules(config: TinyMoeConfig) -> list[str]:
    """What is not quantised, as ModelOpt lists it: exact names and prefixes with a star."""
    layers = range(config.num_hidden_layers)
    return ["lm_head", *(f"model.layers.{n}.{part}*" for n in layers for part in ("self_attn", "mlp", "router"))]


def modelopt_configs(config: TinyMoeConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` and ``hf_quant_config.json`` of a W4A4 export."""
    excluded = excluded_modules(config)
    numbers = {"num_bits": 4, "type": "float", "group_size": 16}
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "weights": {"dynamic": False, **numbers},
                "input_activations": {"dynamic": False, **numbers},
                "targets": ["Linear"],
            }
        },
        "ignore": excluded,
        "producer": PRODUCER,
    }
    return config.to_json() | {"quantization_config": quantization}, modelopt_sidecar(config)


def weight_only_label(config: TinyMoeConfig) -> dict[str, Any]:
    """``quantization_config`` of an export whose activations stay BF16: no group names ``input_activations``."""
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": excluded_modules(config),
        "producer": PRODUCER,
    }


def modelopt_sidecar(config: TinyMoeConfig) -> dict[str, Any]:
    """``hf_quant_config.json`` alone, as older exports carry it."""
    return {
        "producer": PRODUCER,
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": excluded_modules(config),
        },
    }


def compressed_tensors_twin(config: TinyMoeConfig, tensors: Mapping[str, Tensor], stats: CalibrationStats) -> Tensors:
    """NVFP4 in the layout ``nvfp4-pack-quantized``: second-level scales are divisors of shape [1]."""
    out = dense_tensors(config, tensors)
    for layer, expert in _places(config):
        weights = expert_weights(tensors, layer, expert)
        top = {name: amax(weights[name]) for name in PROJECTIONS}
        top["gate_proj"] = top["up_proj"] = max(top["gate_proj"], top["up_proj"])
        for projection in PROJECTIONS:
            at = f"model.layers.{layer}.experts.{expert}.{projection}."
            divisor = global_scale(top[projection], "compressed-tensors")
            q = quantize(weights[projection], recipe="compressed-tensors", global_scale=divisor, path="numpy")
            out[at + "weight_packed"] = tensor(q.packed)
            out[at + "weight_scale"] = tensor(q.scales, "F8_E4M3")
            out[at + "weight_global_scale"] = tensor(np.array([divisor], np.float32))
            seen = stats.input_amax[layer, expert, int(projection == "down_proj")]
            scale = global_scale(seen, "compressed-tensors")
            out[at + "input_global_scale"] = tensor(np.array([scale], np.float32))
    return out


def compressed_tensors_config(config: TinyMoeConfig) -> dict[str, Any]:
    """``config.json`` of that twin."""
    numbers = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    group = {
        "weights": {**numbers, "dynamic": False},
        "input_activations": {**numbers, "dynamic": "local"},
        "targets": ["Linear"],
    }
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*\\.mlp\\..*", "re:.*router.*"]
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }
    return config.to_json() | {"quantization_config": quantization}


def mxfp4_twin(config: TinyMoeConfig, tensors: Mapping[str, Tensor]) -> Tensors:
    """MXFP4 with DeepSeek V4's names and types: ``w1`` gate, ``w2`` down, ``w3`` up; I8 codes, F8_E8M0 scales.

    Scale rule ``ocp-floor``.
    """
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    out = {name.removeprefix("model."): item for name, item in dense_tensors(config, tensors).items()}
    for layer, expert in _places(config):
        for projection, weight in expert_weights(tensors, layer, expert).items():
            at = f"layers.{layer}.ffn.experts.{expert}.{names[projection]}."
            q = quantize(weight, recipe="ocp-floor", path="numpy")
            out[at + "weight"] = tensor(q.packed, "I8")
            out[at + "scale"] = tensor(q.scales, "F8_E8M0")
    return out


def mxfp4_config(config: TinyMoeConfig) -> dict[str, Any]:
    """``config.json`` of that twin."""
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    return config.to_json() | {"expert_dtype": "fp4", "quantization_config": quantization}


SKELETON_HOLES = (40, 42, 82, 98)
"""Experts of layer 0 without the first product's input scales, as reported of a Gemma 4 export (vLLM PR #45320)."""


def gemma4_skeleton() -> tuple[Tensors, dict[str, Any], dict[str, Any]]:
    """A checkpoint with Gemma 4 26B-A4B's 30 × 128 experts and tiny tensors: tensors, config, sidecar.

    The holes are at layer 0, gate and up, experts 40, 42, 82 and 98.  Codes and scales are made from integers; it is a
    file to audit, not a model to run.
    """
    layers, experts, hidden, width = 30, 128, 32, 16
    out: Tensors = {}
    rng = np.random.default_rng(4)
    routers = rng.integers(0x3C00, 0x3E00, (layers, experts, hidden), np.uint16)
    steps = rng.integers(0, 64, (layers, experts, 3, 2))
    for layer in range(layers):
        block = f"model.language_model.layers.{layer}."
        out[block + "router.proj.weight"] = Tensor("BF16", (experts, hidden), routers[layer].tobytes())
        out[block + "router.per_expert_scale"] = tensor(np.ones(experts, ml_dtypes.bfloat16))
        for expert in range(experts):
            for p, projection in enumerate(PROJECTIONS):
                rows, columns = (hidden, width) if projection == "down_proj" else (width, hidden)
                at = f"{block}moe.experts.{expert}.{projection}."
                codes = (np.arange(rows * columns // 2) * 7 + expert + layer) % 256
                out[at + "weight"] = tensor(codes.astype(np.uint8).reshape(rows, columns // 2))
                out[at + "weight_scale"] = tensor(np.full((rows, columns // 16), 0x68, np.uint8), "F8_E4M3")
                # gate and up share the weight's scale, as a server that fuses them wants it
                pair = 0 if projection != "down_proj" else 2
                out[at + "weight_scale_2"] = tensor(
                    np.float32(1e-4) * np.float32(1 + steps[layer, expert, pair, 0] / 128)
                )
                if layer == 0 and p < 2 and expert in SKELETON_HOLES:
                    continue
                out[at + "input_scale"] = tensor(np.float32(2e-3) * np.float32(1 + steps[layer, expert, pair, 1] / 128))
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {
            "num_hidden_layers": layers,
            "num_experts": experts,
            "top_k_experts": 8,
            "hidden_size": hidden,
            "moe_intermediate_size": width,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    }
    sidecar = {
        "producer": PRODUCER,
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["lm_head", "model.vision_tower*", "*router*"],
        },
    }
    return out, config, sidecar
