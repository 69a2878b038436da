"""Scales stored as F64: servers copy them into F32 parameters with a cast, so that what is left after it counts."""

import numpy as np
import pytest

from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import memory_checkpoint, tensor
from tests.audit.layouts import LAYOUTS, in_type
from tests.audit.reading import found, outcomes
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, opened

NVFP4 = [id for id, layout in LAYOUTS.items() if layout.block == "NVFP4"]
BIG, SMALL, FINE = 1e300, 1e-300, 1e-310


@pytest.mark.parametrize("id", NVFP4)
def test_doubles_are_sound_in_every_layout(id):
    layout = LAYOUTS[id]
    before, report = audit(layout.open()), audit(layout.open(in_type(layout.tensors(), "F64")))
    assert found(report) == []
    assert outcomes(report) == outcomes(before)
    assert report.coverage == before.coverage
    double = [item for item in report.findings if item.text == "scale.shape.double"]
    assert {(item.code, item.severity, item.params["dtype"]) for item in double} == {("scale.shape", "info", "F64")}
    scales = {
        layout.name(expert, kind, role)
        for expert in range(8)
        for kind in layout.kinds
        for role in ("weight_scale_2", "input_scale")
        if role in layout.roles
    }
    assert [item.count for item in double if item.tensors[0] in scales] == [len(scales & set(layout.tensors()))]


@pytest.mark.parametrize("id", NVFP4)
@pytest.mark.parametrize(
    ("value", "code"), [(0.0, "zero"), (np.nan, "nan"), (-1.0, "negative"), (BIG, "inf"), (SMALL, "zero")]
)
def test_what_float32_cannot_hold_is_judged_as_what_the_cast_leaves(id, value, code):
    layout = LAYOUTS[id]
    tensors = in_type(layout.tensors(), "F64")
    name = layout.name(1, "down", "weight_scale_2")
    bad = tensors[name].array().copy()
    bad.reshape(-1)[1 if bad.size > 1 else 0] = value
    tensors[name] = tensor(bad)
    codes = [item.code for item in audit(layout.open(tensors)).findings if item.severity == "error"]
    other = {"zero": "inf", "inf": "zero"}
    assert codes == [f"scale.{other.get(code, code) if layout.divisors else code}"]


def test_a_double_is_rounded_to_nearest_even_wherever_it_lies():
    """The first and the last tensor of a file, among neighbours of other widths."""
    rng = np.random.default_rng(11)
    values = np.concatenate([rng.normal(size=50) * 10.0 ** rng.integers(-44, 38, 50), [BIG, -BIG, FINE, 0.0, -0.0]])
    # Halfway between two float32, both ways.
    values = np.concatenate([values, 1 + np.float64([1, 3]) * 2.0**-24])
    tensors = {"0": tensor(np.zeros(3, np.uint8), "U8")}
    for at, value in enumerate(values):
        kind = (np.float64, np.float64, np.float32, np.float16)[at % 4]
        tensors[f"{at:03d}"] = tensor(np.array(value if kind is np.float64 else 1.5, kind))
    checkpoint = memory_checkpoint(tensors)
    names = [name for name, item in tensors.items() if item.dtype == "F64"]
    with np.errstate(all="ignore"):
        want = np.array([tensors[name].array()[()] for name in names]).astype(np.float32)
    got = checkpoint.scalars(names)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    # In any order, and beside the others.
    every = [name for name in reversed(tensors) if name != "0"]
    back = dict(zip(every, checkpoint.scalars(every), strict=True))
    assert [back[name] for name in names] == want.tolist()
    assert {float(value) for name, value in back.items() if name not in names} == {1.5}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.5, None), (1.0, ("kv.identity", "info")), (SMALL, ("kv.zero", "error")), (BIG, ("kv.invalid", "error"))],
)
def test_kv_scales(value, expected):
    quant = {"quantization": {**QUANT["quantization"], "kv_cache_quant_algo": "FP8"}}
    other = {"model.layers.0.self_attn.v_scale": tensor(np.float64(0.25))}
    tensors = {**base(), "model.layers.0.self_attn.k_scale": tensor(np.float64(value)), **other}
    report = audit(opened(tensors, CONFIG, quant))
    assert [(item.code, item.severity) for item in report.findings] == ([expected] if expected else [])


def test_an_integer_is_still_no_scale():
    tensors = {**base(), "model.layers.0.mlp.experts.1.down_proj.input_scale": tensor(np.int64(1))}
    assert found(audit(opened(tensors))) == [("scale.shape", "error", 0, "down", (1,))]
