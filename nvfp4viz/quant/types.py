"""What a quantised tensor is."""

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
        As the recipe stores it: an encode scale (a divisor, about 2688/amax) or a decode scale (a multiplier).  1 for MXFP4.
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
        return self.global_scale if RECIPES[self.recipe].stores == "encode" else _reciprocal(self.global_scale)

    @property
    def decode_scale(self) -> np.float32:
        """What code × block scale is multiplied by to give the value back."""
        return self.global_scale if RECIPES[self.recipe].stores == "decode" else _reciprocal(self.global_scale)

    def codes(self) -> U8:
        """E2M1 codes ``(..., K)``, 0 to 15."""
        return unpack_nibbles(self.packed)


def _reciprocal(value: np.float32) -> np.float32:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.float32(1) / np.float32(value)
