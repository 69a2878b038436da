"""Where each lesson sits: in a mixture-of-experts layer, and in the life of a checkpoint.  One table, no drawing.

The layer's steps are the nine of the page on dataflow, behind the attention that feeds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Band = Literal["layer", "life"]
Carries = Literal["bf16", "fp4", "none"]


@dataclass(frozen=True, slots=True)
class Station:
    """One step of a band.

    Attributes
    ----------
    id
        Names its texts, ``map.station.<id>.name`` and ``.text``.
    band
        ``"layer"``: what a token goes through; ``"life"``: what a checkpoint goes through.
    carries
        What leaves it for the next: ``"bf16"`` values, ``"fp4"`` codes with their scales, or nothing.
    scale
        ``"made"`` where the activations' ``input_scale`` comes into being, ``"read"`` where it divides, else ``""``.
    """

    id: str
    band: Band
    carries: Carries
    scale: Literal["", "made", "read"] = ""


STATIONS = (
    Station("attention", "layer", "bf16"),
    Station("router", "layer", "bf16"),
    Station("permute", "layer", "bf16"),
    Station("quantise_a1", "layer", "fp4", "read"),
    Station("w13", "layer", "bf16"),
    Station("activation", "layer", "bf16"),
    Station("quantise_a2", "layer", "fp4", "read"),
    Station("w2", "layer", "bf16"),
    Station("unpermute", "layer", "bf16"),
    Station("weighted_sum", "layer", "none"),
    Station("trained", "life", "bf16"),
    Station("calibrate", "life", "fp4", "made"),
    Station("export", "life", "fp4"),
    Station("audit", "life", "fp4"),
    Station("load", "life", "fp4"),
    Station("backend", "life", "fp4"),
    Station("kernel", "life", "bf16"),
    Station("token", "life", "bf16"),
    Station("repair", "life", "none"),
)
BANDS: tuple[Band, ...] = ("layer", "life")
WHOLE = "whole_"
"""In front of a band: a lesson that follows all of it.  ``"everywhere"`` is for lessons that belong to no step."""
EVERYWHERE = "everywhere"


@dataclass(frozen=True, slots=True)
class Stop:
    """A place of a lesson, and the view that its link opens on (settings of that page, as a link writes them)."""

    at: str
    query: Mapping[str, str] = field(default_factory=dict)


def _part(at: str, part: str) -> Stop:
    return Stop(at, {"part": part})


LESSONS: dict[str, tuple[Stop, ...]] = {
    "empty_answer": (Stop("token"), Stop("repair", {"beat": "5"})),
    "e2m1": (Stop("quantise_a1"), _part("export", "packing")),
    "two_level_scaling": (_part("quantise_a1", "input_scale"), _part("calibrate", "headroom"), Stop("quantise_a2")),
    "blocks": (Stop("w13"), _part("export", "shapes"), _part("kernel", "swizzle")),
    "tensor_core": (Stop("w13"), Stop("w2"), Stop("kernel")),
    "mxfp4": (Stop("quantise_a2"), _part("export", "models")),
    "routing": (_part("router", "routers"), _part("calibrate", "calibration")),
    "dataflow": (Stop(WHOLE + "layer"), Stop("weighted_sum", {"step": "9"})),
    "fusion": (Stop("attention"), _part("w13", "w13")),
    "expert_parallel": (Stop("permute"), Stop("unpermute")),
    "backends": (Stop("backend"), _part("repair", "remedies")),
    "loading": (Stop("load"), Stop(WHOLE + "life", {"part": "chain"})),
    "online_quantisation": (Stop("trained"), _part("load", "memory")),
    "mega_kernel": (_part("activation", "between"), Stop(WHOLE + "layer")),
    "explorer": (Stop("audit"), Stop("repair")),
    "fault_lab": (Stop(WHOLE + "layer"), Stop("token")),
    "kernel_lab": (Stop("kernel"),),
    "glossary": (Stop(EVERYWHERE),),
}
"""Page id to its places: the map, its links and its table are made from this alone."""

PATHS: dict[str, tuple[str, ...]] = {
    "first": ("empty_answer", "e2m1", "two_level_scaling", "routing", "loading", "explorer"),
    "numerics": ("e2m1", "two_level_scaling", "blocks", "tensor_core", "mxfp4", "mega_kernel", "kernel_lab"),
    "serving": ("empty_answer", "dataflow", "fusion", "expert_parallel", "backends", "loading", "online_quantisation"),
    "breaking": ("empty_answer", "routing", "dataflow", "loading", "fault_lab", "explorer"),
}
"""Suggested ways through the lessons, each from a question that a reader may come with."""


def lessons_at(place: str) -> tuple[tuple[str, Mapping[str, str]], ...]:
    """The lessons of a station, of a whole band or of everywhere: page ids with the views to open, in table order."""
    return tuple((page, stop.query) for page, stops in LESSONS.items() for stop in stops if stop.at == place)


def stretches(band: Band, carries: Carries) -> int:
    """How many unbroken runs of a band carry a format.

    >>> stretches("layer", "fp4"), stretches("life", "fp4")
    (2, 1)
    """
    runs, before = 0, None
    for station in stations(band):
        runs += station.carries == carries and before != carries
        before = station.carries
    return runs


def stations(band: Band) -> tuple[Station, ...]:
    """The steps of a band, in order."""
    return tuple(station for station in STATIONS if station.band == band)


def place_rows() -> list[dict[str, object]]:
    """One row for every place of every lesson."""
    bands = {station.id: station.band for station in STATIONS}
    return [
        {
            "page": page,
            "band": bands.get(stop.at, stop.at.removeprefix(WHOLE)),
            "place": stop.at,
            "view": "&".join(f"{name}={value}" for name, value in stop.query.items()),
        }
        for page, stops in LESSONS.items()
        for stop in stops
    ]
