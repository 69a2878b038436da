"""One tensor in MXFP4 and NVFP4, MXFP4's rules on one block, and where they part."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import decode_e2m1, decode_e4m3, decode_ue8m0
from nvfp4viz.quant import dequantize, quantize
from nvfp4viz.quant.recipes import MXFP4_RECIPES
from nvfp4viz.quant.schemes import (
    SCHEMES,
    compare_rules,
    compare_schemes,
    layer_bytes,
    rule_binade,
    scale_facts,
)


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    rng = np.random.default_rng(7)
    sizes = 2.0 ** rng.integers(-4, 4, 96)
    return (rng.standard_normal((5, 96)) * sizes).astype(np.float32).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("recipe", MXFP4_RECIPES)
def test_both_schemes_are_the_recipes_own(x, recipe):
    mx, half, nv = compare_schemes(x, recipe)
    for one, name in ((mx, recipe), (nv, "vllm-cuda")):
        q = quantize(x, recipe=name, path="reference")
        assert np.array_equal(one.scale_bytes, q.scales)
        assert np.array_equal(one.decoded.view(np.uint32), dequantize(q, path="reference").view(np.uint32))
    assert half.scale_bytes.shape == nv.scale_bytes.shape
    # Each half block is what the recipe makes of it with nothing beside it.
    for row, at in np.ndindex(*half.scale_bytes.shape):
        alone = np.zeros((1, 32), x.dtype)
        alone[0, :16] = x[row, 16 * at : 16 * at + 16]
        q = quantize(alone, recipe=recipe, path="reference")
        assert half.scale_bytes[row, at] == q.scales[0, 0]
        assert np.array_equal(half.decoded[row, 16 * at : 16 * at + 16], dequantize(q)[0, :16])


def test_errors_and_counts_are_counted_again(x):
    values = x.astype(np.float64)
    for one in compare_schemes(x, "ocp-floor"):
        difference = one.decoded.astype(np.float64) - values
        assert one.summary.mse == pytest.approx((difference**2).mean(), rel=1e-12)  # other order of summation
        assert one.summary.zeroed == int(((values != 0) & (one.decoded == 0)).sum())
        assert sum(blocks for _, _, blocks in one.used()) == one.scale_bytes.size
        assert len({byte for byte, _, _ in one.used()}) == len(one.used())
    mx = compare_schemes(x, "ocp-floor")[0]
    beyond = [
        abs(Fraction(float(values[row, k]))) > 6 * Fraction(float(mx.scales[row, k // 32]))
        for row, k in np.ndindex(*values.shape)
    ]
    assert mx.summary.clipped == sum(beyond) > 0


def test_ceilings_clip_nothing(x):
    for recipe in ("flashinfer-ceil", "deepgemm-ceil", "modelopt-mxfp4"):
        assert compare_schemes(x, recipe)[0].summary.clipped == 0


def test_ceilings_clip_no_bf16_maximum():
    for exponent in range(-126, 128):
        binade = rule_binade(exponent)
        for recipe in ("flashinfer-ceil", "deepgemm-ceil", "modelopt-mxfp4"):
            assert not binade.clips(recipe).any()


def test_a_zero_tensor_has_no_error():
    for one in compare_schemes(np.zeros((2, 32), np.float32)):
        assert (one.summary.mse, one.summary.zeroed, one.summary.clipped) == (0, 0, 0)


@pytest.mark.parametrize(
    "bad", [np.zeros((2, 16), np.float32), np.zeros(32, np.float32), np.full((1, 32), np.nan, np.float32)]
)
def test_what_cannot_be_compared_is_refused(bad):
    with pytest.raises(FormatError) as caught:
        compare_schemes(bad)
    assert caught.value.code == "compare.shape"


@pytest.mark.parametrize("recipes", [("ieee", "vllm-cuda"), ("vllm-even", "ocp-floor")])
def test_a_recipe_of_the_other_scheme_is_refused(recipes):
    with pytest.raises(FormatError) as caught:
        compare_schemes(np.ones((1, 32), np.float32), *recipes)
    assert caught.value.code == "recipe.unknown"


def test_scale_facts_are_the_tables():
    mx, nv = scale_facts()
    assert (mx.smallest, mx.largest, mx.nan, mx.zero) == (2.0**-127, 2.0**127, 255, False)
    assert (nv.smallest, nv.largest, nv.nan, nv.zero) == (2.0**-9, 448.0, 0x7F, True)
    for facts, table in ((mx, decode_ue8m0), (nv, decode_e4m3)):
        values = table(np.arange(256 if facts is mx else 128, dtype=np.uint8))
        assert facts.values == len({float(v) for v in values if v > 0})


@pytest.mark.parametrize("top", [4.0, 5.9, 6.0, 6.5, 7.0, 7.5, 2.0**-20, 1e30])
def test_a_traced_block_is_the_recipe_s(top):
    block = np.float32([top, *(top * np.linspace(-0.9, 0.9, 31))])
    for name, trace in compare_rules(block).items():
        q = quantize(block, recipe=name, path="numpy")
        assert trace.scale_byte == q.scales[0]
        assert np.array_equal(trace.codes, q.codes())
        assert np.array_equal(trace.decoded.view(np.uint32), dequantize(q, path="numpy").view(np.uint32))
        assert trace.top == 0
        assert trace.clips_top == (Fraction(float(np.float32(top))) > 6 * Fraction(float(trace.scale)))
        kept = trace.codes & 7 != 0
        assert np.array_equal(trace.decoded[kept], (decode_e2m1(trace.codes) * trace.scale)[kept])


def test_where_floor_and_even_clip():
    clip = {name: [t for t in (4.0, 6.0, 6.5, 7.0, 7.5) if _trace(t, name).clips_top] for name in MXFP4_RECIPES}
    assert clip.pop("ocp-floor") == [6.5, 7.0, 7.5]
    assert clip.pop("vllm-even") == [6.5]
    assert set(map(tuple, clip.values())) == {()}


def _trace(top, name):
    return compare_rules(np.float32([top] + [1] * 31))[name]


def test_where_even_clips_the_larger_scale_gives_the_same_value():
    """What the page says of vllm-even: for every BF16 maximum that it clips, a ceiling's value is the same."""
    binade = rule_binade(2)
    clipped = binade.clips("vllm-even")
    assert clipped.sum() == 31
    for ceiling in ("flashinfer-ceil", "deepgemm-ceil", "modelopt-mxfp4"):
        assert np.array_equal(binade.decoded["vllm-even"][clipped], binade.decoded[ceiling][clipped])


@pytest.mark.parametrize("exponent", [-126, -14, 0, 2, 90])
def test_a_binade_is_a_block_for_every_maximum(exponent):
    binade = rule_binade(exponent)
    for at in (0, 63, 64, 65, 96, 127):
        block = np.zeros(32, np.float32)
        block[0] = binade.tops[at]
        for name, trace in compare_rules(block).items():
            assert binade.scale_bytes[name][at] == trace.scale_byte
            assert binade.decoded[name][at] == trace.decoded[0]
    for name in MXFP4_RECIPES:
        runs = binade.runs(name)
        assert (runs[0].first, runs[-1].last) == (binade.tops[0], binade.tops[-1])
        assert len({(run.scale_byte, run.clips) for run in runs}) == len(runs)


def test_deepgemm_s_floor_parts_tiny_blocks():
    block = np.float32([2.0**-15] + [0] * 31)
    found = {name: trace.scale_byte for name, trace in compare_rules(block).items()}
    assert found.pop("deepgemm-ceil") == 112
    assert max(found.values()) < 112


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_blocks_are_followed(value):
    traces = compare_rules(np.float32([value] + [1] * 31))
    assert {trace.codes.shape for trace in traces.values()} == {(32,)}


@pytest.mark.parametrize(
    ("bad", "code"), [(np.zeros(16, np.float32), "trace.shape"), (np.zeros(32, np.float64), "quantize.dtype")]
)
def test_a_block_that_is_none_is_refused(bad, code):
    with pytest.raises(FormatError) as caught:
        compare_rules(bad)
    assert caught.value.code == code


def test_bytes_of_a_layer():
    matrices = [(2048, 4096), (2048, 4096), (4096, 2048)] * 256
    mx, nv = (layer_bytes(matrices, scheme) for scheme in ("mxfp4", "nvfp4"))
    assert mx.elements == nv.elements == 3 * 256 * 2**23
    assert mx.codes == nv.codes == mx.elements // 2
    assert (mx.block_scales, nv.block_scales) == (mx.elements // 32, mx.elements // 16)
    assert (mx.tensor_scales, nv.tensor_scales) == (0, 768 * 8)
    assert mx.bits == 4.25
    assert nv.bits == 4.5 + 64 / 2**23


def test_schemes_have_an_order(x):
    assert tuple(one.name for one in compare_schemes(x)) == SCHEMES
