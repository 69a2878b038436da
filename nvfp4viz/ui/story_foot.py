"""The foot of the story page: its snippet's values, and its data as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvfp4viz.figures.backends import scoreboard_rows
from nvfp4viz.figures.coverage import coverage_rows
from nvfp4viz.serving import ALLOCATORS
from nvfp4viz.serving.remedies import REMEDIES
from nvfp4viz.ui import caches, story_runs
from nvfp4viz.ui.export import about
from nvfp4viz.ui.story_chain import links_of, titles

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson

Rows = list[dict[str, Any]]


def foot(page: Lesson) -> None:
    """Code, sources, downloads, link.  Rows are made when somebody asks for them."""
    view = page.view
    build = story_runs.holed(view["fate"], view["seed"])
    load = {"sample": build.sample, "backend": build.backend, "slots_read_as": build.allocator, "seed": build.seed}
    asked = load | {"prompt": story_runs.prompt(view["prompt"])}
    page.foot(
        code={
            "prompt": view["prompt"],
            "bf16": story_runs.BF16.sample,
            "broken": build.sample,
            "fate": build.allocator,
            "seed": build.seed,
            "tokens": story_runs.TOKENS,
        },
        data={
            "replies": lambda: replies(view["seed"]),
            "coverage": lambda: about(
                asked,
                coverage_rows(
                    story_runs.coverage(build), story_runs.overlay(story_runs.run(build, view["prompt"])[1].generation)
                ),
            ),
            "chain": lambda: about(asked, chain_rows(build, view["prompt"])),
            "remedies": lambda: about(load, remedy_rows(build)),
        },
    )


def replies(seed: int) -> Rows:
    """Every prompt in BF16, fully calibrated, and under every fate of the unwritten slots."""
    builds = [story_runs.BF16, story_runs.FULL, *(story_runs.holed(fate, seed) for fate in ALLOCATORS)]
    rows: Rows = []
    for build in builds:
        for name in story_runs.PROMPT_IDS:
            reply, timed = story_runs.run(build, name)
            rows.append(
                {
                    "sample": build.sample,
                    "backend": build.backend,
                    "slots_read_as": build.allocator if build.sample == story_runs.HOLED else "",
                    "seed": build.seed if build.sample == story_runs.HOLED else "",
                    "prompt": reply.prompt,
                    "reply": "".join(reply.tokens),
                    "tokens": len(reply.token_ids),
                    "padding": reply.pads,
                    "seconds": timed.seconds,
                    "experts_computed_on": timed.computed_on,
                }
            )
    return rows


def chain_rows(build: caches.Build, prompt_id: str) -> Rows:
    """The chain's numbers, one row a quantity; none where no route meets an unwritten slot."""
    found, twin = caches.chain(build, story_runs.FULL, story_runs.prompt(prompt_id), story_runs.TOKENS)
    if found is None:
        return []
    names = titles()
    return [
        {"link": names[link.id], "quantity": name, "this_load": hole, "calibrated_twin": other}
        for link in links_of(found, twin)
        for name, hole, other in link.rows
    ]


def remedy_rows(build: caches.Build) -> Rows:
    """Every remedy's verdict, cost, replies and losses."""
    results = {name: caches.remedy(name, build, story_runs.FULL, story_runs.ask()) for name in REMEDIES}
    return scoreboard_rows(results, story_runs.PROMPT_IDS)
