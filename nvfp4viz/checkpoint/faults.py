"""Break a checkpoint on purpose, on a copy, at one slot.

`FAULTS` says for each fault where it can be put and what the audit must say about it, or that no check of the file
alone can see it.  Where a tensor holds all experts, a fault changes one expert's row of it; one number for all of them
changes for all, and ``missing`` takes the whole tensor away.  `changes` computes the new tensors; `inject` writes a new
folder (see `injection`), `inject_tensors` works on tensors in memory.  Inputs are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint.canonical_view import CanonicalView, Slot, canonical_of
from nvfp4viz.checkpoint.dialects import PACKED
from nvfp4viz.checkpoint.dialects.per_expert import E8M0
from nvfp4viz.checkpoint.dtypes import DTYPES, SCALE_BYTES
from nvfp4viz.checkpoint.header import TensorEntry
from nvfp4viz.checkpoint.problems import printable
from nvfp4viz.checkpoint.quantconfig import read_quant_config
from nvfp4viz.checkpoint.writer import Tensor
from nvfp4viz.errors import InputError

SCALARS = ("input_scale", "weight_scale_2")
ON_CODES = ("nibble-swap", "zero-weight", "duplicate-expert")
ANY = ("input_scale", "weight_scale_2", "weight_scale", "weight")

# FLT_MIN/2688: what ModelOpt's export leaves of a tiny amax; its reciprocal overflows float32.
SUBNORMAL = np.float32(1.17549435e-38) / np.float32(2688)


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break a slot.

    Attributes
    ----------
    id
        As in links and on the command line.
    roles
        Where it can be put; the first is the default.
    findings
        Codes of which the audit must report one; empty where no check of the file can see it.
    deep
        The finding needs the weights (``--deep``), not only the scalars.
    value
        Default of the fault's number, or None where it takes none.
    """

    id: str
    roles: tuple[str, ...]
    findings: tuple[str, ...]
    deep: bool = False
    value: float | None = None


def _fault(id: str, roles: tuple[str, ...], *findings: str, deep: bool = False, value: float | None = None) -> Fault:
    return Fault(id, roles, findings, deep, value)


_CLASSES = (
    "scale.negative",
    "scale.outlier",
    "scale.pair-mismatch",
    "scale.nan",
    "scale.inf",
    "scale.subnormal",
    "scale.zero",
)

FAULTS: dict[str, Fault] = {
    fault.id: fault
    for fault in (
        _fault("missing", ANY, "scale.missing"),
        _fault("zero", SCALARS, "scale.zero"),
        _fault("nan", SCALARS, "scale.nan"),
        _fault("inf", SCALARS, "scale.inf"),
        _fault("negative", SCALARS, "scale.negative"),
        _fault("subnormal", SCALARS, "scale.subnormal"),
        # In a second-level weight scale of gate or up, what shows is that it differs from its partner.
        _fault("scaled", SCALARS, "scale.outlier", "scale.pair-mismatch", value=1000.0),
        _fault(
            "constant", SCALARS, "scale.identity", "scale.filled", "scale.outlier", "scale.pair-mismatch", value=1.0
        ),
        # A neighbour's number is as plausible as one's own.
        _fault("neighbour", ANY),
        _fault("random-bits", SCALARS, *_CLASSES),
        _fault("reciprocal", SCALARS, "scale.outlier", "scale.pair-mismatch"),
        _fault("pair-mismatch", ("weight_scale_2",), "scale.pair-mismatch", value=1.25),
        # Swapped codes and swapped matrices are as plausible as the right ones.
        _fault("nibble-swap", ("weight",)),
        _fault("gate-up-swap", ("weight",)),
        _fault("block-nan", ("weight_scale",), "block-scale.nan", deep=True),
        _fault("block-negative", ("weight_scale",), "block-scale.negative", deep=True),
        _fault("exponent-cast", ("weight_scale",), "block-scale.exponent-cast", deep=True),
        _fault("zero-weight", ("weight",), "weight.all-zero", deep=True),
        _fault("duplicate-expert", ("weight",), "weight.duplicate-expert", deep=True),
    )
}

# New tensors by name; None takes the tensor away.
Changes = dict[str, Tensor | None]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


def inject_tensors(
    tensors: Mapping[str, Tensor],
    fault: str,
    *,
    layer: int,
    expert: int,
    projection: str,
    role: str | None = None,
    value: float | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    hf_quant_config: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """A copy of ``tensors`` with one fault; untouched tensors are shared with the input.

    Parameters and errors as in `changes`.
    """
    entries = {
        name: TensorEntry(name, item.dtype, tuple(item.shape), "", 0, len(item.tobytes()))
        for name, item in tensors.items()
    }
    view = canonical_of(entries, config, read_quant_config(config, hf_quant_config))
    new = changes(
        view,
        tensors.__getitem__,
        fault,
        layer=layer,
        expert=expert,
        projection=projection,
        role=role,
        value=value,
        seed=seed,
    )
    out = {name: new.get(name, item) for name, item in tensors.items()}
    return {name: item for name, item in out.items() if item is not None}


def changes(
    view: CanonicalView,
    read: Callable[[str], Tensor],
    fault: str,
    *,
    layer: int,
    expert: int,
    projection: str,
    role: str | None = None,
    value: float | None = None,
    seed: int = 0,
) -> Changes:
    """Which tensors a fault changes, and to what.

    Parameters
    ----------
    view, read
        The checkpoint, and a function that returns one tensor of it.
    fault
        A key of `FAULTS`.
    layer, expert, projection, role
        The slot; ``role=None`` takes the fault's first.
    value
        The factor of ``scaled`` and ``pair-mismatch``, the number of ``constant``.
    seed
        For ``random-bits`` and for the byte that ``block-nan`` and ``block-negative`` choose; not negative.

    Raises
    ------
    InputError
        ``fault.unknown``, ``fault.layout``, ``fault.no-such-slot``, ``fault.pair``, ``fault.role``, ``fault.never``
        where the layout has no such tensor, ``fault.absent`` where it is missing already, ``fault.value``,
        ``fault.seed``, ``fault.format``; ``fault.no-neighbour`` where nothing of another expert could take the place;
        ``fault.rounded`` where the tensor's type does not have the fault's number.
    """
    spec = _spec(fault, role, value)
    if seed < 0:
        # NumPy's generators take none; the faults that draw nothing refuse it as the others do.
        raise InputError("fault.seed", seed=printable(str(seed), 40))
    if not view.complete or not view.modules:
        raise InputError("fault.layout", dialect=view.dialect)
    numbers = {at for at, _, _ in view.modules}
    if layer not in numbers or not 0 <= expert < view.experts_in[layer] or projection not in view.projections_in[layer]:
        kinds = view.projections_in[layer] if layer in numbers else view.projections
        there = {"layers": _span(numbers), "projections": ", ".join(kinds)}
        raise InputError("fault.no-such-slot", layer=layer, expert=expert, projection=printable(projection), **there)
    paired = {"gate", "up"} <= set(view.projections_in[layer])
    apart = paired and projection in ("gate", "up")
    if (fault == "pair-mismatch" and not apart) or (fault == "gate-up-swap" and not paired):
        raise InputError("fault.pair", projection=printable(projection))
    at = _At(view, read, layer, expert, projection, role or spec.roles[0], seed)
    factor = next((number for number in (value, spec.value) if number is not None), 1.0)
    if fault == "missing":
        return {at.name(at.role): None}
    entry = at.slot(at.role).entry
    # Of a weight that is not packed --deep reads nothing, and it has no codes to swap.
    if fault in ON_CODES and entry is not None and entry.dtype not in PACKED:
        raise InputError("fault.format", fault=fault, tensor=printable(entry.name), dtype=entry.dtype)
    if fault in ("neighbour", "duplicate-expert", "gate-up-swap"):
        return _copied(at, fault)
    old = at.bytes(at.role)
    return at.changed(at.role, _scalar(at, old, fault, factor) if at.role in SCALARS else _bytes(at, old, fault))


def _spec(fault: str, role: str | None, value: float | None) -> Fault:
    spec = FAULTS.get(fault)
    if spec is None:
        raise InputError("fault.unknown", fault=printable(fault, 40), known=", ".join(FAULTS))
    if role is not None and role not in spec.roles:
        raise InputError("fault.role", fault=fault, role=printable(role, 40), roles=", ".join(spec.roles))
    # A factor of NaN would make another fault than the one that was asked for.
    with np.errstate(over="ignore"):
        usable = value is None or (spec.value is not None and np.isfinite(np.float32(value)))
    if not usable:
        raise InputError("fault.value", fault=fault, value=value)
    return spec


@dataclass(frozen=True, slots=True)
class _At:
    """The slot to break."""

    view: CanonicalView
    read: Callable[[str], Tensor]
    layer: int
    expert: int
    projection: str
    role: str
    seed: int

    def slot(self, role: str, expert: int | None = None, projection: str | None = None) -> Slot:
        slot = self.view.slot(
            self.layer, self.expert if expert is None else expert, projection or self.projection, role
        )
        if slot.entry is None and self.never(role):
            dialect = self.view.dialects.get(self.layer)
            kind = "unquantised" if dialect is None else dialect.id
            raise InputError("fault.never", tensor=printable(slot.name), role=role, layer=self.layer, dialect=kind)
        if slot.entry is None:
            raise InputError("fault.absent", tensor=printable(slot.name))
        return slot

    def never(self, role: str) -> bool:
        """Do the layer's experts need no such tensor, and has none of them one?"""
        if role in self.view.roles_in(self.layer):
            return False
        places = (
            (at, kind)
            for at in range(self.view.experts_in[self.layer])
            for kind in self.view.projections_in[self.layer]
        )
        return all(self.view.slot(self.layer, at, kind, role).entry is None for at, kind in places)

    def all_roles(self, *projections: str) -> list[str]:
        """Roles that the layer's experts need, and those that this one has besides (under names that were guessed)."""
        due, at = self.view.roles_in(self.layer), (self.layer, self.expert)
        return [
            role for role in ANY
            if role in due or any(self.view.slot(*at, kind, role).entry is not None for kind in projections)
        ]  # fmt: skip

    def name(self, role: str) -> str:
        return self.slot(role).name

    def bytes(self, role: str, expert: int | None = None, projection: str | None = None) -> U8:
        """What is stored for a slot: the tensor, or its row of a tensor that holds all experts."""
        slot = self.slot(role, expert, projection)
        item = self.read(slot.name)
        stored = np.frombuffer(item.tobytes(), np.uint8)
        if slot.index is None:
            return stored
        if slot.index >= item.shape[0]:
            raise InputError("fault.absent", tensor=printable(f"{slot.name}[{slot.index}]"))
        row: U8 = stored.reshape(item.shape[0], -1)[slot.index]
        return row

    def changed(self, role: str, new: U8, projection: str | None = None) -> Changes:
        """The tensor with this slot's bytes replaced."""
        slot = self.slot(role, None, projection)
        item = self.read(slot.name)
        if slot.index is not None:
            stored = np.frombuffer(item.tobytes(), np.uint8).reshape(item.shape[0], -1).copy()
            stored[slot.index] = new.reshape(-1)
            new = stored
        return {slot.name: Tensor(item.dtype, item.shape, new.tobytes())}

    def copied(self, role: str, expert: int, source: str, projection: str) -> Changes:
        """The tensor of ``projection`` with what another slot has in place of this one's."""
        if self.slot(role, None, projection).index is None:
            # Type and shape come along.
            return {self.slot(role, None, projection).name: self.read(self.slot(role, expert, source).name)}
        return self.changed(role, self.bytes(role, expert, source), projection)

    @property
    def neighbour(self) -> int:
        return (self.expert + 1) % self.view.experts_in[self.layer]

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.layer, self.expert])


def _scalar(at: _At, old: U8, fault: str, factor: float) -> U8:
    """The number a fault leaves, in the tensor's own type.

    Rounding to that type is part of storing a number there; where it makes another fault of it, or none, it is refused.
    """
    slot = at.slot(at.role)
    assert slot.entry is not None
    dtype = slot.entry.dtype
    if dtype not in SCALE_BYTES:
        raise InputError("fault.format", fault=fault, tensor=printable(slot.name), dtype=dtype)
    own = DTYPES[dtype].view
    if fault == "random-bits":
        bits = np.dtype(f"<u{own.itemsize}")
        drawn = at.rng.integers(0, 1 << 8 * own.itemsize, len(old) // own.itemsize, bits.type)
        return np.frombuffer(drawn.astype(bits).tobytes(), np.uint8)
    divisor = at.view.divisors_in(at.layer)
    with np.errstate(all="ignore"):
        stored = old.view(own).astype(np.float32)
        wanted = _number(stored, fault, factor, divisor)
        new = (_within(wanted, own) if fault == "subnormal" else wanted).astype(own)
        back = new.astype(np.float32)
        kept = (np.isfinite(back) == np.isfinite(wanted)) & ((back == 0) == (wanted == 0))
        kept &= (back != stored) | (wanted == stored)
        if fault == "subnormal":
            kept &= (1 / back if divisor else back) < np.finfo(np.float32).tiny
    if not kept.all():
        lost = int(kept.argmin())
        numbers = {"value": f"{wanted[lost]:.6g}", "written": f"{back[lost]:.6g}"}
        raise InputError("fault.rounded", fault=fault, tensor=printable(slot.name), dtype=dtype, **numbers)
    return np.frombuffer(new.tobytes(), np.uint8)


def _number(stored: F32, fault: str, factor: float, divisor: bool) -> F32:
    """What a fault makes of stored numbers; zero, inf and subnormal mean the effective multiplier."""
    number = np.float32(factor)
    if fault == "scaled" or fault == "pair-mismatch":
        return stored / number if divisor else stored * number
    if fault == "constant":
        return np.full_like(stored, number)
    if fault == "negative":
        return -np.abs(stored)
    if fault == "reciprocal":
        return np.float32(1) / stored
    plain = {"zero": 0.0, "nan": np.nan, "inf": np.inf, "subnormal": SUBNORMAL}
    # 1/x of the largest float32 is subnormal; 1/x of a subnormal is already infinite.
    inverse = {"zero": np.inf, "nan": np.nan, "inf": 0.0, "subnormal": np.finfo(np.float32).max}
    return np.full_like(stored, (inverse if divisor else plain)[fault])


def _within(numbers: F32, own: np.dtype[Any]) -> F32:
    """Positive numbers moved to the nearest that a type has: the smallest BF16 is 21 times as large as `SUBNORMAL`."""
    info = ml_dtypes.finfo(own)  # type: ignore[no-untyped-call]
    return np.clip(numbers, np.float32(info.smallest_subnormal), np.float32(info.max))


def _bytes(at: _At, old: U8, fault: str) -> U8:
    """The bytes that a fault leaves in packed codes or block scales."""
    new: npt.NDArray[Any] = old.reshape(-1).copy()
    slot = at.slot(at.role)
    assert slot.entry is not None
    dtype = slot.entry.dtype
    if fault == "nibble-swap":
        new = (new << 4) | (new >> 4)
    elif fault == "zero-weight":
        new[:] = 0
    elif fault == "exponent-cast":
        if dtype not in E8M0:
            raise InputError("fault.format", fault=fault, tensor=printable(slot.name), dtype=dtype)
        # A cast takes the value 2^(b−127) for the byte: everything below one becomes 0.
        new = np.clip(np.exp2(new.astype(np.float64) - 127), 0, 255).astype(np.uint8)
    elif new.size:
        # E8M0 has a NaN, and no sign.
        nan = 0x7F if dtype == "F8_E4M3" else 0xFF if dtype in E8M0 else None
        if nan is None or (fault == "block-negative" and dtype != "F8_E4M3"):
            raise InputError("fault.format", fault=fault, tensor=printable(slot.name), dtype=dtype)
        place = int(at.rng.integers(0, new.size))
        new[place] = nan if fault == "block-nan" else new[place] | 0x80
    return new


def _copied(at: _At, fault: str) -> Changes:
    """Whole tensors, or rows of them, that stand where another's should."""
    slot = at.slot(at.role)
    shared = fault == "neighbour" and at.view.is_whole(at.layer) and slot.index is None
    if fault != "gate-up-swap" and (shared or at.neighbour == at.expert):
        raise InputError("fault.no-neighbour", tensor=printable(slot.name))
    if fault == "neighbour":
        return at.copied(at.role, at.neighbour, at.projection, at.projection)
    out: Changes = {}
    if fault == "gate-up-swap":
        pair = {"gate": "up", "up": "gate"}
        for role in at.all_roles("gate", "up"):
            for kind in ("gate", "up"):
                out |= at.copied(role, at.expert, pair[kind], kind)
        return out
    for kind in at.view.projections_in[at.layer]:
        for role in at.all_roles(kind):
            out |= at.copied(role, at.neighbour, kind, kind)
    return out


def _span(numbers: set[int]) -> str:
    return f"{min(numbers)}–{max(numbers)}" if len(numbers) > 1 else str(min(numbers))
