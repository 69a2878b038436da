"""Follow one block through a recipe, with the bits of every step."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import BLOCK, bf16_to_f32, decode_e4m3, pack_nibbles
from nvfp4viz.quant.api import as_global_scale, reference_block
from nvfp4viz.quant.decode import decode_blocks, element_values
from nvfp4viz.quant.recipes import find_recipe
from nvfp4viz.quant.types import BlockTrace, QuantizedTensor

Array = npt.NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def trace_block(x: Array, global_scale: npt.ArrayLike, recipe: str = "vllm-cuda") -> BlockTrace:
    """Quantise one NVFP4 block by the scalar reference and keep what happens on the way.

    For ``vllm-cuda`` these are the kernel's seven operations: maximum, × rcp(6), × global scale, E4M3, the multiplier
    from two reciprocals, 16 products, 16 codes.  Other recipes have other steps; each names itself.

    Parameters
    ----------
    x : (16,) bfloat16 or float32
    global_scale
        As the recipe stores it: encode (about 2688/amax) or decode (about amax/2688).  Any float32.
    recipe
        A name of ``NVFP4_RECIPES``.

    Raises
    ------
    FormatError
        ``recipe.unknown``; ``recipe.no-global-scale`` for MXFP4; ``quantize.dtype``;
        ``quantize.global-scale``; ``trace.shape``.

    Examples
    --------
    >>> block = trace_block(np.float32([6, -6, 5, 4, 3.5, 3, 2.5, 2, 1.75, 1.5, 1.25, 1, 0.75, -0.5, 0.25, 0]), 1)
    >>> [(step.name, step.bits) for step in block.steps]  # doctest: +NORMALIZE_WHITESPACE
    [('amax', '0x40C00000'), ('sixth', '0x3F800000'), ('scale', '0x3F800000'), ('byte', '0x3F800000'),
     ('factor', '0x3F800000')]
    >>> f"{block.scale_byte:02x} {block.packed.tobytes().hex()}"
    '38 f766564434229200'
    """
    found = find_recipe(recipe)
    if found.scheme != "nvfp4":
        raise FormatError("recipe.no-global-scale", name=recipe)
    array = np.asarray(x)
    if array.dtype not in (BFLOAT16, np.dtype(np.float32)):
        raise FormatError("quantize.dtype", dtype=array.dtype)
    if array.shape != (BLOCK,):
        raise FormatError("trace.shape", shape=array.shape, block=BLOCK)
    stored = as_global_scale(global_scale)
    block = reference_block(array, found, stored)
    values = bf16_to_f32(array) if array.dtype == BFLOAT16 else array.copy()
    codes = np.array(block.codes, np.uint8)
    packed = pack_nibbles(codes)
    q = QuantizedTensor(packed, np.array([block.byte], np.uint8), stored, recipe, BLOCK, (BLOCK,))
    decoded = decode_blocks(q)
    with np.errstate(all="ignore"):
        error = decoded - values
    products = np.array(block.products, np.float32)
    elements = element_values(recipe)[codes]
    for owned in (values, products, codes, packed, elements, decoded, error):
        owned.setflags(write=False)
    return BlockTrace(
        recipe=recipe,
        global_scale=stored,
        x=values,
        steps=block.steps,
        scale_byte=block.byte,
        scale=np.float32(decode_e4m3(block.byte)[()]),
        factor=block.factor,
        divides=block.divides,
        products=products,
        codes=codes,
        packed=packed,
        element_values=elements,
        decoded=decoded,
        error=error,
    )
