"""Gate and up read the same input: a whole projection whose activation scales say otherwise."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.repair import plan_repair
from nvfp4viz.checkpoint import tensor
from tests.audit.layouts import EXPERTS, LAYOUTS, MLP, twin

# Layouts with an activation scale for gate and one for up.
PAIRED = [
    id for id, layout in LAYOUTS.items()
    if layout.with_input and {"gate", "up"} <= set(layout.kinds) and layout.block == "NVFP4" and id != "NVFP4_AWQ"
]  # fmt: skip


def scaled(layout, kind, factor, experts=range(EXPERTS), tensors=None, equal=True):
    """The layout's file with one projection's activation scales off; else gate and up have the same ones."""
    tensors = dict(tensors or layout.tensors())
    for expert in range(EXPERTS):
        value = layout.get(tensors, expert, "gate", "input_scale")
        if equal:
            layout.put(tensors, expert, "up", "input_scale", value)
    for expert in experts:
        value = layout.get(tensors, expert, kind, "input_scale")
        layout.put(tensors, expert, kind, "input_scale", value * np.float32(1 / factor if layout.divisors else factor))
    return tensors


def outliers(report):
    return [
        (item.text, item.severity, item.role, item.layer, item.projection, item.experts)
        for item in report.findings
        if item.code.startswith("scale.outlier")
    ]


def everywhere(layout):
    text = f"scale.outlier.sibling{'.divisor' if layout.divisors else ''}"
    return [(text, "warn", "input_scale", 0, None, tuple(range(EXPERTS)))]


@pytest.mark.parametrize("id", PAIRED)
@pytest.mark.parametrize(("kind", "factor"), [("up", 1000), ("up", 0.001), ("gate", 1000), ("gate", 0.001)])
def test_a_whole_projection_that_is_off(id, kind, factor):
    layout = LAYOUTS[id]
    report = audit(layout.open(scaled(layout, kind, factor)))
    assert outliers(report) == everywhere(layout)
    assert report.verdict == "warn"
    [item] = [found for found in report.findings if found.text.startswith("scale.outlier.sibling")]
    other = {"gate": "up", "up": "gate"}[kind]
    larger = kind if factor > 1 else other
    # The numbers are those of the file, where the larger scale may be the smaller divisor.
    assert (item.params[kind] > item.params[other]) == ((factor > 1) != layout.divisors)
    assert (item.params["ratio"], item.params["larger"]) == ("1,000", larger)
    by = {each.name: each for each in report.backends}
    # What takes the larger of the two may be served well or badly: the file does not tell.
    for name in ("vllm-cutlass", "vllm-flashinfer-trtllm", "sglang-generic", "tensorrt-llm"):
        if by[name].outcome != "unsupported":
            assert (by[name].outcome, by[name].possible, by[name].layers) == ("degraded", ("degraded", "safe"), (0,))
    assert by["transformers"].outcome == "ignored"
    assert by["vllm-marlin"].outcome in ("ignored", "unsupported")
    for language in ("en", "zh"):
        message, advice = describe(item, language)
        assert "1,000" in message
        assert advice
        assert larger in describe(by["vllm-cutlass"], language)[0] or by["vllm-cutlass"].outcome == "unsupported"


@pytest.mark.parametrize("id", PAIRED)
def test_healthy_twins_are_silent(id):
    layout = LAYOUTS[id]
    for tensors in (None, *(twin(layout, seed) for seed in range(6)), scaled(layout, "up", 1)):
        assert outliers(audit(layout.open(tensors))) == []
    # Less than an outlier is far from its peers, in either direction.
    for factor in (48, 1 / 48):
        assert outliers(audit(layout.open(scaled(layout, "up", factor)))) == []


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "stacked"])
def test_one_expert_that_is_off_is_its_peers_outlier(id):
    layout = LAYOUTS[id]
    report = audit(layout.open(scaled(layout, "up", 1000, experts=[3])))
    assert [(text.removesuffix(".divisor"), *rest) for text, *rest in outliers(report)] == [
        ("scale.outlier", "warn", "input_scale", 0, "up", (3,))
    ]


def test_a_constant_that_nobody_measured():
    """1.0 in every expert of up has a note of its own (`test_never_set`), and so has what an exporter fills in."""
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    for expert in range(EXPERTS):
        layout.put(tensors, expert, "up", "input_scale", np.float32(1))
    assert outliers(audit(layout.open(tensors))) == []
    for expert in range(EXPERTS):
        layout.put(tensors, expert, "gate", "input_scale", np.float32(2) * (1 + np.float32(expert) / 50))
        layout.put(tensors, expert, "up", "input_scale", np.float32(0.5) / np.float32(2688))
    report = audit(layout.open(tensors))
    assert "scale.filled" in {item.code for item in report.findings}
    assert outliers(report) == []
    # A value of both is nobody's fault: online quantisation stores it.
    for kind in layout.kinds:
        for expert in range(EXPERTS):
            layout.put(tensors, expert, kind, "input_scale", np.float32(1))
    assert outliers(audit(layout.open(tensors))) == []


def test_where_nobody_reads_the_scales_or_awq_changes_the_input():
    layout = LAYOUTS["modelopt"]
    off = scaled(layout, "up", 1000)
    quant = {"quantization": {**layout.quant["quantization"], "quant_algo": "W4A16_NVFP4"}}
    assert outliers(audit(layout.open(off, quant=quant))) == []
    awq = LAYOUTS["NVFP4_AWQ"]
    assert outliers(audit(awq.open(scaled(awq, "up", 1000)))) == []
    assert any(name.endswith("pre_quant_scale") for name in awq.tensors())


def test_two_experts_are_too_few_to_tell_a_projection_by():
    layout = LAYOUTS["modelopt"]
    few = {
        name: item for name, item in scaled(layout, "up", 1000).items()
        if ".experts." not in name or int(name.removeprefix(f"{MLP}.").partition(".")[0]) < 2
    }  # fmt: skip
    few["model.layers.0.mlp.gate.weight"] = tensor(np.zeros((2, 64), np.float32))
    assert outliers(audit(layout.open(few, config={**layout.config, "num_experts": 2}))) == []


def test_repair_does_not_guess_which_of_the_two_is_wrong():
    layout = LAYOUTS["modelopt"]
    tensors = scaled(layout, "up", 1000)
    del tensors[layout.name(3, "gate", "input_scale")]
    plan = plan_repair(layout.open(tensors), "peer-max", suspects=True)
    assert {(slot.expert, slot.projection) for slot in plan.record.slots} == {(3, "gate")}
