"""Load routed experts as vLLM does: allocate, fill what the file has, and keep what memory held elsewhere.

vLLM allocates every expert parameter of a layer with ``torch.empty``, walks over the checkpoint's tensors, and copies
each into its slot.  Nothing counts the slots that were written (source: `serving-vllm.md` 4.2, 4.3 and 11).  A slot
without a tensor therefore holds whatever the memory held before, and the same file can have different fates on
different machines. Here an **allocator** says what that is:

=============  ====================================================================================================
``zeros``      fresh device memory, the typical case
``ones``       memory that a framework had filled with 1.0
``nan``        what a NaN sentinel leaves
``neighbour``  a cached block of the same size: activation scales get the bytes of the layer's ``weight_scale_2``,
               every other parameter those of the same parameter in the layer before
``random``     seeded random bits
=============  ====================================================================================================
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint import CanonicalView, Checkpoint, Slot
from nvfp4viz.errors import ServingError

Array = npt.NDArray[Any]
Allocator = Literal["zeros", "ones", "nan", "neighbour", "random"]
ALLOCATORS: tuple[str, ...] = ("zeros", "ones", "nan", "neighbour", "random")

ROLES = ("weight", "weight_scale", "weight_scale_2", "input_scale")
# Which parameter holds a projection's tensor, and in which shard of it.
SHARDS = {"gate": ("w13", 0), "up": ("w13", 1), "down": ("w2", 0)}
DONORS = {"w13_input_scale": "w13_weight_scale_2", "w2_input_scale": "w2_weight_scale_2"}
"""Whose memory an activation scale gets under ``neighbour``: the parameter of equal size allocated before it."""


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One layer's expert parameters, as allocated and filled; E experts, I intermediate, H hidden.

    Attributes
    ----------
    w13_weight, w13_weight_scale : (E, 2I, H//2), (E, 2I, H//16) uint8
        Gate rows first, then up rows.
    w2_weight, w2_weight_scale : (E, H, I//2), (E, H, I//16) uint8
    w13_weight_scale_2, w13_input_scale : (E, 2) float32
        Columns: gate (w1), up (w3).
    w2_weight_scale_2, w2_input_scale : (E,) float32
    written
        ``{(role, projection): (E,) bool}``: which slots a tensor of the file was copied into.
    """

    layer: int
    w13_weight: Array
    w13_weight_scale: Array
    w13_weight_scale_2: Array
    w13_input_scale: Array
    w2_weight: Array
    w2_weight_scale: Array
    w2_weight_scale_2: Array
    w2_input_scale: Array
    written: dict[tuple[str, str], npt.NDArray[np.bool_]] = field(repr=False)

    @property
    def experts(self) -> int:
        return int(self.w2_input_scale.shape[0])

    def values(self, role: str, projection: str) -> Array:
        """One scalar role of every expert: (E,) float32."""
        name, shard = SHARDS[projection]
        parameter: Array = getattr(self, f"{name}_{role}")
        return parameter[:, shard] if parameter.ndim == 2 else parameter


@dataclass(frozen=True, slots=True)
class RoleCount:
    """Slots of one role over the whole model."""

    role: str
    expected: int
    written: int


@dataclass(frozen=True, slots=True)
class UnwrittenSlot:
    """A slot that no tensor of the file went into.

    Attributes
    ----------
    name
        The tensor that the loader looked for.
    value
        What the slot holds instead; None for packed codes and block scales.
    """

    layer: int
    expert: int
    projection: str
    role: str
    name: str
    value: float | None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load wrote, and what it left as it was.  vLLM keeps no such record.

    Attributes
    ----------
    checkpoint
        Its name.
    allocator, seed
        What the unwritten slots hold.
    counts
        One `RoleCount` a role.
    unwritten
        In order of layer, expert, projection and role.
    """

    checkpoint: str
    allocator: str
    seed: int
    counts: tuple[RoleCount, ...]
    unwritten: tuple[UnwrittenSlot, ...]

    @property
    def complete(self) -> bool:
        """Every slot was written."""
        return not self.unwritten

    def experts_without(self, role: str = "input_scale") -> dict[int, tuple[int, ...]]:
        """Experts of each layer that lack the role for at least one projection."""
        found: dict[int, set[int]] = {}
        for slot in self.unwritten:
            if slot.role == role:
                found.setdefault(slot.layer, set()).add(slot.expert)
        return {layer: tuple(sorted(experts)) for layer, experts in sorted(found.items())}


def load_parameters(
    checkpoint: Checkpoint,
    view: CanonicalView,
    *,
    allocator: str = "zeros",
    seed: int = 0,
    roles: tuple[str, ...] = ROLES,
) -> tuple[tuple[LayerParameters, ...], LoadReport]:
    """Allocate every MoE layer's parameters and copy what the file has into them.

    Parameters
    ----------
    checkpoint, view
        An opened checkpoint with quantised experts, and its canonical view.
    allocator, seed
        What unwritten slots hold (`ALLOCATORS`); the seed matters for ``"random"``.
    roles
        Roles that the scheme reads; the others are allocated, and not expected.

    Raises
    ------
    ServingError
        ``serving.allocator``, ``serving.no-experts``, ``serving.shape`` (a tensor that does not fit its slot).
    """
    _refuse_unknown(allocator)
    hidden, intermediate = expert_shape(view)
    layers: list[LayerParameters] = []
    for layer in view.moe_layers:
        parts = _allocate(view.experts_in[layer], hidden, intermediate)
        written: dict[tuple[str, str], npt.NDArray[np.bool_]] = {}
        for role in ROLES:
            for projection in view.projections_in[layer]:
                written[role, projection] = np.zeros(view.experts_in[layer], np.bool_)
        _fill(checkpoint, view, layer, parts, written, roles)
        layers.append(LayerParameters(layer, **parts, written=written))
    _hold_memory(layers, allocator, seed, view.divisors)
    for parameters in layers:
        _freeze(parameters)
    return tuple(layers), _report(checkpoint.name, view, layers, allocator, seed, roles)


def refill(
    parameters: tuple[LayerParameters, ...], report: LoadReport, view: CanonicalView, allocator: str, seed: int = 0
) -> tuple[tuple[LayerParameters, ...], LoadReport]:
    """The same load onto other memory, bit for bit what `load_parameters` gives with this allocator; nothing is read.

    Raises
    ------
    ServingError
        ``serving.allocator``.
    """
    _refuse_unknown(allocator)
    layers = [_as_allocated(layer) for layer in parameters]
    _hold_memory(layers, allocator, seed, view.divisors)
    for layer in layers:
        _freeze(layer)
    roles = tuple(count.role for count in report.counts)
    return tuple(layers), _report(report.checkpoint, view, layers, allocator, seed, roles)


def _refuse_unknown(allocator: str) -> None:
    if allocator not in ALLOCATORS:
        raise ServingError("serving.allocator", allocator=allocator, known=", ".join(ALLOCATORS))


def _as_allocated(parameters: LayerParameters) -> LayerParameters:
    """A layer whose unwritten slots are zeros once more; what is complete is shared with the original."""
    fresh: dict[str, Array] = {}
    for (role, projection), written in parameters.written.items():
        name, shard = SHARDS[projection]
        full = f"{name}_{role}"
        for expert in np.flatnonzero(~written).tolist():
            if full not in fresh:
                fresh[full] = getattr(parameters, full).copy()
            _shard(fresh[full], name, role, shard, expert)[...] = 0
    return replace(parameters, **fresh)  # type: ignore[arg-type]


def expert_shape(view: CanonicalView) -> tuple[int, int]:
    """Hidden and intermediate size, from the first packed expert that the file has.

    Raises
    ------
    ServingError
        ``serving.no-experts``.
    """
    for slot in view.slots(role="weight"):
        if slot.entry is not None and len(slot.entry.shape) == 2:
            rows, columns = slot.entry.shape[0], slot.entry.shape[1] * 2
            return (rows, columns) if slot.projection == "down" else (columns, rows)
    raise ServingError("serving.no-experts", dialect=view.dialect, scheme=view.scheme)


def _allocate(experts: int, hidden: int, intermediate: int) -> dict[str, Array]:
    """The eight parameters of table 4.2, in its shapes; what they hold is decided later."""
    shapes: dict[str, tuple[tuple[int, ...], type]] = {
        "w13_weight": ((experts, 2 * intermediate, hidden // 2), np.uint8),
        "w13_weight_scale": ((experts, 2 * intermediate, hidden // 16), np.uint8),
        "w13_weight_scale_2": ((experts, 2), np.float32),
        "w13_input_scale": ((experts, 2), np.float32),
        "w2_weight": ((experts, hidden, intermediate // 2), np.uint8),
        "w2_weight_scale": ((experts, hidden, intermediate // 16), np.uint8),
        "w2_weight_scale_2": ((experts,), np.float32),
        "w2_input_scale": ((experts,), np.float32),
    }
    return {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}


def _fill(
    checkpoint: Checkpoint,
    view: CanonicalView,
    layer: int,
    parts: dict[str, Array],
    written: dict[tuple[str, str], npt.NDArray[np.bool_]],
    roles: tuple[str, ...],
) -> None:
    slots = [s for role in roles for s in view.slots(layer, role=role) if s.entry is not None] if roles else []
    scalars = [slot.name for slot in slots if slot.role in ("weight_scale_2", "input_scale")]
    values = checkpoint.read_scalars(scalars)
    for slot in slots:
        target = slot_view(parts, slot)
        if slot.name in values:
            value = values[slot.name]
            with np.errstate(all="ignore"):
                target[...] = np.float32(1) / value if view.divisors else value
        else:
            data = checkpoint.read(slot.name)
            if data.shape != target.shape or data.dtype != np.uint8:
                raise ServingError(
                    "serving.shape",
                    tensor=slot.name,
                    found=f"{data.dtype}{list(data.shape)}",
                    expected=list(target.shape),
                )
            target[...] = data
        written[slot.role, slot.projection][slot.expert] = True


def slot_view(parts: dict[str, Array], slot: Slot) -> Array:
    """The piece of a parameter that a slot's tensor is copied into (a view)."""
    name, shard = SHARDS[slot.projection]
    parameter = parts[f"{name}_{slot.role}"]
    return _shard(parameter, name, slot.role, shard, slot.expert)


def _shard(parameter: Array, name: str, role: str, shard: int, expert: int) -> Array:
    if name == "w2":
        return parameter[expert : expert + 1].reshape(()) if parameter.ndim == 1 else parameter[expert]
    if role in ("weight_scale_2", "input_scale"):
        return parameter[expert, shard : shard + 1].reshape(())
    rows = parameter.shape[1] // 2
    return parameter[expert, shard * rows : (shard + 1) * rows]


def _hold_memory(layers: list[LayerParameters], allocator: str, seed: int, divisors: bool) -> None:
    """Put into every unwritten slot what its memory held before."""
    # Neighbours' bytes are those of the finished tensors, before any slot is overwritten here.
    before = {}
    if allocator == "neighbour":
        before = {(p.layer, name): getattr(p, name).copy() for p in layers for name in _names(p)}
    for k, parameters in enumerate(layers):
        for (role, projection), written in parameters.written.items():
            if written.all():
                continue
            name, shard = SHARDS[projection]
            full = f"{name}_{role}"
            parameter = getattr(parameters, full)
            donor = before.get((parameters.layer, DONORS[full]) if full in DONORS else (layers[k - 1].layer, full))
            rng = np.random.default_rng([seed, parameters.layer, zlib.crc32(full.encode())])
            held = _bits(parameter, allocator, donor, rng)
            if divisors and role in ("weight_scale_2", "input_scale") and allocator != "neighbour":
                # The server inverts what it finds in the slot, whoever put it there.
                with np.errstate(all="ignore"):
                    held = np.float32(1) / held
            for expert in np.flatnonzero(~written).tolist():
                _shard(parameter, name, role, shard, expert)[...] = _shard(held, name, role, shard, expert)


def _bits(parameter: Array, allocator: str, donor: Array | None, rng: np.random.Generator) -> Array:
    """What the whole block held, in the parameter's shape."""
    if allocator == "neighbour" and donor is not None and donor.shape == parameter.shape:
        return donor
    if allocator == "random":
        return rng.integers(0, 256, parameter.nbytes, np.uint8).view(parameter.dtype).reshape(parameter.shape)
    if allocator == "ones":
        one = np.ones((), np.float32) if parameter.dtype == np.float32 else np.uint8(0x38)
        return np.full_like(parameter, one)
    if allocator == "nan":
        return np.full_like(parameter, np.nan if parameter.dtype == np.float32 else 0x7F)
    return np.zeros_like(parameter)


def _names(parameters: LayerParameters) -> Iterator[str]:
    for name in ("w13", "w2"):
        for role in ROLES:
            yield f"{name}_{role}"


def _freeze(parameters: LayerParameters) -> None:
    for name in _names(parameters):
        getattr(parameters, name).flags.writeable = False
    for mask in parameters.written.values():
        mask.flags.writeable = False


def _report(
    checkpoint: str,
    view: CanonicalView,
    layers: list[LayerParameters],
    allocator: str,
    seed: int,
    roles: tuple[str, ...],
) -> LoadReport:
    counts = []
    unwritten: list[UnwrittenSlot] = []
    for role in roles:
        masks = [p.written[role, projection] for p in layers for projection in view.projections_in[p.layer]]
        counts.append(RoleCount(role, sum(m.size for m in masks), sum(int(m.sum()) for m in masks)))
    for parameters in layers:
        for role in roles:
            for projection in view.projections_in[parameters.layer]:
                for expert in np.flatnonzero(~parameters.written[role, projection]).tolist():
                    scalar = role in ("weight_scale_2", "input_scale")
                    value = float(parameters.values(role, projection)[expert]) if scalar else None
                    name = view.slot(parameters.layer, expert, projection, role).name
                    unwritten.append(UnwrittenSlot(parameters.layer, expert, projection, role, name, value))
    order = {projection: k for k, projection in enumerate(view.projections)}
    unwritten.sort(key=lambda s: (s.layer, s.expert, order[s.projection], ROLES.index(s.role)))
    return LoadReport(checkpoint, allocator, seed, tuple(counts), tuple(unwritten))
