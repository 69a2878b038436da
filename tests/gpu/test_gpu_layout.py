"""Layout ops on the GPU against `nvfp4viz.formats`: every byte."""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4viz import formats
from nvfp4viz.errors import FormatError
from tests.kernels.gemm_cases import RAGGED, offsets_of


@pytest.fixture(scope="module")
def ops():
    from nvfp4viz.device import ops

    return ops


def cuda(array):
    from nvfp4viz.device.dispatch import to_cuda

    return to_cuda(array)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (300, 3), (1000, 176), (8192, 256)])
def test_swizzle_of_a_matrix(ops, shape):
    scales = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    flat = ops.swizzle(cuda(scales))
    np.testing.assert_array_equal(flat.cpu().numpy(), formats.swizzle_128x4(scales))
    np.testing.assert_array_equal(ops.unswizzle(flat, shape).cpu().numpy(), scales)


@pytest.mark.parametrize("shape", [(3, 130, 22), (16, 128, 44)])
def test_swizzle_of_each_expert(ops, shape):
    scales = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    flat = ops.swizzle(cuda(scales))
    wanted = np.concatenate([formats.swizzle_128x4(one) for one in scales])
    np.testing.assert_array_equal(flat.cpu().numpy(), wanted)
    np.testing.assert_array_equal(ops.unswizzle(flat, shape).cpu().numpy(), scales)


@pytest.mark.parametrize("counts", [RAGGED, (1,) * 130, (500, 0, 0, 12)])
def test_swizzle_of_row_ranges(ops, counts):
    scales = np.random.default_rng(2).integers(0, 256, (sum(counts), 22), dtype=np.uint8)
    starts = offsets_of(counts)
    offsets = cuda(starts)
    flat = ops.swizzle(cuda(scales), offsets)
    parts = [formats.swizzle_128x4(scales[s : s + c]) for s, c in zip(starts[:-1], counts, strict=True) if c]
    wanted = np.concatenate(parts)
    got = flat.cpu().numpy()
    np.testing.assert_array_equal(got[: wanted.size], wanted)
    assert not got[wanted.size :].any()
    padded = offsets_of(tuple(-(-count // 128) * 128 for count in counts))
    np.testing.assert_array_equal(ops.scale_tile_offsets(offsets).cpu().numpy(), padded)
    np.testing.assert_array_equal(ops.unswizzle(flat, scales.shape, offsets).cpu().numpy(), scales)


@pytest.mark.parametrize(("shape", "group"), [((3, 48, 32), 8), ((1408, 1408), 8), ((2, 48, 22), 8), ((12, 7), 2)])
def test_interleave(ops, shape, group):
    w = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
    np.testing.assert_array_equal(
        ops.interleave_gate_up(cuda(w), group).cpu().numpy(), formats.interleave_gate_up(w, group)
    )
    with pytest.raises(FormatError) as raised:
        ops.interleave_gate_up(cuda(w[..., :-1, :].copy()), group)
    assert raised.value.code == "format.interleave"


def test_pack_ue8m0(ops):
    scales = np.random.default_rng(4).integers(0, 256, (513, 88), dtype=np.uint8)
    words = ops.pack_ue8m0(cuda(scales)).cpu().numpy()
    np.testing.assert_array_equal(words.view(np.uint32), formats.pack_ue8m0(scales))
    with pytest.raises(FormatError) as raised:
        ops.pack_ue8m0(cuda(scales[:, :87].copy()))
    assert raised.value.code == "ops.multiple"
