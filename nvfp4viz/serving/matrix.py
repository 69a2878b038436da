"""A part of any matrix of a checkpoint, small enough for an answer at once or all of it, and its error when grouped.

A matrix of at most `MOST` values is taken whole.  Of a larger one a reader chooses: a *window* of neighbouring rows and
columns, rows *spread* evenly over all of it in bands of sixteen neighbours (a grouping along the rows needs them; of
rows longer than 16,384 the beginning), or the *whole*, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import CheckpointError
from nvfp4viz.formats import BLOCK
from nvfp4viz.quant import grouping
from nvfp4viz.quant.grouping_pieces import compare_pieces
from nvfp4viz.serving.stored import StoredMatrix, find_expert, find_matrix, matrix_names

Array = npt.NDArray[Any]
How = Literal["window", "spread", "whole"]
HOWS: tuple[How, ...] = get_args(How)
MOST = 1 << 20
"""Values whose comparison leaves a redrawn figure under 250 ms on two cores: reading, decoding and comparing a million
of them takes about 70 ms there, four million 200."""
MOST_COLUMNS = 2048
"""Of a window."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which rows and columns of a matrix are measured.

    Attributes
    ----------
    shape
        Of the whole matrix.
    bands
        First row and the row after the last, of each run of neighbouring rows; multiples of 16.
    left, right
        First column and the one after the last; multiples of 16, of 32 where the matrix decodes in blocks of 32.
    """

    shape: tuple[int, int]
    bands: tuple[tuple[int, int], ...]
    left: int
    right: int

    @property
    def rows(self) -> int:
        return sum(bottom - top for top, bottom in self.bands)

    @property
    def columns(self) -> int:
        return self.right - self.left

    @property
    def size(self) -> int:
        """Values."""
        return self.rows * self.columns

    @property
    def is_whole(self) -> bool:
        return (self.rows, self.columns) == self.shape


def choose_part(found: StoredMatrix, how: How = "window", top: int = 0, left: int = 0) -> Part:
    """The part of a matrix that ``how`` asks for; all of it where it has at most `MOST` values.

    Rows and columns beyond the last full group of sixteen are left out.

    Parameters
    ----------
    top, left
        Where a window begins; brought down to a group's border, and inside.

    Raises
    ------
    CheckpointError
        ``matrix.small`` for fewer than 16 rows or columns.
    """
    grain = max(found.grain, BLOCK)
    n, k = found.shape
    rows, columns = n - n % BLOCK, k - k % grain
    if not rows or not columns:
        raise CheckpointError("matrix.small", tensor=found.name, shape=found.shape, least=grain)
    if how == "whole" or rows * columns <= MOST:
        return Part(found.shape, ((0, rows),), 0, columns)
    if how == "spread":
        wide = min(columns, MOST // (4 * BLOCK) // grain * grain)
        count = min(MOST // (BLOCK * wide), rows // BLOCK)
        places = np.linspace(0, rows // BLOCK - 1, count).round().astype(int) * BLOCK
        return Part(found.shape, tuple((int(at), int(at) + BLOCK) for at in places), 0, wide)
    wide = min(columns, MOST_COLUMNS)
    tall = min(rows, MOST // wide // BLOCK * BLOCK)
    top = min(max(top, 0) // BLOCK * BLOCK, rows - tall)
    left = min(max(left, 0) // grain * grain, columns - wide)
    return Part(found.shape, ((top, top + tall),), left, left + wide)


def read_part(found: StoredMatrix, part: Part) -> Array:
    """The part's values, bands below one another: ``(part.rows, part.columns)`` bfloat16 or float32.

    Raises
    ------
    CheckpointError
        ``checkpoint.unreadable``; ``matrix.not-finite`` and ``matrix.zero``, where no error can be told.
    """
    pieces = [found.rectangle(top, bottom, part.left, part.right) for top, bottom in part.bands]
    values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    _check(found.name, *_bad(values))
    return values


def compare_part(
    found: StoredMatrix, part: Part, progress: Callable[[int, int], None] | None = None
) -> tuple[grouping.GroupedError, ...]:
    """The part's error under every grouping, in the order of ``GROUPINGS``, under one global scale of the part.

    More than `MOST` values are read piece by piece and twice, for their maximum first, so that memory stays small.

    Parameters
    ----------
    progress
        Told of the pieces done, and of how many.

    Raises
    ------
    CheckpointError
        Those of `read_part`.
    """
    if part.size <= MOST:
        return grouping.compare_tensor(read_part(found, part))
    step = max(BLOCK, MOST // part.columns // BLOCK * BLOCK)
    starts = [(at, min(at + step, bottom)) for top, bottom in part.bands for at in range(top, bottom, step)]
    done = 0

    def pieces() -> Iterator[Array]:
        nonlocal done
        bad, some = 0, False
        for top, bottom in starts:
            values = found.rectangle(top, bottom, part.left, part.right)
            count, any_here = _bad(values)
            bad, some = bad + count, some or any_here
            yield values
            done += 1
            if progress is not None:
                progress(done, 2 * len(starts))
        _check(found.name, bad, some)

    return compare_pieces(pieces)


def _bad(values: Array) -> tuple[int, bool]:
    """How many values are NaN or infinite, and whether any is not zero."""
    wide = values.astype(np.float32)
    return int(np.count_nonzero(~np.isfinite(wide))), bool(np.any(wide))


def _check(name: str, bad: int, some: bool) -> None:
    """Nothing can be said of the error of NaN, of infinities, or of zeros alone."""
    if bad:
        raise CheckpointError("matrix.not-finite", tensor=name, count=bad)
    if not some:
        raise CheckpointError("matrix.zero", tensor=name)


__all__ = [
    "HOWS",
    "MOST",
    "MOST_COLUMNS",
    "How",
    "Part",
    "StoredMatrix",
    "choose_part",
    "compare_part",
    "find_expert",
    "find_matrix",
    "matrix_names",
    "read_part",
]
