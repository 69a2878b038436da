"""The check that most people would write, beside which the audit stands: names counted, shapes compared.

It looks at weights, finds all of them with the right shapes, and passes a file in which an expert has no activation
scale.  The story page runs both on the same checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nvfp4viz.checkpoint import CanonicalView, Checkpoint, canonical
from nvfp4viz.checkpoint.canonical_view import config_number
from nvfp4viz.checkpoint.header import TensorEntry


@dataclass(frozen=True, slots=True)
class NaiveStep:
    """One thing that the naive check compares.

    Attributes
    ----------
    id
        ``"index"`` (tensors that the index names are in the shards), ``"weights"`` (one weight per layer, expert and
        projection) or ``"shapes"`` (each as the configuration has it; none expected where nothing says which).
    expected, found
        Counts.
    """

    id: str
    expected: int
    found: int

    @property
    def passed(self) -> bool:
        return self.expected == self.found


@dataclass(frozen=True, slots=True)
class NaiveCheck:
    """What the naive check compared, and its verdict."""

    steps: tuple[NaiveStep, ...]

    @property
    def passed(self) -> bool:
        return all(step.passed for step in self.steps)


def naive_check(checkpoint: Checkpoint, view: CanonicalView | None = None) -> NaiveCheck:
    """Count the weights against index and configuration, and compare their shapes."""
    view = view or canonical(checkpoint)
    index = checkpoint.index
    names = set(index) if index is not None else set(checkpoint.tensors)
    places = [
        (layer, expert, projection)
        for layer in view.moe_layers
        for expert in range(view.experts_in[layer])
        for projection in view.projections_in[layer]
    ]
    sizes = _sizes(checkpoint, view)
    found = fitting = 0
    for layer, expert, projection in places:
        module = view.module(layer, expert, projection)
        # An unquantised stack of experts is named like its module, without a suffix.
        entry = module.tensors.get("weight") or module.extras.get("")
        if entry is not None:
            found += 1
            fitting += _fits(entry, projection, sizes, view.experts_in[layer] if module.whole else None)
    return NaiveCheck(
        (
            NaiveStep("index", len(names), len(names & set(checkpoint.tensors))),
            NaiveStep("weights", len(places), found),
            # Without a configuration, and without one expert's own matrix, there is nothing to compare with.
            NaiveStep("shapes", found if any(sizes) else 0, fitting),
        )
    )


def _fits(entry: TensorEntry, projection: str, sizes: tuple[int, int], stacked: int | None) -> bool:
    """One expert's matrix as configured; of ``stacked`` experts in one tensor the number of values."""
    hidden, width = sizes
    rows, columns = (hidden, width) if projection == "down" else (width, hidden)
    per_byte = 2 if entry.dtype in ("U8", "I8") else 1
    if projection == "gate_up":
        rows *= 2
    if stacked is not None:
        return prod(entry.shape) * per_byte == stacked * rows * columns
    return entry.shape == (rows, columns // per_byte)


def _sizes(checkpoint: Checkpoint, view: CanonicalView) -> tuple[int, int]:
    """Hidden size and expert width: the configuration's, else those of the first weight."""
    config = checkpoint.config or {}
    hidden = config_number(config, ("hidden_size",))
    width = config_number(config, ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size"))
    if hidden and width:
        return hidden, width
    for slot in view.slots(role="weight"):
        if slot.entry is not None and len(slot.entry.shape) == 2:
            rows, columns = slot.entry.shape[0], slot.entry.shape[1] * 2
            return (rows, columns) if slot.projection == "down" else (columns, rows)
    return 0, 0
