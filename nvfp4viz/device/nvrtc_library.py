"""An NVRTC library of one's own choice, beside CuPy's, by way of ``ctypes``.

Which one CuPy compiles with is not decided by its own CUDA version: CuPy 14.2 looks for ``libnvrtc.so.13`` first, so
``cupy-cuda12x`` takes NVRTC 13 wherever PyTorch's CUDA 13 build or the development requirements have brought it, and
12.9 only where that is alone.  12.9 does not know Thor (``sm_110a``), which then goes to an NVRTC 13 that CuPy did not
find.  The libraries have different names and live in one process; the first one loaded is what CuPy takes.
Offers the functions of ``cupy.cuda.nvrtc`` that ``nvfp4viz.device.build`` uses, under the same names.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

__all__ = ["NvrtcLibrary", "find_nvrtc13", "wheel"]

FOLDERS = {12: "cuda_nvrtc", 13: "cu13"}
"""Where the wheels ``nvidia-cuda-nvrtc-cu12`` and ``nvidia-cuda-nvrtc`` lie, by major version."""


class NvrtcError(RuntimeError):
    """A call of the library failed; the message is its own."""


class NvrtcLibrary:
    """The NVRTC shared library at ``path``."""

    def __init__(self, path: str) -> None:
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))  # NVRTC asks for it by name alone, and finds what is already loaded
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise NvrtcError(self._library.nvrtcGetErrorString(status).decode())

    def _bytes(self, program: int, size_of: str, get: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_of, ctypes.c_void_p(program), ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(get, ctypes.c_void_p(program), buffer)
        return buffer.raw

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def getSupportedArchs(self) -> list[int]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return list(numbers)

    def createProgram(self, source: str, name: str, headers: list[bytes], names: list[bytes]) -> int:
        program = ctypes.c_void_p()
        array = ctypes.c_char_p * len(headers)
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), len(headers),
            array(*headers), array(*names),
        )  # fmt: skip
        return program.value or 0

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._call("nvrtcCompileProgram", ctypes.c_void_p(program), len(options), array)

    def getProgramLog(self, program: int) -> str:
        return self._bytes(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode()

    def getCUBIN(self, program: int) -> bytes:
        return self._bytes(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")

    def destroyProgram(self, program: int) -> None:
        self._call("nvrtcDestroyProgram", ctypes.byref(ctypes.c_void_p(program)))


def wheel(major: int) -> Path | None:
    """The library of NVRTC 12 or 13 as its wheel installs it, or ``None``."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / FOLDERS[major] / "lib" / f"libnvrtc.so.{major}"
        if path.exists():
            return path
    return None


@cache
def find_nvrtc13() -> NvrtcLibrary | None:
    """NVRTC 13 from the wheel ``nvidia-cuda-nvrtc`` or from the system, or ``None``."""
    for path in (wheel(13), "libnvrtc.so.13"):
        if path is None:
            continue
        try:
            library = NvrtcLibrary(str(path))
            library.getVersion()
            return library
        except (OSError, NvrtcError):
            continue
    return None
