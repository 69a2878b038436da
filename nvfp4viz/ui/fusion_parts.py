"""The parts of the page on fusion that show rows; `fusion_scale_parts` has those that measure bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from nvfp4viz.errors import InputError
from nvfp4viz.figures import fusion as figures
from nvfp4viz.moe.fusion import ORDERS, FusedLayout, find_row, trace_row
from nvfp4viz.moe.fusion_arrays import cut_in_pieces, misplaced_channels
from nvfp4viz.moe.fusion_bits import check_layout
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.ui import errors, predict, state
from nvfp4viz.ui.i18n import lang, listed
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.pick import pick_one
from nvfp4viz.ui.theme import theme

PAGE = "fusion"
PARTS = ("qkv", "w13", "deltanet", "scale", "kinds", "unchanged")
RANKS = (1, 2, 4, 8, 16)
WHICH = ("qkvz", "ba")
FOLLOWED = (1, 1100)
"""Rank and row that are followed at first: a row of k."""
ASKED = ("qwen3_next", 4)
"""Model and ranks that the question about cutting is about."""


def rank_count(default: int) -> state.Param:
    """Tensor-parallel ranks: one of ``RANKS``."""

    def parse(text: str) -> int:
        if int(text) not in RANKS:
            raise ValueError(text)
        return int(text)

    return state.Param(default, parse, ", ".join(map(str, RANKS)))


def layouts_of(page: Lesson) -> tuple[FusedLayout, ...]:
    """What the open part draws: one layout, or the DeltaNet's in both orders.

    Raises
    ------
    InputError
        If the chosen number of ranks cannot be had.
    """
    view, sizes = page.view, _sizes_of(page)
    if view["part"] == "w13":
        return (figures.experts_of(sizes, view["tp"]),)
    if view["part"] in ("deltanet", "unchanged"):
        which = view["which"] if view["part"] == "deltanet" else WHICH[0]  # b and a pass no convolution
        return tuple(figures.deltanet_of(sizes, view["tp"], order, which) for order in ORDERS)
    return (figures.attention_of(sizes, view["tp"]),)


def _sizes_of(page: Lesson) -> str:
    """Whose sizes the open part draws."""
    name = {"w13": "ffn", "deltanet": "gdn", "unchanged": "gdn"}.get(page.view["part"], "attn")
    return str(page.view[name])


def told(page: Lesson, layout: FusedLayout) -> dict[str, object]:
    """What a layout's rows to download are about."""
    return {"layout": layout.name, "order": layout.order, "sizes_of": _sizes_of(page), "ranks": layout.tp}


def drawable(page: Lesson, place: Any = None) -> tuple[FusedLayout, ...]:
    """As `layouts_of`; empty where the split is impossible, and then the error stands in ``place`` if there is one."""
    try:
        return layouts_of(page)
    except InputError as error:
        if place is not None:
            with place:
                errors.show(error)
        return ()


def pick(page: Lesson, name: str, options: Sequence[object]) -> None:
    """One of a few, by its texts ``<name>.<option>``."""
    pick_one(page, name, options, label=f"pick.{name}", texts=name)


def pick_model(page: Lesson, name: str, models: Sequence[str]) -> None:
    """The model whose sizes are taken; what is no model has a text ``<name>.<option>``."""
    st.selectbox(
        page.t(f"pick.{name}"),
        models,
        format_func=lambda model: figures.MODELS.get(model) or page.t(f"{name}.{model}"),
        **page.view.widget(name),
    )


def _pick_ranks(page: Lesson) -> None:
    st.select_slider(page.t("pick.tp"), RANKS, **page.view.widget("tp"))


def _pick_row(page: Lesson, layout: FusedLayout) -> tuple[int, int]:
    """The row to follow: a rank, and a row of its matrix."""
    view = page.view
    last_rank, last_row = layout.tp - 1, layout.rank_rows - 1
    page.refine(
        rank=state.integer(0, last_rank, default=min(FOLLOWED[0], last_rank)),
        row=state.integer(0, last_row, default=min(FOLLOWED[1], last_row)),
    )
    left, right = st.columns(2)
    left.number_input(page.t("pick.rank"), 0, last_rank, **view.widget("rank"))
    right.number_input(page.t("pick.row"), 0, last_row, **view.widget("row"))
    return int(view["rank"]), int(view["row"])


def _followed(page: Lesson, layout: FusedLayout, rank: int, row: int, key: str = "seen.row") -> None:
    """Where the row comes from, and which ranks hold it."""
    found = trace_row(layout, rank, row)
    copies = find_row(layout, found.part, found.part_row)
    part = layout.part(found.part)
    page.finding(
        f"{key}.head" if part.unit_rows > 1 else f"{key}.plain",
        rank=rank,
        row=f"{row:,}",
        part=found.part,
        head=found.unit,
        within=found.part_row % part.unit_rows,
        tensor=found.tensor,
        tensor_row=f"{found.tensor_row:,}",
        ranks=listed(str(holder) for holder, _ in copies),
    )


def say_same(page: Lesson, layout: FusedLayout) -> None:
    """How many outputs of the fused product differ from those of separate ones."""
    outputs, differ = check_layout(layout)
    page.finding("seen.same", outputs=f"{outputs:,}", differ=f"{differ:,}")


def _rows_figure(page: Lesson, layout: FusedLayout, follow: tuple[int, int], height: int = 460) -> None:
    page.figure(
        figures.rows_figure(layout, theme=theme(), lang=lang(), follow=follow, height=height),
        alt=page.t("rows.alt", order=page.t(f"order.{layout.order}")),
        finding=figures.describe_rows(layout, lang()),
        rows=lambda: figures.run_rows(layout),
    )


def rows_part(
    page: Lesson,
    sizes: str,
    models: Sequence[str],
    terms: Sequence[str],
    compared: Callable[[Lesson, FusedLayout], None] = say_same,
) -> None:
    """A layout in the flat order: which row of which tensor stands where; ``sizes`` names the setting of the model.

    ``compared`` says below what the fused outputs are against separate ones.
    """
    stage, side = page.stage()
    with side:
        pick_model(page, sizes, models)
        _pick_ranks(page)
        for layout in drawable(page, stage):
            follow = _pick_row(page, layout)
            _followed(page, layout, *follow)
            compared(page, layout)
            page.glossary(*terms)
            with stage:
                _rows_figure(page, layout, follow)


def w13_part(page: Lesson) -> None:
    """Gate and up; and in which order backends want them."""
    rows_part(page, "ffn", tuple(figures.INTERMEDIATE), ("fused_projection", "tensor_parallel", "grouped_gemm"))
    page.prose("w13.text", version=VLLM)
    page.table(
        ("backend", "row_order"),
        [
            (page.t(f"row_order.{name}.who"), page.t(f"row_order.{name}.order"))
            for name in ("gate", "up", "tile", "eight")
        ],
    )


def deltanet_part(page: Lesson) -> None:
    """The two orders side by side, after the question which of them can be cut in pieces."""
    if not _which_cut(page):
        return
    left, middle, right = st.columns(3)
    with left:
        pick_model(page, "gdn", tuple(figures.DELTANET))
    with middle:
        pick(page, "which", WHICH)
    with right:
        _pick_ranks(page)
    layouts = drawable(page, st.container())
    if not layouts:
        return
    flat, woven = layouts
    follow = _pick_row(page, flat)
    found = trace_row(flat, *follow)
    follows = follow, find_row(woven, found.part, found.part_row)[0]
    for column, layout, at in zip(st.columns(2, gap="large"), layouts, follows, strict=True):
        with column:
            st.header(page.t(f"order.{layout.order}"), anchor=False)
            _rows_figure(page, layout, at, height=520)
            _followed(page, layout, *at)
    say_same(page, woven)
    page.glossary("gated_deltanet", "fused_projection", "tensor_parallel")
    page.prose("deltanet.text", version=VLLM)
    page.heading("deltanet.pieces")
    page.table(
        ("order", ">rank", ">rows_each", "pieces"),
        [
            (page.t(f"order.{layout.order}"), str(rank), f"{layout.rank_rows:,}", _held(piece))
            for layout in layouts
            for rank, piece in enumerate(cut_in_pieces(layout))
        ],
    )
    page.prose("deltanet.cut", right=_held({part.name: part.rows // flat.tp for part in flat.parts}))


def _held(piece: dict[str, int]) -> str:
    return " · ".join(f"{rows:,} {part}" for part, rows in piece.items() if rows)


def _which_cut(page: Lesson) -> bool:
    """Asked: which order survives a cut into equal pieces?"""
    model, tp = ASKED
    right, firsts = [], {}
    for order in ORDERS:
        layout = figures.deltanet_of(model, tp, order)
        share = {part.name: part.rows // tp for part in layout.parts}
        pieces = cut_in_pieces(layout)
        firsts[order] = pieces[0]
        if all(piece == share for piece in pieces):
            right.append(order)
    answer = "both" if len(right) == 2 else right[0] if right else "neither"
    return predict.ask(
        f"{PAGE}.predict.cut",
        (*ORDERS, "both", "neither"),
        answer=answer,
        ranks=tp,
        model=figures.MODELS[model],
        rows=f"{figures.deltanet_of(model, tp, ORDERS[0]).whole.rank_rows:,}",
        flat=_held(firsts["flat"]),
        interleaved=_held(firsts["interleaved"]),
    )


def unchanged_part(page: Lesson) -> None:
    """What stands around a fused projection and stays as it was."""
    stage, side = page.stage()
    with stage:
        page.table(
            ("what", "acts_on", "why"),
            [
                tuple(page.t(f"unchanged.{name}.{cell}") for cell in ("what", "on", "why"))
                for name in ("norm", "rotary", "conv", "recurrence", "formats")
            ],
        )
    with side:
        pick_model(page, "gdn", tuple(figures.DELTANET))
        _pick_ranks(page)
        layouts = drawable(page, stage)
        if layouts:
            flat, woven = layouts
            (_, channels), (wrong, _) = misplaced_channels(flat), misplaced_channels(woven)
            page.finding("unchanged.seen", channels=f"{channels:,}", wrong=f"{wrong:,}")
            say_same(page, woven)
            page.glossary("gated_deltanet", "fused_projection")
    page.prose("unchanged.text")
