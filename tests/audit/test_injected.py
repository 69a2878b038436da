"""Round trip in every layout: a fault that is injected is what the audit finds."""

import numpy as np
import pytest

from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import FAULTS, inject_tensors
from nvfp4viz.errors import InputError
from tests.audit.layouts import LAYOUTS

BAD = 3
CELLS = [
    pytest.param(layout, fault, role, id=f"{layout.id}-{fault.id}-{role}")
    for layout in LAYOUTS.values()
    for fault in FAULTS.values()
    if fault.findings and not fault.deep and fault.id != "pair-mismatch"
    for role in fault.roles
    if role in layout.roles
]
# A scale without peers of its own kind can only be judged by its class.
NEEDS_PEERS = ("scaled", "constant", "reciprocal", "random-bits")


def injected(layout, fault, **place):
    return inject_tensors(
        layout.tensors(), fault, layer=0, expert=BAD, config=layout.config, hf_quant_config=layout.quant, **place
    )


@pytest.mark.parametrize(("layout", "fault", "role"), CELLS)
def test_what_is_injected_is_found(layout, fault, role):
    tensors = injected(layout, fault.id, projection="down", role=role, seed=7)
    findings = [item for item in audit(layout.open(tensors)).findings if item.code not in layout.notes]
    if layout.id == "Inkling" and fault.id == "missing" and role != "weight_scale_2":
        assert findings == []  # its names are not public
        return
    if layout.arrangement == "fused" and fault.id in NEEDS_PEERS:
        assert {item.code for item in findings} <= {*fault.findings, "scale.convention"}
        return
    [finding] = findings
    assert finding.code in fault.findings
    assert (finding.layer, finding.projection, finding.role) == (0, "down", role)
    if layout.arrangement == "expert":
        assert finding.experts == (BAD,)
    elif layout.arrangement == "stacked":
        assert finding.experts == (tuple(range(8)) if fault.id == "missing" else (BAD,))
    else:
        assert finding.experts is None


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_only_one_slot_changes(layout):
    """The row of one expert, to the last byte, and no other tensor."""
    healthy, kind = layout.tensors(), layout.kinds[-1]
    broken = injected(layout, "zero-weight", projection=kind)
    name = layout.name(BAD, kind, "weight")
    assert [key for key in healthy if healthy[key].tobytes() != broken[key].tobytes()] == [name]
    if layout.arrangement != "expert":
        old = np.frombuffer(healthy[name].tobytes(), np.uint8).reshape(8, -1)
        new = np.frombuffer(broken[name].tobytes(), np.uint8).reshape(8, -1)
        assert np.flatnonzero((old != new).any(axis=1)).tolist() == [BAD]
        assert not new[BAD].any()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("fault", ["neighbour", "nibble-swap", "gate-up-swap", "duplicate-expert"])
def test_faults_that_no_scalar_shows_raise_no_alarm(layout, fault):
    if fault == "gate-up-swap" and "gate" not in layout.kinds:
        with pytest.raises(InputError) as error:
            injected(layout, fault, projection="down")
        assert error.value.code == "fault.pair"
        return
    role = "input_scale" if fault == "neighbour" and layout.with_input else "weight"
    broken = injected(layout, fault, projection="up" if "up" in layout.kinds else "down", role=role)
    findings = [item for item in audit(layout.open(broken)).findings if item.code not in layout.notes]
    assert findings == []
