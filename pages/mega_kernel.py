"""The mega-kernel: FP4 weights from packed bytes to the tensor core, FP8 between the products, against float64."""

from dataclasses import asdict, astuple

from nvfp4viz.figures import mega_kernel as figures
from nvfp4viz.figures.mega_stations import station_rows, stations
from nvfp4viz.formats.places import UTCCP_ROWS
from nvfp4viz.formats.tma import BOX_CODES, SWIZZLES
from nvfp4viz.moe.mega_kernel import SWIGLU_LIMIT
from nvfp4viz.ui import lesson, state
from nvfp4viz.ui import mega_kernel_parts as parts
from nvfp4viz.ui import mega_layout_parts as layouts
from nvfp4viz.ui.export import about
from nvfp4viz.ui.mega_step import RULES, SLOTS, term_rows
from nvfp4viz.ui.shell import ensure_shell

usual = layouts.USUAL

ensure_shell()
page = lesson.open_page(
    "mega_kernel",
    part=state.choice(parts.PARTS, default=parts.PARTS[0]),
    k=state.integer(0, BOX_CODES - 1, default=19),
    **{name: state.integer(0, layouts.LARGEST, default=getattr(usual, name)) for name in layouts.MAP_FIELDS},
    swizzle=state.choice(SWIZZLES, default=usual.swizzle),
    w=state.integer(0, UTCCP_ROWS - 1, default=33),
    r=state.integer(0, layouts.ROWS - 1, default=layouts.ROWS // 2),
    data=state.choice(figures.DATA, default=figures.DATA[0]),
    route=state.integer(0, parts.ROUTES - 1, default=0),
    group=state.integer(0, parts.GROUPS - 1, default=0),
    limit=state.option(parts.LIMITS, default=SWIGLU_LIMIT),
    step=state.choice(tuple(figures.STEPS), default="whole"),
    rule=state.integer(1, len(RULES), default=len(RULES)),
    slot=state.integer(0, SLOTS - 1, default=0),
)
view = page.view

DRAW = {
    "bytes": layouts.bytes_part,
    "scales": layouts.scales_part,
    "rows": layouts.rows_part,
    "between": parts.between_part,
    "step": parts.step_part,
    "layer": parts.layer_part,
}
DRAW[page.parts("part", parts.PARTS)](page)

found, step = parts.layer_of(page), figures.STEPS[view["step"]]
part = view["part"]
page.foot(
    # The page's own file shows the first part.
    snippet=None if part == parts.PARTS[0] else f"mega_kernel_{part}",
    code={name: view[name] for name in ("data", "k", "w", "r", "route", "group", "limit", "slot")}
    | {"map": astuple(layouts.wanted_map(page)), "rows": layouts.ROWS, "mix": layouts.MIX}
    | asdict(step),
    data={
        "stations": lambda: about({"data": view["data"]}, station_rows(stations(found))),
        "packed_codes": lambda: about({"data": view["data"]}, layouts.code_rows(page)),
        "scale_words": lambda: about({"data": view["data"]}, layouts.scale_rows(page)),
        "interleaved_rows": layouts.interleaved_rows,
        "step_terms": lambda: about({"step": view["step"]}, term_rows(step, figures.explain_step(step))),
        "tensor_map": lambda: layouts.map_rows(page),
        "between": lambda: about(
            {"data": view["data"], "route": view["route"], "group": view["group"], "limit": view["limit"]},
            figures.between_rows(figures.between_of(found.run, view["route"], view["group"], view["limit"])),
        ),
        "effects": lambda: about({"data": view["data"]}, figures.effect_rows(found.error)),
        "bounds": lambda: about({"data": view["data"]}, figures.stage_rows(found.error)),
    },
)
