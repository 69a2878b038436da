"""torch's CUDA and CuPy's live in one process: each computes, before and after the other, on the same memory."""

import numpy as np
import pytest

from nvfp4viz import device
from nvfp4viz.device import build
from nvfp4viz.device.load import kernel


@pytest.fixture(scope="module")
def versions(torch):
    import cupy

    found = {
        "torch": torch.version.cuda,
        "cupy": device._cupy_cuda(),
        "cupy runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, build.nvrtc().getVersion())),
        "driver": ".".join(map(str, device.describe_device().driver)),
    }
    print("\nCUDA versions: " + ", ".join(f"{name} {version}" for name, version in found.items()))
    return found


def test_the_driver_serves_both(versions):
    serves = int(versions["driver"].split(".")[0])
    assert serves >= int(versions["torch"].split(".")[0])
    assert serves >= versions["cupy"]


def test_both_compute_in_turn(torch, versions):
    """torch, our kernel through CuPy, a copy by CuPy's own CUDA runtime, cuBLAS of torch's: one chain, one memory."""
    import cupy

    seeds = torch.arange(5000, dtype=torch.int32, device="cuda") * 3
    out = torch.zeros_like(seeds)
    kernel("probe.cu", "nv_probe")(20, 256, (seeds, out, np.int32(5000)))
    view = cupy.from_dlpack(out)
    assert view.data.ptr == out.data_ptr()
    expected = np.arange(5000, dtype=np.uint32) * np.uint32(3) * np.uint32(1664525) + np.uint32(1013904223)
    torch.cuda.synchronize()
    assert np.array_equal(cupy.asnumpy(view).view(np.uint32), expected)
    assert np.array_equal(out.cpu().numpy().view(np.uint32), expected)
    ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    assert (ones @ ones == 64).all()
    kernel("probe.cu", "nv_probe")(20, 256, (out, out, np.int32(5000)))
    again = expected * np.uint32(1664525) + np.uint32(1013904223)
    assert np.array_equal(out.cpu().numpy().view(np.uint32), again)
