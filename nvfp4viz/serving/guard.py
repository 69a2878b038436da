"""A load guard: refuse a model in which some expert's scale was never written, and say which.

A serving stack allocates ``(experts, 2)`` and ``(experts,)`` scale tensors, fills the slots it finds keys for, and
keeps whatever memory held in the others.  Three cheap measures close that hole, and each works in any loader:

* **sentinel**: fill scale tensors with NaN before loading; what is still NaN afterwards was never written; * **slot
counter**: note every write, and compare with what the model needs (also finds packed weights, which have no NaN); *
**value check**: zero, NaN, infinite or negative scales are refused even where a key was present.

The guard knows nothing of our loader: it takes NumPy arrays or anything that looks like a torch tensor.

>>> import numpy as np
>>> guard = LoadGuard(layers=[0], experts=4)
>>> w13 = guard.arm(np.empty((4, 2), np.float32))           # what vLLM calls w13_input_scale
>>> w2 = guard.arm(np.empty(4, np.float32))
>>> for expert in (0, 1, 3):                                # the checkpoint has no keys for expert 2
...     w13[expert], w2[expert] = 2e-3, 5e-3
>>> for layer, projection, values in [(0, "gate", w13[:, 0]), (0, "up", w13[:, 1]), (0, "down", w2)]:
...     guard.inspect(layer, projection, "input_scale", values)
>>> guard.check()                                           # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
nvfp4viz.errors.ServingError: The load guard refused this model: 3 scale slots are unusable. \
layers.0.experts.{2}.{gate,up,down}.input_scale: never written. ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nvfp4viz.errors import ServingError

PROJECTIONS = ("gate", "up", "down")
Reason = Literal["unwritten", "nan", "inf", "zero", "negative"]
REASON_WORDS: dict[str, str] = {
    "unwritten": "never written",
    "nan": "NaN",
    "inf": "Inf",
    "zero": "0",
    "negative": "< 0",
}
MOST_GROUPS = 12
"""Groups that the message spells out; the record has all."""


@dataclass(frozen=True, slots=True, order=True)
class BadSlots:
    """Slots of one layer, role and reason that no server should use.

    Attributes
    ----------
    layer
    role
        ``"input_scale"``, ``"weight_scale_2"``, ``"weight_scale"`` or ``"weight"``.
    reason
        ``"unwritten"``, or the class of the stored value.
    projections
        Of gate, up, down.
    experts
        Ascending ids.
    """

    layer: int
    role: str
    reason: str
    projections: tuple[str, ...]
    experts: tuple[int, ...]

    def __str__(self) -> str:
        projections = self.projections[0] if len(self.projections) == 1 else "{" + ",".join(self.projections) + "}"
        ids = "{" + ",".join(_ranges(self.experts)) + "}"
        return f"layers.{self.layer}.experts.{ids}.{projections}.{self.role}: {REASON_WORDS[self.reason]}"


class LoadGuard:
    """Collects what was written and what the values are; `check` raises where anything is missing.

    Parameters
    ----------
    layers
        Layers that have routed experts.
    experts
        Experts a layer.
    projections
        ``("gate", "up", "down")``, or ``("up", "down")`` for experts without a gate.
    roles
        Which roles a slot must have; drop ``"input_scale"`` for a weight-only model and the guard stays silent about
        it.
    """

    def __init__(
        self,
        layers: Iterable[int],
        experts: int,
        projections: Sequence[str] = PROJECTIONS,
        roles: Sequence[str] = ("input_scale",),
    ) -> None:
        self.layers = tuple(layers)
        self.experts = experts
        self.projections = tuple(projections)
        self.roles = tuple(roles)
        self._bad: dict[tuple[int, str, str, str], set[int]] = {}
        self._written: set[tuple[int, str, str, int]] | None = None

    @staticmethod
    def arm(values: Any) -> Any:
        """Fill a freshly allocated scale tensor with NaN, in place, and return it."""
        if hasattr(values, "fill_"):
            values.fill_(float("nan"))
        else:
            values.fill(np.nan)
        return values

    def wrote(self, layer: int, expert: int, projection: str, role: str) -> None:
        """Count one write of the loader.  Once used, slots that were never counted are reported as unwritten."""
        if self._written is None:
            self._written = set()
        self._written.add((layer, projection, role, expert))

    def inspect(self, layer: int, projection: str, role: str, values: Any) -> None:
        """Look at one scale of every expert: (E,) floats, NumPy or torch, on any device.

        Without a slot counter a NaN counts as unwritten, because `arm` put it there.
        """
        scales = _to_numpy(values)
        counted = self._written
        classes: dict[str, Any] = {
            "unwritten" if counted is None else "nan": np.isnan(scales),
            "inf": np.isinf(scales),
            "zero": scales == 0,
            "negative": (scales < 0) & np.isfinite(scales),
        }
        for reason, mask in classes.items():
            for expert in np.flatnonzero(mask).tolist():
                if counted is None or (layer, projection, role, expert) in counted:
                    self._add(layer, projection, role, reason, expert)

    def findings(self) -> tuple[BadSlots, ...]:
        """All unusable slots, grouped: projections with the same experts together."""
        bad = {key: set(experts) for key, experts in self._bad.items()}
        if self._written is not None:
            for layer in self.layers:
                for role in self.roles:
                    for projection in self.projections:
                        lost = {e for e in range(self.experts) if (layer, projection, role, e) not in self._written}
                        if lost:
                            bad[layer, role, "unwritten", projection] = lost
        groups: dict[tuple[int, str, str, tuple[int, ...]], list[str]] = {}
        for (layer, role, reason, projection), experts in bad.items():
            groups.setdefault((layer, role, reason, tuple(sorted(experts))), []).append(projection)
        order = {projection: k for k, projection in enumerate((*PROJECTIONS, *self.projections))}
        return tuple(
            sorted(
                BadSlots(layer, role, reason, tuple(sorted(found, key=order.__getitem__)), experts)
                for (layer, role, reason, experts), found in groups.items()
            )
        )

    def check(self) -> None:
        """Raise unless every slot was written and holds a finite, positive value.

        Raises
        ------
        ServingError
            ``serving.guard``: how many slots, and layer, experts, projection and role of each group.
        """
        found = self.findings()
        if found:
            raise guard_error(found)

    def _add(self, layer: int, projection: str, role: str, reason: str, expert: int) -> None:
        self._bad.setdefault((layer, role, reason, projection), set()).add(expert)


def guard_error(found: Sequence[BadSlots]) -> ServingError:
    """The refusal, naming every group (the first `MOST_GROUPS` of them)."""
    slots = sum(len(group.experts) * len(group.projections) for group in found)
    more = [f"… +{len(found) - MOST_GROUPS}"] if len(found) > MOST_GROUPS else []
    return ServingError("serving.guard", count=slots, groups="; ".join([*map(str, found[:MOST_GROUPS]), *more]))


def check_slots(scales: Mapping[tuple[int, str], Any], role: str = "input_scale") -> tuple[BadSlots, ...]:
    """Unusable slots among loaded scales, as findings rather than an error.

    Parameters
    ----------
    scales
        ``{(layer, projection): (E,) values}``; NaN counts as unwritten.

    >>> import numpy as np
    >>> [str(group) for group in check_slots({(3, "down"): np.float32([2e-3, 0.0, np.inf, 0.0])})]
    ['layers.3.experts.{2}.down.input_scale: Inf', 'layers.3.experts.{1,3}.down.input_scale: 0']
    """
    experts = max((len(values) for values in scales.values()), default=0)
    guard = LoadGuard(sorted({layer for layer, _ in scales}), experts, roles=(role,))
    for (layer, projection), values in scales.items():
        guard.inspect(layer, projection, role, values)
    return guard.findings()


def _to_numpy(values: Any) -> Any:
    """float32 values of an array or of a torch tensor on any device."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, np.float32).reshape(-1)


def _ranges(ids: Sequence[int]) -> list[str]:
    """``[0, 1, 2, 5]`` as ``["0-2", "5"]``; two neighbours stay two numbers."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(n) for n in run])]
