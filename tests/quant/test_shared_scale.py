"""One weight_scale_2 for parts that had their own: five ways, and what each changes."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import decode_e4m3, encode_e4m3
from nvfp4viz.quant import dequantize, quantize
from nvfp4viz.quant.shared_scale import SHARE_WAYS, share_scale


def weights(*sizes, rows=8, columns=64, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal((rows, columns)) * size).astype(ml_dtypes.bfloat16)
        for name, size in zip("qkvz", sizes, strict=False)
    }


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([1e-30, 0.02, 1.0, 1.0, 3.0, 700.0, 1e30]), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_both_paths_give_the_same_bits(sizes, wide, seed):
    parts = weights(*sizes, rows=3, columns=32, seed=seed)
    if wide:
        parts = {name: weight.astype(np.float32) * np.float32(1.0001) for name, weight in parts.items()}
    fast, slow = share_scale(parts), share_scale(parts, "reference")
    for way in SHARE_WAYS:
        for name in parts:
            a, b = fast[way][name], slow[way][name]
            assert (a.own_scale, a.used_scale, a.factor) == (b.own_scale, b.used_scale, b.factor)
            assert a.quantized.packed.tobytes() == b.quantized.packed.tobytes()
            assert a.quantized.scales.tobytes() == b.quantized.scales.tobytes()
            assert a.decoded.tobytes() == b.decoded.tobytes()


def test_equal_maxima_make_all_ways_the_same_bits():
    one = weights(1.0)["q"]
    found = share_scale({"gate": one, "up": np.negative(one)})
    for way in SHARE_WAYS:
        for name in ("gate", "up"):
            part, own = found[way][name], found["own"][name]
            assert part.factor == 1
            assert np.array_equal(part.quantized.packed, own.quantized.packed)
            assert np.array_equal(part.quantized.scales, own.quantized.scales)
            assert np.array_equal(part.decoded.view(np.uint32), own.decoded.view(np.uint32))


def test_the_maximum_keeps_codes_and_block_scales_and_makes_values_too_large():
    found = share_scale(weights(1.0, 3.0, 0.5))
    most = max(part.own_scale for part in found["own"].values())
    for name, part in found["max"].items():
        own = found["own"][name]
        assert part.used_scale == most
        assert np.array_equal(part.quantized.packed, own.quantized.packed)
        assert np.array_equal(part.quantized.scales, own.quantized.scales)
        assert part.factor == float(most / own.own_scale) >= 1
        np.testing.assert_allclose(part.decoded, own.decoded * part.factor, rtol=4 * 2.0**-24)  # three roundings
    largest = found["max"]["k"]
    assert largest.factor == 1
    assert largest.summary == found["own"]["k"].summary


def test_the_first_part_s_scale_is_the_first_part_s():
    found = share_scale(weights(1.0, 3.0))["first"]
    assert found["q"].factor == 1
    assert found["k"].used_scale == found["q"].own_scale
    assert found["k"].factor < 1


def test_rerounding_moves_the_difference_into_the_block_scales():
    found = share_scale(weights(1.0, 3.0))
    own, part = found["own"]["q"], found["rerounded"]["q"]
    assert np.array_equal(part.quantized.packed, own.quantized.packed)
    expected = encode_e4m3(decode_e4m3(own.quantized.scales) * (own.own_scale / part.used_scale))
    assert np.array_equal(part.quantized.scales, expected)
    # E4M3 keeps three bits behind the point: at most 1/16 off, however different the maxima were.
    np.testing.assert_allclose(part.decoded, own.decoded, rtol=1 / 16 + 1e-6)


def test_shared_is_the_quantiser_s_own_result():
    parts = weights(1.0, 3.0)
    found = share_scale(parts)["shared"]
    for name, weight in parts.items():
        q = quantize(weight, recipe="modelopt", global_scale=found["k"].own_scale)
        assert np.array_equal(q.packed, found[name].quantized.packed)
        assert np.array_equal(dequantize(q), found[name].decoded)


def test_a_power_of_two_costs_a_shared_scale_nothing_and_the_maximum_everything():
    one = weights(1.0)["q"]
    found = share_scale({"q": one, "k": (one.astype(np.float32) * 4).astype(ml_dtypes.bfloat16)})
    assert found["rerounded"]["q"].summary == found["shared"]["q"].summary == found["own"]["q"].summary
    assert found["max"]["q"].factor == 4
    assert found["max"]["q"].summary.sqnr_db < 0  # the error, 3 w, is larger than w


def test_order_decides_only_the_first():
    parts = weights(1.0, 3.0)
    forth, back = share_scale(parts), share_scale(dict(reversed(parts.items())))
    for way in ("own", "max", "rerounded", "shared"):
        for name in parts:
            assert forth[way][name].summary == back[way][name].summary
    assert forth["first"]["k"].factor != back["first"]["k"].factor


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"q": np.ones((2, 20), np.float32)},
        {"q": np.ones((2, 16), np.float32), "k": np.ones((2, 32), np.float32)},
        {"q": np.zeros((2, 16), np.float32)},
        {"q": np.full((2, 16), np.nan, np.float32)},
        {"q": np.full((2, 16), np.inf, np.float32)},
        {"q": np.ones(16, np.float32)},
        {"q": np.ones((0, 16), np.float32)},
    ],
)
def test_what_cannot_be_is_refused(parts):
    with pytest.raises(FormatError) as caught:
        share_scale(parts)
    assert caught.value.code == "shared.parts"
