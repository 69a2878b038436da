"""Mend activation scales on a copy: a plan first, and the copy only when asked for.

``peer-max``, ``layer-max`` and ``constant`` invent a number that nobody measured; ``weight-only`` guesses nothing,
because the scales that lack are then not used.  What cannot be mended without the original weights (weight scales,
packed codes, damaged files) is refused.  A copy is audited before it gets its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nvfp4viz.audit.facts import MISSING, ScaleTable
from nvfp4viz.audit.report import Finding, Value, json_value
from nvfp4viz.audit.run import Audit, for_ranks, run_audit
from nvfp4viz.checkpoint import Checkpoint, Tensor, inspect, tensor
from nvfp4viz.checkpoint.copies import Changes, Copied, changed_copy, changed_in_memory, left_out, to_write, touched
from nvfp4viz.checkpoint.numbers import CLASSES
from nvfp4viz.checkpoint.problems import UNREAD, printable
from nvfp4viz.checkpoint.sidecars import read_side_file
from nvfp4viz.checkpoint.source import CONFIG, HF_QUANT_CONFIG, Overlay
from nvfp4viz.checkpoint.weight_only import activation_scales, is_activation_scale, relabelled
from nvfp4viz.checkpoint.writer import json_bytes
from nvfp4viz.errors import CheckpointError, InputError

SCHEMA = "nvfp4viz.repair/1"
RECORD = "nvfp4viz-repair.json"
# Beginning of the name of the shard with scales that were missing.
EXTRA = "nvfp4viz-repair"
POLICIES = ("peer-max", "layer-max", "constant", "weight-only")
# Findings of activation scales that a number mends, and those that it mends where the user distrusts the values.
BROKEN = (
    "scale.missing", "scale.zero", "scale.nan", "scale.inf", "scale.negative", "scale.subnormal", "expert.rank-hole",
    "scheme.mislabelled",
)  # fmt: skip
SUSPECT = ("scale.outlier", "scale.filled", "scale.identity")
FLT_MIN = np.finfo(np.float32).tiny


class MendedSlot(msgspec.Struct, frozen=True):
    """One activation scale that gets a number: what was there, and the new one, both as the file stores them.

    ``old_state`` is ``"missing"``, a class of `nvfp4viz.audit.facts.CLASSES`, or a suspicion such as ``"outlier"``;
    ``draft`` says that its layer is a draft (MTP) layer, numbered after the model's own.
    """

    layer: int
    expert: int
    projection: str
    role: str
    tensor: str
    old_state: str
    old: Value
    new: Value
    draft: bool = False


class RepairRecord(msgspec.Struct, frozen=True):
    """What ``nvfp4viz-repair.json`` says.

    Attributes
    ----------
    source, fingerprint
        Of the checkpoint that was mended; its name without any path.
    guesses
        The numbers were invented by a rule, not measured.
    slots, dropped, config
        Scales that got a number, activation scales taken away, and configuration files that were relabelled.
    earlier
        Records of repairs that the source had seen already.
    """

    schema: str
    source: str
    fingerprint: str
    policy: str
    value: float | None
    guesses: bool
    slots: tuple[MendedSlot, ...]
    dropped: tuple[str, ...]
    config: tuple[str, ...]
    note: str
    earlier: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Repair:
    """A plan: the record, and what a copy will hold in other words than the source."""

    record: RepairRecord
    checkpoint: Checkpoint
    changes: Changes
    files: dict[str, bytes]
    suspected: int = 0
    """Activation scales of routed experts that only look wrong, and are left as they are."""
    shared: frozenset[str] = frozenset()
    """Tensors with one number for all experts of a layer, of which the record has a slot for each expert."""

    @property
    def is_empty(self) -> bool:
        """Nothing to mend."""
        return not (self.changes or self.record.config)

    @property
    def numbers(self) -> list[MendedSlot]:
        """A slot for each number that is set: of one that all experts share, the first."""
        first: dict[tuple[str, int | None], MendedSlot] = {}
        for slot in self.record.slots:
            first.setdefault((slot.tensor, None if slot.tensor in self.shared else slot.expert), slot)
        return list(first.values())

    @property
    def left_out(self) -> tuple[str, ...]:
        """Shards that the mended copy does not have: nothing of them stays."""
        return tuple(sorted(left_out(self.checkpoint, self.changes)))

    @property
    def linked(self) -> int:
        """How many shards stay as they are."""
        there = {header.file for header in self.checkpoint.files}
        return len(there) - len(touched(self.checkpoint, self.changes)) - len(self.left_out)

    @cached_property
    def rewritten(self) -> tuple[int, int]:
        """Shards that a copy has to write anew, one for added scales among them, and their bytes; others are links."""
        return to_write(self.checkpoint, self.changes)


def plan_repair(
    source: str | Path | Checkpoint | Audit,
    policy: str,
    *,
    value: float | None = None,
    suspects: bool = False,
    deep: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Repair:
    """Say what a repair would change; nothing is written.

    Parameters
    ----------
    source
        As for `nvfp4viz.audit.audit`, or what an audit has read.
    policy
        ``"peer-max"``: the largest of the calibrated experts of the same layer and projection; ``"layer-max"``: of the
        same layer; ``"constant"``: ``value``; ``"weight-only"``: relabel to W4A16 and drop activation scales.
        Values that are suspected themselves do not count as calibrated.
    value
        Of ``"constant"``, as the file stores it (1.0 where None).
    suspects
        Also replace values that are far from their peers, back-filled, or 1.0 among others.
    deep
        Read packed codes and block scales first, so that what is wrong there stands in the way too.
    progress
        Told (stage, done, of) of a deep scan.

    Raises
    ------
    InputError
        ``repair.unmendable`` with what stands in the way, ``repair.ordinary`` or ``repair.still-read`` where that is
        nothing but other activation scales; ``repair.no-peers``, and ``repair.no-scale`` where ``"layer-max"`` has
        none to take either; ``repair.algorithm``, ``repair.policy``, ``repair.value``; ``repair.one-shard`` for
        one shard of several and any policy but ``"constant"``.
    CheckpointError
        ``source.*``.
    """
    number = _number(policy, value)
    # How experts are split over ranks is no matter of the files.
    done = for_ranks(source, None, None) if isinstance(source, Audit) else run_audit(source)
    checkpoint = done.checkpoint
    if deep:
        from nvfp4viz.audit.deep_findings import deepen

        done = deepen(done, progress=progress)
    slots: tuple[MendedSlot, ...] = ()
    new: dict[str, Tensor | None] = {}
    files: dict[str, bytes] = {}
    if checkpoint.part is not None:
        # The copy's new index would say that it is all.
        raise InputError("repair.one-part", file=printable(checkpoint.files[0].file, 200))
    if checkpoint.beside and policy != "constant":
        # Label and index are the whole's, and so are the peers: a maximum over this shard's experts may be too low.
        file = printable(checkpoint.source.only or "", 200)
        raise InputError("repair.one-shard", file=file, others=len(checkpoint.beside), policy=policy)
    if policy == "weight-only":
        scales = activation_scales(checkpoint.tensors)
        # A scale that is missing is mended too where its module needs none any more.
        _refuse_rest(
            done,
            policy,
            lambda item: (
                item.role == "input_scale"
                and all(is_activation_scale(name, checkpoint.tensors) for name in item.tensors)
            ),
        )
        if scales or any(item.code == "scheme.mislabelled" for item in done.report.findings):
            files = _configs(checkpoint)
        new = dict.fromkeys(scales)
    else:
        codes = (*BROKEN, *SUSPECT) if suspects else BROKEN
        places = _Places(done)
        _refuse_rest(done, policy, lambda item: item.code in codes and places.has(item))
        with np.errstate(all="ignore"):
            slots, new = _numbers(places, codes, policy, number)
    record = RepairRecord(
        schema=SCHEMA,
        source=done.report.source,
        fingerprint=done.report.fingerprint,
        policy=policy,
        value=None if number is None else float(str(number)),
        guesses=policy != "weight-only",
        slots=slots,
        dropped=tuple(new) if policy == "weight-only" else (),
        config=tuple(files),
        note=GUESSED if policy != "weight-only" else NOT_GUESSED,
        earlier=_earlier(checkpoint),
    )
    left = () if suspects or policy == "weight-only" else (i for i in done.report.findings if i.code in SUSPECT)
    places = _Places(done)
    named = {place for item in left if places.has(item) for place in places.of(item)}
    suspected = named - {(slot.layer, slot.expert, slot.projection) for slot in slots}
    shared = {slot.tensor for slot in slots if done.facts.is_one_for_all(slot.layer, (slot.projection,), "input_scale")}
    return Repair(record, checkpoint, new, files, len(suspected), frozenset(shared))


GUESSED = "These scales were set by a rule, not measured on data. Recalibrating is the cure; see the policy."
NOT_GUESSED = "No number was invented: activations are no longer quantised, so that no activation scale is needed."


def apply_repair(plan: Repair, out: str | Path, progress: Callable[[str, int, int], None] | None = None) -> Copied:
    """Write the mended copy with its record; the source is not touched.

    ``progress`` is told (stage, MiB done, of).

    Raises
    ------
    InputError, CheckpointError
        As `nvfp4viz.checkpoint.copies.changed_copy`; ``repair.nothing`` for an empty plan; ``repair.still-broken``
        where the audit of the copy finds a backend that breaks: then there is no copy.
    """
    _refuse_empty(plan)
    with changed_copy(plan.checkpoint, out, plan.changes, _side_files(plan), EXTRA, progress) as (folder, copied):
        # Of one shard alone the others are not in the copy either.
        _refuse_broken(folder, () if not plan.checkpoint.beside else ("container.missing-shard",))
    return copied


def repaired_files(plan: Repair) -> dict[str, bytes]:
    """The files that `apply_repair` writes anew, in memory: laid over the source, they make the mended copy.

    A single ``model.safetensors`` without an index comes under its new name, because a second shard stands beside it;
    of `Repair.left_out` nothing comes.

    Raises
    ------
    InputError, CheckpointError
        ``repair.nothing``, ``repair.still-broken``, and as `nvfp4viz.checkpoint.copies.changed_in_memory`.
    """
    _refuse_empty(plan)
    mended = changed_in_memory(plan.checkpoint, plan.changes, _side_files(plan), EXTRA)
    _refuse_broken(mended)
    return mended.new


def repaired_checkpoint(plan: Repair) -> Checkpoint:
    """The mended checkpoint, in memory; the plan may be empty.  For small ones."""
    return inspect(changed_in_memory(plan.checkpoint, plan.changes, _side_files(plan), EXTRA))


def _side_files(plan: Repair) -> dict[str, bytes]:
    return {**plan.files, RECORD: record_bytes(plan.record)}


def record_bytes(record: RepairRecord) -> bytes:
    """``nvfp4viz-repair.json``."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def _refuse_empty(plan: Repair) -> None:
    if plan.is_empty:
        raise InputError("repair.nothing", name=plan.checkpoint.name, policy=plan.record.policy)


def _refuse_broken(copy: Path | Overlay, expected: tuple[str, ...] = ()) -> None:
    found = [item for item in run_audit(copy).report.findings if item.code not in expected]
    left = [item for item in found if item.severity in ("backend", "error")]
    if left:
        raise CheckpointError("repair.still-broken", findings=_listed(left))


def _number(policy: str, value: float | None) -> np.float32 | None:
    if policy not in POLICIES:
        raise InputError("repair.policy", policy=str(policy)[:40], known=", ".join(POLICIES))
    if policy != "constant":
        if value is not None:
            raise InputError("repair.value", value=value)
        return None
    with np.errstate(all="ignore"):
        number = np.float32(1.0 if value is None else value)
        inverse = np.float32(1) / number
    # Both it and what kernels make of it must be ordinary numbers.
    if not (FLT_MIN <= number < np.inf and FLT_MIN <= inverse < np.inf):
        raise InputError("repair.value", value=value)
    return number


def _refuse_rest(done: Audit, policy: str, mends: Any) -> None:
    """A copy that still breaks is no repair."""
    found = done.report.findings
    left = [item for item in found if item.severity in ("backend", "error") and not mends(item)]
    # Nobody knows what is in a file that was not read.
    left += [item for item in found if item.code == UNREAD and item not in left]
    if left:
        other = all(item.role == "input_scale" and item.code in BROKEN for item in left)
        code = "unmendable" if not other else "still-read" if policy == "weight-only" else "ordinary"
        raise InputError(f"repair.{code}", findings=_listed(left), count=len(left))


def _listed(findings: list[Finding]) -> str:
    shown = [f"{item.code} ({item.tensors[0]})" if item.tensors else item.code for item in findings[:3]]
    return ", ".join(shown) + (f" (+{len(findings) - 3})" if len(findings) > 3 else "")


def _configs(checkpoint: Checkpoint) -> dict[str, bytes]:
    both = ((CONFIG, checkpoint.config), (HF_QUANT_CONFIG, checkpoint.hf_quant_config))
    new = ((file, old, relabelled(old)) for file, old in both)
    return {file: json_bytes(content) for file, old, content in new if content is not None and content != old}


def _earlier(checkpoint: Checkpoint) -> tuple[Any, ...]:
    if RECORD not in checkpoint.source.files():
        return ()
    content = read_side_file(checkpoint.source, RECORD).content
    if not content:
        return ()
    before = content.pop("earlier", None)
    return (content, *(before if isinstance(before, list) else ()))


class _Places:
    """The slots that findings mean."""

    def __init__(self, done: Audit) -> None:
        self.done, self.view, self.facts = done, done.view, done.facts

    def of(self, item: Finding) -> Iterator[tuple[int, int, str]]:
        """(layer, expert, projection) of every activation scale of a finding."""
        if item.role != "input_scale" or not self.view.complete or item.tower is not None:
            return
        if item.layer is None and item.code != "scheme.mislabelled":
            return
        apart = ("scale.outlier.sibling", "scale.outlier.layer", "scale.outlier.groups")
        if item.text.startswith(apart) or (item.text.startswith("scale.identity.layer") and item.projection is None):
            # Which of the two projections is wrong, or what a whole layer should have, nobody knows.
            return
        for layer in self.facts.layers if item.layer is None else (item.layer,):
            # A layer without routed experts has none: a dense one's modules are not ours to mend.
            every = self.view.projections_in.get(layer, ())
            for projection in every if item.projection is None else (item.projection,):
                states = self.facts.states.get(("input_scale", layer, projection))
                if states is None:
                    continue
                known: Sequence[int]
                if item.code == "scheme.mislabelled":
                    due = "input_scale" in self.facts.needs[layer]
                    known = np.flatnonzero(states == MISSING).tolist() if due else []
                else:
                    known = range(len(states)) if item.experts is None else item.experts
                for expert in known:
                    yield layer, expert, projection

    def has(self, item: Finding) -> bool:
        """The finding is about experts of the main tower, whose slots are known."""
        names = {self.view.slot(*place, "input_scale").name for place in self.of(item)}
        return bool(names) and all(name in names for name in item.tensors)

    def table(self, layer: int, projection: str) -> ScaleTable | None:
        return self.facts.tables.get(("input_scale", layer, projection))

    def shape(self, layer: int, expert: int, projection: str) -> tuple[int, ...]:
        """Of a scale that lacks: as the second-level weight scale beside it, or as a peer's."""
        peers = (
            self.view.slot(layer, other, projection, "input_scale") for other in range(self.view.experts_in[layer])
        )
        beside = self.view.slot(layer, expert, projection, "weight_scale_2")
        return next((slot.entry.shape for slot in (beside, *peers) if slot.entry is not None), ())


def _numbers(
    places: _Places, codes: tuple[str, ...], policy: str, number: np.float32 | None
) -> tuple[tuple[MendedSlot, ...], dict[str, Tensor | None]]:
    """A number for every slot that the findings name, and the tensors that hold it."""
    view = places.view
    findings = [item for item in places.done.report.findings if item.code in (*BROKEN, *SUSPECT)]
    distrusted = {place: item.code for item in findings if places.has(item) for place in places.of(item)}
    wanted = sorted(place for place, code in distrusted.items() if code in codes)
    best: dict[tuple[int, str], np.float32] = {}
    rows: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
    slots = []
    for layer, expert, projection in wanted:
        if (layer, projection) not in best:
            best[layer, projection] = (
                number if number is not None else _largest(places, set(distrusted), policy, layer, projection)
            )
        new = best[layer, projection]
        slot = view.slot(layer, expert, projection, "input_scale")
        shape = slot.entry.shape if slot.entry else places.shape(layer, expert, projection)
        if slot.name not in rows:
            rows[slot.name] = (
                np.full(shape, new) if slot.entry is None else places.done.checkpoint.read(slot.name).copy()
            )
        table = places.table(layer, projection)
        known = slot.entry is not None and table is not None
        row, at = rows[slot.name].reshape(-1), 0 if slot.index is None else slot.index
        row[at] = new
        # A number in BF16 stays one, so that the tensor keeps its place in the file.
        written = np.float32(row[at])
        state = "missing"
        if known and table is not None:
            state = CLASSES[int(table.classes()[expert])]
            state = distrusted[layer, expert, projection].partition(".")[2] if state == "ok" else state
        old = json_value(table.stored[expert]) if known and table is not None else None
        place = (layer, expert, projection, "input_scale", slot.name)
        slots.append(MendedSlot(*place, state, old, json_value(written), view.is_draft(layer)))
    return tuple(slots), {name: tensor(row) for name, row in rows.items()}


def _largest(
    places: _Places, distrusted: set[tuple[int, int, str]], policy: str, layer: int, projection: str
) -> np.float32:
    """What the file stores for the largest effective scale of the peers (a divisor is then the smallest number)."""
    found = {kind: _calibrated(places, distrusted, layer, kind) for kind in places.view.projections_in[layer]}
    own = [found[projection]] if policy == "peer-max" else list(found.values())
    stored, values = (np.concatenate([pair[number] for pair in own]) for number in (0, 1))
    if not len(values):
        elsewhere = any(len(numbers) for numbers, _ in found.values())
        raise InputError(f"repair.no-{'peers' if elsewhere else 'scale'}", layer=layer, projection=projection)
    best: np.float32 = stored[int(np.argmax(values))]
    return best


def _calibrated(
    places: _Places, distrusted: set[tuple[int, int, str]], layer: int, projection: str
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.float32]]]:
    """What is stored for usable scales that nothing is held against, and their effective values."""
    table = places.table(layer, projection)
    if table is None:
        return np.zeros(0, np.float32), np.zeros(0, np.float32)
    experts = [each for each in table.where(table.good()) if (layer, each, projection) not in distrusted]
    return table.stored[experts], table.values[experts]
