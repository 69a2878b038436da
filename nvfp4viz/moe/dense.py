"""Expert backends that multiply values instead of tensor-core codes: Marlin, the emulation, and plain BF16.

All three accumulate in f32 on a GPU, in an order that the kernel's tiling decides.  Here every product is summed in
f32 one k after the other, each product and each sum rounded: the definition of `nvfp4viz.quant.gemm_w4a16_marlin`,
with the same bits on every machine, whatever its BLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.moe.dataflow import Dispatch, plan_dispatch, round_bf16, shuffle_rows, sum_routes
from nvfp4viz.moe.experts import (
    Activation,
    ExpertsResult,
    ExpertsTrace,
    Operand,
    activate,
    epilogue,
    nan_experts_of,
)
from nvfp4viz.moe.routing import Routing

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class W4A16Experts:
    """What Marlin reads: no activation scale at all.

    Attributes
    ----------
    w13, w2 : (E, H, 2I), (E, I, H) float32
        ``code value * 2^-126 * s'``, k first: s' is the block scale times ``2^7 * sf``, or 0 where that is below 2.
    global13, global2 : (E,) float32
        ``G' = weight_scale_2 * 2^(126 - 7) / sf``, the epilogue's factor.
    sf13, sf2
        The power of two that lifts the layer's block scales, one for all experts.
    vanished13, vanished2
        Block scales that are not zero in the file and zero after that conversion.
    """

    w13: F32
    w2: F32
    global13: F32
    global2: F32
    sf13: float
    sf2: float
    vanished13: int
    vanished2: int
    activation: Activation = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class EmulationExperts:
    """Weights decoded once, activations through one quantise-dequantise with the layer's scale.

    Attributes
    ----------
    w13, w2 : (E, H, 2I), (E, I, H) float32
        ``bf16(code value * (block scale * weight_scale_2))``, k first.
    a1_gscale, a2_gscale : float32
        ``1 / max`` over all experts and both shards; one number a layer.
    """

    w13: F32
    w2: F32
    a1_gscale: np.float32
    a2_gscale: np.float32
    activation: Activation = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class Bf16Experts:
    """Unquantised experts: w13 (E, H, 2I) and w2 (E, I, H), BF16 values kept as f32, k first."""

    w13: F32
    w2: F32
    activation: Activation = "gelu_tanh"


def product_f32(rows: Array, row_expert: Array, columns: F32) -> F32:
    """Each row times its expert's matrix in f32, k after k: (R, K) BF16 and (E, K, N) to (R, N).

    `row_expert` must be ascending, as a dispatch orders it.
    """
    from nvfp4viz.quant.gemm_kernels import sequential_product

    out = np.zeros((len(rows), columns.shape[2]), np.float32)
    x = rows.astype(np.float32)
    ids, starts = np.unique(row_expert, return_index=True)
    ends = [*starts[1:].tolist(), len(rows)]
    for expert, begin, end in zip(ids.tolist(), starts.tolist(), ends, strict=True):
        sequential_product(x[begin:end], columns[expert], out[begin:end])
    return out


def k_first(weights: F32) -> F32:
    """(E, N, K) to a contiguous (E, K, N): the order in which a sequential product reads."""
    return np.ascontiguousarray(weights.transpose(0, 2, 1))


# ------------------------------------------------------------------------------------------------------ preparing


def prepare_w4a16(
    w13_packed: U8,
    w13_scales: U8,
    w13_global: F32,
    w2_packed: U8,
    w2_scales: U8,
    w2_global: F32,
    activation: Activation = "gelu_tanh",
) -> W4A16Experts:
    """Weights in the file's layout to Marlin's values (`numerics-vllm.md` section 7).

    Parameters
    ----------
    w13_packed, w13_scales, w13_global : (E, 2I, H//2) uint8, (E, 2I, H//16) uint8, (E,) float32
    w2_packed, w2_scales, w2_global : (E, H, I//2) uint8, (E, H, I//16) uint8, (E,) float32
    """
    w13, global13, sf13, vanished13 = _marlin(w13_packed, w13_scales, w13_global)
    w2, global2, sf2, vanished2 = _marlin(w2_packed, w2_scales, w2_global)
    return W4A16Experts(w13, w2, global13, global2, sf13, sf2, vanished13, vanished2, activation)


def _marlin(packed: U8, scales: U8, weight_scale_2: F32) -> tuple[F32, F32, float, int]:
    """All experts' rows as one weight, so that they share one scale factor; each keeps its own G'."""
    from nvfp4viz.quant import QuantizedTensor
    from nvfp4viz.quant.gemm import marlin_values, marlin_weight

    experts, rows, half = packed.shape
    flat = packed.reshape(-1, half), scales.reshape(-1, scales.shape[2])
    one = QuantizedTensor(*flat, np.float32(1), "modelopt", 16, (experts * rows, half * 2))
    weight = marlin_weight(one)
    values = k_first(marlin_values(weight).reshape(experts, rows, half * 2))
    with np.errstate(over="ignore"):
        factors = np.asarray(weight_scale_2, np.float32) * weight.global_scale
    return values, factors, weight.scale_factor, weight.vanished


def prepare_emulation(
    w13_packed: U8,
    w13_scales: U8,
    w13_global: F32,
    w2_packed: U8,
    w2_scales: U8,
    w2_global: F32,
    a1_gscale: np.float32,
    a2_gscale: np.float32,
    activation: Activation = "gelu_tanh",
) -> EmulationExperts:
    """Weights in the file's layout to the BF16 values that the emulation multiplies."""
    w13 = k_first(decode_weights(w13_packed, w13_scales, w13_global))
    w2 = k_first(decode_weights(w2_packed, w2_scales, w2_global))
    return EmulationExperts(w13, w2, np.float32(a1_gscale), np.float32(a2_gscale), activation)


def decode_weights(packed: U8, scales: U8, weight_scale_2: F32) -> F32:
    """``bf16(code value * (block scale * weight_scale_2))``, kept as f32: (E, N, K//2) to (E, N, K)."""
    from nvfp4viz.formats import decode_e2m1, decode_e4m3, unpack_nibbles

    with np.errstate(invalid="ignore", over="ignore"):
        factors = decode_e4m3(scales) * np.asarray(weight_scale_2, np.float32)[:, None, None]
        values = decode_e2m1(unpack_nibbles(packed)) * np.repeat(factors, 16, axis=-1)
    return round_bf16(values).astype(np.float32)


# -------------------------------------------------------------------------------------------------------- running


def run_w4a16_experts(x: Array, routing: Routing, experts: W4A16Experts, record: bool = False) -> ExpertsResult:
    """MARLIN: BF16 activations times ``code * block scale``; ``input_scale`` plays no part.

    First GEMM: ``c1 = bf16(acc * G')``.  Second GEMM, which also applies the routing weight: the accumulator is
    rounded to BF16 *before* it is scaled, then multiplied by ``bf16(w * G')``; the token's products are summed in
    f32.

    Parameters
    ----------
    x : (T, H) bfloat16
    """
    plan = _plan(x, routing, experts)
    row_expert = plan.row_expert
    rows = shuffle_rows(x, plan.a_map[: plan.rows])
    acc1 = product_f32(rows, row_expert, experts.w13)
    alpha1 = experts.global13[row_expert]
    c1 = epilogue(acc1, alpha1)
    c2 = activate(c1, experts.activation)
    acc2 = product_f32(c2, row_expert, experts.w2)
    with np.errstate(over="ignore", invalid="ignore"):
        alpha2 = round_bf16(_route_weights(plan, routing) * experts.global2[row_expert]).astype(np.float32)
    c3 = epilogue(round_bf16(acc2).astype(np.float32), alpha2)
    return _finish(plan, routing, Operand(rows), acc1, alpha1, c1, Operand(c2), acc2, alpha2, c3, record)


def run_emulation_experts(x: Array, routing: Routing, experts: EmulationExperts, record: bool = False) -> ExpertsResult:
    """EMULATION: activations are quantised and dequantised with one scale a layer, weights decoded to BF16.

    No codes are multiplied and no alpha is applied.  A zero or infinite scale has other consequences than on the
    CUTLASS path (`qdq_emulation`), so this backend does not reproduce the failure.
    """

    def through_fp4(rows: Array, which: int) -> Operand:
        gscale = experts.a1_gscale if which == 1 else experts.a2_gscale
        codes, scales, back = qdq_emulation(rows, gscale)
        return Operand(rows, np.full(len(rows), gscale, np.float32), codes, scales, back)

    return _run_values(x, routing, experts, record, through_fp4)


def qdq_emulation(rows: Array, gscale: np.float32) -> tuple[U8, U8, Array]:
    """Quantise and dequantise as vLLM's Triton kernel does: ``_nvfp4_quant_dequant_kernel``.

    ``S = E4M3(clamp(g * (amax * (1/6)), ±448))``; ``o = 0 if S == 0 else g / S``, one division; codes by thresholds,
    with 0 for NaN; the result is ``code * (S / g)`` in the input's type.  Source: `numerics-vllm.md` section 3.  So g
    = 0 gives 0 · (0/0) = NaN where the CUDA kernel gives zeros, and g = Inf gives zeros where the kernel gives ±6 at
    scale 448.

    Parameters
    ----------
    rows : (R, K) bfloat16
    gscale
        Encode scale.

    Returns
    -------
    (R, K//2) packed codes, (R, K//16) scale bytes, (R, K) BF16 values.

    >>> import ml_dtypes
    >>> x = np.ones((1, 16), ml_dtypes.bfloat16)
    >>> [float(qdq_emulation(x, np.float32(g))[2][0, 0]) for g in (2688, 0, np.inf)]
    [1.0, nan, 0.0]
    """
    from nvfp4viz.formats import decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3, pack_nibbles

    blocks = rows.astype(np.float32).reshape(len(rows), -1, 16)
    with np.errstate(all="ignore"):
        # Triton's maximum skips a NaN unless it is alone.
        top = np.fmax.reduce(np.abs(blocks), axis=-1)
        scales = encode_e4m3(np.clip(gscale * (top * np.float32(1 / 6)), np.float32(-448), np.float32(448)))
        s = decode_e4m3(scales)
        y = blocks * np.where(s == 0, np.float32(0), gscale / s)[..., None]
        codes = np.where(np.isnan(y), np.uint8(0), encode_e2m1(y))
        back = round_bf16(decode_e2m1(codes) * (s / gscale)[..., None])
    return pack_nibbles(codes.reshape(rows.shape)), scales, back.reshape(rows.shape)


def run_bf16_experts(x: Array, routing: Routing, experts: Bf16Experts, record: bool = False) -> ExpertsResult:
    """Unquantised experts: BF16 values, f32 accumulator, BF16 between the two products."""
    return _run_values(x, routing, experts, record, lambda rows, which: Operand(rows))


def _run_values(
    x: Array,
    routing: Routing,
    experts: EmulationExperts | Bf16Experts,
    record: bool,
    operand: Callable[[Array, int], Operand],
) -> ExpertsResult:
    """The Triton path of vLLM: the routing weight multiplies the second accumulator in f32, then BF16, then the sum."""
    plan = _plan(x, routing, experts)
    row_expert = plan.row_expert
    first = operand(shuffle_rows(x, plan.a_map[: plan.rows]), 1)
    acc1 = product_f32(_multiplied(first), row_expert, experts.w13)
    alpha1 = np.ones(plan.rows, np.float32)
    c1 = round_bf16(acc1)
    second = operand(activate(c1, experts.activation), 2)
    acc2 = product_f32(_multiplied(second), row_expert, experts.w2)
    alpha2 = _route_weights(plan, routing)
    c3 = epilogue(acc2, alpha2)
    return _finish(plan, routing, first, acc1, alpha1, c1, second, acc2, alpha2, c3, record)


def _multiplied(operand: Operand) -> Array:
    return operand.values if operand.dequantised is None else operand.dequantised


def _plan(x: Array, routing: Routing, experts: W4A16Experts | EmulationExperts | Bf16Experts) -> Dispatch:
    count, k, n1 = experts.w13.shape
    return plan_dispatch(routing.ids, count, n1=n1, n=experts.w2.shape[1], k=k)


def _route_weights(plan: Dispatch, routing: Routing) -> F32:
    """The routing weight of each permuted row."""
    weights = np.empty(plan.rows, np.float32)
    weights[plan.c_map] = np.asarray(routing.weights, np.float32).ravel()
    return weights


def _finish(
    plan: Dispatch,
    routing: Routing,
    first: Operand,
    acc1: F32,
    alpha1: F32,
    c1: Array,
    second: Operand,
    acc2: F32,
    alpha2: F32,
    c3: Array,
    record: bool,
) -> ExpertsResult:
    """Rows already carry their routing weight: put them back and add them up."""
    routes = shuffle_rows(c3, plan.c_map).reshape(*plan.ids.shape, c3.shape[1])
    out = sum_routes(routes)
    trace = None
    if record:
        weights = np.asarray(routing.weights, np.float32)
        trace = ExpertsTrace(plan, first, acc1, alpha1, c1, second, acc2, alpha2, c3, routes, weights, out)
    return ExpertsResult(out, nan_experts_of(c3, plan.row_expert), trace)
