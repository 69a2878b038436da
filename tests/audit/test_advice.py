"""What to do about a scale depends on whose it is: calibration measures activations, an exporter computes weights."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import tensor
from tests.checkpoint.checkpoint_fixtures import CONFIG, CT_QUANT, base, ct_base, opened, scalar

VALUES = {
    "zero": 0.0, "nan": np.nan, "inf": np.inf, "negative": -2e-3, "subnormal": 4e-42, "outlier": 5.0, "identity": 1.0,
}  # fmt: skip
CALIBRATE = {"en": "alibrat", "zh": "校准"}
EXPORT = {"en": "xport", "zh": "导出"}
MODULE = "model.layers.0.mlp.experts.1.down_proj"


def holed(role: str, value: float, divisors: bool) -> dict:
    if not divisors:
        [name] = [name for name in base() if name == f"{MODULE}.{role}"]
        return {"tensors": {**base(), name: scalar(value)}}
    suffix = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}[role]
    [name] = [name for name in ct_base() if name == f"{MODULE}.{suffix}"]
    with np.errstate(divide="ignore", over="ignore"):
        stored = np.float32(1) / np.float32([value])
    return {
        "tensors": {**ct_base(), name: tensor(stored)},
        "config": CONFIG | {"quantization_config": CT_QUANT},
        "quant": None,
    }


@pytest.mark.parametrize("divisors", [False, True])
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_advice_is_the_role_s(lang, kind, divisors):
    if kind == "subnormal" and divisors:
        pytest.skip("1/4e-42 is no float32")
    said = {}
    for role in ("input_scale", "weight_scale_2"):
        given = holed(role, VALUES[kind], divisors)
        found = audit(opened(**given)).findings
        [said[role]] = [describe(item, lang) for item in found if item.code == f"scale.{kind}" and item.role == role]
    advice = said["input_scale"][1]
    assert CALIBRATE[lang] in advice
    message, advice = said["weight_scale_2"]
    assert EXPORT[lang] in advice
    assert CALIBRATE[lang] not in advice
    assert "marlin" not in advice
    assert "2688/0" not in message
    assert {"en": "one maximum", "zh": "一个最大值"}[lang] not in message
