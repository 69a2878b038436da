"""A small NVFP4 checkpoint in memory: 2 layers of 6 experts, hidden 64, expert width 32."""

import numpy as np
import pytest

from nvfp4viz.checkpoint import memory_checkpoint, tensor

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
