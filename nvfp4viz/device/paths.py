"""The same tensor through every path that this machine has, and a comparison of what they answer, byte by byte.

The NumPy path is what the others are held against.  PyTorch's is a plain restatement of one recipe with torch's own
casts.  The scalar reference is slow and is given the first rows only; the comparison then covers those.  The CUDA path
runs where `nvfp4viz.device.probe` finds a GPU that computes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz import quant
from nvfp4viz.device import describe_device, dispatch
from nvfp4viz.errors import DeviceError

__all__ = ["KINDS", "Difference", "PathRun", "compare", "contrast_of", "run_paths", "sample"]

U8 = npt.NDArray[np.uint8]
Kind = Literal["grid", "normal", "any"]
KINDS: tuple[Kind, ...] = ("grid", "normal", "any")
# `dispatch.CUDA_RECIPES`, each with another rule that answers differently on some inputs.
CONTRASTS = {
    "vllm-cuda": "ieee",
    "ieee": "vllm-cuda",
    "ocp-floor": "vllm-even",
    "vllm-even": "ocp-floor",
    "flashinfer-ceil": "ocp-floor",
    "deepgemm-ceil": "flashinfer-ceil",
}
TORCH_RECIPE = "ieee"
REFERENCE_BLOCKS = 2048  # a quarter of a second
# Halfway between neighbouring E2M1 values: where one ulp decides a code.
MIDPOINTS = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers differ.

    Attributes
    ----------
    bytes
        How many bytes were compared, packed codes and block scales together.
    differing
        How many of them are not equal.
    first
        The first one in order of blocks: ``(array, row, column, expected, found)`` with array ``"packed"`` or
        ``"scales"``, or None.
    """

    bytes: int
    differing: int
    first: tuple[str, int, int, int, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class PathRun:
    """One path's answer.

    Attributes
    ----------
    path
        ``"numpy"``, ``"numba"``, ``"reference"``, ``"cuda"``, ``"torch"``, or ``"contrast"`` (another recipe, NumPy).
    recipe
        What it computed.
    packed, scales
        uint8 ``(rows, K/2)`` and ``(rows, K/block)``; ``rows`` may be fewer than the tensor's for the reference.
    seconds
        Wall time of the call, once; on a GPU with the copies from and to the host's memory.
    """

    path: str
    recipe: str
    packed: U8
    scales: U8
    seconds: float


def sample(kind: Kind, rows: int, blocks: int, recipe: str, seed: int) -> npt.NDArray[Any]:
    """A seeded BF16 tensor ``(rows, blocks * block size)``.

    ``"grid"``: halfway between codes, where the order of operations shows; ``"normal"``: a bell curve;
    ``"any"``: every bit pattern alike, NaN and infinities included.
    """
    block = quant.RECIPES[recipe].block_size
    shape = (rows, blocks * block)
    rng = np.random.default_rng(seed)
    if kind == "any":
        return rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(ml_dtypes.bfloat16)
    if kind == "normal":
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    top = np.float32(1 + rng.integers(128) / 128)
    x = rng.choice(MIDPOINTS, shape) * rng.choice(np.float32([-1, 1]), shape) * (top / np.float32(6))
    x[:, ::block] = top
    return x.astype(ml_dtypes.bfloat16)


def global_scale_of(x: npt.NDArray[Any], recipe: str) -> np.float32 | None:
    """The recipe's own global scale, from the finite values; None for MXFP4."""
    if quant.RECIPES[recipe].scheme == "mxfp4":
        return None
    wide = np.abs(x.astype(np.float32))
    return quant.global_scale(np.max(wide, where=np.isfinite(wide), initial=0), recipe, x.dtype)


def contrast_of(recipe: str) -> str:
    """Another recipe of the same format, to show what a difference looks like."""
    return CONTRASTS[recipe]


def run_paths(x: npt.NDArray[Any], recipe: str, torch: bool = False) -> list[PathRun]:
    """``x`` through NumPy, Numba, the reference, the GPU if there is one, and through another recipe, in this order.

    ``torch`` adds PyTorch before the last, for `TORCH_RECIPE` on numbers: on the GPU or else on the CPU.

    Raises
    ------
    FormatError
        For a shape that the recipe cannot take.
    """
    scale = global_scale_of(x, recipe)
    part = x[: max(1, REFERENCE_BLOCKS * quant.RECIPES[recipe].block_size // x.shape[1])]

    def on_cpu(path: str, tensor: npt.NDArray[Any]) -> PathRun:
        begin = time.perf_counter()
        q = quant.quantize(tensor, recipe=recipe, global_scale=scale, path=path)  # type: ignore[arg-type]
        return PathRun(path, recipe, q.packed, q.scales, time.perf_counter() - begin)

    on_cpu("numba", x[:1])  # its first call loads compiled code
    runs = [on_cpu("numpy", x), on_cpu("numba", x), on_cpu("reference", part)]
    if describe_device().computes_on == "cuda":
        runs.append(_on_gpu(x, recipe, scale))
    if torch and recipe == TORCH_RECIPE:
        runs.append(_in_torch(x, np.float32(scale)))
    begin = time.perf_counter()
    other = contrast_of(recipe)
    q = quant.quantize(x, recipe=other, global_scale=scale, path="numpy")
    return [*runs, PathRun("contrast", other, q.packed, q.scales, time.perf_counter() - begin)]


def _on_gpu(x: npt.NDArray[Any], recipe: str, scale: np.float32 | None) -> PathRun:
    """The CUDA kernel.

    Raises
    ------
    DeviceError
        Where the GPU turns out not to compute.
    """
    begin = time.perf_counter()
    try:
        q, _ = dispatch.quantize(x, recipe=recipe, global_scale=scale, device="cuda")
    except RuntimeError as error:  # torch's own, such as out of memory
        raise DeviceError("device.launch", kernel="nv_quantize", reason=str(error).splitlines()[0]) from error
    return PathRun("cuda", recipe, q.packed, q.scales, time.perf_counter() - begin)


def _in_torch(x: npt.NDArray[Any], scale: np.float32) -> PathRun:
    """`TORCH_RECIPE` for finite ``x`` in PyTorch operations: ``s = E4M3(G * (m / 6))``, codes of ``x * (G / s)``."""
    import torch

    where = "cuda" if describe_device().computes_on == "cuda" else "cpu"
    tensor = torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).to(where)
    begin = time.perf_counter()
    blocks = tensor.float().view(len(x), -1, 16)
    # Divisors are tensors: torch multiplies by the reciprocal of a plain number on a GPU, which is not a division.
    g, six = torch.tensor(float(scale), device=where), torch.tensor(6.0, device=where)
    scales = (g * (blocks.abs().amax(-1) / six)).clamp(max=448.0).to(torch.float8_e4m3fn)
    s = scales.float()
    y = blocks * torch.where(s == 0, torch.zeros_like(s), g / s).unsqueeze(-1)
    size = y.abs()
    codes = torch.signbit(y).to(torch.uint8) << 3
    for code, midpoint in enumerate(MIDPOINTS.tolist()):  # code or code + 1: a tie goes to the even one
        codes += (size >= midpoint if code % 2 else size > midpoint).to(torch.uint8)
    codes = codes.view(len(x), -1)
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).cpu().numpy()
    return PathRun("torch", TORCH_RECIPE, packed, scales.view(torch.uint8).cpu().numpy(), time.perf_counter() - begin)


def compare(run: PathRun, truth: PathRun) -> Difference:
    """``run`` against ``truth``, on the rows that both have."""
    rows = min(len(run.packed), len(truth.packed))
    total = differing = 0
    first: tuple[str, int, int, int, int] | None = None
    for name in ("packed", "scales"):
        found, expected = getattr(run, name)[:rows], getattr(truth, name)[:rows]
        total += expected.size
        rows_of, columns_of = np.nonzero(found != expected)
        differing += len(rows_of)
        if len(rows_of):
            row, column = int(rows_of[0]), int(columns_of[0])
            here = (name, row, column, int(expected[row, column]), int(found[row, column]))
            if first is None or _block(here, truth) < _block(first, truth):
                first = here
    return Difference(total, differing, first)


def _block(place: tuple[str, int, int, int, int], truth: PathRun) -> tuple[int, int]:
    """The block that a byte belongs to: (row, block)."""
    name, row, column, _, _ = place
    per_block = truth.packed.shape[1] // truth.scales.shape[1] if name == "packed" else 1
    return row, column // per_block
