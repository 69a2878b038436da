"""The element types of the safetensors format: sizes, NumPy views, and a writer's order.

Source: huggingface/safetensors, ``safetensors/src/tensor.rs`` (``enum Dtype``); checked against the package
in ``tests/checkpoint/test_writer.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes
    ----------
    name
        As spelled in a header, such as ``"F8_E4M3"``.
    bits
        Bits per element; below 8 elements share bytes.
    rank
        Place in a writer's order: 0 comes first in the data section.
    """

    name: str
    bits: int
    rank: int
    _view: np.dtype[np.generic] | None

    @property
    def view(self) -> np.dtype[np.generic]:
        """NumPy dtype that `Checkpoint.read` returns.

        8-bit and narrower floats come as ``uint8``: scale bytes and packed codes are bytes everywhere in this project;
        decoding them is the job of `nvfp4viz.formats`.
        """
        if self._view is None:
            # Who reads headers and F32 scalars does not wait for its import.
            import ml_dtypes

            bfloat16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
            return bfloat16
        return self._view


# Widest alignment first: this is the enum of the reference implementation, backwards.
_ORDER = (
    ("U64", 64, np.uint64),
    ("I64", 64, np.int64),
    ("F64", 64, np.float64),
    ("C64", 64, np.complex64),
    ("F32", 32, np.float32),
    ("U32", 32, np.uint32),
    ("I32", 32, np.int32),
    ("BF16", 16, None),
    ("F16", 16, np.float16),
    ("U16", 16, np.uint16),
    ("I16", 16, np.int16),
    ("F8_E5M2FNUZ", 8, np.uint8),
    ("F8_E4M3FNUZ", 8, np.uint8),
    ("F8_E8M0", 8, np.uint8),
    ("F8_E4M3", 8, np.uint8),
    ("F8_E5M2", 8, np.uint8),
    ("I8", 8, np.int8),
    ("U8", 8, np.uint8),
    ("F6_E3M2", 6, np.uint8),
    ("F6_E2M3", 6, np.uint8),
    ("F4", 4, np.uint8),
    ("BOOL", 8, np.bool_),
)

DTYPES: dict[str, DType] = {
    name: DType(name, bits, rank, None if view is None else np.dtype(view))
    for rank, (name, bits, view) in enumerate(_ORDER)
}

# Types of a scale that is a number by itself, and bytes of one.  Servers keep them in F32 and copy with a cast (vLLM's
# ``param.data.copy_`` and ``param_data[e] = …``), which changes no BF16 or F16 value and rounds F64 to the nearest.
SCALE_BYTES = {"F32": 4, "F64": 8, "BF16": 2, "F16": 2}


@cache
def names_of_arrays() -> dict[np.dtype[np.generic], str]:
    """What an array of each NumPy dtype is called; ``uint8`` is U8 unless the caller says F8_E4M3 or F8_E8M0."""
    import ml_dtypes

    return {
        np.dtype(np.bool_): "BOOL",
        np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
        np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
        np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
        **{kind.view: name for name, kind in DTYPES.items() if kind.view != np.uint8 and name != "BOOL"},
        np.dtype(np.uint8): "U8",
    }


def byte_count(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes that ``shape`` elements of ``dtype`` take, or None where they do not end on a byte border.

    >>> byte_count("F32", ()), byte_count("BF16", (4, 32)), byte_count("F4", (3,))
    (4, 256, None)
    """
    bits = DTYPES[dtype].bits
    for size in shape:
        bits *= size
    return None if bits % 8 else bits // 8
