"""What a backend stores on one rank for a layer of NVFP4 experts.

Sources: `serving-vllm.md` 4.2 and 4.4, `numerics-vllm.md` 2 and 7 (vLLM 0.33.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nvfp4viz.serving.selection import MoeBackend

RANKS = (1, 2, 4, 8)
TILE = 128
"""Rows that VLLM_CUTLASS wants gate and up, fused, to be a multiple of."""
MARLIN_DIVIDES, MARLIN, MARLIN_ELSE = 128, 64, 128
"""Where the first divides the hidden size, Marlin stores a width in multiples of the second, else of the third."""


@dataclass(frozen=True, slots=True)
class RankBytes:
    """A layer's routed experts on one rank, in bytes.

    Attributes
    ----------
    experts
        On this rank.
    hidden, intermediate
        As stored, padding included.
    codes, block_scales
    scalars
        ``weight_scale_2`` and the input scales, those of other ranks' experts included where the backend keeps them.
    padding
        How much of all this is padding.
    stops
        The backend takes no such experts: vLLM ends with ``NotImplementedError`` when it prepares their weights.
    """

    experts: int
    hidden: int
    intermediate: int
    codes: int
    block_scales: int
    scalars: int
    padding: int
    stops: bool = False

    @property
    def total(self) -> int:
        return self.codes + self.block_scales + self.scalars


def padded(
    row: MoeBackend, hidden: int, intermediate: int, *, gated: bool = True, per_token: bool = False
) -> tuple[int, int]:
    """The sizes that a backend stores; the facts that were read give padding for FlashInfer's TRTLLM and for Marlin.

    >>> from nvfp4viz.serving.selection import MOE
    >>> padded(MOE[0], 4096, 352), padded(MOE[0], 128, 64)
    ((4096, 384), (256, 64))
    """
    if row.layout == "marlin":
        down = MARLIN_ELSE if hidden % MARLIN_DIVIDES else MARLIN
        return hidden, math.ceil(intermediate / down) * down
    if row.layout != "trtllm":
        return hidden, intermediate
    across = 512 if per_token and not gated else 256
    down = 64 if gated else 128
    return math.ceil(hidden / across) * across, math.ceil(intermediate / down) * down


def stops(row: MoeBackend, intermediate: int, *, gated: bool = True) -> bool:
    """Whether vLLM's own CUTLASS path refuses a rank's gate and up: it pads neither, and steps over whole tiles.

    >>> from nvfp4viz.serving.selection import MOE
    >>> [stops(row, 32) for row in MOE if row.enum in ("VLLM_CUTLASS", "MARLIN")]
    [True, False]
    """
    return row.enum == "VLLM_CUTLASS" and gated and 2 * intermediate % TILE != 0


def rank_bytes(
    row: MoeBackend,
    experts: int,
    hidden: int,
    intermediate: int,
    *,
    ranks: int = 1,
    parallel: str = "tp",
    gated: bool = True,
    per_token: bool = False,
) -> RankBytes:
    """What one rank stores for a layer.

    Parameters
    ----------
    row
        Of `selection.MOE`; its padding and its count of input scales.
    experts, hidden, intermediate
        Of the whole model.
    ranks, parallel
        ``"tp"`` cuts each expert's intermediate size, every other kind deals out whole experts.

    Raises
    ------
    FormatError
        ``grouping.shape`` where a rank's intermediate size is no multiple of the block of 16.

    Notes
    -----
    FlashInfer's backends keep an input scale for every expert of the model on every rank, the others for their own.
    What the 128 × 4 layout adds to the block scales of a narrow matrix is left out.  Where a backend ``stops``, the
    bytes are those of the parameters that it had allocated.
    """
    from nvfp4viz.quant.schemes import layer_bytes

    cut = parallel == "tp"
    local = experts if cut else math.ceil(experts / ranks)
    width = intermediate // ranks if cut else intermediate
    shards = 2 if gated else 1

    def stored(h: int, i: int) -> tuple[int, int]:
        one = layer_bytes([*[(i, h)] * shards, (h, i)], "nvfp4")
        return local * one.codes, local * one.block_scales

    tall, wide = padded(row, hidden, width, gated=gated, per_token=per_token)
    codes, block_scales = stored(tall, wide)
    slots = experts if row.enum.startswith("FLASHINFER") else local
    needed = sum(stored(hidden, width))
    scalars = 4 * (shards + 1) * (local + slots)
    padding, refused = codes + block_scales - needed, stops(row, width, gated=gated)
    return RankBytes(local, tall, wide, codes, block_scales, scalars, padding, refused)
