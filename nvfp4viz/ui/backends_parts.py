"""The parts of the page on backends that select: NVFP4 experts, linear layers, MXFP4 experts, and the defaults."""

from __future__ import annotations

from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import streamlit as st

from nvfp4viz.errors import FormatError
from nvfp4viz.figures.mxfp4 import LAYERS
from nvfp4viz.serving import selection_linear as linear
from nvfp4viz.serving import selection_mxfp4 as mx
from nvfp4viz.serving.selection import (
    ACTIVATIONS,
    CHOICES,
    GPUS,
    MOE,
    PARALLEL,
    SCHEMES,
    VERSION,
    MoeBackend,
    MoeRequest,
    Selection,
    select_moe,
)
from nvfp4viz.serving.selection_cost import RANKS, RankBytes, rank_bytes
from nvfp4viz.ui import errors
from nvfp4viz.ui.i18n import has
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import percent

PAGE = "backends"
PARTS = ("moe", "linear", "mxfp4", "defaults", "remedies")
UNKNOWN = "triton"
"""A name of ``--moe-backend`` that NVFP4 experts do not have."""
PICKS = ("auto", *CHOICES, UNKNOWN)
LINEAR_PICKS = ("auto", *linear.LINEAR_CHOICES, linear.NO_KERNEL)
MX_PICKS = ("auto", *mx.MX_CHOICES)
DISABLED = ("none", *(row.enum for row in linear.LINEAR))
SIGNS = {"wins": "✓", "able": "✓", "refused": "✗", "open": "?", "manual": "–"}


# ------------------------------------------------------------------ requests, from the page's settings


def moe_request(page: Lesson) -> MoeRequest:
    """The deployment that the settings describe."""
    v = page.view
    return MoeRequest(v["gpu"], v["act"], v["scheme"], v["par"], v["fi"], v["hum"], v["limit"], v["m8"], v["pick"])


def linear_request(page: Lesson) -> linear.LinearRequest:
    """The same for linear layers."""
    v = page.view
    disabled = "" if v["off"] == "none" else v["off"]
    return linear.LinearRequest(v["gpu"], v["lin"], v["fi"], v["hum"], v["fp4"], v["inv"], disabled, v["lpick"])


def mx_request(page: Lesson) -> mx.Mxfp4Request:
    """The same for MXFP4 experts."""
    v = page.view
    return mx.Mxfp4Request(v["gpu"], v["model"], v["want"], v["form"], v["fi"], v["hum"], v["mpick"])


# ------------------------------------------------------------------ drawing


@cache
def _style() -> str:
    return f"<style>{(Path(__file__).parent / 'backends.css').read_text(encoding='utf-8')}</style>"


def _ladder(page: Lesson, found: Selection, *, named: bool = False) -> None:
    """Every candidate in the order asked, with its answer in words; where one was ``named``, the others stand below."""
    rungs = ""
    for each in found.candidates:
        said = page.t(f"said.{each.outcome}" if each.check is None else f"refused.{each.check}")
        if named and each.outcome == "able":
            said = page.t("said.unasked")
        decides = " decides" if each.backend in found.rests_with else ""
        rungs += (
            f'<li class="{each.outcome}{decides}"><span class="sign" aria-hidden="true">{SIGNS[each.outcome]}</span>'
            f'<span class="name">{escape(each.backend.enum)}</span><span class="said">{escape(said)}</span></li>'
        )
    st.html(f'{_style()}<ol class="ladder" aria-label="{escape(page.t("ladder"))}">{rungs}</ol>')


def rows_of(found: Selection) -> list[dict[str, object]]:
    """The candidates as rows."""
    return [
        {"candidate": each.backend.enum, "outcome": each.outcome, "refused_at": each.check or ""}
        for each in found.candidates
    ]


def _pick(page: Lesson, name: str, options: tuple[str, ...]) -> None:
    """A select whose options are ids, each with a text if it has one."""
    st.selectbox(
        page.t(f"pick.{name}"),
        options,
        format_func=lambda option: page.t(f"{name}.{option}") if has(f"{PAGE}.{name}.{option}") else option,
        **page.view.widget(name),
    )


def _gpus(page: Lesson, *names: str) -> str:
    """GPUs as the page calls them."""
    return ", ".join(page.t(f"gpu.{name}") if has(f"{PAGE}.gpu.{name}") else name for name in names)


def _toggles(page: Lesson, *names: str) -> None:
    for name in names:
        st.checkbox(page.t(f"pick.{name}"), **page.view.widget(name))


# ------------------------------------------------------------------ NVFP4 experts


def moe_part(page: Lesson) -> None:
    """The ladder for experts; then what the winner reads, converts and stores."""
    stage, side = page.stage()
    with side:
        _pick(page, "gpu", GPUS)
        _pick(page, "pick", PICKS)
        _pick(page, "act", ACTIVATIONS)
        _pick(page, "scheme", SCHEMES)
        _pick(page, "par", PARALLEL)
        _toggles(page, "fi", "hum", "limit", "m8")
    request = moe_request(page)
    found = select_moe(request)
    with stage:
        _moe_finding(page, request, found)
        if found.error is not None:
            errors.show(found.error, key="moe")
        _ladder(page, found, named=request.choice != "auto")
    page.prose("moe.order", version=VERSION)
    if isinstance(found.winner, MoeBackend) and found.error is None:
        _winner(page, found.winner, request)
    page.prose("moe.text", version=VERSION)
    page.glossary("input_scale", "backend", "all_to_all")


def _moe_finding(page: Lesson, request: MoeRequest, found: Selection) -> None:
    gpu = _gpus(page, request.gpu)
    if found.winner is None:
        key = "moe.seen_open" if found.rests_with else "moe.seen_none"
        page.finding(key, gpu=gpu, choice=request.choice)
        return
    assert isinstance(found.winner, MoeBackend)
    if found.error is not None:
        page.finding("moe.seen_later", gpu=gpu, winner=found.winner.enum)
        return
    reach = page.t(f"reach.{reads(found.winner, request.scheme)}")
    page.finding("moe.seen", gpu=gpu, winner=found.winner.enum, reach=reach, elsewhere=_elsewhere(page, request))


def reads(row: MoeBackend, scheme: str) -> str:
    """Which activation scales a backend reads under a scheme: ``expert``, ``layer``, ``none`` or ``token``."""
    if scheme == "W4A4-token":
        return "token"
    return "none" if scheme == "W4A16" else row.reach


def _elsewhere(page: Lesson, request: MoeRequest) -> str:
    """What the same deployment reads on every other GPU."""
    others: dict[str, list[str]] = {}
    for gpu in GPUS:
        fields = {name: getattr(request, name) for name in MoeRequest.__dataclass_fields__}
        found = select_moe(MoeRequest(**{**fields, "gpu": gpu}))
        winner = found.winner if found.error is None else None
        others.setdefault(reads(winner, request.scheme) if isinstance(winner, MoeBackend) else "refused", []).append(
            gpu
        )
    return page.t("moe.and").join(
        page.t(f"elsewhere.{reach}", gpus=_gpus(page, *others[reach]))
        for reach in ("expert", "layer", "token", "none", "refused")
        if reach in others
    )


def _winner(page: Lesson, row: MoeBackend, request: MoeRequest) -> None:
    page.heading("winner.heading")
    read = reads(row, request.scheme)
    key = "a16" if request.scheme == "W4A16" else read
    page.table(
        ("what", "how"),
        [
            (page.t("winner.scales"), page.t(f"reads.{key}") + ("" if row.reads_down else page.t("reads.no_down"))),
            (page.t("winner.bad"), page.t(f"bad.{key}")),
            (page.t("winner.eplb"), page.t(f"eplb.{'none' if read == 'token' else read}")),
            (page.t("winner.gate"), page.t("gate.rules" if row.gate_rules else "gate.unread")),
            (page.t("winner.layout"), page.t(f"layout.{row.layout}")),
            (page.t("winner.multiplies"), page.t(f"multiplies.{row.multiplies}")),
        ],
    )
    page.heading("cost.heading")
    left, right = st.columns(2)
    with left:
        _pick(page, "shape", tuple(LAYERS))
    right.select_slider(page.t("pick.ranks"), RANKS, **page.view.widget("ranks"))
    try:
        rows = cost_rows(page, request)
    except FormatError as error:
        errors.show(error, key="cost")
        return
    alike: dict[RankBytes, list[str]] = {}
    for name, one in rows:
        alike.setdefault(one, []).append(f"**{name}**" if name == row.enum else name)
    _cost_finding(page, rows)
    page.table(
        ("backend", ">stored", ">codes", ">scalars", ">padding", ">total"),
        [
            (
                ", ".join(names),
                f"{one.experts} × {one.hidden:,} × {one.intermediate:,}".replace(" ", "\u00a0"),
                f"{one.codes + one.block_scales:,}",
                f"{one.scalars:,}",
                percent(one.padding / one.total),
                f"{one.total:,}",
            )
            for one, names in alike.items()
        ],
    )
    page.prose("cost.text", version=VERSION)


def _cost_finding(page: Lesson, rows: list[tuple[str, RankBytes]]) -> None:
    """Whether the choice of a backend changes what is stored, and by how much."""
    least = min(one.total for _, one in rows)
    name, most = max(rows, key=lambda row: row[1].total)
    if most.total == least:
        page.finding("cost.same", count=len(rows), bytes=f"{least:,}")
        return
    key = "cost.padded" if most.padding else "cost.scalars"
    page.finding(key, name=name, share=percent((most.total - least) / least), bytes=f"{most.total - least:,}")


def cost_rows(page: Lesson, request: MoeRequest) -> list[tuple[str, RankBytes]]:
    """A rank's bytes on every backend whose layout was read.

    Raises
    ------
    FormatError
        Where tensor parallelism would cut through a block of 16.
    """
    experts, ((intermediate, hidden), *_) = LAYERS[page.view["shape"]]
    gated = request.activation != "relu2_no_mul"
    return [
        (
            row.enum,
            rank_bytes(
                row,
                experts,
                hidden,
                intermediate,
                ranks=page.view["ranks"],
                parallel=request.parallel,
                gated=gated,
                per_token=request.scheme == "W4A4-token",
            ),
        )
        for row in MOE
        if row.layout != "unread" and not row.open
    ]


# ------------------------------------------------------------------ linear layers


def linear_part(page: Lesson) -> None:
    """The ladder for linear layers, whose rules for a choice are softer."""
    stage, side = page.stage()
    with side:
        _pick(page, "gpu", GPUS)
        _pick(page, "lpick", LINEAR_PICKS)
        _pick(page, "lin", linear.LINEAR_SCHEMES)
        _pick(page, "off", DISABLED)
        _toggles(page, "fi", "hum", "fp4", "inv")
    found = linear.select_linear(linear_request(page))
    with stage:
        _seen(page, "linear", found)
        if found.warning is not None:
            with st.container(border=True, key="backends_warning"):
                st.markdown(f":material/warning: {page.t(f'warning.{found.warning}', choice=page.view['lpick'])}")
        _ladder(page, found)
    page.prose("linear.text", version=VERSION)


def _seen(page: Lesson, part: str, found: Selection) -> None:
    gpu = _gpus(page, page.view["gpu"])
    if found.winner is not None:
        page.finding(f"{part}.seen", gpu=gpu, winner=found.winner.enum)
        return
    if not found.rests_with:
        page.finding(f"{part}.seen_none", gpu=gpu)
        return
    after = next((each.backend.enum for each in found.candidates if each.outcome == "able"), None)
    names = ", ".join(row.enum for row in found.rests_with)
    page.finding(f"{part}.seen_open" if after is None else f"{part}.seen_after", gpu=gpu, names=names, after=after)


# ------------------------------------------------------------------ MXFP4 experts


def mxfp4_part(page: Lesson) -> None:
    """The ladder for MXFP4 experts of two model families."""
    stage, side = page.stage()
    with side:
        _pick(page, "gpu", GPUS)
        _pick(page, "mpick", MX_PICKS)
        _pick(page, "model", mx.MODELS)
        if page.view["model"] == "gpt-oss":
            _pick(page, "want", mx.WANTED)
        _pick(page, "form", mx.FORMATS)
        _toggles(page, "fi", "hum")
    found = mx.select_mxfp4(mx_request(page))
    with stage:
        _seen(page, "mx", found)
        if found.error is not None:
            errors.show(found.error, key="mxfp4")
        _ladder(page, found)
    page.prose("mx.text", version=VERSION)


# ------------------------------------------------------------------ the defaults of each GPU

EXPERT_COLUMNS: dict[str, dict[str, Any]] = {
    "w4a4": {},
    "no_flashinfer": {"flashinfer": False},
    "per_token": {"scheme": "W4A4-token"},
    "w4a16": {"scheme": "W4A16"},
}


def default_rows() -> list[dict[str, str]]:
    """What ``auto`` takes on each GPU: SiLU, one GPU or tensor parallel, nothing optional but FlashInfer."""
    rows = []
    for gpu in GPUS:
        row = {"gpu": gpu}
        for name, fields in EXPERT_COLUMNS.items():
            found = select_moe(MoeRequest(gpu, **fields))
            row[name] = "–" if found.error is not None or found.winner is None else found.winner.enum
        for scheme in linear.LINEAR_SCHEMES:
            row[f"linear_{scheme.lower()}"] = _name(linear.select_linear(linear.LinearRequest(gpu, scheme)))
        for model in mx.MODELS:
            row[model.replace("-", "_")] = _name(mx.select_mxfp4(mx.Mxfp4Request(gpu, model)))
        rows.append(row)
    return rows


def _name(found: Selection) -> str:
    if found.winner is not None:
        return found.winner.enum
    return f"{found.rests_with[0].enum}?" if found.rests_with else "–"


def defaults_part(page: Lesson) -> None:
    """A row for every run of GPUs that behave alike."""
    rows = default_rows()
    reach = {row.enum: row.reach for row in MOE}
    of_expert = [row["gpu"] for row in rows if reach.get(row["w4a4"]) == "expert"]
    without = [row["gpu"] for row in rows if reach.get(row["no_flashinfer"]) == "expert"]
    page.finding("defaults.seen", gpus=_gpus(page, *of_expert), without=_gpus(page, *without))
    for name, columns in (
        ("experts", tuple(EXPERT_COLUMNS)),
        ("rest", ("linear_w4a4", "linear_w4a16", "gpt_oss", "deepseek_v4")),
    ):
        page.heading(f"defaults.{name}")
        lines = []
        for _, alike in groupby(rows, key=lambda row: [row[column] for column in columns]):
            group = list(alike)
            cells = [
                _marked(page, column, group[0][column], reach) if name == "experts" else group[0][column]
                for column in columns
            ]
            lines.append((_gpus(page, *(row["gpu"] for row in group)), *cells))
        page.table(("gpu", *columns), lines)
    page.prose("defaults.text", version=VERSION)


def _marked(page: Lesson, column: str, enum: str, reach: dict[str, str]) -> str:
    if enum == "–":
        return page.t("defaults.refused")
    return f"{enum}: {page.t('short.token' if column == 'per_token' else f'short.{reach[enum]}')}"
