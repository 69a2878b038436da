"""The packer on a page: eight codes, four bytes, one uint32, each editable."""

from __future__ import annotations

import streamlit as st

from nvfp4viz.formats import decode_e2m1
from nvfp4viz.ui.components import load
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.numbers import exact
from nvfp4viz.ui.state import View
from nvfp4viz.ui.text import table

_COMPONENT = load("packer")
_KEY = "packer"


def packer(view: View) -> None:
    """Draw the packer on ``view``'s setting ``codes``: eight hex digits, element 0 first."""
    codes = [int(digit, 16) for digit in view["codes"]]
    version = st.session_state.get("_packer_version", 0)
    if view["codes"] != st.session_state.get("_packer_said"):
        version += 1
        st.session_state["_packer_version"], st.session_state["_packer_said"] = version, view["codes"]

    def heard() -> None:
        said = st.session_state[_KEY].get("codes") or []
        if len(said) == len(codes) and all(isinstance(code, int | float) and 0 <= code <= 15 for code in said):
            text = "".join(f"{int(code):x}" for code in said)
            st.session_state["_packer_said"] = text
            view.put(codes=text)

    values = [exact(value) for value in decode_e2m1(range(16))]
    _COMPONENT(
        key=_KEY,
        data={"codes": codes, "values": values, "text": table(lang(), "e2m1.packer"), "version": version},
        on_codes_change=heard,
    )
