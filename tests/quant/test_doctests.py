"""The examples in the docstrings of formats and quant show real numbers."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import nvfp4viz.formats
import nvfp4viz.quant

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (nvfp4viz.formats, nvfp4viz.quant)
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples() -> None:
    found = doctest.DocTestFinder()
    with_examples = [
        name for name in MODULES if any(test.examples for test in found.find(importlib.import_module(name)))
    ]
    assert len(with_examples) >= 10
