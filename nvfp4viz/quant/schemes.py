"""MXFP4 beside NVFP4: one tensor in both schemes, and the scale rules of MXFP4 on one block.

The schemes differ in three things: how many elements share a scale (32 or 16), what a scale can be (a power of two in
UE8M0, or one of E4M3's eight steps a doubling), and whether a float32 scale of the whole tensor stands above the block
scales.  UE8M0 reaches every binade of float32, so that it needs none; E4M3 does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import BLOCK, E2M1, MX_BLOCK, bf16_to_f32, decode_e4m3, decode_ue8m0, pack_nibbles
from nvfp4viz.quant.api import dequantize, quantize, reference_block
from nvfp4viz.quant.compare import ErrorSummary, summarise
from nvfp4viz.quant.grouping import storage
from nvfp4viz.quant.recipes import MXFP4_RECIPES, NVFP4_RECIPES, Scheme, find_recipe
from nvfp4viz.quant.types import QuantizedTensor, Step

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

SchemeName = Literal["mxfp4", "ue8m0_16", "nvfp4"]
SCHEMES: tuple[SchemeName, ...] = get_args(SchemeName)
SIGNIFICANDS = 128
"""BF16 numbers in a binade."""


# ------------------------------------------------------------------ one tensor in both


@dataclass(frozen=True, slots=True, eq=False)
class SchemeResult:
    """A matrix in one scheme.

    Attributes
    ----------
    name
        ``"mxfp4"``, ``"nvfp4"``, or ``"ue8m0_16"``: MXFP4's rule on blocks of 16.  Nobody ships that; it tells what
        the smaller block brings from what the finer scale brings, as it costs the same bits as NVFP4.
    block
        Elements that share a scale.
    bits
        Bits an element, block scales included; NVFP4's one float32 a tensor is not.
    scale_bytes : (R, K // block) uint8
        UE8M0 or E4M3.
    scales : (R, K // block) float32
        What a code is multiplied by: the block scale, for NVFP4 times the tensor's decode scale.
    decoded : (R, K) float32
    summary
        Against the original.
    """

    name: SchemeName
    block: int
    bits: float
    scale_bytes: U8
    scales: F32
    decoded: F32
    summary: ErrorSummary

    def used(self) -> tuple[tuple[int, float, int], ...]:
        """``(byte, scale, blocks)`` for every scale byte that occurs, by byte."""
        bytes_, first, counts = np.unique(self.scale_bytes, return_index=True, return_counts=True)
        scales = self.scales.reshape(-1)[first]
        return tuple((int(b), float(s), int(n)) for b, s, n in zip(bytes_, scales, counts, strict=True))


def compare_schemes(x: Array, mx_recipe: str = "vllm-even", recipe: str = "vllm-cuda") -> tuple[SchemeResult, ...]:
    """The same matrix in the three schemes, in the order of ``SCHEMES``; NVFP4 with the matrix's own maximum.

    Parameters
    ----------
    x : (R, K) bfloat16 or float32
        Finite; K a multiple of 32.
    mx_recipe
        A name of ``MXFP4_RECIPES``.
    recipe
        A name of ``NVFP4_RECIPES``.

    Raises
    ------
    FormatError
        ``compare.shape``; ``recipe.unknown``; ``quantize.dtype``.

    Examples
    --------
    >>> [(one.name, one.block, one.bits) for one in compare_schemes(np.ones((1, 32), np.float32))]
    [('mxfp4', 32, 4.25), ('ue8m0_16', 16, 4.5), ('nvfp4', 16, 4.5)]
    """
    _known(mx_recipe, MXFP4_RECIPES)
    _known(recipe, NVFP4_RECIPES)
    array = np.asarray(x)
    values = array.astype(np.float32)
    if array.ndim != 2 or array.size == 0 or array.shape[1] % MX_BLOCK or not np.isfinite(values).all():
        raise FormatError("compare.shape", shape=array.shape, block=MX_BLOCK)
    # Sixteen zeros behind every sixteen elements: MXFP4's rule then sees blocks of 16.
    padded = np.zeros((len(array), array.shape[1] // BLOCK, MX_BLOCK), array.dtype)
    padded[..., :BLOCK] = array.reshape(len(array), -1, BLOCK)
    mx, half = quantize(array, recipe=mx_recipe), quantize(padded.reshape(len(array), -1), recipe=mx_recipe)
    # A tensor of zeros has no range to place.
    nv = quantize(array, recipe=recipe, global_scale=None if values.any() else 1)
    halves = dequantize(half).reshape(padded.shape)[..., :BLOCK].reshape(array.shape)
    with np.errstate(all="ignore"):
        nv_scales = decode_e4m3(nv.scales) * nv.decode_scale
    return (
        _result("mxfp4", MX_BLOCK, values, mx.scales, decode_ue8m0(mx.scales), dequantize(mx)),
        _result("ue8m0_16", BLOCK, values, half.scales, decode_ue8m0(half.scales), halves),
        _result("nvfp4", BLOCK, values, nv.scales, nv_scales, dequantize(nv)),
    )


def _known(recipe: str, names: tuple[str, ...]) -> None:
    if recipe not in names:
        raise FormatError("recipe.unknown", name=recipe, known=", ".join(names))


def _result(name: SchemeName, block: int, values: F32, bytes_: U8, scales: F32, decoded: F32) -> SchemeResult:
    with np.errstate(all="ignore"):
        # The decode scale is a rounded reciprocal, so a value exactly at the limit may seem a few ulps beyond it.
        limit = np.where(scales == 0, np.inf, scales * np.float32(E2M1.max_value) * (1 + 2.0**-20))
    clipped = int((np.abs(values) > np.repeat(limit, block, axis=1)).sum())
    return SchemeResult(name, block, 4 + 8 / block, bytes_, scales, decoded, summarise(values, decoded, clipped))


# ------------------------------------------------------------------ what a scale byte can say


@dataclass(frozen=True, slots=True)
class ScaleFacts:
    """The values that a block scale may have, from the format's table.

    ``values`` counts the positive finite ones (E4M3's sign bit is never set in a scale), ``per_doubling`` those from 1
    up to but not including 2; ``zero`` says whether a scale can be 0, ``nan`` which byte is NaN.
    """

    name: str
    values: int
    smallest: float
    largest: float
    per_doubling: int
    zero: bool
    nan: int


def scale_facts() -> tuple[ScaleFacts, ScaleFacts]:
    """UE8M0's and E4M3's, in this order.

    >>> [(facts.name, facts.values, facts.per_doubling) for facts in scale_facts()]
    [('UE8M0', 255, 1), ('E4M3', 126, 8)]
    """
    return (
        _facts("UE8M0", decode_ue8m0(np.arange(256, dtype=np.uint8))),
        _facts("E4M3", decode_e4m3(np.arange(128, dtype=np.uint8))),
    )


def _facts(name: str, table: F32) -> ScaleFacts:
    positive = table[np.isfinite(table) & (table > 0)]
    return ScaleFacts(
        name,
        len(positive),
        float(positive.min()),
        float(positive.max()),
        int(((positive >= 1) & (positive < 2)).sum()),
        bool((table == 0).any()),
        int(np.flatnonzero(np.isnan(table))[0]),
    )


# ------------------------------------------------------------------ the rules on one block


@dataclass(frozen=True, slots=True, eq=False)
class RuleTrace:
    """One MXFP4 block under one rule, by the scalar reference.

    Attributes
    ----------
    recipe
    x : (32,) float32
    steps
        Maximum, for the ceilings a sixth of it, and the factor.
    scale_byte, scale
        The UE8M0 byte and its value.
    products : (32,) float32
        The elements after scaling, before they become codes.
    codes : (32,) uint8
    decoded : (32,) float32
    summary
        ``clipped`` counts products beyond 6.
    """

    recipe: str
    x: F32
    steps: tuple[Step, ...]
    scale_byte: int
    scale: np.float32
    products: F32
    codes: U8
    decoded: F32
    summary: ErrorSummary

    @property
    def top(self) -> int:
        """Place of the block's largest element; the first of several."""
        return int(np.argmax(np.abs(self.x)))

    @property
    def clips_top(self) -> bool:
        """Whether the largest element lies beyond what its scale can express."""
        return bool(abs(self.products[self.top]) > E2M1.max_value)


def compare_rules(x: Array) -> dict[str, RuleTrace]:
    """A block ``(32,)``, bfloat16 or float32, under every MXFP4 recipe.

    NaN and infinities are followed like any number; the error summary is then NaN or infinite.

    Raises
    ------
    FormatError
        ``trace.shape``; ``quantize.dtype``.

    Examples
    --------
    >>> block = np.float32([6.5] + [1] * 31)
    >>> {name: (trace.scale_byte, trace.clips_top) for name, trace in compare_rules(block).items()}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'ocp-floor': (127, True), 'vllm-even': (127, True), 'flashinfer-ceil': (128, False),
     'deepgemm-ceil': (128, False), 'modelopt-mxfp4': (128, False)}
    """
    array = np.asarray(x)
    if array.dtype not in (BFLOAT16, np.dtype(np.float32)):
        raise FormatError("quantize.dtype", dtype=array.dtype)
    if array.shape != (MX_BLOCK,):
        raise FormatError("trace.shape", shape=array.shape, block=MX_BLOCK)
    values = bf16_to_f32(array) if array.dtype == BFLOAT16 else array.copy()
    return {name: _trace(values, name) for name in MXFP4_RECIPES}


def _trace(values: F32, recipe: str) -> RuleTrace:
    block = reference_block(values, find_recipe(recipe), np.float32(1))
    codes, products = np.array(block.codes, np.uint8), np.array(block.products, np.float32)
    bytes_ = np.array([block.byte], np.uint8)
    decoded = dequantize(
        QuantizedTensor(pack_nibbles(codes), bytes_, np.float32(1), recipe, MX_BLOCK, (MX_BLOCK,)), path="numpy"
    )
    clipped = int((np.abs(products) > E2M1.max_value).sum())
    scale = np.float32(decode_ue8m0(bytes_)[0])
    with np.errstate(all="ignore"):
        summary = summarise(values, decoded, clipped)
    return RuleTrace(recipe, values, block.steps, block.byte, scale, products, codes, decoded, summary)


# ------------------------------------------------------------------ where the rules part


@dataclass(frozen=True, slots=True)
class RuleRun:
    """Neighbouring maxima ``first`` to ``last``, both included, that get one scale and one fate."""

    first: float
    last: float
    scale_byte: int
    clips: bool


@dataclass(frozen=True, slots=True, eq=False)
class RuleBinade:
    """Every BF16 maximum of a binade under every rule.

    Attributes
    ----------
    tops : (128,) float32
        The maxima, ascending from a power of two.
    scale_bytes : recipe → (128,) uint8
    decoded : recipe → (128,) float32
        What the maximum itself becomes.
    """

    tops: F32
    scale_bytes: Mapping[str, U8]
    decoded: Mapping[str, F32]

    def clips(self, recipe: str) -> npt.NDArray[np.bool_]:
        """``(128,)``: whether the maximum lies beyond 6 · scale.  In float64, where that product is exact."""
        result: npt.NDArray[np.bool_] = self.tops.astype(np.float64) > E2M1.max_value * decode_ue8m0(
            self.scale_bytes[recipe]
        ).astype(np.float64)
        return result

    def runs(self, recipe: str) -> tuple[RuleRun, ...]:
        """The binade cut where the rule's scale changes or clipping begins."""
        bytes_, clips = self.scale_bytes[recipe], self.clips(recipe)
        cuts = np.flatnonzero((np.diff(bytes_.astype(np.int32)) != 0) | (clips[1:] != clips[:-1])) + 1
        edges = [0, *cuts.tolist(), len(bytes_)]
        return tuple(
            RuleRun(float(self.tops[a]), float(self.tops[b - 1]), int(bytes_[a]), bool(clips[a]))
            for a, b in pairwise(edges)
        )


def rule_binade(exponent: int) -> RuleBinade:
    """The maxima from ``2^exponent`` up to the next power of two; exponent from −126 to 127.

    >>> [(run.first, run.last, run.scale_byte, run.clips) for run in rule_binade(2).runs("vllm-even")]
    [(4.0, 6.0, 127, False), (6.03125, 6.96875, 127, True), (7.0, 7.96875, 128, False)]
    """
    tops = np.ldexp(1 + np.arange(SIGNIFICANDS) / SIGNIFICANDS, exponent).astype(np.float32)
    blocks = np.zeros((SIGNIFICANDS, MX_BLOCK), np.float32)
    blocks[:, 0] = tops
    made = {name: quantize(blocks, recipe=name, path="numpy") for name in MXFP4_RECIPES}
    return RuleBinade(
        tops,
        {name: q.scales[:, 0] for name, q in made.items()},
        {name: dequantize(q, path="numpy")[:, 0] for name, q in made.items()},
    )


# ------------------------------------------------------------------ bytes of a layer


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What the matrices of a layer take in a checkpoint, in bytes.

    ``tensor_scales`` are ModelOpt's float32 ``weight_scale_2`` and ``input_scale``, one of each a matrix in W4A4;
    MXFP4 has neither.
    """

    elements: int
    codes: int
    block_scales: int
    tensor_scales: int

    @property
    def total(self) -> int:
        return self.codes + self.block_scales + self.tensor_scales

    @property
    def bits(self) -> float:
        """Bits a weight, everything included."""
        return 8 * self.total / self.elements


def layer_bytes(matrices: Sequence[tuple[int, int]], scheme: Scheme) -> LayerBytes:
    """Bytes of matrices ``(N, K)`` in a scheme.

    Raises
    ------
    FormatError
        ``grouping.shape`` if a K is no multiple of the block.

    >>> layer_bytes([(128, 64)], "nvfp4")
    LayerBytes(elements=8192, codes=4096, block_scales=512, tensor_scales=8)
    """
    stored = [storage(n, k, scheme) for n, k in matrices]
    return LayerBytes(
        sum(n * k for n, k in matrices),
        sum(one.packed_bytes for one in stored),
        sum(one.scale_bytes for one in stored),
        8 * len(stored) if scheme == "nvfp4" else 0,
    )
