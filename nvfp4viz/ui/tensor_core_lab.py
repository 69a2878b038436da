"""One step of the tensor core on a page: an explanation of the library in, the chosen rule and term out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import streamlit as st

from nvfp4viz.figures import tensor_core as facts
from nvfp4viz.figures.scaling import power_of_two
from nvfp4viz.quant.tensor_core_explain import TensorCoreExplanation
from nvfp4viz.quant.tensor_core_step import (
    BLOCK_SIZE,
    F32_FRACTION_BITS,
    FRACTION_BITS,
    GROUP,
    STEP,
    AlignedSum,
    split_ue4m3,
    split_ue8m0,
)
from nvfp4viz.ui.components import load
from nvfp4viz.ui.i18n import lang, t
from nvfp4viz.ui.numbers import exact, four, hex_byte, hex_f32
from nvfp4viz.ui.state import View
from nvfp4viz.ui.text import table

_COMPONENT = load("tensor_core", "steps")
_PAGE = "tensor_core"
RULES = ("nan", "sign", "dots", "significands", "accumulator", "align", "sum")
SLOTS = facts.GROUPS + 1
"""Four groups of sixteen and the accumulator."""


def tensor_core_lab(view: View, seen: TensorCoreExplanation) -> None:
    """Draw the step on ``view``'s settings ``rule`` (1 to 7) and ``slot`` (0 to 4)."""
    mount(view, picture(seen), _PAGE)


def mount(view: View, drawn: Mapping[str, Any], page: str) -> None:
    """Draw a step's picture on ``view``'s settings ``rule``, from 1, and ``slot``, from 0, with ``page``'s texts."""
    key = f"{page}_lab"
    rules, slots = len(drawn["steps"]), len(drawn["terms"])
    now = (view["rule"], view["slot"])
    version = st.session_state.get(f"_{key}_version", 0)
    if now != st.session_state.get(f"_{key}_said"):
        version += 1
        st.session_state[f"_{key}_version"], st.session_state[f"_{key}_said"] = version, now

    def heard() -> None:
        said = dict(st.session_state[key].get("edit") or {})
        rule, slot = said.get("step"), said.get("slot")
        if rule in range(1, rules + 1) and slot in range(slots):
            st.session_state[f"_{key}_said"] = (rule, slot)
            view.put(rule=rule, slot=slot)

    _COMPONENT(
        key=key,
        data={
            "picture": drawn,
            "text": table(lang(), f"{page}.lab"),
            "version": version,
            "step": view["rule"],
            "slot": view["slot"],
        },
        on_edit_change=heard,
    )


def picture(seen: TensorCoreExplanation) -> dict[str, Any]:
    """An explanation as the browser draws it: numbers already written, digits already placed."""
    return {
        "steps": [
            {
                "name": t(f"{_PAGE}.rule.{rule}.name"),
                "words": t(f"{_PAGE}.rule.{rule}.words", **constants()),
                "formulas": [_formula(rule, seen, slot) for slot in range(SLOTS)],
            }
            for rule in RULES
        ],
        "terms": [*(_group(seen, slot) for slot in range(facts.GROUPS)), _accumulator(seen)],
        "chart": drawn_chart(seen.trace, _PAGE, "d"),
        "verdict": facts.describe_step(seen, lang()).replace("**", ""),
    }


def constants() -> dict[str, object]:
    """The numbers of the rules, for texts."""
    return {
        "step": STEP,
        "group": GROUP,
        "groups": facts.GROUPS,
        "places": FRACTION_BITS,
        "fraction": F32_FRACTION_BITS,
        "digits": F32_FRACTION_BITS + 1,
        "nan": "0x7FFFFFFF",
    }


# ------------------------------------------------------------------ the five terms


def _scales(seen: TensorCoreExplanation, slot: int) -> list[tuple[str, int, float]]:
    """Side, byte and value of the two scales of a group."""
    at = slot * GROUP // BLOCK_SIZE[seen.trace.kind]
    return [("A", seen.a_scales[at], seen.a_scale_values[at]), ("B", seen.b_scales[at], seen.b_scale_values[at])]


def _split(seen: TensorCoreExplanation, byte: int) -> tuple[Fraction, int] | None:
    return split_ue4m3(byte) if seen.trace.kind == "nvfp4" else split_ue8m0(byte)


def _products(seen: TensorCoreExplanation, slot: int) -> list[float]:
    rows = facts.element_rows(seen)[slot * GROUP : (slot + 1) * GROUP]
    return [float(str(row["product"])) for row in rows]


def _group(seen: TensorCoreExplanation, slot: int) -> dict[str, Any]:
    products = _products(seen, slot)
    return {
        "title": f"d{subscript(slot)} · k {slot * GROUP}–{slot * GROUP + GROUP - 1}",
        "products": products,
        "dot": f"Σ = {exact(sum(products))}",
        "scales": [
            {
                "side": side,
                "byte": hex_byte(byte),
                "size": _size(seen, byte, value),
                "negative": math.copysign(1, value) < 0,
                "nan": math.isnan(value),
                "shared": BLOCK_SIZE[seen.trace.kind] > GROUP,
            }
            for side, byte, value in _scales(seen, slot)
        ],
        "value": _term(seen, slot),
        "sentence": _sentence(seen, slot),
    }


def _size(seen: TensorCoreExplanation, byte: int, value: float) -> str:
    """A scale's magnitude; UE8M0's are powers of two, and read best as such."""
    parts = _split(seen, byte)
    return power_of_two(parts[1]) if parts and seen.trace.kind == "mxfp4" else number(abs(value))


def _accumulator(seen: TensorCoreExplanation) -> dict[str, Any]:
    return {
        "title": f"c · {t(f'{_PAGE}.lab.accumulator')}",
        "products": None,
        "dot": number(seen.c),
        "hex": hex_f32(seen.c),
        "nan": math.isnan(seen.c),
        "value": _term(seen, facts.GROUPS),
        "sentence": _sentence(seen, facts.GROUPS),
    }


def number(value: float) -> str:
    """Exact where that stays short, else four digits; a term may lie beyond float32."""
    if math.isfinite(value) and abs(value) >= 2.0**128:
        return four(value)
    text = exact(value)
    return text if len(text) <= 14 else four(value)


def fraction(value: Fraction) -> str:
    """:func:`number` of a fraction."""
    return number(float(value))


def _term(seen: TensorCoreExplanation, slot: int) -> str | None:
    """A term as the adder takes it: significand times a power of two."""
    if seen.trace.special is not None:
        return None
    term = seen.trace.terms[slot]
    # A line may break before the dot, never after it.
    return f"{fraction(term.significand)} ·\u00a0{power_of_two(term.exponent)}"


def _sentence(seen: TensorCoreExplanation, slot: int) -> str:
    """What becomes of a term, for the status line and for screen readers."""
    name = t(f"{_PAGE}.lab.name.c") if slot == facts.GROUPS else t(f"{_PAGE}.lab.name.group", index=slot)
    if seen.trace.special is not None:
        return t(f"{_PAGE}.lab.sentence.special", name=name)
    term = seen.trace.terms[slot]
    kind = "zero" if not term.value else "whole" if not term.lost else "gone" if not term.aligned else "cut"
    return t(
        f"{_PAGE}.lab.sentence.{kind}",
        name=name,
        value=fraction(term.value),
        shift=term.shift,
        lost=four(float(term.lost)),
    )


# ------------------------------------------------------------------ the rules with these numbers


def _formula(rule: str, seen: TensorCoreExplanation, slot: int) -> str:
    """One rule with the numbers of one term; empty where a special value has already decided."""
    trace = seen.trace
    if rule == "nan":
        return _nan_formula(seen)
    if rule == "sign" and trace.special != "nan":
        return _sign_formula(seen, slot)
    if trace.special is not None or trace.max_exponent is None:
        return t(f"{_PAGE}.formula.decided", bits=f"0x{trace.result_bits:08X}")
    term = trace.terms[slot]
    if rule == "dots":
        if slot == facts.GROUPS:
            return t(f"{_PAGE}.formula.not_a_dot")
        products = [exact(product) for product in _products(seen, slot) if product]
        return _dot_formula(slot, products, term.dot or Fraction(0))
    if rule == "significands":
        if slot == facts.GROUPS:
            return t(f"{_PAGE}.formula.not_a_dot")
        return _significand_formula(seen, slot)
    if rule == "accumulator":
        c = trace.terms[facts.GROUPS]
        return f"c = {hex_f32(seen.c)} = {number(seen.c)} = {fraction(c.significand)} · {power_of_two(c.exponent)}"
    if rule == "align":
        exponents = ", ".join(signed(part.exponent) for part in trace.terms)
        lost = f";  {t(f'{_PAGE}.formula.cut_off')} {four(float(term.lost))}" if term.lost else ""
        return (
            f"E = max({exponents}) = {signed(trace.max_exponent)};  "
            f"{signed(trace.max_exponent)} − {bracket(term.exponent)} = {term.shift};  "
            f"{t(f'{_PAGE}.formula.cut')} {power_of_two(trace.max_exponent - FRACTION_BITS)}{lost}"
        )
    return _sum_formula(seen)


def _dot_formula(slot: int, products: list[str], dot: Fraction) -> str:
    added = " + ".join(products).replace("+ −", "− ") or "0"
    return f"d{subscript(slot)} = {added} = {fraction(dot)}"


def _nan_formula(seen: TensorCoreExplanation) -> str:
    for side, scales in (("A", seen.a_scales), ("B", seen.b_scales)):
        for byte in scales:
            if _split(seen, byte) is None:
                return t(f"{_PAGE}.formula.nan_scale", side=side, byte=hex_byte(byte), bits="0x7FFFFFFF")
    if math.isnan(seen.c):
        return t(f"{_PAGE}.formula.nan_c", bits="0x7FFFFFFF")
    return t(f"{_PAGE}.formula.no_nan", count=len(seen.a_scales) + len(seen.b_scales))


def _sign_formula(seen: TensorCoreExplanation, slot: int) -> str:
    if slot == facts.GROUPS:
        return t(f"{_PAGE}.formula.c_keeps_sign")
    if seen.trace.kind == "mxfp4":
        return t(f"{_PAGE}.formula.no_sign_bit")
    return ";  ".join(
        f"{side}: {hex_byte(byte)} = {exact(value)} → {exact(abs(value))}" for side, byte, value in _scales(seen, slot)
    )


def _significand_formula(seen: TensorCoreExplanation, slot: int) -> str:
    term = seen.trace.terms[slot]
    parts = [_split(seen, byte) for _, byte, _ in _scales(seen, slot)]
    significands = " · ".join(fraction(part[0]) for part in parts if part)
    exponents = " + ".join(bracket(part[1]) for part in parts if part)
    return (
        f"{fraction(term.dot or Fraction(0))} · {significands} = {fraction(term.significand)};  "
        f"{exponents} = {signed(term.exponent)}"
    )


def _sum_formula(seen: TensorCoreExplanation) -> str:
    trace = seen.trace
    off = facts.rounded_off(trace) if math.isfinite(float(trace.result)) else Fraction(0)
    lost = f";  {t(f'{_PAGE}.formula.cut_off')} {four(float(off))}" if off else ""
    return f"Σ → 0x{trace.result_bits:08X} = {exact(float(trace.result))}{lost}"


def signed(value: int) -> str:
    """An integer with a real minus sign."""
    return str(value).replace("-", "−")


def bracket(value: int) -> str:
    """An integer, in brackets if negative."""
    return f"({signed(value)})" if value < 0 else str(value)


def subscript(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


# ------------------------------------------------------------------ the bits


def drawn_chart(trace: AlignedSum, page: str, letter: str) -> dict[str, Any] | None:
    """A step's bits as the browser draws them: ``letter`` names its dots or products, ``page`` has the other words."""
    chart = facts.bit_chart(trace)
    if chart is None:
        return None

    def name(row: facts.BitRow, kind: str) -> str:
        return f"{letter}{subscript(int(row.name))}" if row.name.isdigit() else t(f"{page}.lab.{kind}.{row.name}")

    return {
        "first": chart.first,
        "last": chart.last,
        "exponent": chart.exponent,
        "exponentLabel": signed(chart.exponent),
        "cut": chart.cut,
        "cutLabel": f"{t(f'{page}.lab.cut')} {power_of_two(chart.cut)}",
        "rows": [
            {
                "label": name(row, "row"),
                "short": name(row, "short"),
                "sign": row.sign,
                "high": row.high,
                # Places far below the picture are many and never drawn.
                "digits": row.digits[: max(row.high - chart.last + 2, 1)] if row.sign else "",
                "cut": row.cut,
                "exponent": row.exponent,
                "shift": "" if row.exponent is None else str(chart.exponent - row.exponent),
            }
            for row in chart.rows
        ],
    }
