"""One scale against the same projection's scales of the other experts in its layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.audit.scales import robust_z
from nvfp4viz.audit.texts import in_full
from nvfp4viz.figures.coverage import status_key
from nvfp4viz.figures.layout import base_layout
from nvfp4viz.figures.palette import MARKS, Theme, role, surface
from nvfp4viz.figures.words import words

if TYPE_CHECKING:
    import plotly.graph_objects as go

F32 = npt.NDArray[np.float32]
# The picked value's ring in pixels, and the parts of the height and of the width that are left free for half of it.
_RING, _EDGE, _SIDE = 17, 0.08, 0.035


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """The second-level scales of one role, layer and projection, and the one that was picked.

    Attributes
    ----------
    values : (E,) float32
        Effective multipliers; NaN where nothing is stored.
    status : tuple of str
        Per expert, names of `nvfp4viz.figures.coverage.STATUSES`.
    picked : int
        Expert.
    divisor : str
        What the checkpoint calls the scale where it stores divisors; empty elsewhere.
    shared : bool
        One number for all experts, repeated: none of them has peers.
    """

    role: str
    layer: int
    projection: str
    values: F32
    status: tuple[str, ...]
    picked: int
    divisor: str = ""
    shared: bool = False

    @property
    def usable(self) -> npt.NDArray[np.bool_]:
        """Experts whose value has a logarithm: finite and positive."""
        return np.isfinite(self.values) & (self.values > 0)

    @property
    def median(self) -> float | None:
        """Median of the usable values of the other experts; None where there are none."""
        others = self.usable.copy()
        others[self.picked] = False
        return float(np.median(self.values[others])) if others.any() else None

    @property
    def ratio(self) -> float | None:
        """The picked value over the peers' median; None where either is missing."""
        median = self.median
        if median is None or not self.usable[self.picked]:
            return None
        return float(self.values[self.picked]) / median

    @property
    def robust_z(self) -> float | None:
        """`nvfp4viz.audit.scales.robust_z` of the picked value among the other experts' usable ones."""
        others = self.usable.copy()
        others[self.picked] = False
        return robust_z(float(self.values[self.picked]), self.values[others]) if self.usable[self.picked] else None


def describe_peers(peers: Peers, lang: str) -> str:
    """One sentence: what is stored for the picked expert, and where it lies among its peers, if it has any."""
    place: dict[str, Any] = {
        # What is judged is one over what is stored.
        "role": f"1/{peers.divisor}" if peers.divisor else peers.role,
        "layer": peers.layer,
        "expert": peers.picked,
        "projection": peers.projection,
        "peers": int(peers.usable.sum()) - int(peers.usable[peers.picked]),
    }
    status = words(lang, status_key(peers.status[peers.picked], peers.divisor))
    if peers.shared:
        value = f"**{float(peers.values[peers.picked]):.4g}**" if peers.usable[peers.picked] else status
        return words(lang, "peers.shared", **place, value=value, experts=len(peers.values))
    if peers.ratio is not None:
        value = f"{float(peers.values[peers.picked]):.4g}"
        z = peers.robust_z
        # A minus sign, as figures write it.
        far = words(lang, "peers.z_none") if z is None else words(lang, "peers.z", z=f"{z:+.2f}".replace("-", "−"))
        return words(lang, "peers.value", **place, value=value, ratio=in_full(peers.ratio)) + far
    if peers.median is None:
        return words(lang, "peers.alone", **place, status=status)
    return words(lang, "peers.none", **place, status=status, median=f"{peers.median:.4g}")


def peers_rows(peers: Peers) -> list[dict[str, Any]]:
    """One row an expert: expert, status, value."""
    return [
        {"expert": expert, "status": status, "value": float(peers.values[expert]) if status != "missing" else None}
        for expert, status in enumerate(peers.status)
    ]


def peers_figure(peers: Peers, *, theme: Theme, lang: str) -> go.Figure:
    """Strip plot on a logarithmic axis; what has no logarithm stands in a gutter below it with its mark."""
    import plotly.graph_objects as go

    ink, scale = surface(theme), role("global_scale", theme)
    experts = np.arange(len(peers.values), dtype=np.int32)
    good = peers.usable
    low, high = (float(peers.values[good].min()), float(peers.values[good].max())) if good.any() else (1e-3, 1e-2)
    # Far enough below to be apart, near enough to leave the numbers their room; no gutter where none is needed.
    gutter = low / max(1.6, (high / low) ** 0.35) if not good.all() else low
    # Half a ring and more at both ends, however many decades there are between them.
    edge = max(float(np.log10(1.25)), _EDGE * float(np.log10(high / gutter)))
    # Likewise at the sides: on a phone 128 experts lie two pixels apart.
    beside = max(1.0, _SIDE * len(experts))
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "x": experts[good],
            "y": peers.values[good],
            "mode": "markers",
            "marker": {"size": 7, "color": scale.fill, "line": {"color": ink.ink, "width": 0.5}},
            "hovertemplate": "%{x}: %{y:.4g}<extra></extra>",
            "name": words(lang, "peers.stored"),
        }
    ]
    notes: list[dict[str, Any]] = []
    if not good.all():
        marks = [MARKS.get(status, "?") for status in peers.status]
        traces.append(
            {
                "type": "scatter",
                "x": experts[~good],
                "y": np.full(int((~good).sum()), gutter),
                "mode": "text",
                "text": [mark for mark, fine in zip(marks, good, strict=True) if not fine],
                "textfont": {"size": 13, "color": ink.ink},
                "hovertemplate": "%{x}<extra></extra>",
                "name": words(lang, "peers.unusable"),
                "showlegend": False,  # Plotly's legend would show it as "Aa"
            }
        )
        notes.append(
            {
                "text": words(lang, "peers.unusable"),
                "showarrow": False,
                **{"x": 1, "xref": "paper", "xanchor": "right", "y": float(np.log10(gutter)), "yshift": 14},
                "font": {"size": 12, "color": ink.muted},
            }
        )
    traces.append(
        {
            "type": "scatter",
            "x": [peers.picked],
            "y": [float(peers.values[peers.picked]) if good[peers.picked] else gutter],
            "mode": "markers",
            "marker": {"size": _RING, "symbol": "circle-open", "color": ink.ink, "line": {"width": 2}},
            "hoverinfo": "skip",
            "name": words(lang, "peers.picked"),
        }
    )
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": peers.median, "y1": peers.median}
    layout = base_layout(
        theme,
        height=300,
        margin={"l": 76, "t": 41},
        annotations=notes,
        shapes=[line | {"line": {"color": ink.muted, "width": 1, "dash": "dot"}}] if peers.median is not None else [],
        xaxis={
            "title": words(lang, "coverage.expert"),
            "range": [-beside, len(experts) - 1 + beside],
            "showgrid": False,
            "zeroline": False,
        },
        yaxis={
            "title": words(lang, "peers.axis"),
            "type": "log",
            **(_ticks(low, high) if good.any() else {"tickvals": []}),
            "range": [float(np.log10(gutter)) - edge, float(np.log10(high)) + edge],
        },
    )
    # Made in one go: adding part after part costs ten times as much.
    return go.Figure(traces, layout)


def _ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks of a logarithmic axis: decades where there are some, else a few round numbers; none beside the gutter."""
    if high / low > 100:
        return {"dtick": 1, "exponentformat": "power"}
    values = np.unique([float(f"{value:.2g}") for value in np.geomspace(low, high, 4)])
    return {"tickvals": values, "ticktext": [f"{value:.2g}" for value in values]}
