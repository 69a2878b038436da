"""*Show me the code* of the page on loading: the snippet of each part, and what fills it.

Until a part's question is answered, its code prints what the page shows until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvfp4viz.serving.loader import ALLOCATORS
from nvfp4viz.serving.stages import STAGES
from nvfp4viz.ui import loading_cause as cause
from nvfp4viz.ui import loading_config as config
from nvfp4viz.ui import loading_parts as parts
from nvfp4viz.ui import predict, snippets

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson

Values = dict[str, object]


def snippet_of(page: Lesson) -> tuple[str, Values]:
    """Name and values of the open part's snippet."""
    view, shown = page.view, predict.revealed()
    allocators = ALLOCATORS if shown else ALLOCATORS[:1]
    # The load that answers well is what the question is about.
    opening = tuple(name for name in parts.OPENING if name != parts.OPENING[1])
    part = view["part"]
    if part == "fates":
        if not shown:
            return "loading", _fates(parts.PROMPT, parts.BACKENDS[0], 0, opening)
        return "loading", _fates(view["p"], view["b"], view["seed"], parts.ORDER)
    if part == "maxima":
        return "loading_maxima", _slot(page) if shown else parts.opening_slot()
    if part == "promotion":
        return "loading_promotion", _configs(page)
    if part == "chain":
        stages = STAGES if shown else ()
        slot = {name: view[name] for name in ("layer", "expert", "projection")}
        return "loading_chain", slot | {"backend": view["b"], "allocator": view["a"], "stages": stages}
    if part == "cause":
        run = {"prompt": view["p"], "allocator": view["a"], "seed": view["seed"]}
        return ("loading_cause", run | {"loads": cause.LOADS}) if shown else ("loading_harness", run)
    files = (view["file"],) if shown else ()
    measured = {"seed": view["seed"], "allocators": allocators, "files": files, "backend": view["b"]}
    return "loading_measures", measured


def _fates(prompt: str, backend: str, seed: int, allocators: tuple[str, ...]) -> Values:
    return {"prompt": prompt, "backend": backend, "seed": seed, "allocators": allocators}


def _slot(page: Lesson) -> Values:
    named = {name: page.view[name] for name in ("layer", "expert", "projection")}
    return named | {"value": parts.value_of(page)}


def _configs(page: Lesson) -> Values:
    """Both files as they are shown."""
    texts = config.texts_of(page) if predict.revealed() else config.example_texts(config.WEIGHT_ONLY)
    return {file: snippets.Written(text) for file, text in zip(config.FILES, texts, strict=True)}
