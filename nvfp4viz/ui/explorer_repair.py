"""The Explorer's repair: choose a policy, see the plan, see what such a policy costs, and only then take the result.

Nothing is written before somebody asks.  A checkpoint below the server's own roots gets a mended copy beside it; of a
sample or an upload the changed files come as an archive; of an address, the scales and the record alone.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
import streamlit as st

from nvfp4viz.audit.diff import changed_settings
from nvfp4viz.audit.repair import POLICIES, RECORD, Repair, apply_repair, plan_repair, record_bytes, repaired_files
from nvfp4viz.audit.terminal import shards_words
from nvfp4viz.audit.texts import report_words
from nvfp4viz.checkpoint import file_bytes
from nvfp4viz.checkpoint.source import CONFIG, LocalSource
from nvfp4viz.errors import CheckpointError, InputError, NvError
from nvfp4viz.figures.coverage import status_key
from nvfp4viz.ui import caches, errors, explorer_roots
from nvfp4viz.ui.explorer import code_span, size_text
from nvfp4viz.ui.explorer_diff import end_of, said_apart, setting_name
from nvfp4viz.ui.explorer_repair_cost import cost
from nvfp4viz.ui.explorer_rows import rows_table, width_for
from nvfp4viz.ui.i18n import has, lang, listed, t

if TYPE_CHECKING:
    from nvfp4viz.ui.explorer_open import Opened
    from nvfp4viz.ui.lesson import Lesson

# Bytes of changed files that are held in memory and offered as an archive.
MOST_BYTES = 64_000_000
# Rows of the plan that a page shows; the record has all.
MOST_ROWS = 5000
COLUMNS = {"layer": 48, "expert": 58, "projection": 80, "from": 0, "to": 0, "tensor": 352, "state": 130}
"""In pixels.  A phone shows the first five: which slot, and what changes."""
ROOM = {"from": (56, 130), "to": (56, 130)}
"""The least and the most of columns that are as wide as what stands in them."""
_NAME = 44  # characters of a tensor's name that its cell shows; the record has it whole
_KEPT, _READY, _ASKED = "explorer.kept.plan", "explorer.kept.repaired", "explorer.kept.repair_asked"


def repair(page: Lesson, opened: Opened) -> None:
    """Policy, plan, cost, and what to take away."""
    page.prose("repair.text")
    policy, value, suspects = _settings(page)
    page.prose(f"repair.says.{policy}")
    try:
        plan = _plan(opened, policy, value, suspects)
    except NvError as error:
        errors.show(error)
        return
    _show(page, opened, plan)
    cost(page, policy, value)
    if not plan.is_empty:
        _take_away(page, opened, plan)


def _settings(page: Lesson) -> tuple[str, float | None, bool]:
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        st.segmented_control(page.t("repair.policy"), POLICIES, required=True, wrap=True, **page.view.widget("policy"))
        policy = str(page.view["policy"])
        if policy == "constant":
            st.number_input(page.t("repair.value"), format="%g", step=None, width=160, **page.view.widget("value"))
    if policy != "weight-only":
        st.toggle(page.t("repair.suspects"), help=page.t("repair.suspects_help"), **page.view.widget("suspects"))
    value = page.view["value"] if policy == "constant" else None
    return policy, value, bool(page.view["suspects"]) and policy != "weight-only"


def _plan(opened: Opened, policy: str, value: float | None, suspects: bool) -> Repair:
    """Made once for as long as nothing changes."""

    def make() -> Repair:
        plan = plan_repair(opened.audit, policy, value=value, suspects=suspects)
        st.session_state.pop(_READY, None)  # the archive of another plan
        return plan

    return caches.kept(_KEPT, (opened.identity, policy, value, suspects), make)


def _show(page: Lesson, opened: Opened, plan: Repair) -> None:
    """The dry run: what would change, from what, to what."""
    record, words = plan.record, lang()
    if plan.suspected:
        page.finding("repair.suspected", count=plan.suspected, switch=page.t("repair.suspects"))
    if plan.is_empty:
        page.finding("repair.nothing")
        return
    parts = []
    if record.slots:
        key = f"repair.slots{'_shared' * bool(plan.shared)}"
        parts.append(report_words(words, key, count=f"{len(plan.numbers):,}", slots=f"{len(record.slots):,}"))
    if record.dropped:
        parts.append(report_words(words, "repair.dropped", count=f"{len(record.dropped):,}"))
    if record.config:
        parts.append(report_words(words, "repair.config", files=listed(map(code_span, record.config))))
    shards = shards_words(plan, words)
    guess = report_words(words, "repair.guess" if record.guesses else "repair.no_guess")
    page.finding("repair.plan", what=page.t("repair.joint").join(parts), shards=shards, guess=guess)
    rows = plan_rows(opened, plan, page.t("repair.removed"))
    shown = rows[:MOST_ROWS]
    widths = COLUMNS | {name: width_for((str(row[name]) for row in shown), *ROOM[name]) for name in ROOM}
    columns = {name: st.column_config.Column(page.t(f"columns.{name}"), width=width) for name, width in widths.items()}
    said = ("tensor", "state", "from", "to")

    def told(index: int) -> list[tuple[str, str | None]]:
        row = shown[index] | {"tensor": shown[index]["whole"]}
        return [(page.t(f"columns.{name}"), row[name]) for name in said]

    rows_table(page, "repair", shown, columns, told)
    if len(rows) > MOST_ROWS:
        st.caption(page.t("repair.more", shown=f"{MOST_ROWS:,}", count=f"{len(rows):,}", record=RECORD))


def plan_rows(opened: Opened, plan: Repair, removed: str) -> list[dict[str, Any]]:
    """One row for each number, each activation scale taken away, and each setting; ``from`` and ``to`` are text."""
    divides = opened.audit.view.divisors_in
    rows = [
        {"tensor": end_of(slot.tensor, _NAME), "whole": slot.tensor, "layer": slot.layer, "projection": slot.projection,
         "expert": None if slot.tensor in plan.shared else slot.expert,
         "state": _state(slot.old_state, divides(slot.layer)), "from": "∅" if slot.old is None else str(slot.old),
         "to": str(slot.new)}
        for slot in plan.numbers
    ]  # fmt: skip
    checkpoint = plan.checkpoint
    before = {CONFIG: checkpoint.config}
    for file, data in plan.files.items():
        old = before.get(file, checkpoint.hf_quant_config)
        for item in changed_settings(file, old, msgspec.json.decode(data)):
            rows.append(_plain(setting_name(file, item.field), f"{file}: {item.field}", *said_apart(item.a, item.b)))
    if plan.record.dropped:
        known = {row.tensor: row for row in opened.audit.rows() if row.role == "input_scale"}
        for name in plan.record.dropped:
            slot = known.get(name)
            place = {"layer": slot.layer, "expert": slot.expert, "projection": slot.projection} if slot else {}
            state = {"state": _state(slot.status, divides(slot.layer))} if slot else {}
            value = "" if slot is None or slot.value is None else str(slot.value)
            rows.append(_plain(end_of(name, _NAME), name, value, removed) | place | state)
    return rows


def _state(status: str, divisor: bool) -> str:
    """What the coverage map calls a slot in this state; ``divisor``: what is stored is one over the scale."""
    key = status_key("present" if status == "ok" else status, divisor)
    return t(key) if has(key) else status


def _plain(name: str, whole: str, old: str, new: str) -> dict[str, Any]:
    place = dict.fromkeys(("layer", "expert", "projection"))
    return {"tensor": name, "whole": whole, **place, "state": "", "from": old, "to": new}


def _take_away(page: Lesson, opened: Opened, plan: Repair) -> None:
    """Record and scales at once; whole files when somebody asks for them."""
    page.heading("repair.take")
    with st.container(horizontal=True, gap="small", key="explorer_repair_files"):
        _download(page, "record", RECORD, "application/json", record_bytes(plan.record))
        data = scales_file(plan)
        if data:
            _download(page, "scales", "nvfp4viz-repair.safetensors", "application/octet-stream", data)
    if opened.kind == "server":
        _write_beside(page, opened, plan)
    elif opened.kind == "address":
        st.caption(page.t("repair.address"))
    elif (size := _changed_bytes(plan)) > MOST_BYTES:
        st.caption(page.t("repair.large", size=size_text(size), most=size_text(MOST_BYTES)))
    else:
        _archive(page, opened, plan)


def scales_file(plan: Repair) -> bytes:
    """The new scales as a safetensors file whose metadata say whose they are and by which rule; empty without any."""
    scales = {name: item for name, item in plan.changes.items() if item is not None}
    record = plan.record
    told = {"source": record.source, "fingerprint": record.fingerprint, "policy": record.policy}
    if record.value is not None:
        told["value"] = str(record.value)
    return file_bytes(scales, {"format": "pt"} | told) if scales else b""


def _download(page: Lesson, name: str, file: str, mime: str, data: bytes) -> None:
    st.download_button(
        page.t(f"repair.{name}"),
        data=data,
        file_name=file,
        mime=mime,
        key=f"explorer.repair.{name}",
        help=page.t(f"repair.{name}_help"),
        on_click="ignore",
        icon=":material/download:",
    )


def _changed_bytes(plan: Repair) -> int:
    """At most so much lies in the archive beside what is new."""
    if _adds_to_a_single_file(plan):
        return sum(header.size for header in plan.checkpoint.files)
    return plan.rewritten[1]


def _adds_to_a_single_file(plan: Repair) -> bool:
    """The file gets another name then, because a second shard stands beside it."""
    checkpoint = plan.checkpoint
    alone = checkpoint.index_file is None and len(checkpoint.files) == 1
    return alone and any(name not in checkpoint.tensors for name in plan.changes)


def _ask() -> None:
    """The buttons' callback: a press must not be lost if the page starts over before it gets here."""
    st.session_state[_ASKED] = st.session_state[_KEPT][0]


def _asked() -> bool:
    """Whether just this plan was asked for: a press that met an error does not fall to the next plan."""
    return bool(st.session_state.pop(_ASKED, None) == st.session_state[_KEPT][0])


def _archive(page: Lesson, opened: Opened, plan: Repair) -> None:
    st.button(page.t("repair.make"), key="explorer.repair.make", help=page.t("repair.make_help"), on_click=_ask)
    if _asked():
        try:
            st.session_state[_READY] = archive(repaired_files(plan))
        except NvError as error:
            errors.show(error)
    ready: bytes | None = st.session_state.get(_READY)
    if ready is not None:
        page.finding("repair.made", size=size_text(len(ready)))
        if _adds_to_a_single_file(plan):
            page.prose("repair.renamed", file=plan.checkpoint.files[0].file)
        if plan.left_out:
            page.prose("repair.left_out", files=listed(map(code_span, plan.left_out)))
        _download(page, "zip", f"{plan.record.source}-{plan.record.policy}.zip", "application/zip", ready)


def archive(files: dict[str, bytes]) -> bytes:
    """Files in a ZIP archive, stored as they are; the same files give the same bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as pack:
        for name, data in sorted(files.items()):
            pack.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    return out.getvalue()


def _write_beside(page: Lesson, opened: Opened, plan: Repair) -> None:
    """A mended copy next to a checkpoint of the server's roots, where that is allowed."""
    if not explorer_roots.may_write():
        st.caption(page.t("repair.read_only", variable=explorer_roots.WRITE))
        return
    place = opened.audit.checkpoint.source
    assert isinstance(place, LocalSource), "roots are folders of this machine"
    with st.form("explorer_repair_write", border=False), st.container(horizontal=True, vertical_alignment="bottom"):
        name = st.text_input(
            page.t("repair.name"),
            value=f"{place.folder.name}-{plan.record.policy}",
            key=f"explorer.repair.name.{opened.identity[:12]}.{plan.record.policy}",
            autocomplete="off",
        )
        st.form_submit_button(page.t("repair.write"), key="explorer.repair.write", type="primary", on_click=_ask)
    st.caption(page.t("repair.write_note"))
    if not _asked():
        return
    try:
        copied = write_beside(plan, place, name)
    except NvError as error:
        errors.show(error)
        return
    counts = {key: len(files) for key, files in asdict(copied).items()}
    with st.container(key="finding_explorer_repair_done"):
        st.markdown(errors.escape(report_words(lang(), "repair.done", out=name, **counts)))


def write_beside(plan: Repair, place: LocalSource, name: str) -> Any:
    """The mended copy as a new folder beside the source's; what is there already is never touched.

    Raises
    ------
    InputError, CheckpointError
        ``roots.name``, ``roots.outside``, ``roots.exists``, ``roots.not-written``, ``repair.*``, ``checkpoint.*``.
    """
    out = explorer_roots.beside(place.folder, name)
    if out.exists() or out.is_symlink():
        raise InputError("roots.exists", folder=name)
    try:
        return apply_repair(plan, out)
    except CheckpointError as error:
        if error.code != "checkpoint.not-written":
            raise
        raise CheckpointError("roots.not-written", folder=name, reason=error.params["reason"]) from None
