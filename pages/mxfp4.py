"""MXFP4 and NVFP4: two ways to scale the same codes, the rules that choose a scale, and who uses which."""

from nvfp4viz.figures import mxfp4 as figures
from nvfp4viz.figures.blocks import SIZES
from nvfp4viz.quant import schemes
from nvfp4viz.quant.recipes import MXFP4_RECIPES
from nvfp4viz.ui import lesson, state
from nvfp4viz.ui import mxfp4_parts as parts
from nvfp4viz.ui.export import about
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page(
    "mxfp4",
    part=state.choice(parts.PARTS, default=parts.PARTS[0]),
    data=state.choice(parts.DATA, default=parts.DATA[0]),
    mx=state.choice(MXFP4_RECIPES, default=parts.RULE),
    size=state.option(SIZES, default=10.0),
    layer=state.integer(0, 3, default=0),
    expert=state.integer(0, 63, default=0),
    w=state.choice(parts.WEIGHTS, default=parts.WEIGHTS[0]),
    on=state.choice(parts.BLOCKS, default=parts.BLOCKS[0]),
    top=state.option(parts.TOPS, default=parts.ASKED),
    row=state.integer(0, parts.ROWS - 1, default=0),
    run=state.integer(0, parts.RUNS - 1, default=0),
    rule=state.choice(MXFP4_RECIPES, default=parts.RULE),
    stored=state.choice(tuple(figures.LAYERS), default="deepseek_v4_flash"),
)
view = page.view
page.bound(run=parts.runs_of(view["w"]) - 1)

part = page.parts("part", parts.PARTS)
if part == "tensor":
    parts.tensor_part(page)
elif part == "rules":
    parts.rules_part(page)
elif part == "storage":
    parts.storage_part(page)
else:
    parts.models_part(page)

traces = schemes.compare_rules(parts.block_of(page))
exponent = parts.exponent_of(traces)
experts, matrices = figures.LAYERS[view["stored"]]
real = view["data"] == "tiny_moe"
page.foot(
    snippet="mxfp4_experts" if real else None,
    code={
        **{name: view[name] for name in (("layer", "expert", "w") if real else ("size",))},
        "mx": view["mx"],
        "x": [float(value) for value in parts.block_of(page)],
        "exponent": exponent,
        "rule": view["rule"],
        "matrices": matrices,
        "experts": experts,
    },
    data={
        "scheme_errors": lambda: about(parts.tensor_told(page), figures.error_rows(parts.found_of(page))),
        "scales_in_use": lambda: about(parts.tensor_told(page), figures.scale_rows(parts.found_of(page))),
        "block_elements": lambda: about(parts.block_told(page), figures.element_rows(traces)),
        "rule_steps": lambda: about({"binade": f"2^{exponent}"}, figures.run_rows(schemes.rule_binade(exponent))),
        "layer_bytes": lambda: about({"experts_of": view["stored"]}, figures.storage_rows(parts.bytes_of(page))),
        "models": figures.use_rows,
    },
)
