"""Run the real packages over the golden sets and save what they answer.  Runs inside ``.venv-peers``.

    .venv-peers/bin/python tests/golden/run_peers.py OUT.npz [SET ...]

With names of sets: those sets alone, without the tables.
Nothing of nvfp4viz is imported here: these are the packages' own functions on the inputs of ``golden_sets.py``.
Keys are ``format/package/set/dtype/what``; ``what`` is ``packed``, ``scales``, ``global`` (the f32 the package stores)
or ``sha`` (SHA-256 of the f32 and bf16 dequantised tensors, which are too large to keep).
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import golden_sets as sets
import numpy as np
import torch

warnings.filterwarnings("ignore")
torch.set_num_threads(1)

Result = dict[str, np.ndarray]
PACKAGES = (
    "torch",
    "torchao",
    "nvidia-modelopt",
    "compressed-tensors",
    "flashinfer-python",
    "ml_dtypes",
    "gfloat",
    "numpy",
)


def tensor(name: str, dtype: str) -> torch.Tensor:
    x = torch.from_numpy(sets.make(name, dtype).copy())
    return x.view(torch.bfloat16) if dtype == "bf16" else x


def raw_bytes(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.uint8).numpy()


def f32(value: torch.Tensor) -> np.ndarray:
    return value.detach().to(torch.float32).reshape(-1)[:1].numpy()


def dequantised_sha(dequantise: Callable[[torch.dtype], torch.Tensor], only_bf16: bool = False) -> np.ndarray:
    digests = []
    for dtype in (torch.bfloat16,) if only_bf16 else (torch.float32, torch.bfloat16):
        values = dequantise(dtype).contiguous()
        digests.append(sets.sha256(values.view(torch.int16 if dtype is torch.bfloat16 else torch.int32).numpy()))
    return np.array(digests)


# ------------------------------------------------------------------------------------------------------- NVFP4


def modelopt_nvfp4(x: torch.Tensor, stored: torch.Tensor | None = None) -> Result:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    q, scales, decode = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=stored)

    def dequantise(dtype: torch.dtype) -> torch.Tensor:
        return q.dequantize(dtype, scale=scales, double_scale=decode, block_sizes={-1: 16})

    return {
        "packed": q._quantized_data.numpy(),
        "scales": raw_bytes(scales),
        "global": f32(decode),
        "sha": dequantised_sha(dequantise),
    }


def torchao_nvfp4(x: torch.Tensor, stored: torch.Tensor | None = None) -> Result:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    decode = per_tensor_amax_to_scale(x.abs().amax()) if stored is None else stored
    q = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=decode.reshape(()))
    return {
        "packed": raw_bytes(q.qdata),
        "scales": raw_bytes(q.scale),
        "global": f32(decode),
        "sha": dequantised_sha(q.dequantize),
    }


def torchao_single_level(x: torch.Tensor) -> Result:
    """NVFP4 with block scales alone: what our ``ieee`` recipe computes at a global scale of 1."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scales, packed = nvfp4_quantize(x)
    return {"packed": raw_bytes(packed), "scales": raw_bytes(scales)}


def ct_scheme(block: int) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    kind: dict[str, Any] = (
        {"strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn}
        if block == 16
        else {"strategy": "group", "scale_dtype": torch.uint8}
    )
    weights = QuantizationArgs(num_bits=4, type="float", symmetric=True, group_size=block, **kind)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def ct_run(x: torch.Tensor, block: int, encode: torch.Tensor | None) -> Result:
    """``calculate_qparams`` as its observers call it, then the compressor that writes checkpoints."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = ct_scheme(block)
    compressor = NVFP4PackedCompressor if block == 16 else MXFP4PackedCompressor
    grouped = x.reshape(*x.shape[:-1], -1, block)
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights, global_scale=encode)
    state = {"weight": x.clone(), "weight_scale": scale}
    if encode is not None:
        state["weight_global_scale"] = encode
    saved = compressor.compress(state, scheme)
    result = {"packed": raw_bytes(saved["weight_packed"]), "scales": raw_bytes(saved["weight_scale"])}
    result["sha"] = dequantised_sha(lambda _: compressor.decompress(saved, scheme)["weight"].data, only_bf16=True)
    return result


def ct_nvfp4(x: torch.Tensor, stored: torch.Tensor | None = None) -> Result:
    from compressed_tensors.quantization.utils import generate_gparam

    encode = generate_gparam(x.amin(), x.amax()) if stored is None else stored
    return {**ct_run(x, 16, encode), "global": f32(encode)}


# ------------------------------------------------------------------------------------------------------- MXFP4


def modelopt_mxfp4(x: torch.Tensor) -> Result:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    q, scales = MXFP4QTensor.quantize(x.clone(), 32)

    def dequantise(dtype: torch.dtype) -> torch.Tensor:
        return q.dequantize(dtype, scale=scales, block_sizes={-1: 32})

    packed = q._quantized_data.numpy()
    return {"packed": packed, "scales": scales.reshape(len(packed), -1).numpy(), "sha": dequantised_sha(dequantise)}


def torchao_mxfp4(mode: str) -> Callable[[torch.Tensor], Result]:
    def run(x: torch.Tensor) -> Result:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

        fp4 = torch.float4_e2m1fn_x2
        scales, packed = to_mx(x, fp4, 32, ScaleCalculationMode[mode])
        return {
            "packed": raw_bytes(packed),
            "scales": raw_bytes(scales),
            "sha": dequantised_sha(lambda dtype: to_dtype(packed, scales, fp4, 32, dtype)),
        }

    return run


def ct_mxfp4(x: torch.Tensor) -> Result:
    return ct_run(x, 32, None)


def flashinfer_deepgemm(x: torch.Tensor) -> Result:
    """DeepGEMM's cast, of which FlashInfer carries a copy that runs on a CPU (its attention trace's reference)."""
    from flashinfer.trace.templates.attn_scores import _per_token_cast_to_fp4

    packed, scales = _per_token_cast_to_fp4(x, 32)
    return {"packed": raw_bytes(packed), "scales": raw_bytes(scales)}


RUNNERS: dict[str, Callable[[torch.Tensor], Result]] = {
    "nvfp4/modelopt": modelopt_nvfp4,
    "nvfp4/torchao": torchao_nvfp4,
    "nvfp4/torchao-g1": torchao_single_level,
    "nvfp4/compressed-tensors": ct_nvfp4,
    "mxfp4/modelopt": modelopt_mxfp4,
    "mxfp4/torchao-floor": torchao_mxfp4("FLOOR"),
    "mxfp4/torchao-rceil": torchao_mxfp4("RCEIL"),
    "mxfp4/torchao-even": torchao_mxfp4("EVEN"),
    "mxfp4/compressed-tensors": ct_mxfp4,
    "mxfp4/flashinfer-deepgemm": flashinfer_deepgemm,
}
GIVEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Result]] = {
    "nvfp4/modelopt": modelopt_nvfp4,
    "nvfp4/torchao": torchao_nvfp4,
    "nvfp4/compressed-tensors": ct_nvfp4,
}

# --------------------------------------------------------------------------------- decode tables and element casts


def decode_tables() -> Result:
    """All 16 codes x all 256 scale bytes, dequantised by each package, for each global scale it might store."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor
    from torchao.prototype.mx_formats.mx_tensor import to_dtype
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    out: Result = {}
    packed, scale = (torch.from_numpy(a) for a in sets.table_codes_and_scales(16))
    e4m3 = scale.view(torch.float8_e4m3fn)
    for i, value in enumerate(sets.DEQUANT_SCALES):
        g = torch.tensor([value])
        q = NVFP4QTensor((256, 16), torch.float32, packed)
        ao = NVFP4Tensor(packed, e4m3, 16, torch.float32, per_tensor_scale=g[0])
        for dtype in (torch.float32, torch.bfloat16):
            name = "f32" if dtype is torch.float32 else "bf16"
            values = {
                "modelopt": q.dequantize(dtype, scale=e4m3, double_scale=g, block_sizes={-1: 16}),
                "torchao": ao.dequantize(dtype),
            }
            for package, t in values.items():
                out[f"decode/nvfp4/{package}/{i}/{name}"] = bits(t)
        state = {"weight_packed": packed, "weight_scale": e4m3, "weight_global_scale": g}
        ct = NVFP4PackedCompressor.decompress(state, ct_scheme(16))["weight"]
        out[f"decode/nvfp4/compressed-tensors/{i}/bf16"] = bits(ct.data)

    packed, scale = (torch.from_numpy(a) for a in sets.table_codes_and_scales(32))
    for dtype in (torch.float32, torch.bfloat16):
        name = "f32" if dtype is torch.float32 else "bf16"
        q = MXFP4QTensor((256, 32), torch.float32, packed)
        out[f"decode/mxfp4/modelopt/{name}"] = bits(q.dequantize(dtype, scale=scale, block_sizes={-1: 32}))
        e8m0 = scale.view(torch.float8_e8m0fnu)
        out[f"decode/mxfp4/torchao/{name}"] = bits(to_dtype(packed, e8m0, torch.float4_e2m1fn_x2, 32, dtype))
    state = {"weight_packed": packed, "weight_scale": scale}
    ct = MXFP4PackedCompressor.decompress(state, ct_scheme(32))["weight"]
    out["decode/mxfp4/compressed-tensors/bf16"] = bits(ct.data)
    return out


def bits(t: torch.Tensor) -> np.ndarray:
    """The bit patterns of a tensor: NaN and -0 survive as they are."""
    t = t.detach().contiguous()
    if t.dtype is torch.bfloat16:
        return t.view(torch.int16).numpy().view(np.uint16)
    return t.view(torch.int32).numpy().view(np.uint32)


def element_casts() -> Result:
    import gfloat
    import ml_dtypes
    from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e4m3

    x = sets.cast_inputs()
    finite = np.isfinite(x)
    out: Result = {}
    for name, dtype in (
        ("e2m1", ml_dtypes.float4_e2m1fn),
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e8m0", ml_dtypes.float8_e8m0fnu),
    ):
        out[f"cast/ml_dtypes/{name}"] = x.astype(dtype).view(np.uint8)
        codes = np.arange(16 if name == "e2m1" else 256, dtype=np.uint8)
        out[f"values/ml_dtypes/{name}"] = codes.view(dtype).astype(np.float32).view(np.uint32)
    t = torch.from_numpy(x)
    out["cast/torch/e4m3"] = raw_bytes(t.to(torch.float8_e4m3fn))
    out["cast/torch/e8m0"] = raw_bytes(t.to(torch.float8_e8m0fnu))
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    out["values/torch/e4m3"] = bits(every.view(torch.float8_e4m3fn).float())
    out["values/torch/e8m0"] = bits(every.view(torch.float8_e8m0fnu).float())
    for name, info in (("e2m1", format_info_ocp_e2m1), ("e4m3", format_info_ocp_e4m3)):
        # gfloat has no E2M1 code for Inf or NaN and raises: those inputs are sent as 0 and left out of the comparison
        rounded = gfloat.round_ndarray(info, np.where(finite, x, 0).astype(np.float64), sat=True)
        out[f"cast/gfloat/{name}"] = gfloat.encode_ndarray(info, rounded).astype(np.uint8)
    return out


def swizzles() -> Result:
    from torchao.prototype.mx_formats.utils import to_blocked

    out: Result = {}
    for rows, columns in ((128, 4), (130, 6), (256, 64), (1, 1), (37, 12)):
        data = (sets.raw64(rows, rows * columns) & np.uint64(255)).astype(np.uint8).reshape(rows, columns)
        out[f"swizzle/torchao/{rows}x{columns}"] = to_blocked(torch.from_numpy(data)).flatten().numpy()
    return out


def run_sets(names: tuple[str, ...]) -> Result:
    """Every package on every named set, in both dtypes."""
    out: Result = {}
    for name in names:
        for dtype in sets.DTYPES:
            for key, run in RUNNERS.items():
                for what, array in run(tensor(name, dtype)).items():
                    out[f"{key}/{name}/{dtype}/{what}"] = array
    return out


def run_given() -> Result:
    """The NVFP4 packages with global scales that are not the tensor's own."""
    out: Result = {}
    for name in sets.GIVEN_SETS:
        for dtype in sets.DTYPES:
            for i, value in enumerate(sets.GIVEN_SCALES):
                for key, run in GIVEN.items():
                    stored = 1 / value if key.endswith("compressed-tensors") else value
                    result = run(tensor(name, dtype), torch.tensor([stored], dtype=torch.float32))
                    for what in ("packed", "scales", "global"):
                        out[f"{key}/{name}@{i}/{dtype}/{what}"] = result[what]
    return out


def main(out: str, *names: str) -> None:
    if names:
        answers = run_sets(names)
    else:
        answers = {**run_sets(sets.NAMES), **run_given(), **decode_tables(), **element_casts(), **swizzles()}
    answers["versions"] = np.array(json.dumps({name: version(name) for name in PACKAGES}))
    np.savez_compressed(out, **answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
