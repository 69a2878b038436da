"""What the bytes of packed codes and scales show, packed codes and E4M3 eight at a time.

One pass over a tensor in pieces that fit the second-level cache; every number is exact.  Codes are E2M1 nibbles: the
low three bits are the magnitude, 0 for zero and 7 for 6.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint.dtypes import DTYPES, SCALE_BYTES
from nvfp4viz.checkpoint.numbers import CLASSES, classify

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
_U = np.uint64
# Bytes looked at together.
PIECE = 1 << 17
# Positions that are kept of what is wrong.
SHOWN = 4

_MAGNITUDES, _EACH = _U(0x7777777777777777), _U(0x1111111111111111)
_LOW_SEVEN, _ONES, _SIGNS = _U(0x7F7F7F7F7F7F7F7F), _U(0x0101010101010101), _U(0x8080808080808080)


class Scan(msgspec.Struct, array_like=True, gc=False):
    """What was seen of one tensor, or of one expert's part of it.

    Attributes
    ----------
    nbytes
        Bytes seen.
    total, parity
        Sum (modulo 2^64) and exclusive or of its eight-byte words: equal tensors agree in both.
    nonzero
        Some packed code or E4M3 block scale has a magnitude; always True for E8M0, which has no zero.
    sixes
        Packed codes of magnitude 6.
    nans, negatives
        Block scales that are NaN, and others with a sign bit.
    nan_at, negative_at
        Places of the first few, counted in bytes from the tensor's first.
    cast
        ``"integers"``: E8M0 bytes are what a cast of 2^(b − 127) to an integer leaves; ``"exponents"``: what one of the
        integer b to E8M0 leaves.
    numbers
        Of scales that are numbers by themselves (F32, BF16, …): how many there are.
    wrong
        By class (`nvfp4viz.audit.facts.CLASSES`): how many of those are no usable scale, and which the first few are.
    """

    nbytes: int = 0
    total: int = 0
    parity: int = 0
    nonzero: bool = True
    sixes: int = 0
    nans: int = 0
    negatives: int = 0
    nan_at: tuple[int, ...] = ()
    negative_at: tuple[int, ...] = ()
    cast: str = ""
    numbers: int = 0
    wrong: dict[str, tuple[int, tuple[int, ...]]] = {}


class Scanner:
    """Adds up one tensor's bytes as they come.

    Parameters
    ----------
    kind
        ``"E2M1"`` (packed codes), ``"E4M3"`` or ``"E8M0"`` (block scales), or a type of `SCALE_BYTES` (numbers).

    >>> scanner = Scanner("E4M3")
    >>> scanner.add(np.uint8([0x38, 0x7F, 0xB8]))
    >>> scanner.done().nan_at, scanner.done().negatives
    ((1,), 1)
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._scan = Scan(nonzero=kind == "E8M0")
        self._seen: npt.NDArray[np.bool_] = np.zeros(256, np.bool_)

    def add(self, data: Bytes) -> None:
        """The next bytes; all but the last call bring a multiple of eight."""
        for at in range(0, len(data), PIECE):
            self._piece(data[at : at + PIECE])

    def done(self) -> Scan:
        scan = self._scan
        if self.kind == "E8M0":
            scan.cast = _cast_of(self._seen)
        return scan

    def _piece(self, data: Bytes) -> None:
        scan, begin = self._scan, self._scan.nbytes
        scan.nbytes += len(data)
        if self.kind in SCALE_BYTES:
            self._numbers(data)
            return
        words = _words(data)
        scan.total = (scan.total + int(np.add.reduce(words))) % 2**64
        scan.parity ^= int(np.bitwise_xor.reduce(words))
        if self.kind == "E2M1":
            self._codes(words)
        elif self.kind == "E4M3":
            self._e4m3(data, words, begin)
        else:
            self._e8m0(data, begin)

    def _codes(self, words: Words) -> None:
        scan = self._scan
        scan.nonzero = scan.nonzero or bool(np.bitwise_or.reduce(words) & _MAGNITUDES)
        # All three bits of a magnitude set: 6.
        full = words >> _U(1)
        full &= words
        full &= words >> _U(2)
        full &= _EACH
        scan.sixes += int(np.bitwise_count(full).sum(dtype=np.int64))

    def _e4m3(self, data: Bytes, words: Words, begin: int) -> None:
        scan = self._scan
        # 0x7F plus one carries into the sign bit, and nothing else does.
        spare = words & _LOW_SEVEN
        spare += _ONES
        together = np.bitwise_or.reduce(words)
        scan.nonzero = scan.nonzero or bool(together & _LOW_SEVEN)
        suspects = (np.bitwise_or.reduce(spare) | together) & _SIGNS
        if not suspects:
            return
        nans = np.flatnonzero((data & 0x7F) == 0x7F)
        negatives = np.flatnonzero((data & 0x80 != 0) & (data != 0xFF))
        scan.nans += len(nans)
        scan.negatives += len(negatives)
        scan.nan_at = _first(scan.nan_at, nans, begin)
        scan.negative_at = _first(scan.negative_at, negatives, begin)

    def _numbers(self, data: Bytes) -> None:
        """Scales of FP8: as float32, which a server copies them into."""
        scan, view = self._scan, DTYPES[self.kind].view.newbyteorder("<")
        with np.errstate(all="ignore"):
            values = np.frombuffer(data.tobytes(), view).astype(np.float32)
        begin = scan.numbers
        scan.numbers += len(values)
        kinds = classify(values)
        for kind in range(1, len(CLASSES)) if kinds.any() else ():
            found = np.flatnonzero(kinds == kind)
            if len(found):
                count, places = scan.wrong.get(CLASSES[kind], (0, ()))
                scan.wrong[CLASSES[kind]] = (count + len(found), _first(places, found, begin))

    def _e8m0(self, data: Bytes, begin: int) -> None:
        scan = self._scan
        counts = np.bincount(data, minlength=256)
        self._seen |= counts > 0
        if counts[255]:
            scan.nans += int(counts[255])
            scan.nan_at = _first(scan.nan_at, np.flatnonzero(data == 255), begin)


def _words(data: Bytes) -> Words:
    """The bytes as words, aligned, with zeros to fill the last one."""
    rest = -len(data) % 8
    if rest or data.ctypes.data % 8:
        data = np.concatenate([data, np.zeros(rest, np.uint8)])
    return data.view(_U)


def _first(known: tuple[int, ...], found: npt.NDArray[Any], begin: int) -> tuple[int, ...]:
    return (*known, *(found[: SHOWN - len(known)] + begin).tolist()) if len(known) < SHOWN else known


# Powers of two as integers, and 0 for everything below one.  Real exponents lie about 127, so that 64 and 128 (2^-63
# and 2) alone would prove nothing.
_POWERS = frozenset({0, *(1 << k for k in range(8))})
# What torch makes of the integers 48 to 254 in E8M0: 2^6, 2^7 and 2^8; no matrix has 64 times 6 in every block.
_OF_INTEGERS = frozenset({133, 134, 135})


def _cast_of(seen: npt.NDArray[np.bool_]) -> str:
    bytes_seen = set(np.flatnonzero(seen).tolist()) - {255}
    if bytes_seen and bytes_seen <= _POWERS and min(bytes_seen) < 64:
        return "integers"
    return "exponents" if bytes_seen - {0} and bytes_seen - {0} <= _OF_INTEGERS else ""
