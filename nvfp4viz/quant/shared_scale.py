"""One global scale for several weights that a server has fused, and what it costs those that had another.

A fused NVFP4 weight is multiplied by one alpha, so it has one ``weight_scale_2``.  Where the checkpoint holds one for
each part, and they differ, a server has to choose.  Sources: `serving-vllm.md` 4.4 and 5.2 (vLLM 0.33.0).

==============  ====================================================================================================
way             what the parts are decoded with
==============  ====================================================================================================
``own``         each its own: the truth, possible only as long as they are not fused
``max``         the maximum; block scales stay as they are (vLLM's fused linear layers, with a warning).  A part whose
                own scale was smaller comes out too large, by ``max / own``
``first``       the first part's (vLLM's w13: gate's, with a warning).  The others come out wrong by ``first / own``
``rerounded``   the maximum; block scales become ``E4M3(block scale · own / max)``, codes stay.  Rounds once more
``shared``      quantised anew from the weights with one maximum for all, as an exporter can before it writes
==============  ====================================================================================================

Where all parts have one scale already, all five are the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats import BLOCK, decode_e4m3, e4m3_byte_scalar, encode_e4m3
from nvfp4viz.formats.paths import AutoPath, by_reference
from nvfp4viz.quant.api import dequantize, quantize
from nvfp4viz.quant.compare import ErrorSummary, summarise
from nvfp4viz.quant.reference import amax_scalar, scale_value
from nvfp4viz.quant.scales import amax, global_scale
from nvfp4viz.quant.types import QuantizedTensor

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Way = Literal["own", "max", "first", "rerounded", "shared"]
SHARE_WAYS: tuple[Way, ...] = get_args(Way)
RECIPE = "modelopt"
"""Stores a decode scale, the ``weight_scale_2`` that this is about."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPart:
    """One part under one way.

    Attributes
    ----------
    name, way
    own_scale : float32
        ``weight_scale_2`` from the part's own maximum.
    used_scale : float32
        The one that it is decoded with.
    factor
        How many times too large the part comes out: ``used / own`` where nothing makes up for it, else 1.
    quantized
        Codes and block scales as stored, with the used scale.
    decoded : (N, K) float32
    summary
        Error against the weight.
    """

    name: str
    way: Way
    own_scale: np.float32
    used_scale: np.float32
    factor: float
    quantized: QuantizedTensor = field(repr=False)
    decoded: F32 = field(repr=False)
    summary: ErrorSummary


def share_scale(parts: Mapping[str, Array], path: AutoPath = "auto") -> dict[Way, dict[str, SharedPart]]:
    """Quantise each part by itself, then decode it in each of the five ways.

    Parameters
    ----------
    parts
        Name to weight (N, K), bfloat16 or float32, finite and not all zero; the same K, a multiple of 16; in the order
        in which they are fused.
    path
        ``"reference"``: number by number; equal bits.

    Raises
    ------
    FormatError
        ``shared.parts``; and those of `quantize`.

    Examples
    --------
    >>> row = np.tile(np.float32([6, 3, 1, 0]), (1, 4))
    >>> found = share_scale({"gate": row, "up": 4 * row})
    >>> [found[way]["gate"].factor for way in SHARE_WAYS]
    [1.0, 4.0, 1.0, 1.0, 1.0]
    >>> found["first"]["up"].factor, found["first"]["up"].decoded[0, :4].tolist()
    (0.25, [6.0, 3.0, 1.0, 0.0])
    """
    _check(parts)
    largest = amax_scalar if by_reference(path) else amax
    reround = _reround_reference if by_reference(path) else _reround
    tops = {name: largest(weight) for name, weight in parts.items()}
    scales = {name: global_scale(top, RECIPE) for name, top in tops.items()}
    most = max(scales.values())
    first = next(iter(scales.values()))
    found: dict[Way, dict[str, SharedPart]] = {way: {} for way in SHARE_WAYS}
    for name, weight in parts.items():
        own = quantize(weight, recipe=RECIPE, global_scale=scales[name], path=path)
        ratio = scales[name] / most
        stored: dict[Way, QuantizedTensor] = {
            "own": own,
            "max": replace(own, global_scale=most),
            "first": replace(own, global_scale=first),
            "rerounded": replace(own, global_scale=most, scales=reround(own.scales, ratio)),
            "shared": quantize(weight, recipe=RECIPE, global_scale=most, path=path),
        }
        for way, one in stored.items():
            with np.errstate(over="ignore"):  # parts of 1e-30 and 1e30: more than float32 can say
                factor = float(one.global_scale / scales[name]) if way in ("max", "first") else 1.0
            decoded = dequantize(one, path=path)
            summary = summarise(weight.astype(np.float32), decoded)
            found[way][name] = SharedPart(name, way, scales[name], one.global_scale, factor, one, decoded, summary)
    return found


def _reround(scales: U8, ratio: np.float32) -> U8:
    return encode_e4m3(decode_e4m3(scales) * ratio)


def _reround_reference(scales: U8, ratio: np.float32) -> U8:
    made = [e4m3_byte_scalar(float(scale_value(byte) * ratio)) for byte in scales.ravel().tolist()]
    return np.array(made, np.uint8).reshape(scales.shape)


def _check(parts: Mapping[str, Array]) -> None:
    widths = {weight.shape[-1] for weight in parts.values() if weight.ndim == 2}
    good = all(weight.ndim == 2 and weight.size and 0 < amax(weight) < np.inf for weight in parts.values())
    if not good or len(widths) != 1 or min(widths) % BLOCK:
        raise FormatError("shared.parts", shapes=", ".join(str(weight.shape) for weight in parts.values()), block=BLOCK)
