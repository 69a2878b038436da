"""What a launch hands to the driver, seen without a GPU: stand-ins play torch's tensors and CuPy's function."""

import contextlib
import sys
import time
import types

import numpy as np
import pytest

from nvfp4viz.device import load
from nvfp4viz.errors import DeviceError


class FakeTensor:
    def __init__(self, address, device=0):
        self.address, self.device = address, device

    def get_device(self):
        return self.device

    def data_ptr(self):
        return self.address


class FakeFunction:
    ptr = 77

    def __init__(self):
        self.calls = []

    def __call__(self, grid, block, values, shared, stream):
        self.calls.append((grid, block, list(values), shared, stream.ptr))


@pytest.fixture
def launch(monkeypatch):
    """``(kernel, function)`` of device 0, whose current stream has the address 0x51."""
    torch = types.SimpleNamespace(Tensor=FakeTensor)
    monkeypatch.setattr(load, "_runtime", lambda: (torch, lambda index: 0x51 + index, lambda: 0))
    made, function = load.Kernel("f.cu", "nv_f", (), None), FakeFunction()
    made._functions[0] = function
    return made, function


def test_arguments_go_as_addresses_and_typed_scalars(launch):
    made, function = launch
    made(3, (32, 4), (FakeTensor(0x1000), None, np.int32(-5), np.float32(0.5), np.uint64(2**63)), shared=256)
    ((grid, block, values, shared, stream),) = function.calls
    assert (grid, block, shared, stream) == ((3,), (32, 4), 256, 0x51)
    assert values[0] == 0x1000
    assert values[1] == 0
    assert [type(v) for v in values[1:]] == [np.uint64, np.int32, np.float32, np.uint64]


@pytest.mark.parametrize("grid", [0, (0, 4), (5, 0)])
def test_an_empty_grid_runs_nothing(launch, grid):
    """CuPy would launch one block instead, which would read where nothing is."""
    made, function = launch
    made(grid, 128, (FakeTensor(1),))
    assert function.calls == []


@pytest.mark.parametrize("number", [5, 0.5, True])
def test_a_number_without_a_width_is_refused(launch, number):
    made, function = launch
    with pytest.raises(TypeError, match="has no width"):
        made(1, 32, (FakeTensor(1), number))
    assert function.calls == []


@pytest.mark.parametrize(
    "tensors", [(FakeTensor(1, -1),), (FakeTensor(1), FakeTensor(2, 1)), (FakeTensor(1), FakeTensor(2, -1))]
)
def test_tensors_of_another_device_are_refused(launch, tensors):
    made, _ = launch
    with pytest.raises(DeviceError) as raised:
        made(1, 32, tensors)
    assert raised.value.code == "device.mixed"


def test_a_refused_launch_is_one_error(launch, monkeypatch):
    made, _ = launch

    def refuse(*_):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument\nand more")

    made._functions[0] = refuse
    with pytest.raises(DeviceError) as raised:
        made(1, 4096, (FakeTensor(1),))
    assert raised.value.params == {"kernel": "nv_f", "reason": "CUDA_ERROR_INVALID_VALUE: invalid argument"}


def test_much_shared_memory_is_asked_for_once(launch, monkeypatch):
    made, function = launch
    asked = []
    monkeypatch.setattr(
        load.Kernel,
        "_allow_shared",
        lambda self, index, f, shared: (asked.append(shared), self._allowed_shared.update({index: shared})),
    )
    for shared in (47 * 1024, 48 * 1024, 64 * 1024, 64 * 1024, 50 * 1024, 96 * 1024):
        made(1, 32, (FakeTensor(1),), shared=shared)
    # Of 48 KiB the driver gives nothing more to a kernel that has some bytes of its own, as nv_spread_ranges has.
    assert asked == [48 * 1024, 64 * 1024, 96 * 1024]
    assert len(function.calls) == 6


class Module:
    """CuPy's module; refuses the code that is called bad."""

    def load(self, code):
        if code == b"bad":
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")


@pytest.fixture
def loading(monkeypatch):
    """CuPy and torch as far as `load._module` asks for them; ``cubin`` gives what is put into the list."""
    null = contextlib.nullcontext
    cuda = types.SimpleNamespace(device=lambda i: null(), current_stream=lambda i: None)
    monkeypatch.setattr(load, "_runtime", lambda: (types.SimpleNamespace(cuda=cuda), None, None))
    monkeypatch.setattr(load, "_cupy_device", lambda index: null())
    monkeypatch.setattr(load, "_modules", {})
    parts = {"cupy": types.ModuleType("cupy"), "cupy.cuda": types.ModuleType("cupy.cuda")}
    parts["cupy.cuda"].function = types.SimpleNamespace(Module=Module)
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    codes, asked = [], []

    def cubin(source, target, defines, *, anew=False):
        asked.append(anew)
        return codes.pop(0)

    monkeypatch.setattr(load, "cubin", cubin)
    return codes, asked


def test_code_that_does_not_load_is_compiled_anew_once(loading):
    codes, asked = loading
    codes += [b"bad", b"good"]
    assert isinstance(load._module("f.cu", "sm_90", (), 0), Module)
    assert asked == [False, True]


def test_code_that_never_loads_is_one_error(loading):
    codes, asked = loading
    codes += [b"bad", b"bad"]
    with pytest.raises(DeviceError) as raised:
        load._module("f.cu", "sm_90", (), 0)
    assert (raised.value.code, asked) == ("device.load", [False, True])


def test_a_cupy_that_cannot_be_imported_is_not_the_gpus_fault(loading, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(DeviceError) as raised:
        load._module("f.cu", "sm_90", (), 0)
    assert raised.value.code == "device.cupy-broken"
    assert "cupy" in raised.value.params["reason"]
    assert "GPU" not in raised.value.what


def test_kernels_are_made_once():
    assert load.kernel("f.cu", "nv_f") is load.kernel("f.cu", "nv_f")
    assert load.kernel("f.cu", "nv_f", ("A",)) is not load.kernel("f.cu", "nv_f")


def test_our_part_of_a_launch_is_short(launch):
    """Of the 12 µs that a launch may cost, ours; the rest is measured on a GPU (tests/gpu/test_launch.py)."""
    made, _ = launch
    made._functions[0] = lambda *_: None
    arguments = (FakeTensor(1), FakeTensor(2), FakeTensor(3), np.int32(1), np.int64(2), np.float32(3))
    rounds = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(500):
            made((64, 8), 256, arguments)
        rounds.append((time.perf_counter() - begin) / 500)
    assert min(rounds) < 6e-6
