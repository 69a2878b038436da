"""A whole table of texts, for components that fill placeholders in the browser."""

from __future__ import annotations

from typing import Any

from nvfp4viz.figures.words import catalogue


def table(language: str, prefix: str) -> dict[str, Any]:
    """The texts under ``prefix`` as nested dicts, placeholders left in place.

    >>> table("en", "ui.copy")["label"]
    'Copy link'
    """
    nested: dict[str, Any] = {}
    for key, text in catalogue(language).items():
        if key.startswith(prefix + "."):
            *path, name = key[len(prefix) + 1 :].split(".")
            place = nested
            for part in path:
                place = place.setdefault(part, {})
            place[name] = text
    return nested
