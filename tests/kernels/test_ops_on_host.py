"""The ops' own Python, without a GPU: grids, shapes, offsets and arguments, launched into kernels that g++ runs.

torch's CPU tensors take the place of CUDA's, and `HostKernels` that of the loader; what an op asks of its tensors is
the one thing switched off.  The cases and the expected bits are those of ``tests/gpu``.
"""

from __future__ import annotations

import re
import sys

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.moe import combine_routes, plan_dispatch, shuffle_rows
from tests.gpu import test_gpu_gemm, test_gpu_layout, test_gpu_permute
from tests.host.kernels_on_host import KERNELS, HostKernels
from tests.kernels.gemm_cases import BFLOAT16, bits, w4a4_case, w4a16_case

pytestmark = pytest.mark.host
torch = pytest.importorskip("torch", reason="the ops work on torch's tensors")
MODULES = ("gemm", "layout", "mma", "permute")
NAMES = {
    "gemm_w4a4.cu": ["nv_mma_tiles_nvfp4"]
    + [f"nv_grouped_w4a4_{kind}_{layout}_f32" for kind in ("nvfp4", "mxfp4") for layout in ("linear", "swizzled")]
    + ["nv_grouped_w4a4_nvfp4_linear_bf16"],
    "gemm_w4a16.cu": ["nv_w4a16_prepack", "nv_w4a16_widen", *(f"nv_grouped_w4a16_{tokens}" for tokens in (16, 32, 64))],
    "layout.cu": re.findall(r"__global__ void (nv_\w+)", (KERNELS / "layout.cu").read_text()),
    "permute.cu": re.findall(r"__global__ void (nv_\w+)", (KERNELS / "permute.cu").read_text()),
}


def to_cpu(array: np.ndarray) -> torch.Tensor:
    array = np.array(array, order="C")  # a copy: torch's tensors are written to
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory):
    from nvfp4viz.device import dispatch, ops

    folder, built = tmp_path_factory.mktemp("ops"), {}

    def kernel(source, name, defines=(), *, target=None):
        if source not in built:
            built[source] = HostKernels(folder, source, NAMES[source])

        def launch(grid, block, arguments, shared=0):
            grid = (grid,) if isinstance(grid, int) else grid
            if 0 not in grid:
                values = [np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
                built[source](name, grid, block, *values)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "to_cuda", to_cpu)
        for name in MODULES:  # by name: ops.permute is the function, not the module
            module = sys.modules[f"nvfp4viz.device.ops.{name}"]
            patch.setattr(module, "kernel", kernel)
            patch.setattr(module, "check", lambda *asked: None)
            patch.setattr(module, "check_offsets", lambda *asked: None, raising=False)
        yield ops


@pytest.mark.parametrize("layout", ["linear", "tiles of each expert", "tiles of the matrix"])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_w4a4(ops, kind, layout):
    case = w4a4_case(kind, (0, 1, 35, 130), 40, 96, seed=1)
    got = test_gpu_gemm.run_w4a4(ops, torch, case, layout, np.float32)
    np.testing.assert_array_equal(bits(got), bits(case.expected(np.float32)))


@pytest.mark.parametrize("layout", ["linear", "tiles of each expert", "tiles of the matrix"])
def test_rows_that_need_several_launches(ops, monkeypatch, layout):
    """A cut inside an expert, at one's first row, and behind the last one: no row feels it."""
    gemm = sys.modules["nvfp4viz.device.ops.gemm"]
    monkeypatch.setattr(gemm, "MOST_BLOCKS", 6)  # of four experts: one tile's rows a launch, 32 for W4A4, 16 for W4A16
    case = w4a4_case("nvfp4", (64, 1, 35, 130), 40, 96, seed=4)
    got = test_gpu_gemm.run_w4a4(ops, torch, case, layout, np.float32)
    np.testing.assert_array_equal(bits(got), bits(case.expected(np.float32)))
    case = w4a16_case((0, 1, 17, 14), 136, 80, seed=5)
    cut = test_gpu_gemm.run_w4a16(ops, case)
    monkeypatch.undo()
    np.testing.assert_array_equal(bits(cut), bits(test_gpu_gemm.run_w4a16(ops, case)))


@pytest.mark.parametrize("layout", ["linear", "each expert", "matrix"])
def test_the_library_is_given_every_expert_s_own_operands(ops, monkeypatch, layout):
    test_gpu_gemm.test_the_library_is_given_every_expert_s_own_operands(ops, torch, monkeypatch, layout)


def test_a_wrong_or_refusing_library_is_not_taken(ops, monkeypatch):
    test_gpu_gemm.test_a_wrong_or_refusing_library_is_not_taken(ops, torch, monkeypatch)


def test_one_instruction_on_many_tiles(ops):
    case = test_gpu_gemm.mma_tiles_case("nvfp4", 30)
    out = ops.mma_tiles(*map(to_cpu, (case.a, case.a_scales, case.b, case.b_scales, case.c)))
    np.testing.assert_array_equal(bits(out.numpy()), bits(case.expected()))


@pytest.mark.parametrize("counts", [(0, 1, 7, 17), (16, 0, 19), (64, 3)])
def test_w4a16(ops, counts):
    """The three heights of a block, each chosen by the mean number of rows."""
    case = w4a16_case(counts, 136, 80, seed=2)
    expected, allowed = case.expected()
    out = test_gpu_gemm.run_w4a16(ops, case).astype(np.float64)
    assert (np.abs(out - expected) <= allowed).all()


def test_widened_weights_are_exact(ops):
    test_gpu_gemm.test_widened_weights_are_exact(ops)


@pytest.mark.parametrize("shape", [(129, 5), (3, 130, 22)])
def test_swizzle(ops, shape):
    check = test_gpu_layout.test_swizzle_of_a_matrix if len(shape) == 2 else test_gpu_layout.test_swizzle_of_each_expert
    check(ops, shape)


def test_swizzle_of_row_ranges(ops):
    test_gpu_layout.test_swizzle_of_row_ranges(ops, (0, 1, 127, 128, 129))


@pytest.mark.parametrize(("shape", "group"), [((3, 48, 32), 8), ((2, 48, 22), 8), ((12, 7), 2)])
def test_interleave(ops, shape, group):
    test_gpu_layout.test_interleave(ops, shape, group)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_there_and_back(ops, elsewhere):
    test_gpu_permute.test_there_and_back(ops, 150, 16, 8, 64, elsewhere)


def test_a_layer_s_way_through(ops):
    """Permute, multiply, un-permute: the pieces fit each other as `nvfp4viz.moe` has them."""
    rng = np.random.default_rng(3)
    ids = test_gpu_permute.routed(20, 4, 2)
    plan = plan_dispatch(ids, 4, n1=8, n=4, k=16)
    case = w4a4_case("nvfp4", tuple(plan.counts.tolist()), 16, 64, seed=3)
    weights = rng.random((20, 2)).astype(np.float32)
    permuted = ops.permute(to_cpu(rng.standard_normal((20, 64)).astype(BFLOAT16)), to_cpu(ids), 4)
    a = ops.DeviceQuantized(to_cpu(case.a), to_cpu(case.a_scales), 1.0, "ieee", (40, 64))
    b = (to_cpu(case.b), to_cpu(case.b_scales), permuted.offsets, to_cpu(case.alphas))
    out = ops.unpermute(ops.grouped_gemm_w4a4(a, *b), permuted, to_cpu(weights))
    wanted = combine_routes(shuffle_rows(case.expected(BFLOAT16), plan.c_map).reshape(20, 2, 16), weights)
    np.testing.assert_array_equal(bits(test_gpu_gemm.numpy_of(out)), bits(wanted))
