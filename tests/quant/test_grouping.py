"""Blocks along K, along the rows, or in tiles: equal bits on every path, the algebra, the sizes."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import quant
from nvfp4viz.errors import FormatError
from nvfp4viz.formats import E2M1, explain, swizzle_8x4, swizzle_128x4
from nvfp4viz.quant.grouping import (
    GROUP_SHAPE,
    GROUPINGS,
    compare_grouping,
    compare_tensor,
    from_groups,
    partial_sums,
    place_of,
    quantize_along,
    storage,
    to_groups,
)
from nvfp4viz.quant.recipes import NVFP4_RECIPES


def _bf16(values: np.ndarray) -> np.ndarray:
    return np.asarray(values.astype(np.float32), ml_dtypes.bfloat16)


def _channels(rows: int, k: int, seed: int = 0) -> np.ndarray:
    """Normal values whose columns differ in size: three of them by a factor of 40."""
    rng = np.random.default_rng(seed)
    sizes = np.ones(k)
    sizes[rng.choice(k, 3, replace=False)] = 40
    return _bf16(rng.standard_normal((rows, k)) * sizes)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("along", GROUPINGS)
def test_groups_hold_what_shares_a_scale(along):
    x = np.arange(32 * 64).reshape(32, 64)
    groups = to_groups(x, along)
    rows, columns = GROUP_SHAPE[along]
    assert np.array_equal(groups[0], x[:rows, :columns].ravel())
    assert np.array_equal(groups[-1], x[-rows:, -columns:].ravel())
    assert np.array_equal(from_groups(groups, x.shape, along), x)


@pytest.mark.parametrize("along", GROUPINGS)
@pytest.mark.parametrize("recipe", NVFP4_RECIPES)
def test_all_paths_give_the_same_bits(along, recipe):
    x = _channels(16, 32)
    x[0, 0], x[3, 5], x[4] = np.nan, np.inf, 0
    truth = quantize_along(x, along, recipe, path="reference")
    for path in ("numpy", "numba", "auto"):
        found = quantize_along(x, along, recipe, path=path)
        assert _same_bits(found.codes, truth.codes)
        assert _same_bits(found.scales, truth.scales)
        assert _same_bits(np.isnan(found.decoded), np.isnan(truth.decoded))
        kept = ~np.isnan(truth.decoded)
        assert _same_bits(found.decoded[kept], truth.decoded[kept])
        assert _same_bits(found.quantized.packed, truth.quantized.packed)
        assert _same_bits(found.quantized.global_scale[None], truth.quantized.global_scale[None])


def test_along_k_is_nvfp4_itself():
    x = _channels(32, 64)
    found, plain = quantize_along(x, "k"), quant.quantize(x, recipe="vllm-cuda")
    assert _same_bits(found.codes, plain.codes())
    assert _same_bits(found.scales, plain.scales)
    assert _same_bits(found.decoded, quant.dequantize(plain))


def test_along_the_rows_is_along_k_of_the_transpose():
    x = _channels(32, 64)
    found, turned = quantize_along(x, "rows"), quantize_along(np.ascontiguousarray(x.T), "k")
    assert _same_bits(found.codes, np.ascontiguousarray(turned.codes.T))
    assert _same_bits(found.decoded, np.ascontiguousarray(turned.decoded.T))


@pytest.mark.parametrize("along", GROUPINGS)
def test_every_element_has_its_group_s_scale(along):
    found = quantize_along(_channels(32, 64), along)
    scales = found.element_scales
    rows, columns = GROUP_SHAPE[along]
    assert found.scales.size * 16 == found.codes.size  # the same bits a weight for all three
    assert (scales[:rows, :columns] == scales[0, 0]).all()
    assert np.array_equal(to_groups(scales, along).min(axis=1), to_groups(scales, along).max(axis=1))


def _balanced(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Activations with outlier channels, and a weight that is as much smaller there: every channel counts alike."""
    rng = np.random.default_rng(seed)
    sizes = np.ones(512)
    sizes[rng.choice(512, 8, replace=False)] = 40
    x, w = rng.standard_normal((64, 512)) * sizes, rng.standard_normal((64, 512)) / sizes
    return _bf16(x), _bf16(w)


@pytest.mark.parametrize("seed", range(3))
def test_outlier_channels_favour_blocks_inside_a_channel(seed):
    """Along K is not the most accurate grouping of such a GEMM: it is the one whose scale leaves the inner sum."""
    k, rows, tile = compare_grouping(*_balanced(seed))
    assert rows.y.sqnr_db > tile.y.sqnr_db > k.y.sqnr_db + 2
    assert k.x.zeroed > 2 * rows.x.zeroed  # neighbours of an outlier become zero
    assert [found.scale_products for found in (k, rows, tile)] == [32, 512, 128]


def test_the_tensor_s_own_ratio_hides_it():
    """The error of the activations alone is smaller along K: an outlier that is alone in its block fits it well."""
    k, rows, _ = compare_grouping(*_balanced())
    assert k.x.sqnr_db > rows.x.sqnr_db
    assert k.y.sqnr_db < rows.y.sqnr_db


def test_without_structure_no_direction_is_better():
    x, w = (_bf16(np.random.default_rng(seed).standard_normal((64, 512))) for seed in (1, 2))
    values = [found.y.sqnr_db for found in compare_grouping(x, w)]
    assert max(values) - min(values) < 1  # decibels; 4096 outputs of one seed


def test_an_exact_gemm_has_no_error():
    x = _bf16(np.full((16, 64), 3.0))
    for found in compare_grouping(x, x, "ieee"):
        assert found.y.mse == 0


@pytest.mark.parametrize("along", GROUPINGS)
@pytest.mark.parametrize("place", [(0, 0), (31, 15), (7, 9)])
def test_terms_add_up_to_the_exact_product(along, place):
    x, w = quantize_along(_channels(32, 64), along), quantize_along(_channels(16, 64, 4), along)
    m, n = place
    parts = partial_sums(x, w, m, n)
    width = GROUP_SHAPE[along][1]
    assert len(parts) == 64 // width
    exact = Fraction(0)
    for k in range(64):
        a, b = (Fraction(explain(E2M1, int(code)).value) for code in (x.codes[m, k], w.codes[n, k]))
        exact += a * b * Fraction(float(x.element_scales[m, k])) * Fraction(float(w.element_scales[n, k]))
    assert sum((part.term for part in parts), Fraction(0)) == exact
    assert all((part.dot * 4).denominator == 1 for part in parts)


def test_along_k_the_terms_are_the_tensor_core_s():
    x, w = quantize_along(_channels(16, 64), "k"), quantize_along(_channels(16, 64, 4), "k")
    seen = quant.tensor_core_explain(x.codes[3], w.codes[5], x.scales[3], w.scales[5])
    assert [part.term for part in partial_sums(x, w, 3, 5)] == [term.value for term in seen.trace.terms[:4]]


def test_mixed_groupings_split_at_the_finer_one():
    x, w = quantize_along(_channels(16, 64), "k"), quantize_along(_channels(16, 64, 4), "rows")
    assert len(partial_sums(x, w, 0, 0)) == 64


@pytest.mark.parametrize(("n", "k"), [(1, 16), (128, 64), (129, 80), (300, 4096)])
def test_sizes_are_those_of_a_real_tensor(n, k):
    found, real = storage(n, k), quant.quantize(np.ones((n, k), np.float32), recipe="vllm-cuda")
    assert found.packed == real.packed.shape
    assert found.scales == real.scales.shape
    assert found.packed_bytes == real.packed.nbytes
    assert found.scale_bytes == real.scales.nbytes
    assert found.swizzled_bytes == swizzle_128x4(real.scales).nbytes
    assert found.bits == 4.5
    assert storage(n, 32 * k, "mxfp4").bits == 4.25


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: quantize_along(np.ones((15, 16), np.float32), "rows"), "grouping.shape"),
        (lambda: quantize_along(np.ones((16, 8), np.float32), "k"), "grouping.shape"),
        (lambda: quantize_along(np.ones(16, np.float32), "k"), "grouping.shape"),
        (lambda: quantize_along(np.ones((0, 16), np.float32), "k"), "grouping.shape"),
        (lambda: quantize_along(np.ones((16, 16), np.float32), "m"), "grouping.along"),
        (lambda: quantize_along(np.ones((16, 32), np.float32), "k", "ocp-floor"), "gemm.recipe"),
        (lambda: compare_grouping(np.ones((16, 16), np.float32), np.ones((16, 32), np.float32)), "gemm.shape"),
        (lambda: storage(4, 24), "grouping.shape"),
        (lambda: storage(0, 16), "grouping.shape"),
        (lambda: place_of(0, 0, 8), "grouping.shape"),
        (lambda: place_of(-1, 0, 32), "grouping.element"),
        (lambda: place_of(0, -1, 32), "grouping.element"),
        (lambda: place_of(0, 32, 32), "grouping.element"),
    ],
)
def test_what_cannot_be_grouped_is_refused(call, code):
    with pytest.raises(FormatError) as error:
        call()
    assert error.value.code == code


@pytest.mark.parametrize(("row", "column"), [(0, 0), (31, 15), (32, 16), (127, 79), (128, 33), (149, 78)])
def test_an_element_is_where_it_is_said_to_be(row, column):
    rng = np.random.default_rng(3)
    w = quant.quantize(_bf16(rng.standard_normal((150, 80))), recipe="vllm-cuda")
    place = place_of(row, column, 80)
    byte = w.packed[place.byte]
    assert (byte >> 4 if place.high else byte & 0xF) == w.codes()[row, column]
    assert swizzle_128x4(w.scales)[place.offset_128x4] == w.scales[place.scale]
    assert swizzle_8x4(w.scales)[place.offset_8x4] == w.scales[place.scale]


def test_every_scale_has_a_byte_of_its_own():
    places = [place_of(row, 16 * column, 80) for row in range(150) for column in range(5)]
    for name, size in (("offset_128x4", 256 * 8), ("offset_8x4", 152 * 8)):
        offsets = {getattr(place, name) for place in places}
        assert len(offsets) == len(places)
        assert max(offsets) < size


def test_a_nan_scale_has_no_partial_sums():
    x = _channels(16, 32)
    x[0, 0] = np.nan
    bad, w = quantize_along(x, "k"), quantize_along(_channels(16, 32, 4), "k")
    with pytest.raises(FormatError) as error:
        partial_sums(bad, w, 0, 0)
    assert error.value.code == "grouping.nan"


# ------------------------------------------------------------------ one matrix by itself


def test_one_matrix_has_the_error_that_it_has_in_a_product():
    x = np.random.default_rng(3).standard_normal((32, 64)).astype(ml_dtypes.bfloat16)
    alone, within = compare_tensor(x), compare_grouping(x, x)
    assert [one.along for one in alone] == list(GROUPINGS)
    assert [one.error for one in alone] == [one.x for one in within]


def test_what_was_quantised_along_k_is_found_again_along_k_alone():
    decoded = quantize_along(
        np.random.default_rng(4).standard_normal((32, 64)).astype(np.float32), "k", "modelopt"
    ).decoded
    errors = {one.along: one.error for one in compare_tensor(decoded, "modelopt")}
    assert errors["k"].sqnr_db == np.inf
    assert all(errors[along].sqnr_db < 40 for along in ("rows", "tile"))


def test_a_matrix_that_groups_do_not_tile_is_refused():
    with pytest.raises(FormatError, match="16"):
        compare_tensor(np.ones((8, 32), np.float32))
