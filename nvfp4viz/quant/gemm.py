"""Three ways to multiply with a quantised weight: on the tensor core, as Marlin does, and by decoding first.

``gemm_w4a4``          both operands NVFP4 (or MXFP4), through the bit-exact tensor-core product
``gemm_w4a16_marlin``  BF16 activations times a weight decoded on the fly, as vLLM's Marlin kernel prepares it
``gemm_dequantized``   decode both, then an ordinary float32 product

All return ``x @ w.T``: weights are stored as ``(N, K)``.  Every NaN of a result is the canonical one of a GPU,
0x7FFFFFFF (BF16: 0x7FFF), whatever this machine's own would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import bf16_to_f32, decode_e2m1, decode_e4m3, f32_to_bf16
from nvfp4viz.formats.paths import ArrayPath, by_numpy
from nvfp4viz.quant.api import dequantize
from nvfp4viz.quant.recipes import find_recipe
from nvfp4viz.quant.tensor_core import mma_matmul
from nvfp4viz.quant.tensor_core_step import CANONICAL_NAN
from nvfp4viz.quant.types import QuantizedTensor

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MARLIN_BIAS = 126
"""Marlin leaves an E2M1 value's bits in BF16's exponent and fraction places, which reads as ``value * 2**-126``."""
MARLIN_TOP = 448.0 * 128.0
"""Where the largest lifted block scale should come to lie: the largest E4M3 value times 2^7."""


def gemm_w4a4(
    a: QuantizedTensor,
    b: QuantizedTensor,
    alpha: np.float32 | float | None = None,
    out_dtype: npt.DTypeLike = BFLOAT16,
    path: ArrayPath = "auto",
) -> Array:
    """``round(alpha * (A @ B.T))``, the product on the tensor core, ``alpha`` in f32, then one rounding.

    Parameters
    ----------
    a, b
        ``(M, K)`` activations and ``(N, K)`` weight, both NVFP4 or both MXFP4.
    alpha
        The epilogue's factor; by default the product of the two decode scales, as vLLM computes it in f32.
    out_dtype
        bfloat16, or float32 for the scaled accumulator itself.

    Raises
    ------
    FormatError
        ``gemm.recipe``, ``gemm.shape``, ``quantize.dtype``, ``path.unknown``
    """
    kind = find_recipe(a.recipe).scheme
    if kind != find_recipe(b.recipe).scheme:
        raise FormatError("gemm.recipe", a=a.recipe, b=b.recipe)
    _check_shapes(a.shape, b.shape)
    acc = mma_matmul(a.packed, a.scales, b.packed, b.scales, kind=kind, path=path)
    with np.errstate(all="ignore"):
        factor = a.decode_scale * b.decode_scale if alpha is None else np.float32(alpha)
    return scale_and_round(acc, factor, out_dtype)


def scale_and_round(acc: F32, factor: np.float32 | F32, out_dtype: npt.DTypeLike = BFLOAT16) -> Array:
    """The epilogue ``D = round(factor * acc)``: one f32 product, NaN made canonical, then bfloat16 or float32.

    >>> scale_and_round(np.float32([1.01, np.inf]), np.float32(0.0), np.float32).view(np.uint32).tolist()
    [0, 2147483647]
    """
    wanted = np.dtype(out_dtype)
    if wanted not in (BFLOAT16, np.dtype(np.float32)):
        raise FormatError("quantize.dtype", dtype=wanted)
    with np.errstate(all="ignore"):
        scaled = np.asarray(acc * factor, np.float32)
    scaled[np.isnan(scaled)] = np.uint32(CANONICAL_NAN).view(np.float32)
    return f32_to_bf16(scaled) if wanted == BFLOAT16 else scaled


# ------------------------------------------------------------------------------------------------------- Marlin


@dataclass(frozen=True, slots=True, eq=False)
class MarlinWeight:
    """An NVFP4 weight as Marlin holds it for BF16 activations (`numerics-vllm.md` section 7).

    Attributes
    ----------
    packed : (N, K//2) uint8
        E2M1 codes, unchanged.
    scale_bytes : (N, K//16) uint8
        Block scales as S0E5M3: a 5-bit exponent and 3 fraction bits, no sign.
    scale_factor
        The power of two by which block scales were lifted, beyond 2^7.
    global_scale : float32
        ``G' = G * 2^(126-7) / scale_factor``, the epilogue's factor.
    vanished
        Block scales that are not zero in the file and zero here.
    """

    packed: U8
    scale_bytes: U8
    scale_factor: float
    global_scale: np.float32
    vanished: int


def marlin_scale_factor(scales: U8) -> float:
    """``2^floor(log2(448*128 / max(s*128)))`` over the positive block scales, or 1 if one reaches 448 or is NaN.

    >>> marlin_scale_factor(np.uint8([0x38, 0x30])), marlin_scale_factor(np.uint8([0x7E, 0x01]))
    (256.0, 1.0)
    """
    values = decode_e4m3(scales)
    top = float(values.max(initial=0.0))
    if not 0.0 < top * 128.0 < MARLIN_TOP:
        return 1.0
    # frexp takes the floor of the logarithm from the exponent field; log2 itself might round up to the next integer.
    return float(2.0 ** (np.frexp(MARLIN_TOP / (top * 128.0))[1] - 1))


def marlin_weight(w: QuantizedTensor, scale_factor: float | None = None) -> MarlinWeight:
    """Convert an NVFP4 weight for Marlin.

    Lifted scales ``s' = s * scale_factor * 2^7`` below 2 become 0, so negative ones do as well; Marlin only warns about
    those.  The byte is the upper half of the fp16 bits shifted left by one.  A NaN scale becomes byte 0xFC, which the
    kernel then reads as an ordinary number, 1.5 * 2^16 (derived from the bit operations, not run).

    Parameters
    ----------
    w
        NVFP4.
    scale_factor
        Shared by all experts of a layer in vLLM; by default this tensor's own.

    Raises
    ------
    FormatError
        ``gemm.recipe`` for MXFP4.
    """
    if find_recipe(w.recipe).scheme != "nvfp4":
        raise FormatError("gemm.recipe", a="bf16", b=w.recipe)
    factor = marlin_scale_factor(w.scales) if scale_factor is None else scale_factor
    values = decode_e4m3(w.scales)
    with np.errstate(all="ignore"):
        lifted = values * np.float32(factor * 128.0)
        lifted = np.where(lifted < 2, np.float32(0), lifted)
        half = lifted.astype(np.float16).view(np.uint16)
        scaled_global = w.decode_scale * np.float32(2.0 ** (MARLIN_BIAS - 7)) / np.float32(factor)
    bytes_ = ((half << np.uint16(1)) >> np.uint16(8)).astype(np.uint8)
    vanished = int(np.count_nonzero((bytes_ == 0) & (values != 0)))
    return MarlinWeight(w.packed, bytes_, factor, np.float32(scaled_global), vanished)


def marlin_values(weight: MarlinWeight) -> F32:
    """``(N, K)`` float32: what the kernel multiplies, ``element * 2^-126 * s'``, exact in BF16."""
    exponent = (weight.scale_bytes >> np.uint8(3)).astype(np.int32)
    fraction = (weight.scale_bytes & np.uint8(7)).astype(np.float32) / np.float32(8) + np.float32(1)
    scales = np.where(weight.scale_bytes == 0, np.float32(0), np.ldexp(fraction, exponent - 15))
    elements = decode_e2m1(np.stack([weight.packed & 0xF, weight.packed >> 4], axis=-1))
    blocks = elements.reshape(*weight.scale_bytes.shape, 16)
    # The scale first: it is at least 2 or 0, so that no element is lost below BF16's smallest normal number.
    values: F32 = (blocks * scales[..., None].astype(np.float32)) * np.float32(2.0**-MARLIN_BIAS)
    return values.reshape(len(weight.packed), -1)


def gemm_w4a16_marlin(
    x: Array,
    w: QuantizedTensor | MarlinWeight,
    out_dtype: npt.DTypeLike = BFLOAT16,
    apply_global: bool = True,
    path: ArrayPath = "auto",
) -> Array:
    """BF16 activations times an NVFP4 weight as Marlin prepares it; the activations' own scale is never read.

    Accumulates in f32, one k after the other: ``acc = f32(acc + f32(x[k] * w[k]))``.  Hardware adds several products at
    once, in an order and precision of its own; the sequential sum is our definition.  The accumulator
    holds the result divided by G', about 2^-119 of it, so tiny activations reach f32's subnormal numbers.

    Parameters
    ----------
    x : (M, K) bfloat16
    w
        ``(N, K)`` NVFP4, or the result of :func:`marlin_weight`.
    out_dtype
        bfloat16, or float32.
    apply_global
        Multiply by G' before rounding.  vLLM's second expert GEMM does not: it rounds first and multiplies by the
        routing weight times G' afterwards.

    Raises
    ------
    FormatError
        ``gemm.recipe``, ``gemm.shape``, ``quantize.dtype``, ``path.unknown``
    """
    weight = w if isinstance(w, MarlinWeight) else marlin_weight(w)
    if x.dtype != BFLOAT16:
        raise FormatError("quantize.dtype", dtype=x.dtype)
    _check_shapes(x.shape, (len(weight.packed), weight.packed.shape[-1] * 2))
    columns = np.ascontiguousarray(marlin_values(weight).T)
    if by_numpy(path):
        acc = _sequential_numpy(bf16_to_f32(x), columns)
    else:
        from nvfp4viz.quant.gemm_kernels import sequential_product

        acc = np.zeros((len(x), columns.shape[1]), np.float32)
        sequential_product(bf16_to_f32(x), columns, acc)
    return scale_and_round(acc, weight.global_scale if apply_global else np.float32(1), out_dtype)


def _sequential_numpy(x: F32, columns: F32) -> F32:
    acc = np.zeros((len(x), columns.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for k in range(len(columns)):
            acc += x[:, k, None] * columns[k]
    return acc


# ------------------------------------------------------------------------------------------------ decode first


def gemm_dequantized(
    a: QuantizedTensor | Array, b: QuantizedTensor | Array, out_dtype: npt.DTypeLike = np.float32
) -> Array:
    """Decode to float32, multiply in float32 with BLAS, in whatever order it adds.

    Parameters
    ----------
    a, b
        ``(M, K)`` and ``(N, K)``: quantised, or plain bfloat16 or float32.

    Raises
    ------
    FormatError
        ``gemm.shape``, ``quantize.dtype``
    """
    left, right = _as_f32(a), _as_f32(b)
    _check_shapes(left.shape, right.shape)
    with np.errstate(all="ignore"):
        product = left @ right.T
    return scale_and_round(product, np.float32(1), out_dtype)


def _as_f32(operand: QuantizedTensor | Array) -> F32:
    if isinstance(operand, QuantizedTensor):
        values: F32 = dequantize(operand)
        return values
    if operand.dtype == BFLOAT16:
        return bf16_to_f32(operand)
    if operand.dtype != np.float32:
        raise FormatError("quantize.dtype", dtype=operand.dtype)
    return operand


def _check_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    if len(a) != 2 or len(b) != 2 or a[1] != b[1]:
        raise FormatError("gemm.shape", a=a, b=b)
