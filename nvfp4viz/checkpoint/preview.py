"""A first look into one tensor: where it lies, and its first block decoded, reading no more than that block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint.canonical import CanonicalView, Slot, canonical
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
    """Look at a tensor's first 16 values.

    Packed codes are shown with their block scale and second-level scale where the checkpoint has them; the product of
    the three is the weight.

    Raises
    ------
    CheckpointError
        ``checkpoint.no-tensor``, ``checkpoint.unreadable``.
    """
    entry = checkpoint.entry(name)
    view = canonical(checkpoint)
    slot = view.locate(name)
    bits = DTYPES[entry.dtype].bits
    is_packed = slot is not None and slot.role == "weight" and entry.dtype in ("U8", "I8")
    data = checkpoint.read_first(name, BLOCK // 2 if is_packed else max(1, BLOCK * bits // 8))
    if is_packed:
        assert slot is not None
        return TensorPreview(entry, slot, _packed_rows(checkpoint, view, slot, data), view.is_draft(slot.layer))
    rows: list[tuple[str, str]] = []
    if bits <= 8 or entry.dtype == "BF16":
        rows.append(("bytes", " ".join(f"{byte:02x}" for byte in data[:BLOCK])))
    values = _decoded(entry, data)
    if values is not None:
        rows.append(("values" if values.size != 1 else "value", _numbers(values)))
    return TensorPreview(entry, slot, tuple(rows), slot is not None and view.is_draft(slot.layer))


def _packed_rows(checkpoint: Checkpoint, view: CanonicalView, slot: Slot, data: bytes) -> tuple[tuple[str, str], ...]:
    """First block of a packed weight, its scales, and the weights themselves."""
    codes = unpack_nibbles(np.frombuffer(data, np.uint8))
    values = decode_e2m1(codes)
    rows = [
        ("bytes", " ".join(f"{byte:02x}" for byte in data)),
        ("codes", " ".join(f"{code:x}" for code in codes.tolist())),
        ("E2M1", _numbers(values)),
    ]
    scale = view.slot(slot.layer, slot.expert, slot.projection, "weight_scale")
    dialect = view.dialects.get(slot.layer)
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
