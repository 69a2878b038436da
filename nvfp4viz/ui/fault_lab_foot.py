"""The foot of the Fault lab: its snippet's values, and its downloads, which name their fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nvfp4viz.checkpoint import FAULTS
from nvfp4viz.figures.fault_lab import layers_rows
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving.fault_lab import FaultSpot
from nvfp4viz.ui.export import about
from nvfp4viz.ui.fault_lab import BACKENDS, BASE, SEEDED, TOKENS, Trial, logit_rows

if TYPE_CHECKING:
    from nvfp4viz.ui.fault_lab import Result
    from nvfp4viz.ui.lesson import Lesson


def told(done: Result) -> dict[str, object]:
    """The trial in words: columns that stand in every row to download.  A factor or seed that counts for nothing is
    None."""
    spot, spec = done.trial.spot, FAULTS[done.trial.spot.fault]
    return {
        "checkpoint": BASE,
        "fault": spot.fault,
        "fault_layer": spot.layer,
        "fault_expert": spot.expert,
        "fault_projection": spot.projection,
        "fault_role": spot.role,
        "fault_value": spec.value if spot.value is None else spot.value,
        "fault_seed": spot.seed if spot.fault in SEEDED else None,
        "backend": done.trial.backend,
        "prompt": done.trial.prompt,
    }


def stem(page: Lesson, what: str, done: Result) -> str:
    """A file's name without its ending: ``layers-scaled-layer0-expert9-down-input_scale-x1000-arithmetic``."""
    of = told(done)
    parts = [what, of["fault"], f"layer{of['fault_layer']}", f"expert{of['fault_expert']}"]
    parts += [of["fault_projection"], of["fault_role"]]
    if of["fault_value"] is not None:
        parts.append(f"x{of['fault_value']:g}")
    if of["fault_seed"] is not None:
        parts.append(f"seed{of['fault_seed']}")
    return "-".join(map(str, [*parts, page.view["prompt"], done.trial.backend]))


def downloads(page: Lesson, done: Result | None) -> dict[str, Callable[[], list[dict[str, object]]]]:
    """Both tables of the trial shown, each under a name of its own; none where nothing could be run."""
    if done is None:
        return {}
    return {
        stem(page, "layers", done): lambda: about(told(done), layers_rows(done.effect)),
        stem(page, "logits", done): lambda: about(told(done), logit_rows(done)),
    }


def code_values(page: Lesson, done: Result | None) -> dict[str, object]:
    """What the snippet is filled with: the trial shown, or the default one where none could be run."""
    trial = done.trial if done else Trial(FaultSpot("nan", 0, 0, "down"), BACKENDS[0], DEMO_PROMPTS["arithmetic"])
    spot = trial.spot
    return {
        "sample": BASE,
        "fault": spot.fault,
        "layer": spot.layer,
        "expert": spot.expert,
        "projection": spot.projection,
        "role": spot.role,
        "value": spot.value,
        "seed": spot.seed,
        "backend": trial.backend,
        "prompt": page.view["prompt"],
        "own": list((trial.prompt if page.view["prompt"] == "own" else "").encode()),
        "tokens": TOKENS,
    }
