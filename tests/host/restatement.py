"""Build and drive ``restatement.cpp``: the independent C++ answer to what no CPU package computes."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

SOURCE = Path(__file__).with_name("restatement.cpp")
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def build(folder: Path) -> Path:
    """The restatement's program, compiled into ``folder``."""
    return compile_cpp(SOURCE, folder / "restatement")


def compile_cpp(source: Path, program: Path, *options: str) -> Path:
    """Compile with g++.  Without a compiler: skip, saying so; on CI (``CI=true``): fail."""
    compiler = shutil.which("g++")
    if compiler is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"g++ is not installed, and CI must compile {source.name}")
        pytest.skip(f"g++ is not installed: {source.name} was not compiled")
    # no contraction: a fused multiply-add rounds once where the kernels round twice
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra"]
    subprocess.run([compiler, *flags, *options, str(source), "-o", str(program)], check=True)
    return program


@dataclass(frozen=True, slots=True)
class Restatement:
    """The compiled program and its reciprocal table; arrays in, arrays out."""

    program: Path
    table: Path
    folder: Path

    def _run(self, arguments: list[str], request: bytes) -> bytes:
        asked, answered = self.folder / "asked.bin", self.folder / "answered.bin"
        asked.write_bytes(request)
        subprocess.run([str(self.program), *arguments, str(asked), str(answered)], check=True)
        return answered.read_bytes()

    def blocks(self, recipe: str, x: F32, global_scale: float | np.float32 | F32 = 1.0) -> tuple[U8, U8]:
        """Quantise each row of ``x (n, block)`` as one block: ``(scale bytes (n,), codes (n, block))``."""
        n, length = x.shape
        scales = np.broadcast_to(np.asarray(global_scale, "<f4"), (n,))
        request = np.array([n, length], "<u4").tobytes() + scales.tobytes() + x.astype("<f4").tobytes()
        answer = np.frombuffer(self._run(["block", recipe, str(self.table)], request), np.uint8)
        return answer[:n], answer[n:].reshape(n, length)

    def steps(self, a: U8, b: U8, a_scales: U8, b_scales: U8, c: F32, kind: str) -> npt.NDArray[np.uint32]:
        """One tensor-core step per row: codes ``(n, 64)``, scales ``(n, 4)`` or ``(n, 2)``, ``c (n,)`` -> f32 bits."""
        n = len(a)
        each = 4 // a_scales.shape[1]
        record = np.zeros(n, dtype=[("a", "u1", 64), ("b", "u1", 64), ("sa", "u1", 4), ("sb", "u1", 4), ("c", "<f4")])
        record["a"], record["b"], record["c"] = a, b, c
        record["sa"], record["sb"] = np.repeat(a_scales, each, 1), np.repeat(b_scales, each, 1)
        request = np.array([n], "<u4").tobytes() + record.tobytes()
        return np.frombuffer(self._run(["step", kind], request), "<u4")

    def steps_k32(self, a: U8, b: U8, a_scales: U8, b_scales: U8, c: F32) -> npt.NDArray[np.uint32]:
        """One K = 32 step per row: E4M3 bytes ``a (n, 32)``, E2M1 codes ``b (n, 32)``, scales ``(n,)`` -> f32 bits."""
        wide = (np.pad(side, ((0, 0), (0, 32))) for side in (a, b))
        return self.steps(*wide, a_scales[:, None], b_scales[:, None], c, "mxf8f6f4")

    def reciprocals(self, x: F32) -> npt.NDArray[np.uint32]:
        request = np.array([len(x)], "<u4").tobytes() + x.astype("<f4").tobytes()
        return np.frombuffer(self._run(["rcp", str(self.table)], request), "<u4")
