"""E2M1: sixteen codes, how a number becomes one of them, and how codes are packed."""

import streamlit as st

from nvfp4viz import formats
from nvfp4viz.figures import e2m1 as facts
from nvfp4viz.ui import lesson, predict, state
from nvfp4viz.ui.bit_editor import bit_editor, number
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.numbers import exact, hex_nibble
from nvfp4viz.ui.packer import packer
from nvfp4viz.ui.shell import ensure_shell
from nvfp4viz.ui.theme import theme

PARTS = ("edges", "packing", "integers", "cards")

ensure_shell()
page = lesson.open_page(
    "e2m1",
    format=state.choice(tuple(formats.FORMATS), default=formats.E2M1.name),
    x=state.real(default=2.5),
    code=state.integer(0, None),
    codes=state.hex_digits(8, default="12345678"),
    part=state.choice(PARTS, default=PARTS[0]),
)
view = page.view
page.refine(code=state.integer(0, (1 << formats.FORMATS[view["format"]].bits) - 1))

stage, side = page.stage()
with stage:
    bit_editor(view)
with side:
    page.heading("try.title")
    presets = {"tie": 1.25, "saturate": 100.0, "lost": -0.2, "zero": -0.0, "nan": float("nan")}
    with st.container(horizontal=True, gap="small"):
        for name, x in presets.items():
            st.button(page.t(f"try.{name}"), key=f"e2m1.try.{name}", on_click=view.put, kwargs={"x": x, "code": None})
    shown, asked = facts.rounding_of(2.5), facts.rounding_of(3.5)
    predict.ask(
        "e2m1.predict.tie",
        ("down", "up"),
        answer="up" if asked.went_up else "down",
        first=exact(shown.x),
        first_stored=exact(shown.stored),
        x=exact(asked.x),
        down=exact(asked.lower),
        up=exact(asked.upper),
        stored=exact(asked.stored),
        bits=asked.bits,
    )
    page.glossary("e2m1", "tie", "saturation", "subnormal")

part = page.parts("part", PARTS)
if part == "edges":
    page.prose("edges.text")
    page.table(
        (">number", ">code", ">bits", ">stored", "klass"),
        [
            (
                exact(x),
                hex_nibble(row.code),
                f"`{row.bits}`",
                f"**{exact(row.value)}**",
                page.t(f"klass.{row.klass}"),
            )
            for x, row in zip(facts.EDGES, facts.edge_rows(), strict=True)
        ],
    )
elif part == "packing":
    page.prose("packing.text")
    packer(view)
elif part == "integers":
    product = facts.nibble_product(0x2, 0x3)
    revealed = predict.ask(
        "e2m1.predict.product",
        ("integers", "mistaken", "product"),
        answer="product",
        a=hex_nibble(product.a),
        b=hex_nibble(product.b),
        a_value=exact(product.a_value),
        b_value=exact(product.b_value),
        product=exact(product.product),
        integers=product.integers,
        mistaken=exact(product.mistaken),
    )
    if revealed:
        readings = facts.code_readings()
        page.figure(
            facts.code_readings_figure(readings, theme=theme(), lang=lang()),
            alt=page.t("integers.alt"),
            finding=facts.describe_code_readings(readings, lang()),
            rows=lambda: [{"code": r.code, "bits": r.bits, "e2m1": r.value, "integer": r.integer} for r in readings],
        )
elif part == "cards":
    page.prose("cards.text")
    page.table(
        ("format", "layout", ">bias", ">largest", ">smallest", ">infinity", ">nan", ">zero"),
        [
            (
                f"**{info.name.upper()}**",
                f"S{int(info.signed)} E{info.exponent_bits} M{info.mantissa_bits}",
                str(info.bias),
                exact(info.max_value),
                exact(info.min_subnormal),
                page.t(f"has.{info.has_infinity}"),
                page.t(f"has.{bool(info.nan_codes)}"),
                page.t(f"has.{info.has_zero}"),
            )
            for info in formats.FORMATS.values()
        ],
    )

page.foot(
    code={"format": view["format"], "x": number(view), "codes": view["codes"]},
    data={"e2m1_codes": facts.code_rows, "e2m1_rounding": facts.rounding_rows},
)
