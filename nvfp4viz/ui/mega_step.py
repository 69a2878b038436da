"""A K = 32 step on a page, drawn by the tensor core's component: 32 products and the accumulator."""

from __future__ import annotations

import math
from typing import Any

from nvfp4viz.figures import mega_kernel as facts
from nvfp4viz.figures.scaling import power_of_two
from nvfp4viz.formats import decode_e2m1, decode_e4m3
from nvfp4viz.quant.tensor_core_k32_step import FRACTION_BITS_K32, STEP_K32, StepTraceK32, split_element
from nvfp4viz.quant.tensor_core_step import F32_FRACTION_BITS, split_f32
from nvfp4viz.ui import tensor_core_lab as lab
from nvfp4viz.ui.i18n import t
from nvfp4viz.ui.numbers import exact, four, hex_byte, hex_f32, hex_nibble, whole
from nvfp4viz.ui.state import View

PAGE = "mega_kernel"
RULES = ("special", "split", "terms", "align", "sum")
SLOTS = STEP_K32 + 1
# On a card the term's value belongs to the third rule; the fourth draws the bits, the fifth their sum.
REVEAL = {"value": 3, "chart": 4, "sum": 5}


def mega_step(view: View, settings: facts.StepSettings, trace: StepTraceK32) -> None:
    """Draw the step on ``view``'s settings ``rule`` (1 to 5) and ``slot`` (0 to 32)."""
    lab.mount(view, picture(settings, trace), PAGE)


def term_rows(settings: facts.StepSettings, trace: StepTraceK32) -> list[dict[str, object]]:
    """The 32 products and the accumulator as rows to download; without bits to align where a special value decided."""
    rows: list[dict[str, object]] = []
    for slot in range(SLOTS):
        term = None if trace.special is not None else trace.terms[slot]
        byte, code, left, right = _sides(settings, slot) if slot < STEP_K32 else (None, None, None, None)
        rows.append(
            {
                "term": "c" if slot == STEP_K32 else f"p{slot}",
                "a_byte": byte,
                "b_code": code,
                "a_value": left,
                "b_value": right,
                "a_scale_byte": settings.a_scale,
                "b_scale_byte": settings.b_scale,
                "c": settings.c,
                "significand": None if term is None else float(term.significand),
                "exponent": None if term is None else term.exponent,
                "shift": None if term is None else term.shift,
                "aligned": None if term is None else term.aligned,
                "lost": None if term is None else float(term.lost),
                "result_bits": f"0x{trace.result_bits:08X}",
            }
        )
    return rows


def picture(settings: facts.StepSettings, trace: StepTraceK32) -> dict[str, Any]:
    """A step as the browser draws it: numbers already written, digits already placed."""
    return {
        "reveal": REVEAL,
        "steps": [
            {
                "name": t(f"{PAGE}.rule.{rule}.name"),
                "words": t(f"{PAGE}.rule.{rule}.words", **constants()),
                "formulas": [_formula(rule, settings, trace, slot) for slot in range(SLOTS)],
            }
            for rule in RULES
        ],
        "terms": [_card(settings, trace, slot) for slot in range(SLOTS)],
        "chart": lab.drawn_chart(trace, PAGE, "p"),
        "verdict": describe(trace),
    }


def constants() -> dict[str, object]:
    """The numbers of the rules, for texts."""
    return {
        "products": STEP_K32,
        "terms": SLOTS,
        "places": FRACTION_BITS_K32,
        "fraction": F32_FRACTION_BITS,
        "zero": lab.signed(-126),
        "nan": "0x7FFFFFFF",
    }


def describe(trace: StepTraceK32) -> str:
    """What the cuts took, in one sentence."""
    bits = f"0x{trace.result_bits:08X}"
    if trace.special is not None:
        return t(f"{PAGE}.verdict.{trace.special}", bits=bits)
    if math.isinf(float(trace.result)):
        return t(f"{PAGE}.verdict.overflow", bits=bits)
    cut = sum(bool(term.lost) for term in trace.terms)
    off = float(trace.result) - float(trace.exact)
    values = {"cut": cut, "terms": SLOTS, "result": whole(float(trace.result)), "bits": bits, "off": four(abs(off))}
    return t(f"{PAGE}.verdict.{'exact' if off == 0 else 'cut' if cut else 'rounded'}", **values)


def _sides(settings: facts.StepSettings, slot: int) -> tuple[int, int, float, float]:
    """Byte, code and their values."""
    a, b = facts.step_operands(settings)
    return a[slot], b[slot], float(decode_e4m3([a[slot]])[0]), float(decode_e2m1([b[slot]])[0])


def _card(settings: facts.StepSettings, trace: StepTraceK32, slot: int) -> dict[str, Any]:
    value = None
    if trace.special is None:
        term = trace.terms[slot]
        value = f"{lab.fraction(term.significand)} ·\u00a0{power_of_two(term.exponent)}"
    if slot == STEP_K32:
        shown = {"title": "c", "dot": lab.number(settings.c), "hex": hex_f32(settings.c)}
    else:
        byte, code, left, right = _sides(settings, slot)
        shown = {
            "title": f"p{lab.subscript(slot)}",
            "dot": f"{exact(left)} · {exact(right)}",
            "hex": f"{hex_byte(byte)} · {hex_nibble(code)}",
        }
    return {**shown, "products": None, "nan": False, "value": value, "sentence": _sentence(trace, slot)}


def _sentence(trace: StepTraceK32, slot: int) -> str:
    name = t(f"{PAGE}.lab.name.c") if slot == STEP_K32 else t(f"{PAGE}.lab.name.product", index=slot)
    if trace.special is not None:
        return t(f"{PAGE}.lab.sentence.special", name=name)
    term = trace.terms[slot]
    kind = "zero" if not term.value else "whole" if not term.lost else "gone" if not term.aligned else "cut"
    return t(
        f"{PAGE}.lab.sentence.{kind}",
        name=name,
        value=lab.fraction(term.value),
        shift=term.shift,
        lost=four(float(term.lost)),
    )


def _formula(rule: str, settings: facts.StepSettings, trace: StepTraceK32, slot: int) -> str:
    """One rule with the numbers of one term; where a special value has decided, the later ones say so."""
    if rule == "special":
        scales = f"{hex_byte(settings.a_scale)}, {hex_byte(settings.b_scale)}"
        return t(f"{PAGE}.formula.{trace.special or 'ordinary'}", scales=scales, bits=f"0x{trace.result_bits:08X}")
    if trace.special is not None or trace.max_exponent is None:
        return t(f"{PAGE}.formula.decided", bits=f"0x{trace.result_bits:08X}")
    if rule == "split":
        return _split_formula(settings, slot)
    term = trace.terms[slot]
    if rule == "terms":
        return _term_formula(settings, slot, lab.fraction(term.significand), lab.signed(term.exponent))
    unit = power_of_two(trace.max_exponent - FRACTION_BITS_K32)
    if rule == "align":
        top = lab.signed(trace.max_exponent)
        moved = f"E = {top};  {top} − {lab.bracket(term.exponent)} = {term.shift}"
        lost = f";  {t(f'{PAGE}.formula.cut_off')} {four(float(term.lost))}" if term.lost else ""
        return f"{moved};  {term.aligned} · {unit}{lost}".replace("-", "−")
    result = whole(float(trace.result))
    equals = "" if result.startswith("≈") else "= "
    return f"Σ = {trace.total} · {unit} → 0x{trace.result_bits:08X} {equals}{result}".replace("-", "−")


def _split_formula(settings: facts.StepSettings, slot: int) -> str:
    if slot == STEP_K32:
        significand, exponent = split_f32(int(hex_f32(settings.c), 16))
        return f"c = {hex_f32(settings.c)} = {lab.fraction(significand)} · {power_of_two(exponent)}"
    byte, code, _, _ = _sides(settings, slot)
    written = []
    for name, parts in (
        (f"a{lab.subscript(slot)} = {hex_byte(byte)}", split_element(byte, "e4m3")),
        (f"b{lab.subscript(slot)} = {hex_nibble(code)}", split_element(code, "e2m1")),
    ):
        assert not isinstance(parts, float)
        written.append(f"{name} = {lab.fraction(parts[0])} · {power_of_two(parts[1])}")
    return ";  ".join(written)


def _term_formula(settings: facts.StepSettings, slot: int, significand: str, exponent: str) -> str:
    if slot == STEP_K32:
        return t(f"{PAGE}.formula.not_a_product")
    byte, code, _, _ = _sides(settings, slot)
    left, right = split_element(byte, "e4m3"), split_element(code, "e2m1")
    assert not isinstance(left, float)
    assert not isinstance(right, float)
    powers = [left[1], right[1], settings.a_scale - 127, settings.b_scale - 127]
    return (
        f"{lab.fraction(left[0])} · {lab.fraction(right[0])} = {significand};  "
        f"{' + '.join(lab.bracket(power) for power in powers)} = {exponent}"
    )
