"""How the page on expert parallelism opens: who waits for whom, what EPLB makes of it, and what it leaves behind."""

from __future__ import annotations

from html import escape

import numpy as np

from nvfp4viz.figures import expert_parallel as figures
from nvfp4viz.figures.mxfp4 import LAYERS
from nvfp4viz.moe import eplb, overlap
from nvfp4viz.moe.parallel import (
    PAYLOADS,
    WAYS,
    Exchange,
    Placement,
    choose_slots_at_home,
    exchange,
    imbalance,
    place,
    row_bytes,
)
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.serving.route_trace import EVERY
from nvfp4viz.ui import predict
from nvfp4viz.ui.expert_parallel_parts import (
    ASKED,
    EXPERTS,
    HALF,
    PAGE,
    balance_of,
    bars_of,
    choose,
    draw_timeline,
    layer_of,
    machine_of,
    pick_layer,
    size_of,
    steps_of,
    trace,
)
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import percent
from nvfp4viz.ui.theme import theme

MOVING = (("weights", True), ("block_scales", True), ("alphas", True), ("input_scale", False))
"""An expert's tensors in the drawing, and whether EPLB exchanges them; `expert_parallel_run.TENSORS` names them."""


def ranks_part(page: Lesson) -> None:
    """Which rank holds and computes what, and what EPLB would move; then a question about what is sent."""
    stage, side = page.stage()
    with side:
        pick_layer(page)
        ids, placed, layer = layer_of(page)
        old, new = rearranged(page)
        found = imbalance(layer.rank_rows)
        page.finding(
            "ranks.seen",
            tokens=f"{int(layer.tokens.sum()):,}",
            k=ids.shape[1],
            ranks=placed.ranks,
            held=placed.slots_per_rank,
            idle=percent(round(found.idle, 3)),
        )
        after = exchange(choose_slots_at_home(ids, new), new)
        _left_behind(page, old, new, after)
        page.glossary("rank", "all_to_all", "expert_placement", "eplb", "input_scale")
    with stage:
        alt = page.t("ranks.alt")
        page.drawn_figure(
            figures.ranks_drawing(placed, layer, alt=alt, lang=lang()),
            alt=alt,
            finding=figures.describe_ranks(placed, layer, lang()),
            rows=lambda: figures.slot_rows(placed, layer),
        )
        draw_timeline(page, bars_of(page, 1), seconds(page, after))
    page.prose("ranks.text")
    if _asked_copies(page):
        page.prose("sent.elsewhere", part=page.t("part.sent"))


# ------------------------------------------------------------------ what EPLB would do


def rearranged(page: Lesson) -> tuple[Placement, Placement]:
    """The layer with its redundant slots as loaded, and once EPLB has counted the first half of such requests."""
    view = page.view
    # All layers are rearranged together: asked for once, whichever layer is looked at.
    found = balance_of(view["now"], view["now"], 0, view["ranks"], view["extra"], view["window"], view["place"])
    return found.old[view["layer"]], found.new[view["layer"]]


def seconds(page: Lesson, layer: Exchange) -> float:
    """What the model of time makes of a batch, whole."""
    view = page.view
    return overlap.total(
        overlap.timeline([overlap.phases(layer, size_of(page), machine_of(page), view["payload"], view["way"])])
    )


def busiest_move(old: Placement, new: Placement, layer: Exchange) -> int | None:
    """The slot drawn: of those whose expert changes, and if possible comes from another rank, the one that then
    computes most rows, the first among equals; None where nothing changes."""
    move = eplb.compare(old, new)
    return max(move.arriving or move.slots, key=lambda slot: (int(layer.slot_rows[slot]), -slot), default=None)


def _left_behind(page: Lesson, old: Placement, new: Placement, layer: Exchange) -> None:
    """One expert on its way, tensor by tensor, and how many slots fare alike."""
    slot = busiest_move(old, new, layer)
    slots = len(new.slots)
    counted = {"slots": slots, "experts": new.experts, "redundant": slots - new.experts, "version": VLLM}
    if slot is None:
        page.prose("left.none", **counted)
        return
    expert, before = int(new.slots[slot]), int(old.slots[slot])
    # The slot by the expert that it held: with redundant slots its number is another than on the map of the ranks.
    heads = page.t("left.expert", expert=expert), page.t("left.place", before=before)
    rows = ""
    for name, moves in MOVING:
        kept = "" if moves else ' class="stays"'
        sign, held = ("→", expert) if moves else ("✗", before)
        rows += (
            f'<tr{kept}><th scope="row">{escape(page.t(f"left.tensor.{name}"))}</th><td>{expert}</td>'
            f'<td class="sign">{sign}</td><td><span>{held}</span></td></tr>'
        )
    caption = escape(page.t("left.caption", expert=expert))
    page.drawing(
        f'<table class="left-behind"><caption>{caption}</caption><thead><tr><td></td>'
        f'<th scope="col">{escape(heads[0])}</th><td></td><th scope="col">{escape(heads[1])}</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )
    page.prose("left.seen", changed=int((old.slots != new.slots).sum()), expert=expert, before=before, **counted)


# ------------------------------------------------------------------ who sends to whom


def asked_layer() -> Exchange:
    """The exchange that the question about copies is about."""
    ids = np.concatenate(steps_of(EVERY, EVERY)[HALF:])[:, ASKED["layer"]].astype(np.int32)
    placed = place(EXPERTS, ASKED["ranks"])
    return exchange(choose_slots_at_home(ids, placed), placed)


def _asked_copies(page: Lesson) -> bool:
    """Asked: does it save anything to send a token once a rank instead of once an expert?"""
    layer = asked_layer()
    once, each, every = (
        int(layer.dispatch_bytes(ASKED["hidden"], "bf16", way).sum()) for way in ("tokens", "routes", "gather")
    )
    saved = 1 - once / each
    return predict.ask(
        f"{PAGE}.predict.copies",
        ("none", "third", "half"),
        answer="none" if saved < 0.1 else "third" if saved < 0.45 else "half",
        k=trace().ids.shape[2],
        ranks=ASKED["ranks"],
        hidden=ASKED["hidden"],
        once=f"{once:,}",
        each=f"{each:,}",
        gather=f"{every:,}",
        saved=percent(round(saved, 3)),
    )


def sent_part(page: Lesson) -> None:
    """The matrix of what ranks send each other.

    A part of its own: beside two more figures it would be drawn anew whenever the layer changes.
    """
    stage, side = page.stage()
    with side:
        pick_layer(page)
        choose(page, "way", WAYS)
        choose(page, "payload", PAYLOADS)
        choose(page, "size", tuple(LAYERS))
        view, size, (_, _, layer) = page.view, size_of(page), layer_of(page)
        sent = layer.dispatch_bytes(size.hidden, view["payload"], view["way"])
        back = layer.combine_bytes(size.hidden, view["way"])
        page.finding(
            "sent.seen",
            dispatch=f"{int(sent.sum()):,}",
            combine=f"{int(back.sum()):,}",
            row=f"{row_bytes(size.hidden, view['payload']):,}",
            back_row=f"{row_bytes(size.hidden, 'bf16'):,}",
        )
    with stage:
        page.figure(
            figures.matrix_figure(sent, theme=theme(), lang=lang()),
            alt=page.t("sent.alt"),
            finding=figures.describe_matrix(sent, lang()),
            rows=lambda: figures.sent_rows(layer, sent, back),
        )
    page.prose("sent.text")
