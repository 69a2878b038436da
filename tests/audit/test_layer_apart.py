"""One layer whose experts' activation scales are about the reciprocal of the other layers'."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES
from nvfp4viz.audit.forecast_weights import FOLDING
from nvfp4viz.audit.repair import plan_repair
from nvfp4viz.checkpoint import tensor
from tests.audit.config_faults import section_of, with_section
from tests.audit.layouts import LAYOUTS
from tests.audit.reading import found, outcomes

IDS = [
    "modelopt", "projection-major", "w1/w2/w3", "non-gated", "Gemma 4, .moe.", "Gemma 4, nvidia", "Gemma 4, CT",
    "compressed-tensors", "fused", "stacked", "Quark NVFP4",
]  # fmt: skip
WARN = [("scale.outlier", "warn")]


def layered(id, change, layers=4, but=None, role="input_scale"):
    """So many layers; ``change(layer, kind, scale)`` gives each effective scale of a role anew.

    ``but``: what single tensors hold instead, None for one that is not stored.
    """
    layout = LAYOUTS[id]
    out = {}
    for k in range(layers):
        tensors = layout.tensors()
        for kind in layout.kinds:
            for expert in range(8 if layout.arrangement != "fused" else 1):
                stored = layout.get(tensors, expert, kind, role)
                own = float(layout.stored(stored))
                new = np.float32(change(k, kind, own * (1 + 0.1 * k)))
                layout.put(tensors, expert, kind, role, layout.stored(new))
        out |= {name.replace("layers.0", f"layers.{k}"): item for name, item in tensors.items()}
    for name, value in (but or {}).items():
        if value is None:
            del out[name]
        else:
            out[name] = tensor(np.float32(value))
    return layout.open(out, **with_section(layout, section_of(layout), num_hidden_layers=layers))


def weights_apart(id, factor, kinds, layer=2, layers=4):
    """So many layers, of which one's effective second-level weight scales are off by a factor."""

    def off(k, kind, own):
        return own * factor if k == layer and kind in kinds else own

    return layered(id, off, layers, role="weight_scale_2")


def said(report):
    return [(code, severity) for code, severity, *_ in found(report)]


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_layer_stored_the_other_way_up(id, layer):
    assert said(audit(layered(id, lambda k, kind, own: own))) == []
    report = audit(layered(id, lambda k, kind, own: 1 / own if k == layer else own))
    assert said(report) == WARN
    [item] = [one for one in report.findings if one.severity == "warn"]
    divided = LAYOUTS[id].divisors
    text = f"scale.outlier.layer{'.divisor' if divided else ''}"
    assert (item.text, item.layer, item.role) == (text, layer, "input_scale")
    # The words name what the file holds: a multiplier below one here is a reciprocal there.
    assert (item.params["own"] < 1 < item.params["others"]) == divided
    assert item.params["kinds"] == ", ".join(LAYOUTS[id].kinds)
    for language in ("en", "zh"):
        message = describe(item, language)[0]
        assert "{" not in message
        assert "e-0" not in message
    for name, one in outcomes(report).items():
        assert one == ("degraded" if FAMILIES[name].reach != "none" else "ignored")


def test_of_one_projection_alone():
    for kind in ("gate", "up", "down"):
        report = audit(
            layered("modelopt", lambda k, own_kind, own, kind=kind: 1 / own if (k, own_kind) == (2, kind) else own)
        )
        assert said(report) == WARN
        [item] = [one for one in report.findings if one.severity == "warn"]
        # Gate beside its own up shows it too, and first.
        assert item.text == ("scale.outlier.layer" if kind == "down" else "scale.outlier.sibling")


@pytest.mark.parametrize("factor", [1 / 5000, 1 / 900, 1 / 30, 30, 900])
def test_a_layer_that_is_merely_different(factor):
    """Far, and not where the other convention would be: within a layer nothing stands out."""
    report = audit(layered("modelopt", lambda k, kind, own: own * factor if k == 2 else own))
    assert said(report) == []


@pytest.mark.parametrize("id", [*IDS, "W4A8"])
@pytest.mark.parametrize("factor", [1e12, 1e8, 1e-5, 1e-6])
@pytest.mark.parametrize("kinds", [("down",), ("gate", "up", "gate_up", "down")])
def test_a_layer_farther_off_than_layers_differ(id, factor, kinds):
    """Neither a mirror image nor anything that activations explain."""
    report = audit(layered(id, lambda k, kind, own: own * factor if k == 2 and kind in kinds else own))
    assert said(report) == WARN
    [item] = [one for one in report.findings if one.severity == "warn"]
    text = f"scale.outlier.layer.far{'.divisor' if LAYOUTS[id].divisors else ''}"
    assert (item.text, item.layer, item.role) == (text, 2, "input_scale")
    for forecast in report.backends:
        if forecast.outcome == "unsupported":
            continue
        if FAMILIES[forecast.name].reach == "none" or (kinds == ("down",) and not FAMILIES[forecast.name].reads_down):
            assert forecast.outcome == "ignored", forecast.name
            continue
        assert (forecast.outcome, "safe" in forecast.possible, forecast.text) == ("degraded", True, "why.layer-far")


def test_of_two_halves_neither_is_the_odd_one():
    for layers in (2, 4):
        report = audit(layered("modelopt", lambda k, kind, own: 1 / own if k % 2 else own, layers=layers))
        assert said(report) == WARN
        assert [item.text for item in report.findings if item.severity == "warn"] == ["scale.outlier.layers"]


def test_bad_values_of_other_layers_do_not_hide_it():
    def change(k, kind, own):
        return np.nan if (k, kind) == (0, "down") else 1 / own if k == 2 else own

    report = audit(layered("modelopt", change, layers=5))
    assert ("scale.outlier", "warn") in said(report)
    assert {code for code, _ in said(report)} == {"scale.outlier", "scale.nan"}


def test_a_repair_leaves_it_alone():
    checkpoint = layered("modelopt", lambda k, kind, own: 1 / own if k == 1 else own)
    assert plan_repair(checkpoint, "peer-max", suspects=True).is_empty


@pytest.mark.parametrize("stored", [None, np.nan, 0.0, 1.0, np.finfo(np.float32).max / np.float32(2688), 1e9])
def test_a_slot_of_it_with_a_finding_of_its_own_has_that_one_alone(stored):
    checkpoint = layered("modelopt", lambda k, kind, own: 1 / own if k == 2 else own)
    [whole] = [one for one in audit(checkpoint).findings if one.severity == "warn"]
    assert (whole.count, whole.experts) == (24, tuple(range(8)))
    name = "model.layers.2.mlp.experts.0.gate_proj.input_scale"
    assert whole.tensors[0] == name
    report = audit(layered("modelopt", lambda k, kind, own: 1 / own if k == 2 else own, but={name: stored}))
    [item] = [one for one in report.findings if one.text == "scale.outlier.layer"]
    assert (item.count, item.experts) == (23, tuple(range(8)))
    assert name not in item.tensors
    others = [one for one in report.findings if one is not item and name in one.tensors]
    assert [one.count for one in others] == [1]
    assert all("lie about" not in describe(one, "en")[0] for one in report.findings)


@pytest.mark.parametrize("id", [*IDS, "W4A16", "compressed-tensors W4A16"])
@pytest.mark.parametrize("factor", [1000, 1e-3, 1e-9])
def test_weight_scales_of_a_layer_farther_off_than_weights_differ(id, factor):
    assert said(audit(weights_apart(id, 30, ("gate", "up", "gate_up", "down")))) == []
    for kinds in (("down",), ("gate", "up", "gate_up", "down")):
        report = audit(weights_apart(id, factor, kinds))
        assert said(report) == WARN
        [item] = [one for one in report.findings if one.severity == "warn"]
        text = f"scale.outlier.layer.weight{'.divisor' if LAYOUTS[id].divisors else ''}"
        assert (item.text, item.layer, item.role) == (text, 2, "weight_scale_2")
        for forecast in report.backends:
            if forecast.outcome != "unsupported":
                assert (forecast.scope, forecast.layers) == ("layer", (2,)), forecast.name
                # Meant or not, one backend rounds such small ones away.
                folded = forecast.name == FOLDING and factor < 1
                assert (forecast.outcome, "safe" in forecast.possible) == (
                    ("zero", False) if folded else ("degraded", True)
                )


@pytest.mark.parametrize("id", ["Quark, static FP8 inputs", "gpt-oss, static FP8 inputs"])
def test_static_scales_beside_mxfp4_are_held_to_other_layers_too(id):
    report = audit(layered(id, lambda k, kind, own: own * 1e8 if k == 2 else own))
    assert said(report) == WARN
    for forecast in report.backends:
        if FAMILIES[forecast.name].reach != "none" and forecast.outcome != "unsupported":
            assert (forecast.outcome, forecast.text) == ("degraded", "why.layer-far"), forecast.name


@pytest.mark.parametrize("id", [*IDS, "W4A8"])
@pytest.mark.parametrize("layers", [2, 4])
def test_halves_of_layers_farther_apart_than_layers_differ(id, layers):
    """Which of them are right nothing says; where layers merely differ nothing is said."""
    upper = range(layers // 2, layers)
    assert said(audit(layered(id, lambda k, kind, own: own * 3000 if k in upper else own, layers))) == []
    report = audit(layered(id, lambda k, kind, own: own * 1e9 if k in upper and kind == "down" else own, layers))
    assert said(report) == WARN
    [item] = [one for one in report.findings if one.severity == "warn"]
    text = f"scale.outlier.layers{'.divisor' if LAYOUTS[id].divisors else ''}"
    assert (item.text, item.layer, item.params["kinds"]) == (text, None, "down")
    for forecast in report.backends:
        family = FAMILIES[forecast.name]
        if forecast.outcome != "unsupported":
            reads = family.reach != "none" and family.reads_down
            assert forecast.outcome == ("degraded" if reads else "ignored"), forecast.name


@pytest.mark.parametrize("id", [id for id in IDS if id not in ("fused",)])
def test_halves_of_layers_whose_weights_differ(id):
    checkpoint = weights_apart(id, 1e-4, ("gate", "up", "down"), layer=1, layers=2)
    assert said(audit(checkpoint)) == WARN
    assert {item.scope for item in audit(checkpoint).backends if item.outcome == "degraded"} == {"layer"}


@pytest.mark.parametrize("id", [*IDS, "W4A8", "Quark, static FP8 inputs"])
@pytest.mark.parametrize("factor", [1e-20, 1e-30, 1e12, 1e30])
def test_a_file_of_which_no_activation_is_like_any_model_s(id, factor):
    report = audit(layered(id, lambda k, kind, own: own * factor, layers=3))
    assert said(report) == WARN
    [item] = [one for one in report.findings if one.severity == "warn"]
    assert item.text == f"scale.outlier.file{'.divisor' if LAYOUTS[id].divisors else ''}"
    for forecast in report.backends:
        if forecast.outcome != "unsupported":
            reads = FAMILIES[forecast.name].reach != "none"
            assert (forecast.outcome, "safe" in forecast.possible) == (
                ("degraded", True) if reads else ("ignored", False)
            )


@pytest.mark.parametrize("id", IDS)
def test_one_projection_that_is_as_loud_as_its_mirror_image(id):
    """0.033 elsewhere and 33 in one layer's down: a thousand times, as massive activations are."""
    kinds = LAYOUTS[id].kinds
    assert said(audit(layered(id, lambda k, kind, own: 33.0 if (k, kind) == (2, "down") else 0.032))) == []
    mirrored = audit(layered(id, lambda k, kind, own: 33.0 if k == 2 else 0.032))
    assert [
        (item.text.split(".")[2], item.params["kinds"]) for item in mirrored.findings if item.severity == "warn"
    ] == [("layer", ", ".join(kinds))]


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "non-gated"])
def test_what_was_filled_in_says_nothing_of_its_layer(id):
    """Half of a layer's experts at the largest number: the others are as they should be."""
    layout = LAYOUTS[id]
    most = layout.stored(np.finfo(np.float32).max / np.float32(2688))
    bad = {
        layout.name(e, kind, "input_scale").replace("layers.0", "layers.2"): most
        for e in (0, 2, 4, 6)
        for kind in layout.kinds
    }
    report = audit(layered(id, lambda k, kind, own: own, but=bad))
    assert {item.code for item in report.findings if item.severity == "warn"} == {"scale.filled"}


BAD = {"zero": 0.0, "nan": np.nan, "inf": np.inf, "negative": -1e-3, "subnormal": 4e-42}


@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("id", [*IDS, "W4A8", "Quark, static FP8 inputs", "gpt-oss, static FP8 inputs"])
def test_layers_of_which_no_number_is_usable_are_no_measure(id, value, role):
    layout = LAYOUTS[id]
    if role not in layout.roles:
        return
    # Of a file of divisors another number is stored: one that is zero is an infinite scale.
    codes = {f"scale.{code}" for code in BAD}
    for kinds, from_layer in ((layout.kinds, 0), (("down",), 0), (("down",), 1)):

        def spoilt(k, kind, own, kinds=kinds, from_layer=from_layer):
            return BAD[value] if kind in kinds and k >= from_layer else own

        with np.errstate(divide="ignore", over="ignore"):
            report = audit(layered(id, spoilt, layers=3, role=role))
        assert report.verdict != "ok"
        assert {item.code for item in report.findings if item.severity != "info"} <= codes, kinds


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("sound", [(2,), (0, 3)])
def test_layers_whose_weight_scales_are_the_other_way_up_are_no_measure_for_the_sound_ones(id, sound):
    report = audit(layered(id, lambda k, kind, own: own if k in sound else 1.25, role="weight_scale_2"))
    assert said(report) == [("scale.convention", "error")] * (4 - len(sound))
    assert {item.layer for item in report.findings if item.code == "scale.convention"} == set(range(4)) - set(sound)


@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("id", [id for id in IDS if LAYOUTS[id].arrangement == "expert"])
def test_a_few_experts_whose_weight_scales_are_the_other_way_up(id, experts):
    """One number may just be wrong; with the layer's others, or all of the projection, it is the convention."""
    layout = LAYOUTS[id]
    config = with_section(layout, section_of(layout), num_hidden_layers=3, num_experts=experts)
    cells = [(k, e, kind) for k in range(3) for e in range(experts, 8) for kind in layout.kinds]
    gone = {
        layout.name(e, kind, role).replace("layers.0", f"layers.{k}") for k, e, kind in cells for role in layout.roles
    }

    def where(turned):
        whole = layered(id, lambda k, kind, own: 1 / own if turned(k, kind) else own, 3, role="weight_scale_2")
        tensors = {name: item for name, item in whole.read_tensors().items() if name not in gone}
        return audit(layout.open(tensors, **config))

    assert said(where(lambda k, kind: False)) == []
    everywhere = where(lambda k, kind: True)
    assert said(everywhere) == [("scale.convention", "error")] * 3
    for one in everywhere.backends:
        assert one.outcome not in ("safe", "ignored") or one.possible
    if experts * len(layout.kinds) >= 3:
        errors = [item for item in where(lambda k, kind: k == 1).findings if item.severity == "error"]
        assert [(item.code, item.layer) for item in errors] == [("scale.convention", 1)]
    down = where(lambda k, kind: kind == "down")
    assert said(down) == [("scale.convention", "error")] * 3
    # Of one projection of one layer nobody knows that it is the convention.
    assert "scale.convention" not in {code for code, _ in said(where(lambda k, kind: (k, kind) == (1, "down")))}
