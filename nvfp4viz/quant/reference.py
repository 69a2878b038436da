"""The NVFP4 recipes one block at a time, in float32 scalars, in the order in which the sources compute.

Slow on purpose: this file is for reading, it is the truth that the NumPy and Numba paths must equal bit by bit, and it
is what a page shows when it follows a block.  Every operator on two ``np.float32`` is one IEEE operation in float32,
which is what a GPU without fast-math and FMA contraction does.  `nvfp4viz.quant.nvfp4` says what NaN does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.formats import bf16_bits_scalar, decode_e4m3, e2m1_code_scalar, e4m3_byte_scalar, widen_bf16_scalar
from nvfp4viz.quant.nvfp4 import CT_ZERO_SCALE, torchao_nan_code
from nvfp4viz.quant.rcp import rcp_approx_ftz_scalar as rcp
from nvfp4viz.quant.types import Block, Step

F = np.float32
ZERO, ONE, SIX = F(0), F(1), F(6)
Elements = Sequence[np.float32]


class Notes:
    """The steps of one block, written down as they are computed."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def note(self, name: str, symbol: str, formula: str, numbers: str, value: np.float32) -> np.float32:
        """Write a step down and hand its value on."""
        self.steps.append(Step(name, symbol, formula, numbers, F(value)))
        return F(value)

    def finish(self, byte: int, factor: np.float32, divides: bool, x: Elements, code: Callable[[F], int]) -> Block:
        """Scale every element by the factor and turn it into a code."""
        products = tuple(v / factor if divides else v * factor for v in x)
        codes = tuple(code(y) for y in products)
        return Block(byte, factor, divides, products, codes, tuple(self.steps))


def text(value: np.float32) -> str:
    """A float32 in few digits that still tell it from its neighbours."""
    return f"{value:.9g}"


def block_max_scalar(x: Elements, nan_wins: bool) -> np.float32:
    """Largest magnitude; NaN if ``nan_wins`` and one is there, or if nothing else is."""
    numbers = [abs(v) for v in x if not math.isnan(v)]
    if not numbers or (nan_wins and len(numbers) < len(x)):
        return F(np.nan)
    return max(numbers)


def amax_scalar(x: npt.NDArray[Any]) -> np.float32:
    """Largest magnitude of a tensor with elements; NaN if one is there.  What `nvfp4viz.quant.amax` reads from bits."""
    return block_max_scalar([F(value) for value in x.ravel()], nan_wins=True)


def scale_value(byte: int) -> np.float32:
    """The float32 value of an E4M3 byte."""
    return F(decode_e4m3(byte)[()])


def clamp(x: np.float32, low: float, high: float) -> np.float32:
    """``torch.clamp``: NaN stays NaN."""
    return x if math.isnan(x) else min(max(x, F(low)), F(high))


def code_without_zero_sign(y: np.float32) -> int:
    """E2M1 code where the implementation asks ``y < 0``: a zero has no sign."""
    return 0 if y == 0 else e2m1_code_scalar(float(y))


def torch_byte(scale: np.float32, top: np.float32, g: np.float32) -> int:
    """E4M3 byte of a scale computed by PyTorch: 0xFF where the operation itself made the NaN."""
    if math.isnan(scale) and not math.isnan(top) and not math.isnan(g):
        return 0xFF
    return e4m3_byte_scalar(float(scale))


def ieee(x: Elements, g: np.float32, bf16: bool) -> Block:
    """The kernel's order with IEEE divisions; ``G`` is an encode scale."""
    n = Notes()
    m = n.note("amax", "m", "max |x|", f"max of {len(x)}", block_max_scalar(x, nan_wins=False))
    t = n.note("sixth", "t", "m / 6", f"{text(m)} / 6", m / SIX)
    u = n.note("scale", "u", "G · t", f"{text(g)} · {text(t)}", g * t)
    byte = e4m3_byte_scalar(float(u))
    s = n.note("byte", "s", "E4M3(u)", f"byte 0x{byte:02X}", scale_value(byte))
    o = n.note("factor", "o", "0 if s = 0, else G / s", f"{text(g)} / {text(s)}", ZERO if s == 0 else g / s)
    return n.finish(byte, o, False, x, lambda y: e2m1_code_scalar(float(y)))


def vllm_cuda(x: Elements, g: np.float32, bf16: bool) -> Block:
    """``cvt_warp_fp16_to_fp4``; ``G`` is an encode scale.  Two approximate reciprocals, in this order."""
    n = Notes()
    m = n.note("amax", "m", "max |x|", f"max of {len(x)}", block_max_scalar(x, nan_wins=False))
    t = n.note("sixth", "t", "m · rcp(6)", f"{text(m)} · {text(rcp(SIX))}", m * rcp(SIX))
    u = n.note("scale", "u", "G · t", f"{text(g)} · {text(t)}", g * t)
    byte = e4m3_byte_scalar(float(u))
    s = n.note("byte", "s", "E4M3(u)", f"byte 0x{byte:02X}", scale_value(byte))
    o = ZERO if s == 0 else rcp(s * rcp(g))  # the test is on the rounded scale, not on m
    n.note("factor", "o", "0 if s = 0, else rcp(s · rcp(G))", f"rcp({text(s)} · {text(rcp(g))})", o)
    return n.finish(byte, o, False, x, lambda y: e2m1_code_scalar(float(y)))


def vllm_emulation(x: Elements, g: np.float32, bf16: bool) -> Block:
    """``ref_nvfp4_quant``; ``G`` is an encode scale, ``R(0) = 1e-8`` and else ``R(v) = 1/v``."""

    def inverse(v: np.float32) -> np.float32:
        return F(1e-8) if v == 0 else ONE / v

    n = Notes()
    m = n.note("amax", "m", "max |x|", f"max of {len(x)}", block_max_scalar(x, nan_wins=True))
    sixth = ONE / SIX
    t = n.note("sixth", "t", "m · f32(1/6)", f"{text(m)} · {text(sixth)}", m * sixth)
    u = n.note("scale", "u", "G · t", f"{text(g)} · {text(t)}", g * t)
    v = n.note("clamp", "v", "clamp(u, −448, 448)", text(u), clamp(u, -448.0, 448.0))
    byte = torch_byte(v, m, g)
    s = n.note("byte", "s", "E4M3(v)", f"byte 0x{byte:02X}", scale_value(byte))
    o = n.note("factor", "o", "R(s · R(G))", f"R({text(s)} · {text(inverse(g))})", inverse(s * inverse(g)))
    return n.finish(byte, o, False, x, lambda y: 0 if math.isnan(y) else code_without_zero_sign(y))


def modelopt(x: Elements, g: np.float32, bf16: bool) -> Block:
    """``NVFP4QTensor.quantize``; ``g`` is a decode scale.  A zero block gets scale 1 before the clamp."""
    n = Notes()
    m = n.note("amax", "m", "max |x|", f"max of {len(x)}", block_max_scalar(x, nan_wins=True))
    t = n.note("divisor", "t", "6 · g", f"6 · {text(g)}", SIX * g)
    u = n.note("scale", "u", "m / t, and 1 for 0", f"{text(m)} / {text(t)}", ONE if m / t == 0 else m / t)
    v = n.note("clamp", "v", "clamp(u, 2^-9, 448)", text(u), clamp(u, 2.0**-9, 448.0))
    byte = torch_byte(v, m, g)
    s = n.note("byte", "s", "E4M3(v)", f"byte 0x{byte:02X}", scale_value(byte))
    d = n.note("factor", "d", "s · g", f"{text(s)} · {text(g)}", s * g)
    return n.finish(byte, d, True, x, code_without_zero_sign)


def torchao(x: Elements, g: np.float32, bf16: bool) -> Block:
    """``nvfp4_quantize`` with a per-tensor scale; ``g`` is a decode scale."""
    n = Notes()
    m = n.note("amax", "m", "max |x|", f"max of {len(x)}", block_max_scalar(x, nan_wins=True))
    t = n.note("sixth", "t", "m / 6", f"{text(m)} / 6", m / SIX)
    u = n.note("scale", "u", "t / g", f"{text(t)} / {text(g)}", t / g)
    v = n.note("clamp", "v", "clamp(u, 2^-6, 448)", text(u), clamp(u, 2.0**-6, 448.0))
    byte = torch_byte(v, m, g)
    s = n.note("byte", "s", "E4M3(v)", f"byte 0x{byte:02X}", scale_value(byte))
    r = n.note("inverse", "r", "1 / g", f"1 / {text(g)}", ONE / g)
    o = n.note("factor", "o", "r / s", f"{text(r)} / {text(s)}", r / s)

    def code(y: np.float32) -> int:
        if not math.isnan(y):
            return e2m1_code_scalar(float(y))
        if math.isnan(g):
            return torchao_nan_code(int(g.view(np.uint32)))
        if math.isnan(s):  # the NaN of E4M3 in float32
            return torchao_nan_code(0xFFF00000 if byte == 0xFF else 0x7FF00000)
        return torchao_nan_code(0xFFC00000)  # 0·∞ on x86

    return n.finish(byte, o, False, x, code)


def compressed_tensors(x: Elements, g: np.float32, bf16: bool) -> Block:
    """``calculate_qparams`` and the NVFP4 packer; ``G`` is an encode scale.  m / 6 is rounded to the tensor's dtype."""
    n = Notes()
    m = n.note("amax", "m", "max |x|", f"max of {len(x)}", block_max_scalar(x, nan_wins=True))
    sixth = m / SIX
    if bf16:
        sixth = widen_bf16_scalar(bf16_bits_scalar(float(sixth)))
    t = n.note("sixth", "t", "BF16(m / 6)" if bf16 else "m / 6", f"{text(m)} / 6", sixth)
    u = n.note("scale", "u", "G · t", f"{text(g)} · {text(t)}", g * t)
    v = n.note("clamp", "v", "clamp(u, −448, 448)", text(u), clamp(u, -448.0, 448.0))
    byte = torch_byte(v, m, g)
    byte = CT_ZERO_SCALE if byte & 0x7F == 0 else byte
    s = n.note("byte", "s", "E4M3(v), and 0.125 for 0", f"byte 0x{byte:02X}", scale_value(byte))
    d = n.note("factor", "d", "s / G", f"{text(s)} / {text(g)}", s / g)
    nan_code = 8 if bf16 else 0  # PyTorch's NaN in BF16 is 0xFFFF, and the packer keeps its sign
    return n.finish(byte, d, True, x, lambda y: nan_code if math.isnan(y) else code_without_zero_sign(y))


NVFP4_REFERENCES: dict[str, Callable[[Elements, np.float32, bool], Block]] = {
    "ieee": ieee,
    "vllm-cuda": vllm_cuda,
    "vllm-emulation": vllm_emulation,
    "modelopt": modelopt,
    "torchao": torchao,
    "compressed-tensors": compressed_tensors,
}
"""``(16 elements, global scale as stored, tensor is BF16) -> Block``"""
