"""NVRTC 13 beside the one that CuPy brings, by way of ``ctypes``.

CuPy for CUDA 12 compiles with NVRTC 12.9, which does not know Thor (``sm_110a``).  PyTorch's CUDA 13 build brings
NVRTC 13 anyway, and a test environment installs it; the two libraries have different names and live in one process.
Offers the functions of ``cupy.cuda.nvrtc`` that ``nvfp4viz.device.build`` uses, under the same names.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

__all__ = ["NvrtcLibrary", "find_nvrtc13"]


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


@cache
def find_nvrtc13() -> NvrtcLibrary | None:
    """NVRTC 13 from the wheel ``nvidia-cuda-nvrtc`` or from the system, or ``None``."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    wheels = [folder / "cu13" / "lib" / "libnvrtc.so.13" for folder in folders]
    for path in [*(str(wheel) for wheel in wheels if wheel.exists()), "libnvrtc.so.13"]:
        try:
            library = NvrtcLibrary(path)
            library.getVersion()
            return library
        except (OSError, NvrtcError):
            continue
    return None
