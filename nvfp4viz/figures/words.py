"""Every sentence a reader sees, from ``content/<language>/*.toml``.

A key is ``<file>.<table>.<entry>``, for example ``"ui.copy.label"`` or ``"e2m1.claim"`` (files in ``pages/`` drop the
folder).
Numbers are never part of a sentence: they are placeholders, filled by the caller from what the library computed.
"""

from __future__ import annotations

import re
import string
import time
import tomllib
from collections.abc import Iterable
from functools import lru_cache
from numbers import Integral
from pathlib import Path

from nvfp4viz.errors import fill

LANGUAGES = ("en", "zh")
CONTENT = Path(__file__).parents[1] / "content"
_CJK_BREAK = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef])\n(?=[\u3000-\u9fff\uff00-\uffef])")


def words(language: str, key: str, **values: object) -> str:
    """One text in ``language``, with its placeholders filled.

    Raises
    ------
    KeyError
        If there is no such text, or a placeholder has no value: both are mistakes of ours that a test finds.

    >>> words("zh", "ui.language")
    '语言'
    """
    text = catalogue(language)[key]
    shown = {name: number(value) for name, value in values.items()}
    return fill(text, shown, language) if values or "{" in text else text


def listed(language: str, names: Iterable[str]) -> str:
    """Words of ``language`` one after the other, with its comma between them.

    >>> listed("en", ("gate", "up")), listed("zh", ("新闻", "代码"))
    ('gate, up', '新闻、代码')
    """
    return words(language, "ui.comma").join(names)


def number(value: object) -> object:
    """A count as every sentence writes it, with a comma for thousands; what is no integer stays as it is.

    >>> number(1280), number(-4), number("1280"), number(True)
    ('1,280', '-4', '1280', True)
    """
    return f"{value:,}" if isinstance(value, Integral) and not isinstance(value, bool) else value


def has_words(language: str, key: str) -> bool:
    """Whether there is a text under ``key``."""
    return key in catalogue(language)


def catalogue(language: str) -> dict[str, str]:
    """All texts of a language, ``{key: text}``; read again, within a second, when a file has changed."""
    return _load(_stamp(language, int(time.monotonic())))


@lru_cache(maxsize=8)
def _stamp(language: str, second: int) -> tuple[tuple[str, int], ...]:
    # A page asks for a hundred texts; looking at the files once a second is enough for an author and free for a reader.
    folder = CONTENT / language
    files = sorted([*folder.glob("*.toml"), *(folder / "pages").glob("*.toml")])
    return tuple((str(path), path.stat().st_mtime_ns) for path in files if not path.name.startswith("errors"))


@lru_cache(maxsize=4)
def _load(stamp: tuple[tuple[str, int], ...]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, _ in stamp:
        path = Path(name)
        _flatten(tomllib.loads(path.read_text(encoding="utf-8")), path.stem, texts)
    return texts


def _flatten(table: dict[str, object], prefix: str, into: dict[str, str]) -> None:
    for name, value in table.items():
        key = f"{prefix}.{name}"
        if isinstance(value, dict):
            _flatten(value, key, into)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                _flatten(item if isinstance(item, dict) else {"": item}, f"{key}.{index}", into)
        else:
            # A line break between two Chinese characters is the editor's, not a space of the reader's.
            into[key] = _CJK_BREAK.sub("", str(value))


def placeholders(text: str) -> set[str]:
    """Names of the placeholders in a text.

    >>> sorted(placeholders("{x} rounds to {value}"))
    ['value', 'x']
    """
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def superscript(number: int) -> str:
    """An exponent as it stands beside its base.

    >>> superscript(-10)
    '⁻¹⁰'
    """
    return str(number).translate(_RAISED)


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
