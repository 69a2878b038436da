"""What the Kernel lab times on a GPU: the streaming kernels beside torch's copy, on tensors that no cache holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from nvfp4viz.device.probe import require_cuda

__all__ = ["SHAPE", "candidates"]

SHAPE = (8192, 8192)  # 128 MiB of BF16: a few times the largest L2
RING = 3  # inputs in turn


def candidates() -> tuple[Any, dict[str, tuple[Callable[[], object], int]]]:
    """torch, and ``{name: (call, bytes read and written)}``.

    Raises
    ------
    DeviceError
        Where no GPU computes.
    """
    require_cuda()
    import torch

    from nvfp4viz.device import ops

    generator = torch.Generator(device="cuda").manual_seed(0)
    inputs = [torch.randn(SHAPE, device="cuda", generator=generator).to(torch.bfloat16) for _ in range(RING)]
    coded = [ops.quantize(x, recipe="vllm-cuda", global_scale=448.0) for x in inputs]
    out = torch.empty_like(inputs[0])
    ring, codes = itertools.cycle(inputs), itertools.cycle(coded)
    elements = inputs[0].numel()
    wide, narrow = 2 * elements, elements // 2 + elements // 16
    return torch, {
        "copy": (lambda: out.copy_(next(ring)), 2 * wide),
        "quantise": (lambda: ops.quantize(next(ring), recipe="vllm-cuda", global_scale=448.0), wide + narrow),
        "dequantise": (lambda: ops.dequantize(next(codes), torch.bfloat16), wide + narrow),
        "amax": (lambda: ops.amax(next(ring)), wide),
    }
