"""Fused projections: which row of which checkpoint tensor stands in which row of which rank, and back.

A server concatenates projections that read the same input, so that one product does the work of several.  Under tensor
parallelism every rank holds some rows of every part; the cut goes between *units*, which must stay whole: heads, or
single rows where there are no heads.  Sources: `serving-vllm.md` section 12 (vLLM 0.33.0).

=============  ==============================================  ====================================================
layout         parts of a rank, in order                       checkpoint
=============  ==============================================  ====================================================
``qkv``        q, k, v                                         a tensor for each
``gate_up``    gate, up (w13 is the same for each expert)      a tensor for each
``qkvz``       flat: q, k, v, z (Qwen3.5)                      ``in_proj_qkv`` holds q, k, v; ``in_proj_z`` the rest
``qkvz``       interleaved: q, k, v, z of one key head, then   ``in_proj_qkvz`` in that very order
               of the next (Qwen3-Next)
``ba``         flat: b, a; or interleaved by key head          ``in_proj_b``, ``in_proj_a``; or ``in_proj_ba``
=============  ==============================================  ====================================================

Where there are more ranks than key-value heads, each head is held by ``tp / kv_heads`` neighbouring ranks.

Every row of a product depends on its own row of the weight alone.  So the outputs of the fused product are those of the
separate ones in another order, bit for bit, as long as each row is summed in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import InputError

Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]
Order = Literal["flat", "interleaved"]
ORDERS: tuple[Order, ...] = ("flat", "interleaved")


@dataclass(frozen=True, slots=True)
class Part:
    """One projection in a fused matrix.

    Attributes
    ----------
    name
        ``"q"``, ``"k"``, ``"v"``, ``"z"``, ``"b"``, ``"a"``, ``"gate"`` or ``"up"``.
    units, unit_rows
        Units that a cut leaves whole, and rows in each.  A unit of q, k, v or z is a head.
    tensor
        The checkpoint tensor that holds it.
    """

    name: str
    units: int
    unit_rows: int
    tensor: str

    @property
    def rows(self) -> int:
        return self.units * self.unit_rows


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of one unit range: where they stand on a rank, and where in the checkpoint.

    Attributes
    ----------
    rank, first, rows
        Rows ``first`` to ``first + rows - 1`` of the rank's matrix.
    part, part_first
        What they are: row of the part, counted over all its units.
    tensor, tensor_first
        Where they come from.
    """

    rank: int
    first: int
    rows: int
    part: str
    part_first: int
    tensor: str
    tensor_first: int


@dataclass(frozen=True, slots=True)
class FusedRow:
    """One row of one rank: what it is, and where it comes from.  ``unit`` is its head, or the row itself."""

    part: str
    unit: int
    part_row: int
    tensor: str
    tensor_row: int


@dataclass(frozen=True)
class FusedLayout:
    """A fused projection cut for ``tp`` ranks; made by `qkv_layout`, `gate_up_layout`, `qkvz_layout`, `ba_layout`.

    Attributes
    ----------
    name
        ``"qkv"``, ``"gate_up"``, ``"qkvz"`` or ``"ba"``.
    parts
        In the order in which they stand.
    tp
        Number of ranks.
    groups
        1 for the flat order; else the number of key heads, each of which has its share of every part beside it.
    """

    name: str
    parts: tuple[Part, ...]
    tp: int
    groups: int = 1

    @property
    def order(self) -> Order:
        return "flat" if self.groups == 1 else "interleaved"

    @property
    def whole(self) -> FusedLayout:
        """The same for one rank: the checkpoint's own rows from top to bottom."""
        return replace(self, tp=1)

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def rank_units(self, part: Part) -> int:
        """Units of a part that each rank holds; at least one, replicated if need be."""
        return max(1, part.units // self.tp)

    def copies(self, part: Part) -> int:
        """How many ranks hold the same unit."""
        return max(1, self.tp // part.units)

    @property
    def rank_rows(self) -> int:
        """Rows of each rank's matrix."""
        return sum(self.rank_units(part) * part.unit_rows for part in self.parts)

    @cached_property
    def tensors(self) -> dict[str, int]:
        """Checkpoint tensors in order, with their rows."""
        found: dict[str, int] = {}
        for part in self.parts:
            found[part.tensor] = found.get(part.tensor, 0) + part.rows
        return found

    def tensor_row(self, part: Part, row: int) -> int:
        """Row of the part's checkpoint tensor that holds row ``row`` of the part."""
        before = [other for other in self.parts[: self.parts.index(part)] if other.tensor == part.tensor]
        if self.groups == 1:
            return sum(other.rows for other in before) + row
        share = part.rows // self.groups
        group, within = divmod(row, share)
        group_rows = sum(other.rows for other in self.parts) // self.groups
        return group * group_rows + sum(other.rows // self.groups for other in before) + within

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Every rank's matrix from top to bottom, as runs of rows that are consecutive in the checkpoint too."""
        found = []
        for rank in range(self.tp):
            first = 0
            groups = range(rank * self.groups // self.tp, (rank + 1) * self.groups // self.tp)
            for group in groups if self.groups > 1 else (None,):
                for part in self.parts:
                    if group is None:
                        units = self.rank_units(part)
                        part_first = rank // self.copies(part) * units * part.unit_rows
                    else:
                        units = part.units // self.groups
                        part_first = group * units * part.unit_rows
                    rows = units * part.unit_rows
                    at = self.tensor_row(part, part_first)
                    found.append(Run(rank, first, rows, part.name, part_first, part.tensor, at))
                    first += rows
        return tuple(found)

    @cached_property
    def sources(self) -> I64:
        """(tp, R) int64: row of all checkpoint tensors put one below the other, for every row of every rank."""
        starts = dict(zip(self.tensors, np.cumsum([0, *self.tensors.values()])[:-1].tolist(), strict=True))
        out = np.empty((self.tp, self.rank_rows), np.int64)
        for run in self.runs:
            at = starts[run.tensor] + run.tensor_first
            out[run.rank, run.first : run.first + run.rows] = np.arange(at, at + run.rows)
        return out

    @cached_property
    def places(self) -> tuple[I64, I64]:
        """The way back.  (S, C) int64 each: rank and row of every copy of each checkpoint row, −1 behind the last."""
        flat = self.sources.ravel()
        total = sum(self.tensors.values())
        counts = np.bincount(flat, minlength=total)
        order = np.argsort(flat, kind="stable")
        ends = np.cumsum(counts)
        nth = np.arange(flat.size) - np.repeat(ends - counts, counts)
        ranks = np.full((total, int(counts.max())), -1, np.int64)
        rows = ranks.copy()
        ranks[flat[order], nth], rows[flat[order], nth] = np.divmod(order, self.rank_rows)
        return ranks, rows


# ------------------------------------------------------------------------------------------------------ layouts


def qkv_layout(heads: int, kv_heads: int, head_dim: int, tp: int = 1) -> FusedLayout:
    """``qkv_proj``: ``heads / tp`` query heads, then ``max(1, kv_heads / tp)`` heads of k, then of v, on each rank.

    Raises
    ------
    InputError
        ``fusion.size``; ``fusion.group`` unless the key-value heads divide the query heads; ``fusion.uneven`` unless
        the ranks divide the query heads; ``fusion.kv`` unless ranks and key-value heads divide one another.

    Examples
    --------
    >>> layout = qkv_layout(heads=4, kv_heads=2, head_dim=32, tp=4)      # each k and v head on two ranks
    >>> layout.rank_rows, layout.copies(layout.part("k"))
    (96, 2)
    >>> trace_row(layout, rank=3, row=40)
    FusedRow(part='k', unit=1, part_row=40, tensor='k_proj', tensor_row=40)
    """
    _sizes(heads=heads, kv_heads=kv_heads, head_dim=head_dim, tp=tp)
    if heads % kv_heads:
        raise InputError("fusion.group", name="heads", many=heads, few=kv_heads)
    _even("q", heads, tp)
    if kv_heads % tp and tp % kv_heads:
        raise InputError("fusion.kv", kv_heads=kv_heads, tp=tp)
    parts = (
        Part("q", heads, head_dim, "q_proj"),
        Part("k", kv_heads, head_dim, "k_proj"),
        Part("v", kv_heads, head_dim, "v_proj"),
    )
    return FusedLayout("qkv", parts, tp)


def gate_up_layout(intermediate: int, tp: int = 1) -> FusedLayout:
    """``gate_up_proj``, and w13 of every expert: gate's rows first, then up's.

    Raises
    ------
    InputError
        ``fusion.size``; ``fusion.uneven`` unless the ranks divide the intermediate size.

    >>> gate_up_layout(64, tp=2).sources[1, [0, 31, 32]].tolist()
    [32, 63, 96]
    """
    _sizes(intermediate=intermediate, tp=tp)
    _even("gate", intermediate, tp)
    return FusedLayout(
        "gate_up", (Part("gate", intermediate, 1, "gate_proj"), Part("up", intermediate, 1, "up_proj")), tp
    )


def qkvz_layout(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, tp: int = 1, order: Order = "flat"
) -> FusedLayout:
    """``in_proj_qkvz`` of Gated DeltaNet: q and k have ``key_heads`` heads, v and z ``value_heads``.

    Flat (Qwen3.5): q, k, v, z.  Interleaved (Qwen3-Next): for each key head its q, its k, and then v and z of the
    ``value_heads / key_heads`` value heads that belong to it.

    Raises
    ------
    InputError
        ``fusion.size``; ``fusion.order``; ``fusion.group`` unless the key heads divide the value heads;
        ``fusion.uneven`` unless the ranks divide the key heads: these are not replicated.

    >>> layout = qkvz_layout(2, 4, 8, 8, tp=2, order="interleaved")
    >>> [(run.part, run.tensor_first) for run in layout.runs if run.rank == 1]
    [('q', 48), ('k', 56), ('v', 64), ('z', 80)]
    """
    _sizes(key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, tp=tp)
    _delta(key_heads, value_heads, tp, order)
    flat = order == "flat"
    first, last = ("in_proj_qkv", "in_proj_z") if flat else ("in_proj_qkvz", "in_proj_qkvz")
    parts = (
        Part("q", key_heads, key_dim, first),
        Part("k", key_heads, key_dim, first),
        Part("v", value_heads, value_dim, first),
        Part("z", value_heads, value_dim, last),
    )
    return FusedLayout("qkvz", parts, tp, 1 if flat else key_heads)


def ba_layout(key_heads: int, value_heads: int, tp: int = 1, order: Order = "flat") -> FusedLayout:
    """``in_proj_ba`` of Gated DeltaNet: a row of b and a row of a for every value head.

    Raises
    ------
    InputError
        As `qkvz_layout`.

    >>> ba_layout(2, 4, order="interleaved").runs[1].part_first, ba_layout(2, 4).rank_rows
    (0, 8)
    """
    _sizes(key_heads=key_heads, value_heads=value_heads, tp=tp)
    _delta(key_heads, value_heads, tp, order)
    flat = order == "flat"
    b, a = ("in_proj_b", "in_proj_a") if flat else ("in_proj_ba", "in_proj_ba")
    parts = Part("b", value_heads, 1, b), Part("a", value_heads, 1, a)
    return FusedLayout("ba", parts, tp, 1 if flat else key_heads)


def _sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise InputError("fusion.size", name=name, value=value)


def _even(part: str, units: int, tp: int) -> None:
    if units % tp:
        raise InputError("fusion.uneven", part=part, units=units, tp=tp)


def _delta(key_heads: int, value_heads: int, tp: int, order: str) -> None:
    if order not in ORDERS:
        raise InputError("fusion.order", name=order, known=", ".join(ORDERS))
    if value_heads % key_heads:
        raise InputError("fusion.group", name="value_heads", many=value_heads, few=key_heads)
    _even("k", key_heads, tp)


# ------------------------------------------------------------------------------------------------------ row by row


def trace_row(layout: FusedLayout, rank: int, row: int) -> FusedRow:
    """Where one row of one rank comes from, by arithmetic alone: the reference for `FusedLayout.sources`.

    Raises
    ------
    InputError
        ``fusion.row`` if the rank has no such row, or there is no such rank.
    """
    if not (0 <= rank < layout.tp and 0 <= row < layout.rank_rows):
        raise InputError("fusion.row", rank=rank, row=row, ranks=layout.tp, rows=layout.rank_rows)
    group, within = 0, row
    if layout.order == "interleaved":
        group, within = divmod(row, sum(part.rows for part in layout.parts) // layout.groups)
        group += rank * layout.groups // layout.tp
    for part in layout.parts:
        if layout.order == "interleaved":
            here, first = part.rows // layout.groups, group * (part.rows // layout.groups)
        elif part.units >= layout.tp:
            here, first = part.rows // layout.tp, rank * (part.rows // layout.tp)
        else:
            here, first = part.unit_rows, rank * part.units // layout.tp * part.unit_rows
        if within < here:
            part_row = first + within
            at = layout.tensor_row(part, part_row)
            return FusedRow(part.name, part_row // part.unit_rows, part_row, part.tensor, at)
        within -= here
    raise AssertionError("the parts fill the rank")


def find_row(layout: FusedLayout, part: str, part_row: int) -> tuple[tuple[int, int], ...]:
    """``(rank, row)`` of every copy of one row of a part, by arithmetic alone: the reference for the way back.

    Raises
    ------
    InputError
        ``fusion.part-row`` if the part has no such row, or there is no such part.

    >>> find_row(qkv_layout(4, 2, 32, tp=4), "v", 0)
    ((0, 64), (1, 64))
    """
    names = [one.name for one in layout.parts]
    if part not in names or not 0 <= part_row < layout.part(part).rows:
        raise InputError("fusion.part-row", part=part, row=part_row, known=", ".join(names))
    found = layout.part(part)
    before = layout.parts[: names.index(part)]
    if layout.order == "interleaved":
        group, within = divmod(part_row, found.rows // layout.groups)
        rank, local = divmod(group, layout.groups // layout.tp)
        group_rows = sum(one.rows for one in layout.parts) // layout.groups
        return ((rank, local * group_rows + sum(one.rows // layout.groups for one in before) + within),)
    here = layout.rank_units(found) * found.unit_rows
    holder, within = divmod(part_row, here)
    row = sum(layout.rank_units(one) * one.unit_rows for one in before) + within
    copies = layout.copies(found)
    return tuple((holder * copies + copy, row) for copy in range(copies))
