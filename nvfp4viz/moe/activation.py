"""Activations between the two products of an expert or an MLP, with vLLM's rounding points.

The stand-alone kernels compute the activation in f32, **round it to BF16**, multiply by the up half in f32, and round
again (`numerics-vllm.md` 1.6).  A single rounding at the end, as a formula would have it, gives other bits.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import bf16_to_f32, f32_to_bf16

Array = npt.NDArray[Any]
SQRT_2_OVER_PI = np.float32(0.7978845608028654)
CUBIC = np.float32(0.044715)
HALF, ONE = np.float32(0.5), np.float32(1)


def _halves(x: Array) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    values = bf16_to_f32(x) if x.dtype == np.dtype(ml_dtypes.bfloat16) else x.astype(np.float32)
    width = values.shape[-1] // 2
    return values[..., :width], values[..., width:]


def _gated(activated: npt.NDArray[np.float32], up: npt.NDArray[np.float32]) -> Array:
    return f32_to_bf16(bf16_to_f32(f32_to_bf16(activated)) * up)


def gelu_tanh(gate: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """``0.5·f·(1 + tanh(√(2/π)·(f + 0.044715·f³)))`` in f32.

    The hyperbolic tangent is taken in float64 and rounded, so that every machine gives the same bits; CUDA's ``tanhf``
    may differ from that by an ulp.
    """
    with np.errstate(all="ignore"):
        inner = SQRT_2_OVER_PI * (gate + CUBIC * gate * gate * gate)
        tanh = np.tanh(inner.astype(np.float64)).astype(np.float32)
        activated: npt.NDArray[np.float32] = HALF * gate * (ONE + tanh)
        return activated


def fused_silu(gate: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """``f / (1 + exp(−f))`` rounded to f32 once: the CUTLASS path's kernel, its fast exponential taken as exact."""
    with np.errstate(all="ignore"):
        activated: npt.NDArray[np.float32] = (gate / (1.0 + np.exp(-gate.astype(np.float64)))).astype(np.float32)
        return activated


def gelu_tanh_scalar(gate: np.float32) -> np.float32:
    """`gelu_tanh` of one number."""
    inner = SQRT_2_OVER_PI * (gate + CUBIC * gate * gate * gate)  # float32: one rounding an operation
    tanh = np.float32(np.tanh(np.float64(inner)))
    return np.float32(HALF * gate * (ONE + tanh))


def fused_silu_scalar(gate: np.float32) -> np.float32:
    """`fused_silu` of one number."""
    wide = np.float64(gate)
    return np.float32(wide / (1.0 + np.exp(-wide)))


def gelu_tanh_and_mul(x: Array) -> Array:
    """``gelu_tanh(gate) * up`` of ``x (T, 2I)`` BF16, gate first; ``(T, I)`` BF16.

    >>> gelu_tanh_and_mul(np.array([[1.0, 2.0]], ml_dtypes.bfloat16)).tolist()
    [[1.6796875]]
    """
    with np.errstate(all="ignore"):
        gate, up = _halves(x)
        return _gated(gelu_tanh(gate), up)


def silu_and_mul(x: Array) -> Array:
    """``silu(gate) * up`` of ``x (T, 2I)`` BF16, gate first; ``(T, I)`` BF16.

    ``f / (1 + exp(−f))`` in f32, the exponential in float64 and rounded.

    >>> silu_and_mul(np.array([[1.0, 2.0]], ml_dtypes.bfloat16)).tolist()
    [[1.4609375]]
    """
    with np.errstate(all="ignore"):
        gate, up = _halves(x)
        return _gated(gate / (ONE + np.exp(-gate.astype(np.float64)).astype(np.float32)), up)
