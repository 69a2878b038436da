"""Read a header's JSON into columns, without a JSON parser where the writers' usual form allows it.

Every writer that we know spells an entry ``"name":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}`` without a
space.  In that form ten quotation marks make an entry, so that NumPy finds all entries of a header at once: the marks
are counted off in tens, what stands between them is compared eight bytes at a time, and the digits of offsets are
added up eight at a time (the well-known three multiplications).

The path proves what it reads: every byte of the text is either inside a name (without control characters, backslashes
or anything beyond ASCII), or compared, or a digit of a number without leading zero.  Whatever does not fit takes the
strict way, `strict_json`, which is slow and says what is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint import strict_json
from nvfp4viz.checkpoint.problems import printable
from nvfp4viz.checkpoint.table import Ints, Kind

Words = npt.NDArray[np.uint64]
_U = np.uint64


@dataclass(slots=True)
class Columns:
    """A header's entries: names with type and shape (`kinds`, `kind`), and offsets from the end of the header."""

    names: list[str]
    kinds: list[Kind]
    kind: Ints
    begin: Ints
    end: Ints
    metadata: dict[str, str] = field(default_factory=dict)
    duplicates: list[str] = field(default_factory=list)
    oddities: list[str] = field(default_factory=list)


def parse_header(text: bytes) -> Columns:
    """The header's entries, by the fast way or the strict one.

    Raises
    ------
    strict_json.Refused
        Where the reference reader refuses the text.
    """
    return _fast(text) or _strict(text)


# Offsets that no file reaches; beyond them the columns' integers would overflow.
_FAR = 2**62


def _strict(text: bytes) -> Columns:
    parsed = strict_json.parse(text)
    kinds: dict[Kind, int] = {}
    kind = [kinds.setdefault((dtype, shape), len(kinds)) for dtype, shape, _ in parsed.entries.values()]
    offsets = [pair for _, _, pair in parsed.entries.values()]
    for name, pair in zip(parsed.entries, offsets, strict=True):
        if max(pair) > _FAR:
            raise strict_json.Refused("far", tensor=printable(name), offset=max(pair))
    begin, end = np.array(offsets, np.int64).reshape(-1, 2).T.copy()
    return Columns(
        list(parsed.entries), list(kinds), np.array(kind, np.int64), begin, end,
        parsed.metadata, parsed.duplicates, parsed.oddities,
    )  # fmt: skip


def _fast(text: bytes) -> Columns | None:
    """Entries of a header in a writer's usual form, with or without spaces; None where it is neither."""
    end = text.rfind(b"}") + 1
    if not text.isascii() or text[:1] != b"{" or text[end:].strip(b" "):
        return None
    found = _compact(text, end)
    if found is None and _SPACED.search(text):
        # Python's own writer puts a space after every colon and comma.
        try:
            compact = msgspec.json.format(text[:end], indent=-1)
        except msgspec.MsgspecError:
            return None
        found = _compact(compact, len(compact))
    return found


_SPACED = re.compile(rb'"[:,]\s')
_METADATA = msgspec.json.Decoder(dict[str, str])
_STRING = rb'"(?:[^"\\]|\\.)*"'
_LEADING_METADATA = re.compile(rb'\{"__metadata__":(\{(?:' + _STRING + rb":" + _STRING + rb",?)*\})(?:,(?=\")|(?=\}))")


def _compact(text: bytes, end: int) -> Columns | None:
    metadata, start = dict[str, str](), 1
    leading = _LEADING_METADATA.match(text)
    if leading:
        start = leading.end()
        try:
            metadata = _METADATA.decode(leading[1])
        except msgspec.MsgspecError:
            return None
        # Equal bytes leave no room for a repeated key.
        if msgspec.json.encode(metadata) != leading[1]:
            return None
    if start == end - 1:
        none = np.zeros(0, np.int64)
        return Columns([], [], none, none, none, metadata)
    found = None if b"\\" in text else _entries(text, start, end)
    if found is not None:
        found.metadata = metadata
    return found


def _word(text: bytes) -> np.uint64:
    return _U(int.from_bytes(text, "little"))


# What stands around the quotation marks of an entry, eight bytes at a time, and where, counted from a mark.
_AFTER_NAME = ((0, _word(b'":{"dtyp')), (4, _word(b'dtype":"')))
_AFTER_SHAPE = ((-2, _word(b'],"data_')), (6, _word(b'offsets"')), (8, _word(b'fsets":[')))
_NEXT, _THREE_BYTES = _word(b"]},"), _U(0xFFFFFF)
# Marks of an entry: around its name, "dtype", the type, "shape" and "data_offsets"; from a name's end to its type.
_MARKS, _TO_TYPE = 10, 12
# The shortest entry has more characters.
_SHORTEST = 48
_KIND = re.compile(r'([A-Z0-9_]{1,16})","shape":\[((?:0|[1-9][0-9]{0,18})(?:,(?:0|[1-9][0-9]{0,18})){0,15})?\],')


def _entries(text: bytes, start: int, end: int) -> Columns | None:
    """Entries between the header's first quotation mark, at ``start``, and its last brace; places count from there."""
    size = end - start
    if size < _SHORTEST or text[end - 3 : end] != b"]}}":
        return None
    data = np.frombuffer(text, np.uint8, size, start)
    marks = np.flatnonzero(data == ord('"'))
    count, rest = divmod(len(marks), _MARKS)
    if rest or not count or data.min() < 32:
        return None
    first, name_end, offsets = (np.ascontiguousarray(marks[k::_MARKS]) for k in (0, 1, 8))
    # The comma after each entry, or the brace that ends the header.
    stop = np.append(first[1:] - 1, size - 1)
    # Eight bytes from any position on.
    words = np.ndarray((size - 7,), "<u8", text, start, (1,))
    if (
        first[0] != 0
        or stop[-1] < offsets[-1] + 16
        or not (words[stop[:-1] - 2] & _THREE_BYTES == _NEXT).all()
        or not all((words[name_end + at] == word).all() for at, word in _AFTER_NAME)
        or not all((words[offsets + at] == word).all() for at, word in _AFTER_SHAPE)
    ):
        return None
    comma = _commas(data, offsets + 16, stop)
    numbers = _numbers(data, words, np.concatenate([offsets + 16, comma + 1]), np.concatenate([comma, stop - 2]))
    if numbers is None:
        return None
    letters = text.decode("ascii")
    places = zip((first + (start + 1)).tolist(), (name_end + start).tolist(), strict=True)
    names = [letters[a:b] for a, b in places]
    once = set(names)
    if len(once) != count or "__metadata__" in once:
        return None
    begin = name_end + _TO_TYPE
    groups = _alike(text, start, size, begin, offsets - begin)
    if groups is None:
        codes = _Codes()
        places = zip((begin + start).tolist(), (offsets + start).tolist(), strict=True)
        kind = np.array([codes[letters[a:b]] for a, b in places])
        spellings = list(codes)
    else:
        firsts, kind = groups
        spellings = [letters[begin[row] + start : offsets[row] + start] for row in firsts]
    kinds = [_kind(spelling) for spelling in spellings]
    if None in kinds:
        return None
    return Columns(names, [found for found in kinds if found], kind, numbers[:count], numbers[count:])


def _commas(data: npt.NDArray[np.uint8], begin: Ints, stop: Ints) -> Ints:
    """The comma between each entry's two offsets.

    As a rule an entry begins where the one before it ended, so that the number before the comma has as many digits as
    the one after the comma before: b[i+1] = t[i] − b[i] with t digits of both.  Where that finds no commas, all are
    looked for.
    """
    digits = stop - 2 - begin - 1
    signs = np.ones(len(begin), np.int64)
    signs[1::2] = -1
    before = np.ones(len(begin), np.int64)
    before[1:] -= np.cumsum((signs * digits)[:-1])
    before *= signs
    guessed = begin + before
    if ((before > 0) & (before < digits)).all() and (data[guessed] == ord(",")).all():
        return guessed
    commas = np.flatnonzero(data == ord(","))
    return commas[np.searchsorted(commas, stop) - 1]


# Longest spelling that is compared as words, and most different ones: enough for a checkpoint's matrices.
_WIDTH, _MOST = 32, 12
_WORDS = _WIDTH // 8
# Which bytes of so many words belong to a text of each length.
_INSIDE = np.array([[0xFF] * n + [0] * (_WIDTH - n) for n in range(_WIDTH + 1)], np.uint8).view(np.uint64)


def _alike(text: bytes, start: int, size: int, begin: Ints, length: Ints) -> tuple[list[int], Ints] | None:
    """First rows of equal texts, and each row's group; None where they are too long or too many.

    An entry is longer than `_WIDTH` from its type on, so that every row's words lie inside the header.
    """
    if length.max() > _WIDTH:
        return None
    # Column by column: a row's four words in four arrays are compared in half the time of four words side by side.
    every: Words = np.ndarray((size - 7,), "<u8", text, start, (1,))
    inside = _INSIDE[length]
    columns = [every[begin + 8 * k] & inside[:, k] for k in range(_WORDS)]
    group, left = np.zeros(len(begin), np.int64), np.ones(len(begin), np.bool_)
    firsts = [0]
    while len(firsts) <= _MOST:
        same = columns[0] == columns[0][firsts[-1]]
        for column in columns[1:]:
            same &= column == column[firsts[-1]]
        group[same] = len(firsts) - 1
        left &= ~same
        first = int(left.argmax())
        if not left[first]:
            return firsts, group
        firsts.append(first)
    return None


class _Codes(dict[str, int]):
    """Numbers texts in the order in which they are first asked for."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


@lru_cache(256)
def _kind(spelling: str) -> Kind | None:
    match = _KIND.fullmatch(spelling)
    if match is None:
        return None
    return match[1], tuple(map(int, match[2].split(","))) if match[2] else ()


_ZEROS, _SIGNS = _U(0x3030303030303030), _U(0x8080808080808080)
# Added to a byte, this reaches the sign bit from 10 on.
_ABOVE_NINE = _U(0x7676767676767676)
# A text's first character is the lowest byte: which bytes of a word belong to a number of so many digits at its end.
_KEEP = np.array([0, *(2**64 - 2 ** (64 - 8 * digits) for digits in range(1, 9))], np.uint64)


def _numbers(data: npt.NDArray[np.uint8], words: Words, begin: Ints, end: Ints) -> Ints | None:
    """Decimal numbers at ``begin`` to ``end`` of the text, of up to 16 digits; None where one is none of them."""
    size = end - begin
    longest = int(size.max())
    if size.min() < 1 or longest > 16:
        return None
    # No leading zero, except a zero alone.
    if ((data[begin] == ord("0")) & (size > 1)).any():
        return None
    low = _eight_digits(words[end - 8], np.minimum(size, 8))
    if low is None or longest <= 8:
        return low
    high = _eight_digits(words[end - 16], np.maximum(size - 8, 0))
    return None if high is None else high * 100_000_000 + low


def _eight_digits(words: Words, digits: Ints) -> Ints | None:
    """The last ``digits`` characters of each eight-byte word as a number."""
    value = (words ^ _ZEROS) & _KEEP[digits]
    # ASCII leaves the sign bits free, so that nothing carries from one byte to the next.
    if np.bitwise_or.reduce(value + _ABOVE_NINE) & _SIGNS:
        return None
    value = value * _U(2561) >> _U(8)
    value = (value & _U(0x00FF00FF00FF00FF)) * _U(6553601) >> _U(16)
    value = (value & _U(0x0000FFFF0000FFFF)) * _U(42949672960001) >> _U(32)
    return value.astype(np.int64)
