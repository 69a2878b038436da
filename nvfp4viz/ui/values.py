"""Numbers that a reader pastes."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

from nvfp4viz.errors import InputError

_LONGEST = 40


def parse_values(text: str, count: int) -> tuple[float, ...]:
    """Exactly ``count`` numbers, separated by commas, semicolons, spaces or line breaks; brackets around them are fine.

    ``nan``, ``inf`` and ``-inf`` are numbers here.  A decimal comma is not: ``1,5`` is two numbers.

    Raises
    ------
    InputError
        ``values.none``, ``values.not-a-number`` (names the first piece that is none), ``values.count``.

    >>> parse_values("[1, -2.5; nan]", 3)
    (1.0, -2.5, nan)
    """
    pieces = [piece for piece in re.split(r"[\s,;，；、\[\](){}（）【】]+", text) if piece]
    if not pieces:
        raise InputError("values.none", count=count)
    numbers = []
    for position, piece in enumerate(pieces, start=1):
        try:
            numbers.append(float(piece.replace("−", "-").replace("∞", "inf").replace("_", "?")))
        except ValueError:
            raise InputError("values.not-a-number", text=piece[:_LONGEST], position=position) from None
    if len(numbers) != count:
        raise InputError("values.count", count=count, given=len(numbers))
    return tuple(numbers)


def parse_scale(text: str) -> float:
    """One global scale; any float32, also ``nan``, ``inf``, ``0`` and negative ones.

    Raises
    ------
    InputError
        ``values.not-a-number``
    """
    return parse_values(text, 1)[0]


def to_bf16(values: tuple[float, ...]) -> np.ndarray:
    """As the kernel takes them: BF16, rounded to nearest even; beyond its range they become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(np.asarray(values, np.float32), ml_dtypes.bfloat16)
