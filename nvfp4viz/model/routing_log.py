"""Which experts each document of a text was routed to: the record behind the routing page and its planner.

A document is the unit, not a token.  The tokens of one text resemble each other, so whether an expert is met is decided
text by text; a count over tokens alone would look far more certain than it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.model.inference import Experts, ForwardRecord, TinyMoe
from nvfp4viz.model.tokenizer import EOS, Tokenizer

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RoutingLog:
    """Routed tokens, document by document.

    Attributes
    ----------
    tokens : (D,) unsigned integers
        Tokens of each document, its end mark included.
    counts : (D, layers, experts) unsigned integers
        How many of them each expert received.
    """

    tokens: npt.NDArray[Any]
    counts: npt.NDArray[Any] = field(repr=False)

    @property
    def documents(self) -> int:
        return len(self.tokens)

    @classmethod
    def read(cls, path: Path, name: str) -> RoutingLog:
        """One log out of a file of several (``sample_checkpoints/routing.npz``); read-only."""
        with np.load(path, allow_pickle=False) as parts:
            log = cls(parts[f"{name}.tokens"], parts[f"{name}.counts"])
        log.tokens.flags.writeable = log.counts.flags.writeable = False
        return log

    def part(self, start: int, stop: int) -> RoutingLog:
        """The documents from ``start`` up to ``stop``."""
        return RoutingLog(self.tokens[start:stop], self.counts[start:stop])

    def totals(self, documents: int | None = None) -> I64:
        """(layers, experts) int64: routed tokens of the first ``documents``, or of all."""
        total: I64 = self.counts[:documents].sum(axis=0, dtype=np.int64)
        return total

    def seen_by(self) -> I64:
        """(layers, experts) int64: the first document that routes a token there, −1 where none does."""
        seen = self.counts > 0
        return np.where(seen.any(axis=0), seen.argmax(axis=0), -1)

    def holes_after(self) -> I64:
        """(D+1,) int64: slots without a token after 0, 1, … D documents.

        >>> log = RoutingLog(np.array([5, 5]), np.array([[[5, 0, 0]], [[2, 3, 0]]]))
        >>> log.holes_after().tolist(), log.seen_by().tolist()
        ([3, 2, 1], [[0, 1, -1]])
        """
        first = self.seen_by()
        closed = np.bincount(first[first >= 0], minlength=self.documents)
        return first.size - np.concatenate([[0], np.cumsum(closed)])

    def tokens_after(self) -> I64:
        """(D+1,) int64: tokens of 0, 1, … D documents together."""
        return np.concatenate([[0], np.cumsum(self.tokens, dtype=np.int64)])


def joined(logs: Sequence[RoutingLog]) -> RoutingLog:
    """The documents of several logs in turn: the first of each, then the second of each, and so on.

    Logs of unequal length end with the shortest.
    """
    length = min(log.documents for log in logs)
    tokens = np.stack([log.tokens[:length] for log in logs], axis=1)
    counts = np.stack([log.counts[:length] for log in logs], axis=1)
    return RoutingLog(tokens.reshape(-1), counts.reshape(-1, *counts.shape[2:]))


def record_routing(model: TinyMoe, experts: Experts, texts: Iterable[str], *, ended: bool = True) -> RoutingLog:
    """Send each text through the model with natural routing and count where its tokens went.

    Parameters
    ----------
    model, experts
        The dense part and its routed experts, as for `generate`.
    texts
        Documents; each is read whole, as in `calibrate`.
    ended
        Whether an end mark follows each: yes for a document, no for a prompt.

    Raises
    ------
    ModelError
        ``prompt.empty``, ``prompt.too-long``, ``prompt.unknown-characters``.
    """
    tokenizer, c = Tokenizer(), model.config
    tokens, counts = [], []
    for text in texts:
        ids = [*tokenizer.encode(text), EOS] if ended else tokenizer.encode(text)
        record = ForwardRecord()
        model.forward(ids, experts, record=record)
        tokens.append(len(ids))
        counts.append([np.bincount(routes.ravel(), minlength=c.num_experts) for routes in record.routes])
    shape = (len(tokens), c.num_hidden_layers, c.num_experts)
    return RoutingLog(np.array(tokens, np.uint16), np.array(counts, np.uint16).reshape(shape))
