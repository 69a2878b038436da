"""Every projection of every expert, read in its layer's dialect.

Thousands of projections have one *signature* (suffixes with their types and shapes), so that what a suffix means is
found out once a signature and layer, and a projection costs two small records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from nvfp4viz.checkpoint.dialects import PACKED, PROJECTIONS, Dialect, recognise
from nvfp4viz.checkpoint.dialects.collect import Parts
from nvfp4viz.checkpoint.dialects.per_expert import PROJECTION_ORDER, ROLES
from nvfp4viz.checkpoint.dialects.recognise import UNREAD
from nvfp4viz.checkpoint.dtypes import SCALE_BYTES
from nvfp4viz.checkpoint.table import TensorEntry, TensorTable

FLOATS = frozenset({"BF16", "F16", "F32"})


class Rows(Mapping[str, TensorEntry]):
    """Entries by key, made when somebody asks: a large model has 178,176 of them, and an audit looks at few.

    Attributes
    ----------
    table, rows
        The checkpoint's tensors, and the row in them by key.
    """

    __slots__ = ("rows", "table")

    def __init__(self, table: TensorTable, rows: dict[str, int]) -> None:
        self.table, self.rows = table, rows

    def __getitem__(self, key: str) -> TensorEntry:
        return self.table.entry_at(self.rows[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


NO_ROWS = Rows(TensorTable.empty(), {})


class Module(NamedTuple):
    """One projection of one expert: the tensors that it has, by role.

    Attributes
    ----------
    state
        ``"quantised"`` (packed codes or a block scale), ``"unquantised"`` (a BF16, F16 or F32 weight),
        ``"other"`` (another format, such as FP8) or ``"absent"``.
    extras
        Tensors whose suffix plays no role here, such as ``pre_quant_scale``.
    whole
        Its tensors hold all experts of the layer; the layer's experts share this record.
    """

    name: str
    state: str
    tensors: Rows = NO_ROWS
    extras: Rows = NO_ROWS
    whole: bool = False


def is_one_number(entry: TensorEntry) -> bool:
    """One F32, F64, BF16 or F16 number, whatever its shape."""
    return entry.nbytes == SCALE_BYTES.get(entry.dtype)


# Suffixes that say something of the dialect: what plays no part in one is not of it.
_TELLING = frozenset({
    "", "blocks", "scale", "scale2", "scales", "weight", "weight_global_scale", "weight_packed", "weight_scale",
    "weight_scale_2", "weight_scale_inv",
})  # fmt: skip

Promised = Mapping[tuple[int, int | None, str], Collection[str]]
"""Suffixes by layer, expert and projection on disk."""
_Signature = tuple[str, tuple[str, ...], tuple[int, ...], tuple[str, ...]]


class ModuleReader:
    """Every projection read in its layer's dialect.

    A layer's dialect is that of most of its projections; one that clearly speaks another is in state ``"other"``.
    Where what can be read of a layer does not tell, the names of what cannot be read do, and then the other layers.

    Parameters
    ----------
    promised
        Suffixes that lie in files that cannot be read, by layer, expert (None: all) and projection as on disk.
    whole
        All names are known: there are no files whose contents nobody lists.
    label
        The algorithm that the configuration gives all experts; None where it says nothing, or differs by layer.

    Attributes
    ----------
    stored
        Projections by layer of which something is stored, or promised in files that cannot be read.
    """

    def __init__(
        self,
        table: TensorTable,
        parts: list[Parts],
        layer_of: Mapping[str, int],
        method: str | None,
        claimed: Callable[[int], int | None],
        promised: Promised,
        *,
        whole: bool,
        drafts: Collection[int],
        label: str | None = None,
    ) -> None:
        self._table, self._method, self._whole, self._label = table, method, whole, label
        kept = [(layer_of[part.block], part) for part in parts if part.block in layer_of]
        # Thousands of projections have one signature: suffixes with their types and shapes.
        kind_of = table.kind.tolist().__getitem__
        known: dict[_Signature, int] = {}
        numbers: list[int] = []
        counts: dict[int, Counter[int]] = {layer: Counter() for layer in layer_of.values()}
        for layer, part in kept:
            lost = promised.get((layer, part.expert, part.projection)) if promised else None
            unread = tuple(sorted(lost - part.rows.keys())) if lost else ()
            signature = (part.arrangement, tuple(part.rows), tuple(map(kind_of, part.rows.values())), unread)
            number = known.setdefault(signature, len(known))
            numbers.append(number)
            counts[layer][number] += 1
        self._signatures = list(known)
        self._own = [self._recognise(*signature) for signature in self._signatures]
        self.dialects = {layer: self._vote(found) for layer, found in counts.items()}
        self._speak_for_the_unread(counts, promised, drafts)
        self.modules: dict[tuple[int, int, str], Module] = {}
        self.experts_in: dict[int, int] = dict.fromkeys(counts, 0)
        self.stored: dict[int, set[str]] = {layer: set() for layer in counts}
        for layer, expert, projection in promised:
            self.stored[layer].add(PROJECTIONS[projection])
            self.experts_in[layer] = max(self.experts_in[layer], 0 if expert is None else expert + 1)
        self.activation_blocks: set[str] = set()
        self._readings: dict[tuple[int, int], _Reading] = {}
        self._read_all(kept, numbers, claimed)
        self._add_known_projections(layer_of)
        largest = max(self.experts_in.values(), default=0)
        for layer, size in self.experts_in.items():
            self.experts_in[layer] = max(size if counts[layer] else largest, claimed(layer) or 0)
        self._promise_activations(promised)

    def _recognise(
        self, arrangement: str, suffixes: tuple[str, ...], kinds: tuple[int, ...], unread: tuple[str, ...]
    ) -> Dialect | None:
        types = {suffix: self._table.kinds[kind][0] for suffix, kind in zip(suffixes, kinds, strict=True)}
        types |= dict.fromkeys(unread, UNREAD)
        return recognise(types, arrangement, self._method, whole=self._whole, label=self._label)

    def _vote(self, counts: Counter[int]) -> Dialect | None:
        """The dialect of most projections of a layer that tell."""
        votes: dict[int, int] = {}
        dialects: dict[int, Dialect] = {}
        for number, count in counts.items():
            dialect = self._own[number]
            if dialect is not None:
                dialects[id(dialect)] = dialect
                votes[id(dialect)] = votes.get(id(dialect), 0) + count
        return dialects[max(votes, key=votes.__getitem__)] if votes else None

    def _speak_for_the_unread(
        self, counts: Mapping[int, Counter[int]], promised: Promised, drafts: Collection[int]
    ) -> None:
        """A layer of which too little can be read is taken for what its lost names say, or most others are."""
        open_ = [layer for layer in counts if self.dialects[layer] is None]
        if self._whole:
            lost = {layer for layer, _, _ in promised}
            open_ = [layer for layer in open_ if layer in lost or not counts[layer]]
        if not open_:
            return
        names: dict[int, Counter[tuple[str, ...]]] = {layer: Counter() for layer in open_}
        for (layer, expert, _), suffixes in promised.items():
            if layer in names and expert is not None:
                names[layer][tuple(sorted(suffixes))] += 1
        for layer, found in names.items():
            for suffixes, _ in found.most_common():
                types = dict.fromkeys(suffixes, UNREAD)
                self.dialects[layer] = self.dialects[layer] or recognise(types, "expert", self._method, whole=False)
        # A draft layer may be of another format than the model.
        spoken = [dialect for layer, dialect in self.dialects.items() if dialect and layer not in drafts]
        usual = sorted(spoken, key=lambda dialect: -sum(dialect is other for other in spoken))
        for layer in open_:
            if layer not in drafts and self.dialects[layer] is None:
                fitting = (one for one in usual if all(self._may_be(number, one) for number in counts[layer]))
                self.dialects[layer] = next(fitting, None)

    def _may_be(self, number: int, dialect: Dialect) -> bool:
        """May these tensors be what is left of a projection in a dialect?"""
        arrangement, suffixes, kinds, _ = self._signatures[number]
        for suffix, kind in zip(suffixes, kinds, strict=True):
            role, dtype = dialect.role_of(suffix), self._table.kinds[kind][0]
            due = {"weight": PACKED, "weight_scale": dialect.scale_types}.get(role or "")
            if dtype not in (due or (dtype,)) or (role is None and suffix in _TELLING):
                return False
        return (arrangement == "expert") == (dialect.arrangement == "expert")

    def _promise_activations(self, promised: Promised) -> None:
        """Activation scales that are known and cannot be read are there."""
        for (layer, _, _), suffixes in promised.items():
            dialect = self.dialects[layer]
            if dialect is not None and any(dialect.role_of(suffix) == "input_scale" for suffix in suffixes):
                self.activation_blocks.add(dialect.block)

    def _read_all(
        self, kept: list[tuple[int, Parts]], numbers: list[int], claimed: Callable[[int], int | None]
    ) -> None:
        table, modules, experts_in, readings = self._table, self.modules, self.experts_in, self._readings
        stored = self.stored
        for (layer, part), number in zip(kept, numbers, strict=True):
            kind = PROJECTIONS[part.projection]
            stored[layer].add(kind)
            reading = readings.get((layer, number))
            if reading is None:
                reading = readings[layer, number] = self._reading(layer, number)
            rows = part.rows
            if reading.roles is not None:
                rows = {role: rows[suffix] for role, suffix in reading.roles}
            extras = (
                Rows(table, {suffix: part.rows[suffix] for suffix in reading.extras}) if reading.extras else NO_ROWS
            )
            module = Module(part.name, reading.state, Rows(table, rows), extras, part.expert is None)
            if part.expert is not None:
                modules[layer, part.expert, kind] = module
                if part.expert >= experts_in[layer]:
                    experts_in[layer] = part.expert + 1
                continue
            size = _leading(Rows(table, part.rows))
            # Numbers alone do not say for how many they are.
            size = size if size is not None else claimed(layer) or 1
            experts_in[layer] = max(experts_in[layer], size)
            for expert in range(size):
                # A tensor of its own wins over a row of one that holds all experts.
                modules.setdefault((layer, expert, kind), module)

    def _add_known_projections(self, layer_of: Mapping[str, int]) -> None:
        """What a layout always has, and a layer has nothing of: there, but for all of its tensors."""
        for block, layer in layer_of.items():
            dialect = self.dialects[layer]
            for kind, disk in dialect.projections.items() if dialect else ():
                if self.stored[layer] and kind not in self.stored[layer]:
                    self.stored[layer].add(kind)
                    module = Module(f"{block}.{disk}", "quantised", whole=True)
                    self.modules |= {(layer, expert, kind): module for expert in range(self.experts_in[layer])}

    def _reading(self, layer: int, number: int) -> _Reading:
        """Which suffix plays which role, which play none, and the module's state."""
        dialect, own = self.dialects[layer], self._own[number]
        _, suffixes, kinds, _ = self._signatures[number]
        types = {suffix: self._table.kinds[kind][0] for suffix, kind in zip(suffixes, kinds, strict=True)}
        roles: dict[str, str] = {}
        extras = []
        for suffix in suffixes:
            role = dialect.role_of(suffix) if dialect else suffix if suffix in ROLES else None
            if role is None or role in roles:
                extras.append(suffix)
            else:
                roles[role] = suffix
        plain = types.get("weight", types.get(""))
        packed = types.get(roles["weight"]) if "weight" in roles else None
        if dialect and own and (own.id, own.block) != (dialect.id, dialect.block):
            state = "other"
        elif dialect and packed in PACKED:
            state = "quantised"
        elif plain in FLOATS:
            state = "unquantised"
        elif plain is not None or dialect is None:
            state = "other"
        else:
            # Scales without codes, or a bias alone: the codes are what is missing.
            state = "quantised"
        if dialect and state == "quantised" and "input_scale" in roles:
            self.activation_blocks.add(dialect.block)
        same = not extras and all(role == suffix for role, suffix in roles.items())
        return _Reading(None if same else tuple(roles.items()), tuple(extras), state)


class _Reading(NamedTuple):
    """What a signature means in a layer: (role, suffix) pairs, None where suffixes are the roles."""

    roles: tuple[tuple[str, str], ...] | None
    extras: tuple[str, ...]
    state: str


def projections_due(
    stored: Mapping[int, Collection[str]], dialects: Mapping[int, Dialect | None], drafts: Collection[int]
) -> dict[int, tuple[str, ...]]:
    """Projections that each layer's experts must have.

    Gate and up are one tensor in some layouts and two in others, and two layers of one file may differ: a draft layer
    above all, which an exporter copies as it was.  So only layers of one kind answer for one another, and a draft layer
    for none but drafts.

    Parameters
    ----------
    stored
        What is there, by layer.
    dialects
        By layer; they tell of which kind a layer is that has lost both gate and up.

    >>> projections_due({0: {"gate", "up", "down"}, 1: {"up", "down"}, 2: {"gate_up", "down"}}, {}, [2])[1]
    ('gate', 'up', 'down')
    """
    style = {layer: _style(kinds) for layer, kinds in stored.items()}

    def alike(layer: int) -> tuple[tuple[int | None, bool | None], ...]:
        """Those who answer for a layer, the nearest first: its dialect's drafts or no drafts, its dialect's, …"""
        dialect, draft = id(dialects.get(layer)), layer in drafts
        return (dialect, draft), (dialect, None), (None, draft), (None, None)

    votes: dict[tuple[int | None, bool | None], Counter[str]] = {}
    for layer, found in style.items():
        for group in alike(layer) if found else ():
            votes.setdefault(group, Counter())[found] += 1
    for layer in [layer for layer, found in style.items() if not found]:
        counts = next((votes[group] for group in alike(layer) if group in votes), None)
        style[layer] = counts.most_common(1)[0][0] if counts else ""
    known: dict[tuple[str, bool], set[str]] = {}
    for layer, kinds in stored.items():
        known.setdefault((style[layer], layer in drafts), set()).update(kinds)
    gated = any(layer not in drafts and ("gate" in kinds or "gate_up" in kinds) for layer, kinds in stored.items())
    due = {}
    for layer, kinds in stored.items():
        here = set(kinds)
        if style[layer] != "both":
            here |= known.get((style[layer], False), set())
            here |= known.get((style[layer], True), set()) if layer in drafts else set()
        # A model is gated or it is not, however it is stored.
        if style[layer] == "two" and gated:
            here.add("gate")
        # A gate has an up beside it, and both have a down.
        here |= {"up", "down"} if "gate" in here else {"down"} if here else set()
        due[layer] = tuple(kind for kind in PROJECTION_ORDER if kind in here)
    return due


def _style(kinds: Collection[str]) -> str:
    """Are gate and up ``"one"`` tensor, ``"two"``, ``"both"`` at once, or (empty) neither?"""
    one, two = "gate_up" in kinds, "gate" in kinds or "up" in kinds
    return "both" if one and two else "one" if one else "two" if two else ""


def _leading(tensors: Mapping[str, TensorEntry]) -> int | None:
    """Experts in tensors that hold all of them: the first axis of most, and of the codes where they are as many."""
    sizes = Counter(entry.shape[0] for entry in tensors.values() if entry.shape and not is_one_number(entry))
    codes = [tensors[key].shape[0] for key in ("weight", "", "blocks") if key in tensors and tensors[key].shape]
    most = max(sizes.values(), default=0)
    return next((size for size in (*codes, *sizes) if sizes[size] == most), None)


def table_of(entries: Iterable[TensorEntry]) -> TensorTable:
    """A table of entries that were made one by one."""
    found = list(entries)
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    files: dict[str, int] = {}
    kind = [kinds.setdefault((entry.dtype, entry.shape), len(kinds)) for entry in found]
    file = [files.setdefault(entry.file, len(files)) for entry in found]
    columns = [np.array(column, np.int64) for column in (kind, file, [e.begin for e in found], [e.end for e in found])]
    names = [entry.name for entry in found]
    return TensorTable(names, list(kinds), columns[0], list(files), columns[1], columns[2], columns[3])
