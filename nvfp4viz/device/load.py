"""Kernels as Python callables on torch's tensors: loaded once per device, launched on torch's current stream.

CuPy loads the machine code and launches it; torch owns the memory.  Both work in the device's primary context, so a
tensor's address is all that passes between them and nothing is copied.  A launch costs a few microseconds of Python
(``tests/gpu/test_launch.py`` holds it to 12): the function's handle is looked up once, the stream is asked of torch by
number.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nvfp4viz.device.build import cubin, target_of
from nvfp4viz.errors import DeviceError

__all__ = ["Kernel", "Resources", "kernel"]


# Bytes of dynamic shared memory that need no asking: 48 KiB, but what a kernel holds besides counts too.
UNASKED_SHARED = 47 * 1024
NULL = np.uint64(0)
_loading = threading.Lock()


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes of a device, as the driver reports it."""

    registers: int  # per thread
    local_bytes: int  # per thread: spills and stack
    static_shared_bytes: int  # per block
    max_threads: int  # per block
    target: str


class _Stream:
    """A stream by its address, in the form CuPy's launch takes."""

    __slots__ = ("ptr",)  # CuPy asks for nothing else

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


@cache
def _runtime() -> tuple[Any, Any, Any]:
    """``(torch, current stream's address by device, current device)``, imported at the first launch."""
    import torch

    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # 0.1 µs; the public call builds an object in 2 µs
    if raw is None:

        def raw(index: int) -> int:
            return torch.cuda.current_stream(index).cuda_stream

    return torch, raw, torch.cuda.current_device


class Kernel:
    """One ``extern "C" __global__`` function of ``kernels/``, on whichever device its tensors lie.

    Call it as ``k(grid, block, arguments, shared=0)``.

    Parameters of the call
    ----------------------
    grid, block
        An int or a tuple of up to three.  A grid with a zero in it is an empty launch: nothing runs.
    arguments
        torch CUDA tensors (passed as addresses), ``None`` (a null pointer), and NumPy scalars, whose type must be the
        kernel's: a Python number has no width and is refused.
    shared
        Bytes of dynamic shared memory; more than 47 KiB are asked of the driver at first use.

    Raises
    ------
    DeviceError
        The kernel does not compile or load, or the launch is refused.  Faults of the running kernel surface at torch's
        next synchronisation, as for torch's own kernels.
    """

    def __init__(self, source: str, name: str, defines: tuple[str, ...], target: str | None) -> None:
        self.source, self.name, self.defines, self.target = source, name, defines, target
        self._functions: dict[int, Any] = {}
        self._allowed_shared: dict[int, int] = {}

    def __call__(self, grid: Any, block: Any, arguments: tuple[Any, ...], shared: int = 0) -> None:
        torch, stream_of, current_device = _runtime()
        tensor = torch.Tensor
        values, index = [], None
        for argument in arguments:
            if isinstance(argument, tensor):
                where = argument.get_device()  # -1 on the CPU
                if where != index:
                    if index is not None or where < 0:
                        raise DeviceError("device.mixed", kernel=self.name)
                    index = where
                values.append(argument.data_ptr())
            elif isinstance(argument, np.generic):
                values.append(argument)
            elif argument is None:
                values.append(NULL)
            else:
                raise TypeError(f"{self.name}: {argument!r} has no width; pass a NumPy scalar")
        if index is None:
            raise TypeError(f"{self.name}: at least one argument must be a tensor")
        if type(grid) is int:
            grid = (grid,)
        if type(block) is int:
            block = (block,)
        if 0 in grid:
            return
        function = self._functions.get(index) or self._load(index)
        if shared > UNASKED_SHARED and shared > self._allowed_shared.get(index, 0):
            self._allow_shared(index, function, shared)
        stream = _Stream(stream_of(index))
        try:
            if index == current_device():
                function(grid, block, values, shared, stream)
            else:
                with torch.cuda.device(index), _cupy_device(index):
                    function(grid, block, values, shared, stream)
        except Exception as error:
            raise DeviceError("device.launch", kernel=self.name, reason=_short(error)) from error

    def _load(self, index: int) -> Any:
        torch, _, _ = _runtime()
        target = self.target or target_of(torch.cuda.get_device_capability(index))
        module = _module(self.source, target, self.defines, index)
        try:
            function = module.get_function(self.name)
        except Exception as error:
            raise DeviceError("device.no-kernel", kernel=self.name, file=self.source, reason=_short(error)) from error
        self._functions[index] = function
        return function

    def _allow_shared(self, index: int, function: Any, shared: int) -> None:
        from cupy_backends.cuda.api import driver

        try:
            driver.funcSetAttribute(function.ptr, 8, shared)  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        except Exception as error:
            raise DeviceError("device.launch", kernel=self.name, reason=_short(error)) from error
        self._allowed_shared[index] = shared

    def resources(self, index: int = 0) -> Resources:
        """Registers, local and shared memory of the compiled function on device ``index``."""
        from cupy_backends.cuda.api import driver

        function = self._functions.get(index) or self._load(index)
        # CU_FUNC_ATTRIBUTE_…: MAX_THREADS_PER_BLOCK 0, SHARED_SIZE_BYTES 1, LOCAL_SIZE_BYTES 3, NUM_REGS 4
        threads, static, local, registers = (driver.funcGetAttribute(which, function.ptr) for which in (0, 1, 3, 4))
        target = self.target or target_of(_runtime()[0].cuda.get_device_capability(index))
        return Resources(registers, local, static, threads, target)

    def blocks_per_multiprocessor(self, threads: int, shared: int = 0, index: int = 0) -> int:
        """How many blocks of ``threads`` threads fit on one multiprocessor of device ``index`` at a time."""
        from cupy_backends.cuda.api import driver

        function = self._functions.get(index) or self._load(index)
        return int(driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, threads, shared))


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _cupy_device(index: int) -> Any:
    from cupy.cuda import Device

    return Device(index)


_modules: dict[tuple[str, str, tuple[str, ...], int], Any] = {}


def _module(source: str, target: str, defines: tuple[str, ...], index: int) -> Any:
    """The loaded module, one per file, target, defines and device; it stays loaded with the process."""
    try:
        from cupy.cuda import function as cupy_function
    except (
        Exception
    ) as error:  # a wheel of another Python, a library that it does not find: CuPy's, not the GPU's fault
        raise DeviceError("device.cupy-broken", reason=_short(error)) from error
    torch, _, _ = _runtime()
    key = (source, target, defines, index)
    with _loading:
        if key not in _modules:

            def loaded(code: bytes) -> Any:
                module = cupy_function.Module()
                with torch.cuda.device(index), _cupy_device(index):
                    torch.cuda.current_stream(index)  # torch creates the primary context, CuPy joins it
                    module.load(code)
                return module

            try:
                _modules[key] = loaded(cubin(source, target, defines))
            except DeviceError:
                raise
            except Exception:  # once more with code that no cache has touched, before anybody is sent to mend a driver
                code = cubin(source, target, defines, anew=True)
                try:
                    _modules[key] = loaded(code)
                except Exception as error:
                    raise DeviceError("device.load", file=source, target=target, reason=_short(error)) from error
        return _modules[key]


@cache
def kernel(source: str, name: str, defines: tuple[str, ...] = (), *, target: str | None = None) -> Kernel:
    """The kernel ``name`` of ``kernels/<source>``; compiled and loaded when it is first launched on a device.

    ``target`` overrides the device's own, for a kernel that needs ``sm_90a``.
    """
    return Kernel(source, name, defines, target)
