"""What packing at load holds at its peak, counted and measured, and how often it launches; a part of the page."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import streamlit as st

from nvfp4viz.errors import NvError
from nvfp4viz.figures import online as figures
from nvfp4viz.quant import online
from nvfp4viz.quant.online_memory import measure_peaks
from nvfp4viz.ui import errors, predict
from nvfp4viz.ui.export import about
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.numbers import four, percent
from nvfp4viz.ui.online_parts import PAGE, WEIGHTS, weights_of
from nvfp4viz.ui.pick import pick_one
from nvfp4viz.ui.theme import theme

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson

Peaks = dict[online.Way, dict[str, int]]
MEASURED = "tiny_moe"
"""The shape that is measured: the only one whose weights lie here."""
RECORDED = ("quantise bf16, vllm-cuda", "quantise bf16, vllm-cuda, 128 ranges")
"""Rows of the recorded GPU bench: one global scale for everything, and one for each range of rows, in one launch."""


def peaks_of(page: Lesson) -> tuple[Peaks, tuple[int, int, int]]:
    """Arrays alive at the peak of each way, counted, and the shape that they belong to."""
    shape = figures.SHAPES[page.view["shape"]]
    return {way: online.peak_buffers(shape, way) for way in online.WAYS}, shape


def measured_of(page: Lesson) -> dict[online.Way, int] | None:
    """Bytes at the peak of each way, measured on the layer's first weight; None for a shape that is only counted."""
    if page.view["shape"] != MEASURED:
        return None
    layer = page.view["layer"]
    return _measured(layer, hashlib.blake2b(weights_of(layer, WEIGHTS[0]).tobytes()).hexdigest())


@st.cache_resource(max_entries=8, show_spinner=False)
def _measured(layer: int, digest: str) -> dict[online.Way, int]:
    return measure_peaks(weights_of(layer, WEIGHTS[0]))


def rows_of(page: Lesson) -> list[dict[str, object]]:
    """What is downloaded: every counted array, and the measured peaks."""
    peaks, shape = peaks_of(page)
    of = {"layer_of": page.view["shape"], "shape": " × ".join(map(str, shape))}
    if page.view["shape"] == MEASURED:
        of["measured_layer"] = page.view["layer"]
    return about(of, figures.memory_rows(peaks, measured_of(page)))


def memory_part(page: Lesson) -> None:
    """What lives at the peak, and how often the kernel is launched."""
    if not _how_much(page):
        return
    stage, side = page.stage()
    with side:
        pick_one(page, "shape", tuple(figures.SHAPES), label="memory.shape", texts="shape", wrap=True)
        peaks, shape = peaks_of(page)
        counted = {way: sum(found.values()) for way, found in peaks.items()}
        elements = int(np.prod(shape))
        measured: dict[online.Way, int] | None = None
        try:
            with st.spinner(page.t("memory.busy")):
                measured = measured_of(page)
        except NvError as error:
            errors.show(error)
        held = measured or counted
        page.finding(
            "memory.seen" if measured else "memory.counted",
            shape=" × ".join(map(str, shape)),
            direct=_size(held["direct"]),
            cast=_size(held["folded_bf16"]),
            weight=_size(2 * elements),
            layer=page.view["layer"],
        )
    with stage:
        page.figure(
            figures.memory_figure(peaks, elements, measured, theme=theme(), lang=lang()),
            alt=page.t("memory.alt"),
            finding=figures.describe_memory(peaks, elements, lang(), measured),
            rows=lambda: figures.memory_rows(peaks, measured),
        )
    if measured:
        _table(page, counted, measured, shape)
    page.prose("memory.text")
    _launches(page, shape[0])


def _table(
    page: Lesson, counted: dict[online.Way, int], measured: dict[online.Way, int], shape: tuple[int, int, int]
) -> None:
    """Measured beside counted, and of what is more the part that has a name."""
    page.table(
        ("way", ">counted", ">measured", ">above"),
        [
            (
                page.t(f"way.{way}"),
                _kib(counted[way]),
                _kib(measured[way]),
                f"+{percent(round(measured[way] / counted[way] - 1, 4))}",
            )
            for way in online.WAYS
        ],
    )
    page.prose(
        "memory.work",
        **{f"{way}_above": _kib(measured[way] - counted[way]) for way in online.WAYS},
        **{f"{way}_work": _kib(online.work_space(shape, way)) for way in online.WAYS},
    )


def _kib(count: int) -> str:
    return f"{count / 2**10:,.1f}"


def _size(count: int) -> str:
    """Whole numbers whole, and large ones to the MiB: they are counts of bytes."""
    size = count / 2**20
    return f"{size:.0f} MiB" if size.is_integer() or size >= 1000 else f"{four(size)} MiB"


def _launches(page: Lesson, experts: int) -> None:
    page.heading("launches.heading")
    page.table(
        ("way", ">launches", ">scales_read"),
        [
            (page.t("way.direct"), str(experts), str(experts)),
            (page.t("way.folded_bf16"), "1", "1"),
            (page.t("launches.ranges"), "1", str(experts)),
        ],
    )
    page.prose("launches.text")
    found = recorded_times()
    if found is None:
        page.prose("launches.needs_gpu")
        return
    gpu, one, ranges = found
    page.finding("launches.recorded", gpu=gpu, one=four(one), ranges=four(ranges), count=128)


def recorded_times() -> tuple[str, float, float] | None:
    """GPU and microseconds of `RECORDED`, from the newest record that has both rows."""
    from nvfp4viz.device.records import gpu_records

    for record in gpu_records():
        for section in record.sections:
            rows = {row["name"]: row for row in section["rows"] if "name" in row}
            if all(name in rows for name in RECORDED):
                one, ranges = (float(rows[name]["seconds"]) * 1e6 for name in RECORDED)
                return record.gpu, one, ranges
    return None


def _how_much(page: Lesson) -> bool:
    """Asked: how much more lives at the peak when the scale is folded and cast?"""
    shape = figures.SHAPES[MEASURED]
    direct, cast = (sum(online.peak_buffers(shape, way).values()) for way in ("direct", "folded_bf16"))
    times = cast / direct
    answer = "same" if times < 1.5 else "few" if times < 5 else "ten"
    return predict.ask(f"{PAGE}.predict.memory", ("same", "few", "ten"), answer=answer, times=four(round(times, 1)))
