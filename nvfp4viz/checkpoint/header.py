"""Read safetensors headers: every tensor's type, shape and place, and everything that is wrong with the file.

A file is a little-endian ``u64`` N, N bytes of JSON, then the data; ``data_offsets`` count from the end of the
JSON.  The verdict of the reference package is the oracle for what is valid; where it accepts what the format
forbids, the file is read and the oddity reported.

Tensors stay columns (`columns`, `table`): no object per tensor is made.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from nvfp4viz.checkpoint import strict_json
from nvfp4viz.checkpoint.columns import Columns, parse_header
from nvfp4viz.checkpoint.dtypes import DTYPES
from nvfp4viz.checkpoint.problems import ContainerProblem, printable, problem
from nvfp4viz.checkpoint.sniff import PEEK, looks_like
from nvfp4viz.checkpoint.table import Ints, TensorEntry, TensorTable
from nvfp4viz.errors import CheckpointError

__all__ = ["HEADER_LIMIT", "Header", "ReadRange", "TensorEntry", "TensorTable", "read_header"]

HEADER_LIMIT = 100_000_000
_U64 = 2**64

ReadRange = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header, as far as it could be read.

    Attributes
    ----------
    entries
        Tensors that lie inside the file.
    unreadable
        Tensors that the header describes beyond the file's end.
    header_bytes
        ``8 + N``; 0 where no header could be read.
    valid
        The reference package accepts this file.
    """

    file: str
    size: int
    header_bytes: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    entries: TensorTable = field(default_factory=TensorTable.empty)
    unreadable: TensorTable = field(default_factory=TensorTable.empty)
    problems: tuple[ContainerProblem, ...] = ()

    @property
    def valid(self) -> bool:
        return not any(item.severity == "error" for item in self.problems)

    @property
    def readable(self) -> bool:
        return self.header_bytes > 0


def read_header(file: str, size: int, read: ReadRange) -> Header:
    """Read one file's header with two small reads; a third only to say what a wrong file is.

    Parameters
    ----------
    file
        Name for messages and entries.
    size
        Bytes in the file.
    read
        ``read(begin, end)`` returns those bytes.

    Returns
    -------
    Header
        Never raises for what the file holds: what is wrong is in ``problems``.

    Raises
    ------
    CheckpointError
        What ``read`` raises; ``source.changed`` where it brings less than the file's size promises.
    """

    if size == 0:
        return _failed(file, size, "container.not-safetensors.empty")
    if size < 8:
        return _failed(file, size, "container.not-safetensors.too-short", {"size": size})
    (length,) = struct.unpack("<Q", _whole(file, read, 0, 8))
    if length <= min(HEADER_LIMIT, size - 8):
        try:
            text = _whole(file, read, 8, 8 + length)
            return _placed(file, size, 8 + length, parse_header(text))
        except strict_json.Refused as refused:
            reason, params = f"container.invalid-header.{refused.reason}", refused.params
    elif length > HEADER_LIMIT:
        reason, params = "container.header-too-large", {"length": length, "limit": HEADER_LIMIT}
    elif read(8, min(size, 9)) == b"{":
        # A header that begins as one was cut; anything else was never one.
        reason, params = "container.truncated.header", {"length": length, "missing": 8 + length - size}
    else:
        reason, params = "container.invalid-header.length", {"length": length, "size": size}
    kind = looks_like(read(0, min(size, PEEK)))
    if kind is not None:
        return _failed(file, size, f"container.not-safetensors.{kind}")
    return _failed(file, size, reason, params)


def _whole(file: str, read: ReadRange, begin: int, end: int) -> bytes:
    data = read(begin, end)
    if len(data) != end - begin:
        raise CheckpointError("source.changed", name=printable(file))
    return data


def _failed(file: str, size: int, text: str, params: dict[str, object] | None = None) -> Header:
    return Header(file, size, problems=(problem(text, file, params),))


def _placed(file: str, size: int, base: int, found: Columns) -> Header:
    """Check types, sizes and the tiling of the data section, and make the table."""
    begin, end, count = found.begin, found.end, len(found.names)
    expected = np.zeros(count, np.int64)
    masks = np.zeros(count, np.int64)
    if count:
        # 0 for what takes no whole number of bytes is never used: the check of the kind refuses it first.
        expected = np.array([_checked_bytes(found, place) for place in range(len(found.kinds))])[found.kind]
        masks = np.array([max(1, DTYPES[dtype].bits // 8) - 1 for dtype, _ in found.kinds])[found.kind]
    wrong = np.flatnonzero(end - begin != expected)
    if len(wrong):
        _refuse_range(found, int(wrong[0]), int(expected[wrong[0]]))
    stop = base + int(end.max(initial=0))
    table = TensorTable(
        found.names, found.kinds, found.kind, [file], np.zeros(count, np.int64), base + begin, base + end
    )
    entries, unreadable = table, TensorTable.empty()
    if stop > size:
        inside = table.end <= size
        entries, unreadable = table.take(np.flatnonzero(inside)), table.take(np.flatnonzero(~inside))
    tiled = count == 0 or (begin[0] == 0 and np.array_equal(begin[1:], end[:-1]))
    problems = [] if tiled else _untiled(file, found.names, begin, end)
    problems += _end_problems(file, size, stop, unreadable)
    # A header's odd length alone hurts nobody, nor does the place of a tensor without values.
    if (table.begin & masks)[end > begin].any():
        # A padded header would not mend what lies badly within the data section.
        odd = np.flatnonzero((begin & masks != 0) & (end > begin))
        text = "container.misaligned.order" if len(odd) else "container.misaligned"
        params = {"base": base, "tensor": printable(found.names[int(odd[0])]) if len(odd) else ""}
        problems.append(problem(text, file, params, severity="warn"))
    if found.duplicates:
        names = tuple(dict.fromkeys(found.duplicates))
        params = {"tensor": printable(names[0]), "count": len(names)}
        problems.append(problem("container.duplicate-key", file, params, severity="warn", tensors=names))
    for oddity in dict.fromkeys(found.oddities):
        problems.append(problem(f"container.invalid-header.{oddity}", file, severity="warn"))
    return Header(file, size, base, found.metadata, entries, unreadable, tuple(problems))


def _refuse_range(found: Columns, row: int, expected: int) -> NoReturn:
    begin, end = int(found.begin[row]), int(found.end[row])
    shown = printable(found.names[row])
    if begin > end:
        raise strict_json.Refused("offsets", tensor=shown)
    dtype, shape = found.kinds[found.kind[row]]
    raise strict_json.Refused(
        "size", tensor=shown, dtype=dtype, shape=list(shape), expected=expected, stored=end - begin
    )


def _checked_bytes(found: Columns, place: int) -> int:
    """Bytes that a type and shape take; refuses what the reference's checked arithmetic refuses."""
    dtype, shape = found.kinds[place]
    bits, reason = 0, "dtype"
    if dtype in DTYPES:
        bits, reason = _checked_bits(dtype, shape)
    if reason:
        first = found.names[int(np.flatnonzero(found.kind == place)[0])]
        raise strict_json.Refused(reason, tensor=printable(first), dtype=printable(dtype, 40))
    return bits // 8


def _checked_bits(dtype: str, shape: tuple[int, ...]) -> tuple[int, str]:
    """Bits, and why they cannot be: ``""``, ``"overflow"`` or ``"half-byte"``."""
    count = 1
    for size in shape:
        count *= size
        if count >= _U64:
            return 0, "overflow"
    bits = count * DTYPES[dtype].bits
    if bits >= _U64:
        return 0, "overflow"
    return bits, "half-byte" if bits % 8 else ""


def _untiled(file: str, names: list[str], begin: Ints, end: Ints) -> list[ContainerProblem]:
    """Holes and overlaps between tensors, in file order: the reference refuses both."""
    # A reader sorts by offset; the order of the JSON is free.
    order = np.lexsort((end, begin))
    begin, end = begin[order], end[order]
    reached = np.maximum.accumulate(np.concatenate([[0], end]))[:-1]
    gaps = begin - reached
    found = []
    if (gaps > 0).any():
        holes = gaps[gaps > 0]
        found.append(problem("container.hole", file, {"count": len(holes), "missing": int(holes.sum())}))
    overlaps = np.flatnonzero(gaps < 0)
    if len(overlaps):
        # The tensor that reaches furthest so far is the one that the next cuts into.
        furthest = np.maximum.accumulate(np.where(end >= reached, np.arange(len(end)), 0))
        pairs = [(names[order[furthest[row - 1]]], names[order[row]]) for row in overlaps.tolist()]
        first, second = (printable(name) for name in pairs[0])
        involved = tuple(dict.fromkeys(name for pair in pairs for name in pair))
        params = {"first": first, "second": second, "count": len(overlaps)}
        found.append(problem("container.overlap", file, params, tensors=involved))
    return found


def _end_problems(file: str, size: int, stop: int, unreadable: TensorTable) -> list[ContainerProblem]:
    """Does the file end where its last tensor does?"""
    if stop > size:
        names = tuple(unreadable)
        params = {"missing": stop - size, "count": len(names)}
        return [problem("container.truncated", file, params, tensors=names)]
    if stop < size:
        return [problem("container.trailing-bytes", file, {"extra": size - stop})]
    return []
