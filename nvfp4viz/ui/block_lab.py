"""The block lab on a page: a trace of the library in, edits out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import streamlit as st

from nvfp4viz.figures.scaling import gauge_of
from nvfp4viz.formats import E2M1, decode_e2m1
from nvfp4viz.quant import RECIPES
from nvfp4viz.quant.types import BlockTrace
from nvfp4viz.ui.bit_editor import plain
from nvfp4viz.ui.components import load
from nvfp4viz.ui.i18n import lang, t
from nvfp4viz.ui.numbers import bits, exact, hex_byte, hex_nibble, near
from nvfp4viz.ui.state import View
from nvfp4viz.ui.text import phrases, table

_COMPONENT = load("block_lab", "steps")
_KEY = "block_lab"
_PAGE = "two_level_scaling"
# Symbols that have a colour: the global scale (stored either way) and the block scale.
_ROLES = {"G": "global-scale", "g": "global-scale", "s": "block-scale"}


def block_lab(view: View, trace: BlockTrace) -> None:
    """Draw the lab on ``view``'s settings ``x`` (sixteen floats) and ``step``."""
    version = st.session_state.get("_block_lab_version", 0)
    asked = st.session_state.get("_block_lab_asked", 0)
    now = [plain(float(value)) for value in view["x"]]
    if now != st.session_state.get("_block_lab_said"):
        version += 1
        st.session_state["_block_lab_version"], st.session_state["_block_lab_said"] = version, now

    def heard() -> None:
        said = dict(st.session_state[_KEY].get("edit") or {})
        values, step = said.get("x"), said.get("step", 0)
        if isinstance(values, list) and len(values) == len(now):
            st.session_state["_block_lab_said"] = values
            st.session_state["_block_lab_asked"] = said.get("asked", 0)
            view.put(x=tuple(float(value) for value in values), step=int(step))

    _COMPONENT(
        key=_KEY,
        data={
            "trace": trace_data(trace),
            "text": table(lang(), f"{_PAGE}.lab"),
            "version": version,
            "asked": asked,
            "step": view["step"],
        },
        on_edit_change=heard,
    )


def trace_data(trace: BlockTrace) -> dict[str, Any]:
    """A trace as the browser draws it: numbers, and sentences already filled."""
    grid = sorted({float(value) for value in decode_e2m1(np.arange(1 << E2M1.bits))})
    return {
        "x": _plain(trace.x),
        "y": _plain(trace.products),
        "decoded": _plain(trace.element_values),
        "readback": _plain(trace.decoded),
        "bits": [bits(code, E2M1.bits) for code in trace.codes],
        "codeHex": [hex_nibble(code) for code in trace.codes],
        "grid": grid,
        "maxIndex": _max_index(trace),
        "steps": [*(_step(trace, index) for index in range(len(trace.steps))), *_last_steps(trace)],
        "scaleFrom": [step.name for step in trace.steps].index("byte"),
        "elements": [_element(trace, index) for index in range(len(trace.x))],
        "gauge": {**gauge_of(trace), "alt": t(f"{_PAGE}.lab.gauge")},
        "G": exact(trace.global_scale),
        "symbol": _symbol(trace),
        "byte": hex_byte(trace.scale_byte),
        "s": exact(trace.scale),
    }


def _plain(values: np.ndarray) -> list[float | str]:
    return [plain(float(value)) for value in values]


def _symbol(trace: BlockTrace) -> str:
    return "G" if RECIPES[trace.recipe].stores == "encode" else "g"


def _max_index(trace: BlockTrace) -> int:
    sizes = [abs(float(value)) for value in trace.x]
    return max(range(len(sizes)), key=lambda i: -1.0 if math.isnan(sizes[i]) else sizes[i])


def _step(trace: BlockTrace, index: int) -> dict[str, Any]:
    step = trace.steps[index]
    value = exact(step.value) if step.name == "byte" else near(step.value)
    equals = "≈" if value.startswith("≈") else "="
    parts = [
        *_coloured(f"{step.symbol} = {phrases(step.formula)}"),
        ["", f"\u2002=\u2002{phrases(step.numbers)}\u2002{equals}\u2002"],
        [_ROLES.get(step.symbol, "strong"), value.removeprefix("≈ ")],
        ["hex", f"\u2002{step.bits}"],
    ]
    name = f"{_PAGE}.step.{step.name}"
    return {"name": t(f"{name}.name"), "words": t(f"{name}.words"), "formula": parts, "view": "x"}


def _last_steps(trace: BlockTrace) -> list[dict[str, Any]]:
    """What happens to every element once the block's factor is known, and the way back."""
    factor, sign = trace.steps[-1].symbol, "/" if trace.divides else "·"
    back = f"s / {_symbol(trace)}" if _symbol(trace) == "G" else f"s · {_symbol(trace)}"
    formulas = {
        "multiply": f"y = x {sign} {factor}",
        "convert": "code = E2M1(y)",
        "back": f"x̂ = E2M1 · {back}",
    }
    views = {"multiply": "y", "convert": "code", "back": "back"}
    return [
        {
            "name": t(f"{_PAGE}.step.{name}.name"),
            "words": t(f"{_PAGE}.step.{name}.words"),
            "formula": _coloured(formula),
            "view": views[name],
        }
        for name, formula in formulas.items()
    ]


def _coloured(formula: str) -> list[Sequence[str]]:
    """A formula in pieces, the scales' symbols with their role."""
    pieces = re.split(r"(?<![\w^])([Ggs])(?!\w)", formula)
    return [[_ROLES.get(piece, ""), piece] for piece in pieces if piece]


def _element(trace: BlockTrace, index: int) -> str:
    return t(
        f"{_PAGE}.lab.element",
        index=index,
        x=exact(trace.x[index]),
        sign="÷" if trace.divides else "×",
        factor=exact(trace.factor),
        y=exact(trace.products[index]),
        code=hex_nibble(trace.codes[index]),
        value=exact(trace.element_values[index]),
        back=exact(trace.decoded[index]),
        error=exact(trace.error[index]),
    )
