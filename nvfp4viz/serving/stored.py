"""How a matrix of a checkpoint is stored, and the numbers of any rectangle of it.

================  ====================================  =====================================================
stored            values                                scales
================  ====================================  =====================================================
BF16, F16, F32    as they are                           none
F64               rounded to float32                    none
FP8               E4M3 or E5M2, one a byte              one, one a row, one a tile, or one for 32 (MXFP8)
NVFP4             E2M1, two a byte along K              E4M3 for 16 along K, and a float32 above them
MXFP4             E2M1, two a byte along K              UE8M0 for 32 along K
================  ====================================  =====================================================

Types and shapes decide, as for the audit: DeepSeek V4 calls both its FP8 tiles and its MXFP4 blocks ``scale``.  An FP8
value is the product of two float32, rounded once; loaders that multiply in BF16 round earlier.  FP8 without any scale
stands for itself.  Four-bit values are those of :func:`nvfp4viz.quant.dequantize`.

Bytes are read for the asked rows alone, so that a checkpoint of hundreds of gigabytes costs no more than a small one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint import CanonicalView, Checkpoint, TensorEntry
from nvfp4viz.checkpoint.dialects import PACKED, Dialect, parse_whole, recognise
from nvfp4viz.checkpoint.dialects.per_expert import E8M0, QUANTIZERS
from nvfp4viz.checkpoint.dtypes import DTYPES
from nvfp4viz.checkpoint.problems import printable
from nvfp4viz.errors import CheckpointError
from nvfp4viz.formats import BLOCK, bf16_to_f32, decode_ue8m0
from nvfp4viz.quant import QuantizedTensor, dequantize

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
FLOATS = ("BF16", "F16", "F32", "F64")
FP8: dict[str, npt.DTypeLike] = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
FP8_SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""Suffixes under which exporters store what an FP8 weight is multiplied by."""
TILE = 128
"""Rows and columns of a tile of FP8 (``weight_block_size``) where the configuration says nothing else."""
INTEGERS = ("U64", "I64", "U32", "I32", "U16", "I16", "BOOL")
# What decodes each kind of file: the scale above the blocks multiplies, divides, or is not there.
_RECIPES = {("NVFP4", False): "modelopt", ("NVFP4", True): "compressed-tensors", ("MXFP4", False): "vllm-even"}


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """A matrix that can be read in part.

    Attributes
    ----------
    name
        The tensor's.
    shape
        ``(N, K)``, in values.
    stored
        ``"BF16"``, ``"F16"``, ``"F32"``, ``"F64"``, ``"NVFP4"``, ``"MXFP4"``, or FP8's type and scales:
        ``"F8_E4M3, 128 × 128"``.
    grain
        Columns that decode together: a rectangle begins and ends on a multiple of it.
    index
        Which matrix of a tensor that holds several, or None.
    """

    name: str
    shape: tuple[int, int]
    stored: str
    grain: int
    index: int | None
    _decode: Callable[[int, int, int, int], Array] = field(repr=False)

    def rectangle(self, top: int, bottom: int, left: int, right: int) -> Array:
        """Rows ``top`` to ``bottom`` and columns ``left`` to ``right``, both without the last: bfloat16 or float32.

        Raises
        ------
        CheckpointError
            ``checkpoint.unreadable``.
        """
        return np.ascontiguousarray(self._decode(top, bottom, left, right))


def find_expert(checkpoint: Checkpoint, view: CanonicalView, layer: int, expert: int, projection: str) -> StoredMatrix:
    """One expert's weight ``(N, K)``.

    Raises
    ------
    CheckpointError
        Those of `find_matrix`; ``matrix.absent`` where the expert has no such weight, ``matrix.unseen`` where a file
        whose header nobody can read may have it.
    """
    if layer not in view.blocks:
        raise _absent(checkpoint, layer, expert, projection)
    slot, module = view.slot(layer, expert, projection, "weight"), view.module(layer, expert, projection)
    # An unquantised layer speaks no dialect, and its tensors play no role: "weight", or nothing behind the name.
    entry = slot.entry or module.tensors.get("") or module.extras.get("weight") or module.extras.get("")
    if entry is None:
        _stop_at_lost(checkpoint, slot.name, module.name, f"{module.name}.weight")
        raise _absent(checkpoint, layer, expert, projection)
    index = expert if module.whole else None
    dialect = view.dialects.get(layer)
    if entry.dtype not in PACKED or dialect is None:
        return _by_type(checkpoint, entry, index)
    scale = view.slot(layer, expert, projection, "weight_scale")
    second = view.slot(layer, expert, projection, "weight_scale_2")
    return _packed(checkpoint, dialect, (entry, index), (scale.entry, scale.name), (second.entry, second.name))


def _absent(checkpoint: Checkpoint, layer: int, expert: int, projection: str) -> CheckpointError:
    place = {"layer": layer, "expert": expert, "projection": projection}
    if checkpoint.blind_files:
        return CheckpointError("matrix.unseen", **place, file=printable(checkpoint.blind_files[0]))
    return CheckpointError("matrix.absent", **place)


def _stop_at_lost(checkpoint: Checkpoint, *names: str) -> None:
    """Stop at a tensor that a header or an index lists and no file holds in full: it is not missing."""
    for name in names:
        if name in checkpoint.unreadable:
            checkpoint.entry(name)  # raises


def find_matrix(checkpoint: Checkpoint, view: CanonicalView, name: str, index: int = 0) -> StoredMatrix:
    """Any matrix by its tensor's name: an expert's, attention's, a router's, a dense or shared layer's, an embedding's.

    Parameters
    ----------
    index
        Which matrix of a tensor that holds several along its first axis, such as all experts.

    Raises
    ------
    CheckpointError
        ``checkpoint.no-tensor``, ``checkpoint.unreadable``; ``matrix.dimensions`` for one axis or more than three,
        ``matrix.index``, ``matrix.integer``, ``matrix.packing`` for bytes that no layout explains, ``matrix.no-scale``
        where a scale that decodes it is missing, ``matrix.layout`` where a scale has another type or shape.
    """
    entry = checkpoint.entry(name)
    slot = view.locate(name)
    if slot is not None and slot.role == "weight" and slot.entry is not None and slot.entry.name == name:
        whole = parse_whole(name) is not None
        if whole and not 0 <= index < view.experts_in.get(slot.layer, 0):
            raise CheckpointError("matrix.index", tensor=name, index=index, shape=entry.shape)
        return find_expert(checkpoint, view, slot.layer, index if whole else slot.expert, slot.projection)
    return _by_type(checkpoint, entry, index if len(entry.shape) == 3 else None)


def _by_type(checkpoint: Checkpoint, entry: TensorEntry, index: int | None) -> StoredMatrix:
    """A tensor outside the experts' layouts; its scales are what its module has beside it."""
    if entry.dtype in INTEGERS:
        raise CheckpointError("matrix.integer", tensor=entry.name, type=entry.dtype, shape=entry.shape)
    if entry.dtype in FLOATS:
        return _floats(checkpoint, entry, index)
    if entry.dtype in FP8:
        return _fp8(checkpoint, entry, index)
    module, _, suffix = entry.name.rpartition(".")
    dialect = _dialect(checkpoint, module)
    if entry.dtype not in PACKED or dialect is None or dialect.role_of(suffix) != "weight":
        _stop_at_lost(checkpoint, *(f"{module}.{suffix}" for suffix in (*FP8_SCALES, "weight_global_scale")))
        raise CheckpointError("matrix.packing", tensor=entry.name, type=entry.dtype, shape=entry.shape)
    names = [dialect.name(module, role) for role in ("weight_scale", "weight_scale_2")]
    scale, second = ((checkpoint.tensors.get(name), name) for name in names)
    return _packed(checkpoint, dialect, (entry, index), scale, second)


def _dialect(checkpoint: Checkpoint, module: str) -> Dialect | None:
    """What a module's tensors speak, by suffixes and types, as an expert's do."""
    suffixes = ["weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "scale"]
    suffixes += ["input_scale", "input_global_scale", *(f"{quantizer[1:]}.scale" for quantizer in QUANTIZERS)]
    found = {suffix: checkpoint.tensors.get(f"{module}.{suffix}") for suffix in suffixes}
    used = checkpoint.quant_config.used
    types = {suffix: entry.dtype for suffix, entry in found.items() if entry is not None}
    return recognise(types, "expert", used.method if used else None)


# ------------------------------------------------------------------ float and FP8


def _floats(checkpoint: Checkpoint, entry: TensorEntry, index: int | None) -> StoredMatrix:
    n, k = _shape(entry, index)
    kind = DTYPES[entry.dtype].view

    def decode(top: int, bottom: int, left: int, right: int) -> Array:
        values = _rows(checkpoint, entry, index, (n, k * kind.itemsize), top, bottom).view(kind)[:, left:right]
        if entry.dtype not in ("F16", "F64"):
            return values
        # What every recipe takes.  No F16 changes by it; an F64 beyond float32 becomes infinite, and is told of later.
        with np.errstate(over="ignore"):
            return values.astype(np.float32)

    return StoredMatrix(entry.name, (n, k), entry.dtype, 1, index, decode)


def _fp8(checkpoint: Checkpoint, entry: TensorEntry, index: int | None) -> StoredMatrix:
    n, k = _shape(entry, index)
    # ``P.weight`` has ``P.weight_scale``; a fused parameter ``P`` has ``P_weight_scale``.
    module, before = entry.name, "_"
    if entry.name.endswith(".weight"):
        module, before = entry.name.removesuffix(".weight"), "."
    names = [f"{module}{before}{suffix}" for suffix in FP8_SCALES]
    _stop_at_lost(checkpoint, *names)
    scale = next((found for found in map(checkpoint.tensors.get, names) if found is not None), None)
    scales = None if scale is None else _fp8_scales(checkpoint, scale, index, (n, k))
    tall, wide = scales[0] if scales else (n, k)

    def decode(top: int, bottom: int, left: int, right: int) -> Array:
        codes = _rows(checkpoint, entry, index, (n, k), top, bottom)[:, left:right]
        values = codes.view(FP8[entry.dtype]).astype(np.float32)
        if scales is None:
            return values
        over = scales[1](top // tall, -(-bottom // tall))
        rows, columns = np.arange(top, bottom) // tall - top // tall, np.arange(left, right) // wide
        with np.errstate(all="ignore"):
            return np.asarray(values * over[rows][:, columns])

    words = entry.dtype
    if scales:
        words += ", MXFP8" if (tall, wide) == (1, 32) else f", {tall} × {wide}"
    return StoredMatrix(entry.name, (n, k), words, 1, index, decode)


def _fp8_scales(
    checkpoint: Checkpoint, entry: TensorEntry, index: int | None, shape: tuple[int, int]
) -> tuple[tuple[int, int], Callable[[int, int], Array]]:
    """Rows and columns that share a scale, and what reads the scales of some rows of tiles as float32."""
    n, k = shape
    each = entry.shape
    if index is not None and len(each) > 0 and each != (1,):
        each = each[1:]
    else:
        index = None
    # One number, one for each row, or a matrix of tiles.
    size = (*each, 1, 1)[:2] if len(each) < 3 else (0, 0)
    asked = (checkpoint.config or {}).get("quantization_config")
    said = asked.get("weight_block_size") if isinstance(asked, dict) else None
    own = tuple(said) if isinstance(said, list) and len(said) == 2 and all(isinstance(x, int) for x in said) else ()
    tiles = [(n, k), (1, k), *([own] if own and min(own) > 0 else []), (TILE, TILE), (1, TILE), (1, 32)]
    tile = next((t for t in tiles if (-(-n // t[0]), -(-k // t[1])) == size), None)
    if tile is None or entry.dtype not in (*FLOATS, *E8M0):
        raise CheckpointError("matrix.layout", tensor=entry.name, type=entry.dtype, shape=entry.shape)
    kind = DTYPES[entry.dtype].view

    def read(first: int, last: int) -> Array:
        found = _rows(checkpoint, entry, index, (size[0], size[1] * kind.itemsize), first, last)
        if entry.dtype in E8M0:
            return np.asarray(decode_ue8m0(found))
        return np.asarray(bf16_to_f32(found.view(kind)) if entry.dtype == "BF16" else found.view(kind), np.float32)

    return (tile[0], tile[1]), read


# ------------------------------------------------------------------ four bits


def _packed(
    checkpoint: Checkpoint,
    dialect: Dialect,
    weight: tuple[TensorEntry, int | None],
    scale: tuple[TensorEntry | None, str],
    second: tuple[TensorEntry | None, str],
) -> StoredMatrix:
    """Codes of four bits; the weight with its place in a tensor of several, scales with the names they should have."""
    entry, index = weight
    _stop_at_lost(checkpoint, scale[1], second[1])
    if scale[0] is None:
        raise CheckpointError("matrix.no-scale", tensor=entry.name, scale=scale[1])
    scales: TensorEntry = scale[0]
    group = dialect.group
    n, k, turned = _sizes(entry, scales, index)
    wide, rest = divmod(k, group)
    tall = (wide, n) if turned else (n, wide)
    lead = 0 if index is None else 1
    if rest or (turned and entry.dtype == "F4") or scales.shape[lead:] != tall or DTYPES[scales.dtype].bits != 8:
        raise CheckpointError("matrix.layout", tensor=scales.name, type=scales.dtype, shape=scales.shape)
    above = _second(checkpoint, entry, second, index) if dialect.block == "NVFP4" else np.float32(1)
    recipe = _RECIPES[dialect.block, dialect.block == "NVFP4" and dialect.divisors]

    def bytes_of(of: TensorEntry, each: int, top: int, bottom: int, left: int, right: int) -> U8:
        """One byte stands for ``each`` values along K."""
        if turned:
            found = _rows(checkpoint, of, index, (k // each, n), left // each, right // each)[:, top:bottom].T
        else:
            found = _rows(checkpoint, of, index, (n, k // each), top, bottom)[:, left // each : right // each]
        return np.ascontiguousarray(found)

    def decode(top: int, bottom: int, left: int, right: int) -> Array:
        codes, blocks = bytes_of(entry, 2, top, bottom, left, right), bytes_of(scales, group, top, bottom, left, right)
        return dequantize(QuantizedTensor(codes, blocks, above, recipe, group, (bottom - top, right - left)))

    return StoredMatrix(entry.name, (n, k), dialect.block, group, index, decode)


def _sizes(entry: TensorEntry, scales: TensorEntry, index: int | None) -> tuple[int, int, bool]:
    """N, K in values, and whether K is the axis in front (Llama 4's fused experts); the scales tell.

    gpt-oss keeps the sixteen bytes of a block on an axis of their own.
    """
    pair = 1 if entry.dtype == "F4" else 2
    shape, other = ((e.shape if index is None else e.shape[1:]) for e in (entry, scales))
    if len(shape) == len(other) + 1 == 3:
        return shape[0], shape[1] * shape[2] * pair, False
    if len(shape) != 2 or len(other) != 2:
        raise CheckpointError("matrix.dimensions", tensor=entry.name, type=entry.dtype, shape=entry.shape)
    if shape[0] == other[0]:
        return shape[0], shape[1] * pair, False
    return shape[1], shape[0] * pair, True


def _second(
    checkpoint: Checkpoint, weight: TensorEntry, second: tuple[TensorEntry | None, str], index: int | None
) -> np.float32:
    """The scale above the blocks, as stored: the matrix's own, or one for all experts."""
    entry, wanted = second
    if entry is None:
        raise CheckpointError("matrix.no-scale", tensor=weight.name, scale=wanted)
    count, matrices = entry.nbytes // 4, 1 if index is None else weight.shape[0]
    if entry.dtype != "F32" or count not in (1, matrices):
        raise CheckpointError("matrix.layout", tensor=entry.name, type=entry.dtype, shape=entry.shape)
    at = index or 0 if count > 1 else 0
    data = checkpoint.read_range(entry.file, entry.begin + 4 * at, entry.begin + 4 * at + 4)
    if len(data) != 4:
        raise CheckpointError("checkpoint.unreadable", tensor=entry.name, file=entry.file)
    return np.float32(np.frombuffer(data, "<f4")[0])


# ------------------------------------------------------------------ bytes


def _shape(entry: TensorEntry, index: int | None) -> tuple[int, int]:
    """The matrix's own shape; of a tensor that holds several, one's."""
    shape = entry.shape if index is None else entry.shape[1:]
    if len(shape) != 2:
        raise CheckpointError("matrix.dimensions", tensor=entry.name, type=entry.dtype, shape=entry.shape)
    if index is not None and not 0 <= index < entry.shape[0]:
        raise CheckpointError("matrix.index", tensor=entry.name, index=index, shape=entry.shape)
    return shape[0], shape[1]


def _rows(
    checkpoint: Checkpoint, entry: TensorEntry, index: int | None, size: tuple[int, int], top: int, bottom: int
) -> U8:
    """Some rows of a matrix as bytes; ``size`` is its rows and the bytes of one."""
    begin = entry.begin + ((index or 0) * size[0] + top) * size[1]
    wanted = (bottom - top) * size[1]
    data = checkpoint.read_range(entry.file, begin, begin + wanted)
    if len(data) != wanted or begin + wanted > entry.end:
        raise CheckpointError("checkpoint.unreadable", tensor=entry.name, file=entry.file)
    return np.frombuffer(data, np.uint8).reshape(bottom - top, size[1])


def matrix_names(checkpoint: Checkpoint, view: CanonicalView) -> tuple[str, ...]:
    """What can be looked at outside the experts: attention, routers, embeddings, dense and shared layers, stacks.

    Scales are left out, and so is what has one axis or fewer than 16 rows or columns.
    """
    scales = (*FP8_SCALES, "weight_scale_2", "scales", "scale2")
    found = []
    for entry in map(checkpoint.entry, checkpoint.tensors):
        suffix = entry.name.rpartition(".")[2]
        if len(entry.shape) not in (2, 3) or suffix in scales or suffix.endswith(("_scale", "_scales")):
            continue
        # Of packed codes the shape has half of K, on whichever axis.
        least = BLOCK // 2 if entry.dtype in PACKED else BLOCK
        if entry.dtype in (*FLOATS, *FP8, *PACKED) and min(entry.shape[-2:]) >= least:
            slot = view.locate(entry.name)
            if slot is None or slot.role != "weight":
                found.append(entry.name)
    return tuple(found)
