"""What the ops refuse, and how they cut what is too large: their launches are recorded, no kernel runs."""

import sys

import numpy as np
import pytest

from nvfp4viz.errors import DeviceError, FormatError

torch = pytest.importorskip("torch", reason="the ops work on torch's tensors")
GRID_Y, COUNTER = 65535, 1 << 32


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = property(lambda self: True)


def tensor(*shape, dtype=torch.uint8):
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


@pytest.fixture
def ops(monkeypatch):
    """The ops, whose launches go to ``ops.launches`` as (name, grid, threads, arguments)."""
    from nvfp4viz.device import ops

    launches = []

    def kernel(source, name, defines=(), *, target=None):
        def launch(grid, threads, arguments, shared=0):
            launches.append((name, grid if isinstance(grid, tuple) else (grid,), threads, arguments))

        return launch

    for module in ("amax", "layout", "gemm", "permute"):
        monkeypatch.setattr(sys.modules[f"nvfp4viz.device.ops.{module}"], "kernel", kernel)
    monkeypatch.setattr(ops, "launches", launches, raising=False)
    return ops


def test_gate_and_up_of_a_wide_layer_fit_the_grid(ops):
    """Llama 3.1 405B has 53,248 gate rows and as many of up; a grid's second axis ends at 65,535."""
    ops.interleave_gate_up(tensor(2 * 53248, 16))
    (_, grid, _, arguments), *rest = ops.launches
    assert rest == []
    assert max(grid[1:]) <= GRID_Y
    assert grid[1] * int(arguments[4]) == 2 * 53248 // 8 * int(arguments[4])


@pytest.mark.parametrize("per", ["token", "expert"])
def test_maxima_of_more_rows_than_a_launch_counts(ops, monkeypatch, per):
    """A warp a row: 2^27 rows are 2^32 threads, where the kernel's counter starts again."""
    monkeypatch.setattr(sys.modules["nvfp4viz.device.ops.amax"], "empty", lambda op, shape, *how: torch.empty(shape))
    rows = (1 << 27) + 5
    x = torch.empty(1, 8, dtype=torch.bfloat16).expand(rows, 8).as_subclass(OnGpu)
    monkeypatch.setattr(OnGpu, "is_contiguous", lambda self: True, raising=False)  # 2 GiB that nobody needs
    ops.amax(x, torch.tensor([0, 7, rows], dtype=torch.int32).as_subclass(OnGpu) if per == "expert" else None, per)
    done = 0
    for _, grid, threads, (part, count, _, offsets, _, out) in ops.launches:
        assert grid[0] * threads < COUNTER
        assert len(part) == int(count)
        assert grid[0] * threads // 32 >= count
        if per == "expert":
            assert offsets.tolist() == [-done, 7 - done, rows - done]
        else:
            assert out.storage_offset() == done
        done += int(count)
    assert done == rows


@pytest.mark.parametrize("count", [0, 1])
def test_offsets_that_bound_nothing_are_refused(ops, count):
    offsets = tensor(count, dtype=torch.int32)
    calls = (
        lambda: ops.amax(tensor(4, 16, dtype=torch.bfloat16), offsets),
        lambda: ops.swizzle(tensor(4, 4), offsets),
        lambda: ops.quantize(tensor(4, 16, dtype=torch.bfloat16), recipe="ieee", global_scale=1.0, offsets=offsets),
    )
    for call in calls:
        with pytest.raises(FormatError) as raised:
            call()
        assert (raised.value.code, raised.value.params["name"]) == ("ops.tensor", "offsets")
    assert ops.launches == []


def w4a4(ops, scales, own, offsets):
    """A product of 5 rows with 2 experts' weights, N = 8, K = 64, scales swizzled."""
    a = ops.DeviceQuantized(tensor(5, 32), scales, 1.0, "ieee", (5, 64), "swizzled", own)
    weight = tensor(2, 8, 32), tensor(2 * 128 * 4)
    return ops.grouped_gemm_w4a4(a, *weight, offsets, tensor(2, dtype=torch.float32))


def test_swizzled_scales_too_few_for_the_rows_are_refused(ops):
    """One tile of scales, where the rows of two experts may need two: the kernel would read past its end."""
    offsets = tensor(3, dtype=torch.int32)
    w4a4(ops, tensor(2 * 128 * 4), offsets, offsets)
    assert len(ops.launches) == 1
    for scales, own in ((tensor(128 * 4), offsets), (tensor(7), None), (tensor(128 * 4), tensor(2, dtype=torch.int32))):
        with pytest.raises(FormatError) as raised:
            w4a4(ops, scales, own, offsets)
        assert raised.value.code == "ops.tensor"
    assert len(ops.launches) == 1


@pytest.mark.parametrize("form", ["w4a4", "w4a16"])
def test_more_rows_than_one_launch_has_blocks_for(ops, form):
    """A million tokens of eight routes each: more tiles than a grid's second axis counts."""
    rows, offsets = 8 << 20, torch.tensor([0, 3 << 20, 8 << 20]).int().as_subclass(OnGpu)
    factors, packed, scales = tensor(2, dtype=torch.float32), tensor(2, 8, 8), tensor(2, 8, 1)
    if form == "w4a4":
        a = ops.DeviceQuantized(tensor(rows, 8), tensor(rows, 1), 1.0, "ieee", (rows, 16))
        ops.grouped_gemm_w4a4(a, packed, scales, offsets, factors)
    else:
        weight = ops.pack_w4a16(packed, scales)
        ops.launches.clear()
        ops.grouped_gemm_w4a16(tensor(rows, 16, dtype=torch.bfloat16), weight, None, factors, offsets)
    assert len(ops.launches) > 1
    done = 0
    for _, (_, tiles), _, arguments in ops.launches:
        assert tiles <= GRID_Y
        edges = next(each for each in arguments if isinstance(each, torch.Tensor) and each.shape == (3,)).tolist()
        count = int(arguments[-4])
        assert edges == [min(max(edge - done, 0), count) for edge in offsets.tolist()]
        done += count
    assert done == rows


@pytest.mark.parametrize("packed", [tensor(8, 32), None], ids=["a matrix", "nothing"])
def test_a_weight_of_another_shape_is_refused(ops, packed):
    with pytest.raises(FormatError) as raised:
        ops.grouped_gemm_w4a16(
            tensor(3, 64, dtype=torch.bfloat16), packed, tensor(8, 4), tensor(1, dtype=torch.float32),
            tensor(2, dtype=torch.int32),
        )  # fmt: skip
    assert raised.value.params["name"] == "packed"


@pytest.mark.parametrize("scale", ["abc", "1.5", 10**400, 1j, [1.0], b"1"], ids=lambda scale: str(scale)[:5])
def test_a_global_scale_that_is_no_number_is_refused(ops, scale):
    x = tensor(4, 32, dtype=torch.bfloat16)
    q = ops.DeviceQuantized(tensor(4, 8), tensor(4, 1), scale, "ieee", (4, 16))
    calls = (
        lambda: ops.quantize(x, recipe="ieee", global_scale=scale),
        lambda: ops.activation_quantize(x, activation="silu", global_scale=scale),
        lambda: ops.dequantize(q),
    )
    for call in calls:
        with pytest.raises(FormatError) as raised:
            call()
        assert (raised.value.code, raised.value.params["name"]) == ("ops.number", "global_scale")


@pytest.mark.parametrize(
    "scale", [2, 0.1, float("nan"), float("inf"), 1e300, np.float64(3), np.int8(3), np.float16(0.5)]
)
def test_a_global_scale_of_any_real_type_is_one_float32(scale):
    from nvfp4viz.device.ops.checks import check_number

    with np.errstate(over="ignore"):
        expected = np.float32(scale)
    assert check_number("quantize", "global_scale", scale).tobytes() == expected.tobytes()


@pytest.mark.parametrize("experts", ["4", 0, -1, 2**31, 10**30, 4.0, None])
def test_a_number_of_experts_that_is_none_is_refused(ops, experts):
    with pytest.raises(FormatError) as raised:
        ops.permute(tensor(4, 16, dtype=torch.bfloat16), tensor(4, 1, dtype=torch.int32), experts)
    assert (raised.value.code, raised.value.params["name"]) == ("ops.count", "experts")
    assert ops.launches == []


def routes(*ids):
    return torch.tensor(ids, dtype=torch.int32).view(-1, 1).as_subclass(OnGpu)


@pytest.mark.parametrize(
    ("ids", "experts", "places", "got"),
    [((0, 3, 1), 4, None, None), ((0, -1), 4, None, None), ((0, 4), 4, None, 4), ((7,), 2, (0, -1, 1), 7),
     ((0, 1, 2), 2, (0, -1, 1), None), ((0, 1), 2, (0, 2), 2), ((), 4, None, None), ((0,), 4, (), 0),
     ((2**31 - 1,), 8, None, 2**31 - 1)],
)  # fmt: skip
def test_routes_to_experts_that_there_are_not_are_refused(ops, ids, experts, places, got):
    """Before any kernel runs: it would read behind the map."""
    x = tensor(len(ids), 16, dtype=torch.bfloat16)
    expert_map = None if places is None else routes(*places).view(-1)
    if got is None:
        ops.permute(x, routes(*ids), experts, expert_map)
        assert ops.launches
        return
    with pytest.raises(FormatError) as raised:
        ops.permute(x, routes(*ids), experts, expert_map)
    assert (raised.value.code, raised.value.params["got"]) == ("ops.routes", got)
    assert ops.launches == []
    ops.permute(x, routes(*ids), experts, expert_map, validate=False)
    assert ops.launches, "whoever has looked already need not wait"


@pytest.mark.parametrize(
    ("offsets", "fits"),
    [((0, 3, 3, 8), True), ((0, 0), True), ((0, 8), True), ((1, 8), False), ((-1, 8), False), ((0, 5, 4, 8), False),
     ((0, 9), False), ((0, 9, 8), False), ((0, 2**31 - 1, -(2**31)), False)],
)  # fmt: skip
def test_offsets_are_looked_at_where_asked(ops, offsets, fits):
    given = torch.tensor(offsets, dtype=torch.int32)
    if fits:
        ops.check_offset_values(given, 8)
        return
    with pytest.raises(FormatError) as raised:
        ops.check_offset_values(given, 8)
    assert raised.value.code == "ops.offsets"


@pytest.mark.parametrize(
    "offsets", [torch.zeros(3), torch.zeros(1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)]
)
def test_offsets_of_another_kind_are_refused(ops, offsets):
    with pytest.raises(FormatError) as raised:
        ops.check_offset_values(offsets, 8)
    assert raised.value.code == "ops.tensor"


def test_memory_that_does_not_suffice_is_one_clear_error_everywhere(ops, monkeypatch):
    x, x8, ids = tensor(4, 16, dtype=torch.bfloat16), tensor(2, 16, 8), tensor(4, 1, dtype=torch.int32)
    scales, flat = tensor(4, 4), tensor(512)
    moved = torch.zeros(17, dtype=torch.bfloat16)[1:].view(1, 16).as_subclass(OnGpu)  # 2 bytes past a multiple of 16
    assert moved.data_ptr() % 16
    weight = ops.PackedW4A16(tensor(1, 32, 4), tensor(1, 8, 2), tensor(1, 16), (1, 16, 64))

    def full(*shape, **how):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(torch, "zeros", full)
    monkeypatch.setattr(OnGpu, "clone", full, raising=False)
    calls = (
        lambda: ops.amax(x),
        lambda: ops.amax(x, per="token"),
        lambda: ops.amax(moved),
        lambda: ops.swizzle(scales),
        lambda: ops.unswizzle(flat, (4, 4)),
        lambda: ops.interleave_gate_up(x8),
        lambda: ops.pack_ue8m0(scales),
        lambda: ops.pack_w4a16(tensor_of(x8), tensor_of(x8[:, :, :1])),
        lambda: ops.widened_weight(weight),
        lambda: ops.permute(x, ids, 2),
    )
    for call in calls:
        with pytest.raises(DeviceError) as raised:
            call()
        assert raised.value.code == "ops.memory"
        assert "9 GiB" in raised.value.text("en")["why"]


def tensor_of(view):
    return torch.from_numpy(view.numpy().copy()).as_subclass(OnGpu)
