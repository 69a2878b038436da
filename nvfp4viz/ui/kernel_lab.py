"""The Kernel lab's source and machine code: which line of a kernel becomes which instruction, and where."""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from nvfp4viz.device import build, describe_device, records, sass, source_lines
from nvfp4viz.figures import kernel_lab as figures
from nvfp4viz.ui import predict
from nvfp4viz.ui.device_line import device_line as device_line_of_app
from nvfp4viz.ui.errors import escape
from nvfp4viz.ui.i18n import lang, listed
from nvfp4viz.ui.pick import pick_one
from nvfp4viz.ui.theme import theme

if TYPE_CHECKING:
    from nvfp4viz.device.sass import Extract, KernelOnTarget
    from nvfp4viz.figures.kernel_lab import Presence
    from nvfp4viz.ui.lesson import Lesson

PARTS = ("code", "matrix", "run", "speed", "selftest")
# Quantising to NVFP4 as vLLM does: conversions of two formats and the reciprocal, in one short kernel.
OPENS_ON = "nv_quantize_bf16_vllm"
FEATURES = tuple(one.id for one in figures.FEATURES if one.ptx)
TARGETS = sass.EXTRACTED
TRAP = ("sm_100", "sm_100a")  # the same chip, without and with the letter
# Chips that multiply FP4 by another instruction than `mma`, which torch reaches and these kernels do not write.
TCGEN05 = ("sm_100a", "sm_100f", "sm_103a", "sm_110a")
MARKS = {figures.INSTRUCTION: "●", figures.SOFTWARE: "○", figures.UNUSED: "·"}


@dataclass(frozen=True, slots=True)
class Library:
    """All committed extracts.

    Attributes
    ----------
    extracts
        By source, those that are there.
    stale
        Sources that have changed since theirs was made.
    missing
        Sources without one.
    builds
        By kernel, one record a target.
    """

    extracts: dict[str, Extract]
    stale: tuple[str, ...]
    missing: tuple[str, ...]
    builds: dict[str, tuple[KernelOnTarget, ...]]


def library() -> Library:
    """The extracts of this checkout; read again when a file changes."""
    files = [*build.KERNELS.glob("*.cu*"), *sass.FOLDER.glob("*.txt")]
    return _library(tuple(sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)))


@st.cache_resource(max_entries=2, show_spinner=False)
def _library(identity: tuple[tuple[str, int, int], ...]) -> Library:
    sources = sass.kernel_sources()
    extracts = {source: sass.read_extract(source) for source in sources if sass.path_of(source).exists()}
    builds: dict[str, list[KernelOnTarget]] = {}
    for extract in extracts.values():
        for kernel in extract.kernels:
            builds.setdefault(kernel.name, []).append(kernel)
    return Library(
        extracts,
        tuple(source for source in extracts if not sass.is_fresh(source)),
        tuple(source for source in sources if source not in extracts),
        {name: tuple(found) for name, found in builds.items()},
    )


def kernel_names() -> tuple[str, ...]:
    """What a link may name."""
    return tuple(library().builds)


def default_kernel() -> str | None:
    """The kernel that the page opens on, or None where there is no extract at all."""
    names = kernel_names()
    return next((name for name in names if name.startswith(OPENS_ON)), next(iter(names), None))


def chosen(page: Lesson) -> Presence | None:
    """The kernel of the page's settings on every target."""
    name = page.view["kernel"] or default_kernel()
    return None if name is None else figures.presence_of(library().builds[name])


def device_line(page: Lesson) -> None:
    """What computes here, and in one line why nothing faster does."""
    report = describe_device()
    text = escape(device_line_of_app())
    if report.reason is None:
        driver = ".".join(map(str, report.driver or ()))
        text += " " + page.t("device.target", target=build.target_of(report.gpus[0].capability), driver=driver)
    st.markdown(text)


# ------------------------------------------------------------------------------------------- source and machine code


def code_part(page: Lesson) -> None:
    """A kernel, a target, and the line beside the instruction it became."""
    presence = chosen(page)
    if presence is None:
        page.prose("extract.none")
        return
    controls = st.container()
    stage, side = page.stage()
    with stage:
        source, asked = st.container(), st.container()
    with side:
        said, machine = st.container(), st.container()
        page.glossary("target", "machine_code", "ptx", "register")
    with asked:  # before the controls, which offer the plain targets to those who know the answer
        knows = _ask_about_the_letter(page)
    with controls:
        presence = kernel_controls(page)
        _feature_control(page, presence)
        _target_control(page, presence, knows)
    with said:
        _finding(page, presence)
    with machine:
        draw(machine_html(page, presence))
        _provenance(page, presence)
    with source:
        _source(page, presence)


def kernel_controls(page: Lesson) -> Presence:
    """File and kernel; returns the kernel chosen, on all its targets."""
    view, found = page.view, library()
    if view["kernel"] not in found.builds:
        view.put(kernel=default_kernel())
    by_source = {source: [k for k in found.builds if found.builds[k][0].source == source] for source in found.extracts}
    here = found.builds[view["kernel"]][0].source
    st.session_state["kernel_lab.file"] = here
    left, right = st.columns(2, gap="medium")
    with left:
        st.selectbox(
            page.t("control.file"),
            list(by_source),
            key="kernel_lab.file",
            on_change=lambda: view.put(kernel=by_source[st.session_state["kernel_lab.file"]][0]),
        )
    with right:
        st.selectbox(page.t("control.kernel"), by_source[here], **view.widget("kernel"))
    return figures.presence_of(found.builds[view["kernel"]])


def _feature_control(page: Lesson, presence: Presence) -> None:
    """The operation to look at, among those that this kernel has."""
    have = [one.id for one in presence.features if one.id in FEATURES]
    if not have:
        return
    if page.view["feature"] not in have:
        page.view.put(feature=have[0])
    pick_one(page, "feature", have, label="control.feature", texts="operation")


def _target_control(page: Lesson, presence: Presence, knows: bool) -> None:
    shown = [t for t in presence.targets if knows or t not in sass.PLAIN or t == page.view["target"]]
    if page.view["target"] not in shown:
        page.view.put(target=shown[0])
    st.pills(
        page.t("control.target"),
        shown,
        format_func=lambda target: f"{MARKS[presence.state_of(page.view['feature'], target)]} {target}",
        required=True,
        wrap=True,
        **page.view.widget("target"),
    )
    st.caption(page.t("control.marks"))


def _ask_about_the_letter(page: Lesson) -> bool:
    """The same chip named without its letter: guess first.  Answered from the extract of the default kernel."""
    name = default_kernel()
    builds = {} if name is None else {one.target: one for one in library().builds[name]}
    if not builds.keys() >= set(TRAP):
        return True
    presence = figures.presence_of(tuple(builds.values()))
    if presence.state_of("to_e2m1", TRAP[1]) != figures.INSTRUCTION:
        return True
    plain, special = (builds[target] for target in TRAP)
    pack = figures.feature("to_e2m1")
    return predict.ask(
        "kernel_lab.predict.letter",
        (figures.INSTRUCTION, figures.SOFTWARE),
        answer=presence.state_of("to_e2m1", TRAP[0]),
        kernel=name,
        plain=TRAP[0],
        special=TRAP[1],
        count=sum(one.count for one in figures.found(pack, special)),
        opcode=figures.found(pack, special)[0].opcode,
        count_plain=sum(one.count for one in figures.found(pack, plain)),
        short=special.instructions,
        long=plain.instructions,
    )


def build_of(page: Lesson, presence: Presence) -> KernelOnTarget:
    """The chosen kernel on the chosen target."""
    return next((b for b in presence.builds if b.target == page.view["target"]), presence.builds[0])


def _finding(page: Lesson, presence: Presence) -> None:
    """One sentence about this kernel, operation and target."""
    here = build_of(page, presence)
    one = figures.feature(page.view["feature"])
    state = presence.state_of(one.id, here.target)
    found = figures.found(one, here)
    best = min(presence.builds, key=lambda other: other.instructions)
    without = [b for b in presence.builds if presence.state_of(one.id, b.target) == figures.SOFTWARE] or [here]
    worst = max((b for b in without if b.target not in sass.PLAIN), key=lambda other: other.instructions, default=here)
    everywhere = state == figures.INSTRUCTION and worst is here
    other_sums = not one.same_bits and state != figures.UNUSED and not everywhere
    page.finding(
        "seen.everywhere" if everywhere else f"seen.{state}{'_sum' if other_sums else ''}",
        target=here.target,
        chip=page.t(f"chip.{here.target}"),
        kernel=here.name,
        ptx=one.ptx,
        count=sum(instruction.count for instruction in found),
        opcode=found[0].opcode if found else "",
        instructions=here.instructions,
        registers=here.registers,
        worst=worst.target,
        worst_instructions=worst.instructions,
        best=best.target,
        best_instructions=best.instructions,
    )
    if one.id == "fp4_product" and state == figures.SOFTWARE and here.target in TCGEN05:
        st.caption(page.t("tcgen05"))
    if int("".join(filter(str.isdigit, here.target))) >= 100 and not records.tried_on(10):
        st.caption(page.t("not_run"))


def machine_html(page: Lesson, presence: Presence) -> str:
    """The telling instructions of the build, those of the chosen operation marked."""
    here = build_of(page, presence)
    one = figures.feature(page.view["feature"])
    head = page.t("machine.head", target=here.target, instructions=here.instructions, registers=here.registers)
    memory = page.t("machine.memory", shared=here.shared_bytes, stack=here.stack_bytes)
    memory += page.t("machine.list" if here.telling else "machine.no_list")
    rows = []
    for instruction in here.telling:
        hit = one.opcode.fullmatch(instruction.opcode)
        rows.append(
            f'<li class="{"hit" if hit else ""}"><span class="mark">{"▶" if hit else ""}</span>'
            f'<span class="times">{instruction.count} ×</span><code>{html.escape(instruction.example)}</code></li>'
        )
    return (
        f'<section class="machine"><h2>{html.escape(head)}</h2><p>{html.escape(memory)}</p>'
        f"<ul>{''.join(rows)}</ul></section>"
    )


def _provenance(page: Lesson, presence: Presence) -> None:
    """Which compiler wrote it, and whether the sources are still those."""
    source = presence.builds[0].source
    extract = library().extracts[source]
    state = "stale" if source in library().stale else "fresh"
    text = page.t(
        f"extract.{state}", source=source, hash=extract.source_hash[:12], nvrtc=extract.nvrtc, nvdisasm=extract.nvdisasm
    )
    if state == "stale":
        st.markdown(f"**{text}**")
    else:
        st.caption(text)


def _source(page: Lesson, presence: Presence) -> None:
    """The functions that hold the operation, as the target's build reads them; the whole file when asked for."""
    source, target = presence.builds[0].source, page.view["target"]
    one = figures.feature(page.view["feature"])
    texts = build.sources_of(source)
    fates = source_lines.compiled_lines(source, target, texts)
    st.caption(page.t("source.legend", target=target))
    found = [e for e in source_lines.excerpts(source, target, one.ptx, texts) if one.ptx]
    for excerpt in found:
        draw(excerpt_html(page, excerpt, one.ptx))
    if not found:
        page.prose("source.none", source=source)
    box = page.expander("source.whole")
    if box.open:
        with box:
            names = source_lines.callers(texts, one.ptx)
            lines = tuple(
                source_lines.Line(n, line, *fates[source][n - 1])
                for n, line in enumerate(texts[source].splitlines(), start=1)
            )
            st.caption(page.t("source.calls", names=listed(f"`{name}`" for name in sorted(names)) or "–"))
            draw(excerpt_html(page, source_lines.Excerpt(source, source, lines), one.ptx, names))


def excerpt_html(page: Lesson, excerpt: source_lines.Excerpt, ptx: str, names: set[str] | None = None) -> str:
    """A function with line numbers.  ``▶`` stands before lines that only some targets compile and this one does,
    ``×`` before those it leaves out; the operation itself, or a call of ``names``, is underlined."""
    rows = []
    for line in excerpt.lines:
        state = "off" if not line.compiled else "on" if line.gated else ""
        words = set(source_lines.strip(line.text).replace("(", " ").replace("<", " ").replace(":", " ").split())
        hit = (ptx and ptx in line.text.split("//")[0]) or bool(names and names & words)
        mark = {"off": "×", "on": "▶"}.get(state, "")
        rows.append(
            f'<span class="line {state} {"hit" if hit else ""}"><span class="mark">{mark}</span>'
            f'<span class="number">{line.number}</span><span class="text">{html.escape(line.text)}</span></span>'
        )
    label = html.escape(page.t("source.label", file=excerpt.file, function=excerpt.function))
    return (
        f'<figure><figcaption>{label}</figcaption><pre tabindex="0" role="group" aria-label="{label}">'
        f"{''.join(rows)}</pre></figure>"
    )


@cache
def _style() -> str:
    return (Path(__file__).parent / "kernel_lab.css").read_text(encoding="utf-8")


def style() -> None:
    """The page's own style sheet."""
    st.html(f"<style>{_style()}</style>")


def draw(markup: str) -> None:
    """HTML of ours under the page's style; texts in it are escaped by the caller."""
    st.html(f'<div class="kernel-lab">{markup}</div>')


# ------------------------------------------------------------------------------------------------------- the matrix


def matrix_part(page: Lesson) -> None:
    """Every target against every telling instruction, and what a kernel's code comes to."""
    if chosen(page) is None:
        page.prose("extract.none")
        return
    presence = kernel_controls(page)
    page.figure(
        figures.presence_figure(presence, theme=theme(), lang=lang(), picked=page.view["target"]),
        alt=page.t("matrix.alt", kernel=presence.kernel),
        finding=figures.describe_presence(presence, lang()),
        rows=lambda: figures.presence_rows(presence),
    )
    page.prose("matrix.text")
    feature = page.view["feature"]
    if feature in [one.id for one in presence.features]:
        page.figure(
            figures.sizes_figure(presence, feature, theme=theme(), lang=lang()),
            alt=page.t("matrix.sizes_alt", kernel=presence.kernel),
            finding=figures.describe_sizes(presence, feature, lang()),
        )
    _provenance(page, presence)


def all_rows() -> list[dict[str, Any]]:
    """Every kernel on every target, with the count of every feature; for the download."""
    return [row for builds in library().builds.values() for row in figures.presence_rows(figures.presence_of(builds))]
