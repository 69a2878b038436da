"""The parts of the Explorer page beside its map: summary, findings, one expert's tensors, backends, files."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.audit import describe
from nvfp4viz.audit.backends import known_gpu
from nvfp4viz.audit.facts import UNREADABLE
from nvfp4viz.audit.texts import id_list
from nvfp4viz.checkpoint.problems import SEVERITIES
from nvfp4viz.figures.slots import is_expected
from nvfp4viz.serving.selection import refused_on
from nvfp4viz.ui.errors import escape
from nvfp4viz.ui.i18n import has, lang, listed, t
from nvfp4viz.ui.numbers import four

if TYPE_CHECKING:
    from nvfp4viz.audit import Finding
    from nvfp4viz.checkpoint import Header, Slot
    from nvfp4viz.ui.explorer_open import Opened
    from nvfp4viz.ui.lesson import Lesson

TENSOR_ROLES = ("weight", "weight_scale", "weight_scale_2", "input_scale")
GPUS = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
# Shown when a card of findings alike is opened; the report has all of them.
MOST_FINDINGS = 60
# Alike, and yet each written out at once.
FEW_FINDINGS = 3
# Files that the summary names.
MOST_NAMES = 3


def size_text(size: int) -> str:
    """Bytes for people, in powers of ten as files are sold."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{four(value)} {unit}" if unit != "B" else f"{size} B"


def code_span(text: object) -> str:
    """Untrusted text as Markdown code: a backtick inside would end it."""
    return "`" + str(text).replace("`", "ˋ").replace("\n", "⏎") + "`"


def readable(opened: Opened) -> bool:
    """At least one file is what its name says."""
    return any(header.readable for header in opened.audit.checkpoint.files)


def is_unread(opened: Opened, slot: Slot) -> bool:
    """Whether the files have the slot's tensor, or may have it, where nobody can read it."""
    states = opened.audit.facts.states.get((slot.role, slot.layer, slot.projection))
    return states is not None and slot.expert < len(states) and states[slot.expert] == UNREADABLE


def unread_word(opened: Opened, otherwise: str) -> str:
    """``"beside"`` where what was not read lies, if anywhere, in shards that nobody gave."""
    checkpoint = opened.audit.checkpoint
    return "beside" if checkpoint.beside and not checkpoint.unreadable and not checkpoint.lost else otherwise


def summary(page: Lesson, opened: Opened) -> None:
    """Verdict, scheme, shape, files, and how little was read."""
    report = opened.audit.report
    layers, experts, drafts = len(report.model.moe_layers), report.model.experts, report.model.draft_layers
    box = report.container
    cells = (
        (page.t("summary.verdict"), page.t(f"verdicts.{report.verdict}"), page.t(f"verdict_says.{report.verdict}")),
        (
            page.t("summary.model"),
            page.t("summary.model_value", layers=layers, experts=experts) if layers else "–",
            page.t("summary.model_help", projections=listed(report.model.projections) or "–")
            + (page.t("summary.model_drafts", layers=id_list(drafts)) if drafts else ""),
        ),
        (
            page.t("summary.container"),
            str(box.files),
            page.t("summary.container_help", tensors=f"{box.tensors:,}", size=size_text(box.bytes)),
        ),
        (
            page.t("summary.read"),
            size_text(box.bytes_read),
            page.t("summary.read_help", header=f"{box.header_bytes:,}"),
        ),
    )
    with st.container(horizontal=True, gap="medium", key="explorer_summary"):
        for label, value, more in cells:
            st.metric(label, value, help=more, border=True)
    if not readable(opened):
        return
    unread = opened.audit.checkpoint.unread
    if unread:
        names = listed(map(code_span, unread[:MOST_NAMES]))
        more = ", …" if len(unread) > MOST_NAMES else ""
        page.finding("summary.unread", count=len(unread), names=names + more)
    if report.format.scheme == "UNQUANTISED":
        page.finding("summary.plain" if layers else "summary.no_experts")
        return
    sources = listed(code_span(name) for name in report.format.config_sources)
    page.finding(
        "summary.sentence",
        dialect=report.format.dialect,
        scheme=report.format.scheme,
        group=report.format.group_size,
        sources=sources or page.t("summary.no_sources"),
    )


def findings(page: Lesson, opened: Opened) -> None:
    """What the audit found, worst first, and what a naive check would have said."""
    # A check that has nothing to count would pass, and one that counts the whole would fail a part.
    steps = [step for step in opened.naive.steps if step.expected and not opened.audit.checkpoint.beside]
    if steps:
        page.prose(
            "findings.naive",
            verdict=page.t("findings.naive_pass" if opened.naive.passed else "findings.naive_fail"),
            counts=listed(
                page.t(f"findings.naive_step.{step.id}", found=f"{step.found:,}", expected=f"{step.expected:,}")
                for step in steps
            ),
        )
    found = opened.audit.report.findings
    if not found:
        page.prose("findings.none" if is_expected(opened.audit.report, "weight_scale") else "findings.none_plain")
        return
    shown = _severities(page, opened)
    if not shown:
        page.prose("findings.hidden", count=f"{len(found):,}")
    finding_cards([item for item in found if item.severity in shown], key="explorer")


def _severities(page: Lesson, opened: Opened) -> list[str]:
    """Those to show; the link says which are hidden, because checkpoints differ in those that they have."""
    count = Counter(item.severity for item in opened.audit.report.findings)
    present = [name for name in reversed(SEVERITIES) if name in count]
    wanted = [name for name in present if name not in page.view["hidden"]]
    key = f"explorer.severity.{opened.identity[:40]}"

    def follow() -> None:
        chosen = st.session_state[key]
        kept = [name for name in page.view["hidden"] if name not in present]
        page.view.put(hidden=tuple(name for name in SEVERITIES if name in kept or name in {*present} - {*chosen}))

    # Set where it says otherwise, and not in every run: a second press may be on its way.
    if set(st.session_state.get(key, ("",))) != set(wanted):
        st.session_state[key] = wanted
    st.pills(
        page.t("findings.severity"),
        present,
        format_func=lambda name: f"{page.t(f'verdicts.{name}')} ({count[name]})",
        selection_mode="multi",
        wrap=True,
        key=key,
        on_change=follow,
    )
    return wanted


def finding_cards(found: Sequence[Finding], *, key: str) -> None:
    """One card a kind of finding, worst first; findings alike stand in one card, which opens to show each of them."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for item in sorted(found, key=lambda item: -SEVERITIES.index(item.severity)):
        # One code may speak of several things, such as an expert's rows and a model's experts: those are not alike.
        about = item.text if item.layer is None else ""
        groups.setdefault((item.severity, item.code, about), []).append(item)
    for (severity, code, about), items in groups.items():
        with st.container(border=True, key=f"card_{key}_{severity}_{about or code}"):
            count = f" · × {len(items)}" if len(items) > 1 else ""
            st.markdown(f"{code_span(code)} · {t(f'explorer.verdicts.{severity}')}{count}")
            if len(items) == 1:
                _one_finding(items[0])
            else:
                _alike(items, f"{key}.each.{severity}.{about or code}")


def _one_finding(item: Finding) -> None:
    message, advice = describe(item, lang())
    st.markdown(escape(message))
    if advice:
        st.caption(_advised(advice))
    if item.tensors:
        names = listed(code_span(name) for name in item.tensors[:2])
        st.caption(t("explorer.findings.tensors", names=names))


def _alike(items: Sequence[Finding], key: str) -> None:
    """What findings of one kind have in common, and each of them for those who ask."""
    layers = tuple(sorted({item.layer for item in items if item.layer is not None}))
    roles = dict.fromkeys(item.role for item in items if item.role)
    projections = dict.fromkeys(item.projection for item in items if item.projection)
    kind = "group" if layers and roles and projections else "group_layers" if layers else "group_plain"
    if kind == "group" and all(item.experts is None and item.projection is not None for item in items):
        kind = "group_tensors"
    st.markdown(
        t(
            f"explorer.findings.{kind}",
            count=len(items),
            roles=listed(code_span(name) for name in roles),
            projections=listed(projections),
            layers=id_list(layers),
            slots=sum(item.count for item in items),
        )
    )
    described = [describe(item, lang()) for item in items]
    few = len(items) <= FEW_FINDINGS
    # What is wrong and why stands on the card; the others say the same of other slots.
    for message, _ in described if few else described[:1]:
        st.markdown(f"- {escape(message)}" if few else t("explorer.findings.first", message=escape(message)))
    advices = list(dict.fromkeys(advice for _, advice in described if advice))
    for advice in advices[:FEW_FINDINGS]:
        st.caption(_advised(advice))
    if few:
        return
    box = st.expander(t("explorer.findings.each", count=len(items)), key=key, on_change="rerun")
    if box.open:
        alone = len(advices) <= FEW_FINDINGS  # the advice has been said
        lines = [
            f"- {escape(message)}" + ("" if alone or not advice else "  \n  " + _advised(advice))
            for message, advice in described[:MOST_FINDINGS]
        ]
        box.markdown("\n".join(lines))
        if len(items) > MOST_FINDINGS:
            box.caption(t("explorer.findings.more", count=len(items) - MOST_FINDINGS))


def _advised(advice: str) -> str:
    return t("explorer.findings.advice", advice=escape(advice))


def anatomy(page: Lesson, opened: Opened) -> None:
    """Every tensor of one projection of one expert: stored or not, who writes it, who reads it, what absence does."""
    layer, expert, projection = page.view["layer"], page.view["expert"], page.view["projection"]
    view = opened.audit.facts.view
    if layer is None or ((layer, expert, projection) not in view.modules and layer not in view.blocks):
        page.prose("map.none")
        return
    module = view.module(layer, expert, projection)
    where = module.name
    slots = [view.slot(layer, expert, projection, role) for role in TENSOR_ROLES]
    # That none is stored would be said of files that were read.
    gone = module.state == "absent" and any(is_unread(opened, slot) for slot in slots)
    page.prose(
        "anatomy.text",
        layer=layer,
        expert=expert,
        projection=projection,
        where=code_span(where),
        state=_unread_status(page, opened, next(slot for slot in slots if is_unread(opened, slot)))
        if gone
        else page.t(f"anatomy.state.{module.state}"),
    )
    for role, slot in zip(TENSOR_ROLES, slots, strict=True):
        plain = module.extras.get("") if role == "weight" else None
        if slot.entry is None and plain is not None:  # a fused weight that is not quantised has its module's name
            slot = dataclasses.replace(slot, name=plain.name, entry=plain)
        _tensor(page, opened, role, slot)


def _tensor(page: Lesson, opened: Opened, role: str, slot: Slot) -> None:
    """One tensor: what is stored, and its three sentences, beside each other where there is room."""
    entry, table = slot.entry, opened.audit.facts.tables.get((role, slot.layer, slot.projection))
    needed = role == "weight" or _is_needed(opened, slot)
    unread = is_unread(opened, slot)
    status = "present" if entry else "missing" if needed else "absent"
    said = _unread_status(page, opened, slot) if unread else page.t(f"anatomy.status.{status}")
    parts = [f"**{role}**", said]
    name, dialect = slot.name.rpartition(".")[2], opened.audit.facts.view.dialects.get(slot.layer)
    # What a layout never has is called nothing.
    if name != role and (entry or dialect is None or dialect.may_have(role)):
        parts.append(code_span(name))
    if entry:
        parts.append(f"{entry.dtype} {list(entry.shape) if entry.shape else page.t('anatomy.scalar')}")
        if table is not None and not unread:
            parts.append(f"**{four(float(table.stored[slot.expert]))}**")
    texts = f"roles.{_sentences(opened, slot) if needed or entry else 'not_needed'}"
    report = opened.audit.report
    kind = {"group": report.format.group_size, "scheme": report.format.scheme}
    with st.container(border=True, key=f"card_tensor_{role}"):
        st.markdown(" · ".join(parts))
        for column, what in zip(st.columns(3, gap="medium"), ("who", "reads", "absent"), strict=True):
            with column:
                st.caption(page.t(f"columns.{what}"))
                st.markdown(page.t(_of_all(opened, slot, texts, what), **kind))


def _is_needed(opened: Opened, slot: Slot) -> bool:
    """Whether the slot's layer needs its scale; a weight-only layer needs no activation scale."""
    needs = opened.audit.facts.needs.get(slot.layer, ())
    return slot.role in needs and is_expected(opened.audit.report, slot.role)


def _sentences(opened: Opened, slot: Slot) -> str:
    """Which sentences hold for a tensor: those of its role, in the layout and the format that its layer has."""
    view, role = opened.audit.facts.view, slot.role
    if role == "weight_scale":
        dialect = view.dialects.get(slot.layer)
        known = dialect is not None and (slot.entry is None or slot.entry.dtype in dialect.scale_types)
        block = opened.audit.facts.block(slot.layer)
        return f"weight_scale{'' if block == 'NVFP4' else '_mxfp4'}" if known else "weight_scale_other"
    if role == "input_scale" and opened.audit.facts.block(slot.layer) == "MXFP4":
        return "input_scale_mxfp4"  # in FP8: not the scales of which it was read who takes them
    # Gate and up, where both are there, are one matrix at run time, and gate's second-level scale serves both.
    gated = "gate" in view.projections_in[slot.layer]
    up = "_up" * (gated and (role, slot.projection) == ("weight_scale_2", "up"))
    divisor = "_divisor" * (role != "weight" and view.divisors_in(slot.layer))
    return role + up + divisor


def _of_all(opened: Opened, slot: Slot, texts: str, what: str) -> str:
    """The key of one of these sentences; another one where a tensor, or its one number, is of all experts."""
    facts, role = opened.audit.facts, texts.removeprefix("roles.")
    own = f"{texts}.{what}"
    if what == "absent" and facts.view.is_whole(slot.layer):
        own = f"roles.whole.{role.removesuffix('_divisor')}"
    elif what == "who" and facts.is_one_for_all(slot.layer, (slot.projection,), slot.role):
        own = f"roles.shared.{role}"
    return own if has(f"explorer.{own}") else f"{texts}.{what}"


def backends(page: Lesson, opened: Opened) -> None:
    """The forecast for every backend, and what vLLM would pick on the chosen GPU."""
    report = opened.audit.report
    if not report.backends:
        checkpoint = opened.audit.checkpoint
        page.prose(f"backends.{'unread' if checkpoint.unread else 'part' if checkpoint.beside else 'none'}")
        return
    page.prose("backends.text")
    if page.view["gpu"] != "any":
        found = report.auto if isinstance(report.auto, str) else None
        page.finding("backends.auto" if found else "backends.auto_none", backend=found or "–")
    known = None if page.view["gpu"] == "any" else known_gpu(page.view["gpu"])
    # Of MXFP4 experts the classes were read for two families of models alone.
    refused = refused_on(known) if known and opened.audit.view.scheme != "MXFP4" else frozenset()
    with st.container(key="explorer_backends"):
        # A phone shows no head of the table: the cells of these columns say there what they are.
        heads = {name: page.t("backends.cell", column=page.t(f"columns.{name}")) for name in ("possible", "scope")}
        named = "".join(f'--{name}: "{head}";' for name, head in heads.items())
        st.html(f"<style>.st-key-explorer_backends {{{named}}}</style>")
        page.table(
            ("backend", "outcome", "possible", "scope", "why"),
            [
                (
                    code_span(item.name),
                    page.t("backends.not_here", gpu=page.view["gpu"], outcome=page.t(f"outcomes.{item.outcome}"))
                    if item.name in refused
                    else f"**{page.t(f'outcomes.{item.outcome}')}**",
                    listed(page.t(f"outcomes.{name}") for name in item.possible if name != item.outcome) or "–",
                    page.t(f"scopes.{item.scope}"),
                    escape(describe(item, lang())[0]),
                )
                for item in report.backends
            ],
        )


def files(page: Lesson, opened: Opened) -> None:
    """The shards as their headers describe them, and those that are missing; a phone shows file and state."""
    page.prose("files.text")
    checkpoint = opened.audit.checkpoint
    rows = {
        header.file: (
            code_span(header.file),
            _state(page, opened, header),
            f"{header.size:,}",
            f"{header.header_bytes:,}",
            f"{len(header.entries):,}",
        )
        for header in checkpoint.files
    }
    for item in checkpoint.problems:
        if item.code == "container.missing-shard":
            # Only an index says what lay in it.
            placed = f"{len(item.tensors):,}" if item.tensors else ""
            state = page.t(f"files.{'missing' if placed else 'missing_unknown'}", count=placed)
            rows[item.file] = (code_span(item.file), state, "–", "–", "–")
    page.table(("file", "state", ">size", ">header", ">tensors"), [rows[file] for file in sorted(rows)])


def _state(page: Lesson, opened: Opened, header: Header) -> str:
    """What was read of a file that is there."""
    if header.file in opened.audit.checkpoint.lost:
        return page.t("files.header")
    cut = next((item.params for item in header.problems if item.code == "container.truncated"), None)
    if not header.readable or cut is None:
        return page.t("files.fine" if header.readable else "files.broken")
    return page.t("files.cut", count=f"{cut['count']:,}", missing=f"{cut['missing']:,}")


def _unread_status(page: Lesson, opened: Opened, slot: Slot) -> str:
    """Why nobody can say what stands in a slot: of a shard that is not there only an index knows its names."""
    checkpoint = opened.audit.checkpoint
    home = checkpoint.index.get(slot.name)
    if any(item.code == "container.missing-shard" and item.file == home for item in checkpoint.problems):
        return page.t("anatomy.status.lost", file=code_span(home))
    return page.t(f"anatomy.status.{unread_word(opened, 'unread')}")


def slot_rows(opened: Opened) -> list[dict[str, object]]:
    """Every slot with its status: what the page offers as CSV and JSON."""
    of = {"checkpoint": opened.audit.checkpoint.name}
    return [of | dataclasses.asdict(row) for row in opened.audit.rows()]
