"""The kernels' headers of formats and recipes on the CPU: built by g++ as a library, called through ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import unpack_nibbles
from nvfp4viz.quant.rcp import rcp_table
from tests.host.restatement import compile_cpp

SOURCE = Path(__file__).with_name("kernel_math.cpp")
KERNELS = Path(__file__).parents[2] / "kernels"
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
NVFP4 = ("ieee", "vllm-cuda")
MXFP4 = ("ocp-floor", "vllm-even", "flashinfer-ceil", "deepgemm-ceil")
U8 = npt.NDArray[np.uint8]
ALL = 1 << 32
"""Patterns of float32."""


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class KernelMath:
    """The header's functions, arrays in and arrays out."""

    def __init__(self, folder: Path) -> None:
        path = compile_cpp(
            SOURCE, folder / "kernel_math.so", f"-I{KERNELS}", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"
        )
        self.library = ctypes.CDLL(str(path))
        for name in ("sweep_e2m1", "sweep_e2m1_small", "sweep_e4m3"):
            function = getattr(self.library, name)
            function.restype = ctypes.c_uint64
            function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p]
        self.table = np.ascontiguousarray(rcp_table())

    def sweep(self, name: str, first: int = 0, count: int = ALL, threads: int = 2) -> tuple[int, int]:
        """``(patterns that differ from the statement, one of them)``: ``"e2m1"``, ``"e2m1_small"`` or ``"e4m3"``."""
        example = np.zeros(1, np.uint32)
        differing = getattr(self.library, f"sweep_{name}")(first, count, threads, _at(example))
        return int(differing), int(example[0])

    def blocks(self, recipe: str, x: np.ndarray, global_scale: npt.ArrayLike = 1.0) -> tuple[U8, U8]:
        """Each row of ``x (n, 16 or 32)`` as one block: ``(scale bytes (n,), codes (n, block))``."""
        x = np.ascontiguousarray(x)
        dtype, n = list(DTYPES.values()).index(x.dtype), len(x)
        packed, scales = np.zeros((n, x.shape[1] // 2), np.uint8), np.zeros(n, np.uint8)
        size, out = ctypes.c_size_t(n), (_at(packed), _at(scales))
        if recipe in NVFP4:
            g = np.ascontiguousarray(np.broadcast_to(np.asarray(global_scale, np.float32), (n,)))
            self.library.nvfp4_blocks(NVFP4.index(recipe), _at(x), dtype, size, _at(g), _at(self.table), *out)
        else:
            self.library.mxfp4_blocks(MXFP4.index(recipe), _at(x), dtype, size, _at(self.table), *out)
        return scales, unpack_nibbles(packed)

    def each(self, name: str, x: np.ndarray, out: npt.DTypeLike) -> np.ndarray:
        """A function of one number, such as ``encode_e4m3``, over an array."""
        x = np.ascontiguousarray(x)
        result = np.zeros(len(x), out)
        getattr(self.library, name)(_at(x), ctypes.c_size_t(len(x)), _at(result))
        return result

    def reciprocals(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
        x = np.ascontiguousarray(x, np.float32)
        out = np.zeros(len(x), np.uint32)
        self.library.reciprocals(_at(x), ctypes.c_size_t(len(x)), _at(self.table), _at(out))
        return out

    def decoded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values of the 16 E2M1 codes, the 256 E4M3 and the 256 UE8M0 bytes."""
        tables = np.zeros(16, np.float32), np.zeros(256, np.float32), np.zeros(256, np.float32)
        self.library.decode_all(*map(_at, tables))
        return tables

    def activated(self, table: npt.NDArray[np.float32], rounds_tiny: bool) -> npt.NDArray[np.float32]:
        """What each of the 65536 BF16 patterns becomes as a gate, given the table of an activation."""
        out = np.zeros(1 << 16, np.float32)
        self.library.activate_all(_at(table), int(rounds_tiny), _at(out))
        return out
