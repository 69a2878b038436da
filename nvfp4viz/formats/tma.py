"""How the Tensor Memory Accelerator lays FP4 out in shared memory, and what it demands of the tensor it reads.

``CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B`` copies sixteen 4-bit codes at a time: 8 bytes, **still packed**, at the front
of a 16-byte atom, and a gap of 8 bytes behind them.  A code thus takes a byte on average, as FP8 does, and the
``mxf8f6f4`` tensor core reads FP4 and FP8 operands by the same addresses; it takes the codes apart itself.

With a 128-byte swizzle, TMA afterwards exchanges whole 16-byte atoms of a line; nothing moves inside an atom.

Source: CUDA driver API 13, ``cuTensorMapEncodeTiled``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import layout_reference
from nvfp4viz.formats.paths import NumpyPath, by_reference
from nvfp4viz.formats.places import ATOM_BYTES, GAP_BYTES

U8 = npt.NDArray[np.uint8]

BOX_CODES = 128
"""Codes that a box must hold along K: 128 bytes of shared memory, the widest line that a swizzle knows."""


def pad_align16b(packed: npt.ArrayLike, path: NumpyPath = "numpy") -> U8:
    """Packed FP4 ``(…, K//2)`` as it lies in shared memory, ``(…, K)`` bytes; the gaps are 0 here.

    :func:`nvfp4viz.formats.padded_place` says where a code lies.  The ``"reference"`` path moves code by code; equal
    bytes.

    Raises
    ------
    FormatError
        ``format.pack-odd``: K is not a multiple of 16.

    >>> [f"{byte:02x}" for byte in pad_align16b(np.arange(1, 9))]
    ['01', '02', '03', '04', '05', '06', '07', '08', '00', '00', '00', '00', '00', '00', '00', '00']
    """
    array = np.asarray(packed, np.uint8)
    half = ATOM_BYTES - GAP_BYTES
    if array.ndim == 0 or array.shape[-1] % half:
        raise FormatError("format.pack-odd", shape=array.shape, multiple=half)
    if by_reference(path):
        return layout_reference.pad_align16b(array)
    *lead, bytes_ = array.shape
    atoms = np.zeros((*lead, bytes_ // half, ATOM_BYTES), np.uint8)
    atoms[..., :half] = array.reshape(*lead, bytes_ // half, half)
    return atoms.reshape(*lead, 2 * bytes_)


def unpad_align16b(padded: npt.ArrayLike, path: NumpyPath = "numpy") -> U8:
    """Packed FP4 ``(…, K//2)`` of padded bytes ``(…, K)``, whatever stands in the gaps; inverse of the padding."""
    array = np.asarray(padded, np.uint8)
    if array.ndim == 0 or array.shape[-1] % ATOM_BYTES:
        raise FormatError("format.pack-odd", shape=array.shape, multiple=ATOM_BYTES)
    if by_reference(path):
        return layout_reference.unpad_align16b(array)
    *lead, bytes_ = array.shape
    atoms = array.reshape(*lead, bytes_ // ATOM_BYTES, ATOM_BYTES)
    return np.ascontiguousarray(atoms[..., : ATOM_BYTES - GAP_BYTES]).reshape(*lead, bytes_ // 2)


# ------------------------------------------------------------------------------------------ what a tensor map demands

STRIDE_END = 2**40
"""A step from row to row is smaller than this, in bytes."""

Swizzle = Literal["none", "32B", "64B", "128B", "128B_ATOM_32B"]
SWIZZLES: tuple[Swizzle, ...] = get_args(Swizzle)
LOADABLE: tuple[Swizzle, ...] = ("none", "128B", "128B_ATOM_32B")
"""Swizzles that this data type can be loaded with."""


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A matrix of FP4 codes as a kernel describes it to TMA, and the box that one copy brings.

    Attributes
    ----------
    rows, codes
        The tensor in global memory: ``globalDim[1]`` and ``globalDim[0]``, the latter in codes.
    stride
        Bytes from one row to the next, ``globalStrides[0]``.
    address
        Where it begins, ``globalAddress``.
    box_rows, box_codes
        ``boxDim[1]`` and ``boxDim[0]``.
    swizzle
        How TMA exchanges the atoms of a line.
    """

    rows: int
    codes: int
    stride: int
    address: int = 0
    box_rows: int = 128
    box_codes: int = BOX_CODES
    swizzle: Swizzle = "128B"


@dataclass(frozen=True, slots=True)
class MapRule:
    """One demand: ``id``, the number or name given, the one it is held against, and whether it holds."""

    id: str
    given: int | str
    limit: int | str
    holds: bool


def check_tensor_map(wanted: TensorMap) -> tuple[MapRule, ...]:
    """Every demand of ``16U4_ALIGN16B`` on a matrix, held against ``wanted``; the driver refuses what breaks one.

    >>> [rule.id for rule in check_tensor_map(TensorMap(rows=256, codes=192, stride=96)) if not rule.holds]
    ['width']
    """
    half_row = -(-wanted.codes // 2)
    sides = wanted.rows, wanted.codes
    return (
        MapRule("address", wanted.address, 32, wanted.address % 32 == 0),
        MapRule("width", wanted.codes, BOX_CODES, wanted.codes % BOX_CODES == 0),
        MapRule("size", f"{sides[0]} × {sides[1]}", 2**32, all(0 < side <= 2**32 for side in sides)),
        MapRule("stride", wanted.stride, 32, wanted.stride % 32 == 0 and wanted.stride < STRIDE_END),
        MapRule("row", wanted.stride, half_row, half_row <= wanted.stride),
        MapRule("box", wanted.box_codes, BOX_CODES, wanted.box_codes == BOX_CODES),
        MapRule("lines", wanted.box_rows, 256, 0 < wanted.box_rows <= 256),
        MapRule("swizzle", wanted.swizzle, ", ".join(LOADABLE), wanted.swizzle in LOADABLE),
    )
