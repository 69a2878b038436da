"""Fusion: which rows stand where, what one scale for several weights costs, and three kinds kept apart."""

from nvfp4viz.figures import fusion as figures
from nvfp4viz.ui import fusion_opening as opening
from nvfp4viz.ui import fusion_parts as parts
from nvfp4viz.ui import fusion_scale_parts as scales
from nvfp4viz.ui import lesson, state
from nvfp4viz.ui.export import about
from nvfp4viz.ui.pick import EXPERTS, LAYERS
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page(
    "fusion",
    part=state.choice(parts.PARTS, default=parts.PARTS[0]),
    tp=parts.rank_count(default=4),
    attn=state.choice(tuple(figures.ATTENTION), default="qwen3_30b"),
    ffn=state.choice(tuple(figures.INTERMEDIATE), default="qwen3_30b"),
    gdn=state.choice(tuple(figures.DELTANET), default="small"),
    which=state.choice(parts.WHICH, default=parts.WHICH[0]),
    rank=state.integer(0, parts.RANKS[-1] - 1, default=parts.FOLLOWED[0]),
    row=state.integer(0, None, default=parts.FOLLOWED[1]),
    what=state.choice(scales.WHAT, default=scales.WHAT[0]),
    layer=state.integer(0, LAYERS - 1, default=scales.ASKED_LAYER),
    expert=state.integer(0, EXPERTS - 1, default=0),
    stretch=state.option(scales.STRETCHES, default=1.0),
)
view = page.view

part = page.parts("part", parts.PARTS)
if part == "qkv":
    opening.qkv_part(page)
elif part == "w13":
    parts.w13_part(page)
elif part == "deltanet":
    parts.deltanet_part(page)
elif part == "scale":
    scales.scale_part(page)
elif part == "kinds":
    scales.kinds_part(page)
else:
    parts.unchanged_part(page)

measured = scales.snippet_of(page)
page.foot(
    snippet=f"fusion_{part}" if measured else None,
    code=measured
    or {
        "tp": view["tp"],
        "attention": figures.ATTENTION[view["attn"]],
        "intermediate": figures.INTERMEDIATE[view["ffn"]],
        "deltanet": figures.DELTANET[view["gdn"]],
        "rank": min(view["rank"], view["tp"] - 1),  # parts without a row to follow do not bound it
        "row": view["row"],
        "layer": scales.ASKED_LAYER,
        "experts": scales.MEASURED_EXPERTS,
    },
    data={
        "rows": lambda: [
            row for layout in parts.drawable(page) for row in about(parts.told(page, layout), figures.run_rows(layout))
        ],
        "shared_scale": lambda: scales.shared_rows(page),
        "fusions": lambda: figures.fusion_rows(scales.measured()),
    },
)
