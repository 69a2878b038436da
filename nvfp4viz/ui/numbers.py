"""How numbers are written: exact where bits are the subject, four significant digits elsewhere."""

from __future__ import annotations

from decimal import Decimal

import numpy as np

from nvfp4viz.figures.words import superscript


def exact(value: float) -> str:
    """Enough digits to read back the same float32, without an exponent where that stays short.

    >>> exact(2.5), exact(-0.0), exact(2.0**-9), exact(float("nan")), exact(float("-inf"))
    ('2.5', '−0', '0.001953125', 'NaN', '−∞')
    """
    number = np.float32(value)
    if np.isnan(number):
        return "NaN"
    if np.isinf(number):
        return "∞" if number > 0 else "−∞"
    if number == 0:
        return "−0" if np.signbit(number) else "0"
    if 1e-5 <= abs(number) < 1e7:
        text = np.format_float_positional(number, unique=True, trim="-")
    else:
        text = _scientific(np.format_float_scientific(number, unique=True, trim="-", exp_digits=1))
    return text.replace("-", "−")


def four(value: float) -> str:
    """Four significant digits.

    >>> four(0.123456), four(12345.678), four(1.5e-7), four(2.0), four(1.00001e-7)
    ('0.1235', '12350', '1.5×10⁻⁷', '2', '1×10⁻⁷')
    """
    number = float(value)
    if not np.isfinite(number) or number == 0:
        return exact(number)
    if 1e-4 <= abs(number) < 1e7:
        text = np.format_float_positional(number, precision=4, unique=False, fractional=False, trim="-")
    else:
        text = _scientific(np.format_float_scientific(number, precision=3, unique=False, trim="-", exp_digits=1))
    return text.replace("-", "−")


def near(value: float) -> str:
    """Four significant digits, with ``≈`` in front where the number has more: for beside its bits.

    >>> near(3961792.0), near(2.0), near(0.5), near(float("inf"))
    ('≈ 3962000', '2', '0.5', '∞')
    """
    number = float(value)
    if not np.isfinite(number) or number == 0 or float(f"{number:.3e}") == number:
        return four(number)
    return f"≈ {four(number)}"


def whole(value: float) -> str:
    """All decimal digits of a float32 where they are a dozen at most, else `exact` with ``≈`` in front: for where the
    number itself is meant, and not one that reads back the same.

    >>> whole(3.3369140625), whole(-2.5), whole(0.1), whole(2.0**-30), whole(float("inf"))
    ('3.3369140625', '−2.5', '≈ 0.1', '≈ 9.313226×10⁻¹⁰', '∞')
    """
    number = float(np.float32(value))
    if not np.isfinite(number) or number == 0:
        return exact(number)
    digits = Decimal(number).normalize()
    if len(digits.as_tuple().digits) <= 12 and 1e-5 <= abs(number) < 1e7:
        return f"{digits:f}".replace("-", "−")
    return f"≈ {exact(number)}"


def percent(share: float) -> str:
    """A share as a percentage with four significant digits at most.

    >>> percent(0.125), percent(1 / 3)
    ('12.5 %', '33.33 %')
    """
    return f"{four(100 * share)} %"


def _scientific(text: str) -> str:
    mantissa, exponent = text.split("e")
    # NumPy leaves the point of a whole mantissa that was rounded.
    return f"{mantissa.removesuffix('.')}×10{superscript(int(exponent))}"


def hex_byte(value: int) -> str:
    """Two hex digits.

    >>> hex_byte(126)
    '0x7E'
    """
    return f"0x{int(value):02X}"


def hex_nibble(value: int) -> str:
    """One hex digit."""
    return f"0x{int(value):X}"


def hex_f32(value: float) -> str:
    """The bits of a float32.

    >>> hex_f32(1 / 6)
    '0x3E2AAAAB'
    """
    return f"0x{int(np.float32(value).view(np.uint32)):08X}"


def bits(value: int, width: int) -> str:
    """Binary digits.

    >>> bits(5, 4)
    '0101'
    """
    return f"{int(value):0{width}b}"
