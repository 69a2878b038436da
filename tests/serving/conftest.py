"""Small NVFP4 checkpoints in memory: experts alone (2 layers of 6), and a whole random model (2 layers of 8)."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.checkpoint import memory_checkpoint, tensor
from nvfp4viz.model import TinyMoeConfig
from nvfp4viz.quant import quantize

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 6, 64, 32
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": {"input_activations": {}}}}


def expert_tensors(layer, expert, rng, input_scale=True):
    found = {}
    for projection, shape in (
        ("gate", (INTERMEDIATE, HIDDEN)),
        ("up", (INTERMEDIATE, HIDDEN)),
        ("down", (HIDDEN, INTERMEDIATE)),
    ):
        name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        found[f"{name}.weight"] = tensor(rng.integers(0, 256, (shape[0], shape[1] // 2), np.uint8))
        scales = rng.integers(0x30, 0x7F, (shape[0], shape[1] // 16), np.uint8)
        found[f"{name}.weight_scale"] = tensor(scales, "F8_E4M3")
        weight_scale_2 = np.float32(1e-4 * (1 + layer + expert / 10 + (projection == "down")))
        found[f"{name}.weight_scale_2"] = tensor(weight_scale_2)
        if input_scale:
            found[f"{name}.input_scale"] = tensor(np.float32(rng.uniform(1e-3, 2e-3)))
    return found


@pytest.fixture
def make_checkpoint():
    """Build the checkpoint; names in `without` are left out, `replace` changes scalars, arguments change the config."""

    def make(without=(), replace=None, config=None, hf_quant_config=None):
        rng = np.random.default_rng(1)
        tensors = {}
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                tensors |= expert_tensors(layer, expert, rng)
        for name, value in (replace or {}).items():
            assert name in tensors
            tensors[name] = tensor(np.float32(value))
        for name in without:
            del tensors[name]
        whole = {"num_experts": EXPERTS, "quantization_config": MODELOPT} if config is None else config
        return memory_checkpoint(tensors, config=whole, hf_quant_config=hf_quant_config, name="small")

    return make


def slot_name(layer, expert, projection, role="input_scale"):
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.{role}"


@pytest.fixture
def name_of():
    return slot_name


MODEL_LAYERS, MODEL_EXPERTS = 2, 8


def model_tensors(config, rng, holes):
    """Random weights in tiny-moe's layout; experts in `holes` get no input scale."""
    found = {}
    for name, shape in config.dense_shapes().items():
        values = rng.standard_normal(shape) / (1 if "router" in name or len(shape) == 1 else np.sqrt(shape[-1]))
        found[name] = tensor((np.abs(values) if len(shape) == 1 else values).astype(ml_dtypes.bfloat16))
    h, i = config.hidden_size, config.moe_intermediate_size
    for layer in range(config.num_hidden_layers):
        for expert in range(config.num_experts):
            for projection, shape in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i))):
                q = quantize((rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32), recipe="modelopt")
                name = f"model.layers.{layer}.experts.{expert}.{projection}_proj"
                found[f"{name}.weight"] = tensor(q.packed)
                found[f"{name}.weight_scale"] = tensor(q.scales, "F8_E4M3")
                found[f"{name}.weight_scale_2"] = tensor(q.global_scale)
                scale = np.float32((3 if projection == "down" else 5) / 2688 * rng.uniform(0.9, 1.1))
                if (layer, expert) not in holes:
                    found[f"{name}.input_scale"] = tensor(scale)
    return found


@pytest.fixture(scope="session")
def make_model():
    """A random model of tiny-moe's kind, 2 layers of 8 experts, as an NVFP4 checkpoint in memory."""

    def make(holes=(), groups=None):
        config = TinyMoeConfig(
            hidden_size=64,
            num_hidden_layers=MODEL_LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            num_experts=MODEL_EXPERTS,
            top_k_experts=2,
            moe_intermediate_size=32,
            max_position_embeddings=64,
        )
        groups = {"group_0": {"input_activations": {"num_bits": 4}}} if groups is None else groups
        section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups}
        tensors = model_tensors(config, np.random.default_rng(3), set(holes))
        return memory_checkpoint(tensors, config=config.to_json() | {"quantization_config": section}, name="random")

    return make
