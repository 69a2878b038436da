"""Expert parallelism: experts on ranks, the all-to-all and its time, EPLB, and what a move leaves behind."""

from nvfp4viz.figures import expert_parallel as figures
from nvfp4viz.figures.mxfp4 import LAYERS
from nvfp4viz.moe.parallel import PAYLOADS, STRATEGIES, WAYS
from nvfp4viz.ui import expert_parallel_opening as opening
from nvfp4viz.ui import expert_parallel_parts as parts
from nvfp4viz.ui import expert_parallel_run as run
from nvfp4viz.ui import lesson, state
from nvfp4viz.ui.export import about
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page(
    "expert_parallel",
    part=state.choice(parts.PARTS, default=parts.PARTS[0]),
    layer=state.integer(0, parts.LAYERS_OF_MODEL - 1, default=1),
    ranks=parts.one_of(parts.RANKS, default=4),
    place=state.choice(STRATEGIES, default=STRATEGIES[0]),
    before=state.choice(parts.TRAFFIC, default="code"),
    now=state.choice(parts.TRAFFIC, default="code"),
    extra=state.integer(0, parts.MOST_EXTRA, default=1),
    window=state.integer(1, parts.HALF, default=parts.HALF),
    way=state.choice(WAYS, default="tokens"),
    payload=state.choice(PAYLOADS, default=PAYLOADS[0]),
    size=state.choice(tuple(LAYERS), default="deepseek_v4_flash"),
    overlap=state.choice(("off", "on"), default="on"),
    link=state.number(0.1, 10_000.0, default=200.0),
    latency=state.number(0.1, 1_000.0, default=10.0),
    flops=state.number(0.1, 100_000.0, default=1000.0),
    memory=state.number(0.1, 1_000.0, default=6.0),
    model=state.choice(tuple(run.MODELS), default="holes"),
    backend=state.choice(run.BACKENDS, default=run.BACKENDS[0]),
    procs=parts.one_of(run.PROCESSES, default=2),
    spread=state.choice(("linear", "eplb"), default="eplb"),
)

part = page.parts("part", parts.PARTS)
if part == "ranks":
    opening.ranks_part(page)
elif part == "sent":
    opening.sent_part(page)
elif part == "time":
    parts.time_part(page)
elif part == "balance":
    parts.balance_part(page)
elif part == "moves":
    run.moves_part(page)
elif part == "run":
    run.run_part(page)
else:
    run.offers_part(page)

ids, placed, layer = parts.layer_of(page)
hidden, payload, way = parts.size_of(page).hidden, page.view["payload"], page.view["way"]
ran = run.snippets(page).get(part)
page.foot(
    snippet=f"{parts.PAGE}_{part}" if ran else None,
    code=ran or parts.code_values(page),
    data={
        "slots": lambda: about(parts.told(page), figures.slot_rows(placed, layer)),
        "sent": lambda: about(
            parts.told(page, "way", "payload", "size"),
            figures.sent_rows(layer, layer.dispatch_bytes(hidden, payload, way), layer.combine_bytes(hidden, way)),
        ),
        "timeline": lambda: about(
            parts.told(page, "way", "payload", "size", "overlap", "link", "latency", "flops", "memory"),
            figures.bar_rows(parts.bars_of(page, 2 if page.view["overlap"] == "on" else 1)),
        ),
        "moves": lambda: run.moved_rows(page),
        "load": lambda: about(
            parts.told(page, "before", "extra", "window"), figures.balance_rows(parts.found_of(page))
        ),
    },
)
