"""Quantising on the GPU gives NumPy's bytes: every recipe, dtype, layout, form of global scale, and garbage scale."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import formats, quant
from nvfp4viz.device import ops
from nvfp4viz.device import selftest_data as data
from nvfp4viz.device.dispatch import to_cuda
from nvfp4viz.device.ops.quantize import RECIPE_KERNELS
from nvfp4viz.errors import FormatError

NVFP4 = ("ieee", "vllm-cuda")
BLOCK = {name: quant.RECIPES[name].block_size for name in RECIPE_KERNELS}


def compare(x, recipe, g, layout, soft=False):
    found, expected = data.on_gpu(x, recipe, g, layout, soft), data.on_cpu(x, recipe, g)
    assert data.differing_bytes(found, expected, layout) == 0


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("recipe", NVFP4)
def test_signalling_nans_on_many_blocks(recipe, dtype):
    """98304 blocks of random bits under ten global scales: the comparison that no run had made before."""
    x = data.patterns(dtype, (98304 // 64, 64 * 16), 11)
    for g in (1.0, 0.0, np.inf, np.nan, -1.0, 1e-38, 1e-6, 1e6, 1e38, 2688 / 3.7):
        compare(x, recipe, g, "linear")


@pytest.mark.parametrize("soft", [False, True], ids=["instructions", "software"])
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("recipe", RECIPE_KERNELS)
def test_every_recipe_dtype_layout_and_garbage_scale(recipe, dtype, layout, soft):
    for x in data.matrices(dtype):
        for g in data.global_scales(recipe):
            compare(x, recipe, g, layout, soft)


def test_the_rounding_grid_of_every_significand():
    """G = 2688/amax for the 128 BF16 significands of amax: where an ulp of a reciprocal shows (kernels.md, 3)."""
    values = np.array([*data.MIDPOINTS, 0.5, 1, 1.5, 2, 3, 4, 6, 0.25, 2.75], np.float32)
    scales = np.arange(8, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    differ = 0
    for fraction in range(128):
        top = np.float32(1 + fraction / 128)
        x = (scales[:, None] * (top / np.float32(2688)) * values).astype(np.float32)
        answers = []
        for recipe in NVFP4:
            answers.append(data.on_gpu(x, recipe, np.float32(2688) / top))
            assert data.differing_bytes(answers[-1], data.on_cpu(x, recipe, np.float32(2688) / top), "linear") == 0
        differ += int((answers[0][0] != answers[1][0]).sum())
    assert differ > 0, "the set does not separate the recipes and proves nothing about the reciprocal"


# ------------------------------------------------------------------------------------- forms of global scales


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("recipe", NVFP4)
def test_one_scale_as_a_tensor_and_one_for_each_row(torch, recipe, dtype, layout):
    x = np.concatenate([data.coarse(dtype, (131, 16 * 44), 12), data.patterns(dtype, (30, 16 * 44), 13)])
    given = np.resize(np.array(data.GARBAGE, np.float32), len(x))
    found = data.on_gpu(x, recipe, to_cuda(given), layout)
    rows = [data.on_cpu(x[i : i + 1], recipe, given[i]) for i in range(len(x))]
    expected = np.concatenate([row[0] for row in rows]), np.concatenate([row[1] for row in rows])
    assert data.differing_bytes(found, expected, layout) == 0
    one = torch.tensor([0.37], device="cuda")
    assert data.differing_bytes(data.on_gpu(x, recipe, one, layout), data.on_cpu(x, recipe, 0.37), layout) == 0


def ranges_case(dtype, recipe, sizes, columns):
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    x = data.coarse(dtype, (int(offsets[-1]), BLOCK[recipe] * columns), 14)
    given = np.resize(np.array(data.GARBAGE, np.float32), len(sizes))
    parts = []
    for e, (low, high) in enumerate(itertools.pairwise(offsets)):
        if high > low:
            g = given[e] if recipe in NVFP4 else None
            parts.append(data.on_cpu(x[low:high], recipe, g))
    return x, offsets, given, np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


@pytest.mark.parametrize("sizes", [[3], [0, 5, 0, 0, 1, 127, 128, 129, 0], [1] * 70, [0, 0, 300]])
@pytest.mark.parametrize("columns", [1, 6, 44, 176])
@pytest.mark.parametrize("recipe", [*NVFP4, "vllm-even"])
def test_ranges_of_rows(recipe, columns, sizes):
    """Experts with 0, 1, 127, 128, 129 rows; swizzled, each has tiles of its own, padded with zeros."""
    x, offsets, given, packed, scales = ranges_case("bf16", recipe, sizes, columns)
    g = to_cuda(given) if recipe in NVFP4 else None
    where = to_cuda(offsets)
    found = data.on_gpu(x, recipe, g, "linear", offsets=where)
    assert data.differing_bytes(found, (packed, scales), "linear") == 0
    found = data.on_gpu(x, recipe, g, "swizzled", offsets=where)
    assert (found[0] == packed).all()
    tiles = [formats.swizzle_128x4(scales[low:high]) for low, high in itertools.pairwise(offsets) if high > low]
    expected = np.concatenate(tiles)
    assert (found[1][: len(expected)] == expected).all()
    assert not found[1][len(expected) :].any()


def placed_case(dtype, recipe, columns, form):
    """Ranges into 128x4: matrix, offsets, one scale, one a row or one a range, codes, and what the layout holds."""
    sizes = [0, 33, 0, 1, 130, 0]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    bounds = [*offsets[:-1], int(offsets[-1]) + 7]  # rows past the last offset
    x = data.coarse(dtype, (bounds[-1], 16 * columns), 18)
    count = {"one": 1, "row": len(x), "range": len(sizes)}[form]
    given = np.resize(np.float32([726.5, 1.0, np.inf, -3.0, 300.0]), count)
    of_row = given.repeat(np.diff(bounds)) if form == "range" else np.resize(given, len(x))
    rows = [data.on_cpu(x[i : i + 1], recipe, of_row[i]) for i in range(len(x))]
    scales = np.concatenate([row[1] for row in rows])
    tiles = [formats.swizzle_128x4(scales[low:high]) for low, high in itertools.pairwise(bounds) if high > low]
    return x, offsets, given, np.concatenate([row[0] for row in rows]), np.concatenate(tiles)


def assert_placed(found, packed, scales):
    assert (found[0] == packed).all()
    assert (found[1][: len(scales)] == scales).all()
    assert not found[1][len(scales) :].any()


@pytest.mark.parametrize("form", ["one", "row", "range"])
@pytest.mark.parametrize("columns", [3, 270])  # 270: two blocks of threads across, the second with an end in it
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("recipe", NVFP4)
def test_ranges_into_128x4_of_every_dtype(recipe, dtype, columns, form):
    x, offsets, given, packed, scales = placed_case(dtype, recipe, columns, form)
    for soft in (False, True):
        found = data.on_gpu(x, recipe, to_cuda(given), "swizzled", soft, to_cuda(offsets))
        assert_placed(found, packed, scales)


def test_rows_past_the_last_offset_belong_to_the_last_range(torch):
    x = data.coarse("bf16", (10, 64), 15)
    found = data.on_gpu(x, "ieee", torch.tensor([1.0, 5.0], device="cuda"), offsets=to_cuda(np.int32([0, 4, 6])))
    expected = [data.on_cpu(x[:4], "ieee", 1.0), data.on_cpu(x[4:], "ieee", 5.0)]
    assert (found[0] == np.concatenate([e[0] for e in expected])).all()
    assert (found[1] == np.concatenate([e[1] for e in expected])).all()


def test_the_default_global_scale_is_that_of_quant(torch):
    for dtype in data.DTYPES:
        x = data.coarse(dtype, (64, 256), 16)
        ours = ops.quantize(to_cuda(x), recipe="ieee")
        theirs = quant.quantize(x, recipe="ieee")
        assert ours.global_scale.item() == theirs.global_scale
        assert (ours.packed.cpu().numpy() == theirs.packed).all()
        assert (ours.scales.cpu().numpy() == theirs.scales).all()


def test_a_large_tensor_and_slices_that_are_not_aligned(torch):
    generator = torch.Generator(device="cuda").manual_seed(17)
    x = torch.randn(4099, 4112, device="cuda", dtype=torch.bfloat16, generator=generator)
    whole = ops.quantize(x, recipe="vllm-cuda", global_scale=300.0)
    host = x.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    expected = quant.quantize(host, recipe="vllm-cuda", global_scale=300.0)
    assert (whole.packed.cpu().numpy() == expected.packed).all()
    assert (whole.scales.cpu().numpy() == expected.scales).all()
    shifted = x.view(-1)[1 : 1 + 4096].view(16, 256)
    assert shifted.data_ptr() % 16
    found = ops.quantize(shifted, recipe="vllm-cuda", global_scale=300.0)
    expected = quant.quantize(host.reshape(-1)[1 : 1 + 4096].reshape(16, 256), recipe="vllm-cuda", global_scale=300.0)
    assert (found.packed.cpu().numpy() == expected.packed).all()


def test_nothing_to_quantise_is_nothing(torch):
    empty = torch.empty(0, 64, device="cuda", dtype=torch.bfloat16)
    for layout in ("linear", "swizzled"):
        q = ops.quantize(empty, recipe="ieee", global_scale=1.0, layout=layout)
        assert q.packed.shape == (0, 32)
        assert q.scales.numel() == 0


# ------------------------------------------------------------------------------------------- the edge table

# kernels.md section 6, read off an H200: block A, an all-zero block, a NaN in element 0 of block A.
BLOCK_A = np.array([[6, -6, 5, 4, 3.5, 3, 2.5, 2, 1.75, 1.5, 1.25, 1, 0.75, -0.5, 0.25, 0]], np.float32)
TABLE = [
    (1.0, "38", "f766564434229200", "00", "0000000000000000", "38"),
    (0.0, "00", "8000000000008000", "00", "0000000000000000", "00"),
    (1e-38, "00", "8000000000008000", "00", "0000000000000000", "00"),
    (1e-39, "00", "8000000000008000", "00", "0000000000000000", "00"),
    (1e-6, "00", "8000000000008000", "00", "0000000000000000", "00"),
    (np.inf, "7e", "f77777777777f777", "7f", "7777777777777777", "7e"),
    (np.nan, "7f", "7777777777777777", "7f", "7777777777777777", "7f"),
    (-1.0, "b8", "f766564434229200", "80", "0000000000000000", "b8"),
    (-np.inf, "fe", "f77777777777f777", "7f", "7777777777777777", "fe"),
    (1e38, "7e", "f77777777777f777", "00", "0000000000000000", "7e"),
    (3.4e38, "7e", "f77777777777f777", "00", "0000000000000000", "7e"),
    (1e6, "7e", "f77777777777f707", "00", "0000000000000000", "7e"),
]


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"g={row[0]}")
def test_the_edge_table(row, dtype):
    g, scale, packed, zero_scale, zero_packed, nan_scale = row
    with_nan = BLOCK_A.copy()
    with_nan[0, 0] = np.nan
    x = data.as_dtype(np.concatenate([BLOCK_A, np.zeros((1, 16), np.float32), with_nan]), dtype)
    found, scales = data.on_gpu(x, "vllm-cuda", g)
    assert [f"{byte:02x}" for byte in scales.ravel()] == [scale, zero_scale, nan_scale]
    assert [row.tobytes().hex() for row in found[:2]] == [packed, zero_packed]
    assert found[2, 0] & 15 == 7
    assert found[2].tobytes().hex()[2:] == packed[2:]


# ------------------------------------------------------------------------------------------------- refusals


def test_wrong_inputs_are_named(torch):
    x = torch.zeros(4, 64, device="cuda", dtype=torch.bfloat16)
    scales3 = torch.ones(3, device="cuda")
    for code, call in (
        ("ops.tensor", lambda: ops.quantize(x.cpu(), recipe="ieee", global_scale=1.0)),
        ("ops.tensor", lambda: ops.quantize(x.t(), recipe="ieee", global_scale=1.0)),
        ("ops.tensor", lambda: ops.quantize(x.double(), recipe="ieee", global_scale=1.0)),
        ("ops.multiple", lambda: ops.quantize(x[:, :24].contiguous(), recipe="ieee", global_scale=1.0)),
        ("ops.multiple", lambda: ops.quantize(x[:, :48].contiguous(), recipe="vllm-even")),
        ("ops.method", lambda: ops.quantize(x, recipe="modelopt", global_scale=1.0)),
        ("ops.method", lambda: ops.quantize(x, recipe="ieee", global_scale=1.0, layout="8x4")),
        ("ops.global-scales", lambda: ops.quantize(x, recipe="ieee", global_scale=scales3)),
        ("recipe.no-global-scale", lambda: ops.quantize(x, recipe="vllm-even", global_scale=1.0)),
        ("ops.method", lambda: ops.activation_quantize(x, activation="relu", global_scale=1.0)),
        ("ops.tensor", lambda: ops.activation_quantize(x.float(), activation="silu", global_scale=1.0)),
        ("ops.method", lambda: ops.amax(x, per="column")),
        ("quantize.dtype", lambda: ops.dequantize(ops.quantize(x, recipe="ieee"), torch.float64)),
    ):
        with pytest.raises(FormatError) as error:
            call()
        assert error.value.code == code


def test_too_little_memory_is_said(torch):
    huge = torch.empty(1, device="cuda", dtype=torch.bfloat16).expand(1 << 20, 1 << 20)
    with pytest.raises(FormatError) as error:
        ops.quantize(huge, recipe="ieee", global_scale=1.0)
    assert error.value.code == "ops.tensor"  # not contiguous: refused before any memory is asked for
    q = ops.DeviceQuantized(
        torch.empty(1, device="cuda", dtype=torch.uint8), torch.empty(1, device="cuda", dtype=torch.uint8), 1.0, "ieee",
        (1 << 22, 1 << 20),
    )  # fmt: skip
    with pytest.raises(FormatError):
        ops.dequantize(q)
