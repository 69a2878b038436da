"""Many 4-byte values of a checkpoint with few reads: neighbours in a file are fetched together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint.problems import printable
from nvfp4viz.checkpoint.source import Source
from nvfp4viz.errors import CheckpointError

# Reads that lie closer than this are one read: a seek costs more than 4 KiB of data.  A source may say its own ``gap``.
GAP = 4096


def gather(
    source: Source,
    files: Sequence[str],
    shard: npt.NDArray[np.int64],
    begin: npt.NDArray[np.int64],
    fetched: Callable[[int], None],
) -> npt.NDArray[np.float32]:
    """4 bytes at each place, as float32 whatever they mean.

    Parameters
    ----------
    shard, begin : (n,) int64
        Where each value lies: a number among ``files``, and its first byte there.
    fetched
        Told how many bytes came from each file.

    Returns
    -------
    (n,) float32

    Raises
    ------
    CheckpointError
        ``checkpoint.unreadable`` where a file ends before a value.
    """
    values = np.empty(len(shard), np.float32)
    order = np.lexsort((begin, shard))
    in_order = shard[order]
    runs = np.split(order, np.flatnonzero(np.diff(in_order)) + 1) if len(order) else []
    gap: int = getattr(source, "gap", GAP)
    plan = {files[shard[run[0]]]: _Places(begin[run], gap) for run in runs}
    chunks = _read_many(source, {file: places.ranges for file, places in plan.items()})
    for run, (file, places) in zip(runs, plan.items(), strict=True):
        data = b"".join(chunks[file])
        fetched(len(data))
        if list(map(len, chunks[file])) != places.lengths.tolist():
            raise CheckpointError("checkpoint.unreadable", tensor="", file=printable(file))
        values[run] = places.values(data)
    return values


class _Places:
    """4-byte values of one file at ascending places, coalesced into ranges over gaps up to ``gap`` bytes."""

    def __init__(self, begins: npt.NDArray[np.int64], gap: int) -> None:
        self._begins = begins
        self._first = np.concatenate([[True], np.diff(begins) > gap + 4])
        self._starts = begins[self._first]
        ends = np.append(begins[np.flatnonzero(self._first)[1:] - 1], begins[-1]) + 4
        self.lengths = ends - self._starts
        self.ranges = list(zip(self._starts.tolist(), ends.tolist(), strict=True))

    def values(self, data: bytes) -> npt.NDArray[np.float32]:
        """The values out of the ranges' bytes, one after the other."""
        # Where each range landed among the joined bytes.
        landed = np.cumsum(self.lengths) - self.lengths
        at = self._begins + (landed - self._starts)[np.cumsum(self._first) - 1]
        gathered = np.frombuffer(data, np.uint8)[at[:, None] + np.arange(4)]
        return np.frombuffer(gathered.tobytes(), "<f4")


def _read_many(source: Source, plan: dict[str, list[tuple[int, int]]]) -> dict[str, list[bytes]]:
    """All ranges of all files, at a time where the source can do that."""
    many = getattr(source, "read_many", None)
    if many is not None:
        chunks: dict[str, list[bytes]] = many(plan)
        return chunks
    some = getattr(source, "read_ranges", None)
    if some is not None:
        return {file: some(file, ranges) for file, ranges in plan.items()}
    return {file: [source.read_range(file, *ends) for ends in ranges] for file, ranges in plan.items()}
