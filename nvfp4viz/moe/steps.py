"""The nine steps of a W4A4 layer, and where two runs of it part: what each step hands on, compared bit by bit.

=================  =========================================  ==================================================
``route``          (T, k) experts and weights                 the router's choice
``permute``        (R, H) BF16                                rows sorted by expert
``quantize_1``     (R, H/2) codes, (R, H/16) E4M3             with each expert's ``a1_gscale``
``gemm_1``         (R, 2I) BF16                               grouped GEMM with w13, times ``g1_alphas``
``activate``       (R, I) BF16                                gate and up meet
``quantize_2``     (R, I/2) codes, (R, I/16) E4M3             with each expert's ``a2_gscale``
``gemm_2``         (R, H) BF16                                grouped GEMM with w2, times ``g2_alphas``
``unpermute``      (T, k, H) BF16                             rows back at their tokens
``sum``            (T, H) BF16                                weighted sum over each token's k experts
=================  =========================================  ==================================================

Source: `serving-vllm.md` section 6 (``run_cutlass_moe_fp4``, vLLM 0.33.0), its steps cut where a tensor is handed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.moe.dataflow import Dispatch, nan_rows
from nvfp4viz.moe.experts import ExpertsTrace, Operand

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

STEPS = ("route", "permute", "quantize_1", "gemm_1", "activate", "quantize_2", "gemm_2", "unpermute", "sum")


@dataclass(frozen=True, slots=True, eq=False)
class StepComparison:
    """Two runs of one layer on the same routes, step by step.

    A route is a token and one of its k experts; it has number ``t * k + rank`` at every step, wherever its row lies.

    Attributes
    ----------
    differs : (9, T*k) bool
        What the step hands on for this route has another bit in the second run.
    nan, zero : (9, T*k) bool
        In the second run it holds a NaN (of a quantised row: a NaN scale byte); all its values are zero.
    nan_before : (9, T*k) bool
        It holds a NaN in the first run.
    """

    differs: Bools
    nan: Bools
    zero: Bools
    nan_before: Bools

    @property
    def first_difference(self) -> int | None:
        """The first step, counted from 1, that hands on other bits; None where all nine agree."""
        return _first(self.differs)

    @property
    def first_nan(self) -> int | None:
        """The first step, counted from 1, that hands on a NaN in the second run."""
        return _first(self.nan)


def step_outputs(trace: ExpertsTrace) -> dict[str, tuple[Array, ...]]:
    """What each step hands on, by its id; the first axis counts routes, permuted rows or tokens.

    Raises
    ------
    AssertionError
        For the trace of a backend that does not quantise activations.
    """
    routes = trace.dispatch.ids.size
    return {
        "route": (trace.dispatch.ids.reshape(routes, 1), trace.weights.reshape(routes, 1)),
        "permute": (trace.input.values,),
        "quantize_1": _quantized(trace.input),
        "gemm_1": (trace.c1,),
        "activate": (trace.intermediate.values,),
        "quantize_2": _quantized(trace.intermediate),
        "gemm_2": (trace.c3,),
        "unpermute": (trace.routes.reshape(routes, -1),),
        "sum": (trace.out,),
    }


def compare_steps(first: ExpertsTrace, second: ExpertsTrace) -> StepComparison:
    """Hold the second run to the first: same tokens, same experts, so each route has one row in both.

    A route that is not local has no row, and differs nowhere between permuting and the GEMMs.
    """
    before, after = step_outputs(first), step_outputs(second)
    plan = first.dispatch
    assert (plan.ids == second.dispatch.ids).all(), "the runs take other routes"
    differs, nan, zero, nan_before = [], [], [], []
    for step in STEPS:
        differs.append(_by_route(step, _rows_differ(before[step], after[step]), plan))
        nan.append(_by_route(step, _rows_nan(step, after[step]), plan))
        zero.append(_by_route(step, _rows_zero(after[step]), plan))
        nan_before.append(_by_route(step, _rows_nan(step, before[step]), plan))
    return StepComparison(np.stack(differs), np.stack(nan), np.stack(zero), np.stack(nan_before))


def _quantized(operand: Operand) -> tuple[Array, Array]:
    assert operand.packed is not None, "only a W4A4 layer has these steps"
    assert operand.scales is not None
    return operand.packed, operand.scales


def _first(flags: Bools) -> int | None:
    steps = np.flatnonzero(flags.any(axis=1))
    return int(steps[0]) + 1 if len(steps) else None


def _by_route(step: str, rows: Bools, plan: Dispatch) -> Bools:
    """Flags of rows, routes or tokens as flags of routes."""
    if step in ("route", "unpermute"):
        return rows
    if step == "sum":
        return np.repeat(rows, plan.ids.shape[1])
    # one more row for routes that are not local, whose place in c_map lies behind all others
    return np.append(rows, np.zeros(plan.c_map.size - len(rows) + 1, np.bool_))[plan.c_map]


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def _rows_differ(before: tuple[Array, ...], after: tuple[Array, ...]) -> Bools:
    return np.logical_or.reduce(
        [(_bits(a) != _bits(b)).any(axis=1) for a, b in zip(before, after, strict=True)], axis=0
    )


def _rows_nan(step: str, tensors: tuple[Array, ...]) -> Bools:
    """Codes have no NaN, so a quantised row is judged by its scale bytes."""
    last = tensors[-1]
    if step.startswith("quantize"):
        return np.asarray(((last & 0x7F) == 0x7F).any(axis=1))
    return np.asarray(np.isnan(last).any(axis=1)) if step == "route" else nan_rows(last)


def _rows_zero(tensors: tuple[Array, ...]) -> Bools:
    """Every value is zero: of a quantised row, every scale byte or every code (a sign does not count)."""
    if tensors[0].dtype == np.uint8:
        packed, scales = tensors
        return ((packed & 0x77) == 0).all(axis=1) | ((scales & 0x7F) == 0).all(axis=1)
    return np.asarray((tensors[-1] == 0).all(axis=1))
