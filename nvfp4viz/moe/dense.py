"""Expert backends that multiply values instead of tensor-core codes: Marlin, the emulation, and plain BF16.

All three accumulate in f32 on a GPU, in an order that the kernel's tiling decides.  Here a product is **summed in
float64 and rounded to f32 once**: every term (a product of two BF16 values) is exact, so any order of summation gives
the same f32 unless the sum lies within 2^-50 of a rounding boundary, and results do not depend on the BLAS of the
machine.
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
    RoutingLike,
    activate,
    epilogue,
    nan_experts_of,
)

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

MARLIN_BIAS = 126
"""Marlin places an E2M1 value in BF16's exponent field unchanged, which makes it ``value * 2^-126``."""
MARLIN_SCALE_MAX = 448.0 * 128.0


@dataclass(frozen=True, slots=True)
class W4A16Experts:
    """What Marlin reads: no activation scale at all.

    Attributes
    ----------
    w13, w2 : (E, 2I, H), (E, H, I) float32
        ``code value * s'`` in Marlin's units: s' is the block scale times ``2^7 * sf``, or 0 where that is below 2.
        Exact in BF16; kept as f32.
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

    @property
    def count(self) -> int:
        return int(self.w13.shape[0])


@dataclass(frozen=True, slots=True)
class EmulationExperts:
    """Weights decoded once, activations through one quantise-dequantise with the layer's scale.

    Attributes
    ----------
    w13, w2 : (E, 2I, H), (E, H, I) float32
        ``bf16(code value * (block scale * weight_scale_2))``.
    a1_gscale, a2_gscale : float32
        ``1 / max`` over all experts and both shards; one number a layer.
    """

    w13: F32
    w2: F32
    a1_gscale: np.float32
    a2_gscale: np.float32
    activation: Activation = "gelu_tanh"

    @property
    def count(self) -> int:
        return int(self.w13.shape[0])


@dataclass(frozen=True, slots=True)
class Bf16Experts:
    """Unquantised experts: w13 (E, 2I, H) and w2 (E, H, I), BF16 values kept as f32."""

    w13: F32
    w2: F32
    activation: Activation = "gelu_tanh"

    @property
    def count(self) -> int:
        return int(self.w13.shape[0])


def product_f32(rows: Array, row_expert: Array, weights: F32) -> F32:
    """Each row times its expert's matrix: (R, K) BF16 and (E, N, K) to (R, N) f32, rounded once.

    `row_expert` must be ascending, as a dispatch orders it.
    """
    out = np.empty((len(rows), weights.shape[1]), np.float32)
    wide = rows.astype(np.float64)
    ids, starts = np.unique(row_expert, return_index=True)
    ends = [*starts[1:].tolist(), len(rows)]
    with np.errstate(invalid="ignore", over="ignore"):
        for expert, begin, end in zip(ids.tolist(), starts.tolist(), ends, strict=True):
            out[begin:end] = wide[begin:end] @ weights[expert].T.astype(np.float64)
    return out


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
    w13, sf13, vanished13 = _marlin_values(w13_packed, w13_scales)
    w2, sf2, vanished2 = _marlin_values(w2_packed, w2_scales)
    return W4A16Experts(
        w13,
        w2,
        marlin_global(w13_global, sf13),
        marlin_global(w2_global, sf2),
        sf13,
        sf2,
        vanished13,
        vanished2,
        activation,
    )


def marlin_scale_factor(scales: F32) -> float:
    """``2^floor(log2(448*128 / max(s*128)))`` over all scales of the layer, or 1 if they reach that already.

    >>> marlin_scale_factor(np.float32([3.5, 448])), marlin_scale_factor(np.float32([0, 3.5]))
    (1.0, 128.0)
    """
    top = float((scales * 128.0).max(initial=0.0))
    # A NaN among the scales fails the comparison as well, and leaves them as they are.
    if top == 0.0 or not top < MARLIN_SCALE_MAX:
        return 1.0
    # frexp gives the floor of log2 exactly, where log2 itself may round up to the next integer.
    return float(2.0 ** (np.frexp(MARLIN_SCALE_MAX / top)[1] - 1))


def marlin_global(weight_scale_2: F32, sf: float) -> F32:
    """``G' = G * 2^(126-7) / sf`` in f32."""
    with np.errstate(over="ignore"):
        return np.asarray(weight_scale_2, np.float32) * np.float32(2.0 ** (MARLIN_BIAS - 7)) / np.float32(sf)


def _marlin_values(packed: U8, scales: U8) -> tuple[F32, float, int]:
    from nvfp4viz.formats import decode_e2m1, decode_e4m3, unpack_nibbles

    decoded = decode_e4m3(scales)
    sf = marlin_scale_factor(decoded)
    lifted = decoded * np.float32(128.0 * sf)
    # Negative scales are below 2 as well.  A NaN stays NaN here; what the kernel's bit pattern makes of it is not known.
    small = lifted < 2.0
    vanished = int(np.count_nonzero(small & (decoded != 0)))
    lifted = np.where(small, np.float32(0), lifted)
    values = decode_e2m1(unpack_nibbles(packed))
    return values * np.repeat(lifted, 16, axis=-1), sf, vanished


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
    w13 = decode_weights(w13_packed, w13_scales, w13_global)
    w2 = decode_weights(w2_packed, w2_scales, w2_global)
    return EmulationExperts(w13, w2, np.float32(a1_gscale), np.float32(a2_gscale), activation)


def decode_weights(packed: U8, scales: U8, weight_scale_2: F32) -> F32:
    """``bf16(code value * (block scale * weight_scale_2))``, kept as f32: (E, N, K//2) to (E, N, K)."""
    from nvfp4viz.formats import decode_e2m1, decode_e4m3, unpack_nibbles

    with np.errstate(invalid="ignore", over="ignore"):
        factors = decode_e4m3(scales) * np.asarray(weight_scale_2, np.float32)[:, None, None]
        values = decode_e2m1(unpack_nibbles(packed)) * np.repeat(factors, 16, axis=-1)
    return round_bf16(values).astype(np.float32)


# -------------------------------------------------------------------------------------------------------- running


def run_w4a16_experts(x: Array, routing: RoutingLike, experts: W4A16Experts, record: bool = False) -> ExpertsResult:
    """MARLIN: BF16 activations times ``code * block scale``; ``input_scale`` plays no part.

    First GEMM: ``c1 = bf16(acc * G')``.  Second GEMM, which also applies the routing weight: the accumulator is
    rounded to BF16 *before* it is scaled, then multiplied by ``bf16(w * G')``; the token's products are summed in
    f32.

    Parameters
    ----------
    x : (T, H) bfloat16
    """
    unit = 2.0**-MARLIN_BIAS

    def accumulate(rows: Array, row_expert: Array, weights: F32) -> F32:
        # Marlin's accumulator is 2^-126 times ours; the two meet f32's range at different places.
        return (product_f32(rows, row_expert, weights).astype(np.float64) * unit).astype(np.float32)

    plan = _plan(x, routing, experts)
    row_expert = plan.row_expert
    rows = shuffle_rows(x, plan.a_map[: plan.rows])
    acc1 = accumulate(rows, row_expert, experts.w13)
    alpha1 = experts.global13[row_expert]
    c1 = epilogue(acc1, alpha1)
    c2 = activate(c1, experts.activation)
    acc2 = accumulate(c2, row_expert, experts.w2)
    with np.errstate(over="ignore", invalid="ignore"):
        alpha2 = round_bf16(_route_weights(plan, routing) * experts.global2[row_expert]).astype(np.float32)
    c3 = epilogue(round_bf16(acc2).astype(np.float32), alpha2)
    return _finish(plan, routing, Operand(rows), acc1, alpha1, c1, Operand(c2), acc2, alpha2, c3, record)


def run_emulation_experts(
    x: Array, routing: RoutingLike, experts: EmulationExperts, record: bool = False
) -> ExpertsResult:
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


def run_bf16_experts(x: Array, routing: RoutingLike, experts: Bf16Experts, record: bool = False) -> ExpertsResult:
    """Unquantised experts: BF16 values, f32 accumulator, BF16 between the two products."""
    return _run_values(x, routing, experts, record, lambda rows, which: Operand(rows))


def _run_values(
    x: Array,
    routing: RoutingLike,
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


def _plan(x: Array, routing: RoutingLike, experts: W4A16Experts | EmulationExperts | Bf16Experts) -> Dispatch:
    return plan_dispatch(routing.ids, experts.count, n1=experts.w13.shape[1], n=experts.w2.shape[2], k=x.shape[1])


def _route_weights(plan: Dispatch, routing: RoutingLike) -> F32:
    """The routing weight of each permuted row."""
    weights = np.empty(plan.rows, np.float32)
    weights[plan.c_map] = np.asarray(routing.weights, np.float32).ravel()
    return weights


def _finish(
    plan: Dispatch,
    routing: RoutingLike,
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
