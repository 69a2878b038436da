"""Numbers that a reader pastes."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

from nvfp4viz.errors import InputError
from nvfp4viz.formats import encode_e2m1

_LONGEST = 40
_BETWEEN = re.compile(r"[\s,;，；、\[\](){}（）【】]+")


def parse_values(text: str, count: int, of: str = "values") -> tuple[float, ...]:
    """Exactly ``count`` numbers, separated by commas, semicolons, spaces or line breaks; brackets around them are fine.

    ``nan``, ``inf`` and ``-inf`` are numbers here.  A decimal comma is not: ``1,5`` is two numbers.

    Parameters
    ----------
    of : "values" or "experts"
        Whose numbers these are: the elements of a block, or one for each expert.  Errors speak of them.

    Raises
    ------
    InputError
        ``values.none``, ``values.not-a-number`` (names the first piece that is none), ``values.count``, the same three
        of ``experts``, or ``number.decimal-comma`` where reading the commas as decimal points gives the right count.

    >>> parse_values("[1, -2.5; nan]", 3)
    (1.0, -2.5, nan)
    """
    pieces = _pieces(text)
    if not pieces:
        raise InputError(f"{of}.none", count=count)
    numbers = []
    for position, piece in enumerate(pieces, start=1):
        try:
            numbers.append(_number(piece))
        except ValueError:
            raise InputError(f"{of}.not-a-number", text=piece[:_LONGEST], position=position) from None
    if len(numbers) != count:
        _refuse_decimal_commas(text, count)
        raise InputError(f"{of}.count", count=count, given=len(numbers))
    return tuple(numbers)


def _refuse_decimal_commas(text: str, count: int) -> None:
    """Say what to write to a reader who writes ``1,5`` for one and a half, where that reading explains the count."""
    pieces = [piece for piece in re.split(r"[\s;；、\[\](){}（）【】]+", text) if piece.strip(",，")]
    comma = re.compile(r"([+−-]?\d*)[,，](\d+(?:[eE][+−-]?\d+)?)[,，]?")
    found = [match for match in map(comma.fullmatch, pieces) if match]
    if found and len(pieces) == count:
        point = ".".join(found[0].groups())
        raise InputError("number.decimal-comma", text=found[0][0][:_LONGEST], point=point[:_LONGEST])


def _pieces(text: str) -> list[str]:
    return [piece for piece in _BETWEEN.split(text) if piece]


def _number(piece: str) -> float:
    return float(piece.replace("−", "-").replace("∞", "inf").replace("_", "?"))


def parse_codes(text: str, count: int) -> str:
    """``count`` E2M1 codes as hex digits: from hex digits, or from ``count`` numbers, rounded to nearest.

    Pieces of one character each and anything with a sign or a point are numbers; longer runs of hex digits are codes.

    Raises
    ------
    InputError
        ``codes.not-a-code`` (names the first piece that is neither), ``codes.count``.

    >>> parse_codes("0123 89ab", 8), parse_codes("1.5 -6 0.2 100", 4)
    ('012389ab', '3f07')
    """
    pieces = _pieces(text)
    joined = "".join(pieces).lower()
    if re.fullmatch(r"[0-9a-f]*", joined) and len(pieces) < len(joined):
        if len(joined) != count:
            raise InputError("codes.count", count=count, given=len(joined))
        return joined
    values = []
    for position, piece in enumerate(pieces, start=1):
        try:
            values.append(_number(piece))
        except ValueError:
            raise InputError("codes.not-a-code", text=piece[:_LONGEST], position=position) from None
    if len(values) != count:
        _refuse_decimal_commas(text, count)
        raise InputError("codes.count", count=count, given=len(values))
    return "".join(f"{code:x}" for code in encode_e2m1(np.asarray(values, np.float32)))


def parse_bytes(text: str, count: int) -> str:
    """``count`` bytes as hex digits, written with or without ``0x`` and separators.

    Raises
    ------
    InputError
        ``bytes.not-a-byte``, ``bytes.count``.

    >>> parse_bytes("0x38, 7F b0 00", 4)
    '387fb000'
    """
    pieces = [re.sub(r"^0[xX]", "", piece).lower() for piece in _pieces(text)]
    for position, piece in enumerate(pieces, start=1):
        if not re.fullmatch(r"([0-9a-f]{2})+", piece):
            raise InputError("bytes.not-a-byte", text=piece[:_LONGEST], position=position)
    joined = "".join(pieces)
    if len(joined) != 2 * count:
        raise InputError("bytes.count", count=count, given=len(joined) // 2)
    return joined


def parse_accumulator(text: str) -> float:
    """One float32; ``nan``, ``inf`` and numbers beyond its range are taken, the latter as infinities.

    Raises
    ------
    InputError
        ``accumulator.not-a-number``, ``number.decimal-comma``

    >>> parse_accumulator("-1e300"), parse_accumulator("0.1")
    (-inf, 0.10000000149011612)
    """
    with np.errstate(over="ignore"):
        return float(np.float32(_single(text, "accumulator.not-a-number")))


def _single(text: str, code: str) -> float:
    """One number; anything else is an error of the field that asked."""
    pieces = _pieces(text)
    if len(pieces) != 1:
        _refuse_decimal_commas(text, 1)
    try:
        (piece,) = pieces
        return _number(piece)
    except ValueError:
        raise InputError(code, text=text.strip()[:_LONGEST]) from None


def parse_scale(text: str) -> float:
    """One global scale; any float32, also ``nan``, ``inf``, ``0`` and negative ones.

    Raises
    ------
    InputError
        ``scale.not-a-number``, ``number.decimal-comma``
    """
    return _single(text, "scale.not-a-number")


def to_bf16(values: tuple[float, ...]) -> np.ndarray:
    """As the kernel takes them: BF16, rounded to nearest even; beyond its range they become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(np.asarray(values, np.float32), ml_dtypes.bfloat16)
