"""The examples in the docstrings give what they say."""

import doctest
import importlib
import pkgutil

import pytest

import nvfp4viz.checkpoint

MODULES = [name for _, name, _ in pkgutil.walk_packages(nvfp4viz.checkpoint.__path__, "nvfp4viz.checkpoint.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    assert sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES) > 5
