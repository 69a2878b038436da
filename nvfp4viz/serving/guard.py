"""A load guard: refuse a model in which some expert's scale was never written, and say which.

A serving stack allocates ``(experts, 2)`` and ``(experts,)`` scale tensors, fills the slots it finds keys for, and
keeps whatever memory held in the others.  Three cheap measures close that hole, and each works in any loader:

* **sentinel**: fill scale tensors with NaN before loading; what is still NaN afterwards was never written;
* **slot counter**: note every write, and compare with what the model needs (also finds packed weights, which have no
  NaN);
* **value check**: zero, NaN, infinite or negative scales are refused even where a key was present.

What was neither counted nor looked at is refused too: a guard that was handed half of a model must not pass it.  It
knows nothing of our loader and takes NumPy arrays or anything that looks like a torch tensor.

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
nvfp4viz.serving.guard.GuardError: The load guard refused this model: 3 scale slots are unusable. \
layers.0.experts.{2}.{gate,up,down}.input_scale: never written. ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np

from nvfp4viz.errors import ServingError, content_words, error_texts, fill

PROJECTIONS = ("gate", "up", "down")
Reason = Literal["unseen", "unwritten", "nan", "inf", "zero", "negative"]
SIGNS: dict[str, str] = {"nan": "NaN", "inf": "Inf", "zero": "0", "negative": "< 0"}
"""How the values among the reasons are written; the other reasons are words of a language."""
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
        ``"unseen"``, ``"unwritten"``, or the class of the stored value.
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
        return self.said("en")

    def said(self, language: str) -> str:
        """Where the slots are, and why they cannot be used."""
        projections = self.projections[0] if len(self.projections) == 1 else "{" + ",".join(self.projections) + "}"
        ids = "{" + ",".join(_ranges(self.experts)) + "}"
        why = SIGNS.get(self.reason) or content_words("report.toml", language, f"guard.{self.reason}")
        return f"layers.{self.layer}.experts.{ids}.{projections}.{self.role}: {why}"


class LoadGuard:
    """Collects what was written and what the values are; `check` raises where anything is missing.

    Parameters
    ----------
    layers
        Layers that have routed experts.
    experts
        Experts a layer, one number or one for each layer.
    projections
        ``("gate", "up", "down")``, or ``("up", "down")`` for experts without a gate.
    roles
        Which roles a slot must have; drop ``"input_scale"`` for a weight-only model and the guard stays silent about
        it.

    Raises
    ------
    ServingError
        ``serving.guard-empty``: no layers or no experts, which would pass any model.
    """

    def __init__(
        self,
        layers: Iterable[int],
        experts: int | Mapping[int, int],
        projections: Sequence[str] = PROJECTIONS,
        roles: Sequence[str] = ("input_scale",),
    ) -> None:
        self.layers = tuple(layers)
        self.experts = {layer: experts if isinstance(experts, int) else experts[layer] for layer in self.layers}
        if min(self.experts.values(), default=0) < 1:
            raise ServingError("serving.guard-empty")
        self.projections = tuple(projections)
        self.roles = tuple(roles)
        self._seen: set[tuple[int, str, str]] = set()
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
        """Count one write of the loader.  Once used, slots that were never counted are reported as unwritten.

        Raises
        ------
        ServingError
            ``serving.guard-unknown``: no slot of the model this guard was made for.
        """
        if not (self._has(layer, projection, role) and 0 <= expert < self.experts[layer]):
            raise self._unknown(layer, projection, role, expert)
        if self._written is None:
            self._written = set()
        self._written.add((layer, projection, role, expert))

    def inspect(self, layer: int, projection: str, role: str, values: Any) -> None:
        """Look at one scale of every expert: (E,) floats, NumPy or torch, on any device.

        Without a slot counter a NaN counts as unwritten, because `arm` put it there.

        Raises
        ------
        ServingError
            ``serving.guard-unknown``: no slots of the model this guard was made for; ``serving.guard-count``: not one
            value for each expert.
        """
        scales = _to_numpy(values)
        if not self._has(layer, projection, role):
            raise self._unknown(layer, projection, role, len(scales) - 1)
        if len(scales) != self.experts[layer]:
            slots = f"layers.{layer}.{projection}.{role}"
            raise ServingError("serving.guard-count", slots=slots, count=len(scales), experts=self.experts[layer])
        self._seen.add((layer, projection, role))
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

    def findings(self, unseen: bool = False) -> tuple[BadSlots, ...]:
        """All unusable slots, grouped: projections with the same experts together.

        With ``unseen``, as `check` has it, also those that were neither counted nor inspected.
        """
        bad = {key: set(experts) for key, experts in self._bad.items()}
        for layer, role, projection in product(self.layers, self.roles, self.projections):
            every = range(self.experts[layer])
            if self._written is not None:
                lost = {expert for expert in every if (layer, projection, role, expert) not in self._written}
                if lost:
                    bad[layer, role, "unwritten", projection] = lost
            elif unseen and (layer, projection, role) not in self._seen:
                bad[layer, role, "unseen", projection] = set(every)
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
        """Raise unless every slot was seen, was written, and holds a finite, positive value.

        Raises
        ------
        ServingError
            ``serving.guard``: how many slots, and layer, experts, projection and role of each group.
        """
        found = self.findings(unseen=True)
        if found:
            raise guard_error(found)

    def _has(self, layer: int, projection: str, role: str) -> bool:
        return layer in self.experts and projection in self.projections and role in self.roles

    def _unknown(self, layer: int, projection: str, role: str, expert: int) -> ServingError:
        """The refusal of a slot that the model does not have."""
        return ServingError(
            "serving.guard-unknown",
            slot=f"layers.{layer}.experts.{expert}.{projection}.{role}",
            layers=", ".join(_ranges(sorted(self.layers))),
            experts=self.experts.get(layer, 0) or max(self.experts.values()),
            projections=", ".join(self.projections),
            roles=", ".join(self.roles),
        )

    def _add(self, layer: int, projection: str, role: str, reason: str, expert: int) -> None:
        self._bad.setdefault((layer, role, reason, projection), set()).add(expert)


class GuardError(ServingError):
    """``serving.guard``: says in the language of its text what the slots lack."""

    def text(self, language: str) -> dict[str, str]:
        found: Sequence[BadSlots] = self.params["found"]  # type: ignore[assignment]
        values = {**self.params, "groups": _spelt_out(found, language)}
        return {part: fill(template, values, language) for part, template in error_texts(language)[self.code].items()}


def guard_error(found: Sequence[BadSlots]) -> GuardError:
    """The refusal, naming every group (the first `MOST_GROUPS` of them)."""
    slots = sum(len(group.experts) * len(group.projections) for group in found)
    return GuardError("serving.guard", count=slots, groups=_spelt_out(found, "en"), found=tuple(found))


def _spelt_out(found: Sequence[BadSlots], language: str) -> str:
    more = [f"… +{len(found) - MOST_GROUPS}"] if len(found) > MOST_GROUPS else []
    named = [*(group.said(language) for group in found[:MOST_GROUPS]), *more]
    return content_words("report.toml", language, "guard.between").join(named)


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
    experts: dict[int, int] = {}
    for (layer, _), values in scales.items():
        experts[layer] = max(experts.get(layer, 0), len(values))
    projections = tuple(dict.fromkeys(projection for _, projection in scales))
    if not experts or max(experts.values()) == 0:
        return ()
    guard = LoadGuard(sorted(experts), experts, projections, (role,))
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
