"""The command line's own words in the reader's language, argparse's included.

argparse puts its words through ``gettext``; its ``_`` is replaced while one command line is read, so that usage errors
speak as the rest does.  Whatever has no translation stays English.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nvfp4viz.errors import content_texts, content_words

LANGUAGES = ("en", "zh")


def cli_words(language: str, key: str, **values: object) -> str:
    """One text of ``content/<language>/cli.toml``, by key such as ``"show.type"``."""
    return content_words("cli.toml", language, key, **values)


def language_of(arguments: Sequence[str]) -> str:
    """The language that a command line asks for, before anything else of it is read.

    >>> language_of(["audit", "x", "--language", "zh"]), language_of(["--language=zh"]), language_of(["--language"])
    ('zh', 'zh', 'en')
    """
    asked = "en"
    for place, word in enumerate(arguments):
        if word == "--":
            break
        name, given, value = word.partition("=")
        if name == "--language":
            value = value if given else "".join(arguments[place + 1 : place + 2])
            asked = value if value in LANGUAGES else asked
    return asked


@contextmanager
def argparse_speaks(language: str) -> Iterator[None]:
    """Let argparse say its own words in a language; English is what it has."""
    known = content_texts("cli.toml", language).get("argparse", {})
    words, plural = argparse._, argparse.ngettext  # type: ignore[attr-defined]
    argparse._ = lambda text: known.get(text, text)  # type: ignore[attr-defined]
    argparse.ngettext = lambda one, many, count: known.get(many, one if count == 1 else many)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        argparse._, argparse.ngettext = words, plural  # type: ignore[attr-defined]
