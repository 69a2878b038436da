"""The parts of the page on expert parallelism that count and model; `expert_parallel_run` has those that compute."""

from __future__ import annotations

import unicodedata

import numpy as np
import streamlit as st

from nvfp4viz.figures import expert_parallel as figures
from nvfp4viz.figures.mxfp4 import LAYERS
from nvfp4viz.figures.words import LANGUAGES, words
from nvfp4viz.model.corpus import DOMAINS
from nvfp4viz.moe import eplb, overlap
from nvfp4viz.moe.parallel import (
    PAYLOADS,
    STRATEGIES,
    WAYS,
    Exchange,
    Placement,
    choose_slots,
    choose_slots_at_home,
    exchange,
    place,
)
from nvfp4viz.serving import route_trace
from nvfp4viz.serving.route_trace import EVERY, STEPS, Array, Balance, RouteTrace
from nvfp4viz.ui import predict, state
from nvfp4viz.ui.caches import Stamp, stamp
from nvfp4viz.ui.i18n import lang, listed
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import percent
from nvfp4viz.ui.theme import theme

PAGE = "expert_parallel"
PARTS = ("ranks", "sent", "time", "balance", "moves", "run", "offers")
RANKS = (2, 4, 8, 16, 32)
TRAFFIC = (EVERY, *DOMAINS)
EXPERTS, LAYERS_OF_MODEL = 64, 4
MOST_EXTRA = 4
HALF = STEPS // 2
ROOM = 26
"""Latin letters that segments of the side column have room for; a Chinese one takes two places."""
ASKED = {"layer": 1, "ranks": 4, "hidden": 4096}
"""What the questions are about, whatever the reader has set."""


# ------------------------------------------------------------------ what the settings ask for


@st.cache_resource(max_entries=2, show_spinner=False)
def _trace(path: str, identity: Stamp) -> RouteTrace:
    from sample_checkpoints.record_routes import ROUTES

    return RouteTrace.read(ROUTES)


def trace() -> RouteTrace:
    """The recorded routes."""
    from sample_checkpoints.record_routes import ROUTES

    return _trace(str(ROUTES), stamp(ROUTES))


@st.cache_resource(max_entries=64, show_spinner=False)
def steps_of(before: str, now: str) -> tuple[Array, ...]:
    """Engine steps of both halves."""
    return route_trace.traffic(trace(), before, now)


@st.cache_resource(max_entries=256, show_spinner=False)
def balance_of(
    before: str, now: str, layer: int, ranks: int, extra: int, window: int = HALF, strategy: str = STRATEGIES[0]
) -> Balance:
    """One layer before and after EPLB."""
    return route_trace.balance(
        steps_of(before, now), layer, experts=EXPERTS, ranks=ranks, extra=extra, window=window, strategy=strategy
    )


def found_of(page: Lesson) -> Balance:
    """The balance that the page's settings ask for."""
    view = page.view
    names = ("before", "now", "layer", "ranks", "extra", "window", "place")
    return balance_of(*(view[name] for name in names))


def layer_of(page: Lesson) -> tuple[Array, Placement, Exchange]:
    """The batch of the ranks' part: logical ids ``(T, k)`` of the second half, the placement, and its exchange."""
    view = page.view
    ids = np.concatenate(steps_of(view["now"], view["now"])[HALF:])[:, view["layer"]].astype(np.int32)
    placed = place(EXPERTS, view["ranks"], view["place"])
    return ids, placed, exchange(choose_slots_at_home(ids, placed), placed)


def size_of(page: Lesson) -> overlap.LayerSize:
    """The layer whose sizes count bytes and time."""
    _, (gate, _, _) = LAYERS[page.view["size"]]
    return overlap.LayerSize(gate[1], gate[0])


def machine_of(page: Lesson) -> overlap.Machine:
    """The model's hardware, from the page's units."""
    view = page.view
    return overlap.Machine(1e9 * view["link"], 1e-6 * view["latency"], 1e12 * view["flops"], 1e12 * view["memory"])


def bars_of(page: Lesson, halves: int) -> tuple[overlap.Bar, ...]:
    """The timeline of the ranks' batch, whole or in halves."""
    ids, placed, whole = layer_of(page)
    parts = [whole] if halves == 1 else overlap.halves(choose_slots(ids, placed), placed)
    size, machine, view = size_of(page), machine_of(page), page.view
    return overlap.timeline([overlap.phases(part, size, machine, view["payload"], view["way"]) for part in parts])


# ------------------------------------------------------------------ widgets


def one_of(counts: tuple[int, ...], default: int) -> state.Param:
    """One whole number out of a few."""

    def parse(text: str) -> int:
        if int(text) not in counts:
            raise ValueError(text)
        return int(text)

    return state.Param(default, parse, ", ".join(map(str, counts)))


def pick_layer(page: Lesson) -> None:
    """Traffic, layer, ranks and the first placement."""
    view = page.view
    pick_traffic(page, "now")
    left, right = st.columns(2)
    left.number_input(page.t("pick.layer"), 0, LAYERS_OF_MODEL - 1, **view.widget("layer"))
    right.selectbox(page.t("pick.ranks"), RANKS, **view.widget("ranks"))
    choose(page, "place", STRATEGIES)


def pick_traffic(page: Lesson, name: str) -> None:
    """What people ask the server for."""
    choose(page, name, TRAFFIC, "traffic")


def choose(page: Lesson, name: str, options: tuple[str, ...], below: str = "") -> None:
    """One of a few, by the texts under `below`, or under the setting's own name."""
    # Where there is much to say, pills: segments look broken when they wrap.  The same in every language, for a widget
    # of another kind would forget what was chosen.
    keys = [f"{PAGE}.{below or name}.{one}" for one in options]
    widest = max(sum(_places(words(language, key)) for key in keys) for language in LANGUAGES)
    (st.pills if widest > ROOM else st.segmented_control)(
        page.t(f"pick.{name}"),
        options,
        format_func=lambda one: page.t(f"{below or name}.{one}"),
        required=True,
        wrap=True,
        **page.view.widget(name),
    )


def _places(text: str) -> int:
    """How many Latin letters a label is wide.

    >>> _places("JSON"), _places("六类都有")
    (4, 8)
    """
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)


# ------------------------------------------------------------------ time


def time_part(page: Lesson) -> None:
    """The model's timeline, whole and in halves."""
    view = page.view
    stage, side = page.stage()
    with side:
        choose(page, "overlap", ("off", "on"))
        left, right = st.columns(2)
        numbers = ((left, "link", 1e4), (right, "latency", 1e3), (left, "flops", 1e5), (right, "memory", 1e3))
        for column, name, most in numbers:
            column.number_input(page.t(f"pick.{name}"), 0.1, most, format="%g", **view.widget(name))
        choose(page, "size", tuple(LAYERS))
        one, two = overlap.total(bars_of(page, 1)), overlap.total(bars_of(page, 2))
        page.finding(
            "time.shorter" if two < one else "time.longer",
            one=f"{1e6 * one:,.1f}",
            two=f"{1e6 * two:,.1f}",
            change=percent(round(abs(1 - two / one), 3)),
        )
    bars = bars_of(page, 2 if view["overlap"] == "on" else 1)
    with stage:
        draw_timeline(page, bars)
    box = page.expander("time.batch")
    if box.open:
        with box:
            pick_layer(page)
            choose(page, "way", WAYS)
            choose(page, "payload", PAYLOADS)
    page.prose("time.text")
    page.glossary("dual_batch_overlap")


def draw_timeline(page: Lesson, bars: tuple[overlap.Bar, ...], after: float | None = None) -> None:
    """The timeline; `after` are the seconds that the layer takes once EPLB has rearranged it."""
    page.figure(
        figures.timeline_figure(bars, after=after, theme=theme(), lang=lang()),
        alt=page.t("time.alt"),
        finding=figures.describe_timeline(bars, lang(), after),
        rows=lambda: figures.bar_rows(bars),
    )


# ------------------------------------------------------------------ EPLB


def balance_part(page: Lesson) -> None:
    """Two questions, then the load of each rank with and without EPLB."""
    if not _asked_replicas() or not _asked_turn():
        return
    view = page.view
    stage, side = page.stage()
    with side:
        pick_traffic(page, "before")
        pick_layer(page)
        st.select_slider(
            page.t("pick.extra"),
            range(MOST_EXTRA + 1),
            format_func=lambda extra: page.t("pick.extra_of", slots=extra * view["ranks"]),
            **view.widget("extra"),
        )
        st.slider(page.t("pick.window"), 1, HALF, **view.widget("window"))
        found = found_of(page)
        new = found.new[found.layer]
        heaviest = _heaviest(page)
        page.finding(
            "balance.seen",
            before=f"{route_trace.step_ratio(found.without):.2f}",
            after=f"{route_trace.step_ratio(found.rebalanced):.2f}",
            expert=heaviest[0],
            share=percent(round(heaviest[1], 3)),
            fair=percent(round(1 / view["ranks"], 4)),
        )
        page.glossary("eplb", "replica")
    with stage:
        page.figure(
            figures.balance_figure(found, theme=theme(), lang=lang()),
            alt=page.t("balance.alt"),
            finding=figures.describe_balance(found, lang()),
            rows=lambda: figures.balance_rows(found),
        )
    moved = eplb.compare(found.old[found.layer], new)
    page.prose(
        "balance.moved",
        slots=len(new.slots),
        changed=len(moved.slots),
        arriving=len(moved.arriving),
        replicated=listed(f"{e} (× {new.replicas[e]})" for e in moved.replicated) or "–",
    )
    page.prose("balance.text", window=f"{eplb.WINDOW:,}", interval=f"{eplb.INTERVAL:,}", first=f"{eplb.FIRST:,}")


def _heaviest(page: Lesson) -> tuple[int, float]:
    """The busiest expert of the second half, and its share of all rows."""
    load = route_trace.load_of(steps_of(page.view["before"], page.view["now"])[HALF:], EXPERTS)[page.view["layer"]]
    return int(load.argmax()), float(load.max() / load.sum())


def _asked_replicas() -> bool:
    """Asked: how much of what EPLB gains is due to replicas?  On few ranks none, on many nearly all."""
    few, many = (
        [balance_of("code", "code", ASKED["layer"], ranks, extra) for extra in (0, 2)] for ranks in (ASKED["ranks"], 32)
    )
    packed, copied = few[0].after.ratio, few[1].after.ratio
    gain = (packed - copied) / (few[0].before.ratio - copied)
    return predict.ask(
        f"{PAGE}.predict.replicas",
        ("nothing", "some", "most"),
        answer="nothing" if gain < 0.05 else "some" if gain < 0.5 else "most",
        layer=ASKED["layer"],
        ranks=ASKED["ranks"],
        held=EXPERTS // ASKED["ranks"],
        slots=2 * ASKED["ranks"],
        before=f"{few[0].before.ratio:.2f}",
        packed=f"{packed:.2f}",
        copied=f"{copied:.2f}",
        many=32,
        many_packed=f"{many[0].after.ratio:.2f}",
        many_slots=2 * 32,
        many_copied=f"{many[1].after.ratio:.2f}",
    )


def _asked_turn() -> bool:
    """Asked: experts were placed for news, and people now send code.  Better or worse than no EPLB?"""
    found = balance_of("news", "code", 3, 4, 1)
    before, after = found.before.ratio, found.after.ratio
    settled = balance_of("code", "code", 3, 4, 1).after.ratio
    return predict.ask(
        f"{PAGE}.predict.turn",
        ("better", "same", "worse"),
        answer="better" if after < before - 0.05 else "worse" if after > before + 0.05 else "same",
        layer=3,
        ranks=4,
        before=f"{before:.2f}",
        after=f"{after:.2f}",
        settled=f"{settled:.2f}",
    )


_TOLD = {
    "now": "traffic",
    "before": "traffic_before",
    "ranks": "of_ranks",
    "place": "placement",
    "extra": "redundant_experts",
    "window": "window_steps",
    "size": "sizes_of",
    "link": "link_gb_per_s",
    "latency": "latency_us",
    "flops": "tflops",
    "memory": "memory_tb_per_s",
}


def told(page: Lesson, *names: str) -> dict[str, object]:
    """What a download is about: the batch and its placement, and the settings ``names``, each by a column's name."""
    return {_TOLD.get(name, name): page.view[name] for name in ("now", "layer", "ranks", "place", *names)}


def code_values(page: Lesson) -> dict[str, object]:
    """What the snippet of all parts that run nothing is filled with."""
    view = page.view
    names = ("layer", "ranks", "extra", "window", "before", "now", "place", "payload", "way", "link", "latency")
    return {name: view[name] for name in (*names, "flops", "memory")} | {
        "hidden": size_of(page).hidden,
        "intermediate": size_of(page).intermediate,
    }
