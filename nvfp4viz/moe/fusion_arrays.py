"""Whole arrays through a fused layout: weights to ranks and back, outputs to parts, and what a careless cut would do.

`nvfp4viz.moe.fusion` says which row stands where; here rows are moved.  Anything that has rows goes through: BF16
weights, packed codes, block scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import InputError
from nvfp4viz.moe.fusion import FusedLayout

Array = npt.NDArray[Any]


def fuse(layout: FusedLayout, tensors: Mapping[str, Array]) -> Array:
    """Every rank's fused matrix, (tp, R, ...), from checkpoint tensors (rows, ...): weights, packed codes, scales.

    Raises
    ------
    InputError
        ``fusion.tensor`` if a tensor is missing or has another number of rows.

    >>> from nvfp4viz.moe.fusion import gate_up_layout
    >>> rows = {"gate_proj": np.arange(4), "up_proj": np.arange(10, 14)}
    >>> fuse(gate_up_layout(4, tp=2), rows).tolist()
    [[0, 1, 10, 11], [2, 3, 12, 13]]
    """
    for name, rows in layout.tensors.items():
        if name not in tensors or len(tensors[name]) != rows:
            raise InputError("fusion.tensor", name=name, rows=rows)
    return np.concatenate([tensors[name] for name in layout.tensors])[layout.sources]


def unfuse(layout: FusedLayout, fused: Array) -> dict[str, Array]:
    """The checkpoint's tensors from every rank's matrix (tp, R, ...), of copies the first; the way back of `fuse`."""
    ranks, rows = layout.places
    whole = fused[ranks[:, 0], rows[:, 0]]
    ends = np.cumsum(list(layout.tensors.values()))[:-1]
    return dict(zip(layout.tensors, np.split(whole, ends), strict=True))


def split_outputs(layout: FusedLayout, fused: Array) -> dict[str, Array]:
    """Each part's outputs, (rows of the part, ...), from every rank's product (tp, R, ...), of copies the first."""
    found: dict[str, Array] = {}
    for part in layout.parts:
        out = np.empty((part.rows, *fused.shape[2:]), fused.dtype)
        # Backwards, so that of several copies the first stays.
        for run in reversed(layout.runs):
            if run.part == part.name:
                out[run.part_first : run.part_first + run.rows] = fused[run.rank, run.first : run.first + run.rows]
        found[part.name] = out
    return found


def cut_in_pieces(layout: FusedLayout) -> tuple[dict[str, int], ...]:
    """Rows of each part that a rank gets if the fused whole is simply cut into ``tp`` equal pieces.

    Right for the interleaved order, whose every key head brings its own q, k, v and z; wrong for the flat one, which
    has to be cut part by part.

    >>> from nvfp4viz.moe.fusion import gate_up_layout
    >>> cut_in_pieces(gate_up_layout(4, tp=2))
    ({'gate': 4, 'up': 0}, {'gate': 0, 'up': 4})
    """
    whole = layout.whole
    names = np.concatenate([np.full(run.rows, index) for index, run in enumerate(whole.runs)])
    found = []
    for piece in np.split(names, np.arange(1, layout.tp) * len(names) // layout.tp):
        counts = dict.fromkeys((part.name for part in layout.parts), 0)
        for index, count in zip(*np.unique(piece, return_counts=True), strict=True):
            counts[whole.runs[index].part] += int(count)
        found.append(counts)
    return tuple(found)


def misplaced_channels(layout: FusedLayout) -> tuple[int, int]:
    """``(wrong, all)``: channels of the DeltaNet convolution that would meet another channel's kernel.

    The convolution's weight stands in the order q, k, v on every rank, whatever the projection's order; its
    ``2 key_dim + value_dim`` channels are counted over all ranks.  Outputs taken as they come are in that order only if
    the projection is flat.

    >>> from nvfp4viz.moe.fusion import qkvz_layout
    >>> misplaced_channels(qkvz_layout(2, 4, 8, 8)), misplaced_channels(qkvz_layout(2, 4, 8, 8, order="interleaved"))
    ((0, 64), (40, 64))
    """
    wrong = total = 0
    for rank in range(layout.tp):
        runs = [run for run in layout.runs if run.rank == rank and run.part != "z"]
        came = np.concatenate([layout.sources[rank, run.first : run.first + run.rows] for run in runs])
        sorted_runs = [run for part in "qkv" for run in runs if run.part == part]
        wanted = np.concatenate([layout.sources[rank, run.first : run.first + run.rows] for run in sorted_runs])
        wrong += int((came != wanted).sum())
        total += len(came)
    return wrong, total
