"""NaN, infinity and tensors of zeros: what each package writes, byte for byte, and where ours is another byte.

Packages answer these inputs by accident (0/0, a cast of NaN to an integer), and still our recipes give the same bytes
in all cases but one: the **sign of a NaN block scale**.  x86 makes the NaN of 0/0 negative and torch's cast keeps the
sign, so ModelOpt and compressed-tensors wrote 0xFF on the machine that recorded this; E4M3 has two NaN bytes and ours
is always 0x7F there.  Everything else in this file is equality.
"""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4viz import quant
from tests.golden import answers
from tests.golden import golden_sets as sets
from tests.quant.golden_checks import PATHS, differing, same_f32

NVFP4 = ("modelopt", "torchao", "compressed-tensors", "vllm-emulation")
OTHER_NAN_SIGN = {("modelopt", "nan"), ("compressed-tensors", "nan")}
"""(recipe, set) where a NaN scale byte has another sign than ours."""


def recorded(recipe: str, name: str, dtype: str) -> tuple[np.ndarray, np.ndarray, np.float32]:
    what = "encode" if recipe == "vllm-emulation" else "global"
    read = ("nvfp4", recipe, name, dtype)
    return answers.packed(*read), answers.scales(*read), answers.stored(*read, what)


@pytest.mark.parametrize("path", [*PATHS, "reference"])
@pytest.mark.parametrize("dtype", sets.DTYPES)
@pytest.mark.parametrize("name", ["nan", "inf", "allzero"])
@pytest.mark.parametrize("recipe", NVFP4)
def test_nvfp4_exceptions(recipe: str, name: str, dtype: str, path: str) -> None:
    packed, scales, stored = recorded(recipe, name, dtype)
    q = quant.quantize(answers.tensor(name, dtype), recipe=recipe, path=path)
    assert same_f32(np.float32(q.global_scale), stored)
    assert differing(q.packed, packed) == ""
    other = q.scales != scales
    if (recipe, name) in OTHER_NAN_SIGN:
        holds_nan = np.isnan(answers.tensor(name, dtype).astype(np.float32)).reshape(*scales.shape, 16).any(axis=-1)
        assert np.array_equal(other, holds_nan)
        assert (q.scales[other] == 0x7F).all()
        assert (scales[other] == 0xFF).all()
    else:
        assert not other.any()


@pytest.mark.parametrize("dtype", sets.DTYPES)
def test_an_all_zero_tensor(dtype: str) -> None:
    """ModelOpt and torchao divide 0 by 0; the other two have a guard.  (Rows of the spec's table of semantics.)"""
    expected = {
        # recipe: scale byte, packed byte, stored global scale
        "modelopt": (0xFF, 0x77, 0.0),
        "torchao": (0xFF, 0xCC, 0.0),
        "compressed-tensors": (0x20, 0x00, 1.0),
        "vllm-emulation": (0x00, 0x00, 2688e8),
    }
    for recipe, (scale, byte, stored) in expected.items():
        packed, scales, kept = recorded(recipe, "allzero", dtype)
        assert (scales == scale).all()
        assert (packed == byte).all()
        assert kept == np.float32(stored)


@pytest.mark.parametrize("dtype", sets.DTYPES)
def test_one_nan_in_a_tensor(dtype: str) -> None:
    """It reaches every block through the global scale, except in compressed-tensors, which falls back to 1."""
    holds_nan = np.isnan(answers.tensor("nan", dtype).astype(np.float32)).reshape(2, 32, 16).any(axis=-1)
    for recipe, byte in {"modelopt": 0x77, "torchao": 0x33, "vllm-emulation": 0x00}.items():
        packed, scales, stored = recorded(recipe, "nan", dtype)
        assert np.isnan(stored)
        assert (scales & 0x7F == 0x7F).all()
        assert (packed == byte).all()
    packed, scales, stored = recorded("compressed-tensors", "nan", dtype)
    assert stored == 1
    assert np.array_equal(scales & 0x7F == 0x7F, holds_nan)
    # its packer casts NaN to an integer and keeps the sign bit, which BF16 arithmetic on x86 had set
    assert set(packed.reshape(2, 32, 8)[holds_nan].ravel().tolist()) == {0x88 if dtype == "bf16" else 0x00}


@pytest.mark.parametrize("dtype", sets.DTYPES)
def test_minus_zero(dtype: str) -> None:
    """-0 in: torchao keeps the sign (code 8); ModelOpt, compressed-tensors, vLLM write 0; ModelOpt MXFP4 always 8."""
    x = answers.tensor("zeroblocks", dtype)
    zero = x == 0
    minus = zero & np.signbit(x.astype(np.float32))
    assert minus.any()
    kept = {"torchao": 8, "modelopt": 0, "compressed-tensors": 0, "vllm-emulation": 0}
    for recipe, code in kept.items():
        q = quant.quantize(x, recipe=recipe)
        assert np.array_equal(q.packed, answers.packed("nvfp4", recipe, "zeroblocks", dtype))
        assert (q.codes()[minus] == code).all()
        assert (q.codes()[zero & ~minus] == 0).all()
    mx = quant.quantize(x, recipe="modelopt-mxfp4")
    assert np.array_equal(mx.packed, answers.packed("mxfp4", "modelopt", "zeroblocks", dtype))
    assert (mx.codes()[zero] == 8).all()


@pytest.mark.parametrize("dtype", sets.DTYPES)
def test_mxfp4_blocks_with_a_nan_or_an_infinity(dtype: str) -> None:
    """Cross-checks, not namesakes: torchao propagates a NaN (byte 255), the kernels' ``max`` drops it.

    At an infinity the bytes are equal, but -Inf times a multiplier of 0 is a NaN to FlashInfer's kernel: code 7, not F.
    """
    x = answers.tensor("nan", dtype)
    holds_nan = np.isnan(x.astype(np.float32)).reshape(2, 16, 32).any(axis=-1)
    for recipe, package in (("vllm-even", "torchao-even"), ("flashinfer-ceil", "torchao-rceil")):
        q = quant.quantize(x, recipe=recipe)
        theirs = answers.scales("mxfp4", package, "nan", dtype)
        assert np.array_equal(q.scales != theirs, holds_nan)
        assert (theirs[holds_nan] == 255).all()
        assert (q.codes()[np.isnan(x.astype(np.float32))] == 7).all()
    x = answers.tensor("inf", dtype)
    q = quant.quantize(x, recipe="flashinfer-ceil")
    packed = answers.packed("mxfp4", "torchao-rceil", "inf", dtype)
    assert np.array_equal(q.scales, answers.scales("mxfp4", "torchao-rceil", "inf", dtype))
    assert [
        (int(a), int(b)) for a, b in zip(q.packed[q.packed != packed], packed[q.packed != packed], strict=True)
    ] == [(0x07, 0x0F)]
