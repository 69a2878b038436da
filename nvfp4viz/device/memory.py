"""Work that does not fit into a GPU's memory is done in smaller parts, and only then refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nvfp4viz.errors import DeviceError

__all__ = ["smaller_until_it_fits"]

Result = TypeVar("Result")


def smaller_until_it_fits(op: str, shape: tuple[int, ...], count: int, work: Callable[[int], Result]) -> Result:
    """``work(step)`` for the largest step that fits: ``count``, then half of it, down to 1.

    Parameters
    ----------
    op, shape
        What the error names: the operation, and what even the smallest step could not hold.
    work
        Does all the work, ``step`` of the ``count`` pieces at a time; does it again from the start after a failure.

    Raises
    ------
    DeviceError
        ``ops.memory`` where not even one piece fits; whatever else ``work`` raises.
    """
    import torch

    step = count
    while True:
        try:
            return work(step)
        except torch.OutOfMemoryError as error:
            if step <= 1:
                raise DeviceError("ops.memory", op=op, shape=shape, reason=str(error).splitlines()[0]) from error
        except DeviceError as error:
            if step <= 1 or error.code != "ops.memory":
                raise
        torch.cuda.empty_cache()  # here, where the error no longer holds what it met
        step = (step + 1) // 2
