"""Round trip in every layout: a fault that is injected is what the audit finds."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, run_audit
from nvfp4viz.audit.deep_findings import deepen
from nvfp4viz.checkpoint import FAULTS, canonical, inject, inject_tensors, write_checkpoint
from nvfp4viz.checkpoint.injection import promised
from nvfp4viz.errors import InputError
from tests.audit.layouts import HIDDEN, LAYOUTS, SIZES, bf16, modelopt

BAD = 3
CELLS = [
    pytest.param(layout, fault, role, id=f"{layout.id}-{fault.id}-{role}")
    for layout in LAYOUTS.values()
    for fault in FAULTS.values()
    if fault.findings and not fault.deep and fault.id != "pair-mismatch"
    for role in fault.roles
    if role in layout.roles
]


# A layer has one number for all experts, and none to hold it to; but a scale of 1.0 speaks for itself.
NO_PEERS = [("scaled", "input_scale"), ("scaled", "weight_scale_2"), ("reciprocal", "input_scale")]


def injected(layout, fault, at_layer=0, **place):
    return inject_tensors(
        layout.tensors(), fault, layer=at_layer, expert=BAD, config=layout.config, hf_quant_config=layout.quant, **place
    )


@pytest.mark.parametrize(("layout", "fault", "role"), CELLS)
def test_what_is_injected_is_found(layout, fault, role):
    tensors = injected(layout, fault.id, projection="down", role=role, seed=7)
    findings = [item for item in audit(layout.open(tensors)).findings if item.code not in layout.notes]
    codes = promised(canonical(layout.open()), fault.id, layer=0, expert=BAD, projection="down", role=role)
    if layout.id == "Inkling" and fault.id == "missing" and role != "weight_scale_2":
        assert (findings, codes) == ([], ())  # its names are not public
        return
    # A scale without peers of its own kind can only be judged by its class.
    assert bool(codes) == (layout.arrangement != "fused" or (fault.id, role) not in NO_PEERS)
    if not codes or (layout.arrangement == "fused" and fault.id == "random-bits"):
        assert {item.code for item in findings} <= {*codes, *({"scale.convention"} if role == "weight_scale_2" else ())}
        return
    [finding] = findings
    assert finding.code in codes
    if finding.code == "scale.convention":
        return
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
    shared = layout.arrangement == "fused"
    role = "input_scale" if fault == "neighbour" and layout.with_input and not shared else "weight"
    broken = injected(layout, fault, projection="up" if "up" in layout.kinds else "down", role=role)
    findings = [item for item in audit(layout.open(broken)).findings if item.code not in layout.notes]
    assert findings == []


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
def test_a_number_that_all_experts_share_has_no_neighbour(layout, role):
    if role not in layout.roles:
        return
    if layout.arrangement == "fused":
        with pytest.raises(InputError) as error:
            injected(layout, "neighbour", projection=layout.kinds[-1], role=role)
        assert error.value.code == "fault.no-neighbour"
    else:
        name = layout.name(BAD, layout.kinds[-1], role)
        broken = injected(layout, "neighbour", projection=layout.kinds[-1], role=role)
        assert broken[name].tobytes() != layout.tensors()[name].tobytes()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_neighbours_codes_are_what_deep_finds(layout, tmp_path):
    """Two equal numbers prove nothing; two equal matrices do."""
    write_checkpoint(tmp_path / "a", layout.tensors(), config=layout.config, hf_quant_config=layout.quant)
    layer = canonical(layout.open()).moe_layers[0]
    for role in ("weight", *(["input_scale"] if layout.with_input and layout.arrangement != "fused" else [])):
        place = {"layer": layer, "expert": BAD, "projection": layout.kinds[-1], "role": role}
        done = inject(tmp_path / "a", tmp_path / role, "neighbour", **place)
        found = {item.code for item in deepen(run_audit(tmp_path / role)).report.findings} - set(layout.notes)
        assert set(done.findings) == found == ({"weight.duplicate-expert"} if role == "weight" else set())


@pytest.mark.parametrize("id", [id for id, layout in LAYOUTS.items() if layout.block == "MXFP4"])
def test_a_nan_among_exponents_is_what_deep_finds(id):
    """0xFF is E8M0's NaN, whether the file calls the type F8_E8M0 or U8; a sign it does not have."""
    layout = LAYOUTS[id]
    kind = layout.kinds[-1]
    layer = canonical(layout.open()).moe_layers[0]
    healthy, name = layout.tensors(), layout.name(BAD, kind, "weight_scale")
    broken = injected(layout, "block-nan", projection=kind, at_layer=layer)
    old, new = (np.frombuffer(some[name].tobytes(), np.uint8) for some in (healthy, broken))
    [place] = np.flatnonzero(old != new)
    assert new[place] == 0xFF
    [finding] = [
        item for item in deepen(run_audit(layout.open(broken))).report.findings if item.code not in layout.notes
    ]
    assert (finding.code, finding.experts, finding.count) == ("block-scale.nan", (BAD,), 1)
    with pytest.raises(InputError) as error:
        injected(layout, "block-negative", projection=kind, at_layer=layer)
    assert error.value.code == "fault.format"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
def test_what_a_layout_never_has_is_not_called_missing(layout, role):
    view = canonical(layout.open())
    layer, kind = view.moe_layers[0], layout.kinds[-1]
    if role in layout.roles:
        return
    for fault in ("missing", "zero", "nan", "constant"):
        with pytest.raises(InputError) as error:
            injected(layout, fault, projection=kind, role=role, at_layer=layer)
        assert error.value.code == "fault.never"
        assert "missing already" not in str(error.value)


def test_experts_that_are_not_quantised_have_a_weight_and_no_codes():
    """A BF16 layer beside others: what it lacks by nature is not missing, and nothing is promised of its bytes."""
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    for expert in range(8):
        for kind in layout.kinds:
            name = layout.name(expert, kind, "weight").replace("layers.0.", "layers.1.")
            tensors[name] = bf16(*SIZES[kind])
    tensors[f"{layout.prefix.replace('layers.0.', 'layers.1.').rpartition('.')[0]}.gate.weight"] = bf16(8, HIDDEN)
    config, quant = {**layout.config, "num_hidden_layers": 2}, modelopt(exclude=("*mlp.gate", "model.layers.1.*"))
    view = canonical(layout.open(tensors, config=config, quant=quant))
    for fault, role, code in [
        ("zero", None, "fault.never"), ("missing", "weight_scale", "fault.never"), ("block-nan", None, "fault.never"),
        ("zero-weight", None, "fault.format"), ("duplicate-expert", None, "fault.format"),
        ("nibble-swap", None, "fault.format"),
    ]:  # fmt: skip
        place = {"layer": 1, "expert": BAD, "projection": "up", "role": role}
        with pytest.raises(InputError) as error:
            inject_tensors(tensors, fault, config=config, hf_quant_config=quant, **place)
        assert error.value.code == code, fault
    place = {"layer": 1, "expert": BAD, "projection": "up", "role": "weight"}
    broken = inject_tensors(tensors, "missing", config=config, hf_quant_config=quant, **place)
    [finding] = audit(layout.open(broken, config=config, quant=quant)).findings
    assert promised(view, "missing", **place) == (finding.code,)


def test_a_pair_needs_both_of_its_halves():
    layout = LAYOUTS["non-gated"]
    for fault in ("pair-mismatch", "gate-up-swap"):
        with pytest.raises(InputError) as error:
            injected(layout, fault, projection="up")
        assert error.value.code == "fault.pair"


NUMBERS = [
    ("neighbour", None), ("constant", 0.0), ("constant", -1.0), ("constant", 1e-41), ("constant", 3.0),
    ("constant", None), ("scaled", 0.0), ("scaled", -2.0), ("scaled", 1.0), ("scaled", 1e6), ("scaled", 1e-44),
    ("reciprocal", None), ("random-bits", None), ("pair-mismatch", 1.0), ("pair-mismatch", None), ("zero", None),
    ("inf", None),
]  # fmt: skip
PLAUSIBLE = {"scale.outlier", "scale.filled", "scale.identity"}


@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_inject_promises_is_what_the_copys_audit_says(layout, role, tmp_path):
    """Whatever number stands there in the end, in every projection: found where promised, unseen where not."""
    if role not in layout.roles:
        return
    write_checkpoint(tmp_path / "a", layout.tensors(), config=layout.config, hf_quant_config=layout.quant)
    view = canonical(layout.open())
    for number, (fault, value) in enumerate(NUMBERS):
        for kind in layout.kinds:
            paired = role == "weight_scale_2" and kind in ("gate", "up") and "gate" in layout.kinds
            if fault == "pair-mismatch" and not paired:
                continue
            out = tmp_path / f"{number}-{kind}"
            place = {"layer": 0, "expert": BAD, "projection": kind, "role": role, "value": value, "seed": number}
            slot = view.slot(0, BAD, kind, role)
            if fault == "neighbour" and view.is_whole(0) and slot.index is None:
                # One number for all experts.
                with pytest.raises(InputError) as error:
                    inject(tmp_path / "a", out, fault, **place)
                assert error.value.code == "fault.no-neighbour"
                continue
            done = inject(tmp_path / "a", out, fault, **place)
            codes = [item.code for item in audit(out).findings if item.code not in layout.notes]
            # Gate and up share a scale of weights, and not one of activations.
            assert paired or "scale.pair-mismatch" not in done.findings
            assert "scale.identity" not in done.findings or len(done.findings) == 1
            if PLAUSIBLE & set(done.findings):
                assert set(codes) <= set(done.findings), (fault, value, kind)
            else:
                assert codes == list(done.findings), (fault, value, kind)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_duplicate_is_one_whatever_its_weights_are_called(layout, tmp_path):
    """Inkling's weights, whose names were guessed, are copied like all others."""
    write_checkpoint(tmp_path / "a", layout.tensors(), config=layout.config, hf_quant_config=layout.quant)
    layer = canonical(layout.open()).moe_layers[0]
    place = {"layer": layer, "expert": BAD, "projection": layout.kinds[-1]}
    done = inject(tmp_path / "a", tmp_path / "b", "duplicate-expert", **place)
    assert done.findings == ("weight.duplicate-expert",)
    copied = set(done.changed)
    for kind in layout.kinds:
        assert layout.name(BAD, kind, "weight") in copied
        assert layout.name(BAD, kind, "weight_scale") in copied
    found = [item for item in deepen(run_audit(tmp_path / "b")).report.findings if item.code not in layout.notes]
    assert {item.code for item in found} == {"weight.duplicate-expert"}
    assert BAD in {expert for item in found for expert in item.experts or ()}
    healthy = [item.code for item in deepen(run_audit(tmp_path / "a")).report.findings]
    assert "weight.duplicate-expert" not in healthy
