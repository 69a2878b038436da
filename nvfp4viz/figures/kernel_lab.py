"""What kernels become on each architecture, what they cost, and how fast they are: records, figures, sentences."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvfp4viz.device.sass import Instruction, KernelOnTarget
from nvfp4viz.figures.layout import base_layout, room_for
from nvfp4viz.figures.palette import MONO, Theme, role, surface
from nvfp4viz.figures.words import listed, words

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True, slots=True)
class Feature:
    """An operation that some GPUs have an instruction for.

    Attributes
    ----------
    id
        Text key below ``kernels.feature``.
    ptx
        How the sources write it; empty where the compiler chooses it by itself.
    opcode
        What it is in machine code, a pattern for the whole operation.
    same_bits
        Whether the software that stands in for it computes its bits.  A sum of BF16 products is f32 and has the order
        of the hardware, or of the software: last bits may differ.
    """

    id: str
    ptx: str
    opcode: re.Pattern[str]
    same_bits: bool = True


FEATURES = (
    Feature("to_e2m1", "cvt.rn.satfinite.e2m1x2.f32", re.compile(r"F2FP\.(?!.*UNPACK).*E2M1.*")),
    Feature("from_e2m1", "cvt.rn.f16x2.e2m1x2", re.compile(r"F2FP\..*E2M1.*UNPACK.*")),
    Feature("to_e4m3", "cvt.rn.satfinite.e4m3x2.f32", re.compile(r"F2FP\.(?!.*UNPACK).*E4M3.*")),
    Feature("to_ue8m0", "cvt.rp.satfinite.ue8m0x2.f32", re.compile(r"F2FP\.(?!.*UNPACK).*\.E8\b.*")),
    Feature("reciprocal", "rcp.approx.ftz.f32", re.compile(r"MUFU\.RCP")),
    Feature("fp4_product", "kind::mxf4", re.compile(r"OMMA.*")),
    Feature("bf16_product", "mma.sync.aligned.m16n8k16", re.compile(r"HMMA.*"), same_bits=False),
    Feature("async_copy", "cp.async.cg", re.compile(r"LDGSTS.*")),
    Feature("wide_access", "", re.compile(r"(LDG|STG)\..*\b(128|256)(\..*)?")),
    Feature("local_memory", "", re.compile(r"(LDL|STL).*")),
)
# Local memory is what a kernel should not need: its absence is the good news, and no instruction replaces it.
UNWANTED = "local_memory"

LABEL_WIDTH = 24  # characters

# What stands in a cell of the presence figure.
INSTRUCTION, SOFTWARE, UNUSED = "instruction", "software", "unused"


def feature(feature_id: str) -> Feature:
    """The feature of an id."""
    return next(one for one in FEATURES if one.id == feature_id)


def found(one: Feature, kernel: KernelOnTarget) -> list[Instruction]:
    """The instructions of a feature that a kernel holds on its target."""
    return [instruction for instruction in kernel.telling if one.opcode.fullmatch(instruction.opcode)]


@dataclass(frozen=True, slots=True)
class Presence:
    """Which of the telling instructions a kernel holds, per target.

    ``counts[f][t]`` says how often the code for target t holds an instruction of feature f (not how often it runs).
    """

    kernel: str
    builds: tuple[KernelOnTarget, ...]
    features: tuple[Feature, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(build.target for build in self.builds)

    def state(self, row: int, column: int) -> str:
        """`INSTRUCTION`, `SOFTWARE` (other targets have one, this one computes it in software), or `UNUSED`."""
        if self.counts[row][column]:
            return INSTRUCTION
        one = self.features[row]
        return SOFTWARE if any(self.counts[row]) and one.ptx else UNUSED

    def state_of(self, feature_id: str, target: str) -> str:
        """The same, by ids; `UNUSED` for what the kernel has on no target."""
        ids = [one.id for one in self.features]
        if feature_id not in ids or target not in self.targets:
            return UNUSED
        return self.state(ids.index(feature_id), self.targets.index(target))


def presence_of(builds: Iterable[KernelOnTarget]) -> Presence:
    """The presence of one kernel from its builds; features that it has nowhere are left out, but for `UNWANTED`."""
    builds = tuple(builds)
    assert len({build.name for build in builds}) == 1, "one kernel at a time"
    rows = [
        (one, tuple(sum(instruction.count for instruction in found(one, build)) for build in builds))
        for one in FEATURES
    ]
    kept = [(one, counts) for one, counts in rows if any(counts) or one.id == UNWANTED]
    return Presence(builds[0].name, builds, tuple(one for one, _ in kept), tuple(counts for _, counts in kept))


def presence_rows(presence: Presence) -> list[dict[str, Any]]:
    """One row a target: instructions, registers, shared and stack bytes, and the count of every feature."""
    return [
        {
            "kernel": presence.kernel,
            "target": build.target,
            "instructions": build.instructions,
            "registers": build.registers,
            "shared_bytes": build.shared_bytes,
            "stack_bytes": build.stack_bytes,
            **{one.id: counts[column] for one, counts in zip(presence.features, presence.counts, strict=True)},
        }
        for column, build in enumerate(presence.builds)
    ]


def describe_presence(presence: Presence, lang: str) -> str:
    """One sentence: which conversions are an instruction where, and which targets compute them in software."""
    for row, one in enumerate(presence.features):
        have = [t for t, count in zip(presence.targets, presence.counts[row], strict=True) if count]
        lack = [t for t in presence.targets if t not in have]
        if one.ptx and lack:
            return words(
                lang,
                "kernels.presence.describe" if one.same_bits else "kernels.presence.describe_sum",
                kernel=presence.kernel,
                feature=words(lang, f"kernels.feature.{one.id}"),
                have=_list(have, lang),
                lacking=len(lack),
            )
    return words(lang, "kernels.presence.everywhere", kernel=presence.kernel, targets=len(presence.targets))


def _list(names: Sequence[str], lang: str) -> str:
    return listed(lang, (f"`{name}`" for name in names))


TOP_AND_BOTTOM = {"t": 41, "b": 70}
"""Room for a legend of one line, and for the targets' slanted names."""


def _targets_axis(presence: Presence, ink: str) -> dict[str, Any]:
    """Every target in its own order, its name slanted."""
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(presence.targets),
        "tickangle": -60,
        "tickfont": {"family": MONO, "size": 12, "color": ink},
    }


def presence_figure(presence: Presence, *, theme: Theme, lang: str, picked: str | None = None) -> go.Figure:
    """Targets against instructions: a filled square with its count, an open circle for software, a dot for neither."""
    import plotly.graph_objects as go

    ink, scale = surface(theme), role("exponent", theme)
    names = [words(lang, f"kernels.feature.{one.id}") for one in presence.features]
    cells: dict[str, list[tuple[str, str, int]]] = {INSTRUCTION: [], SOFTWARE: [], UNUSED: []}
    for row, counts in enumerate(presence.counts):
        for column, count in enumerate(counts):
            cells[presence.state(row, column)].append((presence.targets[column], names[row], count))
    # Squares fill their cells at any width; the marker on top, of the same colour, is there for the legend.
    filled = [[1.0 if count else None for count in counts] for counts in presence.counts]
    looks = {
        INSTRUCTION: {"symbol": "square", "size": 13, "color": scale.fill},
        SOFTWARE: {"symbol": "circle-open", "size": 10, "color": ink.ink, "line": {"width": 2}},
        UNUSED: {"symbol": "circle", "size": 4, "color": ink.muted},
    }
    figure = go.Figure()
    figure.add_heatmap(
        x=list(presence.targets), y=names, z=filled, colorscale=[[0, scale.fill], [1, scale.fill]], zmin=0, zmax=1,
        showscale=False, xgap=2, ygap=3, hoverinfo="skip",
    )  # fmt: skip
    for state, look in looks.items():
        text = [str(count) for _, _, count in cells[state]] if state == INSTRUCTION else None
        figure.add_scatter(
            x=[target for target, _, _ in cells[state]],
            y=[name for _, name, _ in cells[state]],
            mode="markers+text" if text else "markers",
            text=text,
            textfont={"family": MONO, "size": 10, "color": scale.on_fill},
            marker=look,
            name=words(lang, f"kernels.presence.{state}"),
            hovertemplate=f"%{{x}}<br>%{{y}}<br>{words(lang, f'kernels.presence.{state}')}<extra></extra>",
        )
    figure.layout = base_layout(
        theme,
        height=120 + 30 * len(names),
        margin={"l": room_for(names), **TOP_AND_BOTTOM},
        xaxis=_targets_axis(presence, ink.ink) | {"range": [-0.6, len(presence.targets) - 0.4]},
        yaxis={
            "type": "category",
            "categoryorder": "array",
            "categoryarray": names[::-1],
            "range": [-0.6, len(names) - 0.4],
            "tickfont": {"size": 12, "color": ink.ink},
        },
    )
    if picked in presence.targets:
        at = presence.targets.index(picked)
        figure.add_shape(
            type="rect", x0=at - 0.5, x1=at + 0.5, y0=-0.6, y1=len(names) - 0.4,
            line={"color": ink.ink, "width": 2}, layer="above",
        )  # fmt: skip
    return figure


# ------------------------------------------------------------------------------------------------ the cost


def describe_sizes(presence: Presence, feature_id: str, lang: str) -> str:
    """One sentence: how long the code is with the instruction and without it."""
    with_it, without = _by_state(presence, feature_id)
    if not with_it or not without:
        return words(lang, "kernels.sizes.one_kind", kernel=presence.kernel, **_span(with_it or without))
    return words(
        lang,
        "kernels.sizes.describe",
        feature=words(lang, f"kernels.feature.{feature_id}"),
        short=min(build.instructions for build in with_it),
        short_target=min(with_it, key=lambda build: build.instructions).target,
        long=max(build.instructions for build in without),
        long_target=max(without, key=lambda build: build.instructions).target,
    )


def _by_state(presence: Presence, feature_id: str) -> tuple[list[KernelOnTarget], list[KernelOnTarget]]:
    has = [presence.state_of(feature_id, build.target) == INSTRUCTION for build in presence.builds]
    with_it = [build for build, here in zip(presence.builds, has, strict=True) if here]
    return with_it, [build for build, here in zip(presence.builds, has, strict=True) if not here]


def _span(builds: list[KernelOnTarget]) -> dict[str, int]:
    counts = [build.instructions for build in builds]
    return {"low": min(counts), "high": max(counts)}


def sizes_figure(presence: Presence, feature_id: str, *, theme: Theme, lang: str) -> go.Figure:
    """Instructions of the kernel per target; hatched where the chosen feature is computed in software."""
    import plotly.graph_objects as go

    ink, scale = surface(theme), role("exponent", theme)
    figure = go.Figure()
    for state, builds in zip((INSTRUCTION, SOFTWARE), _by_state(presence, feature_id), strict=True):
        hatched = state == SOFTWARE
        figure.add_bar(
            x=[build.target for build in builds],
            y=[build.instructions for build in builds],
            text=[str(build.instructions) for build in builds],
            textposition="outside",
            textfont={"family": MONO, "size": 11, "color": ink.ink},
            customdata=[[build.registers] for build in builds],
            name=words(lang, f"kernels.sizes.{state}"),
            marker={
                "color": ink.panel if hatched else scale.fill,
                "line": {"color": ink.ink, "width": 1},
                "pattern": {"shape": "/" if hatched else "", "fgcolor": ink.muted, "bgcolor": ink.panel, "size": 6},
            },
            hovertemplate=(
                f"%{{x}}: %{{y}} {words(lang, 'kernels.sizes.instructions')}, "
                f"%{{customdata[0]}} {words(lang, 'kernels.sizes.registers')}<extra></extra>"
            ),
        )
    top = max(build.instructions for build in presence.builds)
    figure.layout = base_layout(
        theme,
        height=300,
        barmode="overlay",
        margin={"l": 59, **TOP_AND_BOTTOM},
        xaxis=_targets_axis(presence, ink.ink),
        yaxis={"title": words(lang, "kernels.sizes.axis"), "range": [0, 1.15 * top]},
    )
    return figure


# --------------------------------------------------------------------------------------------- the bandwidth


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one thing moves its bytes."""

    name: str
    gb_per_s: float  # bytes read and written over seconds, in 10^9
    is_copy: bool
    of_copy: float | None = None  # the share of a copy of the same tensor, where that was recorded


def share_of(rate: Rate, rates: Sequence[Rate]) -> float | None:
    """The recorded share, else the rate over the fastest copy's; None for copies and where there is none."""
    copy = copy_rate(rates)
    if rate.is_copy or copy is None:
        return None
    return rate.gb_per_s / copy if rate.of_copy is None else rate.of_copy


def copy_rate(rates: Sequence[Rate]) -> float | None:
    """The copy that the others are held against: the fastest one."""
    return max((rate.gb_per_s for rate in rates if rate.is_copy), default=None)


def _two_digits(share: float) -> str:
    return f"{share:.2f}" if share >= 0.1 else f"{share:.2g}"


def describe_bandwidth(rates: Sequence[Rate], lang: str) -> str:
    """One sentence: which share of the copy's rate the first of ours reaches."""
    copy, ours = copy_rate(rates), [rate for rate in rates if not rate.is_copy]
    if copy is None or not ours:
        return words(lang, "kernels.bandwidth.no_copy", things=len(rates))
    return words(
        lang,
        "kernels.bandwidth.describe",
        name=ours[0].name,
        rate=f"{ours[0].gb_per_s:.4g}",
        copy=f"{copy:.4g}",
        share=_two_digits(share_of(ours[0], rates) or 0.0),
    )


def bandwidth_rows(rates: Sequence[Rate]) -> list[dict[str, Any]]:
    """One row a thing: rate and share of the copy."""
    return [{"name": r.name, "gb_per_s": r.gb_per_s, "of_copy": share_of(r, rates), "copy": r.is_copy} for r in rates]


def bandwidth_figure(rates: Sequence[Rate], *, theme: Theme, lang: str) -> go.Figure:
    """Horizontal bars of GB/s with the copy as a dashed line; copies are hatched."""
    import plotly.graph_objects as go

    ink, scale = surface(theme), role("mantissa", theme)
    copy = copy_rate(rates)
    names = [rate.name for rate in rates]
    figure = go.Figure()
    for is_copy in (False, True):
        chosen = [rate for rate in rates if rate.is_copy == is_copy]
        shares = [share_of(rate, rates) for rate in chosen]
        figure.add_bar(
            y=[rate.name for rate in chosen],
            x=[rate.gb_per_s for rate in chosen],
            orientation="h",
            text=[
                f"{rate.gb_per_s:.4g}" + ("" if share is None else f" · {_two_digits(share)}")
                for rate, share in zip(chosen, shares, strict=True)
            ],
            textposition="auto",
            textfont={"family": MONO, "size": 12},
            insidetextfont={"color": ink.ink if is_copy else scale.on_fill},
            outsidetextfont={"color": ink.ink},
            cliponaxis=False,
            name=words(lang, "kernels.bandwidth.copy" if is_copy else "kernels.bandwidth.ours"),
            marker={
                "color": ink.panel if is_copy else scale.fill,
                "line": {"color": ink.ink, "width": 1},
                "pattern": {"shape": "/" if is_copy else "", "fgcolor": ink.line, "bgcolor": ink.panel, "size": 6},
            },
            hovertemplate="%{y}: %{x:.4g} GB/s<extra></extra>",
        )
    figure.layout = base_layout(
        theme,
        height=90 + 34 * len(rates),
        barmode="overlay",
        xaxis={"title": words(lang, "kernels.bandwidth.axis"), "rangemode": "tozero"},
        yaxis={
            "type": "category",
            "categoryorder": "array",
            "categoryarray": names[::-1],
            # Two lines at most, so that a phone keeps room for the bars.
            "tickvals": names,
            "ticktext": ["<br>".join(textwrap.wrap(name, LABEL_WIDTH)) for name in names],
            "tickfont": {"size": 12, "color": ink.ink},
        },
    )
    if copy is not None:
        figure.add_vline(x=copy, line={"color": ink.ink, "width": 2, "dash": "dash"})
    return figure
