"""One route into a bad expert, followed with real numbers: from the missing key to the token that says nothing.

`trace_chain` runs the prompt, finds the first route into an expert whose input scale was never written, runs that layer
again with every tensor kept, and returns each link:

key → uninitialised slot → reciprocal → block scale byte → codes → tensor-core product → expert output → residual →
logits → token
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.moe import ExpertsResult, ExpertsTrace, Operand, Routing
from nvfp4viz.serving.backends import RUNNERS
from nvfp4viz.serving.served import ServedExperts, ServedModel

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SlotLink:
    """One of the three activation-scale slots of the expert.

    Attributes
    ----------
    projection
        ``"gate"``, ``"up"`` or ``"down"``.
    name
        The tensor that the loader looked for.
    written
        The file has it.
    value
        What the slot holds.
    """

    projection: str
    name: str
    written: bool
    value: np.float32


@dataclass(frozen=True, slots=True)
class GemmLink:
    """One of the expert's two products, for one token.

    Attributes
    ----------
    input_scale, gscale, alpha
        The scale after the backend's maximum, its reciprocal (encode scale), and ``input_scale * weight_scale_2``; None
        where the backend does not quantise activations.
    x : (K,) bfloat16
        What comes in.
    block_amax : (K//16,) float32
        Largest magnitude of each block of 16 (a NaN loses against a number).
    scales : (K//16,) uint8, codes : (K,) uint8, or None
        Block-scale bytes and E2M1 codes.
    block
        The block to look at: the first whose scale byte is NaN, else the one with the largest values.
    acc : (N,) float32
        The accumulator.
    out : (N,) bfloat16
        After the epilogue.
    """

    input_scale: np.float32 | None
    gscale: np.float32 | None
    alpha: np.float32
    x: Array
    block_amax: F32
    scales: U8 | None
    codes: U8 | None
    block: int
    acc: F32
    out: Array

    @property
    def nan_blocks(self) -> int:
        """Blocks whose scale byte is NaN."""
        return 0 if self.scales is None else int(np.count_nonzero((self.scales & 0x7F) == 0x7F))


@dataclass(frozen=True, slots=True)
class ChainTrace:
    """A route and what follows from it; compare with the trace of a healthy model at the same place.

    Attributes
    ----------
    prompt, prompt_ids
    layer, expert, position
        The route: token number `position` of the sequence goes to this expert.
    token_id
        That token.
    weight
        Its routing weight.
    slots
        Gate, up, down.
    first, second
        The expert's two products.
    expert_out : (H,) bfloat16
        What the expert gives for this token.
    moe_out : (H,) bfloat16
        The weighted sum over the token's experts.
    nan_after : (layers,) float32
        Share of NaN in this token's residual after each layer.
    first_nan
        ``(position, layer)`` where the residual first holds a NaN in order of computing; None if never.
    logits : (V,) float32
        For the first generated token.
    token_ids, text
        The answer.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    layer: int
    expert: int
    position: int
    token_id: int
    weight: np.float32
    slots: tuple[SlotLink, ...]
    first: GemmLink
    second: GemmLink
    expert_out: Array = field(repr=False)
    moe_out: Array = field(repr=False)
    nan_after: F32
    first_nan: tuple[int, int] | None
    logits: F32 = field(repr=False)
    token_ids: tuple[int, ...]
    text: str

    @property
    def logit_nans(self) -> int:
        return int(np.isnan(self.logits).sum())


@dataclass(slots=True)
class _Tap:
    """The experts of a served model, with every call's input kept."""

    experts: ServedExperts
    calls: list[tuple[int, Array, Routing]] = field(default_factory=list)

    def __call__(self, layer: int, x: Array, routing: Routing) -> ExpertsResult:
        self.calls.append((layer, x, routing))
        return self.experts(layer, x, routing)


def trace_chain(
    served: ServedModel,
    prompt: str,
    layer: int | None = None,
    expert: int | None = None,
    *,
    position: int | None = None,
    n: int = 32,
) -> ChainTrace | None:
    """Follow the first route of a prompt into an expert with an unwritten input scale.

    Parameters
    ----------
    served
        A loaded model; a healthy one has no bad expert, so give it the place of another trace (`twin_of` does).
    prompt
    layer, expert, position
        Follow a route at this place instead; each that is None is left open.  With neither layer nor expert given, only
        experts with unwritten slots are looked at.
    n
        Tokens to generate.

    Returns
    -------
    ChainTrace, or None where no route of the prompt or the answer fits.

    Notes
    -----
    "First" is in the order of computing: the whole prompt goes through layer 0 before layer 1, and all of it before the
    first generated token.

    Raises
    ------
    ModelError
        For a prompt that the model cannot read.
    """
    from nvfp4viz.model import generate

    tap = _Tap(served.experts)
    generation = generate(served.model, tap, prompt, max_new_tokens=n)
    found = _find_route(served, tap, layer, expert, position)
    if found is None:
        return None
    at, row, start = found
    at_layer, x, routing = at
    position = start + row
    prepared = served.experts.layers[at_layer]
    trace = RUNNERS[type(prepared)](x, routing, prepared, record=True).trace
    assert trace is not None
    rank = _rank(served, at_layer, routing.ids[row], expert)
    chosen = int(routing.ids[row, rank])
    permuted = int(trace.dispatch.c_map[row * routing.ids.shape[1] + rank])
    tokens = [*generation.prompt_ids, *generation.token_ids]
    nan = np.asarray(generation.trace.nan_fraction, np.float32)
    return ChainTrace(
        prompt=prompt,
        prompt_ids=tuple(int(t) for t in generation.prompt_ids),
        layer=at_layer,
        expert=chosen,
        position=position,
        token_id=int(tokens[position]),
        weight=np.float32(routing.weights[row, rank]),
        slots=_slots(served, at_layer, chosen),
        first=_gemm(served, at_layer, chosen, 1, trace, permuted),
        second=_gemm(served, at_layer, chosen, 2, trace, permuted),
        expert_out=trace.c3[permuted],
        moe_out=trace.out[row],
        nan_after=nan[position],
        first_nan=_first_nan(nan, len(generation.prompt_ids)),
        logits=np.asarray(generation.trace.logits[0], np.float32),
        token_ids=tuple(int(t) for t in generation.token_ids),
        text=generation.text,
    )


def twin_of(chain: ChainTrace, healthy: ServedModel, *, n: int = 32) -> ChainTrace | None:
    """The same token and expert in a healthy model; None where its routing there differs."""
    return trace_chain(healthy, chain.prompt, chain.layer, chain.expert, position=chain.position, n=n)


def _bad(served: ServedModel, layer: int) -> frozenset[int]:
    return frozenset(served.load_report.experts_without("input_scale").get(layer, ()))


def _rank(served: ServedModel, layer: int, ids: Array, expert: int | None) -> int:
    """Which of a token's experts is meant: the given one, or the first bad one, or the first."""
    wanted = {expert} if expert is not None else _bad(served, layer)
    return next((k for k, chosen in enumerate(ids.tolist()) if chosen in wanted), 0)


def _find_route(
    served: ServedModel, tap: _Tap, layer: int | None, expert: int | None, position: int | None
) -> tuple[tuple[int, Array, Routing], int, int] | None:
    """The first call and row that fit, and the sequence position of the call's first row."""
    seen: dict[int, int] = {}
    for call in tap.calls:
        at, x, routing = call
        start = seen.get(at, 0)
        seen[at] = start + len(x)
        if layer is not None and at != layer:
            continue
        if expert is not None:
            fits = (np.asarray(routing.ids) == expert).any(axis=1)
        elif layer is None and position is None:
            fits = np.isin(routing.ids, list(_bad(served, at))).any(axis=1)
        else:
            fits = np.ones(len(x), np.bool_)
        if position is not None:
            fits &= np.arange(start, start + len(x)) == position
        rows = np.flatnonzero(fits)
        if len(rows):
            return call, int(rows[0]), start
    return None


def _slots(served: ServedModel, layer: int, expert: int) -> tuple[SlotLink, ...]:
    if not served.parameters:
        return ()
    parameters = served.parameters_of(layer)
    found = []
    for projection in served.view.projections_in[layer]:
        name = served.view.slot(layer, expert, projection, "input_scale").name
        value = np.float32(parameters.values("input_scale", projection)[expert])
        written = bool(parameters.written["input_scale", projection][expert])
        found.append(SlotLink(projection, name, written, value))
    return tuple(found)


def _gemm(served: ServedModel, layer: int, expert: int, which: int, trace: ExpertsTrace, row: int) -> GemmLink:
    operand: Operand = trace.input if which == 1 else trace.intermediate
    acc, alpha, out = (trace.acc1, trace.alpha1, trace.c1) if which == 1 else (trace.acc2, trace.alpha2, trace.c3)
    scales = served.scales_of(layer) if served.scales else None
    given = None if scales is None else (scales.a13 if which == 1 else scales.a2)
    x = operand.values[row]
    magnitude = np.abs(x.astype(np.float32)).reshape(-1, 16)
    block_amax = np.fmax.reduce(magnitude, axis=1)
    block_scales = None if operand.scales is None else operand.scales[row]
    codes = None
    block = int(np.argmax(np.where(np.isnan(block_amax), -1, block_amax)))
    if block_scales is not None and operand.packed is not None:
        packed = operand.packed[row]
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)
        nan = np.flatnonzero((block_scales & 0x7F) == 0x7F)
        block = int(nan[0]) if len(nan) else block
    return GemmLink(
        input_scale=None if given is None else np.float32(given[expert]),
        gscale=None if operand.gscale is None else np.float32(operand.gscale[row]),
        alpha=np.float32(alpha[row]),
        x=x,
        block_amax=block_amax,
        scales=block_scales,
        codes=codes,
        block=block,
        acc=acc[row],
        out=out[row],
    )


def _first_nan(nan: F32, prompt_length: int) -> tuple[int, int] | None:
    """In order of computing: the prompt layer by layer, then token by token."""
    prompt = np.argwhere(nan[:prompt_length].T > 0)
    if len(prompt):
        return int(prompt[0, 1]), int(prompt[0, 0])
    later = np.argwhere(nan[prompt_length:] > 0)
    return (prompt_length + int(later[0, 0]), int(later[0, 1])) if len(later) else None
