"""Texts in bulk: a whole table for components that fill placeholders in the browser, and the words of a formula."""

from __future__ import annotations

import re
from typing import Any

from nvfp4viz.figures.words import catalogue
from nvfp4viz.ui.i18n import t

_PHRASES = (
    (r"max of (\d+)", "max_of"),
    (r"byte (0x[0-9A-F]{2}|\d+)", "byte"),
    (r"0 if s = 0, else (.+)", "zero_else"),
    (r"(.+), and (\S+) for 0", "for_zero"),
)


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


def phrases(formula: str) -> str:
    """A step of `nvfp4viz.quant.reference` or of a rule's, its few English words in the reader's language."""
    for pattern, key in _PHRASES:
        if found := re.fullmatch(pattern, formula):
            return t(f"ui.phrase.{key}", **{f"p{i}": part for i, part in enumerate(found.groups())})
    words = {"nan": "NaN", "inf": "∞", "bump": t("ui.phrase.bump")}
    return re.sub(r"\b(nan|inf|bump)\b", lambda word: words[word[0]], formula).replace("-", "−")
