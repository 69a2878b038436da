"""NVFP4 on a CPU against the packages that do it: quantise and dequantise, ours and theirs in one process.

Runs inside ``.venv-peers``, so that the same torch, NumPy and Numba serve everybody, with as many threads as cores.
Before any timing our bytes are compared with ModelOpt's on the very tensor that is timed.  The global scale is given;
finding the tensor's maximum has a table of its own.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable

import numpy as np

from benchmarks import harness

ENVIRONMENT = "peers"
PEERS = ["ModelOpt", "torchao", "compressed-tensors"]
QUANTISE_GOAL = 15.0
DEQUANTISE_GOAL = {"bf16": 15.0, "f32": 8.0}


class Case:
    """One tensor in every form that the candidates want: NumPy and torch views of the same memory."""

    def __init__(self, rows: int, columns: int, dtype: str, seed: int = 0) -> None:
        import ml_dtypes
        import torch

        x = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
        self.dtype = dtype
        self.shape = f"{rows}x{columns} {dtype.upper()}"
        self.array = x.astype(ml_dtypes.bfloat16) if dtype == "bf16" else x
        self.tensor = torch.from_numpy(self.array.view(np.int16) if dtype == "bf16" else x)
        if dtype == "bf16":
            self.tensor = self.tensor.view(torch.bfloat16)
        self.torch_dtype = self.tensor.dtype
        self.bytes = self.array.nbytes
        amax = np.float32(np.abs(self.array.astype(np.float32)).max())
        self.decode = np.float32(amax / np.float32(2688))
        self.decode_tensor = torch.tensor(self.decode)
        self.encode_tensor = torch.tensor([np.float32(2688) / amax])


def ct_scheme() -> object:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(
        num_bits=4,
        type="float",
        symmetric=True,
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def peer_quantisers(case: Case) -> dict[str, Callable[[], object]]:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization.utils import calculate_qparams
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    x, scheme = case.tensor, ct_scheme()

    def compressed_tensors() -> dict:
        low, high = x.view(*x.shape[:-1], -1, 16).aminmax(dim=-1)
        scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=case.encode_tensor)
        state = {"weight": x, "weight_scale": scale, "weight_global_scale": case.encode_tensor}
        return NVFP4PackedCompressor.compress(state, scheme)

    return {
        "ModelOpt": lambda: NVFP4QTensor.quantize(x, 16, weights_scaling_factor_2=case.decode_tensor),
        "torchao": lambda: nvfp4_quantize(x, 16, per_tensor_scale=case.decode_tensor),
        "compressed-tensors": compressed_tensors,
    }


def peer_dequantisers(case: Case, packed: object, scales: object) -> dict[str, Callable[[], object]]:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    dtype, scheme = case.torch_dtype, ct_scheme()
    mo = NVFP4QTensor(case.tensor.shape, dtype, packed)
    ao = NVFP4Tensor(packed, scales, 16, dtype, per_tensor_scale=case.decode_tensor)
    state = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": case.encode_tensor}
    blocks = {-1: 16}
    return {
        "ModelOpt": lambda: mo.dequantize(dtype, scale=scales, double_scale=case.decode_tensor, block_sizes=blocks),
        "torchao": lambda: ao.dequantize(dtype),
        "compressed-tensors": lambda: NVFP4PackedCompressor.decompress(state, scheme),
    }


def copies(case: Case) -> dict[str, Callable[[], object]]:
    """The floor under any of this: read the tensor once, write it once.

    Every dequantiser here returns new memory, which the system must map and clear first: hence the second copy.
    """
    import torch

    array_out, tensor_out = np.empty_like(case.array), torch.empty_like(case.tensor)
    return {
        "copy, NumPy, 1 thread": lambda: np.copyto(array_out, case.array),
        "copy to fresh memory, NumPy, 1 thread": lambda: case.array.copy(),
        "copy, torch": lambda: tensor_out.copy_(case.tensor),
    }


def compare_quantise(case: Case, repeats: int) -> harness.Section:
    from nvfp4viz import quant

    peers = peer_quantisers(case)
    theirs, their_scales, _ = peers["ModelOpt"]()
    ours = quant.quantize(case.array, recipe="modelopt", global_scale=case.decode)
    import torch

    assert np.array_equal(ours.packed, theirs._quantized_data.numpy()), "our packed bytes are not ModelOpt's"
    assert np.array_equal(ours.scales, their_scales.view(torch.uint8).numpy()), "our block scales are not ModelOpt's"

    def run(recipe: str, path: str = "auto") -> Callable[[], object]:
        given = case.decode if recipe == "modelopt" else quant.global_scale(case.decode * np.float32(2688), recipe)
        return lambda: quant.quantize(case.array, recipe=recipe, global_scale=given, path=path)

    candidates = {
        "nvfp4viz, modelopt recipe": run("modelopt"),
        "nvfp4viz, ieee recipe": run("ieee"),
        "nvfp4viz, vllm-cuda recipe": run("vllm-cuda"),
        "nvfp4viz, NumPy path": run("modelopt", "numpy"),
        **peers,
        **copies(case),
    }
    times = harness.interleave(candidates, repeats)
    best = harness.fastest(times, PEERS)
    ratio = statistics.median(times[best]) / statistics.median(times["nvfp4viz, modelopt recipe"])
    return harness.Section(
        f"Quantise {case.shape}",
        f"Global scale given. GB/s of input read. {threads()} threads. Our bytes were ModelOpt's on this tensor.",
        harness.rows_from(times, case.bytes, best),
        best,
        [harness.Goal(f"quantise {case.shape}, times the best peer ({best})", ratio, QUANTISE_GOAL)],
    )


def compare_dequantise(case: Case, repeats: int) -> harness.Section:
    import torch

    from nvfp4viz import quant

    theirs, scales, _ = peer_quantisers(case)["ModelOpt"]()
    packed = theirs._quantized_data
    q = quant.quantize(case.array, recipe="modelopt", global_scale=case.decode)
    peers = peer_dequantisers(case, packed, scales)
    ours = quant.dequantize(q, dtype=case.array.dtype)
    reference = peers["ModelOpt"]().float().numpy()
    # as numbers: ModelOpt answers +0 for the code of -0, and that difference is asserted elsewhere
    assert np.array_equal(ours.astype(np.float32), reference), "our values are not ModelOpt's"
    candidates = {
        "nvfp4viz": lambda: quant.dequantize(q, dtype=case.array.dtype),
        "nvfp4viz, NumPy path": lambda: quant.dequantize(q, dtype=case.array.dtype, path="numpy"),
        **peers,
        **copies(case),
    }
    times = harness.interleave(candidates, repeats)
    best = harness.fastest(times, PEERS)
    ratio = statistics.median(times[best]) / statistics.median(times["nvfp4viz"])
    only_bf16 = "" if case.torch_dtype is torch.bfloat16 else " compressed-tensors answers BF16 only."
    return harness.Section(
        f"Dequantise to {case.shape}",
        f"GB/s of output written. {threads()} threads. Our values were equal to ModelOpt's.{only_bf16}",
        harness.rows_from(times, case.bytes, best),
        best,
        [harness.Goal(f"dequantise to {case.shape}, times the best peer ({best})", ratio, DEQUANTISE_GOAL[case.dtype])],
    )


def compare_amax(case: Case, repeats: int) -> harness.Section:
    from nvfp4viz import quant

    x = case.tensor
    candidates = {
        "nvfp4viz": lambda: quant.amax(case.array),
        "torch aminmax": lambda: x.aminmax(),
        "torch abs().max()": lambda: x.abs().max(),
    }
    times = harness.interleave(candidates, repeats)
    rows = harness.rows_from(times, case.bytes, "torch abs().max()")
    return harness.Section(f"Maximum of {case.shape}", "GB/s of input read.", rows, "torch abs().max()")


def threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(quick: bool) -> list[harness.Section]:
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads())
    sizes = [(64, 1024, "bf16"), (64, 2048, "f32")] if quick else [(4096, 4096, "bf16"), (4096, 14336, "f32")]
    repeats = 2 if quick else 9
    sections = []
    for rows, columns, dtype in sizes:
        case = Case(rows, columns, dtype)
        for compare in (compare_quantise, compare_dequantise, compare_amax):
            sections.append(compare(case, repeats))
    return sections


if __name__ == "__main__":
    harness.main(measure)
