"""Write a copy of a checkpoint with one fault in it; the source is only read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nvfp4viz.checkpoint.canonical_view import CanonicalView, canonical
from nvfp4viz.checkpoint.copies import changed_copy
from nvfp4viz.checkpoint.dtypes import DTYPES, SCALE_BYTES
from nvfp4viz.checkpoint.faults import FAULTS, SCALARS, Changes, changes
from nvfp4viz.checkpoint.numbers import CLASSES, classify, close
from nvfp4viz.checkpoint.open import open_checkpoint
from nvfp4viz.checkpoint.writer import Tensor


@dataclass(frozen=True, slots=True)
class Injection:
    """What `inject` did: tensors changed and removed, files rewritten and linked.

    ``findings`` are codes of which the audit must report one; empty where no check of the files can see the fault.
    """

    changed: tuple[str, ...]
    removed: tuple[str, ...]
    rewritten: tuple[str, ...]
    linked: tuple[str, ...]
    findings: tuple[str, ...]


def inject(
    source: str | Path,
    out: str | Path,
    fault: str,
    *,
    layer: int,
    expert: int,
    projection: str,
    role: str | None = None,
    value: float | None = None,
    seed: int = 0,
) -> Injection:
    """Copy ``source`` to the new folder ``out`` with one fault.

    Parameters and `InputError` as in `nvfp4viz.checkpoint.faults.changes`.

    Raises
    ------
    InputError
        Also ``fault.out-is-source`` where ``out`` lies in the source's folder or around it.
    CheckpointError
        ``checkpoint.exists``, ``checkpoint.damaged`` where a shard to rewrite is not sound, ``source.*``.
    """
    checkpoint = open_checkpoint(source)
    view = canonical(checkpoint)
    new = changes(
        view,
        checkpoint.read_tensor,
        fault,
        layer=layer,
        expert=expert,
        projection=projection,
        role=role,
        value=value,
        seed=seed,
    )
    with changed_copy(checkpoint, out, new) as (_, copied):
        pass
    changed = tuple(name for name, item in new.items() if item is not None)
    removed = tuple(name for name, item in new.items() if item is None)
    place = _Place(layer, expert, projection, role or FAULTS[fault].roles[0])
    findings = promised(view, fault, layer=layer, expert=expert, projection=projection, role=role)
    if fault != "missing" and place.role in SCALARS:
        findings = _seen(view, checkpoint.read_tensor, new, place, findings)
    return Injection(changed, removed, copied.rewritten, copied.linked, findings)


def promised(
    view: CanonicalView, fault: str, *, layer: int, expert: int, projection: str, role: str | None
) -> tuple[str, ...]:
    """Codes of which the audit must report one when this fault is at this slot; empty where no check can see it there.

    A number that a server can use shows only beside others: where a layer has one for all its experts, or fewer than
    three, its scales have no peers.  A scale of 1.0 for all of them shows by itself.
    """
    spec = FAULTS[fault]
    role = role or spec.roles[0]
    dialect = view.dialects.get(layer)
    if fault == "missing" and (dialect is None or role not in dialect.certain):
        # Where nothing has a scale, a weight is all that an expert has; a name that is not public is not missed.
        return ("expert.absent",) if dialect is None else ()
    if fault == "neighbour" and role == "weight":
        # Of codes, unlike scales, two equal matrices are no chance.
        return ("weight.duplicate-expert",)
    shared = view.is_whole(layer) and view.slot(layer, expert, projection, role).index is None
    if role not in SCALARS:
        return spec.findings
    codes = set(spec.findings)
    if shared or view.experts_in[layer] < 3:
        codes -= {"scale.outlier", "scale.filled"}
        # A number that stands for all experts is not set in all of them.
        if not shared:
            codes.discard("scale.identity")
    if (
        role != "weight_scale_2"
        or projection not in ("gate", "up")
        or not {"gate", "up"} <= set(view.projections_in[layer])
    ):
        codes.discard("scale.pair-mismatch")
    # Turned over for all experts of a layer, weight scales look like the other convention.
    if fault == "reciprocal" and shared and role == "weight_scale_2":
        codes.add("scale.convention")
    return tuple(code for code in (*spec.findings, "scale.convention") if code in codes)


class _Place(NamedTuple):
    """The slot of a fault."""

    layer: int
    expert: int
    projection: str
    role: str


def _seen(
    view: CanonicalView, read: Callable[[str], Tensor], new: Changes, at: _Place, codes: tuple[str, ...]
) -> tuple[str, ...]:
    """The same codes, by the number that now stands there: a class of its own, or another than its partner's.

    What only peers show, `promised` knows.
    """
    stored = _stored(view, read, new, at)
    if stored is None:
        return codes
    divisor = view.divisors_in(at.layer)
    with np.errstate(all="ignore"):
        effective = np.float32(1) / stored if divisor else stored
    [kind] = classify(np.array([effective], np.float32)).tolist()
    if kind:
        return (f"scale.{CLASSES[kind]}",)
    rest = tuple(code for code in codes if code.removeprefix("scale.") not in CLASSES)
    if at.role == "weight_scale_2":
        other = {"gate": "up", "up": "gate"}.get(at.projection, "")
        partner = _stored(view, read, new, at._replace(projection=other)) if other else None
        if partner is not None and np.isfinite(partner) and partner > 0 and not close(stored, partner):
            return ("scale.pair-mismatch",)
        # Of a layer that has one for all its experts, it is the other convention's.
        shared = view.is_whole(at.layer) and view.slot(*at).index is None
        if shared and view.experts_in[at.layer] >= 3 and effective > 1:
            return ("scale.convention",)
        rest = tuple(code for code in rest if code not in ("scale.pair-mismatch", "scale.convention"))
    # A stored 1 has a name of its own, wherever its peers lie.
    return tuple(code for code in rest if (code == "scale.identity") == (stored == 1))


def _stored(view: CanonicalView, read: Callable[[str], Tensor], new: Changes, at: _Place) -> np.float32 | None:
    """The number of a slot after the changes; None where there is none."""
    slot = view.slot(*at)
    if slot.entry is None or slot.entry.dtype not in SCALE_BYTES:
        return None
    item = new.get(slot.name) or read(slot.name)
    numbers = np.frombuffer(item.tobytes(), DTYPES[item.dtype].view).astype(np.float32)
    return np.float32(numbers[slot.index or 0])
