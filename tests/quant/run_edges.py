"""Let the installed packages quantise edge blocks under garbage global scales.  Runs inside a package environment.

    .venv-peers/bin/python tests/quant/run_edges.py IN.npz OUT.npz modelopt torchao compressed-tensors …
    .venv-peers-vllm/bin/python tests/quant/run_edges.py IN.npz OUT.npz vllm-emulation

``IN`` holds the blocks ``f32`` and ``bf16`` (n, 32) and one float32 for each global scale, ``g/<name>``; ``OUT`` gets
``recipe/scale/dtype/packed`` and ``…/scales``.  Nothing of nvfp4viz is imported here.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
MXFP4 = {
    "modelopt-mxfp4": "mxfp4/modelopt",
    "ocp-floor": "mxfp4/torchao-floor",
    "deepgemm-ceil": "mxfp4/flashinfer-deepgemm",
}


def vllm_block(x: torch.Tensor, encode: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    import run_vllm

    values, scale = run_vllm.ref_nvfp4_quant(x, encode, 16)
    return run_vllm.pack(values.numpy()), scale.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def package_block(recipe: str, x: torch.Tensor, stored: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    import run_peers

    if stored is not None:
        result = run_peers.GIVEN[f"nvfp4/{recipe}"](x, stored)
        return result["packed"], result["scales"]
    blocks = len(x)
    if recipe == "deepgemm-ceil":  # packs the scales of four blocks of a row into one word
        x = torch.cat([x, torch.zeros(-blocks % 4, 32, dtype=x.dtype)]).reshape(-1, 128)
    result = run_peers.RUNNERS[MXFP4[recipe]](x)
    packed = result["packed"].view(np.uint8).reshape(-1, 16)[:blocks]
    return packed, result["scales"].reshape(-1, 1)[:blocks]


def main(given: str, out: str, *recipes: str) -> None:
    data = np.load(given)
    answers: dict[str, np.ndarray] = {}
    for dtype in ("f32", "bf16"):
        x = torch.from_numpy(data[dtype])
        x = x.view(torch.bfloat16) if dtype == "bf16" else x
        for recipe in recipes:
            names = [None] if recipe in MXFP4 else [key for key in data.files if key.startswith("g/")]
            for name in names:
                stored = None if name is None else torch.from_numpy(data[name].reshape(1))
                if recipe == "vllm-emulation":
                    packed, scales = vllm_block(x.clone(), stored)
                else:
                    packed, scales = package_block(recipe, x.clone(), stored)
                key = f"{recipe}/{'one' if name is None else name.removeprefix('g/')}/{dtype}"
                answers[f"{key}/packed"], answers[f"{key}/scales"] = packed, scales
    np.savez(out, **answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
