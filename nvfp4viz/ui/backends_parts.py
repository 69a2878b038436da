"""The part of the page on backends for NVFP4 experts, and how every part draws its candidates."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import streamlit as st

from nvfp4viz.errors import FormatError
from nvfp4viz.figures.mxfp4 import LAYERS
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.serving.selection import (
    ACTIVATIONS,
    CHOICES,
    GPUS,
    MOE,
    PARALLEL,
    SCHEMES,
    MoeBackend,
    MoeRequest,
    Selection,
    select_moe,
)
from nvfp4viz.serving.selection_cost import (
    MARLIN,
    MARLIN_DIVIDES,
    MARLIN_ELSE,
    RANKS,
    TILE,
    RankBytes,
    rank_bytes,
)
from nvfp4viz.ui import errors
from nvfp4viz.ui.export import about
from nvfp4viz.ui.i18n import has, listed
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import percent

PAGE = "backends"
PARTS = ("moe", "linear", "mxfp4", "defaults", "remedies")
UNKNOWN = "triton"
"""A name of ``--moe-backend`` that NVFP4 experts do not have."""
PICKS = ("auto", *CHOICES, UNKNOWN)
SIGNS = {"wins": "✓", "able": "✓", "refused": "✗", "open": "?", "manual": "–"}


STORED = ("experts", "hidden", "intermediate", "codes", "block_scales", "scalars", "padding", "stops")
"""Of what a rank stores, what stands in the file to download."""


def moe_request(page: Lesson) -> MoeRequest:
    """The deployment that the settings describe."""
    v = page.view
    return MoeRequest(v["gpu"], v["act"], v["scheme"], v["par"], v["fi"], v["hum"], v["limit"], v["m8"], v["pick"])


# ------------------------------------------------------------------ drawing


@cache
def style() -> str:
    """The style sheet, as the element that brings it along."""
    return f"<style>{(Path(__file__).parent / 'backends.css').read_text(encoding='utf-8')}</style>"


def ladder(page: Lesson, found: Selection, *, named: bool = False) -> None:
    """Every candidate in the order asked, with its answer in words; where one was ``named``, the others stand below."""
    rungs = []
    for each in found.candidates:
        said = page.t(f"said.{each.outcome}" if each.check is None else f"refused.{each.check}")
        if named and each.outcome == "able":
            said = page.t("said.unasked")
        decides = " decides" if each.backend in found.rests_with else ""
        rungs.append((f"{each.outcome}{decides}", SIGNS[each.outcome], each.backend.enum, said))
    draw_ladder(page, rungs)


def draw_ladder(page: Lesson, rungs: list[tuple[str, str, str, str]]) -> None:
    """Rungs of class, sign, name and words."""
    lines = "".join(
        f'<li class="{kind}"><span class="sign" aria-hidden="true">{sign}</span>'
        f'<span class="name">{escape(name)}</span><span class="said">{escape(said)}</span></li>'
        for kind, sign, name, said in rungs
    )
    st.html(f'{style()}<ol class="ladder" aria-label="{escape(page.t("ladder"))}">{lines}</ol>')


def rows_of(request: Any, found: Selection) -> list[dict[str, object]]:
    """The candidates as rows, each with the deployment that asked; ``request`` is a selector's."""
    candidates = [
        {"candidate": each.backend.enum, "outcome": each.outcome, "refused_at": each.check or ""}
        for each in found.candidates
    ]
    return about({"vllm": VLLM, **asdict(request)}, candidates)


def pick(page: Lesson, name: str, options: tuple[str, ...]) -> None:
    """A select whose options are ids, each with a text if it has one."""
    st.selectbox(
        page.t(f"pick.{name}"),
        options,
        format_func=lambda option: page.t(f"{name}.{option}") if has(f"{PAGE}.{name}.{option}") else option,
        **page.view.widget(name),
    )


def gpus_named(page: Lesson, *names: str) -> str:
    """GPUs as the page calls them."""
    return listed(page.t(f"gpu.{name}") if has(f"{PAGE}.gpu.{name}") else name for name in names)


def toggles(page: Lesson, *names: str) -> None:
    for name in names:
        st.checkbox(page.t(f"pick.{name}"), **page.view.widget(name))


# ------------------------------------------------------------------ NVFP4 experts


def moe_part(page: Lesson) -> None:
    """The ladder for experts; then what the winner reads, converts and stores."""
    stage, side = page.stage()
    with side:
        pick(page, "gpu", GPUS)
        pick(page, "pick", PICKS)
        pick(page, "act", ACTIVATIONS)
        pick(page, "scheme", SCHEMES)
        pick(page, "par", PARALLEL)
        toggles(page, "fi", "hum", "limit", "m8")
    request = moe_request(page)
    found = select_moe(request)
    with stage:
        _moe_finding(page, request, found)
        if found.error is not None:
            errors.show(found.error, key="moe")
        ladder(page, found, named=request.choice != "auto")
    page.prose("moe.order", version=VLLM)
    if isinstance(found.winner, MoeBackend) and found.error is None:
        _winner(page, found.winner, request)
    page.prose("moe.text", version=VLLM)
    page.glossary("input_scale", "backend", "all_to_all")


def _moe_finding(page: Lesson, request: MoeRequest, found: Selection) -> None:
    gpu = gpus_named(page, request.gpu)
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
        found = select_moe(replace(request, gpu=gpu))
        winner = found.winner if found.error is None else None
        others.setdefault(reads(winner, request.scheme) if isinstance(winner, MoeBackend) else "refused", []).append(
            gpu
        )
    return page.t("moe.and").join(
        page.t(f"elsewhere.{reach}", gpus=gpus_named(page, *others[reach]))
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
        pick(page, "shape", tuple(LAYERS))
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
        [(listed(names), *_cost_cells(page, one)) for one, names in alike.items()],
    )
    page.prose("cost.text", version=VLLM, tile=TILE, marlin=MARLIN, wider=MARLIN_ELSE, divides=MARLIN_DIVIDES)


def cost_values(page: Lesson) -> dict[str, object]:
    """What fills the code of what a rank stores."""
    experts, ((intermediate, hidden), *_) = LAYERS[page.view["shape"]]
    return {"experts": experts, "hidden": hidden, "intermediate": intermediate, "ranks": page.view["ranks"]}


def _cost_cells(page: Lesson, one: RankBytes) -> tuple[str, ...]:
    """A rank's bytes as cells of the table; of a backend that stops there are none."""
    if one.stops:
        return page.t("cost.stops", rows=2 * one.intermediate), *["–"] * 4
    return (
        f"{one.experts} × {one.hidden:,} × {one.intermediate:,}".replace(" ", "\u00a0"),
        f"{one.codes + one.block_scales:,}",
        f"{one.scalars:,}",
        percent(one.padding / one.total),
        f"{one.total:,}",
    )


def _cost_finding(page: Lesson, rows: list[tuple[str, RankBytes]]) -> None:
    """Whether the choice of a backend changes what is stored, and by how much."""
    serving = [(name, one) for name, one in rows if not one.stops]
    least = min(one.total for _, one in serving)
    name, most = max(serving, key=lambda row: row[1].total)
    if most.total == least:
        page.finding("cost.same", count=len(serving), bytes=f"{least:,}")
        return
    key = "cost.padded" if most.padding else "cost.scalars"
    page.finding(key, name=name, share=percent((most.total - least) / least), bytes=f"{most.total - least:,}")


def stored_rows(page: Lesson, request: MoeRequest) -> list[dict[str, object]]:
    """What a rank stores on every backend, to download; none where a rank's border would cut a block."""
    try:
        found = cost_rows(page, request)
    except FormatError:
        return []
    of = cost_values(page) | {"experts_of": page.view["shape"], "parallel": request.parallel, "vllm": VLLM}
    return [
        {"backend": name, **{f"of_{key}" if key in STORED else key: value for key, value in of.items()}}
        | {key: getattr(one, key) for key in STORED}
        | {"total": one.total}
        for name, one in found
    ]


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
