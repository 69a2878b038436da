"""The bit editor on a page: library tables in, edits out."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import streamlit as st

from nvfp4viz.formats import FORMATS, FormatInfo, explain
from nvfp4viz.ui.components import load
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.state import View
from nvfp4viz.ui.text import table

_COMPONENT = load("bit_editor")
_KEY = "bit_editor"
# Formats whose values fit into a table; BF16's 65,536 are decoded in the browser.
_TABLED = ("e2m1", "e4m3", "ue8m0")


@cache
def cards() -> list[dict[str, Any]]:
    """What the browser needs of each format: fields, bias, the value of every code, where it saturates."""
    return [_card(info) for info in FORMATS.values()]


def _card(info: FormatInfo) -> dict[str, Any]:
    fields = [("S", int(info.signed)), ("E", info.exponent_bits), ("M", info.mantissa_bits)]
    card: dict[str, Any] = {
        "id": info.name,
        "name": info.name.upper(),
        "width": info.bits,
        "fields": [field for field in fields if field[1]],
        "bias": info.bias,
        "signed": info.signed,
        "rounding": "even" if info.mantissa_bits else "up",
        "values": None,
    }
    if info.name in _TABLED:
        values = [explain(info, code).value for code in range(1 << info.bits)]
        card["values"] = [plain(value) for value in values]
        card["maxCode"] = values.index(info.max_value)
        # Where a format has no NaN, the conversion writes its largest value.
        card["nanCode"] = info.nan_codes[0] if info.nan_codes else card["maxCode"]
    return card


def plain(value: float) -> float | str:
    """A float as JSON can carry it: NaN, infinities and −0 as words."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0 and math.copysign(1, value) < 0:
        return "-0"
    return value


def number(view: View) -> float:
    """The number the editor stands on: the typed one, or what its code means; beyond float32 it is an infinity."""
    if view["x"] is None:
        info = FORMATS[view["format"]]
        return explain(info, (view["code"] or 0) & ((1 << info.bits) - 1)).value
    with np.errstate(over="ignore"):
        return view["x"] if np.isfinite(np.float32(view["x"])) else float(np.float32(view["x"]))


def bit_editor(view: View) -> None:
    """Draw the editor on ``view``'s settings ``format``, ``x`` and ``code`` (one of the last two is None)."""
    if view["code"] is not None:
        # A link may carry both, or a code of a wider format: the code wins, within its format.
        view.put(x=None, code=view["code"] & ((1 << FORMATS[view["format"]].bits) - 1))
    edit = {"format": view["format"], "x": None if view["x"] is None else plain(view["x"]), "code": view["code"]}
    version = st.session_state.get("_bit_editor_version", 0)
    if edit != st.session_state.get("_bit_editor_said"):
        # Set from outside (a link, a preset): the browser takes it.  Its own edits come back unchanged; it keeps those.
        version += 1
        st.session_state["_bit_editor_version"], st.session_state["_bit_editor_said"] = version, edit

    def heard() -> None:
        said = dict(st.session_state[_KEY].get("edit") or {})
        if said.get("format") not in FORMATS:
            return
        x, code = said.get("x"), said.get("code")
        if code is not None:
            code = min(max(int(code), 0), (1 << FORMATS[said["format"]].bits) - 1)
        view.put(format=said["format"], x=None if x is None else float(x), code=code)
        st.session_state["_bit_editor_said"] = {"format": said["format"], "x": x, "code": code}

    _COMPONENT(
        key=_KEY,
        data={"formats": cards(), "text": table(lang(), "e2m1.editor"), "version": version, "edit": edit},
        on_edit_change=heard,
    )
