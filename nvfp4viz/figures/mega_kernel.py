"""Records and figures about the mega-kernel: a layer to look into, what each step does to it, one K = 32 step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import Theme, role, surface
from nvfp4viz.figures.tensor_core import three
from nvfp4viz.figures.words import listed, words
from nvfp4viz.formats import E2M1, E4M3
from nvfp4viz.moe.mega_kernel import (
    GROUP,
    SWIGLU_LIMIT,
    MegaExperts,
    MegaRun,
    clamp_halves,
    prepare_mega_experts,
    requantize,
    run_mega_kernel,
    swiglu,
)
from nvfp4viz.moe.mega_kernel_error import EFFECTS, LayerError, compare_float64, decoded_e4m3
from nvfp4viz.quant import quantize
from nvfp4viz.quant.tensor_core_k32_step import StepTraceK32, mma_step_k32_trace

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

Data = Literal["even", "outliers"]
DATA: tuple[Data, ...] = ("even", "outliers")
TOKENS, EXPERTS, TOP_K = 6, 4, 2
HIDDEN, INNER = 256, 128
WEIGHT_SIZE = (0.25, 0.1)
"""Standard deviations of the two weights: large enough that some gates and ups meet the clamp."""
WEIGHT_RECIPE = "deepgemm-ceil"
QUANTISING = ("stage", "requantise")
"""The effects that are quantisations to FP8."""


# ------------------------------------------------------------------------------------------------------ a layer


@dataclass(frozen=True, slots=True, eq=False)
class SampleLayer:
    """A small layer of seeded random numbers, run through the mega-kernel.

    ``w13 (E, 2I, H/2)`` and ``w13_scales (E, 2I, H/32)`` are in checkpoint order, gate first.
    """

    x: npt.NDArray[Any]
    w13: U8
    w13_scales: U8
    experts: MegaExperts
    run: MegaRun
    error: LayerError


def sample_layer(data: Data, seed: int = 5) -> SampleLayer:
    """Normal activations, or with every 37th channel eight times larger; normal weights in MXFP4."""
    rng = np.random.default_rng(seed)
    weights: list[U8] = []
    for rows, columns, size in ((2 * INNER, HIDDEN, WEIGHT_SIZE[0]), (HIDDEN, INNER, WEIGHT_SIZE[1])):
        values = (rng.standard_normal((EXPERTS * rows, columns)) * size).astype(np.float32)
        made = quantize(values, recipe=WEIGHT_RECIPE)
        weights += [made.packed.reshape(EXPERTS, rows, -1), made.scales.reshape(EXPERTS, rows, -1)]
    x = rng.standard_normal((TOKENS, HIDDEN))
    if data == "outliers":
        x[:, ::37] *= 8
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    routing = rng.dirichlet(np.ones(TOP_K) * 3, TOKENS).astype(np.float32)
    w13, w13_scales, w2, w2_scales = weights
    experts = prepare_mega_experts(w13, w13_scales, w2, w2_scales)
    tokens = x.astype(ml_dtypes.bfloat16)
    run = run_mega_kernel(tokens, ids, routing, experts)
    return SampleLayer(tokens, w13, w13_scales, experts, run, compare_float64(tokens, run, experts))


# --------------------------------------------------------------------------------------- what each step does


def effects_figure(error: LayerError, *, theme: Theme, lang: str) -> go.Figure:
    """Each step's effect on the output, in order, as a share of the output; steps without one are written out."""
    ink, quantised = surface(theme), role("block_scale", theme)
    values = [error.relative(name) for name in EFFECTS]
    shown = [value for value in values if value > 0]
    floor = 10.0 ** (math.floor(math.log10(min(shown))) - 1)
    names = [words(lang, f"figures.mega_kernel.effect.{name}") for name in EFFECTS]
    figure = go.Figure(
        go.Bar(
            y=names,
            x=[value if value > 0 else None for value in values],
            orientation="h",
            marker={
                "color": [quantised.fill if name in QUANTISING else ink.panel for name in EFFECTS],
                "line": {"color": ink.ink, "width": 1},
                "pattern": {"shape": ["/" if name in QUANTISING else "" for name in EFFECTS], "fgcolor": ink.ink},
            },
            text=[percent_of(value) if value > 0 else "" for value in values],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.3g}<extra></extra>",
        )
    )
    powers = range(round(math.log10(floor)), 1, 2)
    figure.layout = base_layout(
        theme,
        height=360,
        showlegend=False,
        xaxis={
            "type": "log",
            "range": [math.log10(floor), 0.6],
            "tickvals": [10.0**power for power in powers],
            "ticktext": [percent_of(10.0**power) for power in powers],
            "title": words(lang, "figures.mega_kernel.effect_axis"),
        },
        yaxis={"autorange": "reversed", "showgrid": False},
    )
    for name, value in zip(names, values, strict=True):
        if value == 0:
            figure.add_annotation(
                y=name, x=math.log10(floor), text=words(lang, "figures.mega_kernel.no_effect"),
                showarrow=False, xanchor="left", font={"color": ink.muted, "size": 13},
            )  # fmt: skip
    return figure


def percent_of(share: float) -> str:
    """A share as a percentage in three significant digits.

    >>> percent_of(0.02361), percent_of(5.07e-8)
    ('2.36 %', '5.07×10⁻⁶ %')
    """
    return f"{three(100 * share)} %"


def describe_effects(error: LayerError, lang: str) -> str:
    """Which steps matter, from the same numbers."""
    none = [words(lang, f"figures.mega_kernel.effect.{name}") for name in EFFECTS if not error.effects[name].any()]
    return words(
        lang,
        "figures.mega_kernel.describe_effects" if none else "figures.mega_kernel.describe_effects_all",
        total=percent_of(error.relative("total")),
        share=percent_of(error.share(*QUANTISING)),
        rest=percent_of(1 - error.share(*QUANTISING)),
        none=listed(lang, none),
    )


def effect_rows(error: LayerError) -> list[dict[str, object]]:
    """Each step's effect as a row."""
    return [{"step": name, "relative_rms": error.relative(name), "share": error.share(name)} for name in EFFECTS]


def stage_rows(error: LayerError) -> list[dict[str, object]]:
    """Each place with its largest error, the largest bound, and how much of its bound an error uses at most."""
    return [
        {
            "place": stage.id,
            "largest_error": float(np.abs(stage.error).max()),
            "largest_bound": float(stage.bound.max()),
            "bound_used": stage.worst,
        }
        for stage in error.stages
    ]


# ----------------------------------------------------------------------------------- between the two products


@dataclass(frozen=True, slots=True, eq=False)
class Between:
    """One group of 32 between the products, all float32 unless said: sums of both halves, clamped halves, silu times
    up, the same times the routing weight, E4M3 bytes, the group's UE8M0 byte, and what they decode to (float64)."""

    gate_sum: F32
    up_sum: F32
    gate: F32
    up: F32
    product: F32
    weight: float
    weighted: F32
    codes: U8
    scale: int
    decoded: F64

    @property
    def amax(self) -> float:
        """The largest magnitude that is to be quantised."""
        return float(np.abs(self.weighted).max())

    @property
    def clamped(self) -> npt.NDArray[np.bool_]:
        """Where the clamp, not the rounding, moved a half."""
        limit = max(float(self.gate.max()), float(np.abs(self.up).max()))
        found: npt.NDArray[np.bool_] = (self.gate_sum > limit) | (np.abs(self.up_sum) > limit)
        return found


def between(gate_sum: F32, up_sum: F32, weight: float, limit: float = SWIGLU_LIMIT) -> Between:
    """What becomes of 32 pairs of accumulators ``(32,)``."""
    gate, up = clamp_halves(gate_sum, up_sum, limit)
    product = swiglu(gate, up)
    weighted = (product * np.float32(weight)).astype(np.float32)
    codes, scale = requantize(weighted[None])
    decoded = decoded_e4m3(codes, scale)[0]
    return Between(gate_sum, up_sum, gate, up, product, weight, weighted, codes[0], int(scale[0, 0]), decoded)


def between_of(run: MegaRun, route: int, group: int, limit: float) -> Between:
    """A group of 32 of one route."""
    at = slice(group * GROUP, (group + 1) * GROUP)
    return between(run.gate_sum[route, at], run.up_sum[route, at], float(run.weights.ravel()[route]), limit)


def between_figure(seen: Between, *, theme: Theme, lang: str) -> go.Figure:
    """The 32 values before and after FP8: a bar for each, a mark for what it became; clamped ones are hatched."""
    ink, scale = surface(theme), role("block_scale", theme)
    clamped = seen.clamped
    places = list(range(len(seen.weighted)))
    figure = go.Figure()
    for name, wanted in (("before", ~clamped), ("clamped", clamped)):
        figure.add_trace(
            go.Bar(
                x=[place for place in places if wanted[place]],
                y=[float(seen.weighted[place]) for place in places if wanted[place]],
                name=words(lang, f"figures.mega_kernel.{name}"),
                marker={
                    "color": ink.panel,
                    "line": {"color": ink.ink, "width": 1},
                    "pattern": {"shape": "x" if name == "clamped" else "", "fgcolor": ink.ink},
                },
            )
        )
    figure.add_trace(
        go.Scatter(
            x=places,
            y=seen.decoded.tolist(),
            mode="markers",
            name=words(lang, "figures.mega_kernel.after"),
            marker={"symbol": "diamond", "size": 9, "color": scale.fill, "line": {"color": ink.ink, "width": 1}},
        )
    )
    figure.layout = base_layout(
        theme,
        height=340,
        barmode="overlay",
        margin={"t": 42},
        xaxis={
            "title": words(lang, "figures.mega_kernel.element_axis"),
            "dtick": 4,
            "showgrid": False,
            "zeroline": False,
        },
    )
    return figure


def describe_between(seen: Between, lang: str) -> str:
    """The largest change that FP8 made in this group."""
    off = np.abs(seen.decoded - seen.weighted)
    worst = int(off.argmax())
    return words(
        lang,
        "figures.mega_kernel.describe_between",
        element=worst,
        before=three(float(seen.weighted[worst])),
        after=three(float(seen.decoded[worst])),
        zeros=int(((seen.decoded == 0) & (seen.weighted != 0)).sum()),
        count=len(off),
    )


def between_rows(seen: Between) -> list[dict[str, object]]:
    """The 32 elements with every value on the way."""
    return [
        {
            "element": place,
            "gate_sum": float(seen.gate_sum[place]),
            "up_sum": float(seen.up_sum[place]),
            "gate": float(seen.gate[place]),
            "up": float(seen.up[place]),
            "silu_gate_up": float(seen.product[place]),
            "weighted": float(seen.weighted[place]),
            "e4m3": f"0x{int(seen.codes[place]):02X}",
            "decoded": float(seen.decoded[place]),
        }
        for place in range(len(seen.weighted))
    ]


# ------------------------------------------------------------------------------------------------ one step


@dataclass(frozen=True, slots=True)
class StepSettings:
    """A K = 32 step: 32 E4M3 bytes and 32 E2M1 codes in hex, two UE8M0 bytes, the accumulator."""

    a: str
    b: str
    a_scale: int
    b_scale: int
    c: float


_A = "38c23b00b93ec5304a27bd3640b2c83c41ba353fc4332eb8443d26c03731bb3a"
_B = "2b517d3a90c4e2163f58a2d7194be603"
STEPS: dict[str, StepSettings] = {
    "whole": StepSettings(_A, _B, 127, 121, 3.28125),
    "cut": StepSettings(_A, _B, 127, 104, 3.28125),
    "huge": StepSettings(_A, _B, 127, 121, 2.0**24 + 2.0),
    "zeros": StepSettings("00" * 32, "7" * 32, 254, 254, 1.0),
    "nan": StepSettings(_A, _B, 255, 121, 3.28125),
    "overflow": StepSettings("7e" * 32, "7" * 32, 250, 250, 0.0),
}


def explain_step(settings: StepSettings) -> StepTraceK32:
    """The step that the settings describe, by the scalar reference."""
    return mma_step_k32_trace(*step_operands(settings), settings.a_scale, settings.b_scale, settings.c)


def product_span() -> tuple[int, int]:
    """Powers of two of the highest bit of the largest E4M3 times E2M1 product, and of the lowest of the smallest.

    All products of a step are under one scale a side, so this is how far apart their bits can be.

    >>> product_span()
    (11, -10)
    """
    largest = E4M3.max_value * E2M1.max_value
    smallest = E4M3.min_subnormal * E2M1.min_subnormal
    return math.floor(math.log2(largest)), round(math.log2(smallest))


def step_operands(settings: StepSettings) -> tuple[list[int], list[int]]:
    """E4M3 bytes and E2M1 codes, 32 each."""
    return list(bytes.fromhex(settings.a)), [int(digit, 16) for digit in settings.b]
