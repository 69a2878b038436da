"""The parts of the page on the tensor core; the page itself chooses one."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import streamlit as st

from nvfp4viz.errors import NvError
from nvfp4viz.figures import tensor_core as facts
from nvfp4viz.figures.scaling import power_of_two
from nvfp4viz.formats import decode_ue8m0
from nvfp4viz.quant.tensor_core_explain import TensorCoreExplanation
from nvfp4viz.ui import errors, predict, registry
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import exact, four, hex_byte, hex_f32
from nvfp4viz.ui.pick import pick_one
from nvfp4viz.ui.tensor_core_lab import subscript, tensor_core_lab
from nvfp4viz.ui.theme import theme
from nvfp4viz.ui.values import parse_accumulator, parse_bytes, parse_codes

if TYPE_CHECKING:
    from nvfp4viz.quant.tensor_core_difference import AccumulationComparison

PAGE = "tensor_core"
PARTS = ("step", "difference")
ALPHA = 2.0**-8
"""A factor of the epilogue, to show that its sign counts."""
_FIELDS = ("kind", "a", "b", "sa", "sb", "ua", "ub", "c")


def settings_of(page: Lesson) -> facts.DotSettings:
    """The step of the page's settings."""
    return facts.DotSettings(**{name: page.view[name] for name in _FIELDS})


# ------------------------------------------------------------------ one step


def step_part(page: Lesson) -> TensorCoreExplanation:
    """The lab with its side, and the terms as a table."""
    stage, side = page.stage()
    with side:
        revealed = _ask_negative(page)
        _controls(page, revealed)
        seen = facts.explain(settings_of(page))
        with st.container(key="finding_step"):
            st.markdown(facts.describe_step(seen, lang()))
            st.markdown(compared_sentence(page, seen))
        page.glossary("significand", "accumulator", "block_scale", "subnormal")
    with stage:
        tensor_core_lab(page.view, seen)
        _own(page)
    if seen.trace.terms:
        page.prose("terms.text")
        page.table(("term", ">dot", ">significand", ">exponent", ">shift", ">kept", ">dropped"), _table(seen))
    return seen


def _ask_negative(page: Lesson) -> bool:
    found = facts.negative_scale()
    negative, positive = found.negative, found.positive
    return predict.ask(
        f"{PAGE}.predict.negative",
        ("flips", "ignored", "nan"),
        answer=found.fate,
        group=found.group,
        byte=hex_byte(negative.a_scales[found.group]),
        value=exact(negative.a_scale_values[found.group]),
        bits=hex_f32(float(negative.result)),
        plain_result=exact(float(negative.result)),
        other=exact(float(negative.dequantized)),
        plain=exact(float(positive.dequantized)),
        alpha=exact(-ALPHA),
        flipped=exact(facts.epilogue(negative, -ALPHA)),
        ue8m0=power_of_two(math.log2(decode_ue8m0(negative.a_scales[found.group]))),
    )


def compared_sentence(page: Lesson, seen: TensorCoreExplanation) -> str:
    """The result beside what float32 arithmetic gives."""
    bits = f"0x{seen.trace.result_bits:08X}"
    other = exact(float(seen.dequantized))
    if seen.ulps is None:
        return page.t("seen.nan", bits=bits, other=other)
    if seen.ulps == 0:
        return page.t("seen.same", bits=bits)
    return page.t(
        "seen.apart",
        result=exact(float(seen.result)),
        bits=bits,
        other=other,
        other_bits=hex_f32(float(seen.dequantized)),
        ulps=f"{abs(seen.ulps):,}",
    )


def _controls(page: Lesson, revealed: bool) -> None:
    # What a negative scale does is asked first.
    presets = [name for name in facts.PRESETS if revealed or name != "negative"]
    st.pills(
        page.t("side.preset"),
        presets,
        format_func=lambda name: page.t(f"preset.{name}"),
        key=f"{PAGE}.preset",
        on_change=_take_preset,
        args=(page,),
        wrap=True,
    )
    pick_one(page, "kind", facts.KINDS, label="side.kind", texts="kind")


def _take_preset(page: Lesson) -> None:
    name = st.session_state[f"{PAGE}.preset"]
    if name is None:
        return
    values = asdict(facts.PRESETS[name])
    if name != "negative":  # UE8M0 has no sign to set
        del values["kind"]
    page.view.put(**values)


def _own(page: Lesson) -> None:
    scales = ("sa", "sb") if page.view["kind"] == "nvfp4" else ("ua", "ub")
    problem = st.session_state.get("_tensor_core_problem")
    with st.expander(page.t("side.own"), expanded=problem is not None):
        st.caption(page.t("side.own_help"))
        for name in ("a", "b"):
            st.text_area(
                page.t(f"side.own_{name}"),
                key=f"{PAGE}.own_{name}",
                placeholder=page.view[name],
                help=page.t("side.own_codes_help"),
                height=80,
            )
        for label, name in zip(("sa", "sb"), scales, strict=True):
            st.text_input(
                page.t(f"side.own_{label}"),
                key=f"{PAGE}.own_{name}",
                placeholder=page.view[name],
                help=page.t("side.own_scales_help", count=len(page.view[name]) // 2),
            )
        st.text_input(page.t("side.own_c"), key=f"{PAGE}.own_c", placeholder=str(page.view["c"]))
        st.button(page.t("side.apply"), on_click=_take_own, args=(page, scales), key=f"{PAGE}.apply")
        if problem is not None:
            errors.show(problem)


def _take_own(page: Lesson, scales: tuple[str, str]) -> None:
    """What cannot be used is said and changes nothing."""
    readers: dict[str, Any] = {
        "a": lambda text: parse_codes(text, facts.STEP),
        "b": lambda text: parse_codes(text, facts.STEP),
        **{name: lambda text, name=name: parse_bytes(text, len(page.view[name]) // 2) for name in scales},
        "c": parse_accumulator,
    }
    typed = {name: st.session_state.get(f"{PAGE}.own_{name}", "").strip() for name in readers}
    try:
        values = {name: read(typed[name]) for name, read in readers.items() if typed[name]}
    except NvError as problem:
        st.session_state["_tensor_core_problem"] = problem
        return
    st.session_state["_tensor_core_problem"] = None
    st.session_state[f"{PAGE}.preset"] = None
    page.view.put(**values)


def _table(seen: TensorCoreExplanation) -> list[tuple[str, ...]]:
    return [
        (
            "c" if row["dot"] is None else f"d{subscript(int(str(row['term'])))}",
            "" if row["dot"] is None else exact(row["dot"]),
            exact(row["significand"]),
            exact(row["exponent"]),
            exact(row["shift"]),
            exact(row["kept"]),
            four(row["dropped"]),
        )
        for row in facts.term_rows(seen)
    ]


# ------------------------------------------------------------------ a whole GEMM


@st.cache_resource(max_entries=24, show_spinner=False)
def product(k: int, spread: int, signs: str) -> AccumulationComparison:
    """The sample GEMM, computed once for all readers."""
    return facts.sample_product(k, spread, signs)


def product_of(page: Lesson) -> AccumulationComparison:
    """The GEMM of the page's settings."""
    return product(int(page.view["k"]), int(page.view["spread"]), page.view["signs"])


def difference_part(page: Lesson) -> None:
    """How far a GEMM lies from float32 arithmetic: asked first, then shown."""
    from nvfp4viz.figures import tensor_core_plots as plots

    view = page.view
    asked = plots.difference_histogram(product(1024, 8, "signed"), "float32")
    revealed = predict.ask(
        f"{PAGE}.predict.direction",
        ("always", "mostly", "both"),
        answer=plots.direction(asked),
        outputs=asked.outputs,
        k=asked.k,
        toward=asked.toward,
        away=asked.away,
        equal=asked.equal,
    )
    if revealed:
        stage, side = page.stage()
        with side:
            _gemm_controls(page)
            found = product_of(page)
            page.finding("difference.order", differs=found.split_differs, outputs=found.tensor_core.size)
        record = plots.difference_histogram(found, view["against"])
        with stage:
            page.figure(
                plots.difference_figure(record, theme=theme(), lang=lang()),
                alt=page.t("difference.alt"),
                finding=plots.describe_difference(record, lang()),
                rows=lambda: plots.histogram_rows(record),
            )
    page.prose("difference.text")
    page.prose("difference.standing")
    registry.link("kernel_lab")


def _gemm_controls(page: Lesson) -> None:
    from nvfp4viz.figures.tensor_core_plots import AGAINST

    view = page.view
    pick_one(page, "against", AGAINST, label="difference.against", texts="difference.on")
    pick_one(page, "signs", facts.SIGNS, label="difference.signs", texts="difference.data")
    for name, stops in (("spread", facts.SPREADS), ("k", facts.LENGTHS)):
        st.select_slider(
            page.t(f"difference.{name}"),
            stops,
            format_func=exact,
            help=page.t("difference.spread_help") if name == "spread" else None,
            **view.widget(name),
        )


def told(page: Lesson) -> dict[str, object]:
    """What a step was given, in hex digits as in the link: what its terms are about."""
    view = page.view
    a_scales, b_scales = ("sa", "sb") if view["kind"] == "nvfp4" else ("ua", "ub")
    of = {"kind": view["kind"], "a": view["a"], "b": view["b"]}
    return of | {"a_scales": view[a_scales], "b_scales": view[b_scales], "c": view["c"]}


def difference_rows(page: Lesson) -> list[dict[str, object]]:
    """Every output of the GEMM as a row to download."""
    found = product_of(page)
    rows, columns = found.tensor_core.shape
    view = page.view
    of = {"k": int(view["k"]), "exponents_spread": int(view["spread"]), "signs": view["signs"]}
    return [
        of
        | {
            "m": m,
            "n": n,
            "exact": float(found.exact_value[m, n]),
            "tensor_core": float(found.tensor_core[m, n]),
            "float32": float(found.float32[m, n]),
            "split_k": float(found.split[m, n]),
        }
        for m in range(rows)
        for n in range(columns)
    ]
