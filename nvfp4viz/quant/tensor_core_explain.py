"""One 64-element dot on the tensor core, with everything a page shows about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nvfp4viz.formats import decode_e2m1, decode_e4m3, decode_ue8m0
from nvfp4viz.quant.tensor_core_step import U8, Kind, StepTrace, mma_step_trace


@dataclass(frozen=True, slots=True)
class TensorCoreExplanation:
    """A step of the tensor core beside the float32 computation it replaces.

    Attributes
    ----------
    a_codes, b_codes
        64 E2M1 codes a side.
    a_scales, b_scales
        Scale bytes a side, 4 (NVFP4) or 2 (MXFP4).
    a_values, b_values
        The 64 decoded elements, without their scales.
    a_scale_values, b_scale_values
        The decoded scales, sign included.
    c
        The accumulator before the step.
    trace
        The seven rules: dots, significands, exponents, truncated terms, sum, result.
    dequantized
        ``c`` plus the dot in float32 after decoding, ``acc = f32(acc + f32(a * b))`` in increasing k.
    difference
        ``result - dequantized``; NaN if either is NaN, or both are the same infinity.
    ulps
        How many float32 numbers apart the two are, positive where the tensor core's is greater; None with a NaN.
    """

    a_codes: tuple[int, ...]
    b_codes: tuple[int, ...]
    a_scales: tuple[int, ...]
    b_scales: tuple[int, ...]
    a_values: tuple[float, ...]
    b_values: tuple[float, ...]
    a_scale_values: tuple[float, ...]
    b_scale_values: tuple[float, ...]
    c: float
    trace: StepTrace
    dequantized: np.float32
    difference: float
    ulps: int | None

    @property
    def result(self) -> np.float32:
        """What the tensor core returns."""
        return self.trace.result


def tensor_core_explain(
    a_codes: Sequence[int] | U8,
    b_codes: Sequence[int] | U8,
    a_scales: Sequence[int] | U8,
    b_scales: Sequence[int] | U8,
    c: float = 0.0,
    kind: Kind = "nvfp4",
) -> TensorCoreExplanation:
    """Explain one step; the arguments are those of :func:`nvfp4viz.quant.mma_step_reference`.

    Examples
    --------
    A sum of 2^24 + 3 has 25 bits: the tensor core cuts it, float32 arithmetic rounds it, and both ways of adding
    differ.

    >>> a, b, one = [2] * 64, [2] * 3 + [0] * 61, [0x38] * 4
    >>> seen = tensor_core_explain(a, b, one, one, c=2.0**24)
    >>> float(seen.result) - 2**24, float(seen.dequantized) - 2**24, seen.ulps
    (2.0, 0.0, 1)
    """
    trace = mma_step_trace(a_codes, b_codes, a_scales, b_scales, c, kind)
    decode = decode_e4m3 if kind == "nvfp4" else decode_ue8m0
    a, b = (decode_e2m1(np.asarray(codes, np.uint8)) for codes in (a_codes, b_codes))
    sa, sb = (decode(np.asarray(scales, np.uint8)) for scales in (a_scales, b_scales))
    acc = np.float32(c)
    with np.errstate(all="ignore"):
        scaled_a, scaled_b = (v * np.repeat(s, len(v) // len(s)) for v, s in ((a, sa), (b, sb)))
        for product in scaled_a * scaled_b:
            acc = np.float32(acc + product)
        difference = float(trace.result) - float(acc)
    return TensorCoreExplanation(
        tuple(int(code) for code in a_codes),
        tuple(int(code) for code in b_codes),
        tuple(int(byte) for byte in a_scales),
        tuple(int(byte) for byte in b_scales),
        tuple(a.tolist()),
        tuple(b.tolist()),
        tuple(sa.tolist()),
        tuple(sb.tolist()),
        float(np.float32(c)),
        trace,
        acc,
        difference,
        None if np.isnan(trace.result) or np.isnan(acc) else _rank(trace.result) - _rank(acc),
    )


def _rank(x: np.float32) -> int:
    """Position of a float32 among all of them, both zeros at 0."""
    bits = int(np.float32(x).view(np.uint32))
    return -(bits & 0x7FFFFFFF) if bits >> 31 else bits
