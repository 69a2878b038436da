"""The mega-kernel's layer one output at a time: for reading, and the truth that ``mega_kernel.py`` equals bit by bit.

Weights and scales are read where the kernel finds them, by the formulas of ``formats/places.py``; products go through
the scalar K = 32 step.  An output costs about half a millisecond for every 32 elements, so this is for small layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import (
    e4m3_byte_scalar,
    interleaved_row,
    ue8m0_byte_scalar,
    ue8m0_place,
    utccp_row,
    widen_bf16_scalar,
)
from nvfp4viz.moe.activation import fused_silu_scalar
from nvfp4viz.moe.dataflow import round_bf16_scalar, sum_routes_scalar
from nvfp4viz.moe.mega_kernel import E4M3_MAX, GROUP, INVERSE_448, STAGING_FLOOR, MegaExperts, MegaRun, stage_tokens
from nvfp4viz.quant import mma_step_k32_reference

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
F = np.float32


def group_max(x: Sequence[np.float32]) -> np.float32:
    """The largest magnitude, NaN left out; 0 if nothing else is there."""
    return max((abs(v) for v in x if not math.isnan(v)), default=F(0))


def to_e4m3(x: Sequence[np.float32], byte: int) -> list[int]:
    """E4M3 of ``x · 2^(127 − byte)``."""
    inverse = F(math.ldexp(1.0, 127 - byte))
    return [e4m3_byte_scalar(float(v * inverse)) for v in x]


def stage_group(x: Sequence[np.float32]) -> tuple[list[int], int]:
    """Step 1 for 32 elements: a division by 448, a floor of 1e-4, bytes 1 to 254."""
    top = max(group_max(x), STAGING_FLOOR)
    byte = min(max(ue8m0_byte_scalar(float(top / E4M3_MAX)), 1), 254)
    return to_e4m3(x, byte), byte


def requantize_group(y: Sequence[np.float32]) -> tuple[list[int], int]:
    """Step 4 for 32 elements: a product with 1/448, and no floor."""
    byte = ue8m0_byte_scalar(float(group_max(y) * INVERSE_448))
    return to_e4m3(y, byte), byte


def clamp_pair(gate: np.float32, up: np.float32, limit: float) -> tuple[np.float32, np.float32]:
    """Both accumulators rounded to BF16; a NaN gate becomes the limit, a NaN up minus the limit."""
    bound = widen_bf16_scalar(round_bf16_scalar(F(limit)))
    g, u = widen_bf16_scalar(round_bf16_scalar(gate)), widen_bf16_scalar(round_bf16_scalar(up))
    g = bound if math.isnan(g) else min(g, bound)
    u = -bound if math.isnan(u) else min(max(u, -bound), bound)
    return g, u


def swiglu(gate: np.float32, up: np.float32) -> np.float32:
    """``silu(gate) · up``: the quotient in float64, rounded; then a product in f32."""
    return F(fused_silu_scalar(gate) * up)


def product(codes: U8, scales: U8, weight: U8, words: U32, row: int) -> np.float32:
    """One row of codes times one row of an expert's matrix, in steps of 32 along K.

    ``row`` is where the weight's row lies; its scales lie where UTCCP wants that row, four to a word.
    """
    accumulator = F(0)
    for step in range(len(scales)):
        k = range(step * GROUP, (step + 1) * GROUP)
        b = [int(weight[row, i // 2]) >> 4 * (i % 2) & 0xF for i in k]
        word, bit = ue8m0_place(step)
        b_scale = int(words[utccp_row(row), word]) >> bit & 0xFF
        accumulator = mma_step_k32_reference(codes[k.start : k.stop], b, int(scales[step]), b_scale, accumulator)
    return accumulator


def by_groups(rows: Array, quantise: Callable[[list[np.float32]], tuple[list[int], int]]) -> tuple[U8, U8]:
    """Codes ``(R, K)`` and scales ``(R, K//32)`` of rows ``(R, K)``, group by group."""
    codes, scales = np.zeros(rows.shape, np.uint8), np.zeros((len(rows), rows.shape[1] // GROUP), np.uint8)
    for r, g in np.ndindex(scales.shape):
        at = slice(g * GROUP, (g + 1) * GROUP)
        codes[r, at], scales[r, g] = quantise([F(v) for v in rows[r, at]])
    return codes, scales


def route(
    x_codes: U8, x_scales: U8, w13: U8, w13_words: U32, w2: U8, w2_words: U32, weight: np.float32, limit: float
) -> dict[str, list[Any]]:
    """One token through one expert; the names of `MegaRun`."""
    rows = len(w13)
    inner = rows // 2
    made: dict[str, list[Any]] = {"gate_sum": [], "up_sum": [], "gate": [], "up": [], "weighted": []}
    for i in range(inner):
        sums = [product(x_codes, x_scales, w13, w13_words, interleaved_row(r, rows)) for r in (i, inner + i)]
        gate, up = clamp_pair(sums[0], sums[1], limit)
        for name, value in zip(made, (*sums, gate, up, F(swiglu(gate, up) * weight)), strict=True):
            made[name].append(value)
    groups = [requantize_group(made["weighted"][g : g + GROUP]) for g in range(0, inner, GROUP)]
    made["y_codes"] = [code for codes, _ in groups for code in codes]
    made["y_scales"] = [byte for _, byte in groups]
    y = np.array(made["y_codes"], np.uint8), np.array(made["y_scales"], np.uint8)
    made["sums"] = [product(*y, w2, w2_words, h) for h in range(len(w2))]
    made["routes"] = [round_bf16_scalar(value) for value in made["sums"]]
    return made


def run(x: Array, ids: Array, weights: npt.NDArray[np.float32], experts: MegaExperts) -> MegaRun:
    """The layer, route after route; see `nvfp4viz.moe.run_mega_kernel`."""
    x_codes, x_scales = stage_tokens(x, "reference")
    _, rows, half = experts.w13.shape
    inner, hidden, routes = rows // 2, 2 * half, ids.size
    made: dict[str, Array] = {
        name: np.zeros((routes, inner), F) for name in ("gate_sum", "up_sum", "gate", "up", "weighted")
    }
    made |= {"y_codes": np.zeros((routes, inner), np.uint8), "y_scales": np.zeros((routes, inner // GROUP), np.uint8)}
    made |= {"sums": np.zeros((routes, hidden), F), "routes": np.zeros((routes, hidden), np.uint16)}
    out = np.zeros((len(ids), hidden), np.uint16)
    with np.errstate(all="ignore"):
        for r, ((token, rank), expert) in enumerate(np.ndenumerate(ids)):
            kernel_order = (
                experts.w13[expert], experts.w13_scales[expert], experts.w2[expert], experts.w2_scales[expert]
            )  # fmt: skip
            one = route(x_codes[token], x_scales[token], *kernel_order, weights[token, rank], experts.limit)
            for name, values in one.items():
                made[name][r] = values
        by_token = made["routes"].reshape(*ids.shape, hidden)
        for token, h in np.ndindex(out.shape):
            out[token, h] = sum_routes_scalar(by_token[token, :, h].tolist())
    made["routes"] = made["routes"].view(ml_dtypes.bfloat16)
    return MegaRun(ids, weights, x_codes, x_scales, **made, out=out.view(ml_dtypes.bfloat16))
