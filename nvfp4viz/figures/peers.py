"""One scale against the same projection's scales of the other experts in its layer."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.audit.facts import median_of
from nvfp4viz.audit.scales import robust_z
from nvfp4viz.audit.texts import in_full
from nvfp4viz.figures.coverage import SLOT_MARKS, status_key
from nvfp4viz.figures.words import superscript, words

F32 = npt.NDArray[np.float32]
# Pixels of the plot's height and of the picked value's ring, and the parts of the height and of the width that are left
# free for half of it.
HEIGHT, RING = 224, 17
_EDGE, _SIDE = 0.08, 0.035
_MOST_TICKS = 8


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
        """Experts whose value is one that the audit calls usable: finite, positive, and not subnormal."""
        return np.isfinite(self.values) & (self.values >= np.finfo(np.float32).tiny)

    @property
    def others(self) -> npt.NDArray[np.bool_]:
        """The picked expert's peers."""
        out = self.usable.copy()
        out[self.picked] = False
        return out

    @property
    def median(self) -> float | None:
        """Median of the peers' values in log space, as the audit's; None where there are none."""
        others = self.values[self.others]
        return float(np.exp2(median_of(np.log2(others.astype(np.float64))))) if others.size else None

    @property
    def ratio(self) -> float | None:
        """The picked value over the peers' median; None where either is missing."""
        median = self.median
        if median is None or not self.usable[self.picked]:
            return None
        return float(self.values[self.picked]) / median

    @property
    def robust_z(self) -> float | None:
        """`nvfp4viz.audit.scales.robust_z` of the picked value among its peers."""
        value = float(self.values[self.picked])
        return robust_z(value, self.values[self.others]) if self.usable[self.picked] else None


def describe_peers(peers: Peers, lang: str) -> str:
    """One sentence: what is stored for the picked expert, and where it lies among its peers, if it has any."""
    place: dict[str, Any] = {
        # What is judged is one over what is stored.
        "role": f"1/{peers.divisor}" if peers.divisor else peers.role,
        "layer": peers.layer,
        "expert": peers.picked,
        "projection": peers.projection,
        "peers": int(peers.others.sum()),
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
        return words(lang, "peers.value", **place, value=value, ratio=_times(peers.ratio)) + far
    if peers.median is None:
        return words(lang, "peers.alone", **place, status=status)
    return words(lang, "peers.none", **place, status=status, median=f"{peers.median:.4g}")


def _times(ratio: float) -> str:
    """A ratio in full while somebody can count its zeros.

    >>> _times(2652.4), _times(1.6189e41)
    ('2,652', '1.619 × 10⁴¹')
    """
    if 1e-9 < ratio < 1e9:
        return in_full(ratio)
    mantissa, power = f"{ratio:.3e}".split("e")
    return f"{mantissa} × 10{superscript(int(power))}"


def peers_rows(peers: Peers) -> list[dict[str, Any]]:
    """One row an expert: expert, status, value."""
    return [
        {"expert": expert, "status": status, "value": float(peers.values[expert]) if status != "missing" else None}
        for expert, status in enumerate(peers.status)
    ]


@dataclass(frozen=True, slots=True)
class PeerFrame:
    """Where the strip's numbers stand: experts from left to right, decimal logarithms from bottom to top.

    Attributes
    ----------
    left, right
        Ends of the horizontal axis, in experts.
    bottom, top
        Ends of the vertical one, as log10 of the scale.
    gutter
        The place of what has no logarithm, as log10; below all numbers.
    ticks
        Values with their labels.
    experts
        Experts with a number below the axis.
    """

    left: float
    right: float
    bottom: float
    top: float
    gutter: float
    ticks: tuple[tuple[float, str], ...]
    experts: range

    def across(self, expert: int) -> float:
        """Per cent of the width."""
        return 100 * (expert - self.left) / (self.right - self.left)

    def down(self, place: float) -> float:
        """Pixels from the top, of a decimal logarithm."""
        return HEIGHT * (self.top - place) / (self.top - self.bottom)


def peer_frame(peers: Peers) -> PeerFrame:
    """Ends, gutter and ticks for these numbers."""
    good = peers.usable
    low, high = (float(peers.values[good].min()), float(peers.values[good].max())) if good.any() else (1e-3, 1e-2)
    # Far enough below to be apart, near enough to leave the numbers their room; no gutter where none is needed.
    gutter = low / max(1.6, (high / low) ** 0.35) if not good.all() else low
    # Half a ring and more at both ends, however many decades there are between them.
    edge = max(float(np.log10(1.25)), _EDGE * float(np.log10(high / gutter)))
    # Likewise at the sides: on a phone 128 experts lie two pixels apart.
    count = len(peers.values)
    beside = max(1.0, _SIDE * count)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, count) if (count - 1) / step < _MOST_TICKS)
    return PeerFrame(
        -beside,
        count - 1 + beside,
        float(np.log10(gutter)) - edge,
        float(np.log10(high)) + edge,
        float(np.log10(gutter)),
        _ticks(low, high) if good.any() else (),
        range(0, count, step),
    )


def peers_drawing(peers: Peers, *, alt: str, lang: str) -> str:
    """Strip plot on a logarithmic axis, as HTML; what has no logarithm stands in a gutter below it with its mark.

    A drawing and no chart: Streamlit mounts a chart anew at every pick (docs/decisions.md).
    """
    frame, good = peer_frame(peers), peers.usable
    out = [
        f'<figure class="peers"><p class="key"><i class="dot"></i>{escape(words(lang, "peers.stored"))}'
        f'<i class="ring"></i>{escape(words(lang, "peers.picked"))}</p>'
        f'<p class="side">{escape(words(lang, "peers.axis"))}</p><ul class="ticks">',
        *(f'<li style="top:{_px(frame, value)}">{label}</li>' for value, label in frame.ticks),
        f'</ul><div class="field" style="height:{HEIGHT}px" role="img" aria-label="{escape(alt)}">',
        *(f'<i class="grid" style="top:{_px(frame, value)}"></i>' for value, _ in frame.ticks),
    ]
    if peers.median is not None:
        out.append(f'<i class="median" style="top:{_px(frame, peers.median)}"></i>')
    if not good.all():
        note = escape(words(lang, "peers.unusable"))
        out.append(f'<small style="top:{frame.down(frame.gutter) - 22:.1f}px">{note}</small>')
    for expert, value in enumerate(peers.values.tolist()):
        top = _px(frame, value) if good[expert] else f"{frame.down(frame.gutter):.1f}px"
        at = f'style="left:{frame.across(expert):.2f}%;top:{top}"'
        if good[expert]:
            out.append(f'<i class="dot" {at} title="{expert}: {value:.4g}"></i>')
        else:
            out.append(f'<b {at} title="{expert}">{SLOT_MARKS.get(peers.status[expert], "?")}</b>')
        if expert == peers.picked:
            ring = f'<i class="ring" {at}></i>'
    numbers = "".join(f'<li style="left:{frame.across(expert):.2f}%">{expert}</li>' for expert in frame.experts)
    foot = f'<p class="foot">{escape(words(lang, "coverage.expert"))}</p></figure>'
    return "".join([*out, ring, f'</div><ul class="experts">{numbers}</ul>', foot])


def _px(frame: PeerFrame, value: float) -> str:
    return f"{frame.down(float(np.log10(value))):.1f}px"


def _ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    """Ticks of a logarithmic axis: decades where there are some, else a few round numbers; none beside the gutter."""
    if high / low > 100:
        first, last = int(np.ceil(np.log10(low))), int(np.floor(np.log10(high)))
        step = -(-(last - first + 1) // _MOST_TICKS)
        powers = [power for power in range(first, last + 1) if power % step == 0]
        return tuple((10.0**power, f"10{superscript(power)}") for power in powers)
    values = np.unique([float(f"{value:.2g}") for value in np.geomspace(low, high, 4)])
    return tuple((float(value), f"{value:.2g}") for value in values)
