"""The Explorer's fourth source: checkpoints on the serving machine, in folders that its owner has named.

``NVFP4VIZ_ROOTS`` holds those folders, separated as ``PATH`` is.  Without it there is no such source.  A reader chooses
from a list and types no path; links out of a root are not followed.  What is written (a mended copy) goes beside the
checkpoint that was opened, under a name that is not taken.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.checkpoint import printable
from nvfp4viz.checkpoint.source import INDEX_SUFFIX
from nvfp4viz.errors import InputError
from nvfp4viz.ui import explorer_open
from nvfp4viz.ui.explorer_address import served_for_all

if TYPE_CHECKING:
    from nvfp4viz.ui.explorer_open import Opened
    from nvfp4viz.ui.lesson import Lesson

VARIABLE = "NVFP4VIZ_ROOTS"
WRITE = "NVFP4VIZ_WRITE"
# Levels below a root: the hub's cache keeps models--owner--name/snapshots/commit.
DEPTH = 3
# Folders that are offered at most.
MOST = 500


def roots() -> list[Path]:
    """The configured folders that exist, without links."""
    named = [Path(part) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part.strip()]
    return [path.resolve() for path in named if path.is_dir()]


def offered() -> dict[str, Path]:
    """Folders with safetensors files at or below the roots, by the root's own name and the way from there."""
    found: dict[str, Path] = {}
    for root in roots():
        for folder, names, files in os.walk(root):
            here = Path(folder)
            way = here.relative_to(root)
            names[:] = sorted(names) if len(way.parts) < DEPTH else []
            if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in files):
                label = (Path(root.name) / way).as_posix()
                # Two roots may have the same name.
                while label in found:
                    label += "′"
                found[label] = here
            if len(found) >= MOST:
                return found
    return found


def may_write() -> bool:
    """Whether readers may have mended copies written beside what they opened, as `explorer_address.allowed`.

    On their own machine, yes.  On a server that others reach its owner says so by ``NVFP4VIZ_WRITE=1``.
    """
    return served_for_all(WRITE)


def beside(folder: Path, name: str) -> Path:
    """Where a new folder next to ``folder`` goes.

    Raises
    ------
    InputError
        ``roots.name`` for what is not one plain name, ``roots.outside`` where that place lies below no root.
    """
    if not re.fullmatch(r"[\w][\w.-]{0,120}", name):
        raise InputError("roots.name", name=printable(name, 60) or "…")
    parent = folder.resolve().parent
    if not any(parent.is_relative_to(root) for root in roots()):
        raise InputError("roots.outside", folder=folder.name)
    return parent / name


def roots_source(page: Lesson, place: str) -> Opened | None:
    """The list, and the checkpoint chosen from it; ``place`` is the beginning of the widgets' keys.

    Raises
    ------
    CheckpointError
        ``source.*``.
    """
    choices = offered()
    if not choices:
        page.prose("roots.none")
        return None
    if len(choices) >= MOST:
        page.prose("roots.more", most=MOST)
    chosen = st.selectbox(page.t("roots.label"), list(choices), key=f"{place}.root", persist_state="session")
    return None if chosen is None else explorer_open.open_folder(choices[chosen])
