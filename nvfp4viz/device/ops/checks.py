"""What every op asks of its tensors before a kernel reads them: a kernel cannot ask, it would read past their end."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import numpy as np
import torch

from nvfp4viz.errors import FormatError


def check(op: str, name: str, tensor: Any, dtype: torch.dtype | tuple[torch.dtype, ...], *shape: int | None) -> None:
    """Raise unless ``tensor`` is a contiguous CUDA tensor of that type and shape; ``None`` in a shape is any size.

    Raises
    ------
    FormatError
        ``ops.tensor``, saying what was expected and what came.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    fits = (
        isinstance(tensor, torch.Tensor)
        and tensor.is_cuda
        and tensor.dtype in dtypes
        and tensor.dim() == len(shape)
        and all(size is None or size == got for size, got in zip(shape, tensor.shape, strict=True))
        and tensor.is_contiguous()
    )
    if fits:
        return
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    wanted = " or ".join(_short(one) for one in dtypes)
    raise FormatError("ops.tensor", op=op, name=name, expected=f"{wanted} ({sizes})", got=_described(tensor))


def check_offsets(op: str, offsets: Any) -> None:
    """Raise ``ops.tensor`` unless ``offsets`` are int32 and bound one range at least.

    Their values stay on the device and are not looked at: `check_offset_values` does.
    """
    check(op, "offsets", offsets, torch.int32, None)
    if len(offsets) < 2:
        raise FormatError("ops.tensor", op=op, name="offsets", expected="int32 (ranges + 1)", got=_described(offsets))


def check_offset_values(offsets: torch.Tensor, rows: int) -> None:
    """Raise unless offsets ascend from 0 and end at or before the rows, as every kernel trusts them to.

    Offsets of `permute` do.  For others: three reductions of E+1 numbers and one wait for the device, which is why no
    op asks by itself.

    Parameters
    ----------
    offsets : (E+1,) int32
        First row of each range, on any device.
    rows
        Of the matrix that they cut.

    Raises
    ------
    FormatError
        ``ops.tensor``; ``ops.offsets``
    """
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or len(offsets) < 2:
        raise FormatError(
            "ops.tensor", op="a kernel", name="offsets", expected="int32 (ranges + 1)", got=_described(offsets)
        )
    wide = offsets.long()  # a step between int32 numbers may need 33 bits
    seen = torch.stack((wide[0], (wide[1:] - wide[:-1]).min(), wide[-1]))
    first, step, last = seen.tolist()
    if first != 0 or step < 0 or last > rows:
        raise FormatError("ops.offsets", first=first, step=step, last=last, rows=rows)


def check_routes(op: str, ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> None:
    """Raise ``ops.routes`` unless every route goes to an expert that there is: a kernel reads `expert_map` at its id.

    A negative id, or -1 in the map, is a route to nobody here.  Two reductions and one wait for the device.
    """
    if not ids.numel():
        return
    known = experts if expert_map is None else len(expert_map)
    tops = [ids.max()] if expert_map is None or not known else [ids.max(), expert_map.max()]
    top, *local = torch.stack(tops).tolist()
    if top >= known:
        raise FormatError("ops.routes", op=op, got=top, most=known - 1)
    if local and local[0] >= experts:
        raise FormatError("ops.routes", op=op, got=local[0], most=experts - 1)


def check_number(op: str, name: str, value: Any) -> np.float32:
    """A real number as float32, beyond its range infinite; ``ops.number`` for anything else."""
    if isinstance(value, numbers.Real):  # NumPy's scalars are; a text that reads like a number is not
        try:
            with np.errstate(over="ignore", under="ignore"):
                return np.float32(value)
        except OverflowError:
            pass
    raise FormatError("ops.number", op=op, name=name, got=repr(value)[:40])


def check_count(op: str, name: str, value: Any, most: int = 2**31 - 1) -> int:
    """A whole number from 1 to ``most``; ``ops.count`` for anything else."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if not 0 < count <= most:
        raise FormatError("ops.count", op=op, name=name, got=repr(value)[:40], most=most)
    return count


def check_multiple(op: str, name: str, size: int, multiple: int) -> None:
    """Raise ``ops.multiple`` unless ``size`` is a positive multiple."""
    if size <= 0 or size % multiple:
        raise FormatError("ops.multiple", op=op, name=name, size=size, multiple=multiple)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    order = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{_short(tensor.dtype)} {tuple(tensor.shape)} on {tensor.device}{order}"
