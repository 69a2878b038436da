"""The nine steps of a W4A4 layer one number at a time, for reading; ``experts.py`` must equal it bit by bit.

Rows go through the scalar recipe ``vllm-cuda`` and the tensor core's seven rules, 64 elements a step; slow on purpose.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import unpack_nibbles, widen_bf16_scalar
from nvfp4viz.moe.activation import fused_silu_scalar, gelu_tanh_scalar
from nvfp4viz.moe.dataflow import (
    combine_routes_reference,
    plan_dispatch_reference,
    round_bf16_scalar,
    shuffle_rows_reference,
)
from nvfp4viz.moe.experts import Activation, ExpertsResult, ExpertsTrace, Operand, W4A4Experts
from nvfp4viz.moe.experts_quant import PER_TOKEN_BASE, quantize_rows
from nvfp4viz.moe.routing import Routing
from nvfp4viz.quant import mma_step_reference
from nvfp4viz.quant.rcp import rcp_approx_ftz_scalar
from nvfp4viz.quant.reference import amax_scalar

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
F = np.float32
BFLOAT16 = ml_dtypes.bfloat16


def dot(a: U8, a_scales: U8, b: U8, b_scales: U8) -> np.float32:
    """The accumulator of one output: codes (K,) and scales (K//16,) of both sides, in steps of 64 filled up with 0."""
    accumulator = F(0)
    for k in range(0, len(a), 64):
        codes = [np.pad(side[k : k + 64], (0, max(0, k + 64 - len(side)))) for side in (a, b)]
        at = slice(k // 16, k // 16 + 4)
        scales = [np.pad(side[at], (0, 4 - len(side[at]))) for side in (a_scales, b_scales)]
        accumulator = mma_step_reference(codes[0], codes[1], scales[0], scales[1], accumulator)
    return accumulator


def activated(gate: np.float32, up: np.float32, activation: Activation) -> int:
    """BF16 bits of one intermediate value: SiLU meets up in f32; tanh-GELU is rounded to BF16 before."""
    if activation == "silu":
        return round_bf16_scalar(F(fused_silu_scalar(gate) * up))
    gelu = widen_bf16_scalar(round_bf16_scalar(gelu_tanh_scalar(gate)))
    return round_bf16_scalar(F(gelu * up))


def token_scales(row: Array) -> tuple[np.float32, np.float32]:
    """Encode and decode scale of a row from its own maximum."""
    decode = F(amax_scalar(row) * PER_TOKEN_BASE)
    return rcp_approx_ftz_scalar(decode), decode


def gemm(
    rows: Array, gscales: Array, alphas: Array, row_expert: Array, packed: U8, scales: U8, per_token: bool
) -> tuple[Operand, Array, Array, Array]:
    """Rows quantised and multiplied with their experts' matrices: operand, accumulators, alphas, BF16 products."""
    count, width = len(rows), packed.shape[1]
    gscale, alpha = np.zeros(count, F), np.zeros(count, F)
    acc, out = np.zeros((count, width), F), np.zeros((count, width), np.uint16)
    for r, expert in enumerate(row_expert.tolist()):
        gscale[r], alpha[r] = gscales[expert], alphas[expert]
        if per_token:
            gscale[r], decode = token_scales(rows[r])
            alpha[r] = F(alpha[r] * decode)
    packed_rows, bytes_ = quantize_rows(rows, gscale, "reference")
    codes = unpack_nibbles(packed_rows)
    for r, expert in enumerate(row_expert.tolist()):
        weights = unpack_nibbles(packed[expert])
        for n in range(width):
            acc[r, n] = dot(codes[r], bytes_[r], weights[n], scales[expert, n])
            out[r, n] = round_bf16_scalar(F(alpha[r] * acc[r, n]))
    return Operand(rows, gscale, packed_rows, bytes_), acc, alpha, out.view(BFLOAT16)


def run(x: Array, routing: Routing, experts: W4A4Experts, expert_map: Array | None) -> ExpertsResult:
    """The layer with its whole trace; see `nvfp4viz.moe.run_w4a4_experts`."""
    n1, n, k = experts.w13_packed.shape[1], experts.w2_packed.shape[2] * 2, x.shape[1]
    plan = plan_dispatch_reference(routing.ids, experts.count, n1=n1, n=n, k=k, expert_map=expert_map)
    rows = shuffle_rows_reference(x, plan.a_map[: plan.rows])
    with np.errstate(all="ignore"):
        first, acc1, alpha1, c1 = gemm(
            rows, experts.a1_gscale, experts.g1_alphas, plan.row_expert, experts.w13_packed, experts.w13_scales,
            experts.per_token,
        )  # fmt: skip
        c2 = np.zeros((plan.rows, n), np.uint16)
        for r, i in np.ndindex(c2.shape):
            c2[r, i] = activated(F(c1[r, i]), F(c1[r, n1 // 2 + i]), experts.activation)
        second, acc2, alpha2, c3 = gemm(
            c2.view(BFLOAT16), experts.a2_gscale, experts.g2_alphas, plan.row_expert, experts.w2_packed,
            experts.w2_scales, experts.per_token,
        )  # fmt: skip
    routes = shuffle_rows_reference(c3, plan.c_map).reshape(*plan.ids.shape, k)
    out = combine_routes_reference(routes, routing.weights)
    nan = {int(expert) for row, expert in zip(c3, plan.row_expert, strict=True) if any(np.isnan(F(v)) for v in row)}
    weights = np.asarray(routing.weights, F)
    trace = ExpertsTrace(plan, first, acc1, alpha1, c1, second, acc2, alpha2, c3, routes, weights, out)
    return ExpertsResult(out, tuple(sorted(nan)), trace)
