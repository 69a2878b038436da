"""The three groupings on a matrix that comes in pieces: one global scale for all of it, and memory for one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.quant.compare import ErrorSummary, decibels, summarise
from nvfp4viz.quant.grouping import GROUPINGS, RECIPE, GroupedError, quantize_along
from nvfp4viz.quant.scales import amax, global_scale

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]


def compare_pieces(pieces: Callable[[], Iterable[Array]], recipe: str = RECIPE) -> tuple[GroupedError, ...]:
    """As :func:`nvfp4viz.quant.grouping.compare_tensor` of all pieces below one another, without ever holding them all.

    Codes and scales are those of the whole matrix, and so are the counts and the largest error; the mean is summed
    piece by piece in float64, so that its last digits may differ.

    Parameters
    ----------
    pieces
        Gives the matrix's rows in order, ``(R, K)`` bfloat16 or float32, R and K multiples of 16.  Asked for twice: the
        maximum of all rows makes the global scale.

    Raises
    ------
    FormatError
        Those of :func:`nvfp4viz.quant.grouping.quantize_along`.
    """
    largest, kind = np.float32(0), np.dtype(np.float32)
    for piece in pieces():
        largest, kind = np.maximum(largest, amax(piece)), piece.dtype
    above = global_scale(largest, recipe, kind)
    sums = {along: _Sums() for along in GROUPINGS}
    for piece in pieces():
        values = piece.astype(np.float32)
        for along, total in sums.items():
            decoded = quantize_along(piece, along, recipe, global_scale=above).decoded
            total.add(values, summarise(values, decoded))
    return tuple(GroupedError(along, total.summary()) for along, total in sums.items())


@dataclass(slots=True)
class _Sums:
    """Errors of pieces, added up."""

    size: int = 0
    power: float = 0.0
    error: float = 0.0
    max_abs: float = 0.0
    zeroed: int = 0

    def add(self, values: F32, found: ErrorSummary) -> None:
        self.size += values.size
        self.power += float(np.sum(values.astype(np.float64) ** 2))
        self.error += found.mse * values.size
        self.max_abs = float(np.maximum(self.max_abs, found.max_abs))  # a NaN stays, as in the whole matrix
        self.zeroed += found.zeroed

    def summary(self) -> ErrorSummary:
        sqnr = decibels(self.power, self.error)
        return ErrorSummary(self.error / self.size, sqnr, self.max_abs, self.zeroed, 0)
