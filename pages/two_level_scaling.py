"""Two-level scaling: a block through the kernel's operations, and why one level of scales is not enough."""

from nvfp4viz.figures import scaling
from nvfp4viz.quant import NVFP4_RECIPES
from nvfp4viz.ui import lesson, scaling_parts, state
from nvfp4viz.ui.export import about
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page(
    "two_level_scaling",
    part=state.choice(scaling_parts.PARTS, default=scaling_parts.PARTS[0]),
    x=state.numbers(scaling_parts.COUNT, default=scaling.BLOCKS["typical"]),
    amax=state.option(scaling.AMAX_STOPS, default=scaling.TENSOR_AMAX["typical"]),
    scale=state.real(),
    recipe=state.choice(NVFP4_RECIPES, default="vllm-cuda"),
    step=state.integer(0, 15, default=6),
    on=state.choice(scaling_parts.BLOCKS_TO_COMPARE, default="contested"),
    factor=state.option(scaling.HEADROOM_FACTORS, default=1.0),
)

part = page.parts("part", scaling_parts.PARTS)
trace = scaling_parts.trace_of(page)
if part == "block":
    trace = scaling_parts.block_part(page)
elif part == "input_scale":
    scaling_parts.input_scale_part(page)
elif part == "headroom":
    scaling_parts.headroom_part(page)
elif part == "ladder":
    scaling_parts.ladder_part(page)
elif part == "map":
    scaling_parts.map_part(page)
elif part == "recipes":
    scaling_parts.recipes_part(page)

of = {"recipe": trace.recipe, "global_scale": float(trace.global_scale)}
page.foot(
    code={
        "x": [float(value) for value in trace.x],
        "scale": float(trace.global_scale),
        "recipe": trace.recipe,
    },
    data={
        "block_elements": lambda: about(of, scaling.trace_rows(trace)),
        "block_steps": lambda: about(
            of | {"block": " ".join(map(state.repr_number, trace.x))}, scaling.step_rows(trace)
        ),
        "headroom": scaling_parts.headroom_rows,
        "granularity": scaling_parts.ladder_rows,
    },
)
