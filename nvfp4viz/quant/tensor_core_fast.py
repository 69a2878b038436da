"""Arrays in, arrays out around the kernels of ``quant/tensor_core_kernels.py``.  Importing this module loads Numba."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.quant.tensor_core import scale_tables
from nvfp4viz.quant.tensor_core_kernels import expand_rows, product
from nvfp4viz.quant.tensor_core_step import BLOCK_SIZE, E2M1_DOUBLED, F32, GROUP, STEP, U8, Kind
from nvfp4viz.quant.threads import run_parts

I32 = npt.NDArray[np.int32]

THREADING_PAYS = 1 << 20
"""Multiply-adds below which handing half the work to a second thread costs more than it saves."""


@cache
def _tables(kind: Kind) -> tuple[F32, I32, F32, int]:
    """Scale significands times 8 (−1 marks NaN), exponents, the two doubled values of each byte, groups a scale."""
    eighths, exponents, nans = scale_tables(kind)
    significands = np.where(nans, -1, eighths).astype(np.float32)
    byte = np.arange(256)
    doubled = np.array(E2M1_DOUBLED, np.float32)
    pairs = np.ascontiguousarray(np.stack([doubled[byte & 15], doubled[byte >> 4]], axis=1).ravel())
    tables = (significands, exponents.astype(np.int32), pairs)
    for table in tables:
        table.flags.writeable = False
    return (*tables, BLOCK_SIZE[kind] // GROUP)


def _run(
    a_packed: U8,
    a_scales: U8,
    order: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    b_packed: U8,
    b_scales: U8,
    c: F32 | None,
    kind: Kind,
) -> F32:
    significands, exponents, pairs, block_groups = _tables(kind)
    rows, half = a_packed.shape
    columns = b_packed.shape[1]
    steps = -(-half // 32)
    values = np.empty(rows * steps * STEP, np.float32)
    row_exponents = np.empty(rows * steps * 4, np.int32)
    row_nan = np.zeros(rows, np.uint8)
    expand_rows(a_packed, a_scales, significands, exponents, pairs, block_groups, values, row_exponents, row_nan)
    out = np.empty((rows, columns), np.float32)
    start = out if c is None else c

    def part(index: int, count: int) -> None:
        product(
            values, row_exponents, row_nan, order, starts, b_packed, b_scales, start, c is not None, out,
            significands, exponents, block_groups, index, count,
        )  # fmt: skip

    run_parts(part, rows * columns * half * 2 >= THREADING_PAYS)
    return out


def matmul_numba(a_packed: U8, a_scales: U8, b_packed: U8, b_scales: U8, c: F32 | None, kind: Kind) -> F32:
    """See :func:`nvfp4viz.quant.tensor_core.mma_matmul`, which checks the arguments."""
    rows = len(a_packed)
    return _run(
        np.ascontiguousarray(a_packed),
        np.ascontiguousarray(a_scales),
        np.arange(rows, dtype=np.int64),
        np.array([0, rows], np.int64),
        np.ascontiguousarray(b_packed)[None],
        np.ascontiguousarray(b_scales)[None],
        None if c is None else np.ascontiguousarray(c),
        kind,
    )


def grouped_numba(
    a_packed: U8, a_scales: U8, row_expert: npt.NDArray[Any], b_packed: U8, b_scales: U8, kind: Kind
) -> F32:
    """See :func:`nvfp4viz.quant.tensor_core.mma_grouped`, which checks the arguments."""
    order = np.argsort(row_expert, kind="stable").astype(np.int64)
    counts = np.bincount(row_expert, minlength=len(b_packed))
    starts = np.zeros(len(b_packed) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return _run(
        np.ascontiguousarray(a_packed),
        np.ascontiguousarray(a_scales),
        order,
        starts,
        np.ascontiguousarray(b_packed),
        np.ascontiguousarray(b_scales),
        None,
        kind,
    )
