"""What the scales are for: a tensor without them, with one level, with two, and with scales shared more or less widely.

Everything here is measured on the tensor that is given; nothing is a rule of thumb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import BLOCK, E2M1, E4M3, bf16_to_f32, decode_e2m1, decode_e4m3, encode_e2m1
from nvfp4viz.quant.api import dequantize, quantize
from nvfp4viz.quant.nvfp4 import block_max
from nvfp4viz.quant.recipes import NVFP4_RECIPES
from nvfp4viz.quant.scales import amax, global_scale
from nvfp4viz.quant.trace import trace_block
from nvfp4viz.quant.types import BlockTrace

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Level = Literal["none", "one", "two"]
SIX = np.float32(6)

E4M3_SATURATES = E4M3.max_value + 2.0**4
"""464: half a step of the top binade beyond 448.  A scale up to here is rounded to 448 like any other, above it is cut
off.  The tensor's own maximum asks for 448 give or take a rounding, so 448 itself is no limit to compare with."""


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """How far the decoded tensor is from the original.

    ``mse`` is the mean squared error, ``sqnr_db`` the ratio of signal to error power in decibels (inf for an exact
    copy), ``zeroed`` the number of non-zero elements that became zero, ``clipped`` those beyond the largest value that
    their scale can express, which a block's maximum is where E4M3 rounded the scale down.
    """

    mse: float
    sqnr_db: float
    max_abs: float
    zeroed: int
    clipped: int


@dataclass(frozen=True, slots=True, eq=False)
class ScalingLevel:
    """One tensor under one way of scaling.

    Attributes
    ----------
    level
        ``"none"``: elements are rounded to E2M1 as they are.  ``"one"``: an E4M3 scale for every 16, nothing above it.
        ``"two"``: the same, and a global scale that places the blocks in E4M3's range (NVFP4).
    decoded, error : (N, K) float32
        ``error = decoded − x``.
    block_scales : (N, K//16) float32 or None
        What E4M3 gave, and under ``asked`` what was asked of it.
    asked : (N, K//16) float32 or None
    global_scale : float32 or None
        The encode scale; 1 for one level.
    dead, subnormal, saturated : int
        Blocks whose scale became 0 although they hold numbers; whose scale is an E4M3 subnormal; whose scale was beyond
        448.
    summary
    """

    level: Level
    decoded: F32
    error: F32
    block_scales: F32 | None
    asked: F32 | None
    global_scale: np.float32 | None
    dead: int
    subnormal: int
    saturated: int
    summary: ErrorSummary


@dataclass(frozen=True, slots=True)
class RangeFacts:
    """The range of two-level scaling, from the tables of the formats.

    Attributes
    ----------
    element_max, scale_max, product
        6, 448 and 2688: the largest magnitude at global scale 1, and so the numerator of 2688/amax.
    scale_min_normal, scale_min
        2^-6 and 2^-9.
    scale_span
        Largest over smallest non-zero block scale.
    dies_below
        A block whose maximum is at most this fraction of the tensor's gets scale 0, if the tensor's own maximum made
        the global scale: half the smallest scale, seen from the largest.
    coarse_below
        Below this fraction the scale is subnormal and has fewer than three mantissa bits.
    """

    element_max: float
    scale_max: float
    product: float
    scale_min_normal: float
    scale_min: float
    scale_span: float
    dies_below: float
    coarse_below: float


@dataclass(frozen=True, slots=True, eq=False)
class LadderRung:
    """Error when a scale is shared by ``elements_per_scale`` elements.

    ``name``: ``"tensor"``, ``"expert"``, ``"channel"``, ``"group"``, ``"block"`` (exact float32 scales, so that only
    the sharing differs) or ``"nvfp4"`` (block scales in E4M3 under one global scale an expert).  ``scale_bits`` is the
    cost of the scales in bits an element.
    """

    name: str
    elements_per_scale: int
    scale_bits: float
    summary: ErrorSummary


@dataclass(frozen=True, slots=True)
class HeadroomPoint:
    """The tensor under a global scale made for ``factor`` times its real maximum."""

    factor: float
    global_scale: np.float32
    dead: int
    subnormal: int
    saturated: int
    summary: ErrorSummary


def range_facts() -> RangeFacts:
    """The numbers that people quote, computed.

    >>> facts = range_facts()
    >>> facts.product, facts.scale_span, round(1 / facts.dies_below)
    (2688.0, 229376.0, 458752)
    """
    elements = decode_e2m1(np.arange(8, dtype=np.uint8))
    scales = decode_e4m3(np.arange(127, dtype=np.uint8))
    element_max, scale_max, scale_min = float(elements.max()), float(scales.max()), float(scales[scales > 0].min())
    return RangeFacts(
        element_max=element_max,
        scale_max=scale_max,
        product=element_max * scale_max,
        scale_min_normal=E4M3.min_normal,
        scale_min=scale_min,
        scale_span=scale_max / scale_min,
        dies_below=scale_min / 2 / scale_max,
        coarse_below=E4M3.min_normal / scale_max,
    )


def compare_scaling(x: Array) -> tuple[ScalingLevel, ScalingLevel, ScalingLevel]:
    """A matrix ``(N, K)`` under no scale, one level and two levels, by the ``ieee`` recipe.

    Raises
    ------
    FormatError
        ``compare.shape`` unless a matrix of finite numbers with K a multiple of 16; ``quantize.dtype``.

    Examples
    --------
    >>> none, one, two = compare_scaling(np.full((1, 16), 2.0**-12, np.float32))
    >>> [level.summary.zeroed for level in (none, one, two)], one.dead
    ([16, 16, 0], 1)
    """
    values = _matrix(x)
    return _unscaled(values), _scaled(values, "one", np.float32(1)), _scaled(values, "two", _encode(values))


def granularity_ladder(x: Array, group: int = 128) -> tuple[LadderRung, ...]:
    """E2M1 with scales shared by a tensor, an expert, a channel (row), a group and a block, then NVFP4 itself.

    Parameters
    ----------
    x : (N, K) or (E, N, K) bfloat16 or float32
        A matrix, or the stacked weights of E experts (only then is there an ``"expert"`` rung).
    group
        Elements of the group rung; K must be a multiple of it.

    Raises
    ------
    FormatError
        ``compare.shape``, ``compare.group``, ``quantize.dtype``.
    """
    stacked = np.asarray(x)
    experts = stacked.shape[0] if stacked.ndim == 3 else 1
    values = _matrix(stacked.reshape(-1, stacked.shape[-1]) if stacked.ndim == 3 else stacked)
    rows, columns = values.shape
    if group < 1 or columns % group:
        raise FormatError("compare.group", group=group, k=columns)
    sharing = {"tensor": rows * columns, "expert": rows * columns // experts, "channel": columns, "group": group}
    if experts == 1:
        del sharing["expert"]
    rungs = [_rung(name, values, size) for name, size in {**sharing, "block": BLOCK}.items()]
    parts = [_scaled(part, "two", _encode(part)) for part in np.split(values, experts)]
    decoded = np.concatenate([part.decoded for part in parts])
    clipped = sum(part.summary.clipped for part in parts)
    rungs.append(
        LadderRung("nvfp4", BLOCK, 8 / BLOCK + 32 * experts / values.size, summarise(values, decoded, clipped))
    )
    return tuple(rungs)


def sweep_headroom(x: Array, factors: Sequence[float]) -> tuple[HeadroomPoint, ...]:
    """What a wrong maximum costs: the global scale is made for ``factor · amax``, for each factor.

    Below 1 the largest blocks saturate; far above 1 the small ones die.

    Raises
    ------
    FormatError
        ``compare.shape``, ``quantize.dtype``.

    Examples
    --------
    >>> x = np.float32([[2688.0] * 16 + [0.03125] * 16])
    >>> [(p.factor, p.saturated, p.dead) for p in sweep_headroom(x, [0.25, 1.0, 8.0])]
    [(0.25, 1, 0), (1.0, 0, 0), (8.0, 0, 1)]
    """
    values = _matrix(x)
    points = []
    for factor in factors:
        encode = global_scale(np.float32(factor) * amax(values), "ieee")
        level = _scaled(values, "two", encode)
        points.append(
            HeadroomPoint(factor, encode, level.dead, level.subnormal, level.saturated, level.summary)
        )  # fmt: skip
    return tuple(points)


def compare_recipes(x: Array, tensor_amax: npt.ArrayLike) -> dict[str, BlockTrace]:
    """One block under every NVFP4 recipe, each with its own global scale for the same tensor maximum.

    Parameters
    ----------
    x : (16,) bfloat16 or float32
    tensor_amax
        Largest magnitude of the tensor that the block belongs to.
    """
    dtype = np.asarray(x).dtype
    return {name: trace_block(x, global_scale(tensor_amax, name, dtype), name) for name in NVFP4_RECIPES}


# ---------------------------------------------------------------------------------------------------- inside


def _matrix(x: Array) -> F32:
    array = np.asarray(x)
    if array.dtype == np.dtype(ml_dtypes.bfloat16):
        array = bf16_to_f32(array)
    elif array.dtype != np.float32:
        raise FormatError("quantize.dtype", dtype=array.dtype)
    if array.ndim != 2 or array.size == 0 or array.shape[1] % BLOCK or not np.isfinite(array).all():
        raise FormatError("compare.shape", shape=array.shape, block=BLOCK)
    return np.ascontiguousarray(array)


def _encode(values: F32) -> np.float32:
    """2688/amax, or 1 for a tensor of zeros, which has no range to place."""
    top = amax(values)
    return global_scale(top, "ieee") if top > 0 else np.float32(1)


def _unscaled(values: F32) -> ScalingLevel:
    decoded = decode_e2m1(encode_e2m1(values))
    clipped = int((np.abs(values) > E2M1.max_value).sum())
    return ScalingLevel(
        "none", decoded, decoded - values, None, None, None, 0, 0, 0, summarise(values, decoded, clipped)
    )


def _scaled(values: F32, level: Level, encode: np.float32) -> ScalingLevel:
    q = quantize(values, recipe="ieee", global_scale=encode)
    decoded = np.array(dequantize(q), np.float32)
    tops = block_max(values.reshape(len(values), -1, BLOCK), nan_wins=False)
    with np.errstate(all="ignore"):
        asked = encode * (tops / SIX)
        reach = decode_e4m3(q.scales) * q.decode_scale * SIX
    scales = decode_e4m3(q.scales)
    # The decode scale is a rounded reciprocal, so a value exactly at the limit may seem a few ulps beyond it.
    limit = np.where(scales == 0, np.inf, reach * (1 + 2.0**-20))
    clipped = int((np.abs(values) > np.repeat(limit, BLOCK, axis=1)).sum())
    return ScalingLevel(
        level,
        decoded,
        decoded - values,
        scales,
        asked,
        encode,
        int(((scales == 0) & (tops > 0)).sum()),
        int(((scales > 0) & (scales < E4M3.min_normal)).sum()),
        int((asked > E4M3_SATURATES).sum()),
        summarise(values, decoded, clipped),
    )


def _rung(name: str, values: F32, size: int) -> LadderRung:
    """Exact float32 scales amax/6 over runs of ``size`` elements."""
    runs = values.reshape(-1, size)
    scale = np.abs(runs).max(axis=1, keepdims=True) / SIX
    with np.errstate(all="ignore"):
        decoded = np.where(scale == 0, np.float32(0), decode_e2m1(encode_e2m1(runs / scale)) * scale)
    return LadderRung(name, size, 32 / size, summarise(values, decoded.reshape(values.shape), 0))


def summarise(values: npt.NDArray[Any], decoded: npt.NDArray[Any], clipped: int = 0) -> ErrorSummary:
    """The error of ``decoded`` against ``values``, of any one shape; ``clipped`` is counted by the caller."""
    difference = decoded.astype(np.float64) - values.astype(np.float64)
    mse = float(np.mean(difference**2))
    power = float(np.mean(values.astype(np.float64) ** 2))
    zeroed = int(((values != 0) & (decoded == 0)).sum())
    return ErrorSummary(mse, decibels(power, mse), float(np.abs(difference).max()), zeroed, clipped)


def decibels(power: float, error: float) -> float:
    """Signal to error power: inf without an error, -inf without a signal, else NaN where either is NaN.

    >>> decibels(100.0, 1.0), decibels(1.0, 0.0), decibels(0.0, 1.0), decibels(0.0, float("nan"))
    (20.0, inf, -inf, -inf)
    """
    if error == 0:
        return float("inf")
    return 10 * float(np.log10(power / error)) if power else float("-inf")
