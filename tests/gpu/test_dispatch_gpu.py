"""What the app calls: NumPy in, NumPy out, on the GPU where there is one, the CPU's bits."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import quant
from nvfp4viz.device import dispatch


@pytest.mark.parametrize("recipe", dispatch.CUDA_RECIPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("garbage", [False, True], ids=["own scale", "NaN, Inf and zeros under a given scale"])
def test_quantised_and_back(recipe, dtype, garbage):
    x = (np.random.default_rng(5).standard_normal((130, 288)) * 3).astype(dtype)
    scale = None
    if garbage:
        x[3, :32], x[4, 7], x[5, 9] = 0, np.nan, -np.inf
        scale = 37.5 if recipe in quant.NVFP4_RECIPES else None
    expected = quant.quantize(x, recipe=recipe, global_scale=scale)
    found, where = dispatch.quantize(x, recipe=recipe, global_scale=scale, device="cuda")
    assert where == "cuda"
    assert np.array_equal(found.packed, expected.packed)
    assert np.array_equal(found.scales, expected.scales)
    assert found.global_scale.tobytes() == expected.global_scale.tobytes()
    for wide in (np.float32, ml_dtypes.bfloat16):
        back, where = dispatch.dequantize(found, wide, device="cuda")
        assert where == "cuda"
        assert back.dtype == wide
        assert back.tobytes() == quant.dequantize(expected, wide).tobytes()


def test_what_has_no_kernel_is_computed_on_the_cpu():
    x = np.ones((4, 64), np.float32)
    assert dispatch.quantize(x, recipe="modelopt")[1] == "cpu"
    assert dispatch.quantize(x[0], recipe="ieee")[1] == "cpu"
