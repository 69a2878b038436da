"""Routed tokens to their experts and back: `nvfp4viz.moe.dataflow` on the GPU, in its row order and with its bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nvfp4viz.device.load import kernel
from nvfp4viz.device.ops.checks import check, check_count, check_multiple, check_routes
from nvfp4viz.device.ops.groups import aligned, empty

__all__ = ["Permuted", "permute", "unpermute"]

THREADS = 128
CHUNK = 1024  # routes that one warp of the planning kernels looks at


@dataclass(frozen=True, slots=True)
class Permuted:
    """Rows side by side for each expert, and the way back.  T tokens, k experts a token, E local experts.

    Attributes
    ----------
    rows : (T*k, H)
        ``x[source]``; zeros behind the last valid row.
    offsets : (E+1,) int32
        First row of each expert.
    source : (T*k,) int32
        Token of each row; -1 behind the last valid row (``a_map``).
    target : (T, k) int32
        Row of each route; T*k for a route whose expert is not here (``c_map``).
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """Rows of each expert: (E,) int32."""
        return self.offsets[1:] - self.offsets[:-1]


def permute(
    x: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    expert_map: torch.Tensor | None = None,
    *,
    validate: bool = True,
) -> Permuted:
    """Bring the rows of each expert together.

    Parameters
    ----------
    x : (T, H) bfloat16, float16 or float32
        H a multiple of 16 bytes' worth of elements.
    ids : (T, k) int32
        Chosen experts, 0 … E-1; with `expert_map` as the router numbers them, 0 … E_global-1.  A negative id is a route
        to nobody here.
    experts
        Local experts E.
    expert_map : (E_global,) int32, optional
        Local id of each expert, 0 … E-1; -1 where it lives elsewhere.
    validate
        Look at the largest id and the largest entry of the map before the kernels run: two reductions and one wait for
        the device.  Without it nothing waits, and ids are trusted: the kernels read `expert_map` at each of them, past
        its end where an id is too large; without a map such a route goes to nobody.

    Raises
    ------
    FormatError
        ``ops.tensor``, ``ops.multiple``, ``ops.count``, ``ops.routes``
    DeviceError
        ``ops.memory``
    """
    experts = check_count("permute", "experts", experts)
    check("permute", "x", x, (torch.bfloat16, torch.float16, torch.float32), None, None)
    check("permute", "ids", ids, torch.int32, x.shape[0], None)
    if expert_map is not None:
        check("permute", "expert_map", expert_map, torch.int32, None)
    check_multiple("permute", "bytes of a row", x.shape[1] * x.element_size(), 16)
    if validate:
        check_routes("permute", ids, experts, expert_map)
    routes, top_k = ids.numel(), ids.shape[1]
    offsets, source, target, counts = (
        empty("permute", shape, torch.int32, x.device)
        for shape in ((experts + 1,), (routes,), tuple(ids.shape), (experts, -(-routes // CHUNK)))
    )
    offsets.zero_(), source.fill_(-1), target.fill_(routes)
    rows = empty("permute", (routes, x.shape[1]), x.dtype, x.device)
    sizes = (np.int32(experts), np.int32(counts.shape[1]))
    grid = -(-counts.numel() // (THREADS // 32))
    _kernel("nv_count_routes")(grid, THREADS, (ids, expert_map, counts, np.int32(routes), *sizes))
    plan = (ids, expert_map, counts, offsets, source, target, np.int32(routes), np.int32(top_k), *sizes)
    _kernel("nv_plan_routes")(grid, THREADS, plan)
    pieces = x.shape[1] * x.element_size() // 16
    gather = (aligned("permute", x), source, rows, np.int32(pieces))
    _kernel("nv_gather_rows")((routes, -(-pieces // THREADS)), THREADS, gather)
    return Permuted(rows, offsets, source, target)


def unpermute(y: torch.Tensor, permuted: Permuted, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of each token's expert outputs, rounded where vLLM rounds: (T, H) bfloat16.

    Weights to BF16, each product to BF16, the sum in f32 in the order of the routes, one rounding to BF16; a route that
    is not local counts as zeros.  Equals `nvfp4viz.moe.combine_routes` in every bit.

    Parameters
    ----------
    y : (R, H) bfloat16
        Outputs in permuted order, R ≤ T*k.
    permuted
        What :func:`permute` gave.
    weights : (T, k) float32

    Raises
    ------
    FormatError
        ``ops.tensor``, ``ops.multiple``
    DeviceError
        ``ops.memory``
    """
    tokens, top_k = permuted.target.shape
    check("unpermute", "y", y, torch.bfloat16, None, None)
    check("unpermute", "weights", weights, torch.float32, tokens, top_k)
    check_multiple("unpermute", "columns of y", y.shape[1], 8)
    out = empty("unpermute", (tokens, y.shape[1]), torch.bfloat16, y.device)
    pieces = y.shape[1] // 8
    sizes = (np.int32(top_k), np.int32(pieces), np.int32(y.shape[0]))
    _kernel("nv_combine_routes")(
        (tokens, -(-pieces // THREADS)), THREADS, (aligned("unpermute", y), permuted.target, weights, out, *sizes)
    )
    return out


def _kernel(name: str):
    return kernel("permute.cu", name)
