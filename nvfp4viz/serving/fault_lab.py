"""What one fault does to a running model, measured against its healthy twin.

Both models read the same tokens (the prompt and the healthy model's answer), so that layers can be compared; each then
also answers on its own.  `sweep` does the first for a row of factors on one scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint import Checkpoint, inject_tensors, memory_checkpoint
from nvfp4viz.serving.served import ServedModel, load

if TYPE_CHECKING:
    from nvfp4viz.model import Generation

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FaultSpot:
    """A fault and where it is put; fields as `nvfp4viz.checkpoint.inject_tensors` takes them."""

    fault: str
    layer: int
    expert: int
    projection: str
    role: str | None = None
    value: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class FaultEffect:
    """Healthy against faulty.

    Attributes
    ----------
    healthy, faulty
        Each model's own answer.
    read
        Tokens that both were compared on, T of them.
    visits : int
        How many of these tokens are routed to the broken expert in the broken layer.
    layer_error : (layers,) float32
        Root-mean-square difference of the residual after each layer over the healthy one's root mean square, over the
        positions where both are numbers; NaN where there is none.
    layer_nan : (layers,) float32
        Share of positions whose residual holds a NaN.
    first_broken : int or None
        The first layer after which a bit differs.
    healthy_logits, faulty_logits : (V,) float32
        For the first token of the answer.
    healthy_loss, faulty_loss : float
        Nats per character on the healthy answer; NaN is a result.
    """

    healthy: Generation
    faulty: Generation
    read: tuple[int, ...]
    visits: int
    layer_error: F32
    layer_nan: F32
    first_broken: int | None
    healthy_logits: F32 = field(repr=False)
    faulty_logits: F32 = field(repr=False)
    healthy_loss: float = 0.0
    faulty_loss: float = 0.0


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One factor on one scale: residual error after the last layer, share of NaN positions, loss, changed tokens.

    ``changed`` is the share of positions whose most likely next token is another than the healthy model's.
    """

    factor: float
    error: float
    nan: float
    loss: float
    changed: float


def break_checkpoint(checkpoint: Checkpoint, spot: FaultSpot) -> Checkpoint:
    """A copy in memory with one fault; the source is never written.

    Raises
    ------
    InputError
        As `nvfp4viz.checkpoint.inject_tensors`.
    """
    tensors = inject_tensors(
        checkpoint.read_tensors(),
        spot.fault,
        layer=spot.layer,
        expert=spot.expert,
        projection=spot.projection,
        role=spot.role,
        value=spot.value,
        seed=spot.seed,
        config=checkpoint.config,
        hf_quant_config=checkpoint.hf_quant_config,
    )
    return memory_checkpoint(
        tensors,
        config=checkpoint.config,
        hf_quant_config=checkpoint.hf_quant_config,
        name=f"{checkpoint.name} ({spot.fault})",
    )


def compare(healthy: ServedModel, faulty: ServedModel, spot: FaultSpot, prompt: str, n: int = 32) -> FaultEffect:
    """Run both models on a prompt.

    Raises
    ------
    ModelError
        For a prompt that the model cannot read.
    """
    answer = healthy.generate(prompt, n)
    read = [*answer.prompt_ids, *answer.token_ids]
    good, bad = _read(healthy, read), _read(faulty, read)
    return FaultEffect(
        healthy=answer,
        faulty=faulty.generate(prompt, n),
        read=tuple(read),
        visits=int((good.routes[spot.layer] == spot.expert).any(axis=-1).sum()),
        layer_error=np.array([_relative_error(a, b) for a, b in zip(good.hidden, bad.hidden, strict=True)], np.float32),
        layer_nan=np.array([np.isnan(b).any(axis=-1).mean() for b in bad.hidden], np.float32),
        first_broken=next(
            (layer for layer, (a, b) in enumerate(zip(good.hidden, bad.hidden, strict=True)) if _differ(a, b)), None
        ),
        healthy_logits=good.logits[len(answer.prompt_ids) - 1],
        faulty_logits=bad.logits[len(answer.prompt_ids) - 1],
        healthy_loss=_loss(good.logits, read, len(answer.prompt_ids)),
        faulty_loss=_loss(bad.logits, read, len(answer.prompt_ids)),
    )


def sweep(
    checkpoint: Checkpoint,
    spot: FaultSpot,
    factors: Sequence[float],
    prompt: str,
    *,
    backend: str = "vllm-cutlass",
    n: int = 32,
) -> Iterator[SweepPoint]:
    """Multiply one scale by each factor and measure; one point at a time, so that a page can show progress."""
    healthy = load(checkpoint, backend=backend)
    answer = healthy.generate(prompt, n)
    read = [*answer.prompt_ids, *answer.token_ids]
    good = _read(healthy, read)
    for factor in factors:
        at = FaultSpot("scaled", spot.layer, spot.expert, spot.projection, spot.role, float(factor))
        bad = _read(load(break_checkpoint(checkpoint, at), backend=backend), read)
        yield SweepPoint(
            float(factor),
            _relative_error(good.hidden[-1], bad.hidden[-1]),
            float(np.isnan(bad.hidden[-1]).any(axis=-1).mean()),
            _loss(bad.logits, read, len(answer.prompt_ids)),
            float((np.argmax(good.logits, axis=-1) != np.argmax(bad.logits, axis=-1)).mean()),
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    routes: list[Any]
    hidden: list[Any]
    logits: F32


def _read(served: ServedModel, ids: Sequence[int]) -> _Reading:
    """All tokens at once, as a server reads a prompt."""
    from nvfp4viz.model import ForwardRecord

    record = ForwardRecord()
    logits = served.model.forward(ids, served.experts, None, record)
    return _Reading(record.routes, record.hidden, logits)


def _relative_error(healthy: Any, faulty: Any) -> float:
    """RMS difference over the healthy RMS, over positions where both are finite."""
    a, b = healthy.astype(np.float64), faulty.astype(np.float64)
    seen = np.isfinite(a).all(axis=-1) & np.isfinite(b).all(axis=-1)
    if not seen.any():
        return float("nan")
    return float(np.sqrt(((a[seen] - b[seen]) ** 2).mean() / (a[seen] ** 2).mean()))


def _differ(a: Any, b: Any) -> bool:
    return bool((a.view(np.uint16) != b.view(np.uint16)).any())


def _loss(logits: F32, read: Sequence[int], prompt: int) -> float:
    """Nats per character of the answer's tokens."""
    from nvfp4viz.serving.evaluation import negative_log_likelihood

    targets = np.asarray(read[prompt:])
    return float(negative_log_likelihood(logits[prompt - 1 : len(read) - 1], targets).mean())
