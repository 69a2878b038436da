"""What the mega-kernel's numbers become: between the products, in one step, in the whole layer; parts of the page."""

from __future__ import annotations

import numpy as np
import streamlit as st

from nvfp4viz.figures import mega_kernel as figures
from nvfp4viz.figures.scaling import power_of_two
from nvfp4viz.figures.tensor_core import three
from nvfp4viz.moe.mega_kernel import E4M3_MAX, GROUP, STAGING_FLOOR, SWIGLU_LIMIT
from nvfp4viz.moe.mega_kernel_error import SILU_SLOPE
from nvfp4viz.quant.tensor_core_k32_step import FRACTION_BITS_K32, STEP_K32
from nvfp4viz.quant.tensor_core_step import F32_FRACTION_BITS
from nvfp4viz.ui import predict, registry
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.mega_step import describe, mega_step
from nvfp4viz.ui.numbers import exact, four, hex_byte
from nvfp4viz.ui.pick import pick_one
from nvfp4viz.ui.theme import theme

PAGE = "mega_kernel"
PARTS = ("bytes", "scales", "rows", "between", "step", "layer")
LIMITS = (2.0, 5.0, SWIGLU_LIMIT)
ROUTES = figures.TOKENS * figures.TOP_K
GROUPS = figures.INNER // GROUP


@st.cache_resource(max_entries=2, show_spinner=False)
def layer(data: figures.Data) -> figures.SampleLayer:
    """The sample layer, computed once for all readers."""
    return figures.sample_layer(data)


def layer_of(page: Lesson) -> figures.SampleLayer:
    """The layer of the page's settings."""
    return layer(page.view["data"])


def power(byte: int) -> str:
    """A UE8M0 scale as a power of two."""
    return power_of_two(byte - 127)


# ------------------------------------------------------------------ between the products


def between_part(page: Lesson) -> None:
    """SwiGLU, clamp, weight and requantisation on 32 live numbers; and what a NaN becomes there."""
    view = page.view
    _ask_nan(page)
    stage, side = page.stage()
    with side:
        _pick_data(page)
        left, right = st.columns(2)
        left.number_input(page.t("between.route"), 0, ROUTES - 1, **view.widget("route"))
        right.number_input(page.t("between.group"), 0, GROUPS - 1, **view.widget("group"))
        st.select_slider(page.t("between.limit"), LIMITS, format_func=exact, **view.widget("limit"))
        seen = figures.between_of(layer_of(page).run, view["route"], view["group"], view["limit"])
        page.finding(
            "between.seen",
            weight=four(seen.weight),
            amax=four(seen.amax),
            asked=three(seen.amax / float(E4M3_MAX)),
            scale=power(seen.scale),
            byte=hex_byte(seen.scale),
            clamped=int(seen.clamped.sum()),
            count=len(seen.weighted),
        )
        page.glossary("swiglu", "ue8m0")
    with stage:
        page.figure(
            figures.between_figure(seen, theme=theme(), lang=lang()),
            alt=page.t("between.alt"),
            finding=figures.describe_between(seen, lang()),
            rows=lambda: figures.between_rows(seen),
        )
    page.table(
        (">element", ">gate_sum", ">up_sum", ">gate", ">up", ">product", ">weighted", ">e4m3", ">decoded"),
        [
            (
                str(place),
                four(float(seen.gate_sum[place])),
                four(float(seen.up_sum[place])),
                exact(float(seen.gate[place])),
                exact(float(seen.up[place])),
                four(float(seen.product[place])),
                four(float(seen.weighted[place])),
                hex_byte(seen.codes[place]),
                exact(float(seen.decoded[place])),
            )
            for place in _telling(seen)
        ],
    )
    page.prose("between.text", group=GROUP, limit=exact(SWIGLU_LIMIT), floor=four(float(STAGING_FLOOR)))


def _telling(seen: figures.Between) -> list[int]:
    """Eight elements: the largest, those that were clamped, then the first ones."""
    order = [int(np.abs(seen.weighted).argmax()), *np.flatnonzero(seen.clamped).tolist(), *range(GROUP)]
    return sorted(list(dict.fromkeys(order))[:8])


def _ask_nan(page: Lesson) -> None:
    run = layer("even").run
    gate, up = run.gate_sum[0, :GROUP].copy(), run.up_sum[0, :GROUP].copy()
    gate[0] = up[0] = np.nan
    seen = figures.between(gate, up, float(run.weights[0, 0]))
    fate = "nan" if np.isnan(seen.decoded[0]) else "zero" if seen.decoded[0] == 0 else "limit"
    predict.ask(
        f"{PAGE}.predict.nan",
        ("nan", "zero", "limit"),
        answer=fate,
        gate=exact(float(seen.gate[0])),
        up=exact(float(seen.up[0])),
        weighted=four(float(seen.weighted[0])),
        decoded=exact(float(seen.decoded[0])),
    )


def _pick_data(page: Lesson) -> None:
    pick_one(page, "data", figures.DATA, label="pick.data", texts="data")


# ------------------------------------------------------------------ one step


def step_part(page: Lesson) -> None:
    """FP8 times FP4, 32 products in one step, bit by bit."""
    view = page.view
    st.pills(
        page.t("step.preset"),
        tuple(figures.STEPS),
        format_func=lambda name: page.t(f"step.of.{name}"),
        required=True,
        wrap=True,
        **view.widget("step"),
    )
    settings = figures.STEPS[view["step"]]
    trace = figures.explain_step(settings)
    stage, side = page.stage((3, 1))
    with side:
        with st.container(key="finding_mega_step"):
            st.markdown(describe(trace))
        high, low = figures.product_span()
        page.prose(
            "step.text",
            high=power_of_two(high),
            low=power_of_two(low),
            places=FRACTION_BITS_K32,
            scales=f"{hex_byte(settings.a_scale)}, {hex_byte(settings.b_scale)}",
        )
        page.glossary("significand", "accumulator", "subnormal")
    with stage:
        mega_step(view, settings, trace)
    registry.link("tensor_core", page.t("step.link"))


# ------------------------------------------------------------------ the whole layer


def layer_part(page: Lesson) -> None:
    """What each step does to the output, after the question which does most; and the bound."""
    asked = layer("even").error
    names = {"accumulate": ("first", "second"), "bf16": ("bf16", "routes", "combine"), "fp8": figures.QUANTISING}
    shares = {name: asked.share(*steps) for name, steps in names.items()}
    revealed = predict.ask(
        f"{PAGE}.predict.most",
        tuple(names),
        answer=max(shares, key=lambda name: shares[name]),
        **{name: figures.percent_of(share) for name, share in shares.items()},
    )
    error = layer_of(page).error
    if revealed:
        stage, side = page.stage()
        with side:
            _pick_data(page)
            error = layer_of(page).error
            page.finding(
                "layer.seen",
                tokens=figures.TOKENS,
                experts=figures.EXPERTS,
                hidden=figures.HIDDEN,
                inner=figures.INNER,
                total=figures.percent_of(error.relative("total")),
            )
            page.glossary("sqnr", "accumulator")
        with stage:
            page.figure(
                figures.effects_figure(error, theme=theme(), lang=lang()),
                alt=page.t("layer.alt"),
                finding=figures.describe_effects(error, lang()),
                rows=lambda: figures.effect_rows(error),
            )
    page.heading("bound.heading")
    page.table(
        ("place", ">largest_error", ">largest_bound", ">used"),
        [
            (
                page.t(f"place.{row['place']}"),
                four(float(str(row["largest_error"]))),
                four(float(str(row["largest_bound"]))),
                figures.percent_of(float(str(row["bound_used"]))),
            )
            for row in figures.stage_rows(error)
        ],
    )
    page.prose("bound.text", **_bound_numbers())


def _bound_numbers() -> dict[str, object]:
    return {
        "terms": STEP_K32 + 1,
        "places": FRACTION_BITS_K32,
        "unit": power_of_two(-FRACTION_BITS_K32),
        "last": power_of_two(-F32_FRACTION_BITS),
        "e4m3": power_of_two(-4),
        "bf16": power_of_two(-8),
        "slope": exact(SILU_SLOPE),
    }
