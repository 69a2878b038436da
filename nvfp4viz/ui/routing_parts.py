"""The parts of the routing page; the page itself chooses one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import streamlit as st

from nvfp4viz.errors import NvError
from nvfp4viz.figures import planner as plan_figures
from nvfp4viz.figures import routing as figures
from nvfp4viz.model import corpus, planner
from nvfp4viz.model.calibrate import SEED as CALIBRATION_SEED
from nvfp4viz.model.planner import HeldOut, Plan
from nvfp4viz.model.routing_log import RoutingLog, joined, record_routing
from nvfp4viz.ui import caches, errors, predict, state
from nvfp4viz.ui.i18n import lang, listed
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import exact, four, percent
from nvfp4viz.ui.pick import pick_one
from nvfp4viz.ui.theme import theme

I64 = npt.NDArray[np.int64]
PAGE = "routing"
PARTS = ("map", "calibration", "planner", "run", "routers")
SOURCES = ("prompt", "text")
TEXTS = (*corpus.DOMAINS, "all")
PILOTS, TARGETS = (16.0, 32.0, 64.0, 128.0), (256.0, 512.0, 1024.0)
ASKED = ("news", 64, 512)
"""Which plan the question is about: text, documents recorded, documents in all."""
A_THIRD = 1 / 3
"""What the question about kinds of text calls a large share of routes."""
RECENT, NAMED = 5, 6
"""Documents that the table of closed holes shows, and slots that it names of each."""


def log_of(name: str) -> RoutingLog:
    """A recorded log: ``"calibration"``, a domain, or all domains in turn."""
    if name == "all":
        return _all_domains()
    return caches.routing_log(name)


@st.cache_resource(show_spinner=False)
def _all_domains() -> RoutingLog:
    logs = [caches.routing_log(name) for name in kinds_of("all")]
    return joined(logs).part(0, logs[0].documents)


def kinds_of(text: str) -> tuple[str, ...]:
    """The recorded kinds of text that one of `TEXTS` stands for."""
    return corpus.DOMAINS if text == "all" else (text,)


def seen() -> I64:
    """What the holed export's calibration saw."""
    return log_of("calibration").totals()


# ------------------------------------------------------------------ the maps


@st.cache_resource(max_entries=128, show_spinner=False)
def prompt_counts(prompt: str) -> I64:
    """Where a prompt's tokens go in the model as trained."""
    served = caches.served(caches.Build("tiny-moe-bf16", backend="bf16"))
    return record_routing(served.model, served.experts, [prompt], ended=False).totals()


def used_of(page: Lesson) -> I64:
    """The upper map that the page's settings ask for."""
    view = page.view
    if view["source"] == "text":
        return log_of(view["text"]).totals()
    return prompt_counts(read_prompt(page))


def read_prompt(page: Lesson) -> str:
    """The prompt of the upper map: the reader's, or that of the text where the model cannot read it."""
    own = page.view["ask"]
    if own:
        with suppress(NvError):
            prompt_counts(own)
            return str(own)
    return _prompt(page)


def told(page: Lesson) -> dict[str, object]:
    """What the rows of the maps are about: a recorded text, or a prompt."""
    view = page.view
    return {"text": view["text"]} if view["source"] == "text" else {"prompt": read_prompt(page)}


def map_code(page: Lesson) -> dict[str, object]:
    """What fills the snippet's part on the maps.  A reader's prompt may hold any character, so it comes as hex."""
    view = page.view
    prompt = read_prompt(page)
    own = "" if prompt == _prompt(page) else prompt
    return {
        "source": view["source"], "kind": _domain(view["text"]), "shown": kinds_of(view["text"]),
        "own": own.encode().hex(),
    }  # fmt: skip


def _prompt(page: Lesson) -> str:
    return corpus.DEMO_PROMPTS[_domain(page.view["text"])]


def _domain(text: str) -> str:
    return corpus.DOMAINS[1] if text == "all" else text


def map_part(page: Lesson) -> None:
    """Where a prompt or a text goes, over what calibration saw."""
    view = page.view
    stage, side = page.stage()
    with side:
        pick_one(page, "source", SOURCES, label="map.source", texts="source")
        prompting = view["source"] == "prompt"
        if prompting:
            view.put(text=_domain(view["text"]))
        st.selectbox(
            page.t("map.text"),
            corpus.DOMAINS if prompting else TEXTS,
            format_func=lambda name: page.t(f"text.{name}"),
            # A kind of text has a prompt of its own, which would not be seen behind the reader's.
            on_change=lambda: view.put(ask=None),
            **view.widget("text"),
        )
        own = _own_prompt(page) if prompting else ""
        if prompting and view["ask"] and not own:
            page.prose("map.instead", text=page.t(f"text.{view['text']}"))
        used = used_of(page)
        routes, slots = figures.blind_routes(used, seen())
        page.finding(
            "map.seen" if routes else "map.seen_none",
            routes=f"{routes:,}",
            all=f"{int(used.sum()):,}",
            slots=slots,
            share=figures.share(routes, int(used.sum())),
        )
        page.glossary("router", "calibration", "input_scale")
    title = page.t(f"map.title.{view['source']}", text=page.t(f"text.{view['text']}"))
    maps = {page.t("map.title.own") if own else title: used, page.t("map.title.calibration"): seen()}
    with stage:
        page.figure(
            figures.map_figure(maps, theme=theme(), lang=lang()),
            alt=page.t("map.alt"),
            finding=figures.describe_maps(used, seen(), lang()),
            rows=lambda: figures.map_rows({"used": used, "calibration": seen()}),
        )
    page.prose("map.text_below", documents=f"{log_of('news').documents:,}", calibrated=log_of("calibration").documents)
    page.heading("map.every")
    if _how_many_kinds(page):
        page.table(
            ("text", ">used", ">blind_slots", ">blind_share", ">prompt_share"), [_text_row(page, t) for t in TEXTS]
        )


def _how_many_kinds(page: Lesson) -> bool:
    """Asked: how many other kinds of text go where a calibration on news never went?"""
    others = [text for text in corpus.DOMAINS if text != corpus.CALIBRATION_DOMAIN]
    many, said = [], {}
    for text in others:
        used = log_of(text).totals()
        blind, routes = figures.blind_routes(used, seen())[0], int(used.sum())
        said[text] = f"{page.t(f'text.{text}')} {figures.share(blind, routes)}"
        if blind > A_THIRD * routes:
            many.append(text)
    return predict.ask(
        f"{PAGE}.predict.kinds",
        ("none", "some", "most", "all"),
        answer="all" if len(many) == len(others) else "none" if not many else "some" if len(many) < 3 else "most",
        documents=f"{log_of('calibration').documents:,}",
        kinds=len(others),
        names=listed(page.t(f"text.{text}") for text in others),
        count=len(many),
        many=listed(said[text] for text in many),
        few=listed(said[text] for text in others if text not in many),
    )


def _own_prompt(page: Lesson) -> str:
    own = st.text_input(
        page.t("map.own"), placeholder=_prompt(page).strip(), max_chars=state.MOST_TEXT, **page.view.widget("ask")
    )
    if own:
        try:
            prompt_counts(own)
        except NvError as error:
            errors.show(error, key="own_prompt")
            return ""
    return own


def _text_row(page: Lesson, text: str) -> tuple[str, ...]:
    used = log_of(text).totals()
    routes, slots = figures.blind_routes(used, seen())
    prompt = "–"
    if text in corpus.DEMO_PROMPTS:
        asked = prompt_counts(corpus.DEMO_PROMPTS[text])
        prompt = figures.share(figures.blind_routes(asked, seen())[0], int(asked.sum()))
    return (
        page.t(f"text.{text}"),
        str(int((used > 0).sum())),
        str(slots),
        figures.share(routes, int(used.sum())),
        prompt,
    )


# ------------------------------------------------------------------ calibration, token by token


@st.cache_resource(show_spinner=False)
def stops() -> tuple[float, ...]:
    """Numbers of documents at which the slider stops: powers of two, and every document that closed a hole."""
    log = log_of("calibration")
    powers = {2**power for power in range(10)}
    closers = {int(at) + 1 for at in log.seen_by().ravel() if at >= 0}
    return tuple(float(at) for at in sorted({0} | powers | closers) if at <= log.documents)


def calibration_part(page: Lesson) -> None:
    """The export's own calibration, as far as the slider stands."""
    view, log = page.view, log_of("calibration")
    tokens = log.tokens_after()
    st.select_slider(
        page.t("calibration.slider"),
        stops(),
        format_func=lambda n: page.t("calibration.stop", documents=f"{int(n):,}", tokens=f"{int(tokens[int(n)]):,}"),
        **view.widget("n"),
    )
    n = int(view["n"])
    counts = log.totals(n)
    stage, side = page.stage()
    with side:
        holes = log.holes_after()
        page.finding(
            "calibration.seen",
            holes=int(holes[n]),
            of=counts.size,
            documents=n,
            tokens=f"{int(tokens[n]):,}",
            left=int(holes[-1]),
        )
    with stage:
        page.figure(
            figures.map_figure({page.t("calibration.map", documents=n): counts}, theme=theme(), lang=lang()),
            alt=page.t("calibration.alt"),
            finding=figures.describe_holes(log, n, lang()),
            rows=lambda: figures.map_rows({"tokens": counts}),
        )
        page.figure(
            figures.holes_figure(log, n, theme=theme(), lang=lang()),
            alt=page.t("calibration.alt_curve"),
            finding=page.t("calibration.curve"),
            rows=lambda: figures.hole_rows(log),
        )
    found = figures.closings(log, n, RECENT)
    if found:
        st.markdown(page.t("calibration.recent"))
        texts = corpus.sample(corpus.CALIBRATION_DOMAIN, CALIBRATION_SEED, found[0][0])
        page.table((">document", "slot", "opening"), [_closing_row(at, slots, texts[at - 1]) for at, slots in found])
    page.prose("calibration.text")


def _closing_row(document: int, slots: list[tuple[int, int]], text: str) -> tuple[str, str, str]:
    named = listed(f"L{layer} E{expert}" for layer, expert in slots[:NAMED])
    more = f" + {len(slots) - NAMED}" if len(slots) > NAMED else ""
    return str(document), named + more, " ".join(text.split()[:9]) + " …"


# ------------------------------------------------------------------ the planner


def ahead(pilot: int, documents: int) -> list[int]:
    """Where the predicted curve has its points: a dozen, evenly spaced in the logarithm."""
    steps = np.geomspace(pilot, documents, 12).round().astype(int).tolist()
    return sorted({pilot, documents, *steps})


@st.cache_resource(max_entries=64, show_spinner=False)
def plans_of(text: str, pilot: int, documents: int) -> tuple[Plan, ...]:
    """The plan from the first documents of a recorded text."""
    return planner.plan_unseen(log_of(text).part(0, pilot), ahead(pilot, documents))


@st.cache_resource(max_entries=16, show_spinner=False)
def checks_of(pilot: int, documents: int) -> tuple[HeldOut, ...]:
    """Every held-out run of every text."""
    return planner.check_planner({text: log_of(text) for text in TEXTS}, pilot, documents)


def _ask_plan(page: Lesson) -> bool:
    text, pilot, documents = ASKED
    log = log_of(text)
    now, later = (int(log.holes_after()[at]) for at in (pilot, documents))
    share = later / now
    return predict.ask(
        f"{PAGE}.predict.plan",
        ("few", "half", "most"),
        answer="few" if share <= 0.25 else "half" if share <= 0.7 else "most",
        pilot=pilot,
        documents=documents,
        times=exact(documents / pilot),
        tokens=f"{int(log.tokens_after()[pilot]):,}",
        now=now,
        of=log.counts[0].size,
        later=later,
        eighth=round(now * pilot / documents),
        middle=round(now / 2),
        mixed=int(log_of("all").holes_after()[pilot]),
    )


def planner_part(page: Lesson) -> None:
    """Predict, then show what came, then how often the interval held elsewhere."""
    view = page.view
    if not _ask_plan(page):
        return
    stage, side = page.stage()
    with side:
        st.selectbox(
            page.t("planner.text"), TEXTS, format_func=lambda name: page.t(f"text.{name}"), **view.widget("plan")
        )
        st.select_slider(
            page.t("planner.pilot"), PILOTS, format_func=lambda n: page.t("documents", n=int(n)), **view.widget("pilot")
        )
        st.select_slider(
            page.t("planner.target"), TARGETS, format_func=lambda n: page.t("documents", n=f"{int(n):,}"),
            **view.widget("target"),
        )  # fmt: skip
        st.toggle(page.t("planner.came"), **view.widget("came"))
        text, pilot, target = view["plan"], int(view["pilot"]), int(view["target"])
        log, plans = log_of(text), plans_of(text, pilot, target)
        came = int(log.holes_after()[target])
        page.finding(
            "planner.seen" if not view["came"] else "planner.held" if plans[-1].holds(came) else "planner.missed",
            low=plans[-1].low,
            high=plans[-1].high,
            now=plans[-1].unseen_now,
            came=came,
            target=f"{target:,}",
            rare=plans[-1].rare,
            up_to=plans[-1].rare_up_to,
            together=four(plans[-1].together),
        )
    with stage:
        page.figure(
            plan_figures.plan_figure(log, plans, view["came"], theme=theme(), lang=lang()),
            alt=page.t("planner.alt"),
            finding=plan_figures.describe_plan(plans[-1], lang()),
            rows=lambda: plan_figures.plan_rows(log, plans, view["came"]),
        )
    page.prose("planner.method", level=percent(planner.LEVEL))
    page.heading("planner.check")
    checks = checks_of(pilot, target)
    names = {text: page.t(f"text.{text}") for text in TEXTS}
    page.figure(
        plan_figures.check_figure(checks, names, theme=theme(), lang=lang()),
        alt=page.t("planner.alt_check"),
        finding=plan_figures.describe_check(checks, lang()),
        rows=lambda: plan_figures.check_rows(checks),
    )
    page.table(
        ("text", ">runs", ">held", ">pilot_holes", ">target_holes"), [_check_row(names, checks, t) for t in TEXTS]
    )
    shortest = [check for check in checks_of(int(PILOTS[0]), int(TARGETS[0])) if check.text == "all"]
    page.prose(
        "planner.text_below",
        pilot=int(PILOTS[0]),
        target=int(TARGETS[0]),
        held=sum(check.held for check in shortest),
        of=len(shortest),
    )


def _check_row(names: dict[str, str], checks: Sequence[HeldOut], text: str) -> tuple[str, ...]:
    mine = [check for check in checks if check.text == text]
    return (
        names[text],
        str(len(mine)),
        str(sum(check.held for check in mine)),
        f"{np.mean([check.plan.unseen_now for check in mine]):.1f}",
        f"{np.mean([check.actual for check in mine]):.1f}",
    )
