"""Blocks in a GEMM: why sixteen neighbours along K share a scale, what it costs, and how it is stored."""

from nvfp4viz.figures import blocks as figures
from nvfp4viz.quant.grouping import GROUPINGS
from nvfp4viz.ui import blocks_parts as parts
from nvfp4viz.ui import blocks_tensor as tensor
from nvfp4viz.ui import errors, lesson, own_mark, state
from nvfp4viz.ui.pick import EXPERTS, LAYERS
from nvfp4viz.ui.samples import SAMPLE_IDS
from nvfp4viz.ui.shell import ensure_shell
from nvfp4viz.ui.swizzle_map import LAYOUTS

ensure_shell()
page = lesson.open_page(
    "blocks",
    part=state.choice(parts.PARTS, default=parts.PARTS[0]),
    along=state.choice(GROUPINGS, default="k"),
    m=state.integer(0, figures.INNER_ROWS - 1, default=3),
    n=state.integer(0, figures.INNER_ROWS - 1, default=5),
    data=state.choice(parts.DATA, default="outliers"),
    size=state.option(figures.SIZES, default=parts.ASKED),
    checkpoint=state.choice(SAMPLE_IDS, default="tiny-moe-nvfp4-holes"),
    origin=own_mark.setting(),
    of=state.choice(tensor.OF, default=tensor.OF[0]),
    tensor=tensor.TENSOR,
    stack=state.integer(0, None, default=0),
    take=state.choice(tensor.HOWS, default=tensor.HOWS[0]),
    row=state.integer(0, None, default=0),
    column=state.integer(0, None, default=0),
    layer=state.integer(0, None, default=0),
    expert=state.integer(0, None, default=0),
    projection=state.choice(tensor.PROJECTIONS, default=tensor.PROJECTIONS[0]),
    w_rows=state.integer(1, 65536, default=128),
    w_blocks=state.integer(1, 2048, default=4),
    e_row=state.integer(0, 65535, default=33),
    e_k=state.integer(0, 65535, default=83),
    layout=state.choice(LAYOUTS, default="128x4"),
    s_rows=state.integer(1, 1024, default=100),
    s_cols=state.integer(1, 64, default=6),
    s_row=state.integer(0, 1023, default=33),
    s_col=state.integer(0, 63, default=1),
)
view = page.view
tensor.mark(page)
# For every part: the code shown and the downloads ask for these places too.
page.bound(e_row=view["w_rows"] - 1, e_k=view["w_blocks"] * parts.K_STEP - 1)
page.bound(s_row=view["s_rows"] - 1, s_col=view["s_cols"] - 1)
if view["data"] != "checkpoint":
    page.refine(layer=state.integer(0, LAYERS - 1, default=0), expert=state.integer(0, EXPERTS - 1, default=0))
elif view["part"] == "error":
    with errors.boundary():
        tensor.settle(page)
if (view["part"], view["data"]) != ("error", "checkpoint"):
    tensor.leave(page)

part = page.parts("part", parts.PARTS)
if part == "inner":
    parts.inner_part(page)
elif part == "error":
    parts.error_part(page)
elif part == "shapes":
    parts.shapes_part(page)
else:
    parts.swizzle_part(page)

own = {
    "blocks_experts": parts.snippet_of_expert(page),
    "blocks_scales": parts.snippet_of_scales(page),
}
snippet = next((name for name, values in own.items() if values), "blocks")
plain = {name: view[name] for name in ("m", "n", "along", "size", "w_rows", "e_row", "e_k")}
plain["k"] = view["w_blocks"] * parts.K_STEP
page.foot(
    **tensor.shown_code(page) or {"snippet": snippet, "code": own.get(snippet) or plain},
    data={
        "inner_sum": lambda: parts.inner_rows(page),
        "grouping_error": lambda: parts.error_rows(page),
        "scale_offsets": lambda: parts.offset_rows(page),
        "scale_bytes": lambda: parts.byte_rows(page),
    },
    left_out=own_mark.left_out(page, tensor.MARK),
)
