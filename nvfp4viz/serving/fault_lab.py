"""What one fault does to a running model, measured against its healthy twin.

Both models read the same tokens (the prompt and the healthy model's answer), so that layers can be compared; each then
also answers on its own.  `sweep` does the first for a row of factors on one scale, and `scale_use` says how a scale
enters the computation at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint import Checkpoint, inject_tensors, memory_checkpoint
from nvfp4viz.serving.backends import BACKENDS
from nvfp4viz.serving.served import ServedModel, load

if TYPE_CHECKING:
    from nvfp4viz.model import Generation
    from nvfp4viz.moe import Routing

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


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
        How many of these tokens are routed to the broken expert in the broken layer; 0 without a spot.
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
    healthy_scales, faulty_scales : (rows, K/16) uint8 or None
        E4M3 block scales of the activations that the broken projection reads from its expert's rows; None where the
        backend does not quantise activations.
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
    healthy_scales: U8 | None = field(default=None, repr=False)
    faulty_scales: U8 | None = field(default=None, repr=False)


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


def scale_use(role: str, projection: str, backend: str) -> str:
    """How one expert's second-level scale enters a backend's computation; source: `serving-vllm.md` 4.4.

    Returns
    -------
    str
        ``"unread"``: the backend never reads input scales.
        ``"twice"``: it makes the block scales of this expert's activations, and is taken back afterwards.
        ``"pair"``: the same, with the larger one of gate and up.
        ``"layer"``: the same, with the largest one of the whole layer.
        ``"once"``: a weight's scale, a factor of this projection's product.
        ``"both"``: the same, of gate's and up's product.
        ``"partner"``: up's weight scale, which is compared with gate's and then dropped.

    >>> [scale_use("input_scale", name, "vllm-cutlass") for name in ("gate", "down")]
    ['pair', 'twice']
    """
    if role == "weight_scale_2":
        return {"gate": "both", "up": "partner"}.get(projection, "once")
    scope = BACKENDS[backend].scope
    if scope == "expert":
        return "twice" if projection == "down" else "pair"
    return "layer" if scope == "layer" else "unread"


def count_block_scales(scales: U8) -> dict[str, int]:
    """How many E4M3 bytes are ``normal``, ``subnormal``, ``zero`` or ``nan``, whatever their sign.

    >>> count_block_scales(np.uint8([0x7E, 0x08, 0x07, 0x80, 0x7F]))
    {'normal': 2, 'subnormal': 1, 'zero': 1, 'nan': 1}
    """
    magnitude = scales & 0x7F
    zero, nan = int((magnitude == 0).sum()), int((magnitude == 0x7F).sum())
    subnormal = int((magnitude < 0x08).sum()) - zero
    return {"normal": scales.size - subnormal - zero - nan, "subnormal": subnormal, "zero": zero, "nan": nan}


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


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """The healthy side of a comparison, run once for any number of faulty models: see `compare`.

    Attributes
    ----------
    spot, n
        As `compare` takes them.
    answer
        The healthy model's own.
    read
        Tokens of prompt and answer, which every model reads.
    """

    spot: FaultSpot | None
    n: int
    prompt: str
    answer: Generation
    read: tuple[int, ...]
    reading: _Reading = field(repr=False)


def baseline(
    healthy: ServedModel, spot: FaultSpot | None, prompt: str, n: int = 32, answer: Generation | None = None
) -> Baseline:
    """Run the healthy model; ``answer`` is what it gives to the prompt with n tokens, where that is known already.

    Raises
    ------
    ModelError
        For a prompt that the model cannot read.
    """
    answer = healthy.generate(prompt, n) if answer is None else answer
    read = (*answer.prompt_ids, *answer.token_ids)
    return Baseline(spot, n, prompt, answer, read, _read(healthy, read, spot))


def compare(healthy: ServedModel, faulty: ServedModel, spot: FaultSpot | None, prompt: str, n: int = 32) -> FaultEffect:
    """Run both models on a prompt.  Without a spot the fault is anywhere: nothing is said of visits or block scales.

    Raises
    ------
    ModelError
        For a prompt that the model cannot read.
    """
    return compare_to(baseline(healthy, spot, prompt, n), faulty)


def compare_to(base: Baseline, faulty: ServedModel, likely: Iterable[Sequence[int]] = ()) -> FaultEffect:
    """`compare`, with the healthy side already run.

    ``likely`` are answers that the faulty side may give, likelier than the healthy one: they save time and change no
    bit.
    """
    from nvfp4viz.model import expect

    spot, answer, read, good = base.spot, base.answer, base.read, base.reading
    bad = _read(faulty, read, spot)
    return FaultEffect(
        healthy=answer,
        faulty=faulty.generate(base.prompt, base.n, guess=expect(*likely, answer.token_ids)),
        read=read,
        visits=0 if spot is None else int((good.routes[spot.layer] == spot.expert).any(axis=-1).sum()),
        layer_error=np.array([_relative_error(a, b) for a, b in zip(good.hidden, bad.hidden, strict=True)], np.float32),
        layer_nan=np.array([np.isnan(b).any(axis=-1).mean() for b in bad.hidden], np.float32),
        first_broken=next(
            (layer for layer, (a, b) in enumerate(zip(good.hidden, bad.hidden, strict=True)) if _differ(a, b)), None
        ),
        healthy_logits=good.logits[len(answer.prompt_ids) - 1],
        faulty_logits=bad.logits[len(answer.prompt_ids) - 1],
        healthy_loss=_loss(good.logits, read, len(answer.prompt_ids)),
        faulty_loss=_loss(bad.logits, read, len(answer.prompt_ids)),
        healthy_scales=good.scales,
        faulty_scales=bad.scales,
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
    scales: U8 | None


def _read(served: ServedModel, ids: Sequence[int], spot: FaultSpot | None = None) -> _Reading:
    """All tokens at once, as a server reads a prompt; with a spot, also the block scales that its product reads."""
    from nvfp4viz.model import ForwardRecord

    record = ForwardRecord()
    keeping = served.recording()
    kept: list[U8 | None] = []

    def experts(layer: int, x: Any, routing: Routing) -> Any:
        if spot is None or layer != spot.layer:
            return served.experts(layer, x, routing)
        result = keeping(layer, x, routing)
        assert result.trace is not None
        operand = result.trace.intermediate if spot.projection == "down" else result.trace.input
        kept.append(None if operand.scales is None else operand.scales[result.trace.rows_of(spot.expert)])
        return result

    logits = served.model.forward(ids, experts, None, record)
    return _Reading(record.routes, record.hidden, logits, kept[0] if kept else None)


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
