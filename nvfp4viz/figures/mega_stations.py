"""What the mega-kernel only moves, and where its numbers change: places of a sample layer, counted and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.mega_kernel import SampleLayer
from nvfp4viz.figures.palette import Theme, role, surface
from nvfp4viz.figures.words import words
from nvfp4viz.formats import deinterleave_gate_up, unpack_nibbles
from nvfp4viz.moe.mega_kernel_error import decoded_e4m3


@dataclass(frozen=True, slots=True)
class Station:
    """A place of the kernel: how many numbers pass it, and how many have another value behind it.

    ``kind`` is ``"moved"``, ``"fp8"`` (a quantisation) or ``"bf16"`` (a rounding, and before SwiGLU the clamp).
    """

    id: str
    kind: str
    numbers: int
    changed: int


def stations(layer: SampleLayer) -> tuple[Station, ...]:
    """In the order of the kernel, counted on a sample; accumulators, which cut bits too, are no places of their own."""
    run = layer.run
    tokens, inner = np.asarray(layer.x, np.float64), np.asarray(run.weighted, np.float64)
    sums = np.stack([run.gate_sum, run.up_sum])
    stored, prepared = unpack_nibbles(layer.w13), unpack_nibbles(deinterleave_gate_up(layer.experts.w13))
    routes = np.asarray(run.routes, np.float64).reshape(*run.ids.shape, -1)
    passed = (
        ("weights", "moved", stored, prepared),
        ("staged", "fp8", tokens, decoded_e4m3(run.x_codes, run.x_scales)),
        ("clamped", "bf16", sums, np.stack([run.gate, run.up])),
        ("requantised", "fp8", inner, decoded_e4m3(run.y_codes, run.y_scales)),
        ("routes", "bf16", run.sums, np.asarray(run.routes, np.float32)),
        ("out", "bf16", routes.sum(axis=1), np.asarray(run.out, np.float64)),
    )
    return tuple(
        Station(name, kind, int(before.size), int((before != after).sum())) for name, kind, before, after in passed
    )


def stations_figure(found: Sequence[Station], *, theme: Theme, lang: str) -> go.Figure:
    """A bar for each place, as long as its share of numbers that change; FP8 is hatched."""
    ink, fp8, bf16 = surface(theme), role("block_scale", theme), role("route", theme)
    figure = go.Figure()
    for kind, colour, hatch in (("moved", ink.panel, ""), ("fp8", fp8.fill, "/"), ("bf16", bf16.fill, "")):
        mine = [each for each in found if each.kind == kind]
        figure.add_trace(
            go.Bar(
                orientation="h",
                name=words(lang, f"figures.mega_kernel.kind.{kind}"),
                y=[words(lang, f"figures.mega_kernel.station.{each.id}") for each in mine],
                x=[100 * each.changed / each.numbers for each in mine],
                marker={
                    "color": colour,
                    "line": {"color": ink.ink, "width": 1},
                    "pattern": {
                        "shape": hatch,
                        "fgcolor": fp8.on_fill,
                        "size": 6,
                        "solidity": 0.12,
                        "fillmode": "overlay",
                    },
                },
                text=[
                    words(lang, "figures.mega_kernel.of", changed=f"{each.changed:,}", numbers=f"{each.numbers:,}")
                    for each in mine
                ],
                textposition="outside" if kind == "moved" else "inside",
                insidetextanchor="end",
                insidetextfont={"color": ink.ink if kind == "moved" else {"fp8": fp8, "bf16": bf16}[kind].on_fill},
                outsidetextfont={"color": ink.ink},
                hovertemplate="%{y}: %{text}<extra></extra>",
            )
        )
    order = [words(lang, f"figures.mega_kernel.station.{each.id}") for each in found]
    figure.layout = base_layout(
        theme,
        height=130 + 36 * len(found),
        margin={"t": 42},
        barmode="overlay",
        # Beyond 100, for its tick to keep its number: half of it would stand outside.
        xaxis={"title": words(lang, "figures.mega_kernel.changed_axis"), "range": [0, 105], "dtick": 20},
        yaxis={"categoryorder": "array", "categoryarray": order, "autorange": "reversed", "ticks": ""},
    )
    return figure


def describe_stations(found: Sequence[Station], lang: str) -> str:
    """Which numbers only move, and where they change."""
    moved = [each for each in found if each.kind == "moved"]
    fp8, bf16 = (sum(each.kind == kind for each in found) for kind in ("fp8", "bf16"))
    return words(
        lang,
        "figures.mega_kernel.describe_stations",
        codes=f"{sum(each.numbers for each in moved):,}",
        changed=f"{sum(each.changed for each in moved):,}",
        fp8=fp8,
        bf16=bf16,
    )


def station_rows(found: Sequence[Station]) -> list[dict[str, object]]:
    """Every place as a row."""
    return [{"place": each.id, "kind": each.kind, "numbers": each.numbers, "changed": each.changed} for each in found]
