"""One layer of a real prompt, run by a healthy and by a faulty load, with every tensor of the nine steps.

Both get the same input and the same routes, those of the healthy model, so whatever differs is this layer's own doing:
in layer 0 that is exactly what happens when both models run, in a later layer it is what would happen if the layers
before were sound.

>>> from nvfp4viz.serving import load                                               # doctest: +SKIP
>>> twins = trace_twins(load(full), load(holed), "37 + 45 =", layer=0)              # doctest: +SKIP
>>> twins.comparison.first_difference, twins.comparison.first_nan                   # doctest: +SKIP
(3, 6)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.moe import ExpertsResult, ExpertsTrace, Routing, W4A4Experts, run_w4a4_experts
from nvfp4viz.moe.steps import StepComparison, compare_steps
from nvfp4viz.serving.served import ServedExperts, ServedModel

Array = npt.NDArray[Any]
Twin = Literal["filled", "calibrated"]
TWINS: tuple[Twin, ...] = ("filled", "calibrated")


@dataclass(frozen=True, slots=True, eq=False)
class LayerTwins:
    """A layer run twice on the same T tokens.

    Attributes
    ----------
    prompt, token_ids
        What was read; T ids.
    layer, twin
    missing
        Experts of the layer without an ``input_scale`` in the faulty file, ascending.
    x : (T, H) bfloat16
        The layer's normalised input, both runs' own.
    healthy_experts, faulty_experts
        Weights and scales of the two loads.
    healthy, faulty
        Every tensor of the two runs.
    comparison
        Where they part.
    """

    prompt: str
    token_ids: tuple[int, ...]
    layer: int
    twin: Twin
    missing: tuple[int, ...]
    x: Array = field(repr=False)
    healthy_experts: W4A4Experts = field(repr=False)
    faulty_experts: W4A4Experts = field(repr=False)
    healthy: ExpertsTrace = field(repr=False)
    faulty: ExpertsTrace = field(repr=False)
    comparison: StepComparison = field(repr=False)

    @property
    def tokens_broken(self) -> int:
        """Tokens whose layer output holds a NaN in the faulty run."""
        return int(self.comparison.nan[-1].reshape(len(self.token_ids), -1).any(axis=1).sum())


@dataclass(slots=True)
class _Tap:
    """The experts of a model, with one layer's input kept."""

    experts: ServedExperts
    layer: int
    heard: tuple[Array, Routing] = field(init=False)

    def __call__(self, layer: int, x: Array, routing: Routing) -> ExpertsResult:
        if layer == self.layer:
            self.heard = x, routing
        return self.experts(layer, x, routing)


def trace_twins(
    healthy: ServedModel, faulty: ServedModel, prompt: str, layer: int, *, twin: Twin = "filled", most: int = 16
) -> LayerTwins:
    """Run one layer of a prompt twice, recording.

    Parameters
    ----------
    healthy
        The fully calibrated export on ``vllm-cutlass``; it also runs the layers before.
    faulty
        The export with holes on the same backend.
    prompt, layer
    twin
        What the faulty load is compared with.  ``"filled"``: itself, with the missing scales taken from `healthy`, so
        that nothing but the holes differs.  ``"calibrated"``: `healthy`, whose other scales were measured on more text
        and differ a little everywhere.
    most
        Tokens read: a token's row does not depend on its company, and a picture has room for few.

    Raises
    ------
    ModelError
        For a prompt that the model cannot read.
    """
    from nvfp4viz.model import Tokenizer

    ids = tuple(Tokenizer().encode(prompt)[:most])
    tap = _Tap(healthy.experts, layer)
    healthy.model.forward(ids, tap)
    x, routing = tap.heard
    calibrated, holed = (_w4a4(served, layer) for served in (healthy, faulty))
    missing = faulty.load_report.experts_without("input_scale").get(layer, ())
    sound = fill_scales(holed, calibrated, missing) if twin == "filled" else calibrated
    first, second = (_record(x, routing, experts) for experts in (sound, holed))
    return LayerTwins(
        prompt=prompt,
        token_ids=ids,
        layer=layer,
        twin=twin,
        missing=tuple(sorted(int(expert) for expert in missing)),
        x=x,
        healthy_experts=sound,
        faulty_experts=holed,
        healthy=first,
        faulty=second,
        comparison=compare_steps(first, second),
    )


def _w4a4(served: ServedModel, layer: int) -> W4A4Experts:
    experts = served.experts.layers[layer]
    assert isinstance(experts, W4A4Experts), "only a W4A4 layer has the nine steps"
    return experts


def _record(x: Array, routing: Routing, experts: W4A4Experts) -> ExpertsTrace:
    trace = run_w4a4_experts(x, routing, experts, record=True).trace
    assert trace is not None
    return trace


def fill_scales(holed: W4A4Experts, calibrated: W4A4Experts, experts: tuple[int, ...]) -> W4A4Experts:
    """`holed` with the activation scales of some experts, and the alphas made of them, as in `calibrated`.

    That is what a load of the completed file gives: on this backend each expert's scales come from its own slots alone.
    """
    chosen = np.isin(np.arange(holed.count), experts)
    names = ("a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas")
    return replace(holed, **{name: np.where(chosen, getattr(calibrated, name), getattr(holed, name)) for name in names})
