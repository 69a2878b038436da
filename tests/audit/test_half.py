"""Scalar scales in BF16, F16 and F64: a fault is written in that type, found alone, and mended, in every layout."""

import numpy as np
import pytest

from nvfp4viz.audit import audit
from nvfp4viz.audit.repair import apply_repair, plan_repair
from nvfp4viz.checkpoint import FAULTS, inject, inject_tensors, open_checkpoint, write_checkpoint
from nvfp4viz.errors import InputError
from tests.audit.layouts import EXPERTS, HALF, LAYOUTS, in_type

BAD, KIND = 3, "down"
SCALES = ("input_scale", "weight_scale_2")
NVFP4 = {name: layout for name, layout in LAYOUTS.items() if layout.block == "NVFP4"}
FOUND = [fault for fault in FAULTS.values() if fault.findings and set(SCALES) & set(fault.roles)]
# One number for all experts of a layer has no peers that would show that it is odd.
NEEDS_PEERS = ("scaled", "constant", "reciprocal", "random-bits")
TYPES = ("scale.shape.half", "scale.shape.double")
SUSPICIOUS = ("scale.outlier", "scale.identity", "scale.filled")


def findings(layout, source):
    """All but what is said of the healthy file too."""
    every = audit(source).findings
    return [item for item in every if item.code not in layout.notes and item.text not in TYPES]


def bytes_of(folder):
    return {name: (item.dtype, item.tobytes()) for name, item in open_checkpoint(folder).read_tensors().items()}


def has_it(dtype, fault):
    """No F16 number is below FLT_MIN, nor is one's reciprocal."""
    return not (dtype == "F16" and fault == "subnormal")


CELLS = [
    pytest.param(layout, dtype, fault, role, id=f"{name}-{dtype}-{fault.id}-{role}")
    for name, layout in NVFP4.items()
    for dtype in (*HALF, "F64")
    if dtype in HALF or name in ("modelopt", "compressed-tensors", "stacked", "fused")
    for fault in FOUND
    for role in SCALES
    if role in fault.roles and role in layout.roles
]


@pytest.mark.parametrize(("layout", "dtype", "fault", "role"), CELLS)
def test_inject_find_repair(layout, dtype, fault, role, tmp_path):
    healthy = in_type(layout.tensors(), dtype)
    quant = {"config": layout.config, "hf_quant_config": layout.quant}
    write_checkpoint(tmp_path / "good", healthy, max_shard_bytes=6000, **quant)
    pair = fault.id == "pair-mismatch"
    if pair and "gate" not in layout.kinds:
        return  # gate and up in one tensor, or no gate
    kind = "up" if pair else KIND
    at = {"layer": 0, "expert": BAD, "projection": kind, "role": role, "seed": 7}
    if not has_it(dtype, fault.id):
        with pytest.raises(InputError) as caught:
            inject(tmp_path / "good", tmp_path / "bad", fault.id, **at)
        assert caught.value.code == "fault.rounded"
        assert not (tmp_path / "bad").exists()
        return
    inject(tmp_path / "good", tmp_path / "bad", fault.id, **at)
    good, bad = bytes_of(tmp_path / "good"), bytes_of(tmp_path / "bad")
    name = layout.name(BAD, kind, role)
    assert {key for key in good if good[key] != bad.get(key)} == {name}
    assert (name not in bad) if fault.id == "missing" else bad[name][0] == dtype
    found = findings(layout, tmp_path / "bad")
    if layout.arrangement == "fused" and fault.id in NEEDS_PEERS:
        assert {item.code for item in found} <= {*fault.findings, "scale.convention"}
        return
    [finding] = found
    assert finding.code in fault.findings
    assert (finding.layer, finding.role) == (0, role)
    assert finding.projection == (None if pair else KIND)
    whole = layout.arrangement == "stacked" and fault.id == "missing"
    assert finding.experts == (None if layout.arrangement == "fused" else tuple(range(EXPERTS)) if whole else (BAD,))
    if role == "input_scale":
        lone = whole or layout.arrangement == "fused"
        how = {"policy": "constant", "value": float(layout.stored(5e-3))} if lone else {"policy": "peer-max"}
        plan = plan_repair(tmp_path / "bad", **how, suspects=finding.code in SUSPICIOUS)
        apply_repair(plan, tmp_path / "out")
        assert findings(layout, tmp_path / "out") == []
        mended = bytes_of(tmp_path / "out")
        assert {key for key in mended if mended[key] != bad.get(key)} == {name}
        # What lacked comes as servers keep it.
        assert mended[name][0] == ("F32" if fault.id == "missing" else dtype)


@pytest.mark.parametrize(
    ("id", "dtype", "fault", "value", "written"),
    [
        ("modelopt", "F16", "scaled", 1e8, "inf"),
        ("modelopt", "F16", "scaled", 1e-8, "0"),
        ("modelopt", "F16", "constant", 7e4, "inf"),
        ("modelopt", "BF16", "constant", 1e-45, "0"),
        ("modelopt", "BF16", "constant", 3.4e38, "inf"),
        ("modelopt", "BF16", "scaled", 1.001, "0.00"),
        ("compressed-tensors", "F16", "scaled", 1e-8, "inf"),
        ("compressed-tensors", "F16", "subnormal", None, "65504"),
        ("modelopt", "F16", "subnormal", None, "5.96046e-08"),
    ],
)
def test_what_the_type_does_not_have_is_refused(id, dtype, fault, value, written):
    """A number that rounds to another kind of number, or to the one that is there, would be another fault or none."""
    layout = LAYOUTS[id]
    tensors, at = in_type(layout.tensors(), dtype), {"layer": 0, "expert": BAD, "projection": KIND}
    with pytest.raises(InputError) as caught:
        inject_tensors(tensors, fault, **at, value=value, config=layout.config, hf_quant_config=layout.quant)
    error = caught.value
    assert error.code == "fault.rounded"
    assert error.params["written"].startswith(written)
    assert (error.params["tensor"], error.params["dtype"]) == (layout.name(BAD, KIND, "input_scale"), dtype)
    # F32 has every one of them.
    inject_tensors(layout.tensors(), fault, **at, value=value, config=layout.config, hf_quant_config=layout.quant)


@pytest.mark.parametrize("dtype", list(HALF))
def test_a_number_is_rounded_once(dtype):
    """From the float32 of the fault, as a cast rounds it."""
    layout = LAYOUTS["modelopt"]
    tensors, name = in_type(layout.tensors(), dtype), layout.name(BAD, KIND, "input_scale")
    old = tensors[name].array().astype(np.float32)
    at = {"layer": 0, "expert": BAD, "projection": KIND, "config": layout.config, "hf_quant_config": layout.quant}
    for fault, value, wanted in (
        ("scaled", 3.3, old * np.float32(3.3)),
        ("constant", 0.3, np.float32(0.3)),
        ("reciprocal", None, np.float32(1) / old),
        ("negative", None, -old),
        ("zero", None, np.float32(0)),
        ("inf", None, np.float32(np.inf)),
    ):
        new = inject_tensors(tensors, fault, value=value, **at)[name]
        assert (new.dtype, new.shape) == (dtype, ())
        assert new.tobytes() == np.asarray(wanted).astype(HALF[dtype]).tobytes()
