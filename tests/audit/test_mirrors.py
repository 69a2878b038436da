"""Layers whose activation scales lie where the others' reciprocals do, and too near for a warning: a note."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES
from tests.audit.layouts import LAYOUTS
from tests.audit.test_layer_apart import IDS, layered, said

EIGHT_BIT = ["W4A8", "Quark, static FP8 inputs", "gpt-oss, static FP8 inputs"]
DOWN, GATED, ALL = ("down",), ("gate", "up", "gate_up"), ("gate", "up", "gate_up", "down")


def mirrored(id, level, layers, kinds, of=4):
    """So many layers of about one level, each a little off; some projections of some the other way up."""

    def change(k, kind, own):
        scale = level * own / (5e-3 if kind == "down" else 2e-3)
        return 1 / scale if k in layers and kind in kinds else scale

    return layered(id, change, of)


def notes(report):
    return [item for item in report.findings if item.code == "scale.convention"]


@pytest.mark.parametrize("id", [*IDS, *EIGHT_BIT])
@pytest.mark.parametrize("level", [0.01, 0.02, 0.04])
@pytest.mark.parametrize("layers", [(1,), (0, 2), (1, 2, 3)], ids=str)
def test_one_projection_of_some_layers_the_other_way_up(id, level, layers):
    assert said(audit(mirrored(id, level, (), ALL))) == []
    report = audit(mirrored(id, level, layers, DOWN))
    if said(report):
        # Numbers of one level are spread: those far enough apart are a warning, and that is one finding for them.
        assert level < 0.02
        assert said(report) == [("scale.outlier", "warn")]
        assert not notes(report)
        return
    [item] = notes(report)
    divided = LAYOUTS[id].divisors
    assert (item.severity, item.role, item.text) == (
        "info", "input_scale", f"scale.convention.layers{'.divisor' if divided else ''}",
    )  # fmt: skip
    assert (item.params["numbers"], item.params["kinds"]) == (list(layers), "down")
    assert (item.layer, item.projection) == ((1, "down") if len(layers) == 1 else (None, None))
    assert item.count == len(layers) * (1 if LAYOUTS[id].arrangement == "fused" else 8)
    assert (item.params["own"] < 1 < item.params["others"]) == divided
    assert (item.params["own"] > 1 > item.params["others"]) != divided
    for language in ("en", "zh"):
        assert "{" not in "".join(describe(item, language))
    for one, before in zip(report.backends, audit(mirrored(id, level, (), ALL)).backends, strict=True):
        reads = FAMILIES[one.name].reach != "none" and FAMILIES[one.name].reads_down and before.outcome == "safe"
        assert one.outcome == before.outcome
        assert one.possible == (("degraded", "safe", "zero") if reads else before.possible), one.name
        assert ("reciprocal" in one.why) == reads


@pytest.mark.parametrize("id", [*IDS, "W4A8"])
def test_half_of_the_layers_as_a_whole(id):
    for level, kinds in ((0.02, ALL), (0.02, GATED)):
        report = audit(mirrored(id, level, (1, 3), kinds))
        assert said(report) == []
        [item] = notes(report)
        assert item.params["numbers"] == [1, 3]
        assert set(item.params["kinds"].split(", ")) == set(kinds) & set(LAYOUTS[id].kinds)
    # What a warning tells of is not told again: a whole layer, and one 2^14 off.
    for level, layers, kinds in ((0.02, (1,), ALL), (0.004, (1,), DOWN), (0.004, (0, 1), ALL)):
        report = audit(mirrored(id, level, layers, kinds))
        assert said(report) == [("scale.outlier", "warn")]
        assert not notes(report)


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("near", ["down", "others"])
def test_halves_of_which_one_projection_lies_nearer_are_one_finding(id, near):
    """All of them the other way up, some 2^18 off and some 2^11: one cause."""

    def change(k, kind, own):
        scale = 0.02 if (kind == "down") == (near == "down") else 2e-3
        return 1 / scale if k % 2 else scale

    report = audit(layered(id, change))
    assert said(report) == [("scale.outlier", "warn")]
    assert not notes(report)
    [item] = [one for one in report.findings if one.severity == "warn"]
    assert item.params["kinds"] == ", ".join(LAYOUTS[id].kinds)
    # Where the nearer one is no mirror image it is nobody's business.
    report = audit(
        layered(id, lambda k, kind, own: change(k, kind, own) if kind != "down" or near != "down" else 2.0**-k)
    )
    [item] = [one for one in report.findings if one.severity == "warn"]
    assert ("down" in item.params["kinds"].split(", ")) == (near != "down")


@pytest.mark.parametrize("id", [*IDS, *EIGHT_BIT])
def test_layers_that_merely_differ_are_no_mirror_images(id):
    """Louder, but not above one; above one, but not where the reciprocal would be; and one louder than the other."""
    for change in (
        lambda k, kind, own: own * 100 if k in (1, 2) else own,
        lambda k, kind, own: 3.0 if k in (1, 2) else 2e-3,
        lambda k, kind, own: 2.0 ** (2 * k - 8),
        lambda k, kind, own: 60.0 if k in (1, 2) else 0.5,
    ):
        report = audit(layered(id, change, 8))
        assert said(report) == []
        assert not notes(report)


def test_weight_scales_the_other_way_up_tell_it_already():
    """An exporter that renamed divisors did so with both, and one error says it."""
    layout = LAYOUTS["modelopt"]
    turned = {
        layout.name(e, kind, role).replace("layers.0", "layers.1"): value
        for e in range(8)
        for kind in layout.kinds
        for role, value in (("input_scale", 50.0), ("weight_scale_2", 9000.0))
        if kind == "down" or role == "weight_scale_2"
    }
    report = audit(layered("modelopt", lambda k, kind, own: 0.02, but=turned))
    assert [(item.code, item.severity, item.layer) for item in report.findings] == [("scale.convention", "error", 1)]


def test_a_slot_that_was_filled_in_or_is_bad_mirrors_nothing():
    layout = LAYOUTS["modelopt"]
    for value in (np.inf, np.float32(np.finfo(np.float32).max / np.float32(2688)), 60.0):
        bad = {layout.name(3, "down", "input_scale").replace("layers.0", "layers.1"): value}
        assert not notes(audit(layered("modelopt", lambda k, kind, own: 0.02, but=bad)))
