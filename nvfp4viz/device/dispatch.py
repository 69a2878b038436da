"""The one place where the app chooses between CPU and GPU.  The bits are the same (but see `CudaExperts` on capability
10.x); the speed differs.

``device`` is ``"auto"`` (the GPU where one works, else the CPU), ``"cpu"``, or ``"cuda"`` (an error where none works,
or where its kernels do not compute what is asked).
Arrays come and go as NumPy's; what stays on the GPU are the experts' weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz import device
from nvfp4viz.device.memory import smaller_until_it_fits
from nvfp4viz.device.probe import require_cuda
from nvfp4viz.errors import DeviceError
from nvfp4viz.moe import ExpertsResult, Routing, W4A4Experts
from nvfp4viz.quant import RECIPES, QuantizedTensor
from nvfp4viz.quant.api import as_global_scale

__all__ = ["CUDA_RECIPES", "DEVICES", "CudaExperts", "choose", "cuda_experts", "dequantize", "quantize"]

DEVICES = ("auto", "cpu", "cuda")
CUDA_RECIPES = ("ieee", "vllm-cuda", "ocp-floor", "vllm-even", "flashinfer-ceil", "deepgemm-ceil")
"""Recipes that the kernels compute; the others restate packages that run on the CPU."""

Array = npt.NDArray[Any]
Part = TypeVar("Part")


def check_wish(wish: str) -> None:
    """Raise ``device.unknown`` unless a wish is one of `DEVICES`."""
    if wish not in DEVICES:
        raise DeviceError("device.unknown", device=wish)


def choose(wish: str) -> tuple[str, DeviceError | None]:
    """``("cuda", None)`` or ``("cpu", why)`` for a wish; ``why`` is ``None`` where the CPU was asked for.

    Raises
    ------
    DeviceError
        ``device.unknown``; for ``"cuda"`` whatever keeps the GPU from computing.
    """
    check_wish(wish)
    if wish == "cpu":
        return "cpu", None
    try:
        require_cuda()
    except DeviceError as error:
        if wish == "cuda":
            raise
        return "cpu", error
    return "cuda", None


# ------------------------------------------------------------------------------------- quantise and dequantise


def quantize(
    x: Array, *, recipe: str, global_scale: float | np.float32 | None = None, device: str = "auto"
) -> tuple[QuantizedTensor, str]:
    """`nvfp4viz.quant.quantize` on the device that computes, and which one that was.

    Parameters
    ----------
    x : (M, K) bfloat16, float16 or float32
        NumPy.
    recipe, global_scale
        As there.  Recipes outside `CUDA_RECIPES`, and arrays that are no matrix of whole blocks, have no kernel: for
        ``"auto"`` the CPU computes them.
    device
        See the module.

    Returns
    -------
    The same `QuantizedTensor` either way, and ``"cpu"`` or ``"cuda"``.

    Raises
    ------
    DeviceError
        As `choose`; for ``"cuda"`` also ``device.recipe`` and ``device.shape`` where no kernel computes this.
    FormatError
        As `nvfp4viz.quant.quantize`.
    """
    from nvfp4viz import quant

    if not _has_kernel(recipe, x.shape, device) or choose(device)[0] == "cpu":
        return quant.quantize(x, recipe=recipe, global_scale=global_scale), "cpu"
    from nvfp4viz.device import ops

    found = RECIPES[recipe]
    if found.scheme == "mxfp4":
        stored, how = np.float32(1), {}
    else:
        stored = quant.global_scale(quant.amax(x), recipe) if global_scale is None else as_global_scale(global_scale)
        how = {"global_scale": float(stored)}

    def part(rows: slice) -> tuple[Array, Array]:
        q = ops.quantize(to_cuda(x[rows]), recipe=recipe, **how)
        return q.packed.cpu().numpy(), q.scales.cpu().numpy()

    try:
        packed, scales = map(np.concatenate, zip(*_by_rows("quantize", x.shape, part), strict=True))
    except DeviceError as error:
        if device == "cuda" or error.code != "ops.memory":
            raise
        return quant.quantize(x, recipe=recipe, global_scale=global_scale), "cpu"
    return QuantizedTensor(packed, scales, stored, recipe, found.block_size, x.shape), "cuda"


def dequantize(q: QuantizedTensor, dtype: Any = np.float32, device: str = "auto") -> tuple[Array, str]:
    """`nvfp4viz.quant.dequantize` on the device that computes, and which one that was; errors as `quantize`."""
    from nvfp4viz import quant

    if not _has_kernel(q.recipe, q.shape, device) or choose(device)[0] == "cpu":
        return quant.dequantize(q, dtype=dtype), "cpu"
    import torch

    from nvfp4viz.device import ops

    wide = np.dtype(dtype) == np.float32

    def part(rows: slice) -> Array:
        packed = to_cuda(q.packed[rows])
        operands = (packed, to_cuda(q.scales[rows]), float(q.global_scale), q.recipe, (len(packed), q.shape[1]))
        out = ops.dequantize(ops.DeviceQuantized(*operands), dtype=torch.float32 if wide else torch.bfloat16)
        found: Array = out.cpu().numpy() if wide else to_numpy_bf16(out)
        return found

    try:
        return np.concatenate(_by_rows("dequantize", q.shape, part)), "cuda"
    except DeviceError as error:
        if device == "cuda" or error.code != "ops.memory":
            raise
        return quant.dequantize(q, dtype=dtype), "cpu"


def _has_kernel(recipe: str, shape: tuple[int, ...], wish: str) -> bool:
    """Whether the kernels compute this; where they do not and the GPU was asked for by name, an error."""
    check_wish(wish)
    if recipe not in CUDA_RECIPES:
        if wish == "cuda" and recipe in RECIPES:  # another name is refused where the CPU would compute
            raise DeviceError("device.recipe", recipe=recipe, known=", ".join(CUDA_RECIPES))
        return False
    block = RECIPES[recipe].block_size
    if len(shape) == 2 and 0 not in shape and shape[1] % block == 0:
        return True
    if wish == "cuda":
        raise DeviceError("device.shape", shape=shape, block=block)
    return False


def _by_rows(op: str, shape: tuple[int, ...], part: Callable[[slice], Part]) -> list[Part]:
    """``part`` of all rows, or of fewer at a time where the GPU's memory does not hold them.  Rows do not meet."""
    return smaller_until_it_fits(
        op, shape[1:], shape[0], lambda step: [part(slice(first, first + step)) for first in range(0, shape[0], step)]
    )


def to_cuda(array: Array) -> Any:
    """A NumPy array as a CUDA tensor of the same bits; ``ml_dtypes.bfloat16`` becomes torch's own BF16."""
    import torch

    array = np.ascontiguousarray(array)
    if not array.flags.writeable:
        array = array.copy()  # torch warns about read-only memory, even to copy from it
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


def to_numpy_bf16(tensor: Any) -> Array:
    """A BF16 tensor as NumPy, bit for bit."""
    import torch

    found: Array = tensor.contiguous().view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    return found


# ------------------------------------------------------------------------------------------------- experts


@dataclass(slots=True)
class CudaExperts:
    """The W4A4 experts of a model's layers on the GPU: `nvfp4viz.moe.run_w4a4_experts`, the same bits.

    Permute, quantise with ``a1_gscale``, grouped GEMM, activation and quantisation with ``a2_gscale``, grouped GEMM,
    un-permute.  Nothing leaves the GPU in between.

    On data-centre Blackwell (capability 10.x) the products are the library's where it works (``ops/scaled_mm.py``), the
    instruction of those GPUs; it may add K in another order, and last bits may differ from the CPU's.

    Attributes
    ----------
    failure
        Why the GPU stopped computing, if it did.  From then on the CPU goes on, here and everywhere.
    """

    layers: dict[int, _LayerOnGpu] = field(repr=False)
    failure: DeviceError | None = None

    def __call__(self, layer: int, x: Array, routing: Routing) -> ExpertsResult | None:
        """Output of a layer's experts; ``None`` where the CPU must compute it."""
        if self.failure is not None or len(x) == 0:
            return None
        on = self.layers[layer]

        def part(rows: slice) -> ExpertsResult:
            return _run(on, x[rows], Routing(routing.ids[rows], routing.weights[rows], routing.logits[rows]))

        try:
            parts = _by_rows("the experts", x.shape, part)
            broken = {expert for one in parts for expert in one.nan_experts}
            return ExpertsResult(np.concatenate([one.out for one in parts]), tuple(sorted(broken)))
        except DeviceError as error:
            self.failure = device.outcome.failure = error
        except RuntimeError as error:  # what torch throws when a kernel of ours, or its own, has failed
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.failure = device.outcome.failure = DeviceError("device.launch", kernel="the experts", reason=line)
        return None


@dataclass(frozen=True, slots=True)
class _LayerOnGpu:
    """`W4A4Experts` as tensors of torch."""

    w13_packed: Any
    w13_scales: Any
    w2_packed: Any
    w2_scales: Any
    a1_gscale: Any
    a2_gscale: Any
    g1_alphas: Any
    g2_alphas: Any
    activation: str
    count: int


def cuda_experts(layers: Mapping[int, object], wish: str) -> tuple[CudaExperts | None, DeviceError | None]:
    """Put a model's experts on the GPU.

    Parameters
    ----------
    layers
        Prepared experts by layer number.
    wish
        ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Returns
    -------
    The experts on the GPU, or ``None`` and why (``None`` again where the CPU was asked for).

    Raises
    ------
    DeviceError
        As `choose`; ``device.backend`` where ``"cuda"`` was asked of experts that have no kernels here.
    """
    where, why = choose(wish)
    if where == "cpu":
        return None, why
    able = [experts for experts in layers.values() if isinstance(experts, W4A4Experts) and not experts.per_token]
    if len(able) < len(layers):
        why = DeviceError("device.backend")
    else:
        try:
            return CudaExperts({layer: _upload(experts) for layer, experts in layers.items()}), None
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            why = DeviceError("device.memory", reason=str(error).splitlines()[0])
    if wish == "cuda":
        raise why
    return None, why


def _upload(experts: Any) -> _LayerOnGpu:
    names = ("w13_packed", "w13_scales", "w2_packed", "w2_scales", "a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas")
    return _LayerOnGpu(*(to_cuda(getattr(experts, name)) for name in names), experts.activation, experts.count)


def _run(on: _LayerOnGpu, x: Array, routing: Routing) -> ExpertsResult:
    import torch

    from nvfp4viz.device import ops

    ids = np.ascontiguousarray(routing.ids, np.int32)
    assert 0 <= int(ids.min()) <= int(ids.max()) < on.count, "the router chose an expert that does not exist"
    plan = ops.permute(to_cuda(x), to_cuda(ids), on.count, validate=False)
    offsets = plan.offsets
    how = {"recipe": "vllm-cuda", "offsets": offsets}
    first = ops.quantize(plan.rows, global_scale=on.a1_gscale, **how)
    c1 = ops.grouped_gemm_w4a4(first, on.w13_packed, on.w13_scales, offsets, on.g1_alphas, method="auto")
    second = ops.activation_quantize(c1, activation=on.activation, global_scale=on.a2_gscale, **how)
    c3 = ops.grouped_gemm_w4a4(second, on.w2_packed, on.w2_scales, offsets, on.g2_alphas, method="auto")
    out = ops.unpermute(c3, plan, to_cuda(np.ascontiguousarray(routing.weights, np.float32)))
    bad = torch.isnan(c3).any(dim=1)
    rows = np.flatnonzero(bad.cpu().numpy())
    owners = np.searchsorted(offsets.cpu().numpy(), rows, side="right") - 1
    return ExpertsResult(to_numpy_bf16(out), tuple(int(expert) for expert in np.unique(owners)))
