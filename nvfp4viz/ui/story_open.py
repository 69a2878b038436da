"""The first three steps of the story: it answers, it is served, and where its holes are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.errors import NvError
from nvfp4viz.figures.coverage import STATUSES, CoverageGrid, describe_coverage, describe_routes, meet
from nvfp4viz.ui import errors, predict, story_runs
from nvfp4viz.ui.coverage_map import coverage_map
from nvfp4viz.ui.device_line import name_of
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.numbers import four, hex_f32, near
from nvfp4viz.ui.pick import pick_one
from nvfp4viz.ui.story import workshop
from nvfp4viz.ui.story_cards import card, cards, server_json, waiting

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson
    from nvfp4viz.ui.story_cards import Reply


def _pair(page: Lesson, prompt_id: str, text: str | None = None, *, kind: str = "") -> tuple[Reply, Reply]:
    """The same prompt in BF16 and as NVFP4, side by side; each card fills as soon as its run is done."""
    place = st.empty()
    asked = story_runs.prompt(prompt_id) if text is None else text
    builds = ((story_runs.BF16, "bf16"), (story_runs.holed(page.view["fate"], page.view["seed"]), "nvfp4"))
    parts = [waiting(page.t(f"card.{title}"), asked, page.t("card.running")) for _, title in builds]
    found = []
    with errors.passing(place):
        for index, (build, title) in enumerate(builds):
            with place:
                cards(parts, tall=workshop(), kind=kind)
            reply, timed = story_runs.run(build, prompt_id, text)
            seconds, device = four(timed.seconds), name_of(timed.computed_on)
            foot = page.t("card.foot", n=len(reply.token_ids), pads=reply.pads, seconds=seconds, device=device)
            parts[index] = card(page.t(f"card.{title}"), page.t("card.status"), reply, foot)
            found.append(reply)
    with place:
        cards(parts, tall=workshop(), kind=kind)
    return found[0], found[1]


def answers(page: Lesson) -> None:
    """Step 1: one prompt both ways, then what the BF16 model can do, then the reader's own prompt."""
    bf16, nvfp4 = _pair(page, "arithmetic", kind="hero")
    text = shown_answer(bf16)
    if nvfp4.silent:
        page.finding("answers.finding", answer=text, token=nvfp4.token_ids[0], n=len(nvfp4.token_ids))
    else:
        page.finding("answers.finding_fine", answer=text, n=len(nvfp4.token_ids))
    page.heading("answers.also")
    place = st.empty()
    others = [name for name in story_runs.PROMPT_IDS if name != "arithmetic"]
    parts = [waiting(page.t(f"prompts.{name}"), story_runs.prompt(name), page.t("card.running")) for name in others]
    with errors.passing(place):
        for index, name in enumerate(others):
            with place:
                cards(parts, tall=workshop())
            parts[index] = card(page.t(f"prompts.{name}"), "BF16", story_runs.run(story_runs.BF16, name)[0])
    with place:
        cards(parts, tall=workshop())
    config = story_runs.model_config()
    page.prose(
        "answers.model",
        parameters=f"{config.parameter_count:,}",
        layers=config.num_hidden_layers,
        experts=config.num_experts,
        top_k=config.top_k_experts,
    )
    if not workshop():
        own(page)


def own(page: Lesson) -> None:
    """The reader's own prompt, both ways; what the model cannot read is said, and the page goes on."""
    asked = st.text_input(
        page.t("answers.own_label"),
        placeholder=page.t("answers.own_placeholder"),
        help=page.t("answers.own_help", n=story_runs.MOST_CHARACTERS),
        **page.view.widget("ask"),
    )
    if not asked:
        return
    try:
        _pair(page, "own", story_runs.checked(asked))
    except NvError as error:
        errors.show(error, key="own_prompt")


def shown_answer(reply: Reply) -> str:
    """An answer inside a sentence: one line, no special tokens, not too long."""
    text = "".join(token for token, number in zip(reply.tokens, reply.token_ids, strict=True) if number > 2)
    line = " ".join(text.split())
    return errors.escape(line if len(line) <= 40 else line[:40] + "…").replace("\\", "")


def pick_prompt(page: Lesson) -> str:
    """The prompt that a step looks at."""
    pick_one(page, "prompt", story_runs.PROMPT_IDS, label="prompts.label", texts="prompts")
    return str(page.view["prompt"])


def served(page: Lesson) -> None:
    """Step 2: predict which prompts fail; then the replies, and what a client receives."""
    page.prose("served.lead")
    fate = page.view["fate"]
    build = story_runs.holed(fate, page.view["seed"])
    replies = {name: story_runs.run(build, name)[0] for name in story_runs.PROMPT_IDS}
    stage, side = page.stage()
    with side:
        seen = predict.ask("empty_answer.predict.which", OPTIONS, which(replies))
    with stage:
        drawn = []
        for name, reply in replies.items():
            title = page.t(f"prompts.{name}")
            if seen:
                foot = page.t("card.foot_plain", n=len(reply.token_ids), pads=reply.pads)
                drawn.append(card(title, page.t("card.status"), reply, foot))
            else:
                drawn.append(waiting(title, reply.prompt, page.t("card.covered")))
        cards(drawn, tall=workshop(), kind="rows")
    if not seen:
        return
    silent = sum(reply.silent for reply in replies.values())
    with side:
        key = "served.finding" if silent else "served.finding_none"
        page.finding(key, silent=silent, all=len(replies), status=page.t("card.status"))
        st.caption(page.t("served.fate_note", fate=page.t(f"fates.{fate}")))
    page.heading("served.reply")
    left, right = page.stage()
    with right:
        name = pick_prompt(page)
        skip = st.toggle(page.t("served.skip"), key="story.skip_special")
        st.markdown(page.t("served.skip_note"))
        st.caption(page.t("served.shape_note"))
    with left:
        st.code(server_json(replies[name], build.sample, skip_special_tokens=skip), language=None, wrap_lines=True)


OPTIONS = ("all", "not_news", "only_arithmetic", "none")


def which(replies: dict[str, Reply]) -> str:
    """The option that says which prompts fell silent."""
    silent = frozenset(name for name, reply in replies.items() if reply.silent)
    if not silent:
        return "none"
    if len(silent) == len(replies):
        return "all"
    return "only_arithmetic" if silent == {"arithmetic"} else "not_news"


def holes(page: Lesson) -> None:
    """Step 3: the coverage map with this prompt's routes over it."""
    build = story_runs.holed(page.view["fate"], page.view["seed"])
    grid = story_runs.coverage(build)
    name = pick_prompt(page)
    overlay = story_runs.overlay(story_runs.run(build, name)[1].generation)
    view = page.view
    chosen = (view["layer"], view["expert"]) if view["layer"] is not None and view["expert"] is not None else None
    role, pick = coverage_map(
        grid, key="story.map", role=view["role"], overlay=overlay, selected=chosen, tall=workshop()
    )
    if pick is not None:
        view.put(layer=pick.layer, expert=pick.expert)
    view.put(role=role)
    said, slot = st.columns((3, 2), gap="large")
    with said:
        page.finding("sentence", text=describe_routes(grid, overlay, role, lang()))
        st.markdown(describe_coverage(grid, role, lang()))
        met = {
            other: meet(grid, story_runs.overlay(story_runs.run(build, other)[1].generation), role)
            for other in story_runs.PROMPT_IDS
        }
        each = page.t("map.separator").join(
            page.t("map.per_prompt_row", name=page.t(f"prompts.{other}"), into=m.into_holes, routes=m.routes)
            for other, m in met.items()
        )
        st.markdown(page.t("map.per_prompt", each=each))
    with slot, st.container(border=True):
        _slot(page, grid, role)
    if not workshop():
        page.prose("map.role_note")


def _slot(page: Lesson, grid: CoverageGrid, role: str) -> None:
    """What the chosen cell's slot holds."""
    layer, expert = page.view["layer"], page.view["expert"]
    if layer not in grid.layers or expert is None or expert >= grid.experts:
        st.caption(page.t("map.cell_hint"))
        return
    row = grid.layers.index(layer)
    r = grid.roles.index(role)
    count = "?" if grid.counts is None else int(grid.counts[row, expert])
    if STATUSES[grid.status[r, row, expert]] == "missing":
        st.markdown(page.t("map.cell_hole", layer=layer, expert=expert, count=count, role=role))
    else:
        value = grid.values[r, row, expert]
        st.markdown(
            page.t(
                "map.cell_fine",
                layer=layer,
                expert=expert,
                count=count,
                role=role,
                value=near(value),
                bits=hex_f32(value),
            )
        )
