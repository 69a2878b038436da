"""Every projection of every expert, read in its layer's dialect.

Thousands of projections have one *signature* (suffixes with their types and shapes), so that what a suffix means is
found out once a signature and layer, and a projection costs two small records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from nvfp4viz.checkpoint.dialects import PACKED, PROJECTIONS, Dialect, recognise
from nvfp4viz.checkpoint.dialects.collect import Parts
from nvfp4viz.checkpoint.dialects.per_expert import ROLES
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


class ModuleReader:
    """Every projection read in its layer's dialect.

    A layer's dialect is that of most of its projections; one that clearly speaks another is in state ``"other"``.
    """

    def __init__(
        self,
        table: TensorTable,
        parts: list[Parts],
        layer_of: Mapping[str, int],
        method: str | None,
        claimed: Callable[[int], int | None],
    ) -> None:
        self._table, self._method = table, method
        kept = [(layer_of[part.block], part) for part in parts if part.block in layer_of]
        # Thousands of projections have one signature: suffixes with their types and shapes.
        kind_of = table.kind.tolist().__getitem__
        known: dict[tuple[str, tuple[str, ...], tuple[int, ...]], int] = {}
        numbers: list[int] = []
        counts: dict[int, Counter[int]] = {layer: Counter() for layer in layer_of.values()}
        for layer, part in kept:
            signature = (part.arrangement, tuple(part.rows), tuple(map(kind_of, part.rows.values())))
            number = known.setdefault(signature, len(known))
            numbers.append(number)
            counts[layer][number] += 1
        self._signatures = list(known)
        self._own = [self._recognise(*signature) for signature in self._signatures]
        self.dialects = {layer: self._vote(found) for layer, found in counts.items()}
        self._speak_for_the_unread(counts)
        self.modules: dict[tuple[int, int, str], Module] = {}
        self.experts_in: dict[int, int] = dict.fromkeys(counts, 0)
        self.projections: set[str] = set()
        self.activation_blocks: set[str] = set()
        self._readings: dict[tuple[int, int], _Reading] = {}
        self._read_all(kept, numbers, claimed)
        largest = max(self.experts_in.values(), default=0)
        for layer, size in self.experts_in.items():
            self.experts_in[layer] = max(size if counts[layer] else largest, claimed(layer) or 0)

    def _recognise(self, arrangement: str, suffixes: tuple[str, ...], kinds: tuple[int, ...]) -> Dialect | None:
        types = {suffix: self._table.kinds[kind][0] for suffix, kind in zip(suffixes, kinds, strict=True)}
        return recognise(types, arrangement, self._method)

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

    def _speak_for_the_unread(self, counts: Mapping[int, Counter[int]]) -> None:
        """A layer of which nothing can be read is taken for what most others are."""
        spoken = [dialect for dialect in self.dialects.values() if dialect]
        if spoken:
            usual = max(spoken, key=lambda dialect: sum(dialect is other for other in spoken))
            self.dialects |= {layer: usual for layer, found in counts.items() if not found}

    def _read_all(
        self, kept: list[tuple[int, Parts]], numbers: list[int], claimed: Callable[[int], int | None]
    ) -> None:
        table, modules, experts_in, readings = self._table, self.modules, self.experts_in, self._readings
        used = self.projections
        for (layer, part), number in zip(kept, numbers, strict=True):
            kind = PROJECTIONS[part.projection]
            used.add(kind)
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
            experts_in[layer] = max(experts_in[layer], size or 0)
            for expert in range(size if size is not None else claimed(layer) or 1):
                # A tensor of its own wins over a row of one that holds all experts.
                modules.setdefault((layer, expert, kind), module)

    def _reading(self, layer: int, number: int) -> _Reading:
        """Which suffix plays which role, which play none, and the module's state."""
        dialect, own = self.dialects[layer], self._own[number]
        _, suffixes, kinds = self._signatures[number]
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


def _leading(tensors: Mapping[str, TensorEntry]) -> int | None:
    """Experts in tensors that hold all of them: the first axis of a matrix or vector of experts."""
    sizes = Counter(entry.shape[0] for entry in tensors.values() if entry.shape and not is_one_number(entry))
    return sizes.most_common(1)[0][0] if sizes else None


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
