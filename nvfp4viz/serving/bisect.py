"""Find the expert that breaks a model, without knowing which slots were never written.

Two loads of the same model, one suspect and one sound, answer the same prompt.  Part of the experts is taken from the
suspect, the rest from the sound one, and only one question is asked: does a bit of the logits differ?  Halving first
the layers and then one layer's experts takes about ``log2(layers) + log2(experts)`` runs of the prompt.

The order makes it sound: layers before the first bad one leave the residual as it was, so that the bad layer reads in
every run what it reads in the sound model, and an expert's output depends on its own scales alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nvfp4viz.moe import ExpertsResult, Routing, W4A4Experts, run_w4a4_experts
from nvfp4viz.serving.served import ServedModel

if TYPE_CHECKING:
    from nvfp4viz.serving.backends import LayerExperts


@dataclass(frozen=True, slots=True)
class BisectStep:
    """One run: ``first`` to ``last`` of the layers (or of one layer's experts) came from the suspect."""

    over: Literal["layers", "experts"]
    layer: int
    first: int
    last: int
    differs: bool
    nan: bool


@dataclass(frozen=True, slots=True)
class Bisection:
    """What was found: the layer and expert, None where the suspect answers with equal bits."""

    steps: tuple[BisectStep, ...]
    layer: int | None
    expert: int | None


def bisect_experts(suspect: ServedModel, sound: ServedModel, prompt: str) -> Bisection:
    """Narrow a difference in the logits of a prompt down to the first layer and the first expert that make it.

    Parameters
    ----------
    suspect, sound
        Two loads on a W4A4 backend, whose layers are `W4A4Experts`.
    prompt
        Read once for each step; nothing is generated.

    Raises
    ------
    ModelError
        For a prompt that the model cannot read.
    """
    from nvfp4viz.model import Tokenizer

    ids = Tokenizer().encode(prompt)
    layers = sorted(sound.experts.layers)
    right = _logits(sound, ids, sound.experts.layers)
    steps: list[BisectStep] = []

    def ask(over: Literal["layers", "experts"], layer: int, last: int, mixed: dict[int, LayerExperts]) -> bool:
        logits = _logits(sound, ids, mixed)
        differs = bool((logits.view(np.uint32) != right.view(np.uint32)).any())
        steps.append(BisectStep(over, layer, 0, last, differs, bool(np.isnan(logits).any())))
        return differs

    def up_to_layer(last: int) -> dict[int, LayerExperts]:
        return {n: (suspect if n <= last else sound).experts.layers[n] for n in layers}

    if not ask("layers", layers[-1], layers[-1], up_to_layer(layers[-1])):
        return Bisection(tuple(steps), None, None)
    layer = layers[_first(len(layers), lambda k: ask("layers", layers[k], layers[k], up_to_layer(layers[k])))]
    bad, good = suspect.experts.layers[layer], sound.experts.layers[layer]
    assert isinstance(bad, W4A4Experts)
    assert isinstance(good, W4A4Experts)

    def up_to_expert(last: int) -> dict[int, LayerExperts]:
        return {**sound.experts.layers, layer: _mixed(bad, good, last)}

    expert = _first(good.count, lambda e: ask("experts", layer, e, up_to_expert(e)))
    return Bisection(tuple(steps), layer, expert)


def _first(count: int, differs: Callable[[int], bool]) -> int:
    """The smallest index that differs, where the last one is known to."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if differs(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _mixed(bad: W4A4Experts, good: W4A4Experts, last: int) -> W4A4Experts:
    """Experts 0 to ``last`` with the suspect's activation scales, the others with the sound ones."""
    mine = np.arange(good.count) <= last
    names = ("a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas")
    return replace(good, **{name: np.where(mine, getattr(bad, name), getattr(good, name)) for name in names})


def _logits(model: ServedModel, ids: list[int], layers: dict[int, LayerExperts]) -> Any:
    def experts(layer: int, x: Any, routing: Routing) -> ExpertsResult:
        prepared = layers[layer]
        assert isinstance(prepared, W4A4Experts)
        return run_w4a4_experts(x, routing, prepared)

    return model.model.forward(ids, experts)
