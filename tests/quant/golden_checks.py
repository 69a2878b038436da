"""The comparisons that recorded and live answers share: ours against a package's bytes, and nothing forgiven."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nvfp4viz import quant

PATHS = ("numpy", "numba")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a package said about one tensor."""

    packed: np.ndarray
    scales: np.ndarray
    stored: np.float32 | None = None


def same_f32(a: np.float32, b: np.float32) -> bool:
    """Equal bits; a NaN is a NaN."""
    return bool(np.isnan(a) and np.isnan(b)) or int(a.view(np.uint32)) == int(b.view(np.uint32))


def differing(ours: np.ndarray, theirs: np.ndarray) -> str:
    """An empty string when equal, else how many differ and the first one, for the failure's message."""
    assert ours.shape == theirs.shape, f"shapes {ours.shape} and {theirs.shape}"
    where = np.argwhere(ours != theirs)
    if not len(where):
        return ""
    first = tuple(where[0])
    return f"{len(where)} of {ours.size} differ, first at {first}: {ours[first]:#04x} != {theirs[first]:#04x}"


def expect_same(x: np.ndarray, recipe: str, answer: Answer, path: str, given: np.float32 | None = None) -> None:
    """Zero mismatches in packed bytes, scale bytes and stored global scale.

    ``given`` is the global scale to use; without it the recipe finds its own, as the package did.
    """
    q = quant.quantize(x, recipe=recipe, global_scale=given, path=path)
    if answer.stored is not None:
        assert same_f32(np.float32(q.global_scale), answer.stored), f"{q.global_scale!r} != {answer.stored!r}"
    found = {"scales": differing(q.scales, answer.scales), "packed": differing(q.packed, answer.packed)}
    assert not any(found.values()), found
