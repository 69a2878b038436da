"""How well a served model does: loss on text, and prompts that it answers with nothing but padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nvfp4viz.serving.served import ServedModel

PAD = 0
"""The id that argmax gives for NaN logits, and tiny-moe's ``<pad>``."""


@dataclass(frozen=True, slots=True)
class Collapse:
    """What became of some prompts.

    Attributes
    ----------
    prompts
        How many were asked.
    silent
        Replies of padding alone.
    broken
        Replies that turn into padding after some other tokens.
    """

    prompts: int
    silent: int
    broken: int


def is_silent(token_ids: Sequence[int]) -> bool:
    """Nothing but padding.

    >>> is_silent([0, 0, 0]), is_silent([17, 0, 0]), is_silent([])
    (True, False, False)
    """
    return len(token_ids) > 0 and all(int(token) == PAD for token in token_ids)


def collapse(served: ServedModel, prompts: Iterable[str], n: int = 12) -> Collapse:
    """Ask every prompt and count the replies that are padding.

    Parameters
    ----------
    n
        Tokens a reply; padding never stops once it has begun, because NaN stays in the cache.
    """
    replies = [served.generate(prompt, n).token_ids for prompt in prompts]
    silent = sum(is_silent(reply) for reply in replies)
    padded = sum(any(int(token) == PAD for token in reply) for reply in replies)
    return Collapse(len(replies), silent, padded - silent)


def evaluate(served: ServedModel, texts: Iterable[str]) -> float:
    """Loss in nats per character: minus the mean log-probability of each next token, teacher-forced.

    Parameters
    ----------
    texts
        Each is read on its own, ``<bos>`` before it and ``<eos>`` after it.

    Returns
    -------
    float
        NaN as soon as one logit is: a NaN is a result here, not an error.
    """
    from nvfp4viz.model import Tokenizer
    from nvfp4viz.model.tokenizer import EOS

    total, count = 0.0, 0
    for text in texts:
        ids = [*Tokenizer().encode(text), EOS]
        logits = served.logits(ids[:-1])
        total += float(negative_log_likelihood(logits, np.asarray(ids[1:])).sum())
        count += len(ids) - 1
    return total / count if count else float("nan")


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        top = wide.max(axis=1, keepdims=True)
        normaliser = np.log(np.exp(wide - top).sum(axis=1)) + top[:, 0]
    loss: np.ndarray = normaliser - wide[np.arange(len(targets)), targets]
    return loss
