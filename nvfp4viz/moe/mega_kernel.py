"""An expert layer as DeepSeek V4's mega-kernel computes it: FP8 activations, MXFP4 weights, one launch.

Per token and chosen expert, with H the hidden and I the intermediate size:

1. **stage** (vLLM ``prepare_megamoe``): each 32 elements of the BF16 input share a UE8M0 scale,
   ``max(amax, 1e-4) / 448`` rounded up to a power of two, byte 1 to 254; elements become E4M3;
2. **first product**: E4M3 times E2M1, K = 32 steps of ``kind::mxf8f6f4``; rows of the weight lie eight gate, eight up;
3. **SwiGLU**: both accumulators are rounded to BF16, clamped there (gate from above, up on both sides), then
   ``silu(gate) * up * routing weight`` in f32: the weight is applied *before* quantising;
4. **requantise**: 32 outputs share the scale ``2^ceil(log2(amax * (1/448)))``, without the staging's minimum; E4M3;
5. **second product**, rounded to BF16; **combine**: the token's experts are added in f32, one rounding to BF16.

Sources: `numerics-vllm.md` section 10 (vLLM 0.33.0, DeepGEMM 54e226124093); the last step's rounding points were read
in DeepGEMM ``sm100_fp8_fp4_mega_moe.cuh``.  Later DeepGEMM versions keep the scale of step 4 at 2^-22 or above.  The
fast exponential is taken as exact, as in :mod:`nvfp4viz.moe.activation`.

**NaN.**  The clamp is made of ``__hmin2`` and ``__hmax2``, which return the other operand when one is NaN: a NaN gate
becomes the limit, a NaN up minus the limit, and the layer's output is finite.  The maxima of steps 1 and 4 drop NaN in
the same way.  This follows from the source and CUDA's documentation; it was not run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import (
    bf16_to_f32,
    deinterleave_gate_up,
    encode_e4m3,
    encode_ue8m0,
    interleave_gate_up,
    pack_ue8m0,
    unpack_ue8m0,
    utccp_transpose,
    utccp_untranspose,
)
from nvfp4viz.formats.paths import AutoPath, by_reference
from nvfp4viz.formats.places import UTCCP_ROWS
from nvfp4viz.moe.activation import fused_silu
from nvfp4viz.moe.dataflow import round_bf16, sum_routes
from nvfp4viz.quant import mma_k32

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]

GROUP = 32
"""Elements that share a UE8M0 scale."""
PACKING = 128
"""Elements whose four exponents make one 32-bit word: a unit of packing, not of scaling."""
E4M3_MAX = np.float32(448)
STAGING_FLOOR = np.float32(1e-4)
INVERSE_448 = np.float32(1 / 448)
SWIGLU_LIMIT = 10.0
"""``swiglu_limit`` of DeepSeek V4's config."""


# ------------------------------------------------------------------------------------------------ quantisation


def _groups(x: F32) -> F32:
    if x.shape[-1] % GROUP:
        raise FormatError("quantize.block", k=x.shape[-1], block=GROUP, recipe="mxfp8")
    return x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)


def _amax(groups: F32) -> F32:
    """The largest magnitude of each group, NaN left out; 0 if nothing else is there."""
    top: F32 = np.fmax.reduce(np.abs(groups), axis=-1, initial=np.float32(0))
    return top


def _to_e4m3(groups: F32, byte: U8) -> U8:
    """E4M3 of ``x * 2^(127 - byte)``, the product exact but for underflow."""
    inverse = np.ldexp(np.float64(1), 127 - byte.astype(np.int32)).astype(np.float32)
    scaled = encode_e4m3(groups * inverse[..., None])
    return scaled.reshape(*groups.shape[:-2], groups.shape[-2] * GROUP)


def stage_tokens(x: Array, path: AutoPath = "auto") -> tuple[U8, U8]:
    """Step 1: E4M3 bytes ``(T, H)`` and UE8M0 bytes ``(T, H//32)`` of BF16 (or f32) rows.

    ``path="reference"`` goes group by group; equal bytes.

    Raises
    ------
    FormatError
        ``quantize.block``: H is not a multiple of 32.

    >>> codes, scales = stage_tokens(np.full((1, 32), 448, np.float32))
    >>> hex(codes[0, 0]), int(scales[0, 0])
    ('0x7e', 127)
    """
    rows = x.astype(np.float32)
    groups = _groups(rows)
    with np.errstate(all="ignore"):
        if by_reference(path):
            from nvfp4viz.moe import mega_kernel_reference as reference  # which imports this module

            return reference.by_groups(rows, reference.stage_group)
        amax = np.maximum(_amax(groups), STAGING_FLOOR)
        byte = np.clip(encode_ue8m0(amax / E4M3_MAX), 1, 254).astype(np.uint8)
        return _to_e4m3(groups, byte), byte


def requantize(y: F32, path: AutoPath = "auto") -> tuple[U8, U8]:
    """Step 4: E4M3 bytes ``(R, I)`` and UE8M0 bytes ``(R, I//32)`` of f32 rows.

    A group of zeros gets byte 0; a NaN becomes E4M3's NaN and does not touch the scale.  Paths and errors as
    :func:`stage_tokens`.

    >>> [int(requantize(np.full((1, 32), top, np.float32))[1][0, 0]) - 127 for top in (448, 449, 1e-4, 0)]
    [0, 1, -22, -127]
    """
    groups = _groups(y)
    with np.errstate(all="ignore"):
        if by_reference(path):
            from nvfp4viz.moe import mega_kernel_reference as reference

            return reference.by_groups(y, reference.requantize_group)
        byte = encode_ue8m0(_amax(groups) * INVERSE_448)
        return _to_e4m3(groups, byte), byte


# --------------------------------------------------------------------------------------------------- activation


def clamp_halves(gate: F32, up: F32, limit: float) -> tuple[F32, F32]:
    """Accumulators rounded to BF16 and clamped there, given back as f32: gate at most L, up within ±L.

    >>> nan = np.float32([np.nan])
    >>> [float(half[0]) for half in clamp_halves(nan, nan, 10.0)]     # as the GPU's min and max do it
    [10.0, -10.0]
    """
    bound = np.float32(round_bf16(np.array([limit], np.float32))[0])
    rounded = [bf16_to_f32(round_bf16(half)) for half in (gate, up)]
    return np.fmin(rounded[0], bound), np.fmin(np.fmax(rounded[1], -bound), bound)


def swiglu(gate: F32, up: F32) -> F32:
    """``silu(gate) * up`` in f32, of clamped halves.

    >>> swiglu(np.float32([10, -1]), np.float32([2, 10])).tolist()
    [19.99909210205078, -2.6894142627716064]
    """
    with np.errstate(all="ignore"):
        product: F32 = fused_silu(gate) * up
        return product


# ----------------------------------------------------------------------------------------------------- the layer


@dataclass(frozen=True, slots=True, eq=False)
class MegaExperts:
    """E experts in the order that the kernel reads.

    Attributes
    ----------
    w13 : (E, 2I, H//2) uint8
        Packed E2M1, eight gate rows and eight up rows in turn.
    w13_scales : (E, 2I, H//128) uint32
        Four UE8M0 bytes a word, rows mixed like the weight's and then in UTCCP's order.
    w2, w2_scales : (E, H, I//2) uint8, (E, H, I//128) uint32
        The second matrix, its rows unmixed.
    limit
        Of the clamp.
    """

    w13: U8
    w13_scales: U32
    w2: U8
    w2_scales: U32
    limit: float


def prepare_mega_experts(w13: U8, w13_scales: U8, w2: U8, w2_scales: U8, limit: float = SWIGLU_LIMIT) -> MegaExperts:
    """Checkpoint order to kernel order.

    Parameters
    ----------
    w13, w13_scales : (E, 2I, H//2), (E, 2I, H//32) uint8
        Gate first, then up; MXFP4.
    w2, w2_scales : (E, H, I//2), (E, H, I//32) uint8
    limit
        The clamp's.

    Raises
    ------
    FormatError
        ``mega.shape``: H or I is not a multiple of 128, or the four shapes do not belong together.
    """
    experts, rows, half = w13.shape if w13.ndim == 3 else (0, 0, 0)
    hidden, inner = 2 * half, rows // 2
    fitting = {(experts, hidden, inner // 2): w2, (experts, rows, hidden // GROUP): w13_scales}
    fitting[(experts, hidden, inner // GROUP)] = w2_scales
    whole = hidden and inner and hidden % PACKING == 0 and inner % UTCCP_ROWS == 0 and rows % 2 == 0
    if not whole or any(array.shape != shape for shape, array in fitting.items()):
        raise FormatError("mega.shape", w13=w13.shape, w2=w2.shape, multiple=PACKING)
    return MegaExperts(
        interleave_gate_up(w13),
        utccp_transpose(pack_ue8m0(interleave_gate_up(w13_scales))),
        np.ascontiguousarray(w2),
        utccp_transpose(pack_ue8m0(w2_scales)),
        limit,
    )


@dataclass(frozen=True, slots=True, eq=False)
class MegaRun:
    """Every value on the way, with T tokens, k experts each, R = T·k routes in order of token, then rank.

    Attributes
    ----------
    ids, weights : (T, k)
        Chosen experts, routing weights (f32).
    x_codes, x_scales : (T, H), (T, H//32) uint8
        The staged input.
    gate_sum, up_sum : (R, I) float32
        Accumulators of the first product, gate and up apart again.
    gate, up : (R, I) float32
        Rounded to BF16 and clamped.
    weighted : (R, I) float32
        ``silu(gate) * up * weight``.
    y_codes, y_scales : (R, I), (R, I//32) uint8
        Requantised.
    sums : (R, H) float32
        Accumulators of the second product.
    routes : (R, H) bfloat16
    out : (T, H) bfloat16
    """

    ids: Array
    weights: F32
    x_codes: U8
    x_scales: U8
    gate_sum: F32
    up_sum: F32
    gate: F32
    up: F32
    weighted: F32
    y_codes: U8
    y_scales: U8
    sums: F32
    routes: Array
    out: Array


def _rows_times_experts(codes: U8, scales: U8, ids: Array, weight: U8, words: U32) -> F32:
    """Each row times the matrix of its expert, scales taken back from where UTCCP wants them."""
    out = np.zeros((len(codes), weight.shape[1]), np.float32)
    for expert in np.unique(ids):
        rows = ids == expert
        rows_scales = unpack_ue8m0(utccp_untranspose(words[expert]))
        out[rows] = mma_k32(codes[rows], scales[rows], weight[expert], rows_scales)
    return out


def run_mega_kernel(x: Array, ids: Array, weights: F32, experts: MegaExperts, path: AutoPath = "auto") -> MegaRun:
    """The five steps on a small layer.

    Parameters
    ----------
    x : (T, H) bfloat16
    ids : (T, k) integers
    weights : (T, k) float32
    path
        ``"reference"``: output by output, a second for a route of the smallest layer.  The bits are equal.

    >>> def random_bytes(*shape):
    ...     return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    >>> w13, w2, ones = random_bytes(2, 256, 64), random_bytes(2, 128, 64), np.full((2, 256, 4), 127, np.uint8)
    >>> x, ids = np.ones((3, 128), np.float32), np.array([[0, 1]] * 3)
    >>> experts = prepare_mega_experts(w13, ones, w2, ones[:, :128])
    >>> run = run_mega_kernel(x, ids, np.full((3, 2), 0.5, np.float32), experts)
    >>> run.y_codes.shape, run.out.shape
    ((6, 128), (3, 128))
    """
    ids, weights = np.asarray(ids), np.asarray(weights, np.float32)
    if by_reference(path):
        from nvfp4viz.moe.mega_kernel_reference import run

        return run(x, ids, weights, experts)
    top_k = ids.shape[1]
    flat = ids.ravel()
    x_codes, x_scales = stage_tokens(x)
    per_route = np.repeat(x_codes, top_k, axis=0), np.repeat(x_scales, top_k, axis=0)
    mixed = _rows_times_experts(*per_route, flat, experts.w13, experts.w13_scales)
    halves = deinterleave_gate_up(mixed.T).T
    inner = halves.shape[1] // 2
    gate_sum, up_sum = np.ascontiguousarray(halves[:, :inner]), np.ascontiguousarray(halves[:, inner:])
    gate, up = clamp_halves(gate_sum, up_sum, experts.limit)
    with np.errstate(all="ignore"):
        weighted: F32 = swiglu(gate, up) * weights.reshape(-1, 1)
    y_codes, y_scales = requantize(weighted)
    sums = _rows_times_experts(y_codes, y_scales, flat, experts.w2, experts.w2_scales)
    routes = round_bf16(sums)
    out = sum_routes(routes.reshape(*ids.shape, sums.shape[1]))
    return MegaRun(
        ids, weights, x_codes, x_scales, gate_sum, up_sum, gate, up, weighted, y_codes, y_scales, sums, routes, out
    )
