"""What ``--deep`` reads: packed codes and block scales; of FP8 modules their scales, and not their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nvfp4viz.audit.facts import is_scalar
from nvfp4viz.audit.fp8 import flat
from nvfp4viz.audit.fp8_numbers import SCALES, is_read
from nvfp4viz.audit.linears import FP8, Linear
from nvfp4viz.audit.module_names import layer_of
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, TensorEntry
from nvfp4viz.checkpoint.dialects import PACKED
from nvfp4viz.checkpoint.dialects.per_expert import E8M0
from nvfp4viz.checkpoint.dtypes import SCALE_BYTES
from nvfp4viz.checkpoint.preview import is_transposed


@dataclass(frozen=True, slots=True)
class Unit:
    """One tensor, or one expert's part of a tensor that holds all experts.

    Attributes
    ----------
    kind
        As for `Scanner`.
    columns
        Bytes of one row as it is stored.
    layer, expert, projection
        Of an ordinary module its layer alone, where it is in one.
    role
        ``"weight"``, ``"weight_scale"`` or, of FP8, ``"input_scale"``.
    turned
        What is stored as a row is a column: block scales [in/16, out] of a weight that is stored transposed.
    """

    name: str
    file: str
    begin: int
    end: int
    kind: str
    columns: int
    role: str
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None
    turned: bool = False

    def place(self, byte: int) -> tuple[int, int]:
        """(row, block) of a block scale, counted in bytes from the unit's first."""
        row, block = divmod(byte, self.columns)
        return (block, row) if self.turned else (row, block)


def plan(checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear]) -> dict[str, list[Unit]]:
    """All units, by file and in the order of their places."""
    units: list[Unit] = []
    whole: set[int] = set()
    for (layer, expert, projection), module in view.modules.items():
        if module.state not in ("quantised", "other") or id(module) in whole:
            continue
        if module.whole:
            whole.add(id(module))
        if module.state == "other":
            # Numbers are read without --deep as well.
            left = {
                suffix: one for suffix, one in {**module.tensors, **module.extras}.items()
                if suffix in ("", "weight") or not is_read(one, view.experts_in[layer] if module.whole else 0)
            }  # fmt: skip
            units += _fp8_units(left, layer, None if module.whole else expert, projection)
            continue
        for role in ("weight", "weight_scale"):
            entry = module.tensors.get(role)
            kind = _kind(role, entry)
            if entry is None or not kind:
                continue
            weight = module.tensors.get("weight")
            # Beside a transposed weight the scales are either [in/16, out] too, or [out, in/16] as usual.
            turned = role == "weight_scale" and weight is not None and is_transposed(weight, entry)
            turned = turned and weight is not None and entry.shape[-1] == weight.shape[-1]
            parts = entry.shape[0] if module.whole and len(entry.shape) > 1 else 1
            size = entry.nbytes // parts if parts else 0
            for part in range(parts):
                at, who = entry.begin + part * size, part if module.whole else expert
                place = (entry.name, entry.file, at, at + size, kind, max(1, entry.shape[-1]))
                units.append(Unit(*place, role, layer, who, projection, turned))
    for linear in linears:
        layer = layer_of([linear.name], view)
        if linear.format in ("NVFP4", "MXFP4"):
            for role in ("weight", "weight_scale"):
                entry = linear.tensor(role) or (linear.tensors.get("scale") if role == "weight_scale" else None)
                kind = _kind(role, entry)
                if entry is not None and kind:
                    columns = max(1, entry.shape[-1])
                    units.append(Unit(entry.name, entry.file, entry.begin, entry.end, kind, columns, role, layer))
        elif linear.format == "FP8":
            # One number is read without --deep as well.
            units += _fp8_units({suffix: one for suffix, one in linear.tensors.items() if not is_scalar(one)}, layer)
    out: dict[str, list[Unit]] = {header.file: [] for header in checkpoint.files}
    for unit in sorted(units, key=lambda unit: unit.begin):
        out[unit.file].append(unit)
    return {file: found for file, found in out.items() if found}


def _fp8_units(
    tensors: Mapping[str, TensorEntry],
    layer: int | None = None,
    expert: int | None = None,
    projection: str | None = None,
) -> Iterator[Unit]:
    """The scales of a module in FP8, of all experts together where they share a tensor."""
    weight = tensors.get("weight", tensors.get(""))
    if weight is None or weight.dtype not in FP8:
        return
    scale = next((tensors[suffix] for suffix in SCALES if suffix in tensors), None)
    for role, entry in (("weight_scale", scale), ("input_scale", tensors.get("input_scale"))):
        if entry is None or not entry.nbytes:
            continue
        kind = "E8M0" if entry.dtype in E8M0 else entry.dtype if entry.dtype in SCALE_BYTES else ""
        if kind:
            columns = max(1, flat(entry.shape)[-1]) if entry.shape else 1
            place = (entry.name, entry.file, entry.begin, entry.end, kind, columns)
            yield Unit(*place, role, layer, expert, projection)


def _kind(role: str, entry: TensorEntry | None) -> str:
    """How its bytes are to be looked at; empty where they are of no format that is looked into."""
    if entry is None or not entry.shape:
        return ""
    if role == "weight":
        return "E2M1" if entry.dtype in PACKED else ""
    return "E4M3" if entry.dtype == "F8_E4M3" else "E8M0" if entry.dtype in E8M0 else ""
