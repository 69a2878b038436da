"""How far one slot's value reaches on each backend; rules of `serving-vllm.md` 4.4."""

import numpy as np
import pytest

from nvfp4viz.checkpoint import canonical
from nvfp4viz.serving import load_parameters
from nvfp4viz.serving.spread import W4A4_BACKENDS, spread_value

SHARED = ("vllm-flashinfer-cutlass", "vllm-flashinfer-trtllm", "vllm-emulation")
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def layer(make_model):
    checkpoint = make_model()
    return load_parameters(checkpoint, canonical(checkpoint))[0][1]


def reached(layer, projection, value, expert=5):
    return {spread.backend: spread.reached for spread in spread_value(layer, projection, expert, value)}


@pytest.mark.parametrize(
    ("projection", "value", "alone", "shared"),
    [
        ("down", 0.0, 1, 0),
        ("down", -1.0, 1, 0),
        ("down", NAN, 1, 8),
        ("down", INF, 1, 8),
        ("down", 1e38, 1, 8),
        ("gate", NAN, 1, 8),
        ("up", 1.0, 1, 8),
    ],
)
def test_who_computes_with_another_scale(layer, projection, value, alone, shared):
    found = reached(layer, projection, value)
    assert found["vllm-cutlass"] == alone
    assert [found[name] for name in SHARED] == [shared] * 3
    assert found["vllm-marlin"] == 0
    assert tuple(found) == W4A4_BACKENDS


def test_the_larger_of_gate_and_up_hides_the_smaller(layer):
    gate, up = layer.w13_input_scale[5]
    low, high = ("gate", "up") if gate < up else ("up", "gate")
    assert reached(layer, low, 0.0)["vllm-cutlass"] == 0
    assert reached(layer, high, 0.0)["vllm-cutlass"] == 1


def test_what_is_read_inverted_and_multiplied(layer):
    by = {spread.backend: spread for spread in spread_value(layer, "down", 5, 0.0)}
    alone = by["vllm-cutlass"]
    assert alone.product == "w2"
    assert alone.after[5] == 0
    assert np.isinf(alone.gscale[5])
    assert alone.alpha[5] == 0
    assert alone.changed.tolist() == [e == 5 for e in range(8)]
    by = {spread.backend: spread for spread in spread_value(layer, "down", 5, NAN)}
    assert np.isnan(by["vllm-flashinfer-cutlass"].after).all()
    assert by["vllm-marlin"].after is None
    # The emulation's alphas stay weight_scale_2: only what it reads is NaN.
    assert np.isfinite(by["vllm-emulation"].alpha).all()
    assert by["vllm-emulation"].reached == 8


def test_a_new_maximum_replaces_everybody_s_scale(layer):
    value = float(layer.w2_input_scale.max()) * 3
    shared = next(s for s in spread_value(layer, "down", 0, value) if s.backend == SHARED[0])
    assert (shared.after == np.float32(value)).all()
    assert (shared.before == layer.w2_input_scale.max()).all()


def test_its_own_value_changes_nothing_and_the_layer_is_left_alone(layer):
    before = layer.w2_input_scale.copy()
    assert set(reached(layer, "down", float(before[5])).values()) == {0}
    reached(layer, "down", NAN)
    assert (layer.w2_input_scale == before).all()
