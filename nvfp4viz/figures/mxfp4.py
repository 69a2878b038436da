"""Figures about MXFP4 beside NVFP4; the records come from :mod:`nvfp4viz.quant.schemes`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import Theme, role, surface
from nvfp4viz.figures.scaling import power_of_two
from nvfp4viz.figures.words import listed, words
from nvfp4viz.formats import E2M1, MX_BLOCK, decode_e4m3
from nvfp4viz.quant.recipes import MXFP4_RECIPES, Scheme
from nvfp4viz.quant.schemes import LayerBytes, RuleBinade, RuleTrace, SchemeResult

F32 = npt.NDArray[np.float32]
SHIPPED: tuple[Scheme, ...] = ("mxfp4", "nvfp4")
TINY = 2.0**-17
"""Puts a block's maximum below DeepGEMM's floor of 1e-4."""

TICKS = (1, 1.25, 1.5, 1.75, 2)

Matrices = tuple[tuple[int, int], ...]
LAYERS: dict[str, tuple[int, Matrices]] = {
    "deepseek_v4_flash": (256, ((2048, 4096), (2048, 4096), (4096, 2048))),
    "tiny_moe": (64, ((64, 128), (64, 128), (128, 64))),
}
"""Experts of one layer, and the matrices ``(N, K)`` of each: gate, up, down."""


@dataclass(frozen=True, slots=True)
class Use:
    """A family of checkpoints: what its experts are stored in, as the source says."""

    name: str
    scheme: str
    weight: str
    scale: str
    source: str


_MODELOPT = ("weight U8 [N, K/2]", "weight_scale F8_E4M3, weight_scale_2 F32")
USES = (
    Use("gpt-oss", "MXFP4", "gate_up_proj_blocks U8 [E, 2I, H/32, 16]", "gate_up_proj_scales U8", "TensorRT-LLM#7451"),
    Use("DeepSeek-V4-Flash", "MXFP4", "w1.weight I8 [2048, 2048]", "w1.scale F8_E8M0 [2048, 128]", "Automodel#2034"),
    Use("AMD Quark", "MXFP4", "weight U8 [N, K/2]", "weight_scale U8 [N, K/32]", "vllm#49420"),
    Use(
        "nvidia/DeepSeek-V4-Pro-NVFP4",
        "NVFP4 + MXFP4",
        "ffn.experts: NVFP4",
        "mtp.*.ffn.experts: MXFP4",
        "TensorRT-LLM#16196",
    ),
    Use("nvidia/Qwen3-235B-A22B-NVFP4", "NVFP4", *_MODELOPT, "NeMo-RL#3615"),
    Use("nvidia/Gemma-4-26B-A4B-NVFP4", "NVFP4", *_MODELOPT, "vllm#41683"),
    Use(
        "RedHatAI Gemma 4",
        "NVFP4",
        "weight_packed U8 [N, K/2]",
        "weight_scale F8_E4M3, weight_global_scale F32",
        "vllm#39256",
    ),
    Use("nvidia/MiniMax-M3-NVFP4", "NVFP4 + MXFP8", "experts: NVFP4", "linears: MXFP8", "tokenspeed#749"),
)
"""Read in these projects' issues; a name is a release, and a release may change."""


def sample_block(top: float, factor: float = 1.0, seed: int = 3) -> F32:
    """A block of 32, normal values below 4 with one of ``top``, all times ``factor``; float32."""
    values = np.clip(1.3 * np.random.default_rng(seed).standard_normal(MX_BLOCK), -3.9, 3.9)
    values[11] = top
    return (values * factor).astype(np.float32)


# ------------------------------------------------------------------ scales of a tensor


def scales_figure(found: Mapping[str, SchemeResult], *, theme: Theme, lang: str) -> go.Figure:
    """How often each scale occurs in MXFP4 and in NVFP4, over marks for every scale that a byte could say."""
    ink, scale = surface(theme), role("block_scale", theme)
    used: dict[str, list[tuple[float, int, int]]] = {
        name: [(math.log2(s), n, b) for b, s, n in found[name].used() if s > 0] for name in SHIPPED
    }
    places = [place for rows in used.values() for place, _, _ in rows]
    low, high = math.floor(min(places)) - 0.6, math.ceil(max(places)) + 0.6
    figure = go.Figure()
    for axis, name in (("y", "mxfp4"), ("y2", "nvfp4")):
        label = words(lang, f"figures.mxfp4.{name}")
        figure.add_trace(
            go.Bar(
                x=[place for place, _, _ in used[name]],
                y=[count for _, count, _ in used[name]],
                width=0.07,
                yaxis=axis,
                marker={"color": scale.fill, "line": {"color": ink.ink, "width": 1}},
                customdata=[(f"0x{byte:02X}", 2.0**place) for place, _, byte in used[name]],
                hovertemplate="%{customdata[0]}: %{customdata[1]:.4g} · %{y}<extra>" + label + "</extra>",
                showlegend=False,
            )
        )
        grid = [place for place in _sayable(found[name]) if low <= place <= high]
        figure.add_trace(
            go.Scatter(
                x=grid,
                y=[0] * len(grid),
                yaxis=axis,
                mode="markers",
                marker={"symbol": "line-ns-open", "size": 9, "color": ink.muted, "line": {"width": 1.5}},
                hoverinfo="skip",
                showlegend=False,
                cliponaxis=False,
            )
        )
    step = max(1, math.ceil((high - low) / 7))
    ticks = list(range(math.ceil(low), math.floor(high) + 1, step))
    figure.layout = base_layout(
        theme,
        height=420,
        xaxis={
            "title": words(lang, "figures.mxfp4.scale_axis"),
            "range": [low, high],
            "tickvals": ticks,
            "ticktext": [power_of_two(power) for power in ticks],
            "showgrid": False,
            "anchor": "y2",
        },
        yaxis={"title": words(lang, "figures.mxfp4.mx_blocks"), "domain": [0.56, 1], "rangemode": "tozero"},
        yaxis2={"title": words(lang, "figures.mxfp4.nv_blocks"), "domain": [0, 0.44], "rangemode": "tozero"},
    )
    return figure


def _sayable(one: SchemeResult) -> list[float]:
    """log2 of every scale that the scheme could have given a block of this tensor."""
    if one.name == "mxfp4":
        return [float(power) for power in range(-127, 128)]
    values = decode_e4m3(np.arange(1, 127, dtype=np.uint8)).astype(np.float64)
    byte, scale, _ = next(row for row in one.used() if row[1] > 0)
    decode = scale / float(decode_e4m3(np.array([byte], np.uint8))[0])
    return [float(place) for place in np.log2(values * decode)]


def describe_scales(found: Mapping[str, SchemeResult], lang: str) -> str:
    """How many different scales each scheme uses, and what comes of it."""
    mx, nv = found["mxfp4"], found["nvfp4"]
    return words(
        lang,
        "figures.mxfp4.describe_scales",
        mx=len(mx.used()),
        mx_blocks=mx.scale_bytes.size,
        mx_db=f"{mx.summary.sqnr_db:.2f}",
        nv=len(nv.used()),
        nv_blocks=nv.scale_bytes.size,
        nv_db=f"{nv.summary.sqnr_db:.2f}",
    )


def scale_rows(found: Mapping[str, SchemeResult]) -> list[dict[str, object]]:
    """Every scale byte in use."""
    return [
        {"scheme": name, "byte": f"0x{byte:02X}", "scale": scale, "blocks": blocks}
        for name, one in found.items()
        for byte, scale, blocks in one.used()
    ]


def error_rows(found: Mapping[str, SchemeResult]) -> list[dict[str, object]]:
    """The errors of all schemes."""
    return [
        {
            "scheme": name,
            "block": one.block,
            "bits": one.bits,
            "signal_to_error_db": one.summary.sqnr_db,
            "mse": one.summary.mse,
            "largest_error": one.summary.max_abs,
            "became_zero": one.summary.zeroed,
            "clipped": one.summary.clipped,
            "scale_bytes_in_use": len(one.used()),
        }
        for name, one in found.items()
    ]


# ------------------------------------------------------------------ the rules


def rules_figure(binade: RuleBinade, top: float, *, theme: Theme, lang: str) -> go.Figure:
    """A lane for each rule: which scale a block's maximum gets over one binade, and where it is clipped."""
    ink, scale = surface(theme), role("block_scale", theme)
    lowest = min(run.scale_byte for name in MXFP4_RECIPES for run in binade.runs(name))
    low = float(binade.tops[0])
    power = power_of_two(math.log2(low))
    step = float(binade.tops[1] - binade.tops[0])
    styles: dict[str, dict[str, Any]] = {
        "fits": {"color": "rgba(0,0,0,0)"},
        "clips": {"color": "rgba(0,0,0,0)", "pattern": {"shape": "/", "fgcolor": ink.ink, "size": 7}},
        "larger": {"color": scale.fill},
    }
    nothing: list[Any] = [None]  # keeps a state without runs in the legend
    figure = go.Figure()
    for state, style in styles.items():
        rows = [
            (name, run)
            for name in MXFP4_RECIPES
            for run in binade.runs(name)
            if state == ("clips" if run.clips else "fits" if run.scale_byte == lowest else "larger")
        ]
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[name for name, _ in rows] or nothing,
                base=[run.first for _, run in rows],
                x=[run.last + step - run.first for _, run in rows] or nothing,
                width=0.62,
                name=words(lang, f"figures.mxfp4.{state}"),
                marker={**style, "line": {"color": ink.ink, "width": 1}},
                text=["" if run.clips else power_of_two(run.scale_byte - 127) for _, run in rows],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                insidetextfont={"color": scale.on_fill if state == "larger" else ink.ink, "size": 13},
                customdata=[(run.first, run.last, f"0x{run.scale_byte:02X}") for _, run in rows],
                hovertemplate="%{y}: %{customdata[0]:.6g} – %{customdata[1]:.6g} · %{customdata[2]}<extra></extra>",
            )
        )
    figure.layout = base_layout(
        theme,
        height=400,
        barmode="overlay",
        xaxis={
            "title": words(lang, "figures.mxfp4.top_axis"),
            "range": [low, 2 * low],
            "tickvals": [low * share for share in TICKS],
            "ticktext": [f"{low * share:g}" if low > 1e-3 else f"{share:g}·{power}" for share in TICKS],
            "showgrid": False,
        },
        yaxis={
            "categoryorder": "array",
            "categoryarray": list(reversed(MXFP4_RECIPES)),
            "showgrid": False,
            "ticks": "",
        },
    )
    figure.add_shape(type="line", x0=top, x1=top, y0=0, y1=1, yref="paper", line={"color": ink.ink, "width": 2})
    return figure


def describe_rules(traces: Mapping[str, RuleTrace], lang: str) -> str:
    """Who clips the block's largest element, and what it becomes under each rule."""
    first = next(iter(traces.values()))
    clipping = [name for name, trace in traces.items() if trace.clips_top]
    became = " · ".join(f"{name} {_digits(trace.decoded[trace.top])}" for name, trace in traces.items())
    return words(
        lang,
        "figures.mxfp4.describe_rules" if clipping else "figures.mxfp4.describe_rules_none",
        top=_digits(first.x[first.top]),
        clipping=listed(lang, clipping),
        became=became,
    )


def _digits(value: np.float32) -> str:
    return f"{float(value):.6g}".replace("-", "−")


def run_rows(binade: RuleBinade) -> list[dict[str, object]]:
    """The lanes as rows."""
    return [
        {
            "rule": name,
            "first": run.first,
            "last": run.last,
            "scale_byte": f"0x{run.scale_byte:02X}",
            "clips": run.clips,
        }
        for name in MXFP4_RECIPES
        for run in binade.runs(name)
    ]


def element_rows(traces: Mapping[str, RuleTrace]) -> list[dict[str, object]]:
    """Every element under every rule."""
    return [
        {
            "rule": name,
            "scale_byte": f"0x{trace.scale_byte:02X}",
            "element": at,
            "x": float(trace.x[at]),
            "scaled": float(trace.products[at]),
            "code": f"0x{int(trace.codes[at]):X}",
            "decoded": float(trace.decoded[at]),
            "beyond": bool(abs(trace.products[at]) > E2M1.max_value),
        }
        for name, trace in traces.items()
        for at in range(MX_BLOCK)
    ]


# ------------------------------------------------------------------ storage


def matrices_of(layer: str) -> Matrices:
    """Every expert matrix of a layer in ``LAYERS``."""
    experts, matrices = LAYERS[layer]
    return matrices * experts


def storage_figure(made: Mapping[str, LayerBytes], *, theme: Theme, lang: str) -> go.Figure:
    """Bits a weight: codes, and block scales on top of them."""
    ink, scale, code = surface(theme), role("block_scale", theme), surface(theme).panel
    parts = (
        ("codes", {"color": code}, [8 * one.codes / one.elements for one in made.values()]),
        ("block_scales", {"color": scale.fill}, [8 * one.block_scales / one.elements for one in made.values()]),
    )
    names = [words(lang, f"figures.mxfp4.{name}") for name in made]
    figure = go.Figure(
        [
            go.Bar(
                orientation="h",
                y=names,
                x=values,
                width=0.5,
                name=words(lang, f"figures.mxfp4.{part}"),
                marker={**style, "line": {"color": ink.ink, "width": 1}},
                hovertemplate="%{y}: %{x}<extra></extra>",
            )
            for part, style, values in parts
        ]
    )
    figure.layout = base_layout(
        theme,
        height=240,
        barmode="stack",
        xaxis={"title": words(lang, "figures.mxfp4.bits_axis"), "range": [0, 5.6]},
        yaxis={"autorange": "reversed", "showgrid": False, "ticks": ""},
    )
    figure.layout.legend.traceorder = "normal"
    # Beside the bars: on a phone the scales' part is narrower than its number.
    for name, code_bits, scale_bits in zip(names, parts[0][2], parts[1][2], strict=True):
        figure.add_annotation(
            x=code_bits + scale_bits,
            y=name,
            text=f"{code_bits:g} + {scale_bits:g}",
            showarrow=False,
            xanchor="left",
            xshift=6,
            font={"color": ink.ink, "size": 13},
        )
    return figure


def describe_storage(made: Mapping[str, LayerBytes], lang: str) -> str:
    """The two totals and their difference."""
    mx, nv = made["mxfp4"], made["nvfp4"]
    return words(
        lang,
        "figures.mxfp4.describe_storage",
        mx=f"{mx.total:,}",
        nv=f"{nv.total:,}",
        more=f"{100 * (nv.total / mx.total - 1):.2f} %",
    )


def storage_rows(made: Mapping[str, LayerBytes]) -> list[dict[str, object]]:
    """The bytes as rows."""
    return [
        {
            "scheme": name,
            "weights": one.elements,
            "codes": one.codes,
            "block_scales": one.block_scales,
            "tensor_scales": one.tensor_scales,
            "bits_a_weight": one.bits,
        }
        for name, one in made.items()
    ]


def use_rows(uses: Sequence[Use] = USES) -> list[dict[str, object]]:
    """The checkpoints as rows."""
    return [
        {"name": use.name, "scheme": use.scheme, "weight": use.weight, "scale": use.scale, "source": use.source}
        for use in uses
    ]
