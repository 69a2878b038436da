"""How the page on backends opens: one file over all GPUs, and a question about one of them."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from itertools import groupby

import streamlit as st

from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.serving.selection import GPUS, MOE, MoeBackend, MoeRequest, automatic_order, select_moe
from nvfp4viz.ui import predict
from nvfp4viz.ui.backends_parts import PAGE, draw_ladder, gpus_named, moe_part, moe_request, reads, style
from nvfp4viz.ui.lesson import Lesson

ASKED = MoeRequest()
"""What the question is about: the page's own opening state."""
OFFERED = ("FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "VLLM_CUTLASS", "MARLIN")

SLOTS = 8
"""Experts in the picture; the style sheet leaves one of them without a scale."""
FATES = {"expert": "✗", "layer": "✓", "none": "✓", "token": "✓", "refused": "–", "open": "?"}
"""What becomes of a file that lacks one expert's scale, by what is read of it."""


def on_gpu(request: MoeRequest) -> tuple[str, str]:
    """The backend taken and a key of `FATES`; the name is empty where nobody is."""
    found = select_moe(request)
    if found.rests_with:
        return found.rests_with[0].enum, "open"
    if found.error is not None or not isinstance(found.winner, MoeBackend):
        return "", "refused"
    return found.winner.enum, reads(found.winner, request.scheme)


Runs = list[tuple[tuple[str, ...], str, str]]


def over_gpus(request: MoeRequest) -> Runs:
    """GPUs that answer alike, in order, with `on_gpu`'s answer."""
    alike = groupby(GPUS, key=lambda gpu: on_gpu(replace(request, gpu=gpu)))
    return [(tuple(gpus), *answer) for answer, gpus in alike]


def draw_gpus(page: Lesson, runs: Runs, own: str, *, secret: bool = False) -> None:
    """A row for each run of GPUs: the slots as they are read, and what that makes of the missing one.

    With ``secret``, the GPU ``own`` keeps its answer to itself.
    """
    cells = "<i></i>" * SLOTS
    rows = []
    for gpus, enum, reach in runs:
        here = own in gpus
        hidden = here and secret
        kind, sign = ("asked", "?") if hidden else (reach, FATES[reach])
        name = "" if hidden else escape(enum)
        rows.append(
            f'<li class="{kind}{" here" if here else ""}"><span class="gpus">{escape(gpus_named(page, *gpus))}</span>'
            f'<span class="slots" aria-hidden="true">{cells}</span><span class="sign" aria-hidden="true">{sign}</span>'
            f'<span class="said"><b>{name}</b> {escape(page.t(f"over.{kind}"))}</span></li>'
        )
    st.html(
        f'{style()}<ul class="over" aria-label="{escape(page.t("over.label"))}">{"".join(rows)}</ul>'
        f'<p class="over-legend" aria-hidden="true">{escape(page.t("over.legend", slots=SLOTS))}</p>'
    )


def experts_part(page: Lesson) -> None:
    """The picture, with one answer held back until the question is answered; then the ladder and its settings."""
    place = st.container()
    answered = _which_backend(page)
    with place:
        _one_file(page, moe_request(page) if answered else ASKED, answered)
    if answered:
        moe_part(page)
        return
    page.finding("moe.before", version=VLLM)
    order = automatic_order(ASKED.gpu)
    draw_ladder(page, [("asked", str(k), row.enum, page.t(f"before.{row.reach}")) for k, row in enumerate(order, 1)])


def _one_file(page: Lesson, request: MoeRequest, answered: bool) -> None:
    runs = over_gpus(request)
    broken = [gpu for gpus, _, reach in runs if reach == "expert" for gpu in gpus]
    asked = next(gpus for gpus, _, _ in runs if request.gpu in gpus)
    key = "before" if not answered else "seen" if broken else "nowhere"
    values = {"broken": gpus_named(page, *broken), "asked": gpus_named(page, *asked)}
    page.finding(f"over.{key}", version=VLLM, **values)
    draw_gpus(page, runs, request.gpu, secret=not answered)


def _which_backend(page: Lesson) -> bool:
    """Asked: who serves a file with missing input scales, where nobody names a backend?"""
    winner = select_moe(ASKED).winner
    assert isinstance(winner, MoeBackend)
    (reported,) = (row for row in MOE if row.reach == "expert")
    elsewhere = [gpu for gpu in GPUS if select_moe(replace(ASKED, gpu=gpu)).winner == reported]
    return predict.ask(
        f"{PAGE}.predict.auto",
        tuple(name.lower() for name in OFFERED),
        answer=winner.enum.lower(),
        gpu=ASKED.gpu,
        winner=winner.enum,
        reach=page.t(f"reach.{winner.reach}"),
        reported=reported.enum,
        elsewhere=gpus_named(page, *elsewhere),
        **{row.enum.lower(): page.t(f"short.{row.reach}") for row in MOE if row.enum in OFFERED},
    )
