"""The Explorer's check of parallel serving: what each rank gets, and what the audit says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.audit.parallel import (
    ALIGNMENTS,
    WidthRank,
    block_size,
    expert_ranks,
    expert_width,
    is_about_ranks,
    width_ranks,
)
from nvfp4viz.ui.explorer import finding_cards
from nvfp4viz.ui.i18n import listed

if TYPE_CHECKING:
    from nvfp4viz.ui.explorer_open import Opened
    from nvfp4viz.ui.lesson import Lesson

# As many as a link may ask for: one rack of 72, and as far as 1,024 experts go.
MOST_RANKS = 1024
MOST_ROWS = 72


def ranks(page: Lesson, opened: Opened) -> None:
    """The findings on ranks, and a table for each way of splitting."""
    facts, tp, ep = opened.audit.facts, page.view["tp"] or 1, page.view["ep"] or 1
    if not (opened.audit.view.complete and opened.audit.view.moe_layers):
        page.prose("map.none")
        return
    page.prose("ranks.text")
    about = [item for item in opened.audit.report.findings if is_about_ranks(item)]
    split = width_ranks(facts, page.view["tp"])
    if tp == ep == 1:
        page.prose("ranks.choose")
    elif not about:
        full = all(one.filled == ALIGNMENTS for one in split)
        page.finding(f"ranks.fine{'' if full else '_not_full'}", tp=tp, ep=ep)
    finding_cards(about, key="explorer_ranks")
    width, group = expert_width(facts), block_size(facts)
    page.heading("ranks.width")
    if split:
        page.prose("ranks.width_text", width=width, group=group, ranks=tp)
        page.table(
            (">rank", ">values", ">rows", "blocks", "tiles"),
            [
                (
                    str(one.rank),
                    f"{_number(one.begin)} – {_number(one.end)}",
                    _number(one.rows),
                    page.t("ranks.cut", count=one.cut) if one.cut else page.t("ranks.whole"),
                    _tiles(page, one),
                )
                for one in split[:MOST_ROWS]
            ],
        )
        _said_of_others(page, len(split))
    else:
        page.prose("ranks.no_blocks")
    page.heading("ranks.experts")
    held = expert_ranks(facts, ep)
    page.prose("ranks.experts_text", experts=facts.view.experts, ranks=ep)
    page.table(
        (">rank", ">experts", ">count", ">unusable"),
        [
            (
                str(one.rank),
                f"{one.begin} – {one.end - 1}" if one.end > one.begin else page.t("ranks.nobody"),
                str(one.end - one.begin),
                f"{one.unusable:,}",
            )
            for one in held[:MOST_ROWS]
        ],
    )
    _said_of_others(page, len(held))


def _said_of_others(page: Lesson, ranks: int) -> None:
    """A table of a thousand ranks is a page that nobody scrolls."""
    if ranks > MOST_ROWS:
        st.caption(page.t("ranks.more", shown=MOST_ROWS, ranks=f"{ranks:,}"))


def _tiles(page: Lesson, one: WidthRank) -> str:
    """What a rank's rows miss, if the audit minds it, or fill."""
    if not (one.missed or one.filled):
        return page.t("ranks.below")
    return page.t(f"ranks.{'misses' if one.missed else 'fits'}", sizes=listed(map(str, one.missed or one.filled)))


def _number(value: float) -> str:
    """Whole where it is whole: a fraction of a row is what cannot be served."""
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"
