"""The routed experts of one layer, as each vLLM backend computes them.

======================  ===========================================================================================
``run_w4a4_experts``    VLLM_CUTLASS: activations quantised with each expert's own scale, tensor-core product
``run_w4a16_experts``   MARLIN: activations stay BF16, ``input_scale`` is never read (`nvfp4viz.moe.dense`)
``run_emulation_…``     EMULATION: quantise-dequantise of activations with one scale a layer (`nvfp4viz.moe.dense`)
``run_bf16_experts``    no quantisation (`nvfp4viz.moe.dense`)
======================  ===========================================================================================

The W4A4 path follows `serving-vllm.md` section 6 in its nine steps; every product goes through the bit-exact
tensor-core model of `nvfp4viz.quant.tensor_core`, so a NaN block scale, an infinite encode scale or a zero alpha do
here what they do there.  Nothing is patched: a NaN that appears is carried on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats.paths import Path, by_reference
from nvfp4viz.moe.activation import fused_silu, gelu_tanh_and_mul, silu_and_mul
from nvfp4viz.moe.dataflow import Dispatch, combine_routes, nan_rows, plan_dispatch, round_bf16, shuffle_rows
from nvfp4viz.moe.experts_quant import per_token_scales, quantize_rows
from nvfp4viz.moe.routing import Routing

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Activation = Literal["gelu_tanh", "silu"]


@dataclass(frozen=True, slots=True)
class W4A4Experts:
    """What the CUTLASS kernels read, after ``process_weights_after_loading``.

    Attributes
    ----------
    w13_packed, w13_scales : (E, 2I, H//2), (E, 2I, H//16) uint8
        Gate rows, then up rows; E2M1 codes and E4M3 block scales.
    w2_packed, w2_scales : (E, H, I//2), (E, H, I//16) uint8
        Down projection.
    a1_gscale, a2_gscale : (E,) float32
        Encode scales of the inputs of the two GEMMs, ``1 / input_scale``.
    g1_alphas, g2_alphas : (E,) float32
        ``input_scale * weight_scale_2``, what the epilogue multiplies by.
    activation
        Between the GEMMs: ``"gelu_tanh"`` (Gemma 4) or ``"silu"``.
    per_token
        The activation scale comes from each row's own amax (``nvfp4_per_token``); a1/a2 must be 1.
    """

    w13_packed: U8
    w13_scales: U8
    w2_packed: U8
    w2_scales: U8
    a1_gscale: F32
    a2_gscale: F32
    g1_alphas: F32
    g2_alphas: F32
    activation: Activation = "gelu_tanh"
    per_token: bool = False

    @property
    def count(self) -> int:
        """Number of experts E."""
        return int(self.w13_packed.shape[0])


@dataclass(frozen=True, slots=True)
class Operand:
    """Activations on their way into a GEMM.

    Attributes
    ----------
    values : (R, K) bfloat16
        As the layer hands them over.
    gscale : (R,) float32 or None
        Encode scale of each row's expert; None where activations are not quantised.
    packed, scales : (R, K//2), (R, K//16) uint8 or None
        Codes and block scales, in plain row order.
    dequantised : (R, K) bfloat16 or None
        What an emulating backend multiplies instead.
    """

    values: Array
    gscale: F32 | None = None
    packed: U8 | None = None
    scales: U8 | None = None
    dequantised: Array | None = None


@dataclass(frozen=True, slots=True)
class ExpertsTrace:
    """Every tensor of one pass through a layer's experts; rows are in permuted order until `routes`.

    Attributes
    ----------
    dispatch
        Steps 1 and 2: counts, offsets and maps.
    input
        Steps 3 and 4: the shuffled rows (R, H), quantised.
    acc1, alpha1, c1 : (R, 2I) float32, (R,) float32, (R, 2I) bfloat16
        Step 5: accumulator, factor of the epilogue and its rounded product.
    intermediate
        Steps 6: activated rows (R, I), quantised.
    acc2, alpha2, c3 : (R, H) float32, (R,) float32, (R, H) bfloat16
        Step 7.
    routes, weights : (T, k, H) bfloat16, (T, k) float32
        Step 8: each token's expert outputs in its own order, and the routing weights.
    out : (T, H) bfloat16
        Step 9.
    """

    dispatch: Dispatch
    input: Operand
    acc1: F32
    alpha1: F32
    c1: Array
    intermediate: Operand
    acc2: F32
    alpha2: F32
    c3: Array
    routes: Array
    weights: F32
    out: Array

    def rows_of(self, expert: int) -> slice:
        """The permuted rows that met one expert."""
        offsets = self.dispatch.expert_offsets
        return slice(int(offsets[expert]), int(offsets[expert + 1]))


@dataclass(frozen=True, slots=True)
class ExpertsResult:
    """Output of a layer's experts.

    Attributes
    ----------
    out : (T, H) bfloat16
    nan_experts
        Experts whose output holds a NaN for some token, ascending.
    trace
        Every tensor on the way, where it was asked for.
    """

    out: Array
    nan_experts: tuple[int, ...] = ()
    trace: ExpertsTrace | None = None


def run_w4a4_experts(
    x: Array,
    routing: Routing,
    experts: W4A4Experts,
    record: bool = False,
    *,
    expert_map: Array | None = None,
    path: Path = "auto",
) -> ExpertsResult:
    """The VLLM_CUTLASS path: ``run_cutlass_moe_fp4`` in nine steps.

    1. expert ids become local ids; 2. counts, offsets and maps; 3. rows are shuffled so that each expert's lie
    together; 4. each row is quantised with its expert's ``a1_gscale`` (recipe ``vllm-cuda``); 5. grouped GEMM, ``c1 =
    bf16(g1_alphas[e] * acc)``; 6. activation in BF16 and quantisation with ``a2_gscale``, unfused as for every
    activation but SiLU; 7. second grouped GEMM with ``g2_alphas``; 8. rows go back to their tokens; 9. weighted sum
    with routing weights cast to BF16, products rounded to BF16, f32 reduction, BF16 result.

    Parameters
    ----------
    x : (T, H) bfloat16
        The layer's normalised input.
    routing
        ``ids (T, k)`` and ``weights (T, k)``.
    experts
        Weights and scales.
    record
        Keep every tensor in `ExpertsResult.trace`.
    expert_map
        Local id of each global expert, −1 for an expert of another rank.
    path
        As `nvfp4viz.quant.mma_matmul`; ``"reference"`` goes number by number, about half a second a route of the
        smallest layer, and always records.  The bits are equal.
    """
    if by_reference(path):
        from nvfp4viz.moe.experts_reference import run  # which imports this module

        return run(x, routing, experts, expert_map)
    n1, n, k = experts.w13_packed.shape[1], experts.w2_packed.shape[2] * 2, x.shape[1]
    plan = plan_dispatch(routing.ids, experts.count, n1=n1, n=n, k=k, expert_map=expert_map)
    row_expert = plan.row_expert
    rows = shuffle_rows(x, plan.a_map[: plan.rows])

    first, alpha1 = _operand(rows, experts.a1_gscale, experts.g1_alphas, row_expert, experts.per_token, path)
    acc1 = _grouped_gemm(first, row_expert, experts.w13_packed, experts.w13_scales, path)
    c1 = epilogue(acc1, alpha1)

    c2 = activate(c1, experts.activation, fused=True)
    second, alpha2 = _operand(c2, experts.a2_gscale, experts.g2_alphas, row_expert, experts.per_token, path)
    acc2 = _grouped_gemm(second, row_expert, experts.w2_packed, experts.w2_scales, path)
    c3 = epilogue(acc2, alpha2)

    routes = shuffle_rows(c3, plan.c_map).reshape(*plan.ids.shape, k)
    out = combine_routes(routes, routing.weights)
    trace = None
    if record:
        weights = np.asarray(routing.weights, np.float32)
        trace = ExpertsTrace(plan, first, acc1, alpha1, c1, second, acc2, alpha2, c3, routes, weights, out)
    return ExpertsResult(out, nan_experts_of(c3, row_expert), trace)


def _operand(
    rows: Array, gscales: F32, alphas: F32, row_expert: Array, per_token: bool, path: Path
) -> tuple[Operand, F32]:
    """Rows quantised with their experts' encode scales, and each row's alpha.

    Per-token scaling takes the encode scale from the row instead, and the row's decode scale into alpha.
    """
    gscale, alpha = gscales[row_expert], alphas[row_expert]
    if per_token:
        gscale, decode = per_token_scales(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            alpha = alpha * decode
    packed, scales = quantize_rows(rows, gscale, path=path)
    return Operand(rows, gscale, packed, scales), alpha


def _grouped_gemm(operand: Operand, row_expert: Array, packed: U8, scales: U8, path: Path) -> F32:
    """Accumulators of the rows against their experts' weights: (R, N) float32."""
    from nvfp4viz.quant import mma_grouped

    assert operand.packed is not None
    assert operand.scales is not None
    return mma_grouped(operand.packed, operand.scales, row_expert, packed, scales, path=path)


def epilogue(acc: F32, alpha: F32) -> Array:
    """``bf16(alpha * acc)`` with one f32 product, row by row: (R, N) and (R,) to (R, N) BF16.

    >>> epilogue(np.float32([[np.nan, 0], [3, 0]]), np.float32([0, np.inf])).tolist()
    [[nan, 0.0], [inf, nan]]
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return round_bf16(acc * np.asarray(alpha, np.float32)[:, None])


def activate(c1: Array, activation: Activation, *, fused: bool = False) -> Array:
    """Gate and up to the intermediate rows: (R, 2I) to (R, I) BF16.

    `fused` is the CUTLASS path's SiLU, which quantises in the same kernel: gate and up meet in f32 and are rounded to
    BF16 once.  The stand-alone activations round the activated gate first.
    """
    if activation == "gelu_tanh":
        return gelu_tanh_and_mul(c1)
    return _fused_silu_and_mul(c1) if fused else silu_and_mul(c1)


def _fused_silu_and_mul(c1: Array) -> Array:
    """``bf16(gate / (1 + exp(-gate)) * up)`` in f32; see `fused_silu`."""
    gate, up = np.split(c1.astype(np.float32), 2, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        return round_bf16(fused_silu(gate) * up)


def nan_experts_of(c3: Array, row_expert: Array) -> tuple[int, ...]:
    """Experts that own a row with a NaN."""
    return tuple(int(expert) for expert in np.unique(row_expert[nan_rows(c3)]))
