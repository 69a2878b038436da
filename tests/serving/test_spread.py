"""How far one slot's value reaches on each backend, held to the rules of `serving-vllm.md` 4.4 one number at a time."""

import numpy as np
import pytest

from nvfp4viz.checkpoint import canonical
from nvfp4viz.serving import load_parameters
from nvfp4viz.serving.selection import MOE
from nvfp4viz.serving.spread import READINGS, spread_value

SHARED = (
    "vllm-flashinfer-trtllm", "vllm-flashinfer-cutedsl", "vllm-flashinfer-cutedsl-batched", "vllm-flashinfer-cutlass",
    "vllm-emulation",
)  # fmt: skip
UNREAD = (
    "vllm-marlin", "vllm-humming", "vllm-flashinfer-moe-ep-cutedsl", "vllm-flashinfer-trtllm (per-token)",
    "vllm-b12x (a16)",
)  # fmt: skip
NAN, INF = float("nan"), float("inf")
VALUES = [0.0, -1.0, 1.0, NAN, INF, -INF, 1e38, 1e-38, 0.002]


@pytest.fixture(scope="module")
def layer(make_model):
    checkpoint = make_model()
    return load_parameters(checkpoint, canonical(checkpoint))[0][1]


def by_name(layer, projection, value, expert=5):
    return {spread.reading.name: spread for spread in spread_value(layer, projection, expert, value)}


def reached(layer, projection, value, expert=5):
    return {name: spread.reached for name, spread in by_name(layer, projection, value, expert).items()}


def largest(numbers):
    """``torch.max`` of a few numbers: a NaN wins."""
    result = numbers[0]
    for number in numbers[1:]:
        result = number if np.isnan(number) or number > result else result
        if np.isnan(result):
            break
    return result


def by_hand(layer, name, projection, expert, value):
    """One backend by the rules as they stand, an expert at a time: input scale, encode scale, alpha, ``g1_scale_c``."""
    one, each = np.float32(1), range(layer.experts)
    w13 = [[np.float32(layer.w13_input_scale[e, s]) for s in range(2)] for e in each]
    w2 = [np.float32(layer.w2_input_scale[e]) for e in each]
    if projection == "down":
        w2[expert] = np.float32(value)
    elif projection in ("gate", "up"):
        w13[expert][("gate", "up").index(projection)] = np.float32(value)
    ones = [one] * layer.experts
    if name == "vllm-cutlass":
        a13, a2 = [largest(pair) for pair in w13], w2
    elif name.endswith(("(per-token)", "(a16)")):
        a13, a2 = ones, ones
    else:
        a13, a2 = [largest([x for pair in w13 for x in pair])] * layer.experts, [largest(w2)] * layer.experts
    scale_2 = [[np.float32(layer.w13_weight_scale_2[e, 0]), np.float32(layer.w2_weight_scale_2[e])] for e in each]
    plain = name in ("vllm-emulation", "vllm-b12x (a16)")
    g1 = [scale_2[e][0] if plain else scale_2[e][0] * a13[e] for e in each]
    g2 = [scale_2[e][1] if plain else scale_2[e][1] * a2[e] for e in each]
    scale_c = [g1[e] * (one / a2[e]) for e in each] if "trtllm" in name else None
    a, alpha = (a2, g2) if projection == "down" else (a13, g1)
    return a, [one / x for x in a], alpha, scale_c


def bits(numbers):
    """Equal numbers, equal zeros' signs; all NaN count as one."""
    return ["nan" if np.isnan(number) else np.float32(number).tobytes() for number in numbers]


def test_all_eleven_backends_are_there_and_one_is_open():
    assert {reading.backend for reading in READINGS} == {row.id for row in MOE}
    assert len({row.id for row in MOE}) == 11
    assert [reading.name for reading in READINGS if reading.rule == "open"] == ["vllm-b12x"]


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["vllm-cutlass", *SHARED, *UNREAD[3:]])
def test_what_is_read_inverted_and_multiplied_is_the_scalar_rule(layer, name, projection, value):
    spread = by_name(layer, projection, value)[name]
    with np.errstate(all="ignore"):
        a, encode, alpha, scale_c = by_hand(layer, name, projection, 5, value)
        before = by_hand(layer, name, projection, 5, layer.values("input_scale", projection)[5])
    assert spread.product == ("w2" if projection == "down" else "w13")
    assert bits(spread.before) == bits(before[0])
    assert bits(spread.after) == bits(a)
    assert bits(spread.gscale) == bits(encode)
    assert bits(spread.alpha) == bits(alpha)
    assert (spread.scale_c is None) == (scale_c is None)
    if scale_c is not None:
        assert bits(spread.scale_c) == bits(scale_c)
    old, new = ([part for part in parts if part] for parts in (before, (a, encode, alpha, scale_c)))
    other = [any(bits([x[e]]) != bits([y[e]]) for x, y in zip(old, new, strict=True)) for e in range(layer.experts)]
    assert spread.changed.tolist() == other


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
    assert found.pop("vllm-cutlass") == alone
    assert {found.pop(name) for name in SHARED} == {shared}
    # Down's input scale is replaced by one there.
    assert found.pop("vllm-flashinfer-b12x") == (0 if projection == "down" else shared)
    assert {found.pop(name) for name in UNREAD} == {0}
    assert found == {"vllm-b12x": None}


def test_the_larger_of_gate_and_up_hides_the_smaller(layer):
    gate, up = layer.w13_input_scale[5]
    low, high = ("gate", "up") if gate < up else ("up", "gate")
    assert reached(layer, low, 0.0)["vllm-cutlass"] == 0
    assert reached(layer, high, 0.0)["vllm-cutlass"] == 1


def test_a_zero_of_an_expert_s_own_has_no_inverse_and_no_product(layer):
    alone = by_name(layer, "down", 0.0)["vllm-cutlass"]
    assert np.isinf(alone.gscale[5])
    assert alone.alpha[5] == 0
    assert alone.changed.tolist() == [e == 5 for e in range(8)]


def test_what_the_facts_do_not_say_is_left_open(layer):
    found = by_name(layer, "gate", NAN)
    nothing = found["vllm-b12x"]
    assert {nothing.before, nothing.after, nothing.gscale, nothing.alpha, nothing.changed} == {None}
    first = found["vllm-flashinfer-b12x"]
    assert first.alpha is None
    assert np.isnan(first.after).all()
    assert found["vllm-humming"].alpha is found["vllm-flashinfer-moe-ep-cutedsl"].alpha is None
    second = by_name(layer, "down", NAN)["vllm-flashinfer-b12x"]
    assert second.after is None
    assert (second.gscale == 1).all()


def test_a_bad_down_slot_reaches_trtllm_s_first_product(layer):
    """``g1_scale_c`` has both input scales in it."""
    spread = by_name(layer, "down", NAN)["vllm-flashinfer-trtllm"]
    assert np.isnan(spread.scale_c).all()
    assert np.isfinite(by_name(layer, "down", 0.0)["vllm-flashinfer-trtllm"].scale_c).all()


def test_a_new_maximum_replaces_everybody_s_scale(layer):
    value = float(layer.w2_input_scale.max()) * 3
    for name in SHARED:
        shared = by_name(layer, "down", value, 0)[name]
        assert (shared.after == np.float32(value)).all()
        assert (shared.before == layer.w2_input_scale.max()).all()


def test_its_own_value_changes_nothing_and_the_layer_is_left_alone(layer):
    before = layer.w2_input_scale.copy()
    assert set(reached(layer, "down", float(before[5])).values()) == {0, None}
    reached(layer, "down", NAN)
    assert (layer.w2_input_scale == before).all()
