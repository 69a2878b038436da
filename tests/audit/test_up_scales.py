"""Up's second-level weight scale: what is found says the same as the table of backends below it."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES
from tests.audit.layouts import LAYOUTS

PAIRED = [id for id, layout in LAYOUTS.items() if "gate" in layout.kinds and "weight_scale_2" in layout.roles]
OWN = {name for name, family in FAMILIES.items() if not family.gate_rules}
VALUES = {
    "scale.nan": np.nan,
    "scale.inf": np.inf,
    "scale.zero": 0.0,
    "scale.negative": -1e-4,
    "scale.subnormal": 3e-39,
}


def opened(id, kind, value):
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    if value is None:
        del tensors[layout.name(3, kind, "weight_scale_2")]
    else:
        layout.put(tensors, 3, kind, "weight_scale_2", layout.stored(value))
    report = audit(layout.open(tensors))
    [item] = [one for one in report.findings if one.severity == "error"]
    return item, {one.name: one for one in report.backends if one.outcome != "unsupported"}


def test_the_backends_that_keep_its_own():
    assert {"vllm-humming", "transformers"} == OWN


@pytest.mark.parametrize("id", PAIRED)
@pytest.mark.parametrize("code", VALUES)
def test_a_bad_value_of_up(code, id):
    item, said = opened(id, "up", VALUES[code])
    assert (item.code, item.text) == (code, "scale.value.up")
    for language in ("en", "zh"):
        message, advice = describe(item, language)
        assert all(name in message for name in (*OWN, "TensorRT-LLM", "gate"))
        assert "{" not in message + advice
        assert "every backend" not in message + advice
        assert "becomes NaN" not in message
    for name, one in said.items():
        if name in OWN:
            assert one.outcome != "safe"
            assert one.text not in ("why.weight-up", "why.weight-larger")
        elif name == "tensorrt-llm":
            assert one.text == ("why.weight-nan" if code in ("scale.nan", "scale.inf") else "why.weight-larger")
        else:
            assert (one.outcome, one.text) == ("degraded", "why.weight-up")
            assert "negative" not in one.why


@pytest.mark.parametrize("id", [id for id in PAIRED if LAYOUTS[id].arrangement == "expert"])
def test_up_without_one(id):
    item, said = opened(id, "up", None)
    assert (item.code, item.text, item.experts) == ("scale.missing", "scale.missing.weight.up", (3,))
    for language in ("en", "zh"):
        message = describe(item, language)[0]
        assert all(name in message for name in (*OWN, "TensorRT-LLM"))
        assert "every backend" not in message
    for name, one in said.items():
        expected = "undefined" if name in OWN else "load-error" if name == "tensorrt-llm" else "degraded"
        assert one.outcome == expected


@pytest.mark.parametrize("id", PAIRED)
@pytest.mark.parametrize("kind", ["gate", "down"])
def test_gates_and_downs_are_everybodys(kind, id):
    for code, value in VALUES.items():
        item, said = opened(id, kind, value)
        assert item.code == code
        assert item.text.endswith(".weight")
        assert "safe" not in {one.outcome for one in said.values()}
        assert "why.weight-up" not in {one.text for one in said.values()}
        if code == "scale.negative" and "vllm-cutlass" in said:
            assert "gate's" not in said["vllm-cutlass"].why


def test_experts_without_a_gate_have_their_own_up():
    for value in (*VALUES.values(), None):
        item, said = opened("non-gated", "up", value)
        assert item.text.endswith(".weight")
        assert "degraded" not in {one.outcome for one in said.values()} or value == VALUES["scale.negative"]
