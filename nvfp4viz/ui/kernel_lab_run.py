"""The Kernel lab's own runs: the same tensor through every path, byte by byte, and bandwidth against a copy."""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from nvfp4viz.device import describe_device, dispatch, paths, records, why_cpu
from nvfp4viz.figures import kernel_lab as figures
from nvfp4viz.ui import kernel_lab_selftest
from nvfp4viz.ui.errors import escape
from nvfp4viz.ui.export import about
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.numbers import four, hex_byte
from nvfp4viz.ui.theme import theme

if TYPE_CHECKING:
    from nvfp4viz.device.paths import Difference, PathRun
    from nvfp4viz.figures.kernel_lab import Rate
    from nvfp4viz.ui.lesson import Lesson

RECIPES = dispatch.CUDA_RECIPES
MOST_ROWS, MOST_BLOCKS, MOST_SEED = 512, 128, 9999
# Halfway between codes, a maximum with which two orders of operations part: 475 bytes differ in the sample that opens.
DEFAULTS = {"rows": 32, "blocks": 8, "seed": 4}
MEASURED_SHAPE = (2048, 4096)  # 16 MiB of BF16: more than most processors' caches hold
REPEATS = 5


# ------------------------------------------------------------------------------------------ every path, byte by byte


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """All runs of one tensor; the first is the truth of ``differences``."""

    runs: tuple[PathRun, ...]
    differences: tuple[Difference, ...]

    @property
    def same(self) -> int:
        """How many paths of the same recipe answered the same bytes as the first."""
        return sum(
            run.path != "contrast" and d.differing == 0 for run, d in zip(self.runs, self.differences, strict=True)
        )

    @property
    def asked(self) -> int:
        """How many paths computed the recipe that was asked for."""
        return sum(run.path != "contrast" for run in self.runs)


@st.cache_resource(max_entries=8, show_spinner=False)
def compared(kind: str, rows: int, blocks: int, recipe: str, seed: int, torch: bool = False) -> Compared:
    """The sample of these settings through every path of this machine.

    Raises
    ------
    DeviceError
        Where a GPU was found and does not compute after all.
    """
    x = paths.sample(kind, rows, blocks, recipe, seed)  # type: ignore[arg-type]
    runs = tuple(paths.run_paths(x, recipe, torch))
    return Compared(runs, tuple(paths.compare(run, runs[0]) for run in runs))


def of_settings(page: Lesson) -> Compared:
    """`compared` for the page's settings."""
    view = page.view
    return compared(view["values"], view["rows"], view["blocks"], view["recipe"], view["seed"], with_torch(page))


def with_torch(page: Lesson) -> bool:
    """Whether PyTorch is asked for and can answer: it restates one recipe, for numbers."""
    return bool(page.view["torch"]) and _torch_fits(page)


def _torch_fits(page: Lesson) -> bool:
    return bool(page.view["recipe"] == paths.TORCH_RECIPE and page.view["values"] != "any")


def run_part(page: Lesson) -> None:
    """Own sizes, every path, and whether they agree."""
    _controls(page)
    with st.spinner(page.t("run.busy")):
        done = of_settings(page)
    _compared_finding(page, done)
    page.html_table(
        ("path", ">differing", "first", ">compared", "recipe", ">time"),
        [_table_row(page, run, d) for run, d in zip(done.runs, done.differences, strict=True)],
    )
    _bytes_table(page, done)
    page.prose("run.note")
    if describe_device().computes_on == "cpu":
        page.prose("run.no_gpu", why=escape(why_cpu(lang()) or ""))
        _recorded_bits(page)


def _recorded_bits(page: Lesson) -> None:
    """What recorded self-tests and test runs of GPUs counted."""
    tests, logs = records.selftest_records(), records.logs_of_tests()
    for done in tests[:1]:
        page.prose(
            "run.recorded",
            gpu=escape(done.gpu),
            date=done.report["date"],
            compared=f"{done.compared:,}",
            differing=f"{done.differing:,}",
        )
        kernel_lab_selftest.older_note(page, done)
    if logs:
        lines = [
            page.t(
                "run.log" if log.runs == 1 else "run.log_part", gpu=escape(log.gpu), date=log.date, passed=log.passed,
                failed=log.failed, skipped=log.skipped, file=log.file, run=log.run, runs=log.runs,
            )
            for log in logs
        ]  # fmt: skip
        st.markdown("\n".join(f"- {line}" for line in lines))
    if not tests and not logs:
        page.prose("run.no_record")


def _controls(page: Lesson) -> None:
    view = page.view
    what, how_many = st.columns(2, gap="large")
    with what:
        st.selectbox(page.t("run.recipe"), RECIPES, **view.widget("recipe"))
        st.pills(
            page.t("run.values"),
            paths.KINDS,
            format_func=lambda kind: page.t(f"run.kind.{kind}"),
            required=True,
            wrap=True,
            **view.widget("values"),
        )
    with how_many, st.container(horizontal=True):
        st.number_input(page.t("run.rows"), 1, MOST_ROWS, step=1, **view.widget("rows"))
        st.number_input(page.t("run.blocks"), 1, MOST_BLOCKS, step=1, **view.widget("blocks"))
        st.number_input(page.t("run.seed"), 0, MOST_SEED, step=1, **view.widget("seed"))
    with how_many:
        help_ = page.t("run.torch_help", recipe=paths.TORCH_RECIPE)
        st.checkbox(page.t("run.torch"), disabled=not _torch_fits(page), help=help_, **view.widget("torch"))


def _compared_finding(page: Lesson, done: Compared) -> None:
    contrast = done.differences[-1]
    page.finding(
        "run.seen.equal" if done.same == done.asked else "run.seen.unequal",
        same=done.same,
        paths=done.asked,
        bytes=done.differences[0].bytes,
        recipe=done.runs[0].recipe,
        other=done.runs[-1].recipe,
        contrast=contrast.differing,
    )


def _table_row(page: Lesson, run: PathRun, difference: Difference) -> list[str | list[tuple[str, bool]]]:
    return [
        page.t(f"run.path.{run.path}"),
        [(str(difference.differing), difference.differing > 0)],
        _first(page, difference),
        str(difference.bytes),
        [(run.recipe, False)],
        f"{four(1e3 * run.seconds)}\u00a0ms",
    ]


def _first(page: Lesson, difference: Difference) -> str:
    if difference.first is None:
        return "–"
    array, row, column, expected, found = difference.first
    place = f"{array}[{row}, {column}]"
    return page.t("run.first", place=place, expected=hex_byte(expected), found=hex_byte(found))


def shown_block(done: Compared) -> tuple[int, int]:
    """Row and block whose bytes are spelled out: the first that any run has different, else the very first."""
    per_block = done.runs[0].packed.shape[1] // done.runs[0].scales.shape[1]
    for difference in done.differences:
        if difference.first is not None:
            array, row, column, *_ = difference.first
            return row, column // per_block if array == "packed" else column
    return 0, 0


def _bytes_table(page: Lesson, done: Compared) -> None:
    row, block = shown_block(done)
    truth = done.runs[0]
    size = truth.packed.shape[1] // truth.scales.shape[1]
    codes = slice(block * size, (block + 1) * size)
    lines: list[list[str | list[tuple[str, bool]]]] = []
    for run in done.runs:
        if row >= len(run.packed):
            continue
        scale, packed = run.scales[row, block], run.packed[row, codes]
        lines.append(
            [
                page.t(f"run.path.{run.path}"),
                [(f"{int(b):02x}", bool(b != t)) for b, t in zip(packed, truth.packed[row, codes], strict=True)],
                [(f"{int(scale):02x}", bool(scale != truth.scales[row, block]))],
            ]
        )
    st.markdown(page.t("run.block", row=row, block=block))
    page.html_table(("path", "code_bytes", "scale_byte"), lines)


def run_rows(page: Lesson) -> list[dict[str, Any]]:
    """One row a path, for the download."""
    done, view = of_settings(page), page.view
    of = {"values": view["values"], "rows": view["rows"], "blocks": view["blocks"], "seed": view["seed"]}
    return [
        of
        | {
            "path": run.path,
            "recipe": run.recipe,
            "bytes_compared": difference.bytes,
            "bytes_differing": difference.differing,
            "first_difference": None if difference.first is None else str(difference.first),
            "seconds": run.seconds,
        }
        for run, difference in zip(done.runs, done.differences, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------- bandwidth


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates of this machine's CPU, by text id, and when they were measured."""

    rates: tuple[tuple[str, float], ...]
    when: str  # local time


@st.cache_resource(max_entries=1, show_spinner=False)
def measured() -> Measured:
    """Copy, quantise, dequantise and maximum on this machine's CPU, in turns; the median of `REPEATS` rounds."""
    from benchmarks.harness import interleave
    from nvfp4viz import quant

    x = paths.sample("normal", MEASURED_SHAPE[0], MEASURED_SHAPE[1] // 16, "vllm-cuda", 0)
    scale = paths.global_scale_of(x, "vllm-cuda")
    q = quant.quantize(x, recipe="vllm-cuda", global_scale=scale)
    target = np.empty_like(x.view(np.uint16))
    coded = q.packed.nbytes + q.scales.nbytes
    candidates = {
        "copy": (lambda: np.copyto(target, x.view(np.uint16)), 2 * x.nbytes),
        "numba": (lambda: quant.quantize(x, recipe="vllm-cuda", global_scale=scale, path="numba"), x.nbytes + coded),
        "numpy": (lambda: quant.quantize(x, recipe="vllm-cuda", global_scale=scale, path="numpy"), x.nbytes + coded),
        "dequantise": (lambda: quant.dequantize(q, dtype=x.dtype), x.nbytes + coded),
        "amax": (lambda: quant.amax(x), x.nbytes),
    }
    times = interleave({name: call for name, (call, _) in candidates.items()}, REPEATS)
    rates = tuple((name, moved / statistics.median(times[name]) / 1e9) for name, (_, moved) in candidates.items())
    return Measured(rates, time.strftime("%H:%M:%S"))


def cpu_rates(page: Lesson) -> list[Rate]:
    """`measured` with names in the reader's language."""
    return [figures.Rate(page.t(f"speed.{name}"), rate, name == "copy") for name, rate in measured().rates]


def bandwidth_rows(page: Lesson) -> list[dict[str, Any]]:
    """The rates, whose machine's they are, and when they were measured; for the download."""
    report, (rows, columns) = describe_device(), MEASURED_SHAPE
    of = {"cpu": report.cpu, "threads": report.threads, "rows": rows, "columns": columns, "repeats": REPEATS}
    return about(of | {"measured_at": measured().when}, figures.bandwidth_rows(cpu_rates(page)))


def speed_part(page: Lesson) -> None:
    """This machine measured now, and what was recorded on GPUs."""
    with st.spinner(page.t("speed.busy")):
        rates = cpu_rates(page)
    report = describe_device()
    page.heading("speed.here")
    page.figure(
        figures.bandwidth_figure(rates, theme=theme(), lang=lang()),
        alt=page.t("speed.alt"),
        finding=figures.describe_bandwidth(rates, lang()),
        rows=lambda: figures.bandwidth_rows(rates),
    )
    rows, columns = MEASURED_SHAPE
    st.caption(
        page.t(
            "speed.note", cpu=escape(report.cpu), threads=report.threads, rows=rows, columns=columns,
            repeats=REPEATS, when=measured().when,
        )
    )  # fmt: skip
    st.button(page.t("speed.again"), key="kernel_lab.again", on_click=measured.clear, icon=":material/refresh:")
    if report.computes_on == "cuda":
        _this_gpu(page)
    page.heading("speed.recorded")
    recorded(page)


@st.cache_resource(max_entries=1, show_spinner=False)
def measured_on_gpu() -> tuple[tuple[str, float, bool], ...]:
    """``(name, GB/s, is a copy)`` of the streaming kernels on this GPU, now; medians of `REPEATS` rounds, by events."""
    from benchmarks.bench_gpu_moe import gpu_times
    from nvfp4viz.device import gpu_rates

    torch, candidates = gpu_rates.candidates()
    times = gpu_times(torch, {name: call for name, (call, _) in candidates.items()}, REPEATS)
    return tuple(
        (name, moved / statistics.median(times[name]) / 1e9, name == "copy") for name, (_, moved) in candidates.items()
    )


def _this_gpu(page: Lesson) -> None:
    gpu = describe_device().gpus[0].name
    page.heading("speed.gpu")
    with st.spinner(page.t("speed.busy")):
        rates = [figures.Rate(page.t(f"speed.on_gpu.{name}"), rate, copy) for name, rate, copy in measured_on_gpu()]
    page.figure(
        figures.bandwidth_figure(rates, theme=theme(), lang=lang()),
        alt=page.t("speed.recorded_alt", gpu=gpu, title=page.t("speed.gpu")),
        finding=figures.describe_bandwidth(rates, lang()),
        rows=lambda: figures.bandwidth_rows(rates),
    )


def recorded(page: Lesson) -> None:
    """What benches of GPUs left in ``benchmarks/results``: tables, with bars where they have rates, and reports."""
    found, reports = records.gpu_records(), records.written_reports()
    if found:
        _recorded_table(page, found)
    for path in reports:
        box = st.expander(page.t("speed.report", file=path.name), key=f"kernel_lab.open.{path.stem}", on_change="rerun")
        if box.open:
            text = path.read_text(encoding="utf-8")
            with box, st.container(key=f"table_{path.stem}"):  # wide tables scroll in their own frame
                st.markdown(re.sub(r"^#+ (.*)$", r"**\1**", text, flags=re.MULTILINE))
    if not found and not reports:
        page.prose("speed.none")


def _recorded_table(page: Lesson, found: list[records.GpuRecord]) -> None:
    tables = {f"{r.date} · {r.gpu} · {s['title']}": (r, s) for r in found for s in r.sections}
    st.caption(page.t("speed.quoted"))
    name = st.selectbox(page.t("speed.table"), list(tables), key="kernel_lab.table")
    record, section = tables[name or next(iter(tables))]
    rates = [
        figures.Rate(row["name"], row["gb_per_s"], row["name"].startswith(("copy", "fill")), row["ratio"])
        for row in section["rows"]
        if row["gb_per_s"] is not None
    ]
    if rates:
        page.figure(
            figures.bandwidth_figure(rates, theme=theme(), lang=lang()),
            alt=page.t("speed.recorded_alt", gpu=record.gpu, title=section["title"]),
            finding=figures.describe_bandwidth(rates, lang()),
            rows=lambda: section["rows"],
        )
    else:
        page.table(
            ("thing", ">time", ">ratio"),
            [
                (
                    row["name"],
                    f"{four(1e6 * row['seconds'])}\u00a0µs",
                    "" if row["ratio"] is None else four(row["ratio"]),
                )
                for row in section["rows"]
            ],
        )
    st.caption(escape(section["note"]))
    for goal in section["goals"]:
        sign = "≤" if goal["at_most"] else "≥"
        met = goal["measured"] <= goal["required"] if goal["at_most"] else goal["measured"] >= goal["required"]
        verdict = page.t("speed.met" if met else "speed.not_met")
        st.markdown(f"- {escape(goal['text'])}: {four(goal['measured'])} ({sign} {goal['required']:g}): **{verdict}**")
    st.caption(
        page.t(
            "speed.provenance", date=record.date, gpu=escape(record.gpu), versions=escape(record.versions),
            bench=record.bench,
        )
        + ("" if record.commit == "unknown" else page.t("speed.commit", commit=record.commit))
    )  # fmt: skip


def code_values(page: Lesson) -> dict[str, Any]:
    """What the snippet is filled with."""
    names = ("kernel", "feature", "values", "rows", "blocks", "recipe", "seed")
    return {name: page.view[name] for name in names} | {
        "kernel": page.view["kernel"] or "",
        "torch": with_torch(page),
    }
