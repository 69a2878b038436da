"""Layout and routing kernels, run by g++, against NumPy: every byte."""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4viz.formats import interleave_gate_up, pack_ue8m0, swizzle_128x4
from nvfp4viz.moe import combine_routes, plan_dispatch, shuffle_rows
from tests.host.kernels_on_host import HostKernels
from tests.kernels.gemm_cases import BFLOAT16, RAGGED, bits, offsets_of

pytestmark = pytest.mark.host
LAYOUT = [
    "nv_swizzle_128x4", "nv_unswizzle_128x4", "nv_interleave_gate_up", "nv_interleave_gate_up_bytes", "nv_pack_ue8m0",
]  # fmt: skip
PERMUTE = ["nv_count_routes", "nv_plan_routes", "nv_gather_rows", "nv_combine_routes"]


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("layout"), "layout.cu", LAYOUT)


@pytest.fixture(scope="module")
def permute(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("permute"), "permute.cu", PERMUTE)


@pytest.mark.parametrize(
    ("counts", "by"),
    [((1,), "rows"), ((129,), "rows"), ((64, 64, 64), "rows"), ((129,), "offsets"), (RAGGED, "offsets")],
)
@pytest.mark.parametrize("columns", [1, 4, 22])
def test_swizzle_there_and_back(layout: HostKernels, counts: tuple[int, ...], columns: int, by: str) -> None:
    scales = np.random.default_rng(0).integers(1, 256, (sum(counts), columns), dtype=np.uint8)
    starts, tiles = offsets_of(counts), sum(-(-count // 128) for count in counts)
    parts = [swizzle_128x4(scales[s : s + c]) for s, c in zip(starts[:-1], counts, strict=True) if c]
    wanted = np.concatenate(parts)
    flat, back = np.full_like(wanted, 0xAA), np.full_like(scales, 0xAA)
    grid = ((columns + 15) // 16, tiles + 2)  # two blocks too many must do nothing
    ranges = (starts if by == "offsets" else None, np.int32(len(counts)), np.int32(counts[0]), np.int32(columns))
    layout("nv_swizzle_128x4", grid, 128, scales, flat, *ranges)
    np.testing.assert_array_equal(flat, wanted)
    layout("nv_unswizzle_128x4", grid, 128, flat, back, *ranges)
    np.testing.assert_array_equal(back, scales)


@pytest.mark.parametrize(("columns", "name"), [(2080, "nv_interleave_gate_up"), (7, "nv_interleave_gate_up_bytes")])
def test_interleave(layout: HostKernels, columns: int, name: str) -> None:
    w = np.random.default_rng(1).integers(0, 256, (3, 32, columns), dtype=np.uint8)
    out = np.zeros_like(w)
    pieces = columns if name.endswith("bytes") else columns // 16
    layout(name, (-(-pieces // 128), 32, 3), 128, w, out, np.int32(32), np.int32(pieces), np.int32(8))
    np.testing.assert_array_equal(out, interleave_gate_up(w))


def test_pack_ue8m0(layout: HostKernels) -> None:
    scales = np.random.default_rng(2).integers(0, 256, (37, 12), dtype=np.uint8)
    words = np.zeros((37, 3), np.uint32)
    layout("nv_pack_ue8m0", 1, 128, scales, words, np.int64(words.size))
    np.testing.assert_array_equal(words, pack_ue8m0(scales))


def routed(tokens: int, experts: int, top_k: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)


def run_plan(permute: HostKernels, ids: np.ndarray, experts: int, expert_map: np.ndarray | None):
    routes, top_k = ids.size, ids.shape[1]
    chunks = -(-routes // 1024)
    counts, offsets = np.full((experts, chunks), -7, np.int32), np.full(experts + 1, -7, np.int32)
    source, target = np.full(routes, -1, np.int32), np.full(routes, routes, np.int32)
    sizes = (np.int32(routes), np.int32(top_k), np.int32(experts), np.int32(chunks))
    grid = -(-experts * chunks // 4)
    permute("nv_count_routes", grid, 128, ids, expert_map, counts, sizes[0], *sizes[2:])
    permute("nv_plan_routes", grid, 128, ids, expert_map, counts, offsets, source, target, *sizes)
    return counts.sum(axis=1), offsets, source, target


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 5, 1), (7, 4, 2), (50, 37, 8), (530, 5, 4)])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_plan(permute: HostKernels, tokens: int, experts: int, top_k: int, elsewhere: bool) -> None:
    ids = routed(tokens, experts, top_k, 3)
    expert_map, local = None, experts
    if elsewhere:  # every other expert lives on another rank
        expert_map = np.where(np.arange(experts) % 2 == 0, np.arange(experts) // 2, -1).astype(np.int32)
        local = -(-experts // 2)
    wanted = plan_dispatch(ids, local, n1=8, n=4, k=16, expert_map=expert_map)
    got = run_plan(permute, ids, local, expert_map)
    for ours, theirs in zip(got, (wanted.counts, wanted.expert_offsets, wanted.a_map, wanted.c_map), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_gather_and_combine(permute: HostKernels) -> None:
    """The sum over a token's experts in BF16 products and f32, in the order of the routes; NaN and infinities too."""
    rng = np.random.default_rng(4)
    ids = routed(9, 6, 3, 5)
    expert_map = np.array([0, -1, 1, 2, 3, 4], np.int32)
    plan = plan_dispatch(ids, 5, n1=8, n=4, k=16, expert_map=expert_map)
    x = rng.standard_normal((9, 1040)).astype(BFLOAT16)
    rows = np.zeros((plan.a_map.size, 1040), BFLOAT16)
    permute("nv_gather_rows", (plan.a_map.size, 2), 128, x, plan.a_map, rows, np.int32(130))
    np.testing.assert_array_equal(bits(rows), bits(shuffle_rows(x, plan.a_map)))

    y = (rng.standard_normal((plan.rows, 1040)) * 8).astype(BFLOAT16)
    y[0, :5] = [np.nan, np.inf, -np.inf, -0.0, 3e38]
    y[1, :5] = [1, -np.inf, np.inf, 0.0, 3e38]
    weights = rng.standard_normal((9, 3)).astype(np.float32)
    weights[4, 1] = np.nan
    out = np.zeros((9, 1040), BFLOAT16)
    sizes = (np.int32(3), np.int32(130), np.int32(plan.rows))
    permute("nv_combine_routes", (9, 2), 128, y, plan.c_map, weights, out, *sizes)
    with np.errstate(all="ignore"):
        wanted = combine_routes(shuffle_rows(y, plan.c_map).reshape(9, 3, 1040), weights)
    assert np.isnan(wanted.astype(np.float32)).any()
    np.testing.assert_array_equal(bits(out), bits(wanted))
