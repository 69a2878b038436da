"""Gates of all experts of all layers that are gone, and experts that never had one."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import tensor
from tests.audit.families import FAMILIES, plain
from tests.audit.layouts import LAYOUTS
from tests.audit.test_fp8_inputs import eight

GATED = [id for id, layout in LAYOUTS.items() if {"gate", "up"} <= set(layout.kinds)]


def without_gates(layout):
    """Every tensor of an expert's gate away, and no router."""
    lost = {name for expert in range(8) for name in layout.tensors() if _is_gate(layout, expert, name)}
    assert lost
    return {name: item for name, item in layout.tensors().items() if name not in lost}


def _is_gate(layout, expert, name):
    disk = layout.disk["gate"]
    start = layout.name(expert, "gate", "weight").rpartition(disk)[0] + disk
    if layout.projection_major:
        start += f".{expert}"
    return name.startswith((f"{start}.", f"{start}_")) or name == start


def of_gates(report):
    return [(item.text, item.severity) for item in report.findings if item.text.startswith("expert.absent.gate")]


def said(layout, tensors, **config):
    return audit(layout.open(tensors, config={**(layout.config or {}), **config}))


@pytest.mark.parametrize("id", GATED)
@pytest.mark.parametrize("holder", ["config", "text_config"])
def test_a_silu_model_without_any_gate(id, holder):
    layout = LAYOUTS[id]
    act = {"hidden_act": "silu"}
    act = act if holder == "config" else {"text_config": {**(layout.config or {}), **act}}
    assert of_gates(said(layout, layout.tensors(), **act)) == []
    report = said(layout, without_gates(layout), **act)
    [(text, severity)] = of_gates(report)
    assert severity == "error"
    assert text.rpartition(".")[2] in ("function", "name", "sister")
    assert report.verdict == "error"
    [item] = [one for one in report.findings if one.text == text]
    assert (item.code, item.projection) == ("expert.absent", "gate")
    assert all(one.outcome != "safe" for one in report.backends)
    for language in ("en", "zh"):
        assert item.tensors[0] in describe(item, language)[0]


def test_what_else_says_that_experts_are_gated():
    """A shared expert with a gate, or an up that is called w3, says it without a word of the configuration."""
    layout = LAYOUTS["modelopt"]
    shared = eight([f"model.layers.0.mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")])
    assert of_gates(said(layout, {**layout.tensors(), **shared})) == []
    assert of_gates(said(layout, {**without_gates(layout), **shared})) == [("expert.absent.gate.sister", "error")]
    layout = LAYOUTS["w1/w2/w3"]
    assert of_gates(said(layout, layout.tensors())) == []
    assert of_gates(said(layout, without_gates(layout))) == [("expert.absent.gate.name", "error")]


def test_where_nothing_says_it():
    layout = LAYOUTS["modelopt"]
    for config in ({}, {"hidden_act": "gelu"}):
        report = said(layout, without_gates(layout), **config)
        assert of_gates(report) == [("expert.absent.gate.open", "info")]
        assert {one.outcome for one in report.backends} == {
            one.outcome for one in said(layout, layout.tensors(), **config).backends
        }


@pytest.mark.parametrize("function", ["relu2", "relu", "silu_no_mul"])
def test_experts_that_have_no_gate(function):
    """Nemotron's: silent by the function that the configuration names, whatever Mamba's is."""
    layout = LAYOUTS["non-gated"]
    named = {"mlp_hidden_act": function, "mamba_hidden_act": "silu", "hidden_act": "silu"}
    assert of_gates(said(layout, layout.tensors(), **named)) == []
    assert of_gates(said(layout, layout.tensors())) == []
    # The same by the function alone.
    plain = LAYOUTS["modelopt"]
    assert of_gates(said(plain, without_gates(plain), **named)) == []


@pytest.mark.parametrize("id", FAMILIES)
def test_families_as_they_are_published(id):
    assert of_gates(audit(FAMILIES[id]())) == []


def test_a_gate_under_another_name_or_in_a_file_that_is_not_here():
    layout = LAYOUTS["modelopt"]
    tensors = without_gates(layout)
    [up] = {name for name in tensors if name == layout.name(0, "up", "weight")}
    other = up.replace("up_proj", "gate_linear")
    assert of_gates(said(layout, {**tensors, other: tensors[up]}, hidden_act="silu")) == []


# Other MLPs of a model whose experts have gates.


def of_mlps(report):
    return [(item.severity, item.tensors[0]) for item in report.findings if item.code == "scale.missing"]


@pytest.mark.parametrize("path", ["mlp.shared_expert", "mlp.shared_experts"])
@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "MIXED_PRECISION", "gpt-oss", "fused"])
def test_gates_that_no_shared_expert_has(id, path):
    layout = LAYOUTS[id]
    at = f"{layout.prefix.partition('.0.')[0]}.0.{path}"
    whole = {**layout.tensors(), **plain(*(f"{at}.{name}_proj" for name in ("gate", "up", "down")))}
    assert of_mlps(said(layout, whole)) == []
    lost = {name: item for name, item in whole.items() if f"{at}.gate_proj" not in name}
    assert of_mlps(said(layout, lost)) == [("error", f"{at}.gate_proj.weight")]
    # By a function that has none, and under a name that is not read here.
    assert of_mlps(said(layout, lost, mlp_hidden_act="relu2")) == []
    assert of_mlps(said(layout, {**lost, f"{at}.gate_linear.weight": lost[f"{at}.up_proj.weight"]})) == []


def test_the_only_dense_layer_without_its_gate():
    layout = LAYOUTS["modelopt"]
    whole = {name.replace("layers.0", "layers.1"): item for name, item in layout.tensors().items()}
    whole |= plain(*(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")))
    more = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    assert of_mlps(said(layout, whole, **more)) == []
    del whole["model.layers.0.mlp.gate_proj.weight"]
    assert of_mlps(said(layout, whole, **more)) == [("error", "model.layers.0.mlp.gate_proj.weight")]


def test_experts_without_gates_have_neighbours_without():
    layout = LAYOUTS["non-gated"]
    at = "backbone.layers.0.mixer.shared_experts"
    assert of_mlps(said(layout, {**layout.tensors(), **plain(f"{at}.up_proj", f"{at}.down_proj")})) == []


@pytest.mark.parametrize("key", ["n_shared_experts", "num_shared_experts"])
@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "ModelOpt MXFP4", "stacked", "Quark"])
def test_shared_experts_that_no_layer_has(id, key):
    layout = LAYOUTS[id]
    block = layout.prefix.removesuffix(".experts")
    shared = plain(*(f"{block}.shared_experts.{name}_proj" for name in ("gate", "up", "down")))
    assert [
        item for item in said(layout, {**layout.tensors(), **shared}, **{key: 1}).findings if "absent" in item.code
    ] == []
    report = said(layout, layout.tensors(), **{key: 1})
    [item] = [one for one in report.findings if one.code == "expert.absent"]
    assert (item.severity, item.text, item.params["key"]) == ("error", "expert.absent.shared", key)
    assert "safe" not in {one.outcome for one in report.backends}
    for language in ("en", "zh"):
        assert key in describe(item, language)[0]
    # None counted, or stored as one more routed expert.
    listed = said(layout, layout.tensors(), **{key: [1, 1]})
    assert [one.params["claimed"] for one in listed.findings if one.code == "expert.absent"] == [1]
    for count in (
        {key: 0},
        {key: None},
        {key: [1, 0]},
        {key: []},
        {key: ["1"]},
        {key: 1, "num_experts": 7, "n_routed_experts": 7},
    ):
        assert "expert.absent.shared" not in {one.text for one in said(layout, layout.tensors(), **count).findings}


QWEN, GRANITE, STEP = "shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"


@pytest.mark.parametrize(
    ("named", "key"),
    [
        ({"model_type": "qwen2_moe"}, QWEN),
        ({"architectures": ["Qwen3NextForCausalLM"]}, QWEN),
        ({"model_type": "granitemoeshared"}, GRANITE),
        ({"architectures": ["GraniteMoeHybridForCausalLM"]}, GRANITE),
        ({"model_type": "step3p5"}, STEP),
        ({"architectures": ["Step3p5ForCausalLM"]}, STEP),
        ({}, QWEN),
    ],
)
@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "ModelOpt MXFP4", "stacked"])
def test_shared_experts_of_which_only_a_width_speaks(id, named, key):
    """Without a family's name the gate that weighs it tells; a gate is no expert."""
    layout = LAYOUTS[id]
    block = layout.prefix.removesuffix(".experts")
    above = block.rpartition(".")[0]
    at = {QWEN: f"{block}.shared_expert", GRANITE: f"{above}.shared_mlp", STEP: f"{above}.share_expert"}[key]
    whole = {**layout.tensors(), f"{block}.gate.weight": tensor(np.ones((8, 64), np.float32))}
    if not named:
        whole[f"{layout.prefix.rpartition('.')[0]}.shared_expert_gate.weight"] = tensor(np.ones((1, 64), np.float32))
    told = {**named, key: 32}
    shared = plain(*(f"{at}.{name}" for name in ("gate_proj", "up_proj", "down_proj")))
    assert _absent(said(layout, {**whole, **shared}, **told)) == []
    report = said(layout, whole, **told)
    [item] = _absent(report)
    assert (item.severity, item.text, item.params["key"]) == ("error", "expert.absent.shared.width", key)
    assert "safe" not in {one.outcome for one in report.backends}
    for language in ("en", "zh"):
        words = describe(item, language)[0]
        assert key in words
        # One layer has experts.
        assert "layer 0." in words or "第 0 层没有" in words
    # None, another family that reads no such number, and experts alone.
    for other in ({key: 0}, {key: None}):
        assert _absent(said(layout, whole, **{**named, **other})) == []
    if named:
        for family in ({"model_type": "qwen3_moe"}, {"architectures": ["GraniteMoeForCausalLM"]}):
            assert _absent(said(layout, whole, **{key: 32, **family})) == []
    routers = [f"{block}.gate.weight", f"{above}.gate.weight"]
    experts = {name: item for name, item in whole.items() if name.startswith(layout.prefix) and name not in routers}
    assert _absent(said(layout, experts, **told)) == []


def _absent(report):
    return [item for item in report.findings if item.code == "expert.absent"]
