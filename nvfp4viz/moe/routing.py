"""Which experts a token is sent to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import bf16_to_f32, f32_to_bf16

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
LOG2_E = np.float32(1.4426950408889634)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where T tokens go.

    Attributes
    ----------
    ids : (T, k) int32
        Experts, best first.
    weights : (T, k) float32
        What each expert's output is multiplied by.
    logits : (T, E) float32
    """

    ids: npt.NDArray[np.int32]
    weights: F32
    logits: F32


def top_k_stable(logits: F32, top_k: int) -> npt.NDArray[np.int32]:
    """Ids of the k largest logits, best first; ties go to the lower id, and NaN counts as the largest.

    That is ``torch.sort(descending=True, stable=True)``, which Gemma 4's router in vLLM uses.

    >>> top_k_stable(np.float32([[1, 3, 3, np.nan]]), 3).tolist()
    [[3, 1, 2]]
    """
    # NumPy sorts NaN last in ascending order of the negated values; a key of −inf below every number puts it first.
    nan = np.isnan(logits)
    order = np.lexsort((np.where(nan, np.float32(0), -logits), ~nan), axis=-1)
    return order[..., :top_k].astype(np.int32)


def route_gemma4(
    residual: Array, proj: Array, scale: Array, per_expert_scale: Array, top_k: int, eps: float = 1e-6
) -> Routing:
    """Gemma 4's router (`serving-vllm.md` section 9).

    Its input is the **residual**, not the experts' input: RMSNorm without weight, times ``H^-0.5`` in BF16, times
    ``scale``, then f32 logits.  Softmax over the chosen k alone, times the expert's own scale.  A NaN logit is chosen
    first and gives NaN weights: nothing clamps it.

    Parameters
    ----------
    residual : (T, H) bfloat16
    proj : (E, H) bfloat16 or float64
        float64 copies of BF16 weights are taken as they are: a caller that routes often converts once.
    scale : (H,) bfloat16
    per_expert_scale : (E,) bfloat16
    """
    with np.errstate(all="ignore"):
        x = rms_norm(residual, None, eps)
        x = f32_to_bf16(bf16_to_f32(x) * bf16_to_f32(f32_to_bf16(np.float32(residual.shape[-1] ** -0.5))))
        x = f32_to_bf16(bf16_to_f32(x) * bf16_to_f32(scale))
        logits = product(x, proj)
        ids = top_k_stable(logits, top_k)
        chosen = np.take_along_axis(logits, ids, axis=-1)
        exponent = ((chosen - chosen[:, :1]) * LOG2_E).astype(np.float64)
        parts = np.exp2(exponent).astype(np.float32)
        weights = parts / parts.sum(axis=-1, keepdims=True, dtype=np.float32)
        return Routing(ids, weights * bf16_to_f32(per_expert_scale)[ids], logits)


def product(x: Array, weight: Array) -> F32:
    """``x @ weight.T`` of BF16 operands, rounded once to f32.

    The sum is taken in float64, where 2^16 BF16 products are exact to about 2^-37 of the largest: whatever the order in
    which a BLAS adds, the f32 result is the same, so routing and calibration repeat on every machine.
    """
    with np.errstate(all="ignore"):
        right = weight if weight.dtype == np.float64 else weight.astype(np.float64)
        result: F32 = (x.astype(np.float64) @ right.T).astype(np.float32)
        return result


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """RMSNorm of ``x (…, H)`` BF16 in f32, rounded to BF16 after the weight (if there is one)."""
    with np.errstate(all="ignore"):
        values = bf16_to_f32(x)
        mean = np.mean(values.astype(np.float64) ** 2, axis=-1, keepdims=True)
        normal = values * (1.0 / np.sqrt(mean + eps)).astype(np.float32)
        return f32_to_bf16(normal if weight is None else normal * bf16_to_f32(weight))
