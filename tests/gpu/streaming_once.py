"""Every streaming kernel once on small ragged shapes, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        python3 -m tests.gpu.streaming_once

and likewise ``--tool racecheck`` and ``--tool initcheck``.  Without torch's own cache every tensor is an allocation of
its own, so that reading past its end is seen.
"""

from __future__ import annotations

import torch

from nvfp4viz.device import ops
from nvfp4viz.device.ops.quantize import DTYPES, RECIPE_KERNELS
from nvfp4viz.quant import RECIPES


def main() -> None:
    launches = 0
    generator = torch.Generator(device="cuda").manual_seed(0)
    offsets = torch.tensor([0, 0, 1, 128, 128, 131, 131], dtype=torch.int32, device="cuda")
    rows = 131
    by_range = torch.linspace(1, 600, 6, device="cuda")
    by_row = torch.linspace(1, 600, rows, device="cuda")
    for dtype in DTYPES:
        for columns in (1, 7, 44):
            wide = torch.randn(rows, columns * 32, device="cuda", generator=generator)
            x = wide.to(dtype)
            for recipe in RECIPE_KERNELS:
                scaled = RECIPES[recipe].scheme == "nvfp4"
                for layout in ("linear", "swizzled"):
                    for scale in (3.0, by_row, by_range) if scaled else (None,):
                        for soft in (False, True):
                            where = None if scale is by_row else offsets
                            how = {"recipe": recipe, "global_scale": scale, "layout": layout, "soft": soft}
                            q = ops.quantize(x, offsets=where, **how)
                            if not soft:
                                ops.dequantize(q)
                                ops.dequantize(q, torch.float32)
                            launches += 1
            ops.amax(x)
            ops.amax(x, per="token")
            ops.amax(x, offsets)
    for columns in (1, 7, 44):
        x = torch.randn(rows, columns * 32, device="cuda", generator=generator).to(torch.bfloat16)
        for activation in ("silu", "gelu_tanh"):
            for layout in ("linear", "swizzled"):
                ops.activation_quantize(x, activation=activation, global_scale=by_range, offsets=offsets, layout=layout)
                launches += 1
    large = torch.randn(3001, 2 * 1408, device="cuda", generator=generator).to(torch.bfloat16)
    for layout in ("linear", "swizzled"):  # the forms for large inputs: table in shared memory, blocks that stay
        q = ops.activation_quantize(large, activation="silu", global_scale=3.0, layout=layout)
        launches += 1
    ops.dequantize(ops.quantize(torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16), recipe="ieee"))
    torch.cuda.synchronize()
    print(f"{launches} quantisations and what belongs to them ran")


if __name__ == "__main__":
    main()
