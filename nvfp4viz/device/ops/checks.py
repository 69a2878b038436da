"""What every op asks of its tensors before a kernel reads them: a kernel cannot ask, it would read past their end."""

from __future__ import annotations

from typing import Any

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

    Their values stay on the device and are not looked at: they must ascend from 0 and end at or before the rows.
    """
    check(op, "offsets", offsets, torch.int32, None)
    if len(offsets) < 2:
        raise FormatError("ops.tensor", op=op, name="offsets", expected="int32 (ranges + 1)", got=_described(offsets))


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
