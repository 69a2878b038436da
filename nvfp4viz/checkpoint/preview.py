"""A first look into one tensor: where it lies, and its first block decoded, reading little more than that block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint.canonical_view import CanonicalView, Slot, canonical
from nvfp4viz.checkpoint.dtypes import DTYPES, SCALE_BYTES
from nvfp4viz.checkpoint.header import TensorEntry
from nvfp4viz.checkpoint.open import Checkpoint
from nvfp4viz.formats import bf16_to_f32, decode_e2m1, decode_e4m3, decode_ue8m0, unpack_nibbles

BLOCK = 16


@dataclass(frozen=True, slots=True)
class TensorPreview:
    """One tensor and its first values.

    Attributes
    ----------
    slot
        Its place among the experts, or None where it is none of theirs.
    draft
        That place is in a draft (MTP) layer, which has a number after the model's own.
    rows
        Pairs of a label and its values as text: ``bytes``, ``codes``, ``scale``, ``value``.
    """

    entry: TensorEntry
    slot: Slot | None
    rows: tuple[tuple[str, str], ...]
    draft: bool = False


def preview_tensor(checkpoint: Checkpoint, name: str) -> TensorPreview:
    """Look at a tensor's first values: a whole block of a packed weight (16 of NVFP4, 32 of MXFP4), else 16.

    Packed codes are shown with their block scale and second-level scale where the checkpoint has them; the product of
    the three is the weight.  Where a fused weight is stored transposed (Llama 4), a block runs down a column.

    Raises
    ------
    CheckpointError
        ``checkpoint.no-tensor``, ``checkpoint.unreadable``.
    """
    entry = checkpoint.entry(name)
    view = canonical(checkpoint)
    slot = view.locate(name)
    bits = DTYPES[entry.dtype].bits
    if slot is not None and slot.role == "weight" and entry.dtype in ("U8", "I8", "F4"):
        return TensorPreview(entry, slot, _packed_rows(checkpoint, view, slot, entry), view.is_draft(slot.layer))
    data = checkpoint.read_first(name, max(1, BLOCK * bits // 8))
    rows: list[tuple[str, str]] = []
    if bits <= 8 or entry.dtype == "BF16":
        rows.append(("bytes", " ".join(f"{byte:02x}" for byte in data[:BLOCK])))
    dialect = view.dialects.get(slot.layer) if slot is not None and slot.role == "weight_scale" else None
    if dialect is not None and dialect.block == "MXFP4" and entry.dtype in dialect.scale_types:
        values: npt.NDArray[Any] | None = decode_ue8m0(np.frombuffer(data, np.uint8))  # U8 as often as F8_E8M0
    else:
        values = _decoded(entry, data)
    if values is not None:
        rows.append(("values" if values.size != 1 else "value", _numbers(values)))
    return TensorPreview(entry, slot, tuple(rows), slot is not None and view.is_draft(slot.layer))


def _packed_rows(
    checkpoint: Checkpoint, view: CanonicalView, slot: Slot, weight: TensorEntry
) -> tuple[tuple[str, str], ...]:
    """First block of a packed weight, its scales, and the weights themselves."""
    dialect = view.dialects.get(slot.layer)
    scale = view.slot(slot.layer, slot.expert, slot.projection, "weight_scale")
    count = (BLOCK if dialect is None else dialect.group) // 2
    step = 1 if scale.entry is None or not is_transposed(weight, scale.entry) else weight.shape[-1]
    data = checkpoint.read_first(weight.name, (count - 1) * step + 1)[::step]
    codes = unpack_nibbles(np.frombuffer(data, np.uint8))
    values = decode_e2m1(codes)
    rows = [
        ("bytes", " ".join(f"{byte:02x}" for byte in data)),
        ("codes", " ".join(f"{code:x}" for code in codes.tolist())),
        ("E2M1", _numbers(values)),
    ]
    if scale.entry is None or dialect is None or scale.entry.dtype not in dialect.scale_types or not scale.entry.nbytes:
        return tuple(rows)
    byte = np.frombuffer(checkpoint.read_first(scale.name, 1), np.uint8)
    if dialect.block == "MXFP4":
        block = decode_ue8m0(byte)[0]
        rows.append(("scale", f"block {block:g}"))
        with np.errstate(all="ignore"):
            rows.append(("weights", _numbers(values * block)))
        return tuple(rows)
    second = view.slot(slot.layer, slot.expert, slot.projection, "weight_scale_2")
    if second.entry is None or second.entry.dtype not in SCALE_BYTES or not second.entry.nbytes:
        return tuple(rows)
    block = decode_e4m3(byte)[0]
    # Of a tensor that holds all experts, the first bytes are the first expert's, and so is the first scale.
    kind = second.entry.dtype
    first = np.frombuffer(checkpoint.read_first(second.name, SCALE_BYTES[kind]), DTYPES[kind].view)
    stored = first.astype(np.float32)[0]
    with np.errstate(all="ignore"):
        level = np.float32(1) / stored if view.divisors_in(slot.layer) else stored
        rows.append(("scale", f"block {block:g} × second level {level:g}"))
        rows.append(("weights", _numbers(values * block * level)))
    return tuple(rows)


def is_transposed(weight: TensorEntry, scale: TensorEntry) -> bool:
    """Two codes a byte along the last axis but one: [E, in/2, out] beside scales [E, in/16, out] or [E, out, in/16]."""
    packed, scales = weight.shape, scale.shape
    return (
        weight.dtype != "F4"
        and len(packed) == len(scales) == 3
        and packed[-2] != scales[-2]
        and packed[-1] in scales[-2:]
    )


def _decoded(entry: TensorEntry, data: bytes) -> npt.NDArray[Any] | None:
    """The values that the bytes stand for, or None where this project has no such format."""
    if entry.dtype == "F8_E4M3":
        return decode_e4m3(np.frombuffer(data, np.uint8))
    if entry.dtype == "F8_E8M0":
        return decode_ue8m0(np.frombuffer(data, np.uint8))
    if entry.dtype.startswith(("F8", "F6_", "F4")):
        return None
    values = np.frombuffer(data, DTYPES[entry.dtype].view)
    return bf16_to_f32(values) if entry.dtype == "BF16" else values


def _numbers(values: npt.NDArray[Any]) -> str:
    return " ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values.tolist())
