"""Write a copy of a checkpoint with one fault in it; the source is only read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nvfp4viz.checkpoint.canonical import canonical
from nvfp4viz.checkpoint.copies import changed_copy
from nvfp4viz.checkpoint.faults import changes
from nvfp4viz.checkpoint.open import open_checkpoint


@dataclass(frozen=True, slots=True)
class Injection:
    """What `inject` did: tensors changed and removed, files rewritten and linked."""

    changed: tuple[str, ...]
    removed: tuple[str, ...]
    rewritten: tuple[str, ...]
    linked: tuple[str, ...]


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
    new = changes(
        canonical(checkpoint),
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
    return Injection(changed, removed, copied.rewritten, copied.linked)
