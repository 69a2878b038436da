"""Read a safetensors header the slow way: accept and refuse exactly what the reference reader does, and say why.

The reference parses with Rust's serde_json into typed fields; Python's `json` is laxer.  What differs was measured
against safetensors 0.8.0 and is checked by the fuzz test: NaN literals, lone surrogates, numbers out of range,
``-0`` and ``1.0`` as sizes, a repeated field inside an entry, nesting beyond 127.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nvfp4viz.checkpoint.dtypes import DTYPES
from nvfp4viz.checkpoint.problems import printable

_U64 = 2**64
# serde_json stops at 128 levels; an entry's extra field starts below the header's and the entry's own.
_DEPTH = 127


class Refused(Exception):
    """The reference reader refuses this header.

    Parameters
    ----------
    reason
        Last part of the text key ``container.invalid-header.<reason>``.
    **params
        Values of the text's placeholders.
    """

    def __init__(self, reason: str, **params: object) -> None:
        super().__init__(reason)
        self.reason = reason
        self.params = params


@dataclass(slots=True)
class Parsed:
    """A header's content, and what the reference accepted although the format forbids it."""

    entries: dict[str, tuple[str, tuple[int, ...], tuple[int, int]]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    duplicates: list[str] = field(default_factory=list)
    oddities: list[str] = field(default_factory=list)


class _Object(list[tuple[str, Any]]):
    """A JSON object with its repeated keys kept."""


def parse(text: bytes) -> Parsed:
    """Parse the bytes of a header.

    Raises
    ------
    Refused
        With reason ``utf8``, ``bom``, ``json``, ``object``, ``metadata``, ``entry``, ``dtype`` or ``number``.
    """
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused("utf8", position=error.start) from None
    if decoded.startswith("\ufeff"):
        raise Refused("bom")
    try:
        top = json.loads(
            decoded, object_pairs_hook=_Object, parse_constant=_no_constant, parse_int=_integer, parse_float=_number
        )
        # Python accepts a lone half of a surrogate pair, which is not text.
        _walk(top, _DEPTH)
    except _NoNumber:
        raise Refused("json", position=_place(decoded, lambda token, _: _is_no_number(token))) from None
    except json.JSONDecodeError as error:
        raise Refused("json", position=len(decoded[: error.pos].encode())) from None
    except RecursionError:
        raise Refused("json", position=_place(decoded, lambda _, depth: depth > _DEPTH)) from None
    except UnicodeEncodeError:
        lone = next(found for found in _ESCAPE.finditer(decoded) if found[1])
        raise Refused("utf8", position=len(decoded[: lone.start()].encode())) from None
    if not isinstance(top, _Object):
        raise Refused("object")
    out = _typed(top)
    if not decoded.startswith("{"):
        out.oddities.append("leading-space")
    if not decoded.rstrip(" ").endswith("}"):
        out.oddities.append("unusual-json")
    return out


def _typed(top: _Object) -> Parsed:
    out = Parsed()
    seen_metadata = False
    for name, value in top:
        if name == "__metadata__":
            if seen_metadata:
                raise Refused("metadata")
            seen_metadata = True
            out.metadata = _metadata(value, out)
            continue
        if name in out.entries:
            out.duplicates.append(name)
        out.entries[name] = _entry(name, value, out)
    return out


def _metadata(value: Any, out: Parsed) -> dict[str, str]:
    if value is None:
        out.oddities.append("unusual-json")
        return {}
    if not isinstance(value, _Object) or not all(isinstance(item, str) for _, item in value):
        raise Refused("metadata")
    return dict(value)


def _entry(name: str, value: Any, out: Parsed) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    shown = printable(name)
    if isinstance(value, _Object):
        fields: dict[str, Any] = {}
        for key, item in value:
            if key in ("dtype", "shape", "data_offsets"):
                if key in fields:
                    raise Refused("entry", tensor=shown)
                fields[key] = item
        if len(fields) != 3:
            raise Refused("entry", tensor=shown)
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    elif type(value) is list and len(value) == 3:
        # A struct written as an array: serde takes it, the format does not know it.
        out.oddities.append("unusual-json")
        dtype, shape, offsets = value
    else:
        raise Refused("entry", tensor=shown)
    if isinstance(dtype, _Object) and len(dtype) == 1 and dtype[0][1] is None:
        out.oddities.append("unusual-json")
        dtype = dtype[0][0]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Refused("dtype", tensor=shown, dtype=printable(str(dtype), 40))
    if type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        raise Refused("entry", tensor=shown)
    if not all(type(size) is int and 0 <= size < _U64 for size in (*shape, *offsets)):
        raise Refused("number", tensor=shown)
    return dtype, tuple(shape), (offsets[0], offsets[1])


# A string, a number or what Python takes for one, and what nests.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?(?:NaN|Infinity|\d[\d.eE+-]*)|[\[\]{}]')
_NESTS = {"[": 1, "{": 1, "]": -1, "}": -1}
# Whole pairs of surrogates and other escapes are stepped over; group 1 is a half alone.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


def _place(text: str, wrong: Callable[[str, int], bool]) -> int:
    """The first byte of the first token of which something is true, given how deep it lies: `json` does not tell."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += _NESTS.get(token[0], 0)
        if wrong(token[0], depth):
            return len(text[: token.start()].encode())
    raise AssertionError("what was refused is in the text")


class _NoNumber(Exception):
    """A literal that Python takes for a number, and the reference does not."""


def _is_no_number(token: str) -> bool:
    return token.lstrip("-")[:1] in ("N", "I") or (token.lstrip("-")[:1].isdigit() and math.isinf(float(token)))


def _no_constant(name: str) -> Any:
    raise _NoNumber


def _integer(text: str) -> int | float:
    # serde keeps -0 and what does not fit 64 bits as floating point, which no size may be.
    if text == "-0" or not -(2**63) <= int(text[:40]) < _U64 or len(text) > 40:
        return _number(text)
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _NoNumber
    return value


def _walk(value: Any, depth: int) -> None:
    """Refuse what serde refuses inside any value: too deep nesting, text that is not Unicode.

    Raises
    ------
    RecursionError, UnicodeEncodeError
    """
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, list):
        if depth == 0:
            raise RecursionError
        for item in value:
            if isinstance(value, _Object):
                _walk(item[0], depth - 1)
                _walk(item[1], depth - 1)
            else:
                _walk(item, depth - 1)
