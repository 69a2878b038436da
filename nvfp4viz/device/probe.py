"""Does the GPU really compute?  A kernel of known results is compiled, loaded, run and read back, once a process."""

from __future__ import annotations

import threading

import numpy as np

from nvfp4viz import device
from nvfp4viz.device.load import kernel
from nvfp4viz.errors import DeviceError

__all__ = ["require_cuda"]

_probing = threading.Lock()
_passed = False
COUNT = 1000  # a few blocks, the last one ragged


def require_cuda() -> device.Gpu:
    """The GPU that computes, proven to work.

    Raises
    ------
    DeviceError
        Why none can be used.  The answer is kept, and ``describe_device`` repeats it.
    """
    global _passed
    report = device.describe_device()
    if report.reason is not None:
        raise DeviceError(report.reason.code, **report.reason.params)
    with _probing:
        if not _passed:
            try:
                _run()
            except DeviceError as error:
                device.outcome.failure = error
                raise
            _passed = True
    return report.gpus[0]


def _run() -> None:
    """Run ``nv_probe`` and compare.  Everything that torch or CuPy can throw here becomes one ``DeviceError``."""
    try:
        import torch

        seeds = torch.arange(COUNT, dtype=torch.int32, device="cuda")
        out = torch.zeros_like(seeds)
    except Exception as error:
        raise DeviceError("device.torch-cuda", reason=_first(error)) from error
    try:
        kernel("probe.cu", "nv_probe")((COUNT + 255) // 256, 256, (seeds, out, np.int32(COUNT)))
        found = out.cpu().numpy().view(np.uint32)
    except DeviceError:
        raise
    except Exception as error:
        raise DeviceError("device.launch", kernel="nv_probe", reason=_first(error)) from error
    expected = np.arange(COUNT, dtype=np.uint32) * np.uint32(1664525) + np.uint32(1013904223)
    wrong = int((found != expected).sum())
    if wrong:
        raise DeviceError("device.wrong-answer", wrong=wrong, total=COUNT)


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
