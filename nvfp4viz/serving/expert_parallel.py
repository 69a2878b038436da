"""tiny-moe on several ranks: one layer's batch for processes to compute, and what a rearrangement leaves wrong.

``python -m nvfp4viz.serving.expert_parallel --ranks 4`` runs one layer in as many processes and compares bits with one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import InputError, NvError
from nvfp4viz.moe import ExpertsResult, Routing, W4A4Experts, run_w4a4_experts
from nvfp4viz.moe.eplb import rebalance
from nvfp4viz.moe.parallel import Placement, choose_slots, in_slots, place

if TYPE_CHECKING:
    from nvfp4viz.device.ranks import Problem, RankAnswer
    from nvfp4viz.serving.served import ServedModel

Array = npt.NDArray[Any]


# ------------------------------------------------------------------ one layer's batch


def layer_batch(served: ServedModel, texts: Iterable[str], layer: int) -> tuple[Array, Routing]:
    """What one layer's experts are given for some texts: ``x (T, H)`` BF16 and its routing.

    Raises
    ------
    ModelError
        For a text that the model cannot read.
    InputError
        ``parallel.layer``
    """
    from nvfp4viz.model import Tokenizer

    config = served.model.config
    if not 0 <= layer < config.num_hidden_layers:
        raise InputError("parallel.layer", layer=layer, last=config.num_hidden_layers - 1)
    seen: list[tuple[Array, Routing]] = []

    def look(at: int, x: Array, routing: Routing) -> ExpertsResult:
        if at == layer:
            seen.append((x, routing))
        return served.experts(at, x, routing)

    for text in texts:
        served.model.forward(Tokenizer().encode(text)[: config.max_position_embeddings], look)
    xs, routings = zip(*seen, strict=True)
    parts = [np.concatenate([getattr(r, name) for r in routings]) for name in ("ids", "weights", "logits")]
    return np.concatenate(xs), Routing(*parts)


def layer_problem(served: ServedModel, texts: Iterable[str], layer: int, placement: Placement) -> Problem:
    """A batch of one layer as ranks take it."""
    from nvfp4viz.device.ranks import Problem

    x, routing = layer_batch(served, texts, layer)
    return Problem(x, routing.ids, routing.weights, _w4a4(served, layer), placement)


def _w4a4(served: ServedModel, layer: int) -> W4A4Experts:
    experts = served.experts.layers[layer]
    assert isinstance(experts, W4A4Experts), "only W4A4 backends quantise activations with input scales"
    return experts


def one_process(problem: Problem) -> Array:
    """The same batch through all logical experts at once: (T, H) BF16."""
    routing = Routing(problem.ids, problem.weights, np.empty((len(problem.ids), 0), np.float32))
    return run_w4a4_experts(problem.x, routing, problem.experts).out


def differing(a: Array, b: Array) -> int:
    """BF16 values whose bits differ."""
    return int((a.view(np.uint16) != b.view(np.uint16)).sum())


# ------------------------------------------------------------------ a move, and what it leaves behind


@dataclass(frozen=True, slots=True)
class MovedExperts:
    """A model's experts in physical slots: the Experts protocol, with each token's replica chosen by its index.

    Attributes
    ----------
    layers
        Experts by physical slot.
    placements
        What those slots hold.
    """

    layers: dict[int, W4A4Experts] = field(repr=False)
    placements: dict[int, Placement] = field(repr=False)

    def __call__(self, layer: int, x: Array, routing: Routing) -> ExpertsResult:
        slots = choose_slots(routing.ids, self.placements[layer])
        return run_w4a4_experts(x, Routing(slots, routing.weights, routing.logits), self.layers[layer])


def moved(
    served: ServedModel, old: Sequence[Placement], new: Sequence[Placement], *, scales_move: bool = True
) -> ServedModel:
    """The model after a rearrangement, one placement a layer.

    Parameters
    ----------
    scales_move
        Whether activation scales follow their experts.  In vLLM 0.33.0 they do not: ``input_scale`` is left out of the
        tensors that EPLB exchanges, while ``g1_alphas`` and ``g2_alphas``, with ``input_scale`` as a factor, move.
    """
    layers = {
        layer: in_slots(_w4a4(served, layer), after.slots, None if scales_move else before.slots)
        for layer, (before, after) in enumerate(zip(old, new, strict=True))
    }
    experts: Any = MovedExperts(layers, dict(enumerate(new)))
    return replace(served, experts=experts)


@dataclass(frozen=True, slots=True)
class MoveEffect:
    """What a rearrangement does to a model's answers.

    Attributes
    ----------
    slots, changed
        Slots of all layers, and those that got another expert.
    wrong
        Those whose activation scale is not their expert's afterwards.
    empty
        Those of `wrong` that never had a usable scale (``1 / 0`` and the like) and hold an expert that has one.
    worst
        Largest factor, up or down, by which the first GEMM of another wrong slot is scaled: the expert's encode scale
        over that of the slot's former one, or its inverse; 1 where none is wrong.
    before, moved, stayed
        Loss in nats a character: before, after a move with everything, and after one that left input scales behind.
    """

    slots: int
    changed: int
    wrong: int
    empty: int
    worst: float
    before: float
    moved: float
    stayed: float


def move_effect(
    served: ServedModel, old: Sequence[Placement], new: Sequence[Placement], texts: Sequence[str]
) -> MoveEffect:
    """Measure both moves on `texts`."""
    from nvfp4viz.serving.evaluation import evaluate

    changed = wrong = empty = 0
    worst = 1.0
    for layer, (before, after) in enumerate(zip(old, new, strict=True)):
        experts = _w4a4(served, layer)
        changed += int((before.slots != after.slots).sum())
        stale, dead = np.zeros((2, len(after.slots)), bool)
        for gscale in (experts.a1_gscale, experts.a2_gscale):
            has, needs = gscale[before.slots], gscale[after.slots]
            stale |= has != needs
            dead |= ~_usable(has) & _usable(needs)
        wrong, empty = wrong + int(stale.sum()), empty + int(dead.sum())
        has, needs = experts.a1_gscale[before.slots], experts.a1_gscale[after.slots]
        both = _usable(has) & _usable(needs)
        worst = max(worst, float(np.maximum(has[both] / needs[both], needs[both] / has[both]).max(initial=1)))
    losses = [
        evaluate(model, texts)
        for model in (served, moved(served, old, new), moved(served, old, new, scales_move=False))
    ]
    return MoveEffect(sum(len(p.slots) for p in new), changed, wrong, empty, worst, *losses)


def _usable(gscale: Array) -> npt.NDArray[np.bool_]:
    """Encode scales that are finite numbers above zero."""
    return np.asarray(np.isfinite(gscale) & (gscale > 0))


# ------------------------------------------------------------------ command line


def check(
    served: ServedModel, texts: Sequence[str], layer: int, ranks: int, redundant: int
) -> tuple[RankAnswer, int, int]:
    """Run one layer on `ranks` processes, rebalanced by its own load where slots are redundant.

    Returns
    -------
    (answer, differing BF16 values, compared values)
    """
    from nvfp4viz.device.ranks import run_ranks

    placement = place(served.model.config.num_experts, ranks, redundant=redundant)
    problem = layer_problem(served, texts, layer, placement)
    if redundant:
        load = np.bincount(problem.ids.ravel(), minlength=placement.experts)[None]
        slots = rebalance(load, len(placement.slots), ranks, old=placement.slots[None])[0]
        problem = replace(problem, placement=Placement(slots, ranks, placement.experts))
    answer = run_ranks(problem)
    return answer, differing(answer.out, one_process(problem)), answer.out.size


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 where all bits are equal."""
    from nvfp4viz.model import corpus
    from nvfp4viz.serving.served import load
    from sample_checkpoints import ensure

    parser = argparse.ArgumentParser(description="One layer of tiny-moe on several processes, compared with one.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--redundant", type=int, default=0, help="slots beyond one an expert, filled by EPLB")
    given = parser.parse_args(arguments)
    try:
        served = load(ensure("tiny-moe-nvfp4-full"), device="cpu")
        texts = list(corpus.DEMO_PROMPTS.values())
        answer, wrong, values = check(served, texts, given.layer, given.ranks, given.redundant)
    except NvError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{given.ranks} ranks over {answer.backend}, rows {answer.rows.tolist()}: {wrong} of {values} values differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
