"""The part of the self-test that needs no GPU: independent implementations of one arithmetic, bit against bit.

The CUDA kernels are held to `nvfp4viz.quant`; here that truth is held to itself, array code against scalar code that
reads like the specification.  On a GPU `nvfp4viz.device.selftest` goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz import formats, quant

__all__ = ["CHECKS", "Check", "run_checks"]

SEED = 20261129
BLOCKS = 1024  # through the scalar reference: a tenth of a second
STEPS = 256  # of the matrix product, each 64 products of two codes


@dataclass(frozen=True, slots=True)
class Check:
    """What one comparison found.

    Attributes
    ----------
    id
        A name of `CHECKS`.
    inputs
        How many inputs were given.
    bits
        How many bits of answers were compared.
    differing_bits
        How many of them are not equal; 0 is the only good answer.
    seconds
        Wall time.
    """

    id: str
    inputs: int
    bits: int
    differing_bits: int
    seconds: float


Answers = tuple[int, npt.NDArray[Any], npt.NDArray[Any]]  # inputs, one implementation's answers, the other's


def differing_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """How many bits of two arrays of one shape and type differ.

    >>> differing_bits(np.uint8([0, 255]), np.uint8([1, 255]))
    1
    """
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    one, other = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return int(np.bitwise_count(one ^ other).sum())


def _every_bf16() -> npt.NDArray[np.float32]:
    return formats.bf16_to_f32(np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16))


def _to_e2m1() -> Answers:
    x = _every_bf16()
    return x.size, formats.encode_e2m1(x), np.uint8([formats.e2m1_code_scalar(float(v)) for v in x])


def _to_e4m3() -> Answers:
    x = _every_bf16()
    return x.size, formats.encode_e4m3(x), np.uint8([formats.e4m3_byte_scalar(float(v)) for v in x])


def _quantise(recipe: str) -> Answers:
    """Random bits, NaN and infinities included, by Numba and by the scalar reference."""
    block = quant.RECIPES[recipe].block_size
    rng = np.random.default_rng(SEED)
    x = rng.integers(0, 1 << 16, (BLOCKS, block), dtype=np.uint16).view(ml_dtypes.bfloat16)
    scale = None if block == 32 else 1.0
    found = []
    for path in ("numba", "reference"):
        q = quant.quantize(x, recipe=recipe, global_scale=scale, path=path)  # type: ignore[arg-type]
        found.append(np.concatenate([q.packed, q.scales], axis=1))
    return x.size, found[0], found[1]


def _matrix_step() -> Answers:
    """Random codes and scale bytes, NaN bytes included, through the vectorised product and through the seven rules."""
    rng = np.random.default_rng(SEED)
    codes = rng.integers(0, 16, (2, STEPS, 64), dtype=np.uint8)
    scales = rng.integers(0, 256, (2, STEPS, 4), dtype=np.uint8)
    packed = formats.pack_nibbles(codes)
    fast = [quant.mma_matmul(packed[0, i : i + 1], scales[0, i : i + 1], packed[1, i : i + 1], scales[1, i : i + 1])
            for i in range(STEPS)]  # fmt: skip
    slow = [quant.mma_step_reference(codes[0, i], codes[1, i], scales[0, i], scales[1, i], 0.0) for i in range(STEPS)]
    return STEPS * 128, np.float32(fast).reshape(-1), np.float32(slow).reshape(-1)


CHECKS: dict[str, Callable[[], Answers]] = {
    "to_e2m1": _to_e2m1,
    "to_e4m3": _to_e4m3,
    "vllm-cuda": lambda: _quantise("vllm-cuda"),
    "ieee": lambda: _quantise("ieee"),
    "ocp-floor": lambda: _quantise("ocp-floor"),
    "matrix_step": _matrix_step,
}


def run_checks() -> Iterator[Check]:
    """Run them one after the other; each result is there as soon as it is known."""
    for name, ask in CHECKS.items():
        begin = time.perf_counter()
        inputs, one, other = ask()
        yield Check(name, inputs, 8 * one.nbytes, differing_bits(one, other), time.perf_counter() - begin)
