"""What the checks look at: every scalar scale in a table, with the state of its slot.

Values are **effective multipliers**: a divisor of compressed-tensors is inverted, so that zero means zero in every
dialect.  Reading them fetches the F32 scalars and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint import CanonicalView, Checkpoint
from nvfp4viz.checkpoint.dialects import PROJECTIONS, parse_expert_name
from nvfp4viz.checkpoint.header import TensorEntry

F32 = npt.NDArray[np.float32]

# State of a slot.
OK, MISSING, UNREADABLE, NOT_NEEDED, NOT_A_SCALAR = range(5)
# Class of a stored value.
CLASSES = ("ok", "zero", "nan", "inf", "negative", "subnormal")
FLT_MIN = np.finfo(np.float32).tiny


def classify(values: F32) -> npt.NDArray[np.uint8]:
    """Class of each effective multiplier, as an index into `CLASSES`.

    >>> [CLASSES[k] for k in classify(np.float32([2e-3, -0.0, np.nan, -np.inf, -1e-3, 4.4e-42]))]
    ['ok', 'zero', 'nan', 'inf', 'negative', 'subnormal']
    """
    out = np.zeros(values.shape, np.uint8)
    out[(values > 0) & (values < FLT_MIN)] = 5
    out[values < 0] = 4
    out[np.isinf(values)] = 3
    out[np.isnan(values)] = 2
    out[values == 0] = 1
    return out


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
    """

    role: str
    layer: int
    projection: str
    values: F32
    stored: F32
    state: npt.NDArray[np.uint8]

    def classes(self) -> npt.NDArray[np.uint8]:
        """Class per expert; 0 (``ok``) where there is no value to judge."""
        return np.where(self.state == OK, classify(self.values), 0).astype(np.uint8)

    def good(self) -> npt.NDArray[np.bool_]:
        """Experts whose value is there and finite, positive and normal."""
        usable: npt.NDArray[np.bool_] = np.logical_and(self.state == OK, classify(self.values) == 0)
        return usable

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
    tables
        By (role, layer, projection), for ``input_scale`` and ``weight_scale_2``.
    states
        (E,) states of ``weight`` and ``weight_scale`` slots, by the same key.
    unreadable
        Slots that the index promises in a file that is absent or damaged: (layer, expert, projection, role).
    """

    checkpoint: Checkpoint
    view: CanonicalView
    layers: tuple[int, ...] = ()
    tables: dict[tuple[str, int, str], ScaleTable] = field(default_factory=dict)
    states: dict[tuple[str, int, str], npt.NDArray[np.uint8]] = field(default_factory=dict)
    unreadable: set[tuple[int, int, str, str]] = field(default_factory=set)

    def scalars(self, role: str) -> Iterable[ScaleTable]:
        for (kind, _, _), table in self.tables.items():
            if kind == role:
                yield table


def collect(checkpoint: Checkpoint, view: CanonicalView) -> Facts:
    """Read the experts' scalars and note the state of every slot."""
    facts = Facts(checkpoint, view, _audited_layers(view), unreadable=_unreadable_slots(checkpoint, view))
    names: dict[str, tuple[tuple[str, int, str], int]] = {}
    for layer in facts.layers:
        size = view.experts_in[layer]
        for projection in view.projections:
            for role in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                facts.states[role, layer, projection] = np.full(size, NOT_NEEDED, np.uint8)
    for (layer, expert, projection), module in view.modules.items():
        if ("weight", layer, projection) not in facts.states or module.state not in ("quantised", "absent"):
            continue
        for role in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            entry = module.tensors.get(role)
            key = (role, layer, projection)
            state = OK if entry else MISSING
            if entry is None and (checkpoint.blind_files or (layer, expert, projection, role) in facts.unreadable):
                state = UNREADABLE
            elif entry is not None and role in ("weight_scale_2", "input_scale"):
                if is_scalar(entry):
                    names[entry.name] = (key, expert)
                else:
                    state = NOT_A_SCALAR
            facts.states[key][expert] = state
    for layer, expert, projection, role in facts.unreadable:
        states = facts.states.get((role, layer, projection))
        if states is not None and expert < len(states) and states[expert] == NOT_NEEDED:
            states[expert] = UNREADABLE
    _fill_tables(facts, names)
    return facts


def _audited_layers(view: CanonicalView) -> tuple[int, ...]:
    drafts = set(view.draft_layers)
    quantised = {at for (at, _, _), module in view.modules.items() if at in drafts and module.state == "quantised"}
    return (*view.moe_layers, *sorted(quantised))


def is_scalar(entry: TensorEntry) -> bool:
    """One F32 number, whatever its shape."""
    return entry.dtype == "F32" and entry.nbytes == 4


def _unreadable_slots(checkpoint: Checkpoint, view: CanonicalView) -> set[tuple[int, int, str, str]]:
    roles = {suffix: role for role, suffix in view.suffixes.items()}
    layer_of = {block: layer for layer, block in view.blocks.items()}
    found = set()
    for name in checkpoint.unreadable:
        parsed = parse_expert_name(name)
        if parsed and parsed.block in layer_of and parsed.suffix in roles:
            found.add((layer_of[parsed.block], parsed.expert, PROJECTIONS[parsed.projection], roles[parsed.suffix]))
    return found


def _fill_tables(facts: Facts, names: dict[str, tuple[tuple[str, int, str], int]]) -> None:
    stored: dict[tuple[str, int, str], F32] = {
        key: np.full(len(states), np.nan, np.float32)
        for key, states in facts.states.items()
        if key[0] in ("input_scale", "weight_scale_2")
    }
    for name, value in facts.checkpoint.read_scalars(names).items():
        key, expert = names[name]
        stored[key][expert] = value
    for key, raw in stored.items():
        with np.errstate(divide="ignore"):
            values = np.float32(1) / raw if facts.view.divisors else raw
        facts.tables[key] = ScaleTable(*key, values, raw, facts.states[key])
