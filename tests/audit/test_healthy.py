"""Healthy checkpoints of every kind give no finding above ``info``: a false alarm is a defect like a miss."""

import numpy as np
import pytest

from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import tensor
from tests.audit.layouts import bf16
from tests.checkpoint.checkpoint_fixtures import CONFIG, CT_QUANT, FLAT, QUANT, base, ct_base, opened, scalar, without
from tests.checkpoint.test_canonical import OTHERS

E = "model.layers.0.mlp.experts"
CT_CONFIG = {**CONFIG, "quantization_config": CT_QUANT}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}


def scaled(low: float, high: float, seed: int, role: str = "input_scale", experts: int = 64, bf16: bool = False):
    """Scales spread evenly in log space between two values, as measured ones are."""
    rng = np.random.default_rng(seed)
    tensors = base(2, experts=experts)
    for name in tensors:
        if name.endswith(f".{role}") and (role == "input_scale" or "gate" in name or "down" in name):
            value = np.float32(np.exp(rng.uniform(np.log(low), np.log(high))))
            if bf16:
                amax = np.frombuffer(np.float32(value * 2688).tobytes()[2:], np.uint16).astype(np.uint32) << 16
                value = amax.view(np.float32)[0] / np.float32(2688)
            tensors[name] = scalar(value)
            if role == "weight_scale_2" and "gate" in name:
                tensors[name.replace("gate", "up")] = scalar(value)
    return opened(tensors, {**CONFIG, "num_experts": experts, "num_hidden_layers": 2})


def two(**more):
    return {**CONFIG, "num_hidden_layers": 2, **more}


HEALTHY = {
    "ModelOpt, sidecar": lambda: opened(base()),
    "ModelOpt, config.json": lambda: opened(base(), {**CONFIG, "quantization_config": FLAT}, None),
    "ModelOpt, both": lambda: opened(base(), {**CONFIG, "quantization_config": FLAT}, QUANT),
    "two layers": lambda: opened(base(2), two()),
    "Mixtral": lambda: opened(base(2, block="model.layers.{}.block_sparse_moe.experts".format, names=W123), two()),
    "projection-major": lambda: opened(base(2, projection_major=True), two()),
    "Gemma 4, bg": lambda: opened(base(2, block="model.language_model.layers.{}.moe.experts".format), two()),
    "Gemma 4, nvidia": lambda: opened(base(2, block="model.layers.{}.experts".format), two()),
    "non-gated": lambda: opened(base(2, gated=False, block="backbone.layers.{}.mixer.experts".format), two()),
    "compressed-tensors": lambda: opened(ct_base(2), two(quantization_config=CT_QUANT), None),
    "compressed-tensors, weight-only": lambda: opened(
        ct_base(1, with_input=False),
        {
            **CONFIG,
            "quantization_config": {
                **CT_QUANT,
                "config_groups": {"group_0": {**CT_QUANT["config_groups"]["group_0"], "input_activations": None}},
            },
        },
        None,
    ),
    "W4A16": lambda: opened(
        without(base(), "input_scale"),
        CONFIG,
        {"quantization": {**QUANT["quantization"], "quant_algo": "W4A16_NVFP4"}},
    ),
    "dense first layer": lambda: opened(
        {
            **base(block=lambda k: f"model.layers.{k + 1}.mlp.experts"),
            "model.layers.0.input_layernorm.weight": bf16(32),
        },
        two(),
    ),
    "one element, shape [1]": lambda: opened(base(scalar_shape=(1,))),
    "input scales over three decades": lambda: scaled(1e-4, 1e-1 / 2, 1),
    "input scales from BF16 amax": lambda: scaled(1e-3, 3e-2, 2, bf16=True),
    "input scales above one": lambda: scaled(20, 200, 3),
    "weight scales over a decade": lambda: scaled(2e-5, 2e-4, 4, "weight_scale_2"),
    "router scale beside the experts": lambda: opened(
        {**base(), "model.layers.0.moe.router.per_expert_scale": tensor(np.zeros(4, np.float32))}
    ),
    "KV scales": lambda: opened({**base(), "model.layers.0.self_attn.k_proj.k_scale": scalar(0.02)}),
    "nothing": lambda: opened({}, CONFIG, None),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm(name):
    report = audit(HEALTHY[name]())
    above = [item for item in report.findings if item.severity != "info"]
    assert above == []
    assert report.verdict in ("ok", "info", "warn")


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_checkpoints_are_safe_where_they_are_served(name):
    for item in audit(HEALTHY[name]()).backends:
        # Of weights so small one backend loses bits of the block scales (`tests/audit/test_folded.py`).
        folded = name == "weight scales over a decade" and item.text == "why.folded.degraded"
        assert item.outcome in ("safe", "unsupported") or folded


@pytest.mark.parametrize("seed", range(20))
def test_log_normal_scales_raise_no_alarm(seed):
    """Experts' scales spread by a factor of about ten either side: no outlier among 2 × 64 × 3 slots."""
    rng = np.random.default_rng(seed)
    tensors = base(2, experts=64)
    for name in tensors:
        if name.endswith("input_scale"):
            tensors[name] = scalar(np.exp(rng.normal(np.log(3e-3), 0.8)))
    assert audit(opened(tensors, two(num_experts=64))).findings == ()


def test_a_format_that_is_not_known_is_said_to_be():
    tensors, scheme = OTHERS["unknown"]
    report = audit(opened(tensors, CONFIG, None))
    assert (report.format.dialect, report.format.scheme) == ("unknown", scheme)
    assert [item.code for item in report.findings] == ["audit.partial"]
    assert report.backends == ()
