"""Dataflow: a layer in nine steps with its real tensors, a healthy and a faulty twin side by side."""

from nvfp4viz.errors import NvError
from nvfp4viz.figures import dataflow as facts
from nvfp4viz.moe.dataflow import SCALE_ROW_TILE
from nvfp4viz.moe.steps import STEPS
from nvfp4viz.serving.loader import ALLOCATORS
from nvfp4viz.serving.twins import TWINS
from nvfp4viz.ui import dataflow_parts as parts
from nvfp4viz.ui import errors, lesson, state
from nvfp4viz.ui.dataflow_lab import dataflow_lab
from nvfp4viz.ui.export import about
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page(
    "dataflow",
    step=state.in_browser(state.integer(1, len(STEPS))),
    route=state.in_browser(state.integer(0, parts.MOST * parts.TOP_K - 1)),
    prompt=state.choice(parts.PROMPTS, default="arithmetic"),
    ask=state.text(),
    layer=state.integer(0, parts.LAYERS - 1, default=0),
    fate=state.choice(ALLOCATORS, default="zeros"),
    seed=state.integer(0, parts.MOST_SEED, default=0),
    twin=state.choice(TWINS, default=TWINS[0]),
)
view = page.view

stage, side = page.stage()
twins = None
with side:
    revealed = parts.ask(page)
    parts.controls(page)
    try:
        prompt = parts.prompt_of(page)
        if prompt is None:
            page.prose("side.own_waiting", n=parts.MOST)
        else:
            twins = parts.twins_of(prompt, view["layer"], view["fate"], view["seed"], view["twin"])
    except NvError as error:
        errors.show(error)
    if twins is not None:
        if revealed:
            parts.findings(page, twins)
        parts.notes(page, twins)
    page.glossary("input_scale", "block_scale", "gemm", "calibration")
if twins is not None:
    with stage:
        dataflow_lab(view, twins, covered=not revealed)
    if revealed:
        parts.tables(page, twins)
page.prose("details.text", version=parts.VERSION, tile=SCALE_ROW_TILE)

of = parts.told(page, prompt) if twins is not None else {}
page.foot(
    code={
        "prompt": view["prompt"],
        "own": list((view["ask"] or "").encode()) if view["prompt"] == "own" else [],
        "layer": view["layer"],
        "fate": view["fate"],
        "seed": view["seed"],
        "twin": view["twin"],
        "most": parts.MOST,
    },
    data={}
    if twins is None
    else {
        "dataflow_routes": lambda: about(of, facts.route_rows(twins)),
        "dataflow_experts": lambda: about(of, facts.expert_rows(twins)),
    },
)
