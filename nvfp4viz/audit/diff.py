"""What two checkpoints do not share: tensors, types and shapes, scale values, the quantisation configuration.

Headers and scales of one number each are compared; weights and their block scales are not read.  Numbers are equal
where their bits are: a NaN equals the same NaN, and 0.0 is not -0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from nvfp4viz.audit.containers import fingerprint
from nvfp4viz.audit.report import Value, json_values
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, canonical, inspect, printable
from nvfp4viz.checkpoint.dtypes import SCALE_BYTES
from nvfp4viz.checkpoint.source import CONFIG, HF_QUANT_CONFIG

Floats = npt.NDArray[np.float32]
SCHEMA = "nvfp4viz.diff/1"
SCALARS = ("input_scale", "weight_scale_2")
# What is compared by its header alone.
UNREAD = ("weights", "block-scales", "vectors")
_SECTIONS = ("quantization_config", "compression_config")


class Side(msgspec.Struct, frozen=True):
    """One of the two: its name without a path, `fingerprint` of its types and shapes, layout, and tensors."""

    source: str
    fingerprint: str
    dialect: str
    scheme: str
    tensors: int


class Retyped(msgspec.Struct, frozen=True):
    """A tensor of another type or shape; each as (dtype, shape)."""

    tensor: str
    a: tuple[str, tuple[int, ...]]
    b: tuple[str, tuple[int, ...]]


class ChangedValue(msgspec.Struct, frozen=True):
    """An F32 number that differs, as stored.

    Attributes
    ----------
    layer, expert, projection, role
        The slot of a routed expert; None where it is none.  ``expert`` is None too where all experts share the number.
    ratio
        b / a where both are finite and a is not zero, else None.
    draft
        The layer is a draft (MTP) layer, whose number comes after the model's own.
    """

    tensor: str
    layer: int | None
    expert: int | None
    projection: str | None
    role: str | None
    a: Value
    b: Value
    ratio: float | None
    draft: bool = False


class ChangedSetting(msgspec.Struct, frozen=True):
    """A field of a configuration file's quantisation section; a value that is absent is None."""

    file: str
    field: str
    a: Any
    b: Any


class Diff(msgspec.Struct, frozen=True):
    """Everything that differs.

    Attributes
    ----------
    same
        Nothing that is compared differs, and all of it was read.
    by_value
        How many tensors that both have were compared number by number: scales of one number, or of one an expert.
    by_header
        Of how many others only name, type and shape were compared.
    not_compared
        What those hold, whose bytes nobody read; empty where there are none.
    only_a, only_b
        Names of tensors that one of the two has.
    unread_a, unread_b
        Files that a source did not give, or no further than their headers: what was not read is not compared.
    """

    schema: str
    same: bool
    a: Side
    b: Side
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    types: tuple[Retyped, ...]
    values: tuple[ChangedValue, ...]
    config: tuple[ChangedSetting, ...]
    unread_a: tuple[str, ...] = ()
    unread_b: tuple[str, ...] = ()
    by_value: int = 0
    by_header: int = 0
    not_compared: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Is there a difference, whatever else may not have been read?"""
        return bool(self.only_a or self.only_b or self.types or self.values or self.config)


def diff(
    a: str | Path | Checkpoint,
    b: str | Path | Checkpoint,
    views: tuple[CanonicalView, CanonicalView] | None = None,
) -> Diff:
    """Compare two checkpoints; sources as for `nvfp4viz.audit.audit`.

    ``views`` are the two's, where somebody has them already.  A file that fails after its header was read is
    `Diff.unread_a` or ``unread_b``, and its numbers are not compared.

    Raises
    ------
    CheckpointError
        ``source.*``: one of the two cannot be opened.
    """
    # What this comparison cannot read, another may.
    first, second = (item.reopened() if isinstance(item, Checkpoint) else inspect(item) for item in (a, b))
    views = views or (canonical(first), canonical(second))
    only_a, only_b = _only(first, second), _only(second, first)
    types = tuple(_types(first, second))
    with np.errstate(all="ignore"):
        numbers, vectors = _scalar_values(first, second, views[0]), _vector_values(first, second, views)
        values = (*numbers.changed, *vectors.changed)
    by_value = numbers.compared + vectors.compared
    by_header = sum(map(second.tensors.rows.__contains__, first.tensors.names)) - by_value
    config = tuple(_config(first, second))
    unread = tuple(tuple(map(printable, side.unread)) for side in (first, second))
    return Diff(
        schema=SCHEMA,
        same=not (only_a or only_b or types or values or config or any(unread)),
        a=_side(first, views[0]),
        b=_side(second, views[1]),
        only_a=only_a,
        only_b=only_b,
        types=types,
        values=values,
        config=config,
        unread_a=unread[0],
        unread_b=unread[1],
        by_value=by_value,
        by_header=by_header,
        not_compared=UNREAD if by_header else (),
    )


def diff_to_json(found: Diff) -> str:
    """Indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


def _side(checkpoint: Checkpoint, view: CanonicalView) -> Side:
    return Side(checkpoint.name, fingerprint(checkpoint.tensors), view.dialect, view.scheme, len(checkpoint.tensors))


def _only(one: Checkpoint, other: Checkpoint) -> tuple[str, ...]:
    """Tensors of one that the other does not have; of files without a list that it could not read nobody knows."""
    unread = set(other.unread)
    if unread & set(other.blind_files):
        return ()
    return tuple(
        name for name in one.tensors.names if name not in other.tensors and other.unreadable.get(name) not in unread
    )


def _types(a: Checkpoint, b: Checkpoint) -> Iterator[Retyped]:
    kinds = {name: b.tensors.kinds[kind] for name, kind in zip(b.tensors.names, b.tensors.kind.tolist(), strict=True)}
    for name, number in zip(a.tensors.names, a.tensors.kind.tolist(), strict=True):
        old, new = a.tensors.kinds[number], kinds.get(name)
        if new is not None and new != old:
            yield Retyped(name, (old[0], tuple(old[1])), (new[0], tuple(new[1])))


class _Compared(NamedTuple):
    """Numbers that differ, and how many tensors were compared."""

    changed: tuple[ChangedValue, ...]
    compared: int


def _scalar_values(a: Checkpoint, b: Checkpoint, view: CanonicalView) -> _Compared:
    """Numbers of their own, by name."""
    names = _scalar_names(a)
    there = set(_scalar_names(b))
    shared = [name for name in names if name in there]
    old, new = a.scalars(shared, partly=True), b.scalars(shared, partly=True)
    read = _read(a, shared) & _read(b, shared)
    changed = np.flatnonzero((old.view(np.uint32) != new.view(np.uint32)) & read)
    out = []
    for at, numbers in zip(changed.tolist(), _numbers(old[changed], new[changed]), strict=True):
        slot = view.locate(shared[at])
        if slot is None:
            out.append(ChangedValue(shared[at], None, None, None, None, *numbers))
            continue
        expert = None if view.is_whole(slot.layer) else slot.expert
        where = (slot.layer, expert, slot.projection, slot.role)
        out.append(ChangedValue(shared[at], *where, *numbers, draft=view.is_draft(slot.layer)))
    return _Compared(tuple(out), int(read.sum()))


def _vector_values(a: Checkpoint, b: Checkpoint, views: tuple[CanonicalView, CanonicalView]) -> _Compared:
    """Numbers of vectors that hold one for each expert."""
    vectors, others = _vectors(views[0]), _vectors(views[1])
    both = [name for name in vectors if name in others and a.tensors[name].shape == b.tensors[name].shape]
    numbers_of = (a.vectors(both, partly=True), b.vectors(both, partly=True))
    read = _read(a, both) & _read(b, both)
    out = []
    for name, before, after, known in zip(both, *numbers_of, read.tolist(), strict=True):
        if not known:
            continue
        changed = np.flatnonzero(before.view(np.uint32) != after.view(np.uint32))
        layer, projection, role = vectors[name]
        for expert, numbers in zip(changed.tolist(), _numbers(before[changed], after[changed]), strict=True):
            draft = views[0].is_draft(layer)
            out.append(ChangedValue(name, layer, expert, projection, role, *numbers, draft=draft))
    return _Compared(tuple(out), int(read.sum()))


def _read(checkpoint: Checkpoint, names: list[str]) -> npt.NDArray[np.bool_]:
    """Whether the numbers of these tensors were read: (len(names),)."""
    table = checkpoint.tensors
    gone = np.array([file in checkpoint.lost for file in table.files] or [False])
    return ~gone[table.file[np.array([table.rows[name] for name in names], np.int64)]]


def _scalar_names(checkpoint: Checkpoint) -> list[str]:
    names = checkpoint.tensors.names
    return [names[row] for row in checkpoint.scalar_rows().tolist()]


def _vectors(view: CanonicalView) -> dict[str, tuple[int, str, str]]:
    """Vectors of scales along the experts, with layer, projection and role."""
    return {
        slot.name: (layer, projection, role)
        for layer in (*view.moe_layers, *view.draft_layers)
        if view.is_whole(layer)
        for projection in view.projections_in[layer]
        for role in SCALARS
        for slot in (view.slot(layer, 0, projection, role),)
        if slot.entry is not None and slot.index is not None and slot.entry.dtype in SCALE_BYTES
    }


def _numbers(old: Floats, new: Floats) -> Iterator[tuple[Value, Value, float | None]]:
    """Old, new and their ratio, which has a meaning between finite numbers alone."""
    ratios = np.where(np.isfinite(old) & np.isfinite(new) & (old != 0), new / old, np.float32(np.nan))
    for before, after, ratio in zip(json_values(old), json_values(new), json_values(ratios), strict=True):
        yield before, after, ratio if isinstance(ratio, float) else None


def _config(a: Checkpoint, b: Checkpoint) -> Iterator[ChangedSetting]:
    yield from changed_settings(CONFIG, a.config, b.config)
    yield from changed_settings(HF_QUANT_CONFIG, a.hf_quant_config, b.hf_quant_config)


def changed_settings(file: str, a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> Iterator[ChangedSetting]:
    """Fields that differ in how two contents of a configuration file say that the model is quantised."""
    before, after = (_flat(_section(content) if file == CONFIG else content) for content in (a, b))
    for field in [*before, *(field for field in after if field not in before)]:
        # What says null says nothing, as what lacks it.
        if before.get(field) != after.get(field):
            yield ChangedSetting(file, field, before.get(field), after.get(field))


def _section(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Only what says how the model is quantised; the rest of ``config.json`` is another matter."""
    text = (config or {}).get("text_config")
    holders = {"": config or {}, "text_config": text if isinstance(text, dict) else {}}
    out: dict[str, Any] = {}
    for place, holder in holders.items():
        keys = (*_SECTIONS, "moe_quant_algo", "expert_dtype")
        found = {key: holder[key] for key in keys if key in holder}
        out |= {place: found} if place and found else found
    return out


def _flat(content: Mapping[str, Any] | None, before: str = "") -> dict[str, Any]:
    """Fields by dotted path; lists are one value.  Deeper than any real file it stops."""
    out: dict[str, Any] = {}
    for key, value in (content or {}).items():
        path = f"{before}.{key}" if before else str(key)
        if isinstance(value, dict) and value and path.count(".") < 20:
            out |= _flat(value, path)
        else:
            out[path] = value
    return out
