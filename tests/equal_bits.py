"""Equality to the last bit, as tests of two paths mean it."""

import numpy as np


def same_bits(a, b, what=""):
    """Arrays of the same type, shape and bits; a float32 NaN has no sign or payload that anybody defines."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape), what
    if a.dtype == np.float32:
        a, b = (np.where(np.isnan(x), np.float32(np.nan), x) for x in (a, b))
    assert a.tobytes() == b.tobytes(), what


def same_fields(a, b, names):
    """`same_bits` of these fields of two records."""
    for name in names:
        same_bits(getattr(a, name), getattr(b, name), name)
