"""Second-level weight scales of exactly 1.0: nobody set them, or the block scales carry all of it."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES
from tests.audit.layouts import LAYOUTS
from tests.audit.test_layer_apart import IDS, layered, said

EVERY = [*IDS, "W4A16", "compressed-tensors W4A16", "NVFP4_AWQ", "W4A8", "Inkling", "DeepSeek V4, three formats"]
ALL, DOWN = ("gate", "up", "gate_up", "down"), ("down",)


def unset(id, layers, kinds, role="weight_scale_2", others=None, of=4):
    def change(k, kind, own):
        return 1.0 if k in layers and kind in kinds else others or own

    return layered(id, change, of, role=role)


def ones(report, role="weight_scale_2"):
    return [item for item in report.findings if item.code == "scale.identity" and item.role == role]


@pytest.mark.parametrize("id", EVERY)
@pytest.mark.parametrize("kinds", [ALL, DOWN], ids="-".join)
@pytest.mark.parametrize("layers", [(1,), (0, 1), (0, 1, 2), (0, 1, 2, 3)], ids=str)
def test_projections_layers_and_files_in_which_nobody_set_one(id, layers, kinds):
    layout, before = LAYOUTS[id], audit(unset(id, (), ()))
    assert not ones(before)
    report = audit(unset(id, layers, kinds))
    assert said(report) == said(before)
    [item] = ones(report)
    whole = layers == (0, 1, 2, 3) and kinds == ALL
    ending = ".divisor" if layout.divisors else ""
    assert item.text == f"scale.identity.{'model' if whole else 'layers'}.weight{ending}"
    assert (item.severity, item.value, item.layer) == ("info", 1.0, 1 if len(layers) == 1 else None)
    own = [kind for kind in layout.kinds if kind in kinds]
    assert item.projection == (own[0] if (len(layers), len(own)) == (1, 1) else None)
    assert item.params["kinds"] == ", ".join(own)
    assert item.count == len(layers) * len(own) * (1 if layout.arrangement == "fused" else 8)
    for language in ("en", "zh"):
        assert "{" not in "".join(describe(item, language))
    # Block scales may carry all of it, and the others' numbers say that they do not.
    for one, old in zip(report.backends, before.backends, strict=True):
        if old.outcome == "safe":
            assert one.outcome == ("safe" if whole else "degraded"), one.name
            assert one.layers == (() if whole else layers)
            assert one.possible == ("degraded", "nan", "safe", "zero")
            assert "1.0" in one.why
        else:
            assert one.outcome == old.outcome


@pytest.mark.parametrize("id", [id for id in EVERY if LAYOUTS[id].arrangement != "fused"])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 7])
def test_some_experts_however_many(id, count):
    """The ones are the odd ones, and not the others; of half of a layer too."""
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    for expert in range(count):
        layout.put(tensors, expert, "down", "weight_scale_2", np.float32(1))
    before, report = audit(layout.open()), audit(layout.open(tensors))
    assert said(report) == said(before)
    [item] = ones(report)
    assert item.experts == tuple(range(count))
    for one, old in zip(report.backends, before.backends, strict=True):
        if old.outcome == "safe":
            assert (one.outcome, one.text) == ("degraded", "why.weight-outlier"), one.name
            assert "safe" in one.possible
            assert one.params["slots"] == count


def test_one_of_a_pair_differs_from_its_partner():
    for kind in ("gate", "up"):
        report = audit(unset("modelopt", (1,), (kind,)))
        assert said(report) == [("scale.pair-mismatch", "backend")]
        assert not ones(report)


@pytest.mark.parametrize("id", EVERY)
def test_numbers_near_one_are_not_exactly_one(id):
    """1.0 as the layout stores it, and to the last bit."""
    report = audit(unset(id, (0, 1, 2, 3), ALL))
    assert ones(report)
    near = audit(layered(id, lambda k, kind, own: np.nextafter(np.float32(1), np.float32(0)), role="weight_scale_2"))
    assert not ones(near)


@pytest.mark.parametrize("id", [*IDS, "W4A8"])
@pytest.mark.parametrize("layers", [(1,), (0, 1)], ids=str)
def test_activation_scales_of_one_are_no_outliers_beside_tiny_ones(id, layers):
    """`scale.identity` comes before `scale.outlier`."""
    report = audit(unset(id, layers, ALL, "input_scale", 2.0**-16))
    assert said(report) == []
    assert {item.layer for item in ones(report, "input_scale")} == set(layers)
    for one in report.backends:
        if FAMILIES[one.name].reach != "none" and one.outcome != "unsupported":
            assert (one.outcome, one.possible) == ("safe", ("degraded", "safe")), one.name
