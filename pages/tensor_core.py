"""Inside the tensor core: one step bit by bit, and how far a whole GEMM lies from float32 arithmetic."""

from nvfp4viz.figures import tensor_core as facts
from nvfp4viz.ui import lesson, state
from nvfp4viz.ui import tensor_core_parts as parts
from nvfp4viz.ui.export import about
from nvfp4viz.ui.shell import ensure_shell
from nvfp4viz.ui.tensor_core_lab import RULES, SLOTS

usual = facts.DEFAULT

ensure_shell()
page = lesson.open_page(
    "tensor_core",
    part=state.choice(parts.PARTS, default=parts.PARTS[0]),
    kind=state.choice(facts.KINDS, default=usual.kind),
    a=state.hex_digits(len(usual.a), default=usual.a),
    b=state.hex_digits(len(usual.b), default=usual.b),
    sa=state.hex_digits(len(usual.sa), default=usual.sa),
    sb=state.hex_digits(len(usual.sb), default=usual.sb),
    ua=state.hex_digits(len(usual.ua), default=usual.ua),
    ub=state.hex_digits(len(usual.ub), default=usual.ub),
    c=state.real(default=usual.c),
    rule=state.integer(1, len(RULES), default=len(RULES)),
    slot=state.integer(0, SLOTS - 1, default=3),
    against=state.choice(("float32", "exact"), default="float32"),
    signs=state.choice(facts.SIGNS, default="signed"),
    spread=state.option(facts.SPREADS, default=8.0),
    k=state.option(facts.LENGTHS, default=1024.0),
)
view = page.view

part = page.parts("part", parts.PARTS)
if part == "step":
    seen = parts.step_part(page)
else:
    parts.difference_part(page)
    seen = facts.explain(parts.settings_of(page))

nvfp4 = view["kind"] == "nvfp4"
page.foot(
    code={
        "kind": view["kind"],
        "a": view["a"],
        "b": view["b"],
        "a_scales": view["sa" if nvfp4 else "ua"],
        "b_scales": view["sb" if nvfp4 else "ub"],
        "c": seen.c,
        "k": int(view["k"]),
        "spread": int(view["spread"]),
        "signs": view["signs"],
        "against": view["against"],
    },
    data={
        "step_elements": lambda: about({"kind": view["kind"], "c": seen.c}, facts.element_rows(seen)),
        "step_terms": lambda: about(parts.told(page), facts.term_rows(seen)),
        "gemm_outputs": lambda: parts.difference_rows(page),
    },
)
