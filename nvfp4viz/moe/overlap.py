"""How long one expert-parallel layer takes, in a model small enough to be written on a napkin.

A **model**, not a measurement: real links have topology, real kernels have tails.  Each rank has a network port and a
compute engine.  With ``w`` a rank's payload in bytes (the larger of what leaves and what arrives), ``n`` its rows::

    dispatch = latency + w / link          combine = latency + w / link
    compute  = max(6 · H · I · n / flops,  bytes of the experts it read / memory)

The three phases follow each other; a transfer begins when every rank has reached it and ends when the busiest is done.
**Overlap** cuts the batch into two halves (vLLM's dual batch overlap): while one half computes, the other travels.
Each half reads the weights of the experts it meets, so what both halves meet is read twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.moe.parallel import Exchange, Placement, Way, exchange, home_ranks

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]

FLOPS_A_WEIGHT = 2
MATRICES = 3
BITS_A_WEIGHT = 4.5
"""NVFP4: four bits, and an E4M3 scale for sixteen."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the model asks of a rank: all it knows about hardware.

    Attributes
    ----------
    link : float
        Bytes a second in and out of one rank, each way.
    latency : float
        Seconds that a transfer takes before its first byte.
    flops : float
        Operations a second in the experts' matrices.
    memory : float
        Bytes a second of weights.
    """

    link: float
    latency: float
    flops: float
    memory: float


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Hidden size H and an expert's intermediate size I."""

    hidden: int
    intermediate: int

    @property
    def weights(self) -> int:
        """Weights of one expert: gate, up, down."""
        return MATRICES * self.hidden * self.intermediate

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert in NVFP4, without its two float32 scales a matrix."""
        return self.weights * BITS_A_WEIGHT / 8


@dataclass(frozen=True, slots=True, eq=False)
class Phases:
    """Seconds of one batch: a number for each transfer, and one a rank, ``(R,)`` float64, for the experts."""

    dispatch: float
    compute: F64
    combine: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase of one half on one rank; seconds from the layer's start."""

    rank: int
    kind: str  # "dispatch", "compute", "combine"
    half: int
    start: float
    end: float


def phases(layer: Exchange, size: LayerSize, machine: Machine, payload: str = "bf16", way: Way = "tokens") -> Phases:
    """The model's seconds of a batch; see the head of this module."""
    rows = FLOPS_A_WEIGHT * size.weights * layer.rank_rows / machine.flops
    weights = size.expert_bytes * layer.active_slots / machine.memory
    return Phases(
        _transfer(layer.dispatch_bytes(size.hidden, payload, way), machine),
        np.maximum(rows, weights),
        _transfer(layer.combine_bytes(size.hidden, way), machine),
    )


def _transfer(sent: Array, machine: Machine) -> float:
    """Seconds until the busiest port is done; ``sent`` (R, R) bytes.

    >>> _transfer(np.array([[0, 300], [100, 0]]), Machine(link=100, latency=1, flops=1, memory=1))
    4.0
    """
    payload = int(max(sent.sum(axis=0).max(), sent.sum(axis=1).max()))
    return machine.latency + payload / machine.link


def timeline(batches: Sequence[Phases]) -> tuple[Bar, ...]:
    """When each phase runs: one batch after the other on both resources, transfers first come, first served.

    Parameters
    ----------
    batches
        One batch, or the halves of one: half i computes while half i + 1 is dispatched.

    >>> one = Phases(1.0, np.array([2.0, 3.0]), 1.0)
    >>> max(bar.end for bar in timeline([one])), max(bar.end for bar in timeline([one, one]))
    (5.0, 8.0)
    """
    ranks = len(batches[0].compute)
    bars: list[Bar] = []
    network = 0.0
    engine, computed = np.zeros(ranks), []
    for half, batch in enumerate(batches):
        start, network = network, network + batch.dispatch
        bars += [Bar(rank, "dispatch", half, start, network) for rank in range(ranks)]
        begin = np.maximum(engine, network)
        engine = begin + batch.compute
        computed.append(float(engine.max()))
        bars += [Bar(r, "compute", half, float(begin[r]), float(engine[r])) for r in range(ranks)]
    for half, batch in enumerate(batches):
        start = max(network, computed[half])
        network = start + batch.combine
        bars += [Bar(rank, "combine", half, start, network) for rank in range(ranks)]
    return tuple(bars)


def total(bars: Sequence[Bar]) -> float:
    """Seconds until the layer is done on every rank."""
    return max(bar.end for bar in bars)


def halves(slots: Array, placement: Placement) -> tuple[Exchange, Exchange]:
    """The exchanges of every second token of a batch ``slots (T, k)``, and of the others."""
    home = home_ranks(len(slots), placement.ranks)
    first, second = (exchange(slots[part::2], placement, home[part::2]) for part in (0, 1))
    return first, second
