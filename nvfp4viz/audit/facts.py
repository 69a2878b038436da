"""What the checks look at: every scalar scale in a table, with the state of its slot.

Values are **effective multipliers**: a divisor of compressed-tensors is inverted, so that zero means zero in every
dialect.  Reading them fetches the scalars and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint import CanonicalView, Checkpoint, Module
from nvfp4viz.checkpoint.canonical_view import config_experts
from nvfp4viz.checkpoint.dialects import parse_expert_name, parse_whole
from nvfp4viz.checkpoint.dialects.per_expert import PROJECTIONS, ROLES
from nvfp4viz.checkpoint.dtypes import SCALE_BYTES
from nvfp4viz.checkpoint.header import TensorEntry
from nvfp4viz.checkpoint.modules import is_one_number
from nvfp4viz.checkpoint.numbers import classify

F32 = npt.NDArray[np.float32]

# State of a slot.
OK, MISSING, UNREADABLE, NOT_NEEDED, NOT_A_SCALAR = range(5)

Key = tuple[str, int, str]
SCALARS = ("weight_scale_2", "input_scale")
# Beginnings of algorithms that quantise activations too.
CLAIMS = ("NVFP4", "W4A8", "W4A4")


def median_of(values: npt.NDArray[Any]) -> Any:
    """The median of a vector without NaN, as `numpy.median` gives it; that loads masked arrays for 30 ms to say so.

    >>> median_of(np.float32([3, 1, 2])), median_of(np.float32([4, 1, 2, 3]))
    (np.float32(2.0), np.float32(2.5))
    """
    ordered, half = np.sort(values), len(values) // 2
    return ordered[half] if len(values) % 2 else ordered[half - 1 : half + 1].mean()


@dataclass(frozen=True, slots=True)
class ScaleTable:
    """One role's scalars in one layer and projection; E experts.

    Attributes
    ----------
    values : (E,) float32
        Effective multipliers; NaN where `state` is not `OK`.
    stored : (E,) float32
        As in the file.
    state : (E,) uint8
    shared
        One number for all experts, repeated.
    """

    role: str
    layer: int
    projection: str
    values: F32
    stored: F32
    state: npt.NDArray[np.uint8]
    shared: bool = False

    def classes(self) -> npt.NDArray[np.uint8]:
        """Class per expert; 0 (``ok``) where there is no value to judge."""
        return np.where(self.state == OK, classify(self.values), 0).astype(np.uint8)

    def good(self) -> npt.NDArray[np.bool_]:
        """Experts whose value is there and finite, positive and normal."""
        usable: npt.NDArray[np.bool_] = np.logical_and(self.state == OK, classify(self.values) == 0)
        return usable

    def numbers(self, mask: Any) -> int:
        """How many numbers a mask of experts is; one for all experts is one, where it is any."""
        return int(mask.any()) if self.shared else int(mask.sum())

    def where(self, mask: Any) -> tuple[int, ...]:
        """Expert numbers of a mask."""
        return tuple(np.flatnonzero(mask).tolist())


@dataclass(slots=True)
class Facts:
    """A checkpoint, its canonical view, and its scalars.

    Attributes
    ----------
    layers
        Layers that are audited: the model's own, and quantised draft layers.
    labels
        The algorithm that the configuration gives each layer's experts, or None.
    needs
        Roles that each layer's experts must have: those of its layout, less activation scales where the
        configuration says weight-only or nothing asks for them.
    pruned
        Layers that hold as many experts as the configuration says, under numbers with gaps.
    tables
        By (role, layer, projection), for ``input_scale`` and ``weight_scale_2``.
    states
        (E,) states of every role's slots, by the same key.
    tower
        How the names of another tower's experts begin; empty for the model's own.
    towers
        The other towers, where anything of them is read.
    unreadable
        Slots that the index promises in a file that is absent or damaged: (layer, expert, projection, role).  Those of
        files that are `Checkpoint.lost` have their tensor, and no number: they are so in `states` only.
    promised
        Experts of which the index promises anything there, by layer and projection.
    fills
        What `nvfp4viz.audit.fills.fills_of` has found, by layer: three rules and the forecast ask.
    """

    checkpoint: Checkpoint
    view: CanonicalView
    layers: tuple[int, ...] = ()
    labels: dict[int, str | None] = field(default_factory=dict)
    needs: dict[int, tuple[str, ...]] = field(default_factory=dict)
    pruned: frozenset[int] = frozenset()
    tables: dict[Key, ScaleTable] = field(default_factory=dict)
    states: dict[Key, npt.NDArray[np.uint8]] = field(default_factory=dict)
    unreadable: set[tuple[int, int, str, str]] = field(default_factory=set)
    promised: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    tower: str = ""
    towers: tuple[Facts, ...] = ()
    fills: dict[int, dict[str, dict[str, npt.NDArray[np.bool_]]]] = field(default_factory=dict)

    def scalars(self, role: str) -> Iterable[ScaleTable]:
        for (kind, _, _), table in self.tables.items():
            if kind == role:
                yield table

    def has_set_weights(self) -> bool:
        """Is some second-level weight scale of an expert usable and not 1 as stored, so that somebody has set it?"""
        return any(bool((table.good() & (table.stored != 1)).any()) for table in self.scalars("weight_scale_2"))

    def block(self, layer: int) -> str | None:
        """``"NVFP4"``, ``"MXFP4"``, or None for an unquantised layer."""
        dialect = self.view.dialects.get(layer)
        return dialect.block if dialect else None

    def has_vector(self, layer: int, projection: str, role: str) -> bool:
        """Does one tensor hold a scalar role's number of each expert?"""
        usable = bool((self.states[role, layer, projection] == OK).any())
        return role in SCALARS and usable and self.view.slot(layer, 0, projection, role).index is not None

    def never_written(self, table: ScaleTable) -> npt.NDArray[np.bool_]:
        """Experts whose slot a server that loads without a missing shard leaves as the memory was."""
        missing: npt.NDArray[np.bool_] = table.state == MISSING
        known = not self.checkpoint.blind_files and any(
            item.code == "container.missing-shard" for item in self.checkpoint.problems
        )
        return missing | (table.state == UNREADABLE) if known else missing

    def is_one_for_all(self, layer: int, projections: Iterable[str], role: str) -> bool:
        """Do all experts of a layer share one tensor of the role that is no vector, or would if it were there?"""
        kinds, dialect = tuple(projections), self.view.dialects.get(layer)
        if dialect is None or dialect.arrangement == "expert":
            return False
        if dialect.arrangement == "fused" and not any(self.has_vector(layer, kind, role) for kind in kinds):
            return True
        tables = [self.tables.get((role, layer, kind)) for kind in kinds]
        return all(table is not None and table.shared for table in tables)

    def place(self, layer: int, projections: Iterable[str], role: str, experts: tuple[int, ...]) -> dict[str, Any]:
        """Where a finding is: its experts, the first of its tensors' names, and how many slots there are.

        A tensor that all experts of a layer share is named once, and no expert is singled out.
        """
        kinds = tuple(projections)
        dialect = self.view.dialects.get(layer)
        if dialect is not None and dialect.arrangement != "expert":
            names = tuple(self.view.slot(layer, experts[0], kind, role).name for kind in kinds)
            if self.is_one_for_all(layer, kinds, role):
                return {"experts": None, "tensors": names, "count": len(names)}
        else:
            # A finding shows three names; 90,000 slots can have one cause.
            slots = ((expert, kind) for expert in experts for kind in kinds)
            names = tuple(self.view.slot(layer, expert, kind, role).name for expert, kind in islice(slots, 3))
        return {"experts": experts, "tensors": names, "count": len(experts) * len(kinds)}


def collect(checkpoint: Checkpoint, view: CanonicalView) -> Facts:
    """Read the experts' scalars and note the state of every slot."""
    facts = Facts(checkpoint, view, _audited_layers(view))
    facts.labels = {layer: label_in(checkpoint, view, layer) for layer in facts.layers}
    facts.needs = {layer: _needs(view, layer, facts.labels[layer]) for layer in facts.layers}
    _note_unreadable(facts)
    facts.pruned = pruned_layers(checkpoint, view)
    for layer in facts.layers:
        for projection in view.projections_in[layer]:
            for role in ROLES:
                facts.states[role, layer, projection] = np.full(view.experts_in[layer], NOT_NEEDED, np.uint8)
    singles: list[tuple[Key, int, int]] = []
    numbers = [dtype in SCALE_BYTES and prod(shape) == 1 for dtype, shape in view.table.kinds]
    is_number = [numbers[kind] for kind in view.table.kind.tolist()]
    vectors: dict[str, tuple[Key, int]] = {}
    done: set[int] = set()
    for (layer, expert, projection), module in view.modules.items():
        if layer not in facts.needs or module.state != "quantised":
            continue
        if module.whole:
            if id(module) not in done:
                done.add(id(module))
                _note_whole(facts, layer, projection, module, vectors)
        else:
            _note(facts, layer, expert, projection, module, is_number, singles)
    for layer, expert, projection, role in facts.unreadable:
        states = facts.states.get((role, layer, projection))
        if states is not None and expert < len(states) and states[expert] in (NOT_NEEDED, MISSING):
            states[expert] = UNREADABLE
    _fill_tables(facts, singles, vectors)
    return facts


def _audited_layers(view: CanonicalView) -> tuple[int, ...]:
    return (*view.moe_layers, *(layer for layer in view.draft_layers if view.dialects[layer] is not None))


def pruned_layers(checkpoint: Checkpoint, view: CanonicalView) -> frozenset[int]:
    """Layers with as many experts as the configuration says, although their numbers go further (REAP and its like)."""
    claimed = {layer: config_experts(checkpoint.config or {}, layer) for layer in view.experts_in}
    wide = {layer for layer, size in view.experts_in.items() if size > (claimed[layer] or size)}
    if not wide:
        return frozenset()
    numbers: dict[int, set[int]] = {layer: set() for layer in wide}
    for layer, expert, _ in view.modules:
        if layer in wide:
            numbers[layer].add(expert)
    return frozenset(layer for layer, found in numbers.items() if len(found) == claimed[layer])


def label_in(checkpoint: Checkpoint, view: CanonicalView, layer: int) -> str | None:
    """The algorithm that the configuration gives a layer's experts."""
    modules = (view.module(layer, 0, kind).name for kind in view.projections_in[layer])
    return checkpoint.quant_config.algo_of(view.blocks[layer], *modules)


def _needs(view: CanonicalView, layer: int, label: str | None) -> tuple[str, ...]:
    roles = view.roles_in(layer)
    dialect = view.dialects[layer]
    if dialect is None or dialect.block != "NVFP4":
        return roles
    claims = label is not None and label.startswith(CLAIMS)
    wanted = ("NVFP4" in view.activation_blocks or claims) and not (label or "").startswith("W4A16")
    without = tuple(role for role in roles if role != "input_scale")
    return (*without, "input_scale") if wanted and "input_scale" in dialect.certain else without


def _note(
    facts: Facts,
    layer: int,
    expert: int,
    projection: str,
    module: Module,
    is_number: list[bool],
    singles: list[tuple[Key, int, int]],
) -> None:
    """The states of one expert's projection; ``singles`` gets where its scalars lie: slot, expert, row of the table."""
    needs, rows = facts.needs[layer], module.tensors.rows
    for role in ROLES:
        row = rows.get(role)
        if row is None:
            if role in needs:
                facts.states[role, layer, projection][expert] = UNREADABLE if facts.checkpoint.blind_files else MISSING
            continue
        key = (role, layer, projection)
        state = OK
        if role in SCALARS:
            if is_number[row]:
                singles.append((key, expert, row))
            else:
                state = NOT_A_SCALAR
        facts.states[key][expert] = state


def _note_whole(facts: Facts, layer: int, projection: str, module: Module, vectors: dict[str, tuple[Key, int]]) -> None:
    """The states of a projection whose tensors hold all experts; ``vectors`` gets its scales, and for how many."""
    size = sum(1 for e in range(facts.view.experts_in[layer]) if (layer, e, projection) in facts.view.modules)
    for role in ROLES:
        entry, key = module.tensors.get(role), (role, layer, projection)
        if entry is None:
            if role in facts.needs[layer]:
                facts.states[key][:size] = UNREADABLE if facts.checkpoint.blind_files else MISSING
        elif role not in SCALARS:
            facts.states[key][:size] = OK
        else:
            usable = is_one_number(entry) or entry.nbytes == SCALE_BYTES.get(entry.dtype, -1) * size
            facts.states[key][:size] = OK if usable else NOT_A_SCALAR
            if usable:
                vectors[entry.name] = (key, size)


def is_scalar(entry: TensorEntry) -> bool:
    """One F32, F64, BF16 or F16 number, whatever its shape."""
    return is_one_number(entry)


def _note_unreadable(facts: Facts) -> None:
    view = facts.view
    layer_of = {block: layer for layer, block in view.blocks.items()}
    for name in facts.checkpoint.unreadable:
        parsed = parse_expert_name(name) or parse_whole(name)
        layer = None if parsed is None else layer_of.get(parsed.block)
        if parsed is None or layer is None:
            continue
        dialect = view.dialects[layer]
        role = dialect.role_of(parsed.suffix) if dialect else None
        experts = range(view.experts_in[layer]) if parsed.expert is None else (parsed.expert,)
        facts.promised.setdefault((layer, PROJECTIONS[parsed.projection]), set()).update(experts)
        if role is not None:
            facts.unreadable |= {(layer, expert, PROJECTIONS[parsed.projection], role) for expert in experts}


def _fill_tables(facts: Facts, singles: list[tuple[Key, int, int]], vectors: dict[str, tuple[Key, int]]) -> None:
    checkpoint = facts.checkpoint
    found = checkpoint.vectors(list(vectors), partly=True)
    for (name, (key, size)), numbers in zip(vectors.items(), found, strict=True):
        whole = np.full(len(facts.states[key]), np.nan, np.float32)
        if checkpoint.tensors[name].file in checkpoint.lost:
            facts.states[key][:size] = UNREADABLE
        else:
            whole[:size] = numbers
        _add_table(facts, key, whole, shared=len(numbers) == 1)
    stored: dict[Key, F32] = {
        key: np.full(len(states), np.nan, np.float32)
        for key, states in facts.states.items()
        if key[0] in SCALARS and key not in facts.tables
    }
    rows = np.array([row for _, _, row in singles], np.int64)
    values = checkpoint.scalars_at(rows, partly=True)
    for (key, expert, _), value in zip(singles, values.tolist(), strict=True):
        stored[key][expert] = value
    if checkpoint.lost:
        files = [checkpoint.tensors.files[number] for number in checkpoint.tensors.file[rows].tolist()]
        for (key, expert, _), file in zip(singles, files, strict=True):
            if file in checkpoint.lost:
                facts.states[key][expert], stored[key][expert] = UNREADABLE, np.nan
    for key, raw in stored.items():
        _add_table(facts, key, raw, shared=False)


def _add_table(facts: Facts, key: Key, raw: F32, *, shared: bool) -> None:
    with np.errstate(divide="ignore"):
        values = np.float32(1) / raw if facts.view.divisors_in(key[1]) else raw
    facts.tables[key] = ScaleTable(*key, values, raw, facts.states[key], shared)
