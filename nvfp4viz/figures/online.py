"""Figures about online quantisation: bytes that differ, and what is alive at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import Theme, role, surface
from nvfp4viz.figures.words import words

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from nvfp4viz.quant.online import RankResult, Way, WayResult

Shapes = dict[str, tuple[int, int, int]]
SHAPES: Shapes = {"tiny_moe": (64, 128, 128), "deepseek_v4_flash": (256, 4096, 4096)}
"""Experts, gate and up rows together, and columns of one layer's first weight."""


def changed_figure(
    rows: Sequence[tuple[str, float, float]], *, theme: Theme, lang: str, height: int = 280
) -> go.Figure:
    """For each named row the share of codes and of block-scale bytes that differ, from 0 to 1."""
    import plotly.graph_objects as go

    ink = surface(theme)
    # Codes have no role among the colours; block scales do.
    kinds = (("codes", ink.accent, ""), ("scales", role("block_scale", theme).fill, "/"))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": words(lang, f"figures.online.{kind}"),
            "y": [row[0] for row in rows],
            "x": [row[k] for row in rows],
            "text": [f"{100 * row[k]:.3g} %" for row in rows],
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {
                "color": colour,
                "line": {"color": ink.ink, "width": 1},
                "pattern": {
                    "shape": pattern,
                    "fgcolor": ink.ink,
                    "bgcolor": colour,
                    "size": 6,
                },
            },
            "hovertemplate": "%{y}: %{x:.4%}<extra></extra>",
        }
        for k, (kind, colour, pattern) in enumerate(kinds, start=1)
    ]
    most = max((share for row in rows for share in row[1:]), default=0.0) or 1.0
    layout = base_layout(
        theme,
        height=height,
        barmode="group",
        xaxis={
            "title": words(lang, "figures.online.differ"),
            "tickformat": ".2~%",
            "range": [0, most * 1.3],
            "nticks": 5,
        },
        yaxis={"autorange": "reversed", "showgrid": False},
    )
    return go.Figure(traces, layout)


def way_shares(ways: Sequence[WayResult], lang: str) -> list[tuple[str, float, float]]:
    """Rows of `changed_figure` for the ways."""
    return [
        (words(lang, f"figures.online.way.{one.way}"), one.codes_differ / one.codes, one.scales_differ / one.blocks)
        for one in ways
    ]


def rank_shares(results: Sequence[RankResult], lang: str) -> list[tuple[str, float, float]]:
    """Rows of `changed_figure` for shared and local maxima."""
    return [
        (
            words(lang, f"figures.online.{'shared' if one.shared else 'local'}", ranks=one.ranks),
            one.codes_differ / one.codes,
            one.scales_differ / one.blocks,
        )
        for one in results
    ]


def describe_ways(ways: Sequence[WayResult], lang: str) -> str:
    """How many codes folding changes, and how many the cast."""
    _, folded, cast = ways
    return words(
        lang,
        "figures.online.describe_ways",
        folded=f"{folded.codes_differ:,}",
        cast=f"{cast.codes_differ:,}",
        codes=f"{cast.codes:,}",
    )


def describe_ranks(results: Sequence[RankResult], lang: str) -> str:
    """Whether the number of ranks shows in the bytes."""
    shared, local = results
    return words(
        lang,
        "figures.online.describe_ranks",
        shared=f"{shared.codes_differ:,}",
        local=f"{local.codes_differ:,}",
        codes=f"{local.codes:,}",
    )


def way_rows(ways: Sequence[WayResult]) -> list[dict[str, object]]:
    """Every way's numbers."""
    return [
        {
            "way": one.way,
            "codes_that_differ": one.codes_differ,
            "codes": one.codes,
            "block_scales_that_differ": one.scales_differ,
            "block_scales": one.blocks,
            "signal_to_error_db": one.summary.sqnr_db,
            "mse": one.summary.mse,
            "launches": one.weights.launches,
            "peak_bytes": one.peak,
        }
        for one in ways
    ]


def rank_rows(results: Sequence[RankResult]) -> list[dict[str, object]]:
    """Shared and local maxima."""
    return [
        {
            "maximum": "shared" if one.shared else "local",
            "ranks": one.ranks,
            "codes_that_differ": one.codes_differ,
            "block_scales_that_differ": one.scales_differ,
            "signal_to_error_db": one.summary.sqnr_db,
        }
        for one in results
    ]


def memory_figure(
    peaks: Mapping[Way, Mapping[str, int]],
    elements: int,
    measured: Mapping[Way, int] | None = None,
    *,
    theme: Theme,
    lang: str,
) -> go.Figure:
    """Bytes a weight that live at the peak: a stacked bar a way as counted, a diamond where it was measured."""
    import plotly.graph_objects as go

    ink = surface(theme)
    parts = (
        ("folded_f32", ink.line, "/"),
        ("folded_bf16", ink.panel, "x"),
        ("codes", ink.accent, ""),
        ("block_scales", role("block_scale", theme).fill, "."),
    )
    names = [words(lang, f"figures.online.way.{way}") for way in peaks]
    traces: list[dict[str, object]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": words(lang, f"figures.online.part.{part}"),
            "y": names,
            "x": [found.get(part, 0) / elements for found in peaks.values()],
            "marker": {
                "color": colour,
                "line": {"color": ink.ink, "width": 1},
                "pattern": {
                    "shape": pattern,
                    "fgcolor": ink.ink,
                    "bgcolor": colour,
                    "size": 6,
                },
            },
            "hovertemplate": "%{y}: %{x:.4g}<extra>" + words(lang, f"figures.online.part.{part}") + "</extra>",
        }
        for part, colour, pattern in parts
    ]
    if measured is not None:
        said = words(lang, "figures.online.measured")
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": said,
                "y": names,
                "x": [measured[way] / elements for way in peaks],
                "marker": {
                    "symbol": "diamond",
                    "size": 13,
                    "color": role("sign", theme).fill,
                    "line": {"color": ink.page, "width": 2},
                },
                "cliponaxis": False,
                "hovertemplate": "%{y}: %{x:.4g}<extra>" + said + "</extra>",
            }
        )
    layout = base_layout(
        theme,
        height=300,
        barmode="stack",
        xaxis={"title": words(lang, "figures.online.bytes"), "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "showgrid": False},
    )
    return go.Figure(traces, layout)


def describe_memory(
    peaks: Mapping[Way, Mapping[str, int]], elements: int, lang: str, measured: Mapping[Way, int] | None = None
) -> str:
    """Bytes a weight at the peak of the direct way and of the cast one, as counted, and as measured if they were."""

    def said(key: str, held: Mapping[Way, int]) -> str:
        direct, cast = held["direct"], held["folded_bf16"]
        return words(
            lang,
            f"figures.online.{key}",
            direct=f"{direct / elements:.4g}",
            cast=f"{cast / elements:.4g}",
            times=f"{cast / direct:.3g}",
        )

    counted = said("describe_memory", {way: sum(found.values()) for way, found in peaks.items()})
    if measured is None:
        return counted
    return counted + ("" if lang == "zh" else " ") + said("describe_measured", measured)


def memory_rows(
    peaks: Mapping[Way, Mapping[str, int]], measured: Mapping[Way, int] | None = None
) -> list[dict[str, object]]:
    """Every array alive at the peak as counted, and each way's measured peak."""
    rows: list[dict[str, object]] = [
        {"way": way, "how": "counted", "array": part, "bytes": size}
        for way, found in peaks.items()
        for part, size in found.items()
    ]
    return rows + [
        {"way": way, "how": "measured", "array": "all", "bytes": size} for way, size in (measured or {}).items()
    ]
