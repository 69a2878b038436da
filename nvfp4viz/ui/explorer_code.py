"""*Show me the code* on the Explorer: a snippet for a sample, and one for whatever else is open, really run on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nvfp4viz.errors import NvError
from nvfp4viz.ui import caches, snippets
from nvfp4viz.ui.i18n import lang

if TYPE_CHECKING:
    from nvfp4viz.ui.explorer_open import Opened
    from nvfp4viz.ui.state import View


def shown(opened: Opened | None, view: View) -> dict[str, Any]:
    """What `Lesson.foot` needs: the snippet's values, its name, and how it is run; for the GPU and ranks of ``view``.

    The snippet for files that were uploaded or that lie on the server names a folder, because the page knows no path
    that would help its reader; it is run on the checkpoint that is open.
    """
    served = {"gpu": None if view["gpu"] == "any" else view["gpu"], "tp": view["tp"], "ep": view["ep"]}
    if opened is None or opened.kind == "sample":
        return {"code": {"sample": view["checkpoint"], **served}}
    code = {"source": source_of(opened), **served}
    return {"code": code, "snippet": "explorer_given", "run": lambda text: _run(text, opened)}


def source_of(opened: Opened) -> str:
    """What code says in place of a checkpoint that is no sample: its address, or ``FOLDER``."""
    return quote(opened.address, safe="/:@%+=~,") or "FOLDER"


def _run(text: str, opened: Opened) -> str:
    """Once for a checkpoint: of an address it reads the scales again."""
    given = {"source": opened.audit.checkpoint}
    try:
        return caches.kept("explorer.kept.code", (text, opened.identity), lambda: snippets.run(text, given))
    except NvError as error:
        return error.text(lang())["what"]
