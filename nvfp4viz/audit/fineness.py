"""How finely numbers were measured, and so what their being equal to something proves.

Calibration on BF16 activations gives amax with 8 significant bits, and a scale that is stored in BF16 or F16 has no
more than 8 or 11: between a power of two and the next lie few numbers, and an exact one may be chance.
"""

from __future__ import annotations

from functools import cache
from math import exp, lgamma, log, log1p
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.audit.facts import ScaleTable

Mask = npt.NDArray[np.bool_]

_F = np.float32

# Significant bits of numbers that are stored in BF16 and in F16.
_HALF_BITS = (8, 11)


def is_coarse(table: ScaleTable, over: int = 2688) -> bool:
    """Most usable values of a projection are as coarse as `are_coarse` says."""
    return are_coarse(table.values[table.good()], over)


def are_coarse(values: npt.NDArray[Any], over: int = 2688) -> bool:
    """Have most of these multipliers (N,) so few bits that an exact one may be chance?  Not of none.

    Those of BF16 or F16, in amax or in what is stored, whether that is the multiplier or its reciprocal; give or take
    the last bits of the divisions.

    >>> amax = np.float32([6.0, 5.9375, 7.25])
    >>> are_coarse(amax / np.float32(2688)), are_coarse(1 / np.float32([446, 450, 370])), are_coarse(np.float32([]))
    (True, True, False)
    >>> are_coarse(np.float32([6.0123, 5.9361, 7.2518]) / np.float32(2688))
    False
    """
    numbers = values.astype(np.float64)
    forms = (numbers * over, numbers, 1 / numbers)
    return bool(numbers.size) and any(_have_bits(each, _HALF_BITS[-1]) for each in forms)


def _have_bits(numbers: npt.NDArray[np.float64], bits: int) -> bool:
    """Have most numbers (N,) no more significant bits?"""
    scaled = np.frexp(numbers)[0] * 2**bits
    return float(np.mean(np.abs(scaled - np.rint(scaled)) < 2.0**-10)) > 0.5


def is_number(values: npt.NDArray[Any], known: np.float32) -> Mask:
    """Which of some multipliers (E,) are this number, to the last bit of the type that they are stored in.

    The division may be rounded once more on its way through a file: one unit in the last place either side.
    """
    out: Mask = np.abs(values - known) <= np.spacing(known)
    near = np.abs(values - known) <= known * 2.0 ** -_HALF_BITS[0]
    if near.any() and not out.any():
        usable = values[np.isfinite(values) & (values > 0)].astype(np.float64)
        for bits in _HALF_BITS:
            if _have_bits(usable, bits):
                return near & (values == _F(_rounded(float(known), bits)))
            if _have_bits(1 / usable, bits):
                return near & (values == _F(1) / _F(_rounded(1 / float(known), bits)))
    return out


def _rounded(number: float, bits: int) -> float:
    mantissa, power = np.frexp(number)
    return float(np.ldexp(np.rint(mantissa * 2**bits), power - bits))


@cache
def least_by_chance(among: int, chance: float = 1e-6) -> int:
    """How many of so many have one BF16 number less often than by this chance, at one in 128 each; three at least.

    A checkpoint has some hundred projections with experts, so that a millionth for each is a false alarm in 10,000 of
    them.  One in 128: that many BF16 numbers lie between a power of two and the next, and maxima spread over more.

    >>> [least_by_chance(among) for among in (3, 8, 32, 64, 128, 256)]
    [3, 4, 6, 7, 9, 13]
    """
    part, left, count = 1 / 128, 1.0, 0
    while count <= among and left > chance:
        # Logarithms, for of tens of thousands the factors are beyond any float.
        ways = lgamma(among + 1) - lgamma(count + 1) - lgamma(among - count + 1)
        left -= exp(ways + count * log(part) + (among - count) * log1p(-part))
        count += 1
    return max(count, 3)
