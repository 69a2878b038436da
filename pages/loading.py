"""Loading: one file and its fates, per-backend maxima, the weight-only rule, the stages, the cause, the guard."""

from nvfp4viz.figures import loading as figures
from nvfp4viz.serving.loader import ALLOCATORS
from nvfp4viz.ui import lesson, state
from nvfp4viz.ui import loading_cause as cause
from nvfp4viz.ui import loading_code as code
from nvfp4viz.ui import loading_config as config
from nvfp4viz.ui import loading_parts as parts
from nvfp4viz.ui.export import about
from nvfp4viz.ui.pick import EXPERTS, LAYERS
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page(
    "loading",
    part=state.choice(parts.PARTS, default=parts.PARTS[0]),
    p=state.choice(parts.PROMPTS, default=parts.PROMPT),
    b=state.choice(parts.BACKENDS, default=parts.BACKENDS[0]),
    seed=state.integer(0, 9, default=0),
    layer=state.integer(0, LAYERS - 1, default=0),
    expert=state.integer(0, EXPERTS - 1, default=9),
    projection=state.choice(parts.SLOTS, default="down"),
    v=state.choice(parts.VALUES, default="nan"),
    own=state.real(default=0.001),
    cfg=state.choice(tuple(config.EXAMPLES), default="null"),
    a=state.choice(ALLOCATORS, default="zeros"),
    file=state.choice(cause.GUARDED, default=cause.GUARDED[0]),
)
view = page.view

PARTS = {
    "fates": parts.fates_part,
    "maxima": parts.maxima_part,
    "promotion": config.promotion_part,
    "chain": config.chain_part,
    "cause": cause.cause_part,
    "guard": cause.guard_part,
}
PARTS[page.parts("part", parts.PARTS)](page)

snippet, values = code.snippet_of(page)
page.foot(
    snippet=snippet,
    code=values,
    data={
        "fates": lambda: about({"prompt": view["p"], "seed": view["seed"]}, figures.fate_rows(parts.shown_fates(page))),
        "spread": lambda: about(parts.slot_of(page), figures.spread_rows(parts.spreads_of(page))),
        "weight_only_rule": lambda: config.promotion_rows(page),
        "stages": lambda: config.stage_rows(page),
        "cause": lambda: cause.cause_rows(page),
        "guard": lambda: cause.guard_rows(page),
    },
    left_out=config.left_out_of_links(page),
)
