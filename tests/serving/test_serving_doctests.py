"""Examples in docstrings give the numbers they show."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "moe.dataflow",
        "moe.dense",
        "moe.experts",
        "moe.experts_quant",
        "moe.routers.choice",
        "moe.routers.sigmoid",
        "moe.routers.softmax",
        "moe.routers.softplus",
        "model.routing_log",
        "serving.evaluation",
        "serving.guard",
        "serving.quant_config",
        "serving.sampling",
        "serving.scales",
        "serving.selection",
        "serving.selection_cost",
        "serving.selection_linear",
        "serving.selection_mxfp4",
    ],
)
def test_examples(module):
    done = doctest.testmod(importlib.import_module(f"nvfp4viz.{module}"))
    assert done.attempted > 0
    assert done.failed == 0
