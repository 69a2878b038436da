"""Activation scales of exactly 1.0, which nobody set, and single values far beyond all of their peers."""

import numpy as np
import pytest

from nvfp4viz.audit import audit
from nvfp4viz.audit.backends import FAMILIES
from nvfp4viz.audit.repair import plan_repair
from nvfp4viz.audit.scales import outliers
from tests.audit.layouts import LAYOUTS
from tests.audit.reading import NARROW, found
from tests.audit.test_layer_apart import IDS, layered

READS = [name for name, family in FAMILIES.items() if family.reach != "none"]
NO_DOWN = {name for name, family in FAMILIES.items() if not family.reads_down}


def by_expert(id, values, kind="down", layer=1):
    """Three layers, effective scales of one projection given expert by expert; of the others 1/2048 in each."""
    layout = LAYOUTS[id]
    count = {"fused": 1}.get(layout.arrangement, len(values))
    order = iter(np.resize(np.float32(values), count))
    return layered(id, lambda k, own, old: next(order) if (k, own) == (layer, kind) else 2**-11, layers=3)


def forecasts(report):
    return {item.name: (item.outcome, item.possible) for item in report.backends}


@pytest.mark.parametrize("id", [*IDS, "W4A8"])
@pytest.mark.parametrize("layers", [(1,), (0, 1, 2)])
def test_layers_in_which_nobody_set_a_number(id, layers):
    report = audit(layered(id, lambda k, kind, own: 1.0 if k in layers else own, layers=3))
    assert found(report) == []
    [item] = [one for one in report.findings if one.code == "scale.identity"]
    layout = LAYOUTS[id]
    text = f"scale.identity.{'layer' if len(layers) == 1 else 'model'}{'.divisor' if layout.divisors else ''}"
    assert (item.text, item.layer, item.value) == (text, 1 if len(layers) == 1 else None, 1.0)
    assert item.count == len(layers) * len(layout.kinds) * (1 if layout.arrangement == "fused" else 8)
    assert item.params["over"] == (448 if id == "W4A8" else 2688)
    # Nobody knows what they should be; who reads none of them does not care.
    for name, (outcome, possible) in forecasts(report).items():
        if outcome != "unsupported":
            assert (outcome, possible) == ("safe", ("degraded", "safe") if name in READS else ()), name
    for one in report.backends:
        if one.name in READS and one.outcome != "unsupported":
            assert one.text == f"why.never-set{'.model' if len(layers) > 1 else ''}"
            assert ("layer 1 (" in one.why) == (len(layers) == 1)


def test_several_layers_in_which_nobody_set_a_number_are_all_counted():
    report = audit(layered("modelopt", lambda k, kind, own: 1.0 if k != 1 and kind == "down" else own, layers=4))
    [cutlass] = [one for one in report.backends if one.name == "vllm-cutlass"]
    assert cutlass.why.startswith("Activation scales of layer 0 (down) are exactly 1.0")
    assert cutlass.why.endswith("The same in 2 other layers.")


@pytest.mark.parametrize("id", IDS)
def test_no_repair_by_a_rule_takes_a_layer_of_ones_for_its_own(id):
    source = layered(id, lambda k, kind, own: 1.0 if k == 1 else own, layers=3)
    assert plan_repair(source, "peer-max", suspects=True).is_empty


@pytest.mark.parametrize("id", [id for id in IDS if id != "fused"])
@pytest.mark.parametrize("ones", [1, 2, 4, 7])
def test_a_number_gets_no_better_by_others_like_it(id, ones):
    """2^11 times too large it loses resolution, be it alone or one of seven."""
    report = audit(by_expert(id, [1.0] * ones + [2**-11] * (8 - ones)))
    assert found(report) == []
    for name, (outcome, possible) in forecasts(report).items():
        if name in NO_DOWN:
            assert outcome == "ignored"
        elif name in READS:
            assert (outcome, "safe" in possible) == ("degraded", True), name


@pytest.mark.parametrize("id", [id for id in IDS if id != "fused"])
def test_a_maximum_that_is_the_bad_slot_hides_nothing(id):
    """100 times the layer's next largest, whose block scales have room for it; those of the smallest have not."""
    values = [2**-8, 2**-10, 2**-10, 2**-10, 2**-11, 2**-12, 2**-10, 100 * 2**-8]
    report = audit(by_expert(id, values))
    assert [(code, severity) for code, severity, *_ in found(report)] == [("scale.outlier", "warn")]
    for item in report.backends:
        if FAMILIES[item.name].reach == "layer" and item.name not in NO_DOWN:
            assert (item.outcome, item.possible, item.text) == ("degraded", ("degraded", "safe"), "why.layer-degraded")


@pytest.mark.parametrize("id", [id for id in IDS if id != "fused"])
def test_a_maximum_for_which_all_have_room(id):
    report = audit(by_expert(id, [2**-11] * 7 + [100 * 2**-11]))
    assert [(code, severity) for code, severity, *_ in found(report)] == [("scale.outlier", "warn")]
    for item in report.backends:
        if item.name in READS and item.name not in NO_DOWN and item.text != NARROW:
            assert (item.outcome, item.possible, item.text) == ("safe", (), "why.room"), item.name
            assert item.params["ratio"] == "100"


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "non-gated", "Quark NVFP4", "projection-major"])
@pytest.mark.parametrize("kind", ["up", "down"])
def test_a_zero_of_nothing_is_not_harmless(id, kind):
    """No slot of a projection is written; for gate and up the other one's would stand."""
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    for expert in range(8):
        for own in {"gate", "up"} & set(layout.kinds) if kind == "up" else {"down"}:
            del tensors[layout.name(expert, own, "input_scale")]
    report = audit(layout.open(tensors))
    for item in report.backends:
        family = FAMILIES[item.name]
        if family.reach == "layer" and family.engine != "tensorrt-llm" and (kind == "up" or family.reads_down):
            assert (item.outcome, item.text) == ("undefined", "why.layer-missing.whole"), item.name
            assert {"nan", "zero"} <= set(item.possible)


WIDE = np.float32([1e-3, 3e-2, 4e-3, 8e-3, 2e-3, 1.6e-2, 1.2e-3, 2.5e-2, 6e-3, 1e-2])


@pytest.mark.parametrize("factor", [100.0, 0.01])
@pytest.mark.parametrize("few", [1, 2])
def test_far_beyond_all_others_however_far_these_are_spread(factor, few):
    values = WIDE.copy()
    values[:few] = (WIDE.max() if factor > 1 else WIDE.min()) * np.float32(factor)
    assert outliers(values, np.ones(10, bool)).tolist() == [True] * few + [False] * (10 - few)


def test_one_above_and_one_below():
    values = WIDE.copy()
    values[3:5] = 100 * WIDE.max(), WIDE.min() / 100
    assert np.flatnonzero(outliers(values, np.ones(10, bool))).tolist() == [3, 4]


def test_of_wide_values_without_a_gap_none_is_far():
    assert not outliers(WIDE, np.ones(10, bool)).any()
    assert not outliers(np.float32(2.0 ** np.arange(-12, 1)), np.ones(13, bool)).any()


def test_of_two_groups_neither_is_odd():
    values = WIDE.copy()
    values[:3] = 100 * WIDE.max()
    assert not outliers(values, np.ones(10, bool)).any()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("count", [8, 16, 64, 128])
def test_measured_values_are_not_far(seed, count):
    """Log-normal, with the factor 30 between the ends that measured layers have (`OUTLIER_FLOOR`)."""
    logs = np.random.default_rng(seed).normal(0, 1.2, count)
    logs *= min(1.0, np.log2(30) / np.ptp(logs))
    assert not outliers(np.float32(2.0**logs * 3e-3), np.ones(count, bool)).any()


@pytest.mark.parametrize("kind", ["gate", "up"])
@pytest.mark.parametrize("layers", [(1,), (0, 1, 2)])
@pytest.mark.parametrize("id", [id for id in IDS if "gate" in LAYOUTS[id].kinds])
def test_a_projection_that_nobody_set_is_no_outlier_of_its_sibling(id, layers, kind):
    """One number gets one class, and identity goes before outlier."""
    report = audit(layered(id, lambda k, own, old: 1.0 if k in layers and own == kind else old, layers=3))
    assert found(report) == []
    notes = [one for one in report.findings if one.code == "scale.identity"]
    assert [(one.layer, one.projection, one.severity) for one in notes] == [(at, kind, "info") for at in layers]
    for name, (outcome, possible) in forecasts(report).items():
        if outcome != "unsupported" and name in READS:
            assert (outcome, possible) == ("safe", ("degraded", "safe")), name


def test_gate_and_up_of_which_some_were_never_set_are_held_to_each_other_where_both_were():
    """Three experts of eight at 1.0; the others' gate is 2^10 above their up."""
    report = audit(by_expert("modelopt", [1.0] * 3 + [0.5] * 5, kind="gate"))
    assert [(item.code, item.text) for item in report.findings if item.severity == "warn"] == [
        ("scale.outlier", "scale.outlier.sibling")
    ]
    [item] = [item for item in report.findings if item.severity == "warn"]
    assert item.experts == (3, 4, 5, 6, 7)
