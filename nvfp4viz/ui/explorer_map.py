"""The Explorer's stage: the coverage map, the pick by keyboard beside it, and the picked slot among its peers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.audit.facts import SCALARS
from nvfp4viz.audit.texts import id_list
from nvfp4viz.figures import peers as peer_figures
from nvfp4viz.figures.coverage import CoverageGrid, status_key
from nvfp4viz.figures.slots import SCALE_ROLES, coverage_grid, peers_of, roles_shown
from nvfp4viz.ui import caches, state
from nvfp4viz.ui.coverage_map import coverage_map
from nvfp4viz.ui.explorer import code_span, is_unread, readable, size_text, unread_word
from nvfp4viz.ui.i18n import lang, listed, t

if TYPE_CHECKING:
    from nvfp4viz.audit import Report
    from nvfp4viz.checkpoint import Slot
    from nvfp4viz.ui.explorer_open import Opened
    from nvfp4viz.ui.lesson import Lesson

MAP_KEY = "explorer.map"
# What the page itself chose, and for which checkpoint: nobody's choice, so the next checkpoint does not inherit it.
PLACED, CORRECTED = "explorer.placed", "explorer.corrected"
CURSOR = ("layer", "expert", "projection")


def _picked() -> None:
    """The map's callback: what was chosen there becomes the shared cursor before the page runs again."""
    chosen = (st.session_state.get(MAP_KEY) or {}).get("selected")
    if chosen:
        st.session_state.update(layer=int(chosen["layer"]), expert=int(chosen["expert"]))
        st.session_state["projection"] = str(chosen["role"])


def _switched() -> None:
    """The same for the map's switch between projections."""
    shown = (st.session_state.get(MAP_KEY) or {}).get("role")
    if shown:
        st.session_state["projection"] = str(shown["name"])


def settle_cursor(page: Lesson, grid: CoverageGrid, identity: str, brought: tuple[object, ...]) -> None:
    """The cursor comes from other pages and from links: move it to a slot that this checkpoint has.

    The slot shown at first is the first hole, because that is what one comes for, of the layer that a link says, where
    it says no expert; also where the cursor stands only because this page has put it there in the checkpoint before.
    ``brought`` is the cursor as it came, before what this
    checkpoint lacks was taken out of it: another's projection, say.
    """
    view = page.view
    placed = st.session_state.get(PLACED)
    own = placed is not None and placed[1] == brought and placed[0] != identity and not view.asked & set(CURSOR)
    fits = view["layer"] in grid.layers and (view["expert"] is not None and view["expert"] < grid.experts)
    if own or not fits:
        layer, expert, name = _first(grid, *((None, None, None) if own else (view[name] for name in CURSOR)))
        view.put(layer=layer, expert=expert, projection=name)
        st.session_state[PLACED] = identity, (layer, expert, name)
    if view["projection"] not in grid.roles:
        view.put(projection=grid.roles[0])


def _first(grid: CoverageGrid, layer: int | None, expert: int | None, projection: str | None) -> tuple[int, int, str]:
    """The first hole among the slots that these leave, each as far as this checkpoint has it; else the first slot."""
    layers = [layer] if layer in grid.layers else grid.layers
    experts = range(grid.experts) if expert is None or expert >= grid.experts else [expert]
    roles = [projection] if projection in grid.roles else grid.roles
    left = (hole for hole in _holes(grid) if hole[0] in layers and hole[1] in experts and hole[2] in roles)
    return next(left, (layers[0], experts[0], roles[0]))


def settle_role(page: Lesson, offered: tuple[str, ...]) -> None:
    """The scale comes from a link or from the reader; one that this checkpoint lacks gives way to the first offered.

    What the page has put in its place holds for this checkpoint alone: the next one is asked for what was wanted.
    """
    view = page.view
    put, wanted = st.session_state.pop(CORRECTED, (None, None))
    if view["role"] == put and "role" not in view.asked:
        view.put(role=wanted)
    before = view["role"]
    page.refine(role=state.choice(offered, default=offered[0]))
    if view["role"] != before:
        st.session_state[CORRECTED] = view["role"], before


def _real_ranges(page: Lesson, report: Report) -> None:
    """Layers, experts and projections of what is open: a link that asks for others is told so."""
    layers, names = (*report.model.moe_layers, *report.model.draft_layers), report.model.projections

    def one_of(text: str) -> int:
        if int(text) not in layers:
            raise ValueError(text)
        return int(text)

    page.refine(
        layer=state.Param(None, one_of, id_list(layers) if layers else "–"),
        expert=state.integer(0, report.model.experts - 1),
        projection=state.choice(names),
    )


def _holes(grid: CoverageGrid) -> Iterator[tuple[int, int, str]]:
    for name in grid.roles:
        for row, expert in zip(*grid.holes(name).nonzero(), strict=True):
            yield grid.layers[int(row)], int(expert), name


def map_and_slot(page: Lesson, opened: Opened) -> None:
    """The coverage map on the stage; beside it the pick by keyboard and the slot among its peers."""
    facts, report = opened.audit.facts, opened.audit.report
    if not readable(opened):
        page.prose("map.unreadable")
        return
    brought = tuple(page.view[name] for name in CURSOR)
    _real_ranges(page, report)
    offered = roles_shown(report)
    if not offered:
        if report.format.scheme != "UNQUANTISED":  # that has been said
            page.prose("map.none")
        elif report.model.moe_layers:
            _slot_without_map(page, report)
        return
    settle_role(page, offered)
    stage, side = page.stage()
    with side:
        role = str(st.radio(page.t("map.role"), offered, **page.view.widget("role")))
        lacking = [name for name in SCALE_ROLES if name not in offered]
        if lacking:
            names = listed(map(code_span, lacking))
            st.caption(page.t("map.not_needed", scheme=report.format.scheme, roles=names))
    # What is asked of GPUs and ranks changes no slot.
    known = opened.identity, opened.audit.checkpoint.name, role
    grid = caches.kept("explorer.kept.grid", known, lambda: coverage_grid(facts, report, role))
    if grid is None:
        with stage:
            page.prose("map.none")
        return
    settle_cursor(page, grid, opened.identity, brought)
    with side:
        page.heading("pick.title")
        _pick(page, grid.layers, grid.experts, grid.roles, grid.drafts)
    layer, expert, projection = (page.view[name] for name in CURSOR)
    with stage:
        coverage_map(grid, key=MAP_KEY, role=projection, selected=(layer, expert), on_pick=_picked, on_role=_switched)
        _counts(page, opened, role)
        strip = peers_of(facts, report, role, layer, projection, expert)
        if strip is not None and strip.shared:
            st.markdown(peer_figures.describe_peers(strip, lang()))
        elif strip is not None:
            page.drawn_figure(
                peer_figures.peers_drawing(strip, alt=page.t("pick.title"), lang=lang()),
                alt=page.t("pick.title"),
                finding=peer_figures.describe_peers(strip, lang()),
                rows=lambda: [
                    row | {"status": t(status_key(row["status"], strip.divisor))}
                    for row in peer_figures.peers_rows(strip)
                ],
            )
        else:
            _tensor_words(page, opened, facts.view.slot(layer, expert, projection, role))


def _pick(
    page: Lesson, layers: tuple[int, ...], experts: int, projections: tuple[str, ...], drafts: Collection[int]
) -> None:
    """A slot by keyboard."""
    named = {layer: page.t("pick.draft", layer=layer) for layer in drafts}
    st.selectbox(
        page.t("pick.layer"), layers, format_func=lambda layer: named.get(layer, str(layer)),
        **page.view.widget("layer"),
    )  # fmt: skip
    st.number_input(page.t("pick.expert"), 0, experts - 1, step=1, **page.view.widget("expert"))
    st.selectbox(page.t("pick.projection"), projections, **page.view.widget("projection"))


def _slot_without_map(page: Lesson, report: Report) -> None:
    """Experts without scales have no map, and yet their tensors can be looked at one by one."""
    model, view = report.model, page.view
    layers = (*model.moe_layers, *model.draft_layers)
    first = dict(zip(CURSOR, (layers[0], 0, model.projections[0]), strict=True))
    view.put(**{name: value for name, value in first.items() if view[name] is None})
    with st.container(horizontal=True, gap="medium", key="explorer_pick"):
        _pick(page, layers, model.experts, model.projections, model.draft_layers)


def _counts(page: Lesson, opened: Opened, role: str) -> None:
    """How many slots there are, and what is wrong with them, as far as it was looked at."""
    count = opened.audit.report.coverage[role]
    kind = "finding" if role in SCALARS else "blocks"
    page.finding(
        f"map.{kind}_{unread_word(opened, 'unreadable')}" if count.unreadable else f"map.{kind}",
        role=role,
        **{name: f"{getattr(count, name):,}" for name in ("missing", "invalid", "expected", "unreadable")},
    )


def _tensor_words(page: Lesson, opened: Opened, slot: Slot) -> None:
    """A slot that holds more than one number has no place among its peers: what is stored, and where."""
    place = {"layer": slot.layer, "expert": slot.expert, "projection": slot.projection, "role": slot.role}
    entry = slot.entry
    if entry is None:
        word = unread_word(opened, "unreadable") if is_unread(opened, slot) else "missing"
        page.prose(f"map.tensor_{word}", **place)
        return
    page.prose(
        "map.tensor",
        **place,
        name=code_span(entry.name),
        dtype=entry.dtype,
        shape=list(entry.shape),
        size=size_text(entry.nbytes),
        file=code_span(entry.file),
        group=opened.audit.report.format.group_size,
    )
