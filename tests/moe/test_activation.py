"""Activations round twice, as vLLM's stand-alone kernels do: all 65,536 BF16 gates."""

import math

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.formats import bf16_bits_scalar, f32_to_bf16
from nvfp4viz.moe.activation import gelu_tanh_and_mul, silu_and_mul

F = np.float32
GATES = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)


def _bf16(x: float) -> np.float32:
    return np.array(bf16_bits_scalar(float(x)) << 16, np.uint32).view(np.float32)[()]


def gelu_scalar(f: np.float32) -> np.float32:
    inner = F(0.7978845608028654) * (f + F(0.044715) * f * f * f)
    return F(0.5) * f * (F(1) + F(math.tanh(float(inner)) if not math.isnan(inner) else math.nan))


def silu_scalar(f: np.float32) -> np.float32:
    exponential = F(np.exp(-float(f)))
    return f / (F(1) + exponential)


@pytest.mark.parametrize(("vector", "scalar"), [(gelu_tanh_and_mul, gelu_scalar), (silu_and_mul, silu_scalar)])
def test_every_bf16_gate_equals_the_scalar_formula(vector, scalar):
    up = F(1.171875)
    x = np.stack([GATES, np.full(65536, up).astype(ml_dtypes.bfloat16)], axis=1)
    got = vector(x)[:, 0].view(np.uint16)
    with np.errstate(all="ignore"):
        want = np.array([f32_to_bf16(_bf16(scalar(F(g))) * up).view(np.uint16)[()] for g in GATES], np.uint16)
    nan = np.isnan(want.view(ml_dtypes.bfloat16))
    assert (np.isnan(got.view(ml_dtypes.bfloat16)) == nan).all()
    assert (got[~nan] == want[~nan]).all()


def test_the_activation_is_rounded_before_the_product():
    """One rounding at the end would give other bits: that is why the order is part of the definition."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 2)).astype(ml_dtypes.bfloat16)
    twice = silu_and_mul(x)[:, 0].view(np.uint16)
    once = f32_to_bf16(np.array([silu_scalar(F(g)) for g in x[:, 0]], F) * x[:, 1].astype(F)).view(np.uint16)
    assert (twice != once).any()
