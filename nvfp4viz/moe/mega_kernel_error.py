"""How far the mega-kernel's layer lies from float64 arithmetic, and how far it may lie: a bound that is derived.

**One product.**  A K = 32 step adds 33 terms, each cut off toward zero at ``2^(E - 25)``, E the largest exponent among
them, and cuts their sum at f32's 23 fraction bits.  Cutting never makes a magnitude larger, so the accumulator after a
step is at most the sum ``A`` of all magnitudes so far.  Hence ``2^E <= max(P, A_before, 2^-126)`` with P the largest
``2^exponent`` of the step's products (a bound from exponents, as a significand may be below 1), and one step is off by
less than

    33 · 2^-25 · max(P, A_before, 2^-126)  +  2^-23 · A  +  2^-149;

a product's bound is the sum over its steps, plus ``K · 2^-52 · A`` for the float64 sum it is compared with.

**The rest**, each added to what came before:

* E4M3 with a scale s: half a unit of its four significant bits, ``2^-4 |v|``, or half its subnormal step, ``2^-10 s``;
* BF16: ``2^-8 |v| + 2^-134``;
* clamping moves no two numbers apart; silu's slope is below 1.1;
* three f32 roundings (silu, times up, times weight): ``3.1 · 2^-24 |v| + 2^-147``;
* k f32 additions: ``k · 2^-24`` of the magnitudes added.

A product passes an input error on with the magnitudes of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import (
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    deinterleave_gate_up,
    unpack_nibbles,
    unpack_ue8m0,
    utccp_untranspose,
)
from nvfp4viz.moe.mega_kernel import GROUP, MegaExperts, MegaRun, stage_tokens
from nvfp4viz.quant.tensor_core_k32 import element_tables
from nvfp4viz.quant.tensor_core_k32_step import FRACTION_BITS_K32, STEP_K32
from nvfp4viz.quant.tensor_core_step import F32_FRACTION_BITS

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

SILU_SLOPE = 1.1
"""Above the largest slope of ``x / (1 + exp(-x))``, 1.0998…"""


def decoded_e4m3(codes: U8, scales: U8) -> F64:
    """``(R, K)`` float64 values of E4M3 bytes under UE8M0 scales ``(R, K//32)``; exact."""
    values: F64 = decode_e4m3(codes).astype(np.float64) * _spread(scales)
    return values


def decoded_mxfp4(packed: U8, scales: U8) -> F64:
    """``(R, K)`` float64 values of packed E2M1 codes ``(R, K//2)`` under UE8M0 scales ``(R, K//32)``; exact."""
    values: F64 = decode_e2m1(unpack_nibbles(packed)).astype(np.float64) * _spread(scales)
    return values


def _spread(scales: U8) -> F64:
    return np.repeat(decode_ue8m0(scales).astype(np.float64), GROUP, axis=-1)


def product_bound(a: U8, a_scales: U8, b: U8, b_scales: U8) -> F64:
    """What ``mma_k32`` of finite E4M3 rows and packed E2M1 rows may be off, ``(M, N)``: see the module's text.

    Parameters
    ----------
    a, a_scales : (M, K), (M, K//32) uint8
    b, b_scales : (N, K//2), (N, K//32) uint8
    """
    left, right = np.abs(decoded_e4m3(a, a_scales)), np.abs(decoded_mxfp4(b, b_scales))
    exponents = [
        element_tables("e4m3")[1][a].reshape(len(a), -1, STEP_K32).max(axis=-1) + a_scales.astype(np.int64) - 127,
        element_tables("e2m1")[1][unpack_nibbles(b)].reshape(len(b), -1, STEP_K32).max(axis=-1)
        + b_scales.astype(np.int64) - 127,
    ]  # fmt: skip
    bound = np.zeros((len(a), len(b)))
    before = np.zeros_like(bound)
    for step in range(a_scales.shape[1]):
        k = slice(step * STEP_K32, (step + 1) * STEP_K32)
        after = before + left[:, k] @ right[:, k].T
        largest = np.ldexp(1.0, exponents[0][:, step, None] + exponents[1][:, step])
        unit = 2.0**-FRACTION_BITS_K32 * np.maximum(np.maximum(largest, before), 2.0**-126)
        bound += (STEP_K32 + 1) * unit + 2.0**-F32_FRACTION_BITS * after + 2.0**-149
        before = after
    total: F64 = bound + left.shape[1] * 2.0**-52 * before
    return total


def _e4m3_bound(v: F64, scale: F64) -> F64:
    return np.maximum(2.0**-4 * np.abs(v), 2.0**-10 * scale)


def _bf16_bound(v: F64) -> F64:
    bound: F64 = 2.0**-8 * np.abs(v) + 2.0**-134
    return bound


def _silu(x: F64) -> F64:
    value: F64 = x / (1 + np.exp(-x))
    return value


# ------------------------------------------------------------------------------------------- layer in float64


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A place on the way: the kernel's value minus float64's, and how far apart they may be.  ``id`` names it."""

    id: str
    error: F64
    bound: F64

    @property
    def worst(self) -> float:
        """The largest share of its bound that an error uses; at most 1 if the bound holds."""
        return float((np.abs(self.error) / self.bound).max())


@dataclass(frozen=True, slots=True, eq=False)
class LayerError:
    """A run beside float64.

    Attributes
    ----------
    stages
        ``staged``, ``first``, ``activated``, ``requantised``, ``second``, ``out``, each with all before it: from the
        BF16 input and the weights as stored, float64 everywhere on the other side.
    effects : id → (T, H) float64
        What each step alone does to the layer's output: float64 from there on, less float64 from the step before.
        They add up to the whole error.
    exact : (T, H) float64
        The output in float64.
    """

    stages: tuple[Stage, ...]
    effects: dict[str, F64]
    exact: F64

    def share(self, *ids: str) -> float:
        """Sum of squares of these effects, as a share of that of all effects."""
        squares = {name: float((effect**2).sum()) for name, effect in self.effects.items()}
        return sum(squares[name] for name in ids) / sum(squares.values())

    def relative(self, name: str) -> float:
        """Root mean square of an effect (``"total"``: of the whole error), over that of the exact output."""
        error = sum(self.effects.values()) if name == "total" else self.effects[name]
        return float(np.sqrt((np.asarray(error) ** 2).mean() / (self.exact**2).mean()))


EFFECTS = ("stage", "first", "bf16", "swiglu", "requantise", "second", "routes", "combine")
"""Steps that change numbers, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class _Exact:
    """The experts' weights in float64, checkpoint order, and the way from any point on to the layer's output."""

    w13: F64
    w2: F64
    weights: F64
    ids: Array
    limit: float

    def first(self, x: F64) -> tuple[F64, F64]:
        flat = self.ids.ravel()
        rows = np.repeat(x, self.ids.shape[1], axis=0)
        both = np.stack([self.w13[expert] @ row for expert, row in zip(flat, rows, strict=True)])
        inner = both.shape[1] // 2
        return both[:, :inner], both[:, inner:]

    def activate(self, gate: F64, up: F64) -> F64:
        value: F64 = _silu(np.minimum(gate, self.limit)) * np.clip(up, -self.limit, self.limit)
        return value * self.weights.reshape(-1, 1)

    def second(self, y: F64) -> F64:
        return np.stack([self.w2[expert] @ row for expert, row in zip(self.ids.ravel(), y, strict=True)])

    def combine(self, routes: F64) -> F64:
        total: F64 = routes.reshape(*self.ids.shape, -1).sum(axis=1)
        return total


def _scale_bytes(words: Array) -> U8:
    return np.stack([unpack_ue8m0(utccp_untranspose(one)) for one in words])


def compare_float64(x: Array, run: MegaRun, experts: MegaExperts) -> LayerError:
    """Hold a run against float64 arithmetic, place by place.

    Parameters
    ----------
    x : (T, H) bfloat16
        The layer's input; finite, as are all weights.
    run, experts
        What :func:`nvfp4viz.moe.mega_kernel.run_mega_kernel` gave for it.
    """
    s13, s2 = _scale_bytes(experts.w13_scales), _scale_bytes(experts.w2_scales)
    count = len(experts.w13)
    mixed = np.stack([decoded_mxfp4(experts.w13[e], s13[e]) for e in range(count)])
    w2 = np.stack([decoded_mxfp4(experts.w2[e], s2[e]) for e in range(count)])
    exact = _Exact(deinterleave_gate_up(mixed), w2, run.weights.astype(np.float64), run.ids, experts.limit)
    wide = x.astype(np.float64)
    stages = _stages(wide, run, experts, exact, s13, s2)

    staged = decoded_e4m3(run.x_codes, run.x_scales)
    y = decoded_e4m3(run.y_codes, run.y_scales)
    kept = (run.gate.astype(np.float64), run.up.astype(np.float64))
    outputs = [
        exact.combine(exact.second(exact.activate(*exact.first(wide)))),
        exact.combine(exact.second(exact.activate(*exact.first(staged)))),
        exact.combine(exact.second(exact.activate(run.gate_sum.astype(np.float64), run.up_sum.astype(np.float64)))),
        exact.combine(exact.second(exact.activate(*kept))),
        exact.combine(exact.second(run.weighted.astype(np.float64))),
        exact.combine(exact.second(y)),
        exact.combine(run.sums.astype(np.float64)),
        exact.combine(run.routes.astype(np.float64)),
        run.out.astype(np.float64),
    ]
    effects = {name: after - before for name, (before, after) in zip(EFFECTS, pairwise(outputs), strict=True)}
    return LayerError(stages, effects, outputs[0])


def _stages(x: F64, run: MegaRun, experts: MegaExperts, exact: _Exact, s13: U8, s2: U8) -> tuple[Stage, ...]:
    flat, top_k = run.ids.ravel(), run.ids.shape[1]
    x_codes, x_scales = stage_tokens(x.astype(np.float32))
    staged = decoded_e4m3(x_codes, x_scales)
    d_x = _e4m3_bound(x, _spread(x_scales))
    found = [Stage("staged", staged - x, d_x)]

    gate, up = exact.first(x)
    both = np.concatenate([gate, up], axis=1)
    rows_x = np.repeat(d_x, top_k, axis=0)
    d_first = np.empty_like(both)
    for r, expert in enumerate(flat):
        mixed = product_bound(x_codes[r // top_k, None], x_scales[r // top_k, None], experts.w13[expert], s13[expert])
        d_first[r] = deinterleave_gate_up(mixed.T)[:, 0] + np.abs(exact.w13[expert]) @ rows_x[r]
    sums = np.concatenate([run.gate_sum, run.up_sum], axis=1).astype(np.float64)
    found.append(Stage("first", sums - both, d_first))

    d_bf16 = d_first + _bf16_bound(np.abs(both) + d_first)
    inner = gate.shape[1]
    d_gate, d_up = d_bf16[:, :inner], d_bf16[:, inner:]
    clamped = np.minimum(gate, exact.limit), np.clip(up, -exact.limit, exact.limit)
    weights = np.abs(exact.weights.reshape(-1, 1))
    d_product = SILU_SLOPE * d_gate * (np.abs(clamped[1]) + d_up) + np.abs(_silu(clamped[0])) * d_up
    v = exact.activate(gate, up)
    d_v = weights * d_product
    d_v = d_v + 3.1 * 2.0**-24 * (np.abs(v) + d_v) + 2.0**-147
    found.append(Stage("activated", run.weighted.astype(np.float64) - v, d_v))

    # The scale is a power of two at most twice the group's largest value over 448, itself rounded in f32.
    tops = (np.abs(v) + d_v).reshape(len(v), -1, GROUP).max(axis=-1) * (2 / 448) * (1 + 2.0**-22)
    d_y = d_v + _e4m3_bound(np.abs(v) + d_v, np.repeat(np.maximum(tops, 2.0**-127), GROUP, axis=1))
    y = decoded_e4m3(run.y_codes, run.y_scales)
    found.append(Stage("requantised", y - v, d_y))

    routes = exact.second(v)
    d_second = np.empty_like(routes)
    for r, expert in enumerate(flat):
        own = product_bound(run.y_codes[r, None], run.y_scales[r, None], experts.w2[expert], s2[expert])[0]
        d_second[r] = own + np.abs(exact.w2[expert]) @ d_y[r]
    found.append(Stage("second", run.sums.astype(np.float64) - routes, d_second))

    d_route = d_second + _bf16_bound(np.abs(routes) + d_second)
    sizes = exact.combine(np.abs(routes) + d_route)
    out = exact.combine(routes)
    d_out = exact.combine(d_route) + top_k * 2.0**-24 * sizes
    d_out = d_out + _bf16_bound(np.abs(out) + d_out)
    found.append(Stage("out", run.out.astype(np.float64) - out, d_out))
    return tuple(found)
