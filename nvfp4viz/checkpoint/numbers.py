"""What a stored scale is as a number: its class, and whether a server takes two of them for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

CLASSES = ("ok", "zero", "nan", "inf", "negative", "subnormal")
"""Classes of a value."""
FLT_MIN = np.finfo(np.float32).tiny


def classify(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Class of each effective multiplier, as an index into `CLASSES`.

    >>> [CLASSES[k] for k in classify(np.float32([2e-3, -0.0, np.nan, -np.inf, -1e-3, 4.4e-42]))]
    ['ok', 'zero', 'nan', 'inf', 'negative', 'subnormal']
    """
    out = np.zeros(values.shape, np.uint8)
    out[(values > 0) & (values < FLT_MIN)] = 5
    out[values < 0] = 4
    out[np.isinf(values)] = 3
    out[np.isnan(values)] = 2
    out[values == 0] = 1
    return out


def close(one: Any, two: Any) -> npt.NDArray[np.bool_]:
    """``torch.allclose`` with its defaults, number by number; a NaN is close to nothing.

    >>> close([1e-4, 1e-9], [1.001e-4, 2e-9]).tolist()
    [False, True]
    """
    one, two = np.asarray(one, np.float64), np.asarray(two, np.float64)
    with np.errstate(invalid="ignore"):
        near: npt.NDArray[np.bool_] = np.abs(one - two) <= 1e-8 + 1e-5 * np.abs(two)
    return near
