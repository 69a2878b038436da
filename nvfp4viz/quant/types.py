"""The records of this package: a quantised tensor, and one block followed step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import unpack_nibbles
from nvfp4viz.quant.recipes import RECIPES

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A tensor in NVFP4 or MXFP4.

    Attributes
    ----------
    packed : (..., K//2) uint8
        E2M1 codes, the even element in the low nibble.
    scales : (..., K//16) or (..., K//32) uint8
        E4M3 (NVFP4) or UE8M0 (MXFP4) bytes, linear layout.
    global_scale : float32
        As the recipe stores it: an encode scale (about 2688/amax) or a decode scale (about amax/2688).  1 for MXFP4.
    recipe : str
    block_size : int
        16 or 32.
    shape : tuple of int
        Of the unpacked tensor.
    """

    packed: U8
    scales: U8
    global_scale: np.float32
    recipe: str
    block_size: int
    shape: tuple[int, ...]

    @property
    def encode_scale(self) -> np.float32:
        """What the tensor was multiplied by before its blocks were scaled."""
        return self.global_scale if RECIPES[self.recipe].stores != "decode" else _reciprocal(self.global_scale)

    @property
    def decode_scale(self) -> np.float32:
        """What code × block scale is multiplied by to give the value back."""
        return self.global_scale if RECIPES[self.recipe].stores != "encode" else _reciprocal(self.global_scale)

    def codes(self) -> U8:
        """E2M1 codes ``(..., K)``, 0 to 15."""
        return unpack_nibbles(self.packed)


@dataclass(frozen=True, slots=True)
class Step:
    """One float32 operation on the way from a block to its bytes.

    Attributes
    ----------
    name
        Stable id, the key of the sentence that explains it.  Every NVFP4 recipe has ``"amax"``, ``"scale"`` (what is
        asked of E4M3), ``"byte"`` (what E4M3 gives) and ``"factor"``; some have ``"sixth"``, ``"divisor"``,
        ``"clamp"`` or ``"inverse"`` between them.
    symbol
        What the result is called in the formulas of later steps, such as ``"m"`` or ``"s"``.
    formula
        The operation in symbols, such as ``"m · rcp(6)"``.
    numbers
        The same operation with the block's numbers, such as ``"6 · 0.16666667"``.
    value : float32
        Its result.
    """

    name: str
    symbol: str
    formula: str
    numbers: str
    value: np.float32

    @property
    def bits(self) -> str:
        """The float32 pattern in hexadecimal; every NaN is shown as the canonical one."""
        return "0x7FFFFFFF" if np.isnan(self.value) else f"0x{int(self.value.view(np.uint32)):08X}"


@dataclass(frozen=True, slots=True)
class Block:
    """One block as a scalar reference computes it.

    ``products`` are the elements after scaling; ``divides`` says whether ``factor`` divided or multiplied them.
    """

    byte: int
    factor: np.float32
    divides: bool
    products: tuple[np.float32, ...]
    codes: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BlockTrace:
    """A block of 16 from its elements to bytes and back: everything a page shows of one quantisation.

    Attributes
    ----------
    recipe, global_scale
        As given; ``global_scale`` as the recipe stores it.
    x : (16,) float32
    steps
        The operations up to the factor, in the order of the recipe; see :class:`Step`.
    scale_byte, scale : int, float32
        The E4M3 byte and its value.
    factor, divides
        What every element is multiplied (or, if ``divides``, divided) by.
    products : (16,) float32
        The scaled elements.
    codes : (16,) uint8
    packed : (8,) uint8
    element_values : (16,) float32
        The E2M1 value of each code.
    decoded : (16,) float32
        What the block gives back.
    error : (16,) float32
        ``decoded − x``.
    """

    recipe: str
    global_scale: np.float32
    x: F32
    steps: tuple[Step, ...]
    scale_byte: int
    scale: np.float32
    factor: np.float32
    divides: bool
    products: F32
    codes: U8
    packed: U8
    element_values: F32
    decoded: F32
    error: F32


def _reciprocal(value: np.float32) -> np.float32:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.float32(1) / np.float32(value)
