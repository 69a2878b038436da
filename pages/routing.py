"""Routing: who receives tokens, who never does, and how much text it takes to find out."""

from nvfp4viz.figures import planner as plan_figures
from nvfp4viz.figures import routing as figures
from nvfp4viz.ui import lesson, router_parts, routing_run, state
from nvfp4viz.ui import routing_parts as parts
from nvfp4viz.ui.export import about
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page(
    "routing",
    part=state.choice(parts.PARTS, default=parts.PARTS[0]),
    source=state.choice(parts.SOURCES, default=parts.SOURCES[0]),
    text=state.choice(parts.TEXTS, default="arithmetic"),
    ask=state.text(),
    n=state.option(parts.stops(), default=16.0),
    plan=state.choice(parts.TEXTS, default="code"),
    pilot=state.option(parts.PILOTS, default=64.0),
    target=state.option(parts.TARGETS, default=512.0),
    came=state.flag(),
    logits=state.numbers(router_parts.EXPERTS, default=router_parts.LOGITS),
    bias=state.numbers(router_parts.EXPERTS, default=router_parts.BIAS, most=router_parts.MOST_BIAS),
    token=state.integer(0, router_parts.VOCABULARY - 1, default=5),
    scaling=state.number(0.125, 16, default=1.0),
)
view = page.view

DRAW = {
    "map": parts.map_part,
    "calibration": parts.calibration_part,
    "planner": parts.planner_part,
    "run": routing_run.run_part,
    "routers": router_parts.routers_part,
}
DRAW[page.parts("part", parts.PARTS)](page)

pilot, target = int(view["pilot"]), int(view["target"])
page.foot(
    code={
        **parts.map_code(page),
        "texts": parts.kinds_of(view["plan"]),
        "documents": int(view["n"]),
        "pilot": pilot,
        "target": target,
        "logits": view["logits"],
        "bias": view["bias"],
        "token": view["token"],
        "table": router_parts.TABLE.tolist(),
        "scaling": view["scaling"],
        "k": router_parts.TOP,
        "groups": router_parts.GROUPS,
        "kept": router_parts.TOP_GROUPS,
        "image": router_parts.IMAGE_LO,
    },
    data={
        "routes": lambda: about(
            parts.told(page), figures.map_rows({"used": parts.used_of(page), "calibration": parts.seen()})
        ),
        "holes": lambda: figures.hole_rows(parts.log_of("calibration")),
        "plan": lambda: about(
            {"text": view["plan"], "pilot_documents": pilot, "target_documents": target},
            plan_figures.plan_rows(
                parts.log_of(view["plan"]), parts.plans_of(view["plan"], pilot, target), view["came"]
            ),
        ),
        "held_out_runs": lambda: about(
            {"target_documents": target}, plan_figures.check_rows(parts.checks_of(pilot, target))
        ),
        "routers": lambda: router_parts.rows_of(page),
    },
)
