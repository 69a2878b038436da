"""The three paths give the same bits: scalar reference, NumPy, Numba."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import quant
from nvfp4viz.formats import pack_nibbles
from tests.quant import recipe_cases as cases

ALL = tuple(quant.RECIPES)
UNDER_EVERY_SCALE = [(r, s) for r in quant.NVFP4_RECIPES for s in cases.GLOBAL_SCALES] + [
    (r, "one")
    for r in quant.MXFP4_RECIPES  # MXFP4 has no global scale
]


@pytest.mark.parametrize(("recipe", "name"), UNDER_EVERY_SCALE)
def test_edges_under_every_global_scale(recipe: str, name: str) -> None:
    edges = cases.edge_blocks()
    for x in (edges, cases.to_bf16(edges)):
        cases.assert_same(x, recipe, name, "reference", "numpy", "numba")


@pytest.mark.parametrize("recipe", ALL)
def test_all_bf16_patterns_by_the_reference(recipe: str) -> None:
    cases.assert_same(cases.bf16_patterns(shuffled=False), recipe, "usual", "reference", "numpy")


@pytest.mark.parametrize(("recipe", "name"), UNDER_EVERY_SCALE)
def test_all_bf16_patterns_under_every_global_scale(recipe: str, name: str) -> None:
    for x in (cases.bf16_patterns(False), cases.bf16_patterns(True), cases.finite_bf16_patterns()):
        cases.assert_same(x, recipe, name, "numpy", "numba")
    cases.assert_same(cases.bf16_patterns(True).astype(np.float32), recipe, name, "numpy", "numba")


@pytest.mark.parametrize("recipe", ALL)
def test_random_float32_patterns(recipe: str) -> None:
    rng = np.random.default_rng(11)
    anything = rng.integers(0, 1 << 32, (1024, 32), dtype=np.uint32).view(np.float32)
    sizes = rng.integers(-30, 30, (1024, 1))
    numbers = np.ldexp(rng.standard_normal((1024, 32)), sizes).astype(np.float32)
    for x in (anything, numbers):
        cases.assert_same(x[:100], recipe, "usual", "reference", "numpy")
        for name in ("one", "usual", "tiny"):
            cases.assert_same(x, recipe, name, "numpy", "numba")


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "name"), UNDER_EVERY_SCALE)
def test_all_bf16_patterns_by_the_reference_under_every_global_scale(recipe: str, name: str) -> None:
    for x in (cases.bf16_patterns(False), cases.bf16_patterns(True), cases.finite_bf16_patterns()):
        cases.assert_same(x, recipe, name, "reference", "numpy")


@pytest.mark.parametrize("recipe", ALL)
def test_every_code_under_every_scale_byte_decodes_alike(recipe: str) -> None:
    """16 codes × 256 bytes, under ordinary and garbage global scales, to float32 and to BF16: equal bits, NaN too."""
    block = quant.RECIPES[recipe].block_size
    packed = np.tile(pack_nibbles(np.tile(np.arange(16, dtype=np.uint8), block // 16)), (256, 1))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    names = ("usual", "zero", "minus inf", "nan", "negative", "subnormal", "1e38") if block == 16 else ("one",)
    for name in names:
        given = cases.scale_for(recipe, name)
        q = quant.QuantizedTensor(
            packed, scales, np.float32(1) if given is None else given, recipe, block, (256, block)
        )  # fmt: skip
        for dtype in (np.float32, ml_dtypes.bfloat16):
            first, *others = (quant.dequantize(q, dtype, path=path) for path in cases.PATHS)
            assert first.dtype == dtype
            for other in others:
                assert first.tobytes() == other.tobytes(), (recipe, name, dtype)


def test_decoded_values_are_code_times_scale() -> None:
    """Against exact arithmetic in float64: two roundings, so half an ulp of float32 each, and 2^-23 covers both."""
    q = quant.quantize(np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32), recipe="vllm-cuda")
    from nvfp4viz.formats import decode_e2m1, decode_e4m3

    exact = decode_e2m1(q.codes()).astype(np.float64) * np.repeat(decode_e4m3(q.scales).astype(np.float64), 16, axis=1)
    exact *= np.float64(q.decode_scale)
    assert np.abs(quant.dequantize(q) - exact).max() <= np.abs(exact).max() * 2.0**-23


@pytest.mark.parametrize("recipe", ALL)
def test_leading_axes_and_strides_do_not_matter(recipe: str) -> None:
    x = np.random.default_rng(3).standard_normal((2, 3, 4, 64)).astype(np.float32)
    given = cases.scale_for(recipe, "usual")
    whole = quant.quantize(x, recipe=recipe, global_scale=given)
    assert whole.packed.shape == (2, 3, 4, 32)
    assert whole.scales.shape == (2, 3, 4, 64 // whole.block_size)
    assert quant.dequantize(whole).shape == x.shape
    for path in cases.PATHS:
        strided = quant.quantize(x[:, ::2, 1], recipe=recipe, global_scale=given, path=path)
        assert np.array_equal(strided.packed, whole.packed[:, ::2, 1])
        assert np.array_equal(strided.scales, whole.scales[:, ::2, 1])
    one = quant.quantize(x[1, 2, 3], recipe=recipe, global_scale=given)
    assert np.array_equal(one.packed, whole.packed[1, 2, 3])


def test_results_are_read_only_and_the_input_is_left_alone() -> None:
    x = np.ones((2, 32), np.float32)
    for path in cases.PATHS:
        q = quant.quantize(x, recipe="modelopt", path=path)
        values = quant.dequantize(q, path=path)
        for array in (q.packed, q.scales, values):
            assert not array.flags.writeable
    assert (x == 1).all()
    assert x.flags.writeable


def test_large_tensors_are_cut_into_portions_without_a_seam() -> None:
    """The NumPy path works on portions of rows; the last one is ragged here."""
    x = np.random.default_rng(4).standard_normal((301, 1024)).astype(np.float32)
    for recipe in ("modelopt", "ocp-floor"):
        given = cases.scale_for(recipe, "usual")
        whole = quant.quantize(x, recipe=recipe, global_scale=given, path="numpy")
        parts = [quant.quantize(row, recipe=recipe, global_scale=given, path="numpy") for row in x[::50]]
        assert np.array_equal(whole.packed[::50], np.stack([part.packed for part in parts]))
