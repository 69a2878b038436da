"""The MXFP4 recipes one block at a time; see `nvfp4viz.quant.reference`, and `nvfp4viz.quant.mxfp4` for the rules."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nvfp4viz.formats import e2m1_code_scalar, ue8m0_byte_scalar
from nvfp4viz.quant.mxfp4 import DEEPGEMM_FLOOR, MIDPOINTS
from nvfp4viz.quant.nvfp4 import torchao_nan_code
from nvfp4viz.quant.rcp import rcp_approx_ftz_scalar as rcp
from nvfp4viz.quant.reference import SIX, ZERO, Elements, F, Notes, block_max_scalar, text
from nvfp4viz.quant.types import Block


def floor_log2(x: np.float32) -> int:
    """Exponent of a positive number: ``x = 1.m · 2^floor_log2(x)``, also for subnormals."""
    return math.frexp(float(x))[1] - 1


def power(exponent: int) -> np.float32:
    """2^exponent as float32."""
    return F(math.ldexp(1.0, exponent))


def midpoints_below(y: np.float32) -> int:
    """Magnitude code with ties toward zero: how many midpoints lie strictly below ``|y|``."""
    return sum(bool(abs(y) > F(m)) for m in MIDPOINTS)


def ocp_floor(x: Elements) -> Block:
    """floor(log2 m) − 2."""
    n = Notes()
    m = n.note("amax", "m", "max |x|", f"max of {len(x)}", block_max_scalar(x, nan_wins=True))
    if math.isnan(m):
        byte, scale = 255, F(np.inf)
    elif math.isinf(m):  # torchao reads the exponent field, which is 255
        byte, scale = 253, power(126)
    else:
        byte = 0 if m == 0 else max(floor_log2(m) - 2 + 127, 0)
        scale = power(byte - 127)
    n.note("factor", "s", "2^(floor(log2 m) − 2)", f"byte {byte}", scale)

    def code(v: np.float32) -> int:
        if math.isnan(v):
            return torchao_nan_code(int(v.view(np.uint32)) | 0x400000)
        if math.isinf(v) and math.isinf(scale):
            return torchao_nan_code(0xFFC00000)  # ∞/∞ on x86
        return e2m1_code_scalar(float(v / scale))

    return Block(byte, scale, True, tuple(v / scale for v in x), tuple(code(v) for v in x), tuple(n.steps))


def vllm_even(x: Elements) -> Block:
    """floor(log2 m) − 2, one more where the significand is at least 1.75; byte 0 multiplies by 0."""
    n = Notes()
    m = n.note("amax", "m", "max |x|", f"max of {len(x)}", block_max_scalar(x, nan_wins=False))
    if math.isnan(m):
        byte = 0
    elif math.isinf(m):
        byte = 253
    elif m < F(2.0**-126):  # exponent field 0, or 1 after the bump
        byte = 0
    else:
        bump = 1 if m / power(floor_log2(m)) >= F(1.75) else 0
        byte = max(floor_log2(m) + bump - 2 + 127, 0)
    o = ZERO if byte == 0 else power(127 - byte)
    n.note("factor", "o", "2^-(floor(log2 m) + bump − 2)", f"byte {byte}", o)
    return n.finish(byte, o, False, x, lambda y: e2m1_code_scalar(float(y)))


def flashinfer_ceil(x: Elements) -> Block:
    """The smallest power of two not below m · rcp(6)."""
    n = Notes()
    m = n.note("amax", "m", "max |x|", f"max of {len(x)}", block_max_scalar(x, nan_wins=False))
    t = n.note("sixth", "t", "m · rcp(6)", f"{text(m)} · {text(rcp(SIX))}", m * rcp(SIX))
    byte = ue8m0_byte_scalar(float(t))
    o = ZERO if byte in (0, 254, 255) else power(127 - byte)
    n.note("factor", "o", "2^-ceil(log2 t)", f"byte {byte}", o)
    return n.finish(byte, o, False, x, lambda y: e2m1_code_scalar(float(y)))


def deepgemm_ceil(x: Elements) -> Block:
    """The smallest power of two not below max(m, 1e-4) / 6; ties toward zero, zeros without a sign."""
    n = Notes()
    m = n.note("amax", "m", "max |x|", f"max of {len(x)}", block_max_scalar(x, nan_wins=True))
    floor = m if math.isnan(m) else max(m, DEEPGEMM_FLOOR)
    t = n.note("sixth", "t", "max(m, 1e-4) / 6", f"{text(floor)} / 6", floor / SIX)
    byte = min(max(ue8m0_byte_scalar(float(t)), 1), 254)
    o = n.note("factor", "o", "2^-ceil(log2 t)", f"byte {byte}", power(127 - byte))

    def code(y: np.float32) -> int:
        if math.isnan(y):
            return 7
        magnitude = midpoints_below(y)
        return magnitude | 8 if magnitude and y < 0 else magnitude

    return n.finish(byte, o, False, x, code)


def modelopt_mxfp4(x: Elements) -> Block:
    """ceil of a float32 logarithm of m / 6; ties toward zero, and whatever is not above zero gets the sign bit."""
    n = Notes()
    m = n.note("amax", "m", "max |x|", f"max of {len(x)}", block_max_scalar(x, nan_wins=True))
    t = n.note("sixth", "t", "m / 6", f"{text(m)} / 6", m / SIX)
    if math.isfinite(t):
        log2 = F(-np.inf) if t == 0 else F(math.log2(float(t)))
        exponent = math.ceil(max(log2, F(-127)))
        byte, scale = exponent + 127, power(exponent)
    else:
        byte, scale = 0, t
    n.note("factor", "s", "2^ceil(log2 t)", f"byte {byte}", scale)
    return n.finish(byte, scale, True, x, lambda y: midpoints_below(y) | (0 if y > 0 else 8))


MXFP4_REFERENCES: dict[str, Callable[[Elements], Block]] = {
    "ocp-floor": ocp_floor,
    "vllm-even": vllm_even,
    "flashinfer-ceil": flashinfer_ceil,
    "deepgemm-ceil": deepgemm_ceil,
    "modelopt-mxfp4": modelopt_mxfp4,
}
"""``(32 elements) -> Block``"""
