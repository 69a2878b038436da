"""What findings say of one expert or several, of one layer or several, and of draft layers."""

import re

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.texts import finding_texts, words
from nvfp4viz.checkpoint import canonical, memory_checkpoint
from tests.audit.families import FAMILIES
from tests.audit.fault_matrix import FAULTS, Case
from tests.audit.layouts import LAYOUTS, typed
from tests.audit.test_families import changed
from tests.audit.test_shapes import of_size

EN = finding_texts("en")


def test_one_expert_or_several():
    fill = {"layer": 0, "expected": 8}
    assert words("expert.absent", {**fill, "experts": "5"})[0] == (
        "Layer 0: expert 5 is absent; the configuration says that there are 8."
    )
    for several in ("5, 6", "2–7"):
        assert f"experts {several} are absent;" in words("expert.absent", {**fill, "experts": several})[0]
    lacks = words("scheme.pre-quant-scale", {**fill, "projection": "up", "experts": "3"})[0]
    assert lacks == "Layer 0, up: expert 3 lacks pre_quant_scale, which the other experts have."
    assert words("why.weight-degraded", {"layer": 1, "experts": "3"})[0] == (
        "A second-level weight scale is negative: layer 1, expert 3 returns outputs that are mis-scaled or change sign."
    )
    assert "reaches this expert." in words("scale.filled.max-bound", {**_every("x"), "experts": "3"})[1]


@pytest.mark.parametrize("text", [key for key, parts in EN.items() if "experts {experts}" in parts["message"]])
def test_no_text_calls_one_expert_several(text):
    for message in words(text, {**_every("x"), "experts": "3"}):
        several = "(?:are|were|have|lack|compute|return|add)"
        assert not re.search(rf"\bexperts 3\b|(?:expert 3|this expert) {several}\b|these experts", message)
    for message in words(text, {**_every("x"), "experts": "3, 5"}):
        assert not re.search(r"\bexpert 3|this expert\b", message)
    for language in ("en", "zh"):
        assert not re.search(
            r"experts? [:,;.]|专家 [：，；。]", words(text, {**_every("x"), "experts": ""}, language)[0]
        )


@pytest.mark.parametrize("language", ["en", "zh"])
def test_what_is_said_of_a_server_has_the_version_that_was_read(language):
    texts = finding_texts(language)
    named = {key: part for key, parts in texts.items() for part in parts.values() if re.search(r"vLLM \d", part)}
    assert len(named) > 5
    assert [key for key, part in named.items() if re.search(r"vLLM (?!0\.33\.0\b)\d", part)] == []


@pytest.mark.parametrize("name", ["layers", "unseen"])
def test_one_layer_or_several(name):
    texts = [key for key, parts in EN.items() if re.search(rf"[Ll]ayers? {{{name}}}", parts["message"])]
    assert texts
    for text in texts:
        assert re.search(r"\b[Ll]ayer 4\b", words(text, {**_every("x"), name: "4"})[0])
        for several in ("1, 2", "1–3"):
            assert re.search(rf"\b[Ll]ayers {several}", words(text, {**_every("x"), name: several})[0])


def _every(value):
    names = {name for parts in EN.values() for part in parts.values() for name in re.findall(r"{(\w+)}", part)}
    return dict.fromkeys(names, value)


def test_layers_of_a_conflict():
    checkpoint = FAMILIES["gpt-oss"]()
    config = {**checkpoint.config, "moe_intermediate_size": 80}
    [item] = audit(_with_config(checkpoint, config)).findings
    assert item.message.startswith(
        "config.json says moe_intermediate_size 80, but the experts of layers 0, 1 are stored with 32."
    )
    [item] = of_size("gpt-oss", 64, 64, (64, 96), model_type="gpt_oss").findings
    assert "the experts of layer 0 are stored with 96" in item.message


def _with_config(checkpoint, config):
    return memory_checkpoint(checkpoint.read_tensors(), config=config, hf_quant_config=checkpoint.hf_quant_config)


def test_a_draft_layer_is_called_one():
    """Its number is the audit's: the model of two layers has no layer 2."""
    checkpoint = FAMILIES["DeepSeek-V4"]()
    view = canonical(checkpoint)
    [draft] = view.draft_layers
    for layer, en, zh in (
        (draft, f"Draft layer {draft}, down", f"草稿层 {draft} down"),
        (1, "Layer 1, d", "第 1 层 d"),
    ):
        name = view.slot(layer, 2, "down", "weight_scale").name
        report = audit(changed(checkpoint, drop=[name]))
        [item] = report.findings
        assert (item.code, item.layer, item.experts) == ("scale.missing", layer, (2,))
        assert item.message.startswith(en)
        assert describe(item, "zh")[0].startswith(zh)
        assert ("draft" in item.params) == (layer == draft)


def test_a_draft_layer_of_another_size_is_called_one():
    checkpoint = FAMILIES["DeepSeek-V4"]()
    view = canonical(checkpoint)
    [draft] = view.draft_layers
    tensors = {}
    for expert in range(4):
        at = view.module(draft, expert, "up").name
        tensors[f"{at}.weight"] = typed(bytes_of(64, 32), "I8")
        tensors[f"{at}.scale"] = typed(bytes_of(64, 2), "F8_E8M0")
    [item] = audit(changed(checkpoint, replace=tensors)).findings
    assert (item.text, item.layer) == ("weight.shape.projection", draft)
    assert item.message.startswith(f"Draft layer {draft}, up")
    assert describe(item, "zh")[0].startswith(f"草稿层 {draft} ")


def bytes_of(*shape):
    return np.full(shape, 120, np.uint8)


@pytest.mark.parametrize("id", ["modelopt", "fused", "gpt-oss", "stacked"])
def test_no_message_of_the_matrix_has_an_empty_place(id):
    for build in FAULTS.values():
        case = build(LAYOUTS[id])
        report = case.report(LAYOUTS[id]) if isinstance(case, Case) else None
        for item in (*report.findings, *report.backends) if report else ():
            for language in ("en", "zh"):
                said = " ".join(describe(item, language))
                assert not re.search(r"experts? [:,;.]|专家 [：，；。]|第  层|\( |\(\)|（）", said)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(
    ("factor", "larger", "times"), [(3.0, "up", "3"), (1 / 3, "gate", "3"), (2.567e7, "up", "25,670,000")]
)
def test_how_far_gate_and_up_differ_has_no_exponent(factor, larger, times, language):
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    for kind, value in (("gate", 1e-4), ("up", 1e-4 * factor)):
        layout.put(tensors, 3, kind, "weight_scale_2", np.float32(value))
    [item] = [one for one in audit(layout.open(tensors)).findings if one.code == "scale.pair-mismatch"]
    message = describe(item, language)[0]
    assert times in message
    assert not re.search(r"\de[+-]\d", message)
    assert (item.params["larger"], item.params["smaller"]) == (larger, "gate" if larger == "up" else "up")


ONE_FOR_ALL = [name for name, one in LAYOUTS.items() if one.arrangement == "fused"]
OWN = {
    "en": r"experts? \d|the expert\b|every expert sees|these experts",
    "zh": r"专家 \d|该专家|每个专家都见到|这些专家",
}


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -1e-3, 1e-40, 6 / 2688])
@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
@pytest.mark.parametrize("name", [*ONE_FOR_ALL, "modelopt"])
def test_one_number_for_all_experts_is_no_experts_own(name, role, value):
    layout = LAYOUTS[name]
    if role not in layout.roles:
        return
    tensors = layout.tensors()
    layout.put(tensors, 3, "down", role, layout.stored(value))
    found_here = [item for item in audit(layout.open(tensors)).findings if item.role == role and item.layer == 0]
    assert found_here or value == 6 / 2688
    for item in found_here:
        for language, own in OWN.items():
            said = " ".join(describe(item, language))
            assert bool(re.search(own, said)) == (layout.arrangement == "expert"), said
        assert (item.experts is None) == (layout.arrangement == "fused")
