"""Fused ordinary modules read one input: shared experts, dense layers and attention whose scales say otherwise."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import memory_checkpoint, tensor
from tests.audit.layouts import LAYOUTS, linear
from tests.audit.reading import NARROW, found, outcomes
from tests.audit.test_fp8_inputs import eight, listed, scale
from tests.audit.test_linear_forecast import APART, ATTENTION, READS, SHARED, attention, number, opened, shared

WARN = [("scale.outlier", "warn", 0, None, None)]
# It asserts that what it fuses has equal scales.
REFUSED = ("load-error", ("degraded", "load-error", "safe"))


def dense():
    layout = LAYOUTS["modelopt"]
    out = layout.tensors()
    for last, size in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        out |= linear(f"model.layers.1.mlp.{last}", *size)
    return out


def times(tensors, module, factor, suffix="input_scale"):
    name = f"{module}.{suffix}"
    [value] = np.frombuffer(tensors[name].tobytes(), np.float32)
    shape = tensors[name].shape
    return {**tensors, name: tensor((np.float32(value) * np.float32(factor)).reshape(shape))}


def texts(report):
    return [item.text for item in report.findings if item.text.startswith("scale.outlier")]


@pytest.mark.parametrize("last", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("factor", [150, 1 / 150])
def test_attention(last, factor):
    sound = attention()
    report = opened(times(sound, f"{ATTENTION}.{last}", factor))
    assert found(report) == WARN
    assert texts(report) == ["scale.outlier.sibling.linear"]
    [item] = [one for one in report.findings if one.code == "scale.outlier"]
    for language in ("en", "zh"):
        assert "150" in describe(item, language)[0]
        assert f"{ATTENTION}.{last}" in describe(item, language)[0] or factor < 1
    for one in report.backends:
        wanted = ("degraded", ("degraded", "safe")) if one.name in READS else ("safe", ())
        if one.name in APART:
            wanted = ("degraded", ("degraded", "ignored", "safe"))
        if one.name == "tensorrt-llm":
            wanted = REFUSED
        assert (one.outcome, one.possible) == wanted
        assert one.name not in READS or "q_proj/k_proj/v_proj" in one.why
    # Not as far as an outlier is.
    for factor in (48, 1 / 48, 1):
        assert found(opened(times(sound, f"{ATTENTION}.{last}", factor))) == []


def test_a_divisor_is_the_other_way_up():
    sound = attention("compressed-tensors")
    name = f"{ATTENTION}.k_proj"
    report = opened(times(sound, name, 1 / 150, "input_global_scale"), "compressed-tensors")
    [item] = [one for one in report.findings if one.code == "scale.outlier"]
    assert (item.severity, item.params["larger"]) == ("warn", name)
    # The file holds divisors, and the smallest is the largest scale's.
    assert item.text == "scale.outlier.sibling.linear.divisor"
    assert item.params["low"] / item.params["high"] == pytest.approx(150, rel=1e-3)
    assert item.params["high"] > 1
    said = {one.name: one.outcome for one in report.backends}
    assert {name: said[name] for name in READS} == {
        name: "load-error" if name == "tensorrt-llm" else "degraded" for name in READS
    }


@pytest.mark.parametrize("make", [shared, dense])
@pytest.mark.parametrize("last", ["gate_proj", "up_proj"])
def test_shared_experts_and_dense_layers(make, last):
    sound = make()
    at = SHARED if make is shared else "model.layers.1.mlp"
    config = {**LAYOUTS["modelopt"].config, "num_hidden_layers": 2 if make is dense else 1}
    healthy = opened(sound, config=config)
    assert texts(healthy) == []
    report = opened(times(sound, f"{at}.{last}", 1000), config=config)
    assert texts(report) == ["scale.outlier.sibling.linear"]
    assert found(report) == [*found(healthy), ("scale.outlier", "warn", int(make is dense), None, None)]
    assert texts(opened(times(sound, f"{at}.down_proj", 1000), config=config)) == []


@pytest.mark.parametrize("factor", [1 + 1e-7, 1.25, 100, 0.01])
@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors"])
def test_weight_scales_that_a_server_makes_one(id, factor):
    """Every token passes what is over-scaled then, on every kernel; Transformers fuses nothing."""
    suffix = {"modelopt": "weight_scale_2", "compressed-tensors": "weight_global_scale"}[id]
    sound = attention(id)
    report = opened(times(sound, f"{ATTENTION}.k_proj", factor, suffix), id)
    apart = abs(factor - 1) > 1e-3
    assert [row[0] for row in found(report)] == ["scale.pair-mismatch"] * apart
    for one in report.backends:
        fused = apart and one.name != "transformers"
        refused = fused and one.name == "tensorrt-llm"
        assert one.outcome == ("load-error" if refused else "degraded" if fused else "safe")
        assert ("safe" in one.possible) == (fused or one.text == NARROW)
        assert ("load-error" in one.possible) == refused
        assert (one.layers, one.scope) == (((0,), "model" if refused else "layer") if fused else ((), "none"))
        assert ("q_proj/k_proj/v_proj" in one.why) == fused
    # What stands alone is nobody's sibling.
    assert found(opened(times(sound, f"{ATTENTION}.o_proj", factor, suffix), id)) == []


def test_weights_that_differ_by_more_than_any_two_do_are_wrong_unfused_too():
    for factor, expected in ((1e3, "safe"), (1e6, "degraded"), (1e-6, "degraded")):
        report = opened(times(attention(), f"{ATTENTION}.k_proj", factor, "weight_scale_2"))
        [one] = [each for each in report.backends if each.name == "transformers"]
        assert (one.outcome, "safe" in one.possible) == (expected, expected == "degraded")
        assert ("q_proj/k_proj/v_proj" in one.why) == (expected == "degraded")


def test_every_layer_is_one_finding():
    at = [f"model.layers.{layer}.self_attn" for layer in range(3)]
    sound = {}
    for parent in at:
        for last in ("q_proj", "k_proj", "v_proj"):
            sound |= linear(f"{parent}.{last}")
    bad = sound
    for parent in at:
        bad = times(bad, f"{parent}.q_proj", 1000)
    quant = LAYOUTS["modelopt"].quant
    # A dense model has no experts to tell by.
    assert texts(audit(memory_checkpoint(sound, hf_quant_config=quant))) == []
    report = audit(memory_checkpoint(bad, hf_quant_config=quant))
    [item] = [one for one in report.findings if one.code == "scale.outlier"]
    assert (item.layer, item.count, item.params["numbers"]) == (None, 3, [0, 1, 2])


def test_fp8_is_fused_too():
    modules = [f"{ATTENTION}.{last}_proj" for last in "qkvo"]
    healthy = listed("FP8")(eight(modules))
    report = audit(listed("FP8")({**eight(modules), f"{modules[1]}.input_scale": scale(3)}))
    assert texts(audit(healthy)) == []
    assert texts(report) == ["scale.outlier.sibling.linear"]
    by = outcomes(report)
    assert by["vllm-marlin"] == by["vllm-cutlass"] == "degraded"
    assert by["transformers"] == outcomes(audit(healthy))["transformers"]


def test_where_nothing_is_to_be_compared():
    layout = LAYOUTS["modelopt"]
    off = times(attention(), f"{ATTENTION}.k_proj", 1000)
    # AWQ scales each module's input by itself.
    vector = {f"{ATTENTION}.k_proj.pre_quant_scale": tensor(np.full(64, 0.5, np.float32))}
    assert texts(opened({**off, **vector})) == []
    # Nobody reads them.
    quant = {"quantization": {**layout.quant["quantization"], "quant_algo": "W4A16_NVFP4"}}
    assert texts(audit(layout.open(off, quant=quant))) == []
    # An exporter's value is no measurement, and neither is one that is no scale.
    for value in (np.float32(6) / np.float32(2688), np.nan, 0.0):
        far = {f"{ATTENTION}.{last}_proj.input_scale": number(1e-6) for last in "qv"}
        report = opened({**attention(), **far, f"{ATTENTION}.k_proj.input_scale": number(value)})
        assert texts(report) == []
    # Keys that give the values too have one partner, and alone there is none.
    for lost, expected in (("v", ["scale.outlier.sibling.linear"]), ("qv", [])):
        kept = {n: t for n, t in off.items() if not any(f"{ATTENTION}.{last}_proj." in n for last in lost)}
        assert texts(opened(kept)) == expected
    healthy = {n: t for n, t in attention().items() if f"{ATTENTION}.v_proj." not in n}
    assert texts(opened(healthy)) == []
    # Cross-attention takes its keys and values from another input.
    cross = {n.replace("self_attn", "cross_attn"): t for n, t in off.items()}
    assert texts(opened(cross)) == []


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -1e-4, 4.4e-42])
def test_a_bad_weight_scale_is_one_finding_and_no_pair_that_differs(value):
    for last in ("gate_proj", "up_proj"):
        report = opened({**shared(), f"{SHARED}.{last}.weight_scale_2": number(value)})
        [item] = [one for one in report.findings if one.severity != "info"]
        assert (item.severity, item.role) == ("error", "weight_scale_2")


@pytest.mark.parametrize("last", ["q_proj", "k_proj", "v_proj"])
def test_a_scale_that_nobody_set_is_no_outlier_of_its_siblings(last):
    """One number gets one class, and identity goes before outlier; TensorRT-LLM asserts what it did."""
    report = opened({**attention(), f"{ATTENTION}.{last}.input_scale": tensor(np.float32(1))})
    assert found(report) == []
    assert [item.text for item in report.findings if item.code.startswith("scale")] == ["scale.identity.linear"]
    for one in report.backends:
        wanted = ("safe", ("degraded", "safe") if one.name in READS else ())
        assert (one.outcome, one.possible) == (REFUSED if one.name == "tensorrt-llm" else wanted), one.name
        assert ("exactly 1.0" in one.why) == (one.name in READS and one.name != "tensorrt-llm")


def test_a_module_that_nobody_set_and_that_is_fused_with_none_stops_no_server():
    report = opened({**attention(), f"{ATTENTION}.o_proj.input_scale": tensor(np.float32(1))})
    assert [(item.text, item.params["family"]) for item in report.findings] == [("scale.identity.linear", "")]
    assert {one.outcome for one in report.backends} == {"safe"}
