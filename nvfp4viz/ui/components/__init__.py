"""Components that live in the browser, one folder each: ``<name>.html``, ``<name>.css``, ``<name>.js``.

``load`` puts the palette in front of the style sheet, and the folder's other scripts, ``arithmetic.js`` among them, in
front of the main one.  The arithmetic that a local edit needs lives in that file alone, so that a test can hold it
against the library.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from nvfp4viz.figures.palette import css_variables

if TYPE_CHECKING:
    from streamlit.components.v2.types import ComponentRenderer

FOLDER = Path(__file__).parent


def read(name: str, part: str) -> str:
    """The text of one file of a component, or nothing if it has no such file."""
    path = FOLDER / name / part
    return path.read_text(encoding="utf-8") if path.exists() else ""


def load(name: str, *shared: str) -> ComponentRenderer:
    """Register a component from its folder; call once, at import.

    ``shared`` names what several components have in common: ``"steps"`` is ``steps.css`` of this folder, and
    ``steps.js`` if there is one.
    """
    others = sorted(path.name for path in (FOLDER / name).glob("*.js") if path.stem != name)
    styles = "".join((FOLDER / f"{part}.css").read_text(encoding="utf-8") for part in ("shared", *shared))
    scripts = [read(".", f"{part}.js") for part in shared] + [read(name, script) for script in (*others, f"{name}.js")]
    return st.components.v2.component(
        f"nvfp4viz.{name}",
        html=read(name, f"{name}.html") + "\n",
        css=css_variables() + styles + read(name, f"{name}.css"),
        js="\n".join(scripts),
    )


def state(key: str) -> dict[str, Any]:
    """What a mounted component last reported, or an empty dict."""
    return dict(st.session_state.get(key) or {})
