"""One matrix of any checkpoint as numbers: a bounded piece of it, decoded where it is stored in four bits.

Bytes are read for the piece alone, so that a checkpoint of hundreds of gigabytes costs no more than a small one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint import CanonicalView, Checkpoint, Slot, TensorEntry
from nvfp4viz.checkpoint.dialects import parse_expert_name
from nvfp4viz.checkpoint.dtypes import DTYPES
from nvfp4viz.errors import CheckpointError
from nvfp4viz.formats import BLOCK, MX_BLOCK
from nvfp4viz.quant import QuantizedTensor, dequantize

Array = npt.NDArray[Any]
FLOATS = ("BF16", "F16", "F32")
MOST_ROWS, MOST_COLUMNS = 512, 1024
"""Of the piece that is read: the first rows, and of these the first columns."""
# What decodes each kind of file: the scale above the blocks multiplies, divides, or is not there.
_RECIPES = {("NVFP4", False): "modelopt", ("NVFP4", True): "compressed-tensors", ("MXFP4", False): "vllm-even"}


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A piece of a matrix, from its first row and column on.

    Attributes
    ----------
    name
        The tensor's.
    shape
        ``(N, K)`` of the whole matrix.
    stored
        ``"BF16"``, ``"F16"``, ``"F32"``, ``"NVFP4"`` or ``"MXFP4"``.
    values : (R, C) bfloat16 or float32
        R and C are multiples of 16, at most `MOST_ROWS` and `MOST_COLUMNS`.
    """

    name: str
    shape: tuple[int, int]
    stored: str
    values: Array

    @property
    def is_whole(self) -> bool:
        return self.values.shape == self.shape


def matrix_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Float matrices that are no expert's: attention, router, embedding, dense and shared layers; at least 16 × 16."""
    return tuple(
        entry.name
        for entry in map(checkpoint.entry, checkpoint.tensors)
        if entry.dtype in FLOATS
        and len(entry.shape) == 2
        and min(entry.shape) >= BLOCK
        and not parse_expert_name(entry.name)
    )


def read_matrix(checkpoint: Checkpoint, name: str) -> Matrix:
    """A float matrix by its name.

    Raises
    ------
    CheckpointError
        ``checkpoint.no-tensor``, ``checkpoint.unreadable``, ``matrix.layout`` for another type or number of
        dimensions, ``matrix.small``, ``matrix.not-finite``, ``matrix.zero``.
    """
    return _float(checkpoint, checkpoint.entry(name), None)


def read_expert(checkpoint: Checkpoint, view: CanonicalView, layer: int, expert: int, projection: str) -> Matrix:
    """One expert's weight ``(N, K)``, as its codes and scales in the file decode.

    Raises
    ------
    CheckpointError
        Those of `read_matrix`, ``matrix.absent`` where the expert has no such weight, ``matrix.no-scale`` where a scale
        that decodes it is missing.
    """
    slot, module = view.slot(layer, expert, projection, "weight"), view.module(layer, expert, projection)
    # An unquantised layer speaks no dialect, and its tensors play no role: "weight", or nothing behind the name.
    plain = module.extras.get("weight") or module.extras.get("")
    if slot.entry is not None and slot.entry.dtype not in FLOATS:
        return _packed(checkpoint, view, slot, slot.entry)
    if (entry := slot.entry or plain) is None:
        raise CheckpointError("matrix.absent", layer=layer, expert=expert, projection=projection)
    return _float(checkpoint, entry, expert if module.whole else None)


def _float(checkpoint: Checkpoint, entry: TensorEntry, index: int | None) -> Matrix:
    if entry.dtype not in FLOATS:
        raise CheckpointError("matrix.layout", tensor=entry.name, type=entry.dtype, shape=entry.shape)
    shape = _shape(entry, index)
    rows, columns = _piece(entry, shape)
    values = _rows(checkpoint, entry, index, rows)[:, :columns]
    # F16 in float32: no value changes, and the quantiser takes it.
    return _checked(
        Matrix(entry.name, shape, entry.dtype, values.astype(np.float32) if entry.dtype == "F16" else values)
    )


def _packed(checkpoint: Checkpoint, view: CanonicalView, slot: Slot, entry: TensorEntry) -> Matrix:
    dialect = view.dialects.get(slot.layer)
    scale = view.slot(slot.layer, slot.expert, slot.projection, "weight_scale")
    if dialect is None or entry.dtype not in ("U8", "I8"):
        raise CheckpointError("matrix.layout", tensor=entry.name, type=entry.dtype, shape=entry.shape)
    if scale.entry is None:
        raise CheckpointError("matrix.no-scale", tensor=entry.name, scale=scale.name)
    block = BLOCK if dialect.block == "NVFP4" else MX_BLOCK
    n, half = _shape(entry, slot.index)
    shape = (n, 2 * half)
    if _shape(scale.entry, scale.index) != (n, shape[1] // block) or DTYPES[scale.entry.dtype].bits != 8:
        raise CheckpointError("matrix.layout", tensor=scale.name, type=scale.entry.dtype, shape=scale.entry.shape)
    rows, columns = _piece(entry, shape)
    columns -= columns % block
    packed = _rows(checkpoint, entry, slot.index, rows).view(np.uint8)[:, : columns // 2]
    scales = _rows(checkpoint, scale.entry, scale.index, rows).view(np.uint8)[:, : columns // block]
    above = _second(checkpoint, view, slot) if dialect.block == "NVFP4" else np.float32(1)
    recipe = _RECIPES[dialect.block, dialect.block == "NVFP4" and view.divisors_in(slot.layer)]
    parts = np.ascontiguousarray(packed), np.ascontiguousarray(scales)
    values = dequantize(QuantizedTensor(*parts, above, recipe, block, (rows, columns)))
    return _checked(Matrix(entry.name, shape, dialect.block, values))


def _second(checkpoint: Checkpoint, view: CanonicalView, slot: Slot) -> np.float32:
    """The expert's scale above its blocks, as stored."""
    found = view.slot(slot.layer, slot.expert, slot.projection, "weight_scale_2")
    if found.entry is None or found.entry.dtype != "F32":
        raise CheckpointError("matrix.no-scale", tensor=slot.name, scale=found.name)
    begin = found.entry.begin + 4 * (found.index or 0)
    data = checkpoint.read_range(found.entry.file, begin, begin + 4)
    return np.float32(np.frombuffer(data, "<f4")[0])


def _shape(entry: TensorEntry, index: int | None) -> tuple[int, int]:
    """The matrix's own shape; of a tensor that holds all experts, one expert's."""
    shape = entry.shape if index is None else entry.shape[1:]
    if len(shape) != 2:
        raise CheckpointError("matrix.layout", tensor=entry.name, type=entry.dtype, shape=entry.shape)
    return shape[0], shape[1]


def _piece(entry: TensorEntry, shape: tuple[int, int]) -> tuple[int, int]:
    if min(shape) < BLOCK:
        raise CheckpointError("matrix.small", tensor=entry.name, shape=shape, least=BLOCK)
    rows, columns = min(shape[0], MOST_ROWS), min(shape[1], MOST_COLUMNS)
    return rows - rows % BLOCK, columns - columns % BLOCK


def _rows(checkpoint: Checkpoint, entry: TensorEntry, index: int | None, rows: int) -> Array:
    """The first rows of a matrix, as its type is viewed."""
    n, k = _shape(entry, index)
    kind = DTYPES[entry.dtype].view
    begin = entry.begin + (index or 0) * n * k * kind.itemsize
    data = checkpoint.read_range(entry.file, begin, begin + rows * k * kind.itemsize)
    if len(data) != rows * k * kind.itemsize:
        raise CheckpointError("checkpoint.unreadable", tensor=entry.name, file=entry.file)
    return np.frombuffer(data, kind).reshape(rows, k)


def _checked(found: Matrix) -> Matrix:
    """Nothing can be said of the error of NaN, of infinities, or of zeros alone."""
    values = found.values.astype(np.float32)
    count = int(np.count_nonzero(~np.isfinite(values)))
    if count:
        raise CheckpointError("matrix.not-finite", tensor=found.name, count=count)
    if not np.any(values):
        raise CheckpointError("matrix.zero", tensor=found.name)
    return found
