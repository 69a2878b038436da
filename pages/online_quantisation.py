"""Online quantisation: three ways to pack at load, memory and launches, tensor-parallel maxima, per-token scales."""

from nvfp4viz.figures import online as figures
from nvfp4viz.ui import lesson, state
from nvfp4viz.ui import online_memory as memory
from nvfp4viz.ui import online_parts as parts
from nvfp4viz.ui import online_token as token
from nvfp4viz.ui.export import about
from nvfp4viz.ui.loading_parts import PROMPT, PROMPTS, TOKENS
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page(
    "online_quantisation",
    part=state.choice(parts.PARTS, default=parts.PARTS[0]),
    layer=state.integer(0, 3, default=0),
    w=state.choice(parts.WEIGHTS, default=parts.WEIGHTS[0]),
    n=state.integer(0, 999, default=0),
    shape=state.choice(tuple(figures.SHAPES), default="tiny_moe"),
    tp=state.choice(parts.RANKS, default=parts.RANKS[0]),
    p=state.choice(PROMPTS, default=PROMPT),
    row=state.choice(token.ROWS, default="zero"),
)
view = page.view

PARTS = {
    "ways": parts.ways_part,
    "memory": memory.memory_part,
    "ranks": parts.ranks_part,
    "token": token.token_part,
}
PARTS[page.parts("part", parts.PARTS)](page)

of = {"checkpoint": parts.SAMPLE, "layer": view["layer"], "weight": view["w"]}
part = view["part"]
page.foot(
    # The page's own file shows the first part.
    snippet=None if part == parts.PARTS[0] else f"online_quantisation_{part}",
    code={
        "layer": view["layer"],
        "weight": view["w"],
        "n": view["n"],
        "shape": figures.SHAPES[view["shape"]],
        "ranks": int(view["tp"]),
        "prompt": view["p"],
        "tokens": TOKENS,
        "row": token.ROWS.index(view["row"]),
    },
    data={
        "ways": lambda: about(of, figures.way_rows(parts.shown_ways(page))),
        "peak_memory": lambda: memory.rows_of(page),
        "ranks": lambda: about(of, figures.rank_rows(parts.shown_ranks(page))),
        "per_token": token.token_rows,
    },
)
