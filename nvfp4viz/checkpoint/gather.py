"""Many numbers of a checkpoint with few reads: neighbours in a file are fetched together."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint.dtypes import DTYPES, SCALE_BYTES
from nvfp4viz.checkpoint.problems import printable
from nvfp4viz.checkpoint.source import Source
from nvfp4viz.checkpoint.table import Ints, TensorTable
from nvfp4viz.errors import CheckpointError

# Reads that lie closer than this are one read: a seek costs more than 4 KiB of data.  A source may say its own ``gap``.
GAP = 4096
Ranges = list[tuple[int, int]]


def gather(
    source: Source,
    files: Sequence[str],
    shard: Ints,
    begin: Ints,
    fetched: Callable[[int], None],
    without: Container[str] = (),
) -> tuple[npt.NDArray[np.float32], dict[str, CheckpointError]]:
    """4 bytes at each place, as float32 whatever they mean.

    Parameters
    ----------
    shard, begin : (n,) int64
        Where each value lies: a number among ``files``, and its first byte there.
    fetched
        Told how many bytes came from each file.
    without
        Files that are not asked, because they are known to be lost.

    Returns
    -------
    values : (n,) float32
        NaN where a file could not be read, or was not asked.
    lost
        What stood in the way, by file: ``source.*``, ``source.changed`` where a file ends before a value.
    """
    values = np.full(len(shard), np.nan, np.float32)
    order = np.lexsort((begin, shard))
    in_order = shard[order]
    runs = np.split(order, np.flatnonzero(np.diff(in_order)) + 1) if len(order) else []
    gap: int = getattr(source, "gap", GAP)
    runs = [run for run in runs if files[shard[run[0]]] not in without]
    plan = {files[shard[run[0]]]: _Places(begin[run], gap) for run in runs}
    chunks = _read_many(source, {file: places.ranges for file, places in plan.items()})
    lost: dict[str, CheckpointError] = {}
    for run, (file, places) in zip(runs, plan.items(), strict=True):
        found = chunks[file]
        if isinstance(found, CheckpointError):
            lost[file] = found
            continue
        data = b"".join(found)
        fetched(len(data))
        if list(map(len, found)) != places.lengths.tolist():
            lost[file] = CheckpointError("source.changed", name=printable(file))
            continue
        values[run] = places.values(data)
    return values, lost


def gather_numbers(
    source: Source,
    table: TensorTable,
    shard: Ints,
    begin: Ints,
    kind: Ints,
    fetched: Callable[[int], None],
    without: Container[str] = (),
) -> tuple[npt.NDArray[np.float32], dict[str, CheckpointError]]:
    """Numbers at places in a table's files, of the types of their kinds in it; otherwise as `gather`.

    Numbers of a file that is lost mean nothing.
    """
    types = [dtype for dtype, _ in table.kinds]
    width = np.array([SCALE_BYTES.get(dtype, 0) for dtype in types] or [0])[kind]
    half, double = width == 2, np.flatnonzero(width == 8)
    # Of two bytes the two before belong to a neighbour or to the header; behind may be the file's end.  Eight bytes are
    # twice four.
    places = np.concatenate([begin - 2 * half, begin[double] + 4])
    shards = np.concatenate([shard, shard[double]])
    found, lost = gather(source, table.files, shards, places, fetched, without)
    values, upper = found[: len(shard)], found[len(shard) :]
    if len(double):
        words = np.stack([values[double], upper], axis=1)
        with np.errstate(all="ignore"):
            values[double] = words.view("<f8")[:, 0].astype(np.float32)
    for dtype in {types[k] for k in set(kind[half].tolist())}:  # np.unique would load numpy.ma, 10 ms
        these = np.array([name == dtype for name in types])[kind]
        bits = (values[these].view(np.uint32) >> 16).astype(np.uint16)
        values[these] = bits.view(DTYPES[dtype].view).astype(np.float32)
    return values, lost


class _Places:
    """4-byte values of one file at ascending places, coalesced into ranges over gaps up to ``gap`` bytes."""

    def __init__(self, begins: Ints, gap: int) -> None:
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


def _read_many(source: Source, plan: Mapping[str, Ranges]) -> dict[str, list[bytes] | CheckpointError]:
    """All ranges of all files, at a time where the source can do that; an error for a file that cannot be read."""
    many = getattr(source, "try_many", None)
    if many is not None:
        chunks: dict[str, list[bytes] | CheckpointError] = many(plan)
        return chunks
    some = getattr(source, "read_ranges", None)

    def read(file: str, ranges: Ranges) -> list[bytes] | CheckpointError:
        try:
            found: list[bytes] = some(file, ranges) if some else [source.read_range(file, *ends) for ends in ranges]
        except CheckpointError as error:
            return error
        return found

    return {file: read(file, ranges) for file, ranges in plan.items()}
