"""Three kinds of fusion on real weights, each against the same work done separately: which of them change bits.

=============  ===================================================================================================
kind           what becomes one
=============  ===================================================================================================
``weights``    several weights become one matrix, and several products one
``launches``   several products stay what they are, and one launch runs them: grouped GEMM, quantisation of all
               experts' rows
``kernels``    several operations become one kernel, and what lay between them is never written out
=============  ===================================================================================================

Products here are summed in the same order either way.  A GPU's library may choose another tile, and so another order,
for a larger matrix; that is a property of the library, and no part of what is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.moe.dense import product_f32
from nvfp4viz.moe.experts import activate, epilogue
from nvfp4viz.moe.experts_quant import quantize_rows
from nvfp4viz.moe.fusion import FusedLayout
from nvfp4viz.moe.fusion_arrays import fuse
from nvfp4viz.quant import QuantizedTensor, global_scale, mma_grouped, mma_matmul
from nvfp4viz.quant.scales import amax
from nvfp4viz.quant.shared_scale import SharedPart, Way, share_scale

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
Kind = Literal["weights", "launches", "kernels"]
TOKENS = 32


@dataclass(frozen=True, slots=True)
class FusionBits:
    """One fusion against the separate work.

    Attributes
    ----------
    id
        ``"bf16"``, ``"one_scale"``, ``"max_scale"``, ``"grouped_gemm"``, ``"grouped_quant"``, ``"silu_quant"``.
    kind
    before, after
        Launches.
    values, differ
        Results compared, and those with other bits: BF16 outputs or f32 accumulators of products, bytes (codes and
        block scales) of quantisations.
    """

    id: str
    kind: Kind
    before: int
    after: int
    values: int
    differ: int


def measure_fusions(parts: Mapping[str, Array], experts: Array, seed: int = 0) -> tuple[FusionBits, ...]:
    """Each fusion on real weights and seeded activations (standard normal, BF16).

    Parameters
    ----------
    parts
        Name to weight (N, K) bfloat16: projections of one input, each with a global scale of its own.
    experts : (E, 2I, K) bfloat16
        Gate and up of some experts; 32 seeded rows are spread over them in turn.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, experts.shape[2])).astype(ml_dtypes.bfloat16)
    return (*_weights(parts, x), *_launches(experts, x), _silu_quant(experts, x))


def check_layout(layout: FusedLayout, seed: int = 0) -> tuple[int, int]:
    """``(outputs, differing)``: the fused product on every rank against the separate ones, in exact integers.

    Weights and activations are seeded integers of -50 to 49, sixteen columns, four tokens; every copy counts.

    >>> from nvfp4viz.moe.fusion import gate_up_layout
    >>> check_layout(gate_up_layout(8, tp=2))
    (64, 0)
    """
    rng = np.random.default_rng(seed)
    tensors = {name: rng.integers(-50, 50, (rows, 16), np.int32) for name, rows in layout.tensors.items()}
    x = rng.integers(-50, 50, (16, 4), np.int32)
    fused = fuse(layout, tensors) @ x
    separate = fuse(layout, {name: weight @ x for name, weight in tensors.items()})
    return fused.size, int((fused != separate).sum())


def _weights(parts: Mapping[str, Array], x: Array) -> list[FusionBits]:
    count = len(parts)
    separate = np.concatenate([_plain(x, weight) for weight in parts.values()], axis=1)
    fused = _plain(x, np.concatenate(list(parts.values())))
    found = [FusionBits("bf16", "weights", count, 1, fused.size, _differ(separate, fused))]

    top = amax(x)
    packed, scales = quantize_rows(x, np.full(len(x), global_scale(top, "vllm-cuda"), np.float32))
    input_scale = np.float32(top / np.float32(2688))
    ways = share_scale(parts)

    def product(weight: QuantizedTensor) -> Array:
        acc = mma_matmul(packed, scales, weight.packed, weight.scales)
        return epilogue(acc, np.full(len(x), weight.global_scale * input_scale, np.float32))

    def joined(of: Mapping[str, SharedPart]) -> QuantizedTensor:
        first = next(iter(of.values())).quantized
        rows = [part.quantized for part in of.values()]
        codes, bytes_ = np.concatenate([q.packed for q in rows]), np.concatenate([q.scales for q in rows])
        return QuantizedTensor(codes, bytes_, first.global_scale, first.recipe, 16, (len(codes), x.shape[1]))

    served: tuple[tuple[str, Way, Way], ...] = (("one_scale", "shared", "shared"), ("max_scale", "own", "max"))
    for name, apart, fused_as in served:
        alone = np.concatenate([product(part.quantized) for part in ways[apart].values()], axis=1)
        together = product(joined(ways[fused_as]))
        found.append(FusionBits(name, "weights", count, 1, together.size, _differ(alone, together)))
    return found


def _launches(experts: Array, x: Array) -> list[FusionBits]:
    count = len(experts)
    row_expert = np.sort(np.arange(len(x)) % count)
    # Every expert has an input scale of its own, as far apart as calibration may leave them.
    encode = global_scale(amax(x), "vllm-cuda") / np.linspace(1, 2, count, dtype=np.float32)
    packed, scales = quantize_rows(x, encode[row_expert])
    alone = [quantize_rows(x[row_expert == e], np.full((row_expert == e).sum(), encode[e])) for e in range(count)]
    differ = sum(
        _differ(np.concatenate([one[which] for one in alone]), whole) for which, whole in ((0, packed), (1, scales))
    )
    quant = FusionBits("grouped_quant", "launches", count, 1, packed.size + scales.size, differ)

    weights = [next(iter(share_scale({"w13": w})["own"].values())).quantized for w in experts]
    codes, bytes_ = np.stack([w.packed for w in weights]), np.stack([w.scales for w in weights])
    together = mma_grouped(packed, scales, row_expert, codes, bytes_)
    rows = [(packed[row_expert == e], scales[row_expert == e]) for e in range(count)]
    apart = np.concatenate([mma_matmul(*a, codes[e], bytes_[e]) for e, a in enumerate(rows)])
    return [FusionBits("grouped_gemm", "launches", count, 1, together.size, _differ(apart, together)), quant]


def _silu_quant(experts: Array, x: Array) -> FusionBits:
    """SiLU · up, then quantise: one kernel rounds to BF16 once, two kernels twice (`numerics-vllm.md` 1.6)."""
    c1 = np.concatenate([_plain(x, expert) for expert in experts])
    two, one = activate(c1, "silu"), activate(c1, "silu", fused=True)
    encode = np.full(len(two), global_scale(amax(two), "vllm-cuda"), np.float32)
    pairs = list(zip(quantize_rows(two, encode), quantize_rows(one, encode), strict=True))
    differ = sum(_differ(a, b) for a, b in pairs)
    return FusionBits("silu_quant", "kernels", 2, 1, sum(a.size for a, _ in pairs), differ)


def _plain(x: Array, weight: Array) -> Array:
    """``bf16(x · wᵀ)``, summed in f32 one k after the other."""
    columns = np.ascontiguousarray(weight.astype(np.float32).T)[None]
    return product_f32(x, np.zeros(len(x), np.int64), columns).astype(ml_dtypes.bfloat16)


def _differ(a: Array, b: Array) -> int:
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    return int((a.view(width) != b.view(width)).sum())
