"""The streaming ops without a GPU: their Python as it is, their kernels compiled by g++; NumPy's bytes must come out.

Grids, ragged edges, padding, ranges of rows and the arithmetic between load and store are the same text that runs on a
GPU.  The instructions that only a GPU has are not tested here; ``tests/gpu`` does that.
"""

from __future__ import annotations

import itertools
import re
import sys

import numpy as np
import pytest

from nvfp4viz import formats, quant
from nvfp4viz.device import selftest_data as data
from nvfp4viz.moe.experts import activate
from tests.gpu.test_quantize import assert_placed, placed_case
from tests.host.kernels_on_host import KERNELS, HostKernels
from tests.kernels.test_ops_on_host import to_cpu

pytestmark = pytest.mark.host
torch = pytest.importorskip("torch", reason="the ops work on torch's tensors")
MODULES = ("quantize", "dequantize", "amax", "activation", "groups")
MACRO = {  # kernels that macros name
    "quantize.cu": ("nv_quantize_{}_{}_{}", ("bf16", "f16", "f32"), ("ieee", "vllm"), ("linear", "swizzled", "placed")),
    "quantize_mx.cu": (
        "nv_quantize_mx_{}_{}_{}", ("bf16", "f16", "f32"),
        ("ocp_floor", "vllm_even", "flashinfer_ceil", "deepgemm_ceil"), ("flat", "swizzled"),
    ),
    "dequantize.cu": ("nv_dequantize_{}_{}", ("bf16", "f32"), ("whole", "flat", "linear", "swizzled")),
    "amax.cu": ("nv_amax{}_{}", ("", "_rows"), ("bf16", "f16", "f32")),
    "activation_quantize.cu": (
        "nv_activation_quantize_{}_{}_{}", ("ieee", "vllm"), ("linear", "swizzled"), ("shared", "global"),
    ),
}  # fmt: skip


def names(source: str) -> list[str]:
    if source not in MACRO:
        return re.findall(r"__global__ void (?:__launch_bounds__\(\d+\) )?(nv_\w+)", (KERNELS / source).read_text())
    pattern, *parts = MACRO[source]
    found = [()]
    for part in parts:
        found = [(*before, one) for before in found for one in part]
    return [pattern.format(*each) for each in found]


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory):
    from nvfp4viz.device import dispatch, ops

    folder, built = tmp_path_factory.mktemp("streaming"), {}

    def kernel(source, name, defines=(), *, target=None):
        if source not in built:
            built[source] = HostKernels(folder, source, names(source))

        def launch(grid, block, arguments, shared=0):
            grid = (grid,) if isinstance(grid, int) else grid
            if 0 not in grid:
                values = [np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
                built[source](name, grid, block, *values)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "to_cuda", to_cpu)
        for name in MODULES:
            module = sys.modules[f"nvfp4viz.device.ops.{name}"]
            patch.setattr(module, "kernel", kernel)
            patch.setattr(module, "check", lambda *asked: None)
            patch.setattr(module, "check_offsets", lambda *asked: None, raising=False)
        # few blocks that stay, so that they go from piece to piece
        patch.setattr(sys.modules["nvfp4viz.device.ops.activation"], "resident", lambda *asked: 2)
        yield ops


def quantized(ops, x, recipe, g, layout, offsets=None):
    """`data.on_gpu` with reciprocals from the table: g++ has no approximate one."""
    return data.on_gpu(x, recipe, g, layout, soft=True, offsets=offsets)


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("recipe", ["ieee", "vllm-cuda", "ocp-floor", "vllm-even", "flashinfer-ceil", "deepgemm-ceil"])
def test_recipes(ops, recipe, dtype, layout):
    for x in (data.edges(dtype), data.patterns(dtype, (33, 32 * 9), 1), data.coarse(dtype, (5, 32 * 3), 2)):
        for g in (2688 / 3.7, np.inf, np.nan, -1.0) if quant.RECIPES[recipe].scheme == "nvfp4" else (None,):
            found = quantized(ops, x, recipe, g, layout)
            assert data.differing_bytes(found, data.on_cpu(x, recipe, g), layout) == 0


@pytest.mark.parametrize("behind", [0, 3, 130])
@pytest.mark.parametrize("spread", [0, 1 << 60], ids=["spread over rows first", "looked up by every thread"])
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("recipe", ["ieee", "vllm-even"])
def test_ranges_of_rows(ops, monkeypatch, recipe, layout, spread, behind):
    """With ``behind``, rows past the last offset: they belong to the last range."""
    monkeypatch.setattr(sys.modules["nvfp4viz.device.ops.quantize"], "SPREAD_FROM", spread)
    sizes = [0, 5, 0, 1, 127, 128, 129, 0]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    given = np.float32([1, 2, 3, 0, np.inf, 300, -5, 7])
    block = quant.RECIPES[recipe].block_size
    x = data.coarse("bf16", (int(offsets[-1]) + behind, block * 6), 3)
    g = given if recipe == "ieee" else None
    packed, scales = quantized(ops, x, recipe, None if g is None else to_cpu(g), layout, to_cpu(offsets))
    parts = [
        data.on_cpu(x[low:high], recipe, None if g is None else g[e])
        for e, (low, high) in enumerate(itertools.pairwise([*offsets[:-1], len(x)]))
        if high > low
    ]
    assert (packed == np.concatenate([part[0] for part in parts])).all()
    if layout == "linear":
        assert (scales == np.concatenate([part[1] for part in parts])).all()
        return
    expected = np.concatenate([formats.swizzle_128x4(part[1]) for part in parts])
    assert (scales[: len(expected)] == expected).all()
    assert not scales[len(expected) :].any()


@pytest.mark.parametrize("form", ["one", "row", "range"])
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("recipe", ["ieee", "vllm-cuda"])
def test_ranges_into_128x4_of_every_dtype(ops, recipe, dtype, form):
    x, offsets, given, packed, scales = placed_case(dtype, recipe, 270 if form == "range" else 3, form)
    assert_placed(quantized(ops, x, recipe, to_cpu(given), "swizzled", to_cpu(offsets)), packed, scales)


def test_the_place_of_every_row_and_which_is_the_last_of_its_piece(ops):
    """Asked for itself: a row that were called the last too soon would race with the next one for its bytes."""
    bounds = np.cumsum([0, 0, 5, 0, 1, 33, 96, 127, 128, 129, 161, 3])
    rows, wide = int(bounds[-1]), 2
    offsets = to_cpu(np.int32([*bounds[:-1], rows - 2]))
    given = sys.modules["nvfp4viz.device.ops.groups"].check_scales("quantize", 1.0, offsets, rows, offsets.device)
    tiles = sys.modules["nvfp4viz.device.ops.quantize"].most_tiles(rows, offsets)
    flat = torch.full((tiles * 512 * wide,), 7, dtype=torch.uint8)
    places = given.spread_over_tiles("quantize", rows, tiles, flat)[1].numpy().view(np.uint32)
    expected, holds = [], []
    for count in np.diff(bounds):
        for first in range(0, count, 128):
            within = min(128, count - first)
            lasts = [row + 32 >= within for row in range(within)]
            expected += [128 * len(holds) + row + (last << 31) for row, last in enumerate(lasts)]
            holds.append(within)
    assert places.tolist() == expected
    pieces = flat.numpy().reshape(tiles, wide, 32, 16)
    reached = np.arange(32) < np.array(holds + [0] * (tiles - len(holds)))[:, None]
    assert (pieces == np.where(reached, 7, 0)[:, None, :, None]).all()


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
def test_a_scale_for_each_row_and_back(ops, layout):
    x = data.coarse("f32", (131, 16 * 21), 4)
    given = np.resize(np.float32([1.0, 726.5, np.inf, -3.0, 1e-6]), len(x))
    q = ops.quantize(to_cpu(x), recipe="ieee", global_scale=to_cpu(given), layout=layout, soft=True)
    wide = ops.dequantize(q, torch.float32).numpy().view(np.uint32)
    narrow = ops.dequantize(q).view(torch.int16).numpy().view(np.uint16)
    for i in range(len(x)):
        row = quant.quantize(x[i : i + 1], recipe="ieee", global_scale=given[i], path="numpy")
        assert (q.packed[i].numpy() == row.packed[0]).all()
        decoded = quant.dequantize(row, path="numpy")
        assert (wide[i] == decoded.view(np.uint32)[0]).all()
        assert (narrow[i] == formats.f32_to_bf16(decoded).view(np.uint16)[0]).all()


@pytest.mark.parametrize("recipe", sorted(quant.RECIPES))
def test_every_pair_of_bytes_decodes(ops, recipe):
    """Every packed byte under every scale byte; BF16 by table, float32 by products."""
    found = quant.RECIPES[recipe]
    packed = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 512 // found.block_size, 1)
    for g in (0.37, np.nan) if found.scheme == "nvfp4" else (1.0,):
        ours = ops.DeviceQuantized(to_cpu(packed), to_cpu(scales), g, recipe, (256, 512))
        theirs = quant.QuantizedTensor(packed, scales, np.float32(g), recipe, found.block_size, (256, 512))
        expected = quant.dequantize(theirs, path="numpy")
        assert (ops.dequantize(ours, torch.float32).numpy().view(np.uint32) == expected.view(np.uint32)).all()
        narrow = ops.dequantize(ours).view(torch.int16).numpy().view(np.uint16)
        assert (narrow == formats.f32_to_bf16(expected).view(np.uint16)).all()


@pytest.mark.parametrize("shape", [(1, 32), (3, 32 * 11), (1, 32 * 32), (5, 32 * 32 * 3 + 32)])
@pytest.mark.parametrize("recipe", ["ieee", "vllm-even"])
def test_any_number_of_blocks_decodes(ops, recipe, shape):
    """Ends inside and between the pieces that a warp takes."""
    q = quant.quantize(data.coarse("f32", shape, 10), recipe=recipe, path="numpy")
    ours = ops.DeviceQuantized(to_cpu(q.packed), to_cpu(q.scales), float(q.global_scale), recipe, shape)
    expected = quant.dequantize(q, path="numpy")
    assert (ops.dequantize(ours, torch.float32).numpy().view(np.uint32) == expected.view(np.uint32)).all()
    narrow = ops.dequantize(ours).view(torch.int16).numpy().view(np.uint16)
    assert (narrow == formats.f32_to_bf16(expected).view(np.uint16)).all()


@pytest.mark.parametrize("dtype", data.DTYPES)
def test_maxima(ops, dtype):
    for x in (data.edges(dtype), data.patterns(dtype, (9, 72), 5), data.coarse(dtype, (300, 64), 6)):
        assert ops.amax(to_cpu(x)).numpy().view(np.uint32)[0] == quant.amax(x).view(np.uint32)
        rows = ops.amax(to_cpu(x), per="token").numpy().view(np.uint32)
        assert (rows == np.array([quant.amax(row) for row in x]).view(np.uint32)).all()
        bounds = np.array([0, 0, len(x) // 3, len(x)], np.int32)
        experts = ops.amax(to_cpu(x), to_cpu(bounds)).numpy().view(np.uint32)
        expected = [quant.amax(x[low:high]) for low, high in itertools.pairwise(bounds)]
        assert (experts == np.array(expected).view(np.uint32)).all()
    odd = data.patterns(dtype, (1, 7), 7)
    assert ops.amax(to_cpu(odd)).numpy().view(np.uint32)[0] == quant.amax(odd).view(np.uint32)


@pytest.mark.parametrize("form", ["shared", "global"])
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activation(ops, monkeypatch, activation, layout, form):
    monkeypatch.setattr(
        sys.modules["nvfp4viz.device.ops.activation"], "SHARED_FROM", 0 if form == "shared" else 1 << 60
    )
    x = data.as_dtype(np.random.default_rng(8).standard_normal((140, 2 * 176)) * 2, "bf16")
    x[-20:] = data.patterns("bf16", (20, 2 * 176), 9)
    offsets, given = np.int32([0, 0, 70, 71, 140]), np.float32([1.0, 500.0, np.inf, 726.5])
    q = ops.activation_quantize(
        to_cpu(x), activation=activation, global_scale=to_cpu(given), offsets=to_cpu(offsets), layout=layout, soft=True
    )
    y = activate(x, activation, fused=True)
    parts = [
        data.on_cpu(y[low:high], "vllm-cuda", given[e]) for e, low, high in ((1, 0, 70), (2, 70, 71), (3, 71, 140))
    ]
    assert (q.packed.numpy() == np.concatenate([part[0] for part in parts])).all()
    scales = q.scales.numpy()
    if layout == "linear":
        assert (scales == np.concatenate([part[1] for part in parts])).all()
        return
    expected = np.concatenate([formats.swizzle_128x4(part[1]) for part in parts])
    assert (scales[: len(expected)] == expected).all()
    assert not scales[len(expected) :].any()
