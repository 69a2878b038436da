"""Read the golden vectors: inputs regenerated, answers loaded, stored scalars decoded from their bits."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.golden import golden_sets as sets

DATA = Path(__file__).parent / "data"


@cache
def manifest() -> dict:
    return json.loads((DATA / "manifest.json").read_text(encoding="utf-8"))


@cache
def arrays(name: str) -> dict[str, npt.NDArray[np.generic]]:
    """All arrays of ``data/<name>.npz``, read-only."""
    with np.load(DATA / f"{name}.npz") as saved:
        loaded = {key: saved[key] for key in saved.files}
    for array in loaded.values():
        array.setflags(write=False)
    return loaded


@cache
def tensor(name: str, dtype: str) -> npt.NDArray[np.generic]:
    """The input ``name`` as float32 or ``ml_dtypes.bfloat16``, read-only."""
    x = sets.make(name, dtype)
    x = x.view(ml_dtypes.bfloat16) if dtype == "bf16" else x
    x.setflags(write=False)
    return x


def packed(family: str, package: str, name: str, dtype: str) -> npt.NDArray[np.uint8]:
    return arrays(family)[f"{package}/{name}/{dtype}/packed"]


def scales(family: str, package: str, name: str, dtype: str) -> npt.NDArray[np.uint8]:
    return arrays(family)[f"{package}/{name}/{dtype}/scales"]


def stored(family: str, package: str, name: str, dtype: str, what: str = "global") -> np.float32:
    """A scalar that the package stored, with its exact bits."""
    bits = int(manifest()["results"][f"{family}/{package}/{name}/{dtype}"][what], 16)
    return np.uint32(bits).view(np.float32)


def digests(family: str, package: str, name: str, dtype: str) -> list[str]:
    """SHA-256 of the dequantised tensor's bits: float32 (absent where the package has none), then BF16."""
    return manifest()["results"][f"{family}/{package}/{name}/{dtype}"]["sha"]
