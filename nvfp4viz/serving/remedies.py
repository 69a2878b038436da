"""What helps against uncalibrated experts, each really run (`product.md`, the story page).

A remedy is a way to serve the broken checkpoint (or a better one).  `run_remedy` loads it, asks the prompts, measures
the loss on text, and says how long each took; `judge` compares the result with the fully calibrated model.  Two of
the remedies guess: a filled or repaired scale may look healthy and be wrong, and only the loss shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np

from nvfp4viz.checkpoint import CanonicalView, Checkpoint, canonical, memory_checkpoint, open_checkpoint, tensor
from nvfp4viz.checkpoint.weight_only import activation_scales, relabelled
from nvfp4viz.errors import ServingError
from nvfp4viz.serving.evaluation import evaluate, is_silent
from nvfp4viz.serving.served import ServedModel, load

Change = Literal["none", "weight-only", "fill-one", "fill-fallback", "peer-max"]
Verdict = Literal["right", "silent", "wrong", "refused"]
Source = str | Path | Checkpoint

MARGIN = 0.05
"""Nats per character above the calibrated model that still count as right: the bound that tiny-moe itself must meet."""


FALLBACK_SCALE = np.float32(0.5 / 2688)
"""ModelOpt's last resort, ``set_expert_quantizer_amax`` with amax 0.5 (`checkpoints.md`, fingerprints)."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way out.

    Attributes
    ----------
    id
    backend, per_token, guard
        As in `load`.
    change
        What is done to the checkpoint first, in memory.
    calibrated
        Serve the fully calibrated export instead of the broken one.
    guesses
        It invents a scale that nobody measured.
    """

    id: str
    backend: str = "vllm-cutlass"
    per_token: bool = False
    guard: bool = False
    change: Change = "none"
    calibrated: bool = False
    guesses: bool = False


REMEDIES: dict[str, Remedy] = {
    remedy.id: remedy
    for remedy in (
        Remedy("load-guard", guard=True),
        Remedy("other-backend", backend="vllm-marlin"),
        Remedy("layer-maximum", backend="vllm-flashinfer-cutlass", guesses=True),
        Remedy("weight-only", backend="vllm-marlin", change="weight-only"),
        Remedy("per-token", backend="vllm-flashinfer-trtllm", per_token=True),
        Remedy("fill-one", change="fill-one", guesses=True),
        Remedy("fill-fallback", change="fill-fallback", guesses=True),
        Remedy("peer-max", change="peer-max", guesses=True),
        Remedy("calibrate", calibrated=True),
    )
}


@dataclass(frozen=True, slots=True)
class RemedyReply:
    """One prompt's answer.

    Attributes
    ----------
    prompt, token_ids, text
    silent
        Nothing but padding.
    nan_fraction
        Largest share of NaN in the residual stream after any layer and token.
    """

    prompt: str
    token_ids: tuple[int, ...]
    text: str
    silent: bool
    nan_fraction: float


@dataclass(frozen=True, slots=True)
class RemedyResult:
    """What a remedy did.

    Attributes
    ----------
    id
    refusal
        The error of a load that was refused; then there are no replies.
    replies
        In the order of the prompts.
    losses
        Nats per character by domain, NaN included.
    load_seconds, generate_seconds, loss_seconds
    bytes
        Of the tensors in the checkpoint that was served; 0 where it was refused.
    computed_on
        What computed the experts, ``"cpu"`` or ``"cuda"``.
    """

    id: str
    refusal: ServingError | None
    replies: tuple[RemedyReply, ...]
    losses: Mapping[str, float] = field(default_factory=dict)
    load_seconds: float = 0.0
    generate_seconds: float = 0.0
    loss_seconds: float = 0.0
    bytes: int = 0
    computed_on: str = "cpu"

    @property
    def tokens(self) -> int:
        """Generated, over all prompts."""
        return sum(len(reply.token_ids) for reply in self.replies)


def run_remedy(
    remedy_id: str,
    prompts: Sequence[str],
    *,
    broken: Source,
    calibrated: Source | None = None,
    texts: Mapping[str, Sequence[str]] | None = None,
    allocator: str = "zeros",
    seed: int = 0,
    n: int = 32,
) -> RemedyResult:
    """Serve, ask and measure.

    Parameters
    ----------
    remedy_id
        A key of `REMEDIES`.
    prompts
        Asked one after another, greedy, `n` tokens each.
    broken, calibrated
        The holed checkpoint and the fully calibrated one; the second is only needed by remedies that serve it.
    texts
        Held-out texts by domain for the loss; none, no loss.
    allocator, seed
        What memory holds in slots that stay unwritten.

    Raises
    ------
    ServingError
        ``serving.remedy``.  A refusal by the guard is a result, not an error.
    ModelError
        For a prompt that the model cannot read.
    """
    start = perf_counter()
    try:
        checkpoint = remedied(remedy_id, broken=broken, calibrated=calibrated)
        served = _serve(REMEDIES[remedy_id], checkpoint, allocator, seed)
    except ServingError as refusal:
        if refusal.code != "serving.guard":
            raise
        return RemedyResult(remedy_id, refusal, (), load_seconds=perf_counter() - start)
    loaded = perf_counter()
    replies = tuple(_ask(served, prompt, n) for prompt in prompts)
    answered = perf_counter()
    losses = {domain: evaluate(served, found) for domain, found in (texts or {}).items()}
    done = perf_counter()
    size = sum(entry.end - entry.begin for entry in checkpoint.tensors.values())
    return RemedyResult(
        remedy_id, None, replies, losses, loaded - start, answered - loaded, done - answered, size, served.computes_on
    )


def serve_remedy(
    remedy_id: str,
    *,
    broken: Source,
    calibrated: Source | None = None,
    allocator: str = "zeros",
    seed: int = 0,
) -> ServedModel:
    """The model as the remedy serves it.

    Raises
    ------
    ServingError
        ``serving.remedy``, or the refusal that is the remedy (``serving.guard``).
    """
    checkpoint = remedied(remedy_id, broken=broken, calibrated=calibrated)
    return _serve(REMEDIES[remedy_id], checkpoint, allocator, seed)


def remedied(remedy_id: str, *, broken: Source, calibrated: Source | None = None) -> Checkpoint:
    """The checkpoint that a remedy serves: changed in memory, or another one.

    Raises
    ------
    ServingError
        ``serving.remedy``.
    """
    if remedy_id not in REMEDIES:
        raise ServingError("serving.remedy", remedy=remedy_id, known=", ".join(REMEDIES))
    remedy = REMEDIES[remedy_id]
    source = calibrated if remedy.calibrated else broken
    assert source is not None, "this remedy serves the calibrated checkpoint"
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    return change_checkpoint(checkpoint, remedy.change)


def _serve(remedy: Remedy, checkpoint: Checkpoint, allocator: str, seed: int) -> ServedModel:
    return load(checkpoint, allocator, seed, remedy.backend, remedy.guard, per_token=remedy.per_token)


def judge(result: RemedyResult, reference: RemedyResult, margin: float = MARGIN) -> Verdict:
    """``refused``, ``silent``, ``wrong`` (looks healthy: words, no padding, but the loss says otherwise) or ``right``.

    Parameters
    ----------
    result, reference
        Measured on the same prompts and texts; the reference is the calibrated model.
    margin
        Nats per character in any domain.
    """
    if result.refusal is not None:
        return "refused"
    if any(reply.silent or reply.nan_fraction > 0 for reply in result.replies):
        return "silent"
    return "wrong" if wrong_domains(result, reference, margin) else "right"


def wrong_domains(result: RemedyResult, reference: RemedyResult, margin: float = MARGIN) -> tuple[str, ...]:
    """Domains whose loss lies more than `margin` above the reference's, or is NaN."""
    return tuple(
        domain
        for domain, loss in result.losses.items()
        if not loss <= reference.losses.get(domain, float("nan")) + margin
    )


def excess(result: RemedyResult, reference: RemedyResult) -> dict[str, float]:
    """Nats per character above the reference, by domain; NaN where either is."""
    return {domain: loss - reference.losses.get(domain, float("nan")) for domain, loss in result.losses.items()}


def change_checkpoint(checkpoint: Checkpoint, change: Change) -> Checkpoint:
    """A changed copy in memory; the source is never written.

    ``weight-only`` relabels the checkpoint as ``W4A16_NVFP4`` and drops every activation scale: nothing is guessed.
    ``fill-one`` puts 1.0 into each missing slot; ``fill-fallback`` what ModelOpt's exporter writes where no expert of
    a group has statistics (`FALLBACK_SCALE`); ``peer-max`` the maximum of the layer's other experts in that
    projection.
    """
    if change == "none":
        return checkpoint
    view = canonical(checkpoint)
    tensors = checkpoint.read_tensors()
    config, sidecar = checkpoint.config, checkpoint.hf_quant_config
    if change == "weight-only":
        dropped = set(activation_scales(checkpoint.tensors))
        tensors = {name: found for name, found in tensors.items() if name not in dropped}
        config, sidecar = relabelled(config), relabelled(sidecar)
    else:
        for name, value in _fills(checkpoint, view, change).items():
            tensors[name] = tensor(value)
    return memory_checkpoint(tensors, config=config, hf_quant_config=sidecar, name=f"{checkpoint.name} ({change})")


def _fills(checkpoint: Checkpoint, view: CanonicalView, change: Change) -> dict[str, np.float32]:
    """A value for every missing activation scale."""
    filled: dict[str, np.float32] = {}
    for layer in view.moe_layers:
        for projection in view.projections_in[layer]:
            slots = list(view.slots(layer, projection=projection, role="input_scale"))
            missing = [slot.name for slot in slots if slot.entry is None]
            present = checkpoint.read_scalars([slot.name for slot in slots if slot.entry is not None])
            value = FALLBACK_SCALE if change == "fill-fallback" else np.float32(1)
            if change == "peer-max":
                # A divisor (2688/amax) is largest where amax is smallest.
                pick = min if view.divisors else max
                value = pick(present.values(), default=np.float32(1))
            filled |= dict.fromkeys(missing, value)
    return filled


def _ask(served: ServedModel, prompt: str, n: int) -> RemedyReply:
    generation = served.generate(prompt, n)
    nan = np.asarray(generation.trace.nan_fraction, np.float32)
    ids = tuple(int(token) for token in generation.token_ids)
    return RemedyReply(prompt, ids, generation.text, is_silent(ids), float(nan.max(initial=0.0)))
