"""Read safetensors headers: every tensor's type, shape and place, and everything that is wrong with the file.

A file is a little-endian ``u64`` N, N bytes of JSON, then the data; ``data_offsets`` count from the end of the
JSON.  The verdict of the reference package is the oracle for what is valid; where it accepts what the format
forbids, the file is read and the oddity reported.

Two paths, one answer.  The fast path decodes into typed records (no dict per tensor, nothing for the cyclic garbage
collector to walk) and proves itself by encoding the records again and comparing bytes: equal bytes leave no room for a
repeated key, an extra field, ``1.0`` for ``1`` or an escaped name.  Whatever fails the proof takes the slow path
of `strict_json`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from nvfp4viz.checkpoint import strict_json
from nvfp4viz.checkpoint.dtypes import DTYPES
from nvfp4viz.checkpoint.problems import ContainerProblem, printable, problem
from nvfp4viz.checkpoint.sniff import PEEK, looks_like

HEADER_LIMIT = 100_000_000
_U64 = 2**64

ReadRange = Callable[[int, int], bytes]


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """Where one tensor lies.

    Attributes
    ----------
    name, dtype, shape
        As the header says; ``dtype`` in the format's spelling.
    file
        The shard's name inside the source.
    begin, end
        Byte range in the file, counted from the file's first byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class _Entry(msgspec.Struct, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


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
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    unreadable: dict[str, TensorEntry] = field(default_factory=dict)
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
    """

    if size == 0:
        return _failed(file, size, "container.not-safetensors.empty")
    if size < 8:
        return _failed(file, size, "container.not-safetensors.too-short", {"size": size})
    (length,) = struct.unpack("<Q", read(0, 8))
    if length <= min(HEADER_LIMIT, size - 8):
        try:
            text = read(8, 8 + length)
            return _placed(file, size, 8 + length, _fast(text) or _slow(text))
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


def _failed(file: str, size: int, text: str, params: dict[str, object] | None = None) -> Header:
    return Header(file, size, problems=(problem(text, file, params),))


@dataclass(slots=True)
class _Parsed:
    entries: dict[str, _Entry]
    metadata: dict[str, str]
    duplicates: list[str] = field(default_factory=list)
    oddities: list[str] = field(default_factory=list)


_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])
_METADATA = msgspec.json.Decoder(dict[str, str])
_STRING = rb'"(?:[^"\\]|\\.)*"'
_LEADING_METADATA = re.compile(rb'\{"__metadata__":(\{(?:' + _STRING + rb":" + _STRING + rb",?)*\})(?:,(?=\")|(?=\}))")


def _fast(text: bytes) -> _Parsed | None:
    """Decode a header in the writers' usual form; None where it is not, or the proof fails."""
    body, metadata = text.rstrip(b" "), {}
    if not (body.startswith(b"{") and body.endswith(b"}")):
        return None
    try:
        leading = _LEADING_METADATA.match(body)
        if leading:
            metadata = _METADATA.decode(leading[1])
            if msgspec.json.encode(metadata) != leading[1]:
                return None
            body = b"{" + body[leading.end() :]
        entries = _ENTRIES.decode(body)
        if b"__metadata__" in body or (
            msgspec.json.encode(entries) != body
            and msgspec.json.encode(entries) != msgspec.json.format(body, indent=-1)
        ):
            return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return _Parsed(entries, metadata)


def _slow(text: bytes) -> _Parsed:
    parsed = strict_json.parse(text)
    entries = {name: _Entry(*fields) for name, fields in parsed.entries.items()}
    return _Parsed(entries, parsed.metadata, parsed.duplicates, parsed.oddities)


def _placed(file: str, size: int, base: int, parsed: _Parsed) -> Header:
    """Check types, sizes and the tiling of the data section, and make the entries."""
    sizes: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    entries: dict[str, TensorEntry] = {}
    unreadable: dict[str, TensorEntry] = {}
    last, stop, tiled, misaligned = 0, 0, True, base % 8
    for name, item in parsed.entries.items():
        begin, end = item.data_offsets
        known = sizes.get((item.dtype, item.shape))
        if known is None:
            known = _checked_bytes(name, item), max(1, DTYPES[item.dtype].bits // 8) - 1
            sizes[(item.dtype, item.shape)] = known
        expected, mask = known
        if end - begin != expected or begin < 0:
            _refuse_range(name, item, expected)
        entry = TensorEntry(name, item.dtype, item.shape, file, base + begin, base + end)
        if base + end > size:
            unreadable[name] = entry
        else:
            entries[name] = entry
        if begin != last:
            tiled = False
        if end > stop:
            stop = end
        last = end
        misaligned |= (base + begin) & mask
    problems = [] if tiled else _untiled(file, parsed.entries)
    problems += _end_problems(file, size, base + stop, unreadable)
    if misaligned:
        problems.append(problem("container.misaligned", file, {"base": base}, severity="warn"))
    if parsed.duplicates:
        names = tuple(dict.fromkeys(parsed.duplicates))
        params = {"tensor": printable(names[0]), "count": len(names)}
        problems.append(problem("container.duplicate-key", file, params, severity="warn", tensors=names))
    for oddity in dict.fromkeys(parsed.oddities):
        problems.append(problem(f"container.invalid-header.{oddity}", file, severity="warn"))
    return Header(file, size, base, parsed.metadata, entries, unreadable, tuple(problems))


def _refuse_range(name: str, item: _Entry, expected: int) -> NoReturn:
    begin, end = item.data_offsets
    if begin > end or begin < 0:
        raise strict_json.Refused("offsets", tensor=printable(name))
    shape = list(item.shape)
    raise strict_json.Refused(
        "size", tensor=printable(name), dtype=item.dtype, shape=shape, expected=expected, stored=end - begin
    )


def _checked_bytes(name: str, item: _Entry) -> int:
    """Bytes that a type and shape take; refuses what the reference's checked arithmetic refuses."""
    shown = printable(name)
    if item.dtype not in DTYPES:
        raise strict_json.Refused("dtype", tensor=shown, dtype=printable(item.dtype, 40))
    count = 1
    for size in item.shape:
        if not 0 <= size < _U64:
            raise strict_json.Refused("number", tensor=shown)
        count *= size
        if count >= _U64:
            raise strict_json.Refused("overflow", tensor=shown)
    bits = count * DTYPES[item.dtype].bits
    if bits >= _U64:
        raise strict_json.Refused("overflow", tensor=shown)
    if bits % 8:
        raise strict_json.Refused("half-byte", tensor=shown, dtype=item.dtype)
    return bits // 8


def _untiled(file: str, entries: dict[str, _Entry]) -> list[ContainerProblem]:
    """Holes and overlaps between tensors, in file order: the reference refuses both."""
    hole_bytes, holes, overlaps, last, before = 0, 0, [], 0, ""
    # A reader sorts by offset; the order of the JSON is free.
    for name, item in sorted(entries.items(), key=lambda pair: pair[1].data_offsets):
        begin, end = item.data_offsets
        if begin > last:
            holes, hole_bytes = holes + 1, hole_bytes + begin - last
        elif begin < last:
            overlaps.append((before, name))
        if end >= last:
            last, before = end, name
    found = []
    if holes:
        found.append(problem("container.hole", file, {"count": holes, "missing": hole_bytes}))
    if overlaps:
        first, second = (printable(name) for name in overlaps[0])
        names = tuple(dict.fromkeys(name for pair in overlaps for name in pair))
        params = {"first": first, "second": second, "count": len(overlaps)}
        found.append(problem("container.overlap", file, params, tensors=names))
    return found


def _end_problems(file: str, size: int, stop: int, unreadable: dict[str, TensorEntry]) -> list[ContainerProblem]:
    """Does the file end where its last tensor does?"""
    if stop > size:
        names = tuple(unreadable)
        params = {"missing": stop - size, "count": len(names)}
        return [problem("container.truncated", file, params, tensors=names)]
    if stop < size:
        return [problem("container.trailing-bytes", file, {"extra": size - stop})]
    return []
