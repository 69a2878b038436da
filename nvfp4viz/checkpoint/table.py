"""Where tensors lie, as columns: one NumPy array per property instead of one object per tensor.

A DeepSeek-R1 in NVFP4 has 178,176 tensors.  An object each, and the garbage collector that walks them, costs more than
reading the headers; arrays of their types and places cost a tenth.  `TensorTable` is a mapping like any other: a
`TensorEntry` is made when somebody asks for one.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

# Type and shape of a tensor: thousands share a handful.
Kind = tuple[str, tuple[int, ...]]
Ints = npt.NDArray[np.int64]


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """Where one tensor lies.

    Attributes
    ----------
    name, dtype, shape
        As the header says; ``dtype`` in the format's spelling.
    file
        The shard's name inside the source.
    begin, end
        Byte range in the file, counted from the file's first byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class TensorTable(Mapping[str, TensorEntry]):
    """Tensors by name, in the order of the files and their headers; read-only.

    Attributes
    ----------
    names
        Row by row, each once.
    kinds, kind : list, (n,) int64
        Pairs (dtype, shape), and each row's place among them.
    files, file : list, (n,) int64
        Shard names, and each row's place among them.
    begin, end : (n,) int64
        Byte ranges, counted from the file's first byte.
    """

    __slots__ = ("_rows", "begin", "end", "file", "files", "kind", "kinds", "names")

    def __init__(
        self, names: list[str], kinds: list[Kind], kind: Ints, files: list[str], file: Ints, begin: Ints, end: Ints
    ) -> None:
        self.names = names
        self.kinds, self.kind = kinds, kind
        self.files, self.file = files, file
        self.begin, self.end = begin, end
        self._rows: dict[str, int] | None = None

    @classmethod
    def empty(cls) -> TensorTable:
        none = np.zeros(0, np.int64)
        return cls([], [], none, [], none, none, none)

    @classmethod
    def joined(
        cls, tables: Sequence[TensorTable], home: Mapping[str, str] | None = None, unique: bool = False
    ) -> TensorTable:
        """All rows of several tables; where they share a name, the row in its ``home`` file counts, else the last.

        ``unique`` is the caller's word that they share none.
        """
        tables = [table for table in tables if len(table.names)]
        if len(tables) == 1:
            return tables[0]
        if not tables:
            return cls.empty()
        kinds: dict[Kind, int] = {}
        kind = [np.array([kinds.setdefault(k, len(kinds)) for k in table.kinds])[table.kind] for table in tables]
        starts = np.cumsum([0, *(len(table.files) for table in tables)])
        table = cls(
            list(chain.from_iterable(table.names for table in tables)),
            list(kinds),
            np.concatenate(kind),
            [file for table in tables for file in table.files],
            np.concatenate([table.file + start for table, start in zip(tables, starts, strict=False)]),
            np.concatenate([table.begin for table in tables]),
            np.concatenate([table.end for table in tables]),
        )
        if unique or len(set(table.names)) == len(table.names):
            return table
        home, chosen = home or {}, dict[str, int]()
        for row, name in enumerate(table.names):
            before = chosen.get(name)
            if before is None or home.get(name) != table.files[table.file[before]]:
                chosen[name] = row
        return table.take(np.fromiter(chosen.values(), np.int64, len(chosen)))

    def take(self, rows: Ints) -> TensorTable:
        """The table of some rows."""
        names = [self.names[row] for row in rows.tolist()]
        return TensorTable(
            names, self.kinds, self.kind[rows], self.files, self.file[rows], self.begin[rows], self.end[rows]
        )

    @property
    def rows(self) -> dict[str, int]:
        """Row by name."""
        if self._rows is None:
            self._rows = dict(zip(self.names, range(len(self.names)), strict=True))
        return self._rows

    def rows_where(self, wanted: Sequence[bool]) -> Ints:
        """Rows whose kind is wanted: one bool for each of `kinds`."""
        return np.flatnonzero(np.array(wanted, np.bool_)[self.kind]) if self.kinds else np.zeros(0, np.int64)

    def entry_at(self, row: int) -> TensorEntry:
        dtype, shape = self.kinds[self.kind[row]]
        file = self.files[self.file[row]]
        return TensorEntry(self.names[row], dtype, shape, file, int(self.begin[row]), int(self.end[row]))

    def __getitem__(self, name: str) -> TensorEntry:
        return self.entry_at(self.rows[name])

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def entries(self) -> Iterator[TensorEntry]:
        """All rows in order, much faster than asking for each."""
        kinds, files = self.kinds, self.files
        columns = zip(
            self.names, self.kind.tolist(), self.file.tolist(), self.begin.tolist(), self.end.tolist(), strict=True
        )
        return (
            TensorEntry(name, kinds[kind][0], kinds[kind][1], files[file], begin, end)
            for name, kind, file, begin, end in columns
        )

    def items(self) -> ItemsView[str, TensorEntry]:
        return _Items(self)

    def values(self) -> ValuesView[TensorEntry]:
        return _Values(self)

    def __repr__(self) -> str:
        return f"TensorTable({len(self.names)} tensors in {len(self.files)} files)"


class _Items(ItemsView[str, TensorEntry]):
    _mapping: TensorTable

    def __iter__(self) -> Iterator[tuple[str, TensorEntry]]:
        return zip(self._mapping.names, self._mapping.entries(), strict=True)


class _Values(ValuesView[TensorEntry]):
    _mapping: TensorTable

    def __iter__(self) -> Iterator[TensorEntry]:
        return self._mapping.entries()


class Homes(Mapping[str, str]):
    """Shard by tensor name, out of a table: what an index says that agrees with it."""

    __slots__ = ("_table",)

    def __init__(self, table: TensorTable) -> None:
        self._table = table

    def __getitem__(self, name: str) -> str:
        table = self._table
        place: int = table.file[table.rows[name]]
        return table.files[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.names)

    def __len__(self) -> int:
        return len(self._table)
