"""The four formats of this project as cards, and every code explained.

Sources: OCP Microscaling Formats (MX) v1.0 for E2M1, E4M3 and E8M0; the E4M3 of block scales is the "FN" kind without
infinities.  UE8M0 is the OCP E8M0: a bare exponent, no zero, byte 255 is NaN.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import FormatError
from nvfp4viz.formats.types import ExplainedValue, FormatInfo, Klass

E2M1 = FormatInfo("e2m1", 4, 2, 1, True, 1, 6.0, 1.0, 0.5, False, (), True)
E4M3 = FormatInfo("e4m3", 8, 4, 3, True, 7, 448.0, 2.0**-6, 2.0**-9, False, (0x7F, 0xFF), True)
UE8M0 = FormatInfo("ue8m0", 8, 8, 0, False, 127, 2.0**127, 2.0**-127, 2.0**-127, False, (0xFF,), False)
BF16 = FormatInfo("bf16", 16, 8, 7, True, 127, float.fromhex("0x1.fep127"), 2.0**-126, 2.0**-133, True, (0x7FC0,), True)

FORMATS = {info.name: info for info in (E2M1, E4M3, UE8M0, BF16)}

E2M1_MAX = 6.0
E4M3_MAX = 448.0
BLOCK = 16  # elements under one E4M3 scale (NVFP4)
MX_BLOCK = 32  # elements under one UE8M0 scale (MXFP4)
TWO_LEVEL_MAX = E2M1_MAX * E4M3_MAX  # 2688: the largest magnitude that codes and block scales reach at global scale 1


def _klass(info: FormatInfo, exponent_field: int, mantissa: int, code: int) -> Klass:
    if info is BF16 and exponent_field == 0xFF:
        return "infinite" if mantissa == 0 else "nan"
    if code in info.nan_codes:
        return "nan"
    if info.has_zero and exponent_field == 0:
        return "zero" if mantissa == 0 else "subnormal"
    return "normal"


def explain(info: FormatInfo, code: int) -> ExplainedValue:
    """Take one code apart.

    Parameters
    ----------
    info
        One of ``E2M1``, ``E4M3``, ``UE8M0``, ``BF16``.
    code
        0 to ``2**info.bits - 1``.

    Raises
    ------
    FormatError
        ``format.code-range``: the code does not fit the format.

    Examples
    --------
    >>> explain(E2M1, 0b0101).formula
    '(-1)^0 × 2^(2-1) × (1 + 1/2) = 3'
    """
    if not 0 <= code < 1 << info.bits:
        raise FormatError("format.code-range", code=code, format=info.name, limit=(1 << info.bits) - 1)
    m_bits, e_bits = info.mantissa_bits, info.exponent_bits
    mantissa = code & ((1 << m_bits) - 1)
    field = (code >> m_bits) & ((1 << e_bits) - 1)
    sign = code >> (info.bits - 1) if info.signed else 0
    klass = _klass(info, field, mantissa, code)
    lead = f"(-1)^{sign} × " if info.signed else ""
    exponent: int | None = None
    significand: float | None = None
    if klass == "nan":
        value, formula = math.nan, "NaN"
    elif klass == "infinite":
        value = -math.inf if sign else math.inf
        formula = f"{lead}∞"
    else:
        hidden = 0 if klass in ("zero", "subnormal") else 1
        exponent = (field if hidden else 1) - info.bias
        significand = hidden + mantissa / (1 << m_bits)
        value = math.copysign(math.ldexp(significand, exponent), -1.0 if sign else 1.0)
        fraction = f" × ({hidden} + {mantissa}/{1 << m_bits})" if m_bits else ""
        formula = f"{lead}2^({field if hidden else 1}-{info.bias}){fraction} = {value:.9g}"
    return ExplainedValue(
        info.name, code, f"{code:0{info.bits}b}", sign, field, mantissa, exponent, significand, klass, value, formula
    )


def _table(info: FormatInfo) -> npt.NDArray[np.float32]:
    table = np.array([explain(info, code).value for code in range(1 << info.bits)], np.float32)
    table.setflags(write=False)
    return table


E2M1_VALUES = _table(E2M1)  # (16,) float32
E4M3_VALUES = _table(E4M3)  # (256,) float32
UE8M0_VALUES = _table(UE8M0)  # (256,) float32
