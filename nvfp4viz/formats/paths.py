"""The ways to one result, equal in bits: element by element, whole arrays, compiled."""

from __future__ import annotations

from typing import Literal, get_args

from nvfp4viz.errors import FormatError

Path = Literal["auto", "reference", "numpy", "numba"]
ArrayPath = Literal["auto", "numpy", "numba"]
"""Of products, whose single step is the reference: ``quant/tensor_core_step.py``."""
NumpyPath = Literal["numpy", "reference"]
"""Of what is not compiled."""
AutoPath = Literal["auto", "reference"]
"""Of what hands on to functions with more ways: ``"auto"`` is the fast one that each of them has."""


def check_path(path: str, among: tuple[str, ...] = get_args(Path)) -> None:
    """Refuse a name that is no path: taken for the fast one, it would be compared with itself.

    Raises
    ------
    FormatError
        ``path.unknown``.
    """
    if path not in among:
        raise FormatError("path.unknown", path=repr(path)[:40], paths=", ".join(among))


def by_reference(path: str) -> bool:
    """Is this the way that goes element by element?  A function that has no ``"numba"`` of its own takes NumPy's.

    >>> by_reference("reference"), by_reference("numpy")
    (True, False)

    Raises
    ------
    FormatError
        ``path.unknown``.
    """
    check_path(path)
    return path == "reference"


def by_numpy(path: str) -> bool:
    """Of an ``ArrayPath``: NumPy's way, not the compiled one that ``"auto"`` takes?

    Raises
    ------
    FormatError
        ``path.unknown``, also for ``"reference"``.
    """
    check_path(path, get_args(ArrayPath))
    return path == "numpy"
