"""Words of findings and forecasts, by key and language.

``content/<language>/findings*.toml`` have one table per text with ``message`` and ``advice``; forecasts stand there as
``["why.…"]`` with a ``message`` alone.  Container and configuration findings share their words with the errors of
`nvfp4viz.checkpoint` (``what`` and ``why`` are the message, ``next`` the advice).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Any

from nvfp4viz.errors import CONTENT, content_words, error_texts, fill


@cache
def finding_texts(language: str) -> dict[str, dict[str, str]]:
    """All texts of one language: ``{key: {"message": …, "advice": …}}``."""
    texts: dict[str, dict[str, str]] = {}
    for path in sorted((CONTENT / language).glob("findings*.toml")):
        texts |= tomllib.loads(path.read_text(encoding="utf-8"))
    return texts


def report_words(language: str, key: str, **values: object) -> str:
    """One of the report's own words, by key in ``content/<language>/report.toml``, such as ``"columns.slots"``."""
    return content_words("report.toml", language, key, **values)


def words(text: str, params: Mapping[str, Any], language: str = "en") -> tuple[str, str]:
    """Message and advice of a text key, filled in."""
    own = finding_texts(language).get(text)
    if own is not None:
        return fill(own["message"], params, language), fill(own.get("advice", ""), params, language)
    shared = error_texts(language)[text]
    message = f"{shared['what']} {shared['why']}" if language == "en" else shared["what"] + shared["why"]
    return fill(message, params, language), fill(shared["next"], params, language)


def id_list(ids: tuple[int, ...], limit: int = 24) -> str:
    """Expert numbers for a sentence: runs as ``8–15``, bounded length.

    >>> id_list((40, 42, 82, 98)), id_list((0, 1, 2, 3, 9))
    ('40, 42, 82, 98', '0–3, 9')
    """
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [
        str(first) if first == last else f"{first}, {last}" if last == first + 1 else f"{first}–{last}"
        for first, last in runs
    ]
    return ", ".join(parts) if len(parts) <= limit else ", ".join(parts[:limit]) + ", …"
