"""The parts of the page on two-level scaling; the page itself chooses one."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from nvfp4viz.figures import scaling
from nvfp4viz.quant import NVFP4_RECIPES, global_scale, trace_block
from nvfp4viz.quant.types import BlockTrace
from nvfp4viz.ui import errors, predict
from nvfp4viz.ui.block_lab import block_lab
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import exact, four, hex_byte, near, percent
from nvfp4viz.ui.pick import pick_one
from nvfp4viz.ui.theme import theme
from nvfp4viz.ui.values import parse_scale, parse_values, to_bf16

COUNT = 16
BLOCKS_TO_COMPARE = ("contested", "own")
PARTS = ("block", "input_scale", "headroom", "ladder", "map", "recipes")


@st.cache_data(max_entries=2, show_spinner=False)
def measured() -> dict[str, Any]:
    """The sample tensor under everything that this page compares; computed once."""
    from nvfp4viz.quant import compare

    x = scaling.sample_tensor()
    return {
        "x": x,
        "levels": compare.compare_scaling(x),
        "ladder": compare.granularity_ladder(x),
        "headroom": compare.sweep_headroom(x, scaling.HEADROOM_FACTORS),
        "facts": compare.range_facts(),
    }


def trace_of(page: Lesson) -> BlockTrace:
    """The block of the page's settings, traced."""
    view = page.view
    x = to_bf16(view["x"])
    scale = global_scale(view["amax"], view["recipe"], x.dtype) if view["scale"] is None else view["scale"]
    return trace_block(x, scale, view["recipe"])


# ------------------------------------------------------------------ one block


def block_part(page: Lesson) -> BlockTrace:
    """The lab with its side: which block, which tensor, whose arithmetic."""
    stage, side = page.stage()
    with side:
        _controls(page)
        trace = trace_of(page)
        with st.container(key="finding_block"):
            st.markdown(state_sentence(page, trace))
        page.glossary("block_scale", "global_scale", "amax", "saturation")
    with stage:
        block_lab(page.view, trace)
    return trace


def state_sentence(page: Lesson, trace: BlockTrace) -> str:
    """What became of the block, in words."""
    return page.t(
        f"state.{scaling.block_state(trace)}",
        asked=near(scaling.asked_scale(trace)),
        byte=hex_byte(trace.scale_byte),
        limit=exact(scaling.E4M3.max_value),
        lost=int(np.isnan(np.asarray(trace.x, np.float32)).sum()),
        worst=near(scaling.worst_error(trace)),
    )


def _controls(page: Lesson) -> None:
    view = page.view
    st.pills(
        page.t("side.block"),
        list(scaling.BLOCKS),
        format_func=lambda name: page.t(f"block.{name}"),
        key="two_level_scaling.preset",
        on_change=_take_preset,
        args=(page,),
        wrap=True,
    )
    st.select_slider(
        page.t("side.amax"),
        scaling.AMAX_STOPS,
        format_func=exact,
        help=page.t("side.amax_help"),
        on_change=view.put,
        kwargs={"scale": None},
        **view.widget("amax"),
    )
    st.selectbox(page.t("side.recipe"), NVFP4_RECIPES, **view.widget("recipe"))
    with st.expander(page.t("side.own"), expanded=_own_problem(page) is not None):
        st.text_area(page.t("side.own_numbers"), key="two_level_scaling.own", help=page.t("side.own_help"), height=96)
        st.text_input(page.t("side.own_scale"), key="two_level_scaling.own_scale", help=page.t("side.own_scale_help"))
        st.button(page.t("side.apply"), on_click=_take_own, args=(page,), key="two_level_scaling.apply")
        if (problem := _own_problem(page)) is not None:
            errors.show(problem)


def _take_preset(page: Lesson) -> None:
    name = st.session_state["two_level_scaling.preset"]
    if name is not None:
        page.view.put(x=scaling.BLOCKS[name], amax=scaling.TENSOR_AMAX[name], scale=None)


def _own_problem(page: Lesson) -> Any:
    return st.session_state.get("two_level_scaling.problem")


def _take_own(page: Lesson) -> None:
    """Numbers first, then the scale; what cannot be used is said and changes nothing."""
    from nvfp4viz.errors import NvError

    text = st.session_state.get("two_level_scaling.own", "")
    own = st.session_state.get("two_level_scaling.own_scale", "").strip()
    try:
        values = parse_values(text, COUNT) if text.strip() or not own else page.view["x"]
        scale = parse_scale(own) if own else None
    except NvError as problem:
        st.session_state["two_level_scaling.problem"] = problem
        return
    st.session_state["two_level_scaling.problem"] = None
    st.session_state["two_level_scaling.preset"] = None
    page.view.put(x=tuple(float(value) for value in to_bf16(values)), scale=scale)


# ------------------------------------------------------------------ the tensor


def input_scale_part(page: Lesson) -> None:
    """Block scales alone are not enough: asked first, then shown."""
    from nvfp4viz.figures import scaling_plots as plots

    found = measured()
    _, one, two = found["levels"]
    record = plots.scale_histogram(one, two)
    facts = found["facts"]
    limits = {"product": facts.product, "element": facts.element_max, "scale": facts.scale_max}
    page.prose("input_scale.text", **{name: exact(value) for name, value in limits.items()})
    share = record.dead_one / record.blocks
    shown = predict.ask(
        "two_level_scaling.predict.lost",
        ("nothing", "few", "most"),
        answer="most" if share > 0.5 else "few" if share > 0 else "nothing",
        blocks=record.blocks,
        dead=record.dead_one,
        share=percent(share),
        before=f"{two.summary.sqnr_db:.1f}",
        after=f"{one.summary.sqnr_db:.1f}",
    )
    if shown:
        page.figure(
            plots.scale_histogram_figure(record, theme=theme(), lang=lang()),
            alt=page.t("input_scale.alt"),
            finding=plots.describe_scale_histogram(record, lang()),
            rows=lambda: [
                {"power_of_two": power, "without": without, "with": with_}
                for power, without, with_ in zip(record.powers, record.one, record.two, strict=True)
            ],
        )
        page.prose(
            "input_scale.after",
            span=f"{facts.scale_span:,.0f}",
            dies=four(facts.dies_below),
            coarse=four(facts.coarse_below),
        )
    page.glossary("input_scale", "calibration", "global_scale")


def headroom_part(page: Lesson) -> None:
    """A slider over how wrong the calibrated maximum is."""
    from nvfp4viz.figures import scaling_plots as plots

    points = measured()["headroom"]
    blocks = measured()["levels"][1].asked.size
    stage, side = page.stage()
    with side:
        st.select_slider(
            page.t("headroom.slider"),
            scaling.HEADROOM_FACTORS,
            format_func=lambda factor: f"× {exact(factor)}",
            help=page.t("headroom.help"),
            **page.view.widget("factor"),
        )
        point = next(point for point in points if point.factor == page.view["factor"])
        page.finding(
            "headroom.seen",
            factor=exact(point.factor),
            saturated=point.saturated,
            subnormal=point.subnormal,
            dead=point.dead,
            blocks=blocks,
            quality=f"{point.summary.sqnr_db:.1f}",
        )
        page.prose("headroom.text")
    with stage:
        page.figure(
            plots.headroom_figure(points, point.factor, blocks=blocks, theme=theme(), lang=lang()),
            alt=page.t("headroom.alt"),
            finding=plots.describe_headroom(points, lang()),
            rows=lambda: headroom_rows(),
        )


def headroom_rows() -> list[dict[str, object]]:
    """The sweep as rows."""
    return [
        {
            "factor": p.factor,
            "too_large": p.saturated,
            "coarse": p.subnormal,
            "lost": p.dead,
            "signal_to_error_db": p.summary.sqnr_db,
        }
        for p in measured()["headroom"]
    ]


def ladder_part(page: Lesson) -> None:
    """From one scale for a tensor to one for sixteen elements."""
    from nvfp4viz.figures import scaling_plots as plots

    rungs = measured()["ladder"]
    page.prose("ladder.text")
    page.figure(
        plots.ladder_figure(rungs, theme=theme(), lang=lang()),
        alt=page.t("ladder.alt"),
        finding=plots.describe_ladder(rungs, lang()),
        rows=ladder_rows,
    )


def ladder_rows() -> list[dict[str, object]]:
    """The ladder as rows."""
    return [
        {
            "scale": rung.name,
            "elements_per_scale": rung.elements_per_scale,
            "scale_bits_per_element": rung.scale_bits,
            "signal_to_error_db": rung.summary.sqnr_db,
            "lost_elements": rung.summary.zeroed,
        }
        for rung in measured()["ladder"]
    ]


def map_part(page: Lesson) -> None:
    """Where in the tensor the error sits."""
    from nvfp4viz.figures import scaling_plots as plots

    found = measured()
    page.prose("map.text")
    page.figure(
        plots.error_map_figure(found["x"], found["levels"], theme=theme(), lang=lang()),
        alt=page.t("map.alt"),
        finding=plots.describe_error_map(found["x"], found["levels"], lang()),
        rows=lambda: [
            {
                "scaling": level.level,
                "signal_to_error_db": level.summary.sqnr_db,
                "lost_elements": level.summary.zeroed,
                "clipped_elements": level.summary.clipped,
            }
            for level in found["levels"]
        ],
    )


def recipes_part(page: Lesson) -> None:
    """The page's block under every implementation."""
    from nvfp4viz.quant.compare import compare_recipes

    page.prose("recipes.text")
    pick_one(page, "on", BLOCKS_TO_COMPARE, label="recipes.which", texts="recipes.on")
    own = page.view["on"] == "own"
    x = page.view["x"] if own else scaling.BLOCKS["contested"]
    amax = page.view["amax"] if own else scaling.TENSOR_AMAX["contested"]
    rows = scaling.recipe_rows(compare_recipes(to_bf16(x), amax))
    page.finding("recipes.seen", outcomes=scaling.outcomes(rows), recipes=len(rows))
    columns = ("recipe", "byte", "codes", ">worst", "standing")
    page.html_table(
        columns,
        [
            (
                row.name,
                [(hex_byte(row.scale_byte), row.byte_differs)],
                [(f"{code:X}", differs) for code, differs in zip(row.codes, row.code_differs, strict=True)],
                four(row.worst_error),
                page.t(f"standing.{row.standing}"),
            )
            for row in rows
        ],
    )
    st.caption(page.t("recipes.legend", first=rows[0].name))
