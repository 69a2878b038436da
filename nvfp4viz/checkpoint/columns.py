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
            raise strict_json.Refused("offsets", tensor=printable(name))
    begin, end = np.array(offsets, np.int64).reshape(-1, 2).T.copy()
    return Columns(
        list(parsed.entries), list(kinds), np.array(kind, np.int64), begin, end,
        parsed.metadata, parsed.duplicates, parsed.oddities,
    )  # fmt: skip


def _fast(text: bytes) -> Columns | None:
    """Entries of a header in a writer's usual form, with or without spaces; None where it is neither."""
    body = text.rstrip(b" ")
    if not (body.isascii() and body.startswith(b"{") and body.endswith(b"}")):
        return None
    found = _compact(body)
    if found is None and _SPACED.search(body):
        # Python's own writer puts a space after every colon and comma.
        try:
            found = _compact(msgspec.json.format(body, indent=-1))
        except msgspec.MsgspecError:
            return None
    return found


_SPACED = re.compile(rb'"[:,]\s')
_METADATA = msgspec.json.Decoder(dict[str, str])
_STRING = rb'"(?:[^"\\]|\\.)*"'
_LEADING_METADATA = re.compile(rb'\{"__metadata__":(\{(?:' + _STRING + rb":" + _STRING + rb",?)*\})(?:,(?=\")|(?=\}))")


def _compact(body: bytes) -> Columns | None:
    metadata: dict[str, str] = {}
    leading = _LEADING_METADATA.match(body)
    if leading:
        try:
            metadata = _METADATA.decode(leading[1])
        except msgspec.MsgspecError:
            return None
        # Equal bytes leave no room for a repeated key.
        if msgspec.json.encode(metadata) != leading[1]:
            return None
        body = b"{" + body[leading.end() :]
    if body == b"{}":
        none = np.zeros(0, np.int64)
        return Columns([], [], none, none, none, metadata)
    found = None if b"\\" in body else _entries(body)
    if found is not None:
        found.metadata = metadata
    return found


def _word(text: bytes) -> np.uint64:
    return _U(int.from_bytes(text, "little"))


# What stands around the quotation marks of an entry, eight bytes at a time, and where, counted from a mark.
_AFTER_NAME = ((0, _word(b'":{"dtyp')), (4, _word(b'dtype":"')))
_AFTER_SHAPE = ((-2, _word(b'],"data_')), (6, _word(b'offsets"')), (8, _word(b'fsets":[')))
# Mark by mark: name, "dtype", its value, "shape", "data_offsets".
_MARKS = 10
_KIND = re.compile(r'([A-Z0-9_]{1,16})","shape":\[((?:0|[1-9][0-9]{0,18})(?:,(?:0|[1-9][0-9]{0,18})){0,15})?\],')


def _entries(body: bytes) -> Columns | None:
    data = np.frombuffer(body, np.uint8)
    marks = np.flatnonzero(data == ord('"'))
    count, rest = divmod(len(marks), _MARKS)
    if rest or not count or data.min() < 32 or data[0] != ord("{"):
        return None
    first, name_end, _, _, type_begin, _, _, _, third, _ = np.ascontiguousarray(marks.reshape(count, _MARKS).T)
    # The comma after each entry, or the brace that ends the header.
    stop = np.append(first[1:] - 1, len(body) - 1)
    # Eight bytes from any position on; the last ones reach into a padding.
    words = np.ndarray((len(body),), "<u8", body + bytes(8), strides=(1,))
    tails = data[stop] == ord(",")
    tails[-1] = data[stop[-1]] == ord("}")
    if (
        first[0] != 1
        or not tails.all()
        or not ((data[stop - 1] == ord("}")) & (data[stop - 2] == ord("]"))).all()
        or not (type_begin == name_end + 11).all()
        or stop[-1] < third[-1] + 16
        or not all((words[name_end + at] == word).all() for at, word in _AFTER_NAME)
        or not all((words[third + at] == word).all() for at, word in _AFTER_SHAPE)
    ):
        return None
    commas = np.flatnonzero(data == ord(","))
    comma = commas[np.searchsorted(commas, stop) - 1]
    begin = _numbers(words, third + 16, comma)
    end = _numbers(words, comma + 1, stop - 2)
    if begin is None or end is None:
        return None
    text = body.decode("ascii")
    names = [text[a:b] for a, b in zip((first + 1).tolist(), name_end.tolist(), strict=True)]
    if len(set(names)) != count or "__metadata__" in names:
        return None
    alike = _alike(words, type_begin + 1, third)
    if alike is None:
        return None
    firsts, kind = alike
    kinds = [_kind(text[type_begin[row] + 1 : third[row]]) for row in firsts.tolist()]
    if None in kinds:
        return None
    return Columns(names, [k for k in kinds if k], kind, begin, end)


# Longest spelling of a type and shape that is grouped, in words; odd factors that mix them.
_LONGEST = 8
_MIX = [_U(pow(0x9E3779B97F4A7C15, k, 2**64)) for k in range(1, _LONGEST + 1)]


def _alike(words: Words, begin: Ints, end: Ints) -> tuple[Ints, Ints] | None:
    """Group equal texts: the first row of each group, and the group of each row; None where they are too long."""
    size = end - begin
    if size.max() > 8 * _LONGEST:
        return None
    pieces = []
    for k in range(-(-int(size.max()) // 8)):
        # Characters beyond the text's end become zero.
        beyond = (np.clip(8 * (k + 1) - size, 0, 8) * 8).astype(np.uint64)
        keep = np.where(beyond < 64, ~_U(0) >> np.minimum(beyond, _U(63)), _U(0))
        pieces.append(words[np.minimum(begin + 8 * k, len(words) - 1)] & keep)
    mixed = pieces[0] * _MIX[0]
    for piece, factor in zip(pieces[1:], _MIX[1:], strict=False):
        mixed += piece * factor
    _, firsts, group = np.unique(mixed, return_index=True, return_inverse=True)
    # Equal sums are no proof: the texts themselves must be equal.
    if not all((piece == piece[firsts][group]).all() for piece in pieces):
        return None
    return firsts, group


def _kind(spelling: str) -> Kind | None:
    match = _KIND.fullmatch(spelling)
    if match is None:
        return None
    return match[1], tuple(map(int, match[2].split(","))) if match[2] else ()


_ZEROS, _TENS = _U(0x3030303030303030), _U(0x0606060606060606)
_HIGH = _U(0xF0F0F0F0F0F0F0F0)


def _numbers(words: Words, begin: Ints, end: Ints) -> Ints | None:
    """Decimal numbers at ``begin`` to ``end`` of the text, of up to 16 digits; None where one is none of them."""
    size = end - begin
    longest = int(size.max())
    if size.min() < 1 or longest > 16:
        return None
    # No leading zero, except a zero alone.
    if ((words[begin] & _U(0xFF) == ord("0")) & (size > 1)).any():
        return None
    low = _eight_digits(words[end - 8], np.minimum(size, 8))
    if low is None or longest <= 8:
        return low
    high = _eight_digits(words[end - 16], np.clip(size - 8, 0, 8))
    return None if high is None else high * 100_000_000 + low


def _eight_digits(words: Words, digits: Ints) -> Ints | None:
    """The last ``digits`` characters of each eight-byte word as a number."""
    # A text's first character is the lowest byte: what is not of the number becomes the digit 0.
    shift = ((8 - digits) * 8).astype(np.uint64)
    keep = np.where(digits > 0, ~_U(0) << np.minimum(shift, _U(63)), _U(0))
    value = (words & keep) | (_ZEROS & ~keep)
    if not (((value & _HIGH) == _ZEROS) & (((value + _TENS) & _HIGH) == _ZEROS)).all():
        return None
    value = (value & _U(0x0F0F0F0F0F0F0F0F)) * _U(2561) >> _U(8)
    value = (value & _U(0x00FF00FF00FF00FF)) * _U(6553601) >> _U(16)
    value = (value & _U(0x0000FFFF0000FFFF)) * _U(42949672960001) >> _U(32)
    return value.astype(np.int64)
