"""From logits to a token, in particular from NaN logits (`serving-vllm.md` section 11, `corrections.md`).

*V1* is ``torch.argmax``, which counts a NaN as the greatest value and returns the first: all-NaN logits give id 0,
Gemma's and tiny-moe's ``<pad>``.  *V2*, the default runner of vLLM 0.33.0, reduces blocks of 1024 logits by
comparisons, and a comparison with NaN is false: which index survives follows from the layout of the reduction, so
only "some id in 0 to 1023" can be said of a real server.  `argmax_v2` computes what two plain layouts give.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.model import greedy

V2_BLOCK = 1024
"""Logits that the V2 runner reduces together."""

Logits = npt.NDArray[Any]


def argmax_v1(logits: Logits) -> int:
    """First NaN if there is one, else the first of the largest.

    >>> argmax_v1(np.float32([1, 5, 5])), argmax_v1(np.float32([1, np.nan, 9]))
    (1, 1)
    >>> argmax_v1(np.full(99, np.nan, np.float32))
    0
    """
    return greedy(logits)


def argmax_v2(logits: Logits, nan_keeps: Literal["left", "right"] = "right") -> int:
    """Argmax by a pairwise tree over blocks of 1024, then over the blocks as V1 does.

    Parameters
    ----------
    logits : (V,) float32
    nan_keeps
        Which operand survives when a comparison is false because of a NaN: the layout's choice, not the model's.

    >>> argmax_v2(np.float32([1, 5, 5]))
    1
    >>> nan = np.full(2048, np.nan, np.float32)
    >>> argmax_v2(nan, "left"), argmax_v2(nan, "right")
    (0, 1023)
    """
    blocks = [logits[start : start + V2_BLOCK] for start in range(0, len(logits), V2_BLOCK)]
    winners = [start * V2_BLOCK + _tree(block, nan_keeps) for start, block in enumerate(blocks)]
    return winners[argmax_v1(logits[winners])]


def _tree(block: Logits, nan_keeps: str) -> int:
    index = np.arange(len(block))
    while len(index) > 1:
        odd = index[-1:] if len(index) % 2 else index[:0]
        left, right = index[: len(index) - len(odd)].reshape(-1, 2).T
        a, b = block[left], block[right]
        if nan_keeps == "right":
            take_left = (a > b) | (a == b)  # equal: the lower index
        else:
            take_left = ~(b > a)
        index = np.concatenate([np.where(take_left, left, right), odd])
    return int(index[0])
