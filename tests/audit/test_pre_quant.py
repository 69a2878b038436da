"""AWQ's ``pre_quant_scale``: a vector that every input is multiplied by, in whatever layout and of whatever module."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.audit import audit, pre_quant
from nvfp4viz.checkpoint import tensor, write_checkpoint
from tests.audit.layouts import EXPERTS, HIDDEN, LAYOUTS, SIZES, linear, modelopt, typed
from tests.audit.reading import found, outcomes

IDS = [
    "modelopt", "projection-major", "w1/w2/w3", "non-gated", "Gemma 4, .moe.", "compressed-tensors", "stacked", "fused",
]  # fmt: skip
KINDS = [(id, kind) for id in IDS for kind in LAYOUTS[id].kinds]
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def vector_name(layout, expert, kind):
    disk = layout.disk[kind]
    if layout.arrangement == "expert":
        return (
            f"{layout.prefix}.{f'{disk}.{expert}' if layout.projection_major else f'{expert}.{disk}'}.pre_quant_scale"
        )
    return f"{layout.prefix}.{disk}{'.' if layout.arrangement == 'stacked' else '_'}pre_quant_scale"


def with_vectors(layout, dtype=ml_dtypes.bfloat16):
    """One vector for each projection of each expert, or of all experts where they share their tensors."""
    out = layout.tensors()
    for kind in layout.kinds:
        size = SIZES[kind][1]
        for expert in range(EXPERTS):
            out[vector_name(layout, expert, kind)] = tensor(np.linspace(0.5, 2, size).astype(dtype))
    return out


def put(layout, kind, values, dtype=ml_dtypes.bfloat16):
    return {**with_vectors(layout, dtype), vector_name(layout, 3, kind): tensor(np.asarray(values).astype(dtype))}


def who(layout):
    return (3,) if layout.arrangement == "expert" else None


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("id", IDS)
def test_sound_vectors_are_silent(id, dtype):
    layout = LAYOUTS[id]
    assert found(audit(layout.open(with_vectors(layout, dtype)))) == []
    negative = np.linspace(-2, 2, SIZES["down"][1])
    # A channel's sign may have its counterpart in the weights.
    assert found(audit(layout.open(put(layout, "down", negative, dtype)))) == []


@pytest.mark.parametrize(("id", "kind"), KINDS)
@pytest.mark.parametrize("size", [16, 128, 1])
def test_a_vector_of_another_length_than_the_input(id, kind, size):
    layout = LAYOUTS[id]
    # All ones is no second finding.
    report = audit(layout.open(put(layout, kind, np.ones(size))))
    assert found(report) == [("scheme.pre-quant-scale", "error", 0, kind, who(layout))]
    [item] = [item for item in report.findings if item.severity == "error"]
    assert f"BF16[{size}]" in item.message
    assert str(SIZES[kind][1]) in item.message
    assert item.tensors == (vector_name(layout, 3, kind),)
    assert set(outcomes(report).values()) == {"load-error"}


def test_a_vector_that_is_no_vector_of_floating_point_numbers():
    layout = LAYOUTS["modelopt"]
    name = vector_name(layout, 3, "down")
    for wrong in (typed(np.ones(32, np.uint8), "U8"), tensor(np.float32(1)), tensor(np.zeros((0,), np.float32))):
        report = audit(layout.open({**with_vectors(layout), name: wrong}))
        assert found(report) == [("scheme.pre-quant-scale", "error", 0, "down", (3,))]


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize(
    ("value", "name", "outcome"), [(np.nan, "nan", "nan"), (np.inf, "inf", "nan"), (0.0, "zero", "degraded")]
)
def test_a_number_that_no_input_can_be_multiplied_by(id, dtype, value, name, outcome):
    layout = LAYOUTS[id]
    values = np.ones(SIZES["down"][1])
    values[7] = value
    report = audit(layout.open(put(layout, "down", values, dtype)))
    assert found(report) == [("scheme.pre-quant-scale", "error", 0, "down", who(layout))]
    [item] = [item for item in report.findings if item.severity == "error"]
    assert f"holds {name}." in item.message
    for item in report.backends:
        assert item.outcome == outcome
        assert item.scope == ("experts" if layout.arrangement == "expert" else "layer")
        assert name in item.why


def test_experts_with_different_faults_are_told_apart():
    layout = LAYOUTS["modelopt"]
    tensors = with_vectors(layout)
    for expert, value in ((1, np.nan), (2, 0.0), (5, np.nan)):
        values = np.ones(32)
        values[0] = value
        tensors[vector_name(layout, expert, "down")] = tensor(values.astype(ml_dtypes.bfloat16))
    tensors[vector_name(layout, 6, "down")] = tensor(np.ones(32, ml_dtypes.bfloat16))
    assert sorted(row[4] for row in found(audit(layout.open(tensors)))) == [(1, 5), (2,), (6,)]


@pytest.mark.parametrize(("value", "outcome"), [(np.nan, "nan"), (0.0, "degraded")])
def test_ordinary_layers_too(value, outcome):
    layout = LAYOUTS["modelopt"]
    base = {**layout.tensors(), **linear("model.layers.0.self_attn.o_proj")}
    name = "model.layers.0.self_attn.o_proj.pre_quant_scale"
    values = np.full(HIDDEN, 0.5, np.float32)
    assert found(audit(layout.open({**base, name: tensor(values)}))) == []
    values[3] = value
    report = audit(layout.open({**base, name: tensor(values)}))
    assert found(report) == [("scheme.pre-quant-scale", "error", 0, None, None)]
    assert set(outcomes(report).values()) == {outcome}
    report = audit(layout.open({**base, name: tensor(values[:16])}))
    assert found(report) == [("scheme.pre-quant-scale", "error", 0, None, None)]
    assert report.findings[0].text == "scheme.pre-quant-scale.shape.linear"
    assert set(outcomes(report).values()) == {"load-error"}


def test_so_are_models_without_experts():
    quant = modelopt("NVFP4_AWQ", exclude=("lm_head",))
    tensors = linear("model.layers.0.self_attn.o_proj")
    name = "model.layers.0.self_attn.o_proj.pre_quant_scale"
    layout = LAYOUTS["modelopt"]
    for value, expected in ((0.5, []), (0.0, [("scheme.pre-quant-scale", "error")])):
        vector = {name: tensor(np.full(HIDDEN, value, np.float32))}
        report = audit(layout.open({**tensors, **vector}, config={}, quant=quant))
        assert [row[:2] for row in found(report)] == expected


def test_what_is_too_large_to_read_is_said(tmp_path, monkeypatch):
    """Of files that are here the first numbers are looked at."""
    monkeypatch.setattr(pre_quant, "LIMIT", 0)
    layout = LAYOUTS["modelopt"]
    for at, expected in ((0, ["scheme.pre-quant-scale"]), (31, [])):
        values = np.full(32, 0.5)
        values[at] = np.nan
        folder = tmp_path / str(at)
        write_checkpoint(folder, put(layout, "down", values), config=layout.config, hf_quant_config=layout.quant)
        report = audit(folder)
        assert [row[0] for row in found(report)] == expected
        [note] = [item for item in report.findings if item.code == "audit.partial"]
        # One whose fault was found is not among those of which something is left open.
        assert note.count == 3 * EXPERTS - len(expected)
