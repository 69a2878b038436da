"""Two halves of a layer that lie far apart, and a file whose activation scales are all the other way up."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES
from nvfp4viz.audit.fills import FINGERPRINTS
from nvfp4viz.audit.repair import plan_repair
from tests.audit.layouts import EXPERTS, LAYOUTS, twin
from tests.audit.reading import found
from tests.audit.test_forecast_tiny import (
    BACKENDS,
    BAD,
    agrees,
    changed,
    layer,
    opened,
    outcome,
    parameters_of,
    run,
    stored,
)

FOUR_BIT = {
    id: layout for id, layout in LAYOUTS.items()
    if layout.block == "NVFP4" and layout.with_input and layout.arrangement != "fused" and "W4A8" not in id
}  # fmt: skip
HALF = range(EXPERTS // 2, EXPERTS)


def scaled(layout, factor, kinds=None, experts=HALF, role="input_scale", tensors=None):
    """Effective scales times ``factor``; their reciprocals where it is None."""
    tensors = dict(tensors or layout.tensors())
    for kind in kinds or layout.kinds:
        for expert in experts:
            stored = layout.get(tensors, expert, kind, role)
            if factor is None:
                new = np.float32(1) / stored
            else:
                new = stored * np.float32(1 / factor if layout.divisors else factor)
            layout.put(tensors, expert, kind, role, new)
    return tensors


@pytest.mark.parametrize("id", FOUR_BIT)
@pytest.mark.parametrize("factor", [None, 2.0**17, 2.0**-12])
def test_half_of_the_experts_far_from_the_others(id, factor):
    layout = FOUR_BIT[id]
    report = audit(layout.open(scaled(layout, factor)))
    [item] = [one for one in report.findings if one.severity != "info"]
    assert (item.code, item.severity, item.text) == ("scale.outlier", "warn", "scale.outlier.groups")
    assert (item.layer, item.role, item.experts) == (0, "input_scale", tuple(HALF)) or item.experts == tuple(
        range(EXPERTS // 2)
    )
    for one, before in zip(report.backends, audit(layout.open()).backends, strict=True):
        if before.outcome == "safe":
            reads = FAMILIES[one.name].reach != "none"
            assert one.outcome == ("degraded" if reads else "ignored")
            assert ("zero" in one.possible) == reads
            assert one.scope == {"layer": "layer", "expert": "experts", "none": "none"}[FAMILIES[one.name].reach]
    for language in ("en", "zh"):
        assert "{" not in describe(item, language)[0]
    # Nobody knows what should stand there.
    assert plan_repair(layout.open(scaled(layout, factor)), "peer-max", suspects=True).is_empty


@pytest.mark.parametrize("id", FOUR_BIT)
def test_healthy_twins_have_no_groups(id):
    layout = FOUR_BIT[id]
    for tensors in (layout.tensors(), *(twin(layout, seed) for seed in range(6))):
        assert found(audit(layout.open(tensors))) == found(audit(layout.open()))
    # As far apart as measured experts are, or one by itself, which is an outlier.
    assert found(audit(layout.open(scaled(layout, 30)))) == found(audit(layout.open()))
    for experts in ([3], [1, 4]):
        texts = {one.text for one in audit(layout.open(scaled(layout, 2.0**17, experts=experts))).findings}
        assert "scale.outlier.groups" not in texts
        assert any(text.startswith("scale.outlier") for text in texts)


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "non-gated"])
def test_weight_scales_in_two_groups(id):
    layout = LAYOUTS[id]
    report = audit(layout.open(scaled(layout, 2.0**-12, kinds=["down"], role="weight_scale_2")))
    [item] = [one for one in report.findings if one.severity != "info"]
    assert (item.text, item.role, item.params["kinds"]) == ("scale.outlier.groups", "weight_scale_2", "down")
    # The one that folds them into the block scales has nothing left of the small ones.
    outcomes = {one.outcome for one in report.backends if one.text != "why.folded.zero"}
    assert outcomes <= {"degraded", "unsupported"}
    # Gate and up that differ have their own finding.
    texts = [one.text for one in audit(layout.open(scaled(layout, 2.0**-12, ["up"], role="weight_scale_2"))).findings]
    assert ("scale.outlier.groups" in texts) == (id == "non-gated")


@pytest.mark.parametrize("reversed", ["gate", "up"])
@pytest.mark.parametrize("id", [id for id, layout in FOUR_BIT.items() if {"gate", "up"} <= {*layout.kinds}])
def test_the_other_way_up_is_one_cause(id, reversed):
    """Gate's numbers stored as up's reciprocals differ from up's for that reason alone."""
    layout = FOUR_BIT[id]
    tensors = layout.tensors()
    for expert in range(EXPERTS):
        value = layout.get(tensors, expert, reversed, "weight_scale_2")
        layout.put(tensors, expert, reversed, "weight_scale_2", np.float32(1) / value)
    told = [item.code for item in audit(layout.open(tensors)).findings if item.severity != "info"]
    assert told == ["scale.convention"]
    # Both the other way up, and one pair that differs besides: two causes.
    for expert in range(EXPERTS):
        other = {"gate": "up", "up": "gate"}[reversed]
        value = layout.get(tensors, expert, reversed, "weight_scale_2")
        layout.put(tensors, expert, other, "weight_scale_2", value * np.float32(1.5 if expert == 2 else 1))
    told = [item.code for item in audit(layout.open(tensors)).findings if item.severity != "info"]
    assert sorted(told) == ["scale.convention", "scale.pair-mismatch"]


@pytest.mark.parametrize("id", FOUR_BIT)
@pytest.mark.parametrize("factor", [None, 1e5])
def test_a_whole_file_of_large_activation_scales_is_noted(id, factor):
    """It may be meant (case 10), so that it is a note, and the forecast is open."""
    layout = FOUR_BIT[id]
    report = audit(layout.open(scaled(layout, factor, experts=range(EXPERTS))))
    assert found(report) == found(audit(layout.open()))
    [item] = [one for one in report.findings if one.code == "scale.convention"]
    assert (item.severity, item.role, item.layer) == ("info", "input_scale", None)
    assert (item.params["median"] < 1) == layout.divisors
    for one, before in zip(report.backends, audit(layout.open()).backends, strict=True):
        assert one.outcome == before.outcome
        if before.outcome == "safe":
            reads = FAMILIES[one.name].reach != "none"
            assert one.possible == (("degraded", "safe", "zero") if reads else ())
            assert ("median" in one.why) == reads
    for language in ("en", "zh"):
        assert "{" not in describe(item, language)[0]
    # One projection is enough; one layer's number below one is enough to say nothing.
    last = layout.kinds[-1]
    one = audit(layout.open(scaled(layout, factor, kinds=[last], experts=range(EXPERTS))))
    assert [each.params["kinds"] for each in one.findings if each.code == "scale.convention"] == [last]
    for tensors in (layout.tensors(), scaled(layout, 30, experts=range(EXPERTS))):
        assert not [one for one in audit(layout.open(tensors)).findings if one.code == "scale.convention"]


# Run as the servers do.


def own_scales(kinds=("gate", "up", "down")):
    tensors = layer()[0]
    return {
        ".".join(name.split(".")[-3:]): np.frombuffer(item.tobytes(), np.float32)[0]
        for name, item in tensors.items() if name.endswith(tuple(f"{kind}_proj.input_scale" for kind in kinds))
    }  # fmt: skip


GATED = ("gate", "up", "down")


@pytest.mark.parametrize(
    ("share", "change", "kinds"),
    [
        (1 / 2, "reciprocal", GATED), (1 / 2, 2.0**24, GATED), (1 / 2, 2.0**-14, GATED), (1 / 2, 2.0**23, ["gate"]),
        (1, "reciprocal", GATED), (1, 2.0**19, ["down"]), (1, "reciprocal", ["up"]),
        # Unequal parts: three of four ranks, one of four, and just over or under a half.
        *(
            (share, change, kinds)
            for share in (1 / 4, 31 / 64, 33 / 64, 3 / 4)
            for change in ("reciprocal", 2.0**7, 2.0**18, 2.0**-12, 2.0**-26)
            for kinds in (GATED, ["gate", "up"], ["down"])
        ),
    ],
)  # fmt: skip
def test_many_slots_at_once_come_out_as_one_of_the_possible(share, change, kinds):
    own = own_scales(kinds)
    experts = sorted({int(name.split(".")[0]) for name in own})
    hit = experts[round(len(experts) * (1 - share)) :]
    new = {
        name: 1 / value if change == "reciprocal" else value * np.float32(change)
        for name, value in own.items() if int(name.split(".")[0]) in hit
    }  # fmt: skip
    tensors = changed(new)
    loaded = parameters_of(tensors)
    for forecast in audit(opened(tensors)).backends:
        if forecast.name in BACKENDS:
            for expert in (BAD, experts[-1]):
                seen = outcome(run(loaded, forecast.name, expert), expert)
                # Of another expert than those it names the forecast says nothing.
                if forecast.scope != "experts" or seen != "safe":
                    assert agrees(forecast, seen), (forecast.name, forecast.outcome, forecast.possible, seen)
            if forecast.outcome not in ("safe", "ignored") and share in (1 / 4, 31 / 64, 33 / 64, 3 / 4):
                assert "safe" in forecast.possible


@pytest.mark.parametrize("change", [2.0**-12, 2.0**17])
@pytest.mark.parametrize("count", [1, 2])
def test_few_are_as_certain_as_one(change, count):
    """What is said of single slots is not said more vaguely: nobody takes two of 64 for the right ones."""
    own = own_scales()
    new = {name: value * np.float32(change) for name, value in own.items() if int(name.split(".")[0]) < count}
    forecasts = {one.name: one for one in audit(opened(changed(new))).backends}
    # What is merely far may be meant: the least that is said of it, and no more.
    assert {"degraded", "safe"} <= set(forecasts["vllm-cutlass"].possible) <= {"degraded", "safe", "zero"}
    assert forecasts["vllm-emulation"].outcome == ("safe" if change < 1 else "degraded")
    assert {one.text for one in forecasts.values()} & {"why.undecided"} == set()


@pytest.mark.parametrize("kind", ["gate", "up"])
def test_one_of_a_pair_that_lies_off_its_partner_is_wrong_itself(kind):
    """Gate and up read one input: where a quarter's gates are off and their ups are not, there is no doubt."""
    own = own_scales((kind,))
    new = {name: value * np.float32(2.0**22) for name, value in own.items() if int(name.split(".")[0]) < 20}
    tensors = changed(new)
    [cutlass] = [one for one in audit(opened(tensors)).backends if one.name == "vllm-cutlass"]
    assert (cutlass.outcome, "safe" in cutlass.possible) == ("zero", False)
    assert agrees(cutlass, outcome(run(parameters_of(tensors), "vllm-cutlass", BAD), BAD))


@pytest.mark.parametrize("count", [1, 16, 32, 33, 48, 64])
@pytest.mark.parametrize("value", [*(float(number) for number, _ in FINGERPRINTS), 1.0])
@pytest.mark.parametrize("kinds", [GATED, ("gate", "up"), ("down",)], ids="+".join)
def test_numbers_that_nobody_measured_come_out_as_one_of_the_possible(kinds, value, count):
    """Those that were measured are not called the odd ones, however few they are."""
    tensors = changed({name: value for name in own_scales(kinds) if int(name.split(".")[0]) >= 64 - count})
    report = audit(opened(tensors))
    codes = {item.code for item in report.findings}
    if not codes & {"scale.filled", "scale.identity"}:
        # It may have been measured, of which no file check can say anything.
        return
    assert "scale.outlier" not in codes
    loaded = parameters_of(tensors)
    for forecast in report.backends:
        if forecast.name in BACKENDS:
            hit = outcome(run(loaded, forecast.name, 63), 63)
            assert agrees(forecast, hit), (forecast.name, forecast.outcome, forecast.possible, hit)
            if count < 48 and forecast.scope in ("none", "experts"):
                assert outcome(run(loaded, forecast.name, BAD), BAD) == "safe"


@pytest.mark.parametrize("id", ["W4A8", "Quark, static FP8 inputs", "gpt-oss, static FP8 inputs"])
@pytest.mark.parametrize("count", [1, EXPERTS // 2, EXPERTS])
def test_an_infinite_amax_of_activations_in_eight_bits(id, count):
    """The largest float32 over 448, in any number of experts, and in the one number of all."""
    layout, tensors = LAYOUTS[id], LAYOUTS[id].tensors()
    for expert in range(count if layout.arrangement != "fused" else 1):
        for kind in layout.kinds:
            layout.put(tensors, expert, kind, "input_scale", layout.stored(np.finfo(np.float32).max / np.float32(448)))
    report = audit(layout.open(tensors))
    wrong = [item for item in report.findings if item.severity != "info"]
    assert {item.text.removesuffix(".divisor") for item in wrong} == {"scale.filled.float-max.fp8"}
    assert "448" in describe(wrong[0], "en")[0]
    assert "448" in describe(wrong[0], "zh")[0]
    assert {one.outcome for one in report.backends} <= {"zero", "ignored", "unsupported"}


def test_only_up_the_other_way_up():
    """Where gate's stands for both, up's own is not read."""
    up = {name: 1 / value for name, value in stored("up_proj.weight_scale_2").items()}
    tensors = changed(up)
    loaded = parameters_of(tensors)
    for forecast in audit(opened(tensors)).backends:
        if forecast.name in BACKENDS:
            assert outcome(run(loaded, forecast.name, BAD), BAD) == "safe"
            assert "safe" in forecast.possible


@pytest.mark.parametrize("ratio", [1.0002, 1.3])
def test_a_pair_that_hardly_differs(ratio):
    tensors = changed({name: value * np.float32(ratio) for name, value in stored("up_proj.weight_scale_2").items()})
    report = audit(opened(tensors))
    [item] = [one for one in report.findings if one.code == "scale.pair-mismatch"]
    assert (item.severity, report.verdict) == (("info", "info") if ratio < 1.01 else ("backend", "backend"))
    outcomes = {one.outcome for one in report.backends if one.name in BACKENDS}
    assert outcomes == {"safe" if ratio < 1.01 else "degraded"}
    for language in ("en", "zh"):
        assert ("1 %" in describe(item, language)[0]) == (ratio < 1.01)


def test_a_negative_maximum_is_called_negative():
    tensors = changed({name: -value for name, value in own_scales().items()})
    [one] = [each for each in audit(opened(tensors)).backends if each.name == "vllm-flashinfer-cutlass"]
    assert (one.outcome, one.text) == ("degraded", "why.layer-negative")
