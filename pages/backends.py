"""Backends: who serves a checkpoint on which GPU, which scales they read, and what helps where one is missing."""

from dataclasses import asdict

from nvfp4viz.figures import backends as figures
from nvfp4viz.figures.mxfp4 import LAYERS
from nvfp4viz.serving import selection_linear as linear
from nvfp4viz.serving import selection_mxfp4 as mx
from nvfp4viz.serving.selection import ACTIVATIONS, GPUS, PARALLEL, SCHEMES, select_moe
from nvfp4viz.serving.selection_cost import RANKS
from nvfp4viz.ui import backends_defaults as defaults
from nvfp4viz.ui import backends_opening as opening
from nvfp4viz.ui import backends_other as other
from nvfp4viz.ui import backends_parts as parts
from nvfp4viz.ui import backends_remedies as remedies
from nvfp4viz.ui import lesson, snippets, state
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page(
    parts.PAGE,
    part=state.choice(parts.PARTS, default=parts.PARTS[0]),
    gpu=state.choice(GPUS, default="sm_120"),
    act=state.choice(ACTIVATIONS, default="silu"),
    scheme=state.choice(SCHEMES, default="W4A4"),
    par=state.choice(PARALLEL, default="tp"),
    fi=state.flag(default=True),
    hum=state.flag(),
    limit=state.flag(),
    m8=state.flag(),
    pick=state.choice(parts.PICKS, default="auto"),
    shape=state.choice(tuple(LAYERS), default="deepseek_v4_flash"),
    ranks=state.option(RANKS, default=1),
    lin=state.choice(linear.LINEAR_SCHEMES, default="W4A4"),
    fp4=state.flag(default=True),
    inv=state.flag(),
    off=state.choice(other.DISABLED, default="none"),
    lpick=state.choice(other.LINEAR_PICKS, default="auto"),
    model=state.choice(mx.MODELS, default="gpt-oss"),
    want=state.choice(mx.WANTED, default="none"),
    form=state.choice(mx.FORMATS, default="standard"),
    mpick=state.choice(other.MX_PICKS, default="auto"),
)
page.view.put(ranks=int(page.view["ranks"]))

part = page.parts("part", parts.PARTS)
if part == "moe":
    opening.experts_part(page)
elif part == "linear":
    other.linear_part(page)
elif part == "mxfp4":
    other.mxfp4_part(page)
elif part == "defaults":
    defaults.defaults_part(page)
else:
    remedies.remedies_part(page)

request, layers, mxfp4 = parts.moe_request(page), other.linear_request(page), other.mx_request(page)
ran = part == "remedies"
page.foot(
    snippet="backends_remedies" if ran else None,
    run=remedies.run_snippet if ran else snippets.run,
    code=remedies.snippet()
    if ran
    else {
        **parts.cost_values(page),
        **{f"moe_{name}": value for name, value in asdict(request).items()},
        **{f"linear_{name}": value for name, value in asdict(layers).items()},
        **{f"mxfp4_{name}": value for name, value in asdict(mxfp4).items()},
    },
    data={
        "nvfp4_experts": lambda: parts.rows_of(request, select_moe(request)),
        "nvfp4_linear": lambda: parts.rows_of(layers, linear.select_linear(layers)),
        "mxfp4_experts": lambda: parts.rows_of(mxfp4, mx.select_mxfp4(mxfp4)),
        "defaults": defaults.default_rows,
        "stored": lambda: parts.stored_rows(page, request),
        "scoreboard": remedies.scoreboard,
        "remedies": lambda: figures.loss_rows(remedies.everything()),
    },
)
