"""One file, several fates: what memory held in the slots that the file does not fill decides the answer.

`run_fates` loads the same checkpoint once for each allocator and measures every load against a twin that differs in
nothing but those slots; `measures` says which of a guard's three measures would have seen it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from nvfp4viz.checkpoint import CanonicalView, Checkpoint, memory_checkpoint
from nvfp4viz.serving.fault_lab import Baseline, FaultEffect, baseline, compare_to
from nvfp4viz.serving.guard import check_slots
from nvfp4viz.serving.loader import ALLOCATORS, LayerParameters, UnwrittenSlot, load_parameters
from nvfp4viz.serving.served import ServedModel, load

SCALARS = ("weight_scale_2", "input_scale")
Measure = Literal["values", "sentinel", "counter"]
MEASURES: tuple[Measure, ...] = ("values", "sentinel", "counter")


@dataclass(frozen=True, slots=True, eq=False)
class Fate:
    """One load of the file.

    Attributes
    ----------
    allocator, seed, backend
    unwritten
        Slots that no tensor went into, with what they hold.
    effect
        This load against the complete twin on the same backend; ``effect.healthy`` is the twin's answer.
    """

    allocator: str
    seed: int
    backend: str
    unwritten: tuple[UnwrittenSlot, ...] = field(repr=False)
    effect: FaultEffect = field(repr=False)

    @property
    def text(self) -> str:
        return self.effect.faulty.text

    @property
    def first_broken(self) -> int | None:
        """The first layer after which a bit of the residual differs from the twin's."""
        return self.effect.first_broken

    @property
    def nan_share(self) -> float:
        """Share of the tokens read whose residual holds a NaN after the last layer."""
        return float(self.effect.layer_nan[-1])

    @property
    def same_text(self) -> bool:
        """It answers as the complete file does."""
        return self.effect.faulty.token_ids == self.effect.healthy.token_ids


def complete_with(broken: Checkpoint, donor: Checkpoint) -> Checkpoint:
    """The broken file with the tensors that it lacks taken from another export of the same model; in memory.

    What the broken file has stays as it is, so that the two differ in the missing slots alone.
    """
    tensors = broken.read_tensors()
    missing = [name for name in donor.tensors if name not in tensors]
    return memory_checkpoint(
        tensors | {name: donor.read_tensor(name) for name in missing},
        config=broken.config,
        hf_quant_config=broken.hf_quant_config,
        name=f"{broken.name} (complete)",
    )


def run_fates(
    broken: Checkpoint,
    complete: Checkpoint,
    prompt: str,
    *,
    backend: str = "vllm-cutlass",
    seed: int = 0,
    n: int = 16,
    allocators: tuple[str, ...] = ALLOCATORS,
) -> tuple[Fate, ...]:
    """Load, ask and compare, once for each allocator.

    Parameters
    ----------
    broken, complete
        The file, and its twin of `complete_with`.
    prompt
    backend, seed
        As `nvfp4viz.serving.load`; the seed matters to ``"random"``.
    n
        Tokens to generate.

    Raises
    ------
    ServingError
        A file or backend that the server refuses.
    ModelError
        For a prompt that the model cannot read.
    """
    twin = baseline(load(complete, backend=backend, device="cpu"), None, prompt, n)
    return tuple(
        fate_of(load(broken, allocator, seed, backend, device="cpu"), twin, allocator, seed, backend)
        for allocator in allocators
    )


def fate_of(
    served: ServedModel,
    twin: Baseline,
    allocator: str,
    seed: int,
    backend: str,
    likely: Iterable[Sequence[int]] = (),
) -> Fate:
    """One load of the broken file, asked and compared; how it was loaded, and `compare_to`'s likely answers."""
    return Fate(allocator, seed, backend, served.load_report.unwritten, compare_to(twin, served, likely))


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """How many of the missing slots one measure of a guard finds under one allocator.

    ``expected`` counts the slots that the file does not fill.
    """

    measure: Measure
    allocator: str
    found: int
    expected: int


def measures(broken: Checkpoint, view: CanonicalView, seed: int = 0) -> tuple[MeasureResult, ...]:
    """Each measure alone, under every allocator.

    ``values``
        Look at the scales after the load: NaN, infinite, zero or negative ones are refused.
    ``sentinel``
        The same, after every scale was set to NaN before the load: the allocator no longer matters.
    ``counter``
        Compare the writes with the slots; values are not looked at.
    """
    armed, _ = load_parameters(broken, view, allocator="nan")
    rows = []
    for allocator in ALLOCATORS:
        parameters, report = load_parameters(broken, view, allocator=allocator, seed=seed)
        expected = sum(slot.role in SCALARS for slot in report.unwritten)
        counted = {
            "values": _unusable(parameters, view),
            "sentinel": _unusable(armed, view),
            "counter": sum(
                int((~w).sum()) for p in parameters for (role, _), w in p.written.items() if role in SCALARS
            ),
        }
        rows += [MeasureResult(measure, allocator, counted[measure], expected) for measure in MEASURES]
    return tuple(rows)


def _unusable(parameters: tuple[LayerParameters, ...], view: CanonicalView) -> int:
    found = 0
    for role in SCALARS:
        scales = {
            (p.layer, name): np.asarray(p.values(role, name))
            for p in parameters for name in view.projections_in[p.layer]
        }  # fmt: skip
        found += sum(len(bad.experts) * len(bad.projections) for bad in check_slots(scales, role))
    return found
