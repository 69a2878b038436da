"""Online NVFP4: a server quantises BF16 expert weights while it loads them.

Per expert, with ``amax`` over the expert's whole matrix (gate and up together), in float32::

    amax = max(amax, 1e-8)      G = 2688 · (1 / amax)      weight_scale_2 = 1 / G

``2688 / tensor`` is a reciprocal and a product in torch.  The weight then reaches the quantiser in one of three ways:

``direct``        the quantiser gets the BF16 weight and G                              (vLLM 0.33.0)
``folded_f32``    it gets ``f32(w) · G`` unrounded and a global scale of 1              (an experiment, no kernel)
``folded_bf16``   it gets ``bf16(f32(w) · G)`` and a global scale of 1                  (before 0.33.0, by a write-up)

The middle way isolates the step that loses bits: folding itself rounds to 24 bits, the cast to 8.  The quantiser is
recipe ``vllm-cuda`` throughout.  Source: `numerics-vllm.md` section 8.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import BLOCK, bf16_bits_scalar, bf16_to_f32, f32_to_bf16, widen_bf16_scalar
from nvfp4viz.formats.paths import AutoPath, by_reference
from nvfp4viz.quant.api import dequantize, quantize
from nvfp4viz.quant.compare import ErrorSummary, summarise
from nvfp4viz.quant.reference import amax_scalar
from nvfp4viz.quant.scales import amax, global_scale
from nvfp4viz.quant.trace import trace_block
from nvfp4viz.quant.types import BlockTrace, QuantizedTensor

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Way = Literal["direct", "folded_f32", "folded_bf16"]
WAYS: tuple[Way, ...] = ("direct", "folded_f32", "folded_bf16")
RECIPE = "vllm-cuda"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ONE = np.float32(1)
FOLD_PORTION, QUANTIZE_PORTION = 1 << 13, 1 << 17
"""Elements that are folded or cast together, and that are quantised together where an expert has its own scale."""


@dataclass(frozen=True, slots=True, eq=False)
class OnlineWeights:
    """One projection of all E experts of a layer, packed online.

    Attributes
    ----------
    way
    packed : (E, N, K//2) uint8
    scales : (E, N, K//16) uint8
    encode : (E,) float32
        G of each expert.
    scale_2 : (E,) float32
        ``1 / G``, what the product is multiplied by.
    launches
        Of a server's quantiser kernel: one for each expert where each has its own G, one for all where G is folded.
    """

    way: Way
    packed: U8 = field(repr=False)
    scales: U8 = field(repr=False)
    encode: F32 = field(repr=False)
    scale_2: F32 = field(repr=False)
    launches: int

    def decode(self) -> F32:
        """Values (E, N, K) float32."""
        shape = (*self.packed.shape[1:-1], self.packed.shape[-1] * 2)
        return np.stack(
            [
                dequantize(QuantizedTensor(p, s, scale, "modelopt", BLOCK, shape))
                for p, s, scale in zip(self.packed, self.scales, self.scale_2, strict=True)
            ]
        )


def expert_weights(weights: Array) -> Array:
    """Weights ``(E, N, K)`` BF16; refuse anything else, and none (`FormatError` ``online.weights``)."""
    array = np.asarray(weights)
    if array.dtype != BFLOAT16 or array.ndim != 3 or not array.size:
        raise FormatError("online.weights", shape=array.shape, dtype=array.dtype)
    return array


def expert_scales(weights: Array, tops: F32 | None = None, path: AutoPath = "auto") -> F32:
    """Encode scale G (E,) float32 of each expert of ``weights (E, N, K)``.

    ``tops (E,)`` are maxima from elsewhere, as tensor-parallel ranks share them; by default the experts' own.
    """
    largest = amax_scalar if by_reference(path) else amax
    own = np.array([largest(w) for w in weights], np.float32) if tops is None else tops
    # The emulation's rule is torch's scalar / tensor with the same floor of 1e-8.
    return np.array([global_scale(top, "vllm-emulation") for top in own], np.float32)


def _rows_together(shape: tuple[int, ...], portion: int) -> int:
    """Rows of an expert of ``(E, N, K)`` that have about ``portion`` elements together, at least one."""
    _, rows, columns = shape
    return min(rows, max(1, portion // columns))


def fold(weights: Array, encode: F32, *, cast: bool) -> Array:
    """``f32(w) · G`` for ``weights (E, N, K)`` BF16: float32, or rounded to BF16."""
    folded = np.empty(weights.shape, np.float32)
    # Some rows at a time, so that NumPy's temporaries stay small beside the copies that a server would hold.
    step = _rows_together(weights.shape, FOLD_PORTION)
    with np.errstate(over="ignore", invalid="ignore"):
        for values, out, g in zip(weights, folded, encode, strict=True):
            for first in range(0, len(values), step):
                np.multiply(bf16_to_f32(values[first : first + step]), g, out=out[first : first + step])
    if not cast:
        return folded
    rounded = np.empty(weights.shape, BFLOAT16)
    for products, out in zip(folded, rounded, strict=True):
        for first in range(0, len(products), step):
            out[first : first + step] = f32_to_bf16(products[first : first + step])
    return rounded


def pack_online(
    weights: Array, way: Way = "direct", *, tops: F32 | None = None, path: AutoPath = "auto"
) -> OnlineWeights:
    """Quantise all experts' weights as a server does at load.

    Parameters
    ----------
    weights : (E, N, K) bfloat16
        K a multiple of 16; gate and up rows of an expert together, because they share a scale.
    way
        Of `WAYS`.
    tops : (E,) float32
        Maxima from elsewhere; see `expert_scales`.
    path
        ``"reference"``: scalar by scalar, for reading and for tests; equal bits.

    Raises
    ------
    FormatError
        ``online.weights`` (not three axes of BF16, or empty), ``online.way``, and what `quantize` refuses.
    """
    array = expert_weights(weights)
    if way not in WAYS:
        raise FormatError("online.way", way=way, known=", ".join(WAYS))
    encode = expert_scales(array, tops, path)
    with np.errstate(divide="ignore"):
        scale_2 = np.divide(ONE, encode, dtype=np.float32)
    if way == "direct":
        experts, rows, columns = array.shape
        # Into their places: a list of experts that is stacked at the end holds everything twice.
        packed = np.empty((experts, rows, columns // 2), np.uint8)
        scales = np.empty((experts, rows, columns // BLOCK), np.uint8)
        step = _rows_together(array.shape, QUANTIZE_PORTION)
        for e, first in itertools.product(range(experts), range(0, rows, step)):
            some = slice(first, first + step)
            _quantize_into(packed[e, some], scales[e, some], array[e, some], encode[e], path)
        return OnlineWeights(way, packed, scales, encode, scale_2, experts)
    cast = way == "folded_bf16"
    folded = _fold_reference(array, encode, cast) if by_reference(path) else fold(array, encode, cast=cast)
    whole = quantize(folded, recipe=RECIPE, global_scale=ONE, path=path)
    return OnlineWeights(way, whole.packed, whole.scales, encode, scale_2, 1)


def _quantize_into(packed: U8, scales: U8, rows: Array, encode: np.float32, path: AutoPath) -> None:
    one = quantize(rows, recipe=RECIPE, global_scale=encode, path=path)
    packed[...], scales[...] = one.packed, one.scales


def _fold_reference(weights: Array, encode: F32, cast: bool) -> Array:
    """Element by element: one float32 product, and for the cast the nearest BF16, ties to even."""
    out = np.empty(weights.shape, np.float32)
    for at in np.ndindex(weights.shape):
        with np.errstate(over="ignore", invalid="ignore"):
            product = np.float32(np.float32(weights[at]) * np.float32(encode[at[0]]))
        out[at] = widen_bf16_scalar(bf16_bits_scalar(float(product))) if cast else product
    return out.astype(BFLOAT16) if cast else out


# ------------------------------------------------------------------ the ways compared


@dataclass(frozen=True, slots=True, eq=False)
class WayResult:
    """One way against the direct one, and against the BF16 weight.

    Attributes
    ----------
    weights
    codes_differ, scales_differ : int
        Of all codes and block-scale bytes, how many are not the direct way's.
    codes, blocks : int
        How many there are.
    summary
        Error of the decoded weight.
    buffers
        Bytes of each array that is alive at the peak, counted from shapes; see `peak_buffers`.
    """

    weights: OnlineWeights
    codes_differ: int
    scales_differ: int
    codes: int
    blocks: int
    summary: ErrorSummary
    buffers: dict[str, int]

    @property
    def way(self) -> Way:
        return self.weights.way

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return sum(self.buffers.values())


def compare_ways(weights: Array) -> tuple[WayResult, ...]:
    """All three ways on ``weights (E, N, K)`` BF16."""
    values = bf16_to_f32(weights)
    found: list[WayResult] = []
    direct = pack_online(weights, "direct")
    for way in WAYS:
        made = direct if way == "direct" else pack_online(weights, way)
        found.append(
            WayResult(
                made,
                _codes_differ(made.packed, direct.packed),
                int((made.scales != direct.scales).sum()),
                made.packed.size * 2,
                made.scales.size,
                summarise(values, made.decode()),
                peak_buffers(weights.shape, way),
            )
        )
    return tuple(found)


def _codes_differ(a: U8, b: U8) -> int:
    changed = a ^ b
    return int(((changed & 0x0F) != 0).sum() + ((changed >> 4) != 0).sum())


def peak_buffers(shape: tuple[int, ...], way: Way) -> dict[str, int]:
    """Bytes of every array alive at the peak of packing ``(E, N, K)`` at once, without the BF16 weight itself.

    Counted from the shape: what a way cannot do without, on any device.  While the folded product is cast, float32 and
    BF16 copies live together; while it is quantised, the copy that is read lives with the output.
    `nvfp4viz.quant.online_memory` measures what this library really holds, and `work_space` says what that is more.

    >>> peak_buffers((2, 16, 32), "folded_bf16")
    {'folded_f32': 4096, 'folded_bf16': 2048}
    """
    elements = int(np.prod(shape))
    output = {"codes": elements // 2, "block_scales": elements // BLOCK}
    if way == "direct":
        return output
    if way == "folded_f32":
        return {"folded_f32": 4 * elements, **output}
    return {"folded_f32": 4 * elements, "folded_bf16": 2 * elements}


def work_space(shape: tuple[int, ...], way: Way) -> int:
    """Most bytes of arrays that `pack_online` holds at its peak besides `peak_buffers`, for ``(E, N, K)``.

    ``direct``        codes and block scales of the rows at hand before they are in their places, and a flag a block:
                      whether the kernel left it to the NumPy path
    ``folded_f32``    a flag a block of the whole weight
    ``folded_bf16``   3 bytes an element of the rows being rounded: the BF16 of `f32_to_bf16` before it is in its place,
                      and whether it is a NaN (where one is, it holds more)

    >>> work_space((2, 16, 32), "direct"), work_space((2, 16, 32), "folded_f32")
    (320, 64)
    """
    columns = shape[2]
    if way == "direct":
        some = _rows_together(shape, QUANTIZE_PORTION) * columns
        return some // 2 + 2 * (some // BLOCK)
    if way == "folded_f32":
        return int(np.prod(shape)) // BLOCK
    return 3 * _rows_together(shape, FOLD_PORTION) * columns


@dataclass(frozen=True, slots=True, eq=False)
class Lost:
    """One element whose code the cast changed, followed through the three ways.

    Attributes
    ----------
    expert, row, column : int
    weight : float32
        As stored in BF16.
    encode : float32
        G.
    folded, cast : float32
        ``w · G`` before and after the cast.
    traces
        Its block in the order of `WAYS`; ``column % 16`` is its place in it.
    """

    expert: int
    row: int
    column: int
    weight: np.float32
    encode: np.float32
    folded: np.float32
    cast: np.float32
    traces: tuple[BlockTrace, ...]


def first_lost(weights: Array, ways: tuple[WayResult, ...], index: int = 0) -> Lost | None:
    """The ``index``-th element (wrapping around) whose code differs between direct and cast; None if none does."""
    direct, _, cast = (result.weights for result in ways)
    changed = direct.packed ^ cast.packed
    nibbles = np.stack([changed & 0x0F, changed >> 4], axis=-1).reshape(*changed.shape[:-1], -1)
    places = np.argwhere(nibbles)
    if not len(places):
        return None
    expert, row, column = (int(k) for k in places[index % len(places)])
    first = column // BLOCK * BLOCK
    block = np.asarray(weights)[expert, row, first : first + BLOCK]
    g = direct.encode[expert]
    one = block[None, None]
    scale = np.array([g], np.float32)
    inputs = (block, fold(one, scale, cast=False)[0, 0], fold(one, scale, cast=True)[0, 0])
    traces = tuple(trace_block(x, global_scale=s, recipe=RECIPE) for x, s in zip(inputs, (g, ONE, ONE), strict=True))
    at = column % BLOCK
    return Lost(
        expert, row, column, np.float32(block[at]), g, np.float32(inputs[1][at]), np.float32(inputs[2][at]), traces
    )


# ------------------------------------------------------------------ tensor-parallel ranks


@dataclass(frozen=True, slots=True, eq=False)
class RankResult:
    """The shards of all ranks put together again, with a shared or a local maximum.

    Attributes
    ----------
    shared : bool
    ranks : int
    scales_2 : (R, E) float32
        ``weight_scale_2`` on each rank.
    codes_differ, scales_differ, codes, blocks : int
        Against one rank that holds everything.
    summary
        Error of the decoded whole.
    """

    shared: bool
    ranks: int
    scales_2: F32 = field(repr=False)
    codes_differ: int
    scales_differ: int
    codes: int
    blocks: int
    summary: ErrorSummary


def shard(weights: Array, ranks: int, projection: str) -> tuple[Array, ...]:
    """What each tensor-parallel rank holds of ``(E, N, K)``.

    ``"gate_up"`` is cut by rows, each rank its part of gate and its part of up; ``"down"`` by columns.

    Raises
    ------
    FormatError
        ``online.ranks`` unless every rank gets whole blocks of equal number.
    """
    size = weights.shape[1] // 2 if projection == "gate_up" else weights.shape[2] // BLOCK
    if ranks < 1 or size % ranks:
        raise FormatError("online.ranks", ranks=ranks, size=size)
    if projection == "down":
        return tuple(np.split(weights, ranks, axis=2))
    gate, up = np.split(weights, 2, axis=1)
    pairs = zip(np.split(gate, ranks, axis=1), np.split(up, ranks, axis=1), strict=True)
    return tuple(np.concatenate(pair, axis=1) for pair in pairs)


def _join(parts: list[Array], projection: str) -> Array:
    if projection == "down":
        return np.concatenate(parts, axis=2)
    halves = [np.split(part, 2, axis=1) for part in parts]
    return np.concatenate([half[k] for k in (0, 1) for half in halves], axis=1)


def compare_ranks(weights: Array, ranks: int, projection: str) -> tuple[RankResult, RankResult]:
    """Pack every rank's shard with the maximum shared over ranks, and with each rank's own; directly.

    Raises
    ------
    FormatError
        ``online.ranks``.
    """
    whole = pack_online(weights)
    parts = shard(weights, ranks, projection)
    tops = np.array([amax(w) for w in weights], np.float32)
    found = []
    for shared in (True, False):
        made = [pack_online(part, tops=tops if shared else None) for part in parts]
        packed = _join([one.packed for one in made], projection)
        scales = _join([one.scales for one in made], projection)
        decoded = _join([one.decode() for one in made], projection)
        found.append(
            RankResult(
                shared,
                ranks,
                np.stack([one.scale_2 for one in made]),
                _codes_differ(packed, whole.packed),
                int((scales != whole.scales).sum()),
                packed.size * 2,
                scales.size,
                summarise(bf16_to_f32(weights), decoded),
            )
        )
    return found[0], found[1]
