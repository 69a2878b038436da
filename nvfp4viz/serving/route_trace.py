"""tiny-moe's measured routes as a server's traffic, and what EPLB makes of them.

``sample_checkpoints/routes.npz`` holds the routes of held-out documents (`sample_checkpoints.record_routes`).  They are
cut into the steps of an engine; at half time the experts are rearranged by the loads of the last steps before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.moe.eplb import rebalance
from nvfp4viz.moe.parallel import Imbalance, Placement, choose_slots_at_home, exchange, imbalance, place

if TYPE_CHECKING:
    from nvfp4viz.serving.served import ServedModel

Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RouteTrace:
    """Where the tokens of some documents went, token by token.

    Attributes
    ----------
    ids : (T, layers, k) uint8
        Logical experts, best first.
    lengths : (D,) int32
        Tokens of each document; documents follow each other in `ids`.
    domains : (D,) str
        What each document is.
    """

    ids: npt.NDArray[np.uint8] = field(repr=False)
    lengths: npt.NDArray[np.int32] = field(repr=False)
    domains: npt.NDArray[np.str_] = field(repr=False)

    def document(self, index: int) -> npt.NDArray[np.uint8]:
        """(tokens, layers, k) of one document."""
        end = int(self.lengths[: index + 1].sum())
        return self.ids[end - int(self.lengths[index]) : end]

    def of(self, domain: str) -> list[int]:
        """Indices of a domain's documents."""
        return np.flatnonzero(self.domains == domain).tolist()

    def write(self, path: Path) -> None:
        np.savez_compressed(path, ids=self.ids, lengths=self.lengths, domains=self.domains)

    @classmethod
    def read(cls, path: Path) -> RouteTrace:
        with np.load(path) as found:
            return cls(found["ids"], found["lengths"], found["domains"])


def record_routes(served: ServedModel, texts: Iterable[tuple[str, str]]) -> RouteTrace:
    """Read ``(domain, text)`` documents, each from its start, and note every route."""
    from nvfp4viz.model import Tokenizer
    from nvfp4viz.model.inference import ForwardRecord

    tokenizer, most = Tokenizer(), served.model.config.max_position_embeddings
    parts, domains = [], []
    for domain, text in texts:
        record = ForwardRecord()
        served.model.forward(tokenizer.encode(text)[:most], served.experts, record=record)
        parts.append(np.stack(record.routes, axis=1).astype(np.uint8))
        domains.append(domain)
    return RouteTrace(np.concatenate(parts), np.array([len(part) for part in parts], np.int32), np.array(domains))


STEPS = 16
"""Steps of `traffic`: half before experts are rearranged, half after."""
EVERY = "every"


def traffic(trace: RouteTrace, before: str = EVERY, after: str = EVERY) -> tuple[Array, ...]:
    """A server's batches: ``STEPS`` arrays ``(tokens, layers, k)``.

    Parameters
    ----------
    trace
        At least ``2 · STEPS`` documents a domain.
    before, after
        What people ask for in the first and in the second half: a domain, two documents of it a step; or ``"every"``,
        one document of each domain a step.  No document is read twice.
    """
    half = STEPS // 2
    steps: list[Array] = []
    for asked, first in ((before, 0), (after, half)):
        for step in range(first, first + half):
            if asked == EVERY:
                chosen = [trace.of(domain)[2 * step] for domain in dict.fromkeys(trace.domains.tolist())]
            else:
                chosen = trace.of(asked)[2 * step : 2 * step + 2]
            steps.append(np.concatenate([trace.document(index) for index in chosen]))
    return tuple(steps)


def load_of(steps: Sequence[Array], experts: int) -> I64:
    """(layers, E) int64: rows of each logical expert, summed over steps, as EPLB's window does."""
    layers = steps[0].shape[1]
    ids = np.concatenate(steps).astype(np.int64)
    counted = [np.bincount(ids[:, layer].ravel(), minlength=experts) for layer in range(layers)]
    return np.stack(counted)


@dataclass(frozen=True, slots=True, eq=False)
class Balance:
    """One layer's ranks in the second half of `traffic`, with and without EPLB.

    Attributes
    ----------
    plain
        A slot for each expert, never rearranged.
    old, new
        With the redundant slots: as started, and as EPLB placed them.  Of all layers.
    layer
        The layer looked at.
    without, rebalanced : (STEPS / 2, R) int64
        Rows that each rank computes in each step, under `plain` and under `new`.
    """

    plain: Placement
    old: tuple[Placement, ...]
    new: tuple[Placement, ...]
    layer: int
    without: I64
    rebalanced: I64

    @property
    def before(self) -> Imbalance:
        """Of the rows of all steps together."""
        return imbalance(self.without.sum(axis=0))

    @property
    def after(self) -> Imbalance:
        return imbalance(self.rebalanced.sum(axis=0))


def step_ratio(rows: Array) -> float:
    """What a server waits that ends every step with its slowest rank: rows of the slowest over mean rows, summed.

    >>> step_ratio(np.array([[3, 1], [1, 3]]))
    1.5
    """
    return float(rows.max(axis=1).sum() / rows.mean(axis=1).sum())


def balance(
    steps: Sequence[Array],
    layer: int,
    *,
    experts: int,
    ranks: int,
    extra: int = 0,
    window: int = STEPS // 2,
    strategy: str = "linear",
) -> Balance:
    """Rearrange at half time, and compare what follows.

    Parameters
    ----------
    steps
        From `traffic`.
    experts, ranks, strategy
        Where the experts lie at first.
    extra
        Redundant slots a rank.
    window
        Steps before half time whose loads are counted.

    Raises
    ------
    InputError
        ``parallel.uneven``
    """
    half = len(steps) // 2
    plain, old = place(experts, ranks, strategy), place(experts, ranks, strategy, extra * ranks)
    load = load_of(steps[half - window : half], experts)
    slots = rebalance(load, len(old.slots), ranks, old=np.tile(old.slots, (len(load), 1)))
    new = tuple(Placement(row, ranks, experts) for row in slots)
    return Balance(
        plain,
        (old,) * len(new),
        new,
        layer,
        rank_rows(steps[half:], layer, plain),
        rank_rows(steps[half:], layer, new[layer]),
    )


def rank_rows(steps: Sequence[Array], layer: int, placement: Placement) -> I64:
    """(steps, R) int64: rows that each rank computes, step by step."""
    chosen = [choose_slots_at_home(step[:, layer], placement) for step in steps]
    return np.stack([exchange(slots, placement).rank_rows for slots in chosen])
