"""Sixteen elements share a scale: which sixteen?  Blocks along K, along the rows (M or N), or in tiles of 4 × 4.

All three cost the same 4.5 bits an element, and each uses the arithmetic of :func:`nvfp4viz.quant.quantize` on its own
groups.  They differ in two ways:

- **Error.**  What shares a scale should be of one size.  Outlier *channels* are columns of K: a block along K then
  holds one large element and fifteen small ones, which become zero.  Where a weight makes up for the outliers, so
  that every channel counts in the product, blocks along the rows, each inside one channel, have the smaller error.
- **Arithmetic.**  ``y[m, n] = Σ_k x[m, k] · w[n, k]`` runs over k.  A scale that stays the same over 16 values of k
  comes out of the sum: one multiplication for 16 products, and a dot of 16 codes that is exact.  A scale that changes
  with every k stays inside.

The second decides: hardware has blocks along K alone, for both operands, whatever the first says.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import BLOCK, decode_e2m1, decode_e4m3, offset_8x4, offset_128x4, swizzled_size
from nvfp4viz.formats.paths import Path, by_reference
from nvfp4viz.quant.api import dequantize, quantize
from nvfp4viz.quant.compare import ErrorSummary, summarise
from nvfp4viz.quant.recipes import Scheme, find_recipe
from nvfp4viz.quant.tensor_core_step import BLOCK_SIZE
from nvfp4viz.quant.types import QuantizedTensor

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

Along = Literal["k", "rows", "tile"]
GROUPINGS: tuple[Along, ...] = get_args(Along)
GROUP_SHAPE: dict[str, tuple[int, int]] = {"k": (1, BLOCK), "rows": (BLOCK, 1), "tile": (4, 4)}
"""Rows × columns of K that share a scale."""
RECIPE = "vllm-cuda"


@dataclass(frozen=True, slots=True, eq=False)
class GroupedTensor:
    """A matrix whose scales are shared along a direction of choice.

    Attributes
    ----------
    along
        ``"k"``, ``"rows"`` or ``"tile"``.
    codes : (R, K) uint8
        E2M1 codes, one a byte.
    scales : (R // r, K // c) uint8
        E4M3 bytes, one for each group of ``r × c`` elements (``GROUP_SHAPE``).
    decoded : (R, K) float32
        Code × block scale × global scale, rounded as the recipe's dequantisation does.
    quantized
        The groups as the ``(groups, 16)`` tensor that was quantised.
    """

    along: Along
    codes: U8
    scales: U8
    decoded: F32
    quantized: QuantizedTensor

    @property
    def element_scales(self) -> F32:
        """``(R, K)`` float32: the block scale of every element, without the global scale."""
        rows, columns = GROUP_SHAPE[self.along]
        return np.repeat(np.repeat(decode_e4m3(self.scales), rows, axis=0), columns, axis=1)


def to_groups(x: Array, along: Along) -> Array:
    """``(R, K)`` to ``(R*K//16, 16)``: groups row by row, and the elements of each row by row.

    >>> to_groups(np.arange(32).reshape(16, 2), "rows")[1].tolist()[:3]
    [1, 3, 5]
    """
    rows, columns = _shape(x, along)
    groups = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    return np.ascontiguousarray(groups.transpose(0, 2, 1, 3)).reshape(-1, BLOCK)


def from_groups(groups: Array, shape: tuple[int, int], along: Along) -> Array:
    """The inverse of :func:`to_groups`."""
    rows, columns = GROUP_SHAPE[along]
    tiles = groups.reshape(shape[0] // rows, shape[1] // columns, rows, columns)
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3)).reshape(shape)


def _shape(x: Array, along: Along) -> tuple[int, int]:
    if along not in GROUP_SHAPE:
        raise FormatError("grouping.along", along=along, known=", ".join(GROUPINGS))
    rows, columns = GROUP_SHAPE[along]
    if x.ndim != 2 or x.size == 0 or x.shape[0] % rows or x.shape[1] % columns:
        raise FormatError("grouping.shape", shape=x.shape, along=along, rows=rows, columns=columns)
    return rows, columns


def quantize_along(
    x: Array, along: Along, recipe: str = RECIPE, path: Path = "auto", global_scale: npt.ArrayLike | None = None
) -> GroupedTensor:
    """Quantise ``(R, K)`` with sixteen elements to a scale, grouped along ``along``, under one global scale.

    Parameters
    ----------
    x : (R, K) bfloat16 or float32
    along
        ``"k"``: 1 × 16, as NVFP4 is; ``"rows"``: 16 × 1; ``"tile"``: 4 × 4.
    recipe
        An NVFP4 recipe.
    path
        ``"reference"`` gathers and quantises one group after the other with scalars; ``"numpy"``, ``"numba"`` and
        ``"auto"`` rearrange the whole matrix.  Equal bits.
    global_scale
        As the recipe stores it; by default the recipe's own from the matrix's maximum.

    Raises
    ------
    FormatError
        ``grouping.along``, ``grouping.shape`` if the groups do not tile the matrix, ``gemm.recipe`` for MXFP4, and
        those of :func:`nvfp4viz.quant.quantize`.
    """
    if find_recipe(recipe).scheme != "nvfp4":
        raise FormatError("gemm.recipe", a=recipe, b=RECIPE)
    _shape(x, along)
    if by_reference(path):
        return _by_reference(x, along, recipe, global_scale)
    found = quantize(to_groups(x, along), recipe=recipe, path=path, global_scale=global_scale)
    shape = (x.shape[0], x.shape[1])
    return _grouped(found, from_groups(dequantize(found, path=path), shape, along), shape, along)


def _grouped(found: QuantizedTensor, decoded: F32, shape: tuple[int, int], along: Along) -> GroupedTensor:
    rows, columns = GROUP_SHAPE[along]
    scales = found.scales.reshape(shape[0] // rows, shape[1] // columns)
    return GroupedTensor(along, from_groups(found.codes(), shape, along), scales, decoded, found)


def _by_reference(x: Array, along: Along, recipe: str, given: npt.ArrayLike | None) -> GroupedTensor:
    """One group at a time, its elements picked by row and column."""
    rows, columns = GROUP_SHAPE[along]
    # The global scale is the whole matrix's, whatever the grouping.
    whole = quantize(x.reshape(1, -1), recipe=recipe, path="reference", global_scale=given).global_scale
    codes = np.empty(x.shape, np.uint8)
    decoded = np.empty(x.shape, np.float32)
    scales = np.empty((x.shape[0] // rows, x.shape[1] // columns), np.uint8)
    packed = []
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            places = [(row, column) for row in range(top, top + rows) for column in range(left, left + columns)]
            group = np.array([x[place] for place in places], x.dtype)
            one = quantize(group, recipe=recipe, global_scale=whole, path="reference")
            for place, code, value in zip(places, one.codes(), dequantize(one, path="reference"), strict=True):
                codes[place], decoded[place] = code, value
            scales[top // rows, left // columns] = one.scales[0]
            packed.append(one.packed)
    groups = QuantizedTensor(np.stack(packed), scales.reshape(-1, 1), whole, recipe, BLOCK, (x.size // BLOCK, BLOCK))
    return GroupedTensor(along, codes, scales, decoded, groups)


# ------------------------------------------------------------------ what it costs


@dataclass(frozen=True, slots=True, eq=False)
class GroupedProduct:
    """A GEMM ``Y = X Wᵀ`` with both operands grouped the same way, against the product of the originals.

    Attributes
    ----------
    along
    x, w, y
        Error of the activations, of the weight, and of the product (in float64, so that only quantisation counts).
    scale_products
        How often an output is multiplied by scales: the number of runs of K over which no scale changes.
    """

    along: Along
    x: ErrorSummary
    w: ErrorSummary
    y: ErrorSummary
    scale_products: int


def compare_grouping(x: Array, w: Array, recipe: str = RECIPE) -> tuple[GroupedProduct, ...]:
    """The same GEMM under every grouping, in the order of ``GROUPINGS``.

    Parameters
    ----------
    x : (M, K) bfloat16 or float32
        Activations; M a multiple of 16.
    w : (N, K) bfloat16 or float32
        Weight; N a multiple of 16.

    Raises
    ------
    FormatError
        ``gemm.shape`` and those of :func:`quantize_along`.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise FormatError("gemm.shape", a=x.shape, b=w.shape)
    exact = _product(x, w)
    found = []
    for along in GROUPINGS:
        left, right = (quantize_along(operand, along, recipe) for operand in (x, w))
        product = _product(left.decoded, right.decoded)
        found.append(
            GroupedProduct(
                along,
                summarise(x.astype(np.float32), left.decoded),
                summarise(w.astype(np.float32), right.decoded),
                summarise(exact, product),
                x.shape[1] // GROUP_SHAPE[along][1],
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class GroupedError:
    """A matrix by itself under one grouping."""

    along: Along
    error: ErrorSummary


def compare_tensor(x: Array, recipe: str = RECIPE) -> tuple[GroupedError, ...]:
    """The error of one matrix under every grouping, in the order of ``GROUPINGS``.

    Parameters
    ----------
    x : (R, K) bfloat16 or float32
        Both multiples of 16.

    Raises
    ------
    FormatError
        Those of :func:`quantize_along`.
    """
    values = x.astype(np.float32)
    return tuple(
        GroupedError(along, summarise(values, quantize_along(x, along, recipe).decoded)) for along in GROUPINGS
    )


def _product(x: Array, w: Array) -> F64:
    product: F64 = x.astype(np.float64) @ w.astype(np.float64).T
    return product


# ------------------------------------------------------------------ the algebra of one output


@dataclass(frozen=True, slots=True)
class PartialSum:
    """A run of K over which neither operand's scale changes: ``scale · Σ x_code · w_code``.

    ``dot`` is exact (a multiple of 0.25), ``scale`` the product of the two block scales.
    """

    start: int
    stop: int
    dot: Fraction
    scale: Fraction

    @property
    def term(self) -> Fraction:
        """What the run adds to the output, without global scales."""
        return self.dot * self.scale


def partial_sums(x: GroupedTensor, w: GroupedTensor, m: int, n: int) -> tuple[PartialSum, ...]:
    """The sum of one output, with every scale as far outside as it goes.

    Runs are as long as the shorter of the two operands' groups along K.  The sum of all terms is the exact product of
    row ``m`` of ``x`` and row ``n`` of ``w``, each code times its block scale.

    Raises
    ------
    FormatError
        ``gemm.shape``; ``grouping.nan`` if a scale of either row is NaN.
    """
    if x.codes.shape[1] != w.codes.shape[1]:
        raise FormatError("gemm.shape", a=x.codes.shape, b=w.codes.shape)
    run = min(GROUP_SHAPE[x.along][1], GROUP_SHAPE[w.along][1])
    values = [decode_e2m1(operand.codes[row]) for operand, row in ((x, m), (w, n))]
    scales = [operand.element_scales[row] for operand, row in ((x, m), (w, n))]
    if any(np.isnan(line).any() for line in scales):
        raise FormatError("grouping.nan", m=m, n=n)
    found = []
    for start in range(0, x.codes.shape[1], run):
        pairs = zip(*(line[start : start + run] for line in values), strict=True)
        dot = sum((Fraction(float(a)) * Fraction(float(b)) for a, b in pairs), Fraction(0))
        scale = Fraction(float(scales[0][start])) * Fraction(float(scales[1][start]))
        found.append(PartialSum(start, start + run, dot, scale))
    return tuple(found)


# ------------------------------------------------------------------ what is stored


@dataclass(frozen=True, slots=True)
class ElementPlace:
    """Where one element of an NVFP4 weight ``(N, K)`` is stored.

    Attributes
    ----------
    byte
        Row and column in the packed tensor ``(N, K//2)``.
    high
        Whether it is the byte's high nibble: odd elements are.
    scale
        Row and column of its block scale in ``(N, K//16)``.
    offset_128x4, offset_8x4
        Byte offset of that scale in the two layouts that kernels read.
    """

    byte: tuple[int, int]
    high: bool
    scale: tuple[int, int]
    offset_128x4: int
    offset_8x4: int


def place_of(row: int, column: int, k: int) -> ElementPlace:
    """Where element ``(row, column)`` of a weight with ``k`` columns is stored.

    Raises
    ------
    FormatError
        ``grouping.shape`` if ``k`` is no multiple of 16; ``grouping.element`` if a weight with ``k`` columns has no
        such element.

    >>> place_of(33, 83, 128)
    ElementPlace(byte=(33, 41), high=True, scale=(33, 5), offset_128x4=533, offset_8x4=293)
    """
    if k < 1 or k % BLOCK:
        raise FormatError("grouping.shape", shape=(row + 1, k), along="k", rows=1, columns=BLOCK)
    if row < 0 or not 0 <= column < k:
        raise FormatError("grouping.element", row=row, column=column, k=k)
    scale = (row, column // BLOCK)
    columns = k // BLOCK
    return ElementPlace(
        (row, column // 2), column % 2 == 1, scale, offset_128x4(*scale, columns), offset_8x4(*scale, columns)
    )


@dataclass(frozen=True, slots=True)
class Storage:
    """How a weight ``(N, K)`` lies in a checkpoint, and its scales on a GPU.

    Attributes
    ----------
    packed, scales
        Shapes of the two tensors; both of bytes.
    packed_bytes, scale_bytes
        Their sizes.
    swizzled_bytes
        Size of the scales in the 128×4 layout, padding included.
    bits
        Bits a weight, block scales included; the tensor's one global scale is not.
    """

    packed: tuple[int, int]
    scales: tuple[int, int]
    packed_bytes: int
    scale_bytes: int
    swizzled_bytes: int
    bits: float

    @property
    def padding_bytes(self) -> int:
        """Bytes of the swizzled scales that hold no scale."""
        return self.swizzled_bytes - self.scale_bytes


def storage(n: int, k: int, scheme: Scheme = "nvfp4") -> Storage:
    """Shapes and sizes of a quantised ``(N, K)`` weight.

    Raises
    ------
    FormatError
        ``grouping.shape`` if K is no multiple of the block.

    >>> storage(128, 64).scales, storage(128, 64).bits, storage(128, 64, "mxfp4").bits
    ((128, 4), 4.5, 4.25)
    """
    block = BLOCK_SIZE[scheme]
    if n < 1 or k < 1 or k % block:
        raise FormatError("grouping.shape", shape=(n, k), along="k", rows=1, columns=block)
    packed, scales = (n, k // 2), (n, k // block)
    packed_bytes, scale_bytes = packed[0] * packed[1], scales[0] * scales[1]
    return Storage(
        packed, scales, packed_bytes, scale_bytes, swizzled_size(*scales), 8 * (packed_bytes + scale_bytes) / (n * k)
    )
