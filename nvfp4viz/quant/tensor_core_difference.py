"""How far a tensor-core GEMM lies from the exact product, and from float32 arithmetic after decoding.

Every product of two NVFP4 elements with their E4M3 scales is a whole multiple of 2^-20: two elements are quarters, two
scales multiples of 2^-9 each.  Int64 therefore holds the exact sum, and both float results are such multiples too, so
that differences are exact.

**Toward zero, always?**  Each cut is: a term is cut toward zero, and so is the sum.  Their effect together is not.  A
negative term that is cut off leaves a positive sum too large, and a partial sum may change its sign on the way.  Only
where no product is negative does every result lie at or below the exact one; tests hold both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import decode_e2m1, decode_e4m3, unpack_nibbles
from nvfp4viz.quant.recipes import find_recipe
from nvfp4viz.quant.tensor_core import mma_matmul
from nvfp4viz.quant.tensor_core_step import F32_FRACTION_BITS, F32_MIN_EXPONENT, GROUP, STEP
from nvfp4viz.quant.types import QuantizedTensor

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

UNIT_EXPONENT = -20
"""An exact product is a whole number of 2^-20."""


@dataclass(frozen=True, slots=True, eq=False)
class AccumulationComparison:
    """The same product ``A @ B.T``, accumulated in four ways; all arrays are ``(M, N)`` and exclude global scales.

    Attributes
    ----------
    k
        Length of each dot.
    exact : int64
        The exact product, in units of 2^-20.
    tensor_core : float32
        :func:`nvfp4viz.quant.mma_matmul`: steps of 64 in increasing k.
    float32 : float32
        Decode, then ``acc = f32(acc + f32(a * b))`` in increasing k, each operation rounded to nearest even.
    split : float32
        The tensor core on two halves of K (whole steps), each from zero, added in float32 afterwards: what a GEMM that
        splits K over two thread blocks computes.  Equal to ``tensor_core`` where K is a single step.
    """

    k: int
    exact: I64
    tensor_core: F32
    float32: F32
    split: F32

    @property
    def exact_value(self) -> F64:
        """``(M, N)`` float64: the exact product; exact itself below 2^53 units, else rounded once."""
        return self.exact.astype(np.float64) * 2.0**UNIT_EXPONENT

    def against_exact(self, result: F32) -> F64:
        """``(M, N)``: how far ``result`` lies from the exact product, in units of :func:`outward`."""
        difference = (result.astype(np.float64) * 2.0**-UNIT_EXPONENT).astype(np.int64) - self.exact
        return outward(difference.astype(np.float64) * 2.0**UNIT_EXPONENT, self.exact_value)

    def against_float32(self) -> F64:
        """``(M, N)``: how far the tensor core's result lies from the float32 one, in units of :func:`outward`."""
        reference = self.float32.astype(np.float64)
        return outward(self.tensor_core - reference, reference)

    @property
    def split_differs(self) -> int:
        """How many outputs get other bits when K is split in two."""
        return int(np.count_nonzero(self.split.view(np.uint32) != self.tensor_core.view(np.uint32)))


def outward(difference: F64, reference: F64) -> F64:
    """A difference in float32 ulps of the reference: negative toward zero, positive away from it.

    Where the reference is zero every difference points away.

    >>> outward(np.array([-1.0, -1.0, 2.0**-23]), np.array([2.0**24, -(2.0**23), 1.0])).tolist()
    [-0.5, 1.0, 1.0]
    """
    exponent = np.where(reference == 0, F32_MIN_EXPONENT, np.maximum(np.frexp(reference)[1] - 1, F32_MIN_EXPONENT))
    ulps = np.ldexp(difference, F32_FRACTION_BITS - exponent)
    signed: F64 = np.where(reference == 0, np.abs(ulps), ulps * np.sign(reference))
    return signed


def compare_accumulation(a: QuantizedTensor, b: QuantizedTensor) -> AccumulationComparison:
    """Accumulate ``A @ B.T`` on the tensor core, in float32, in exact integers, and with K split in two.

    Parameters
    ----------
    a, b
        ``(M, K)`` and ``(N, K)`` NVFP4; signs of block scales are ignored throughout, as the tensor core does.

    Raises
    ------
    FormatError
        ``gemm.recipe`` if one is not NVFP4; ``mma.exact-nan`` if a block scale is NaN: then there is no exact product;
        and those of :func:`nvfp4viz.quant.mma_matmul`.
    """
    for operand in (a, b):
        if find_recipe(operand.recipe).scheme != "nvfp4":
            raise FormatError("gemm.recipe", a=a.recipe, b=b.recipe)
    tensor_core = mma_matmul(a.packed, a.scales, b.packed, b.scales)
    left, right = _decoded(a), _decoded(b)
    k = left.shape[1]
    sums = np.zeros((len(left), len(right)), np.float32)
    for column in range(k):
        sums += left[:, column, None] * right[:, column]
    # Both operands in units of 2^-10; at most 36 * 448^2 * 2^20 a product, so that int64 holds 2^19 of them.
    exact = np.ldexp(left, 10).astype(np.int64) @ np.ldexp(right, 10).astype(np.int64).T
    return AccumulationComparison(k, exact, tensor_core, sums, _split(a, b))


def _decoded(operand: QuantizedTensor) -> F32:
    """Elements times the magnitudes of their block scales, exact in float32, without the global scale."""
    scales = np.abs(decode_e4m3(operand.scales))
    if np.isnan(scales).any():
        raise FormatError("mma.exact-nan", count=int(np.isnan(scales).sum()))
    values: F32 = decode_e2m1(unpack_nibbles(operand.packed)) * np.repeat(scales, GROUP, axis=-1)
    return values


def _split(a: QuantizedTensor, b: QuantizedTensor) -> F32:
    middle = -(-a.packed.shape[1] * 2 // STEP) // 2 * STEP
    halves = [half for half in (slice(0, middle), slice(middle, a.packed.shape[1] * 2)) if half.stop > half.start]
    parts = [mma_matmul(*_columns(a, half), *_columns(b, half)) for half in halves]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _columns(operand: QuantizedTensor, part: slice) -> tuple[U8, U8]:
    """Packed codes and scales of a part of K that begins and ends with whole blocks."""
    packed = operand.packed[:, part.start // 2 : part.stop // 2]
    return np.ascontiguousarray(packed), np.ascontiguousarray(
        operand.scales[:, part.start // GROUP : part.stop // GROUP]
    )
