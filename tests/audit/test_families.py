"""Whole models of every family: no alarm in a sound one, one finding for one hole, whatever stands around it."""

import numpy as np
import pytest

from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import canonical, memory_checkpoint, tensor
from tests.audit.families import FAMILIES, WIDTH, config, deepseek_r1, deepseek_v4, experts, sidecar
from tests.audit.reading import codes, found

# What is worth knowing of a sound model of the family.
NOTES = {
    "DeepSeek-R1": ["draft.unquantised"], "Qwen3-Next": ["draft.unquantised"],
    "Step-3.5": ["draft.unquantised", "loader.note"], "Llama 4": ["loader.note"], "compressed-tensors": ["loader.note"],
    "Nemotron 3.5": ["scheme.weight-only"],
}  # fmt: skip


def changed(checkpoint, drop=(), replace=None):
    tensors = {name: item for name, item in checkpoint.read_tensors().items() if name not in drop}
    return memory_checkpoint(
        {**tensors, **(replace or {})}, config=checkpoint.config, hf_quant_config=checkpoint.hf_quant_config
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sound_model_raises_no_alarm(name):
    report = audit(FAMILIES[name]())
    assert codes(report) == [(code, "info") for code in NOTES.get(name, [])]
    assert len(report.model.moe_layers) == 2
    for row in report.coverage.values():
        assert row.missing == row.invalid == row.unreadable == row.filled == 0
    assert "safe" in {item.outcome for item in report.backends} <= {"safe", "unsupported"}


@pytest.mark.parametrize("name", FAMILIES)
def test_one_hole_is_one_finding(name):
    checkpoint = FAMILIES[name]()
    view = canonical(checkpoint)
    layer = view.moe_layers[-1]
    role = view.roles_in(layer)[-1]
    slot = view.slot(layer, 2, "down", role)
    report = audit(changed(checkpoint, drop=[slot.name]))
    [(code, severity, at, projection, experts)] = found(report)
    assert (code, at, projection) == ("scale.missing", layer, "down")
    assert severity == ("backend" if role == "input_scale" else "error")
    whole = view.dialects[layer].arrangement
    assert experts == {"expert": (2,), "stacked": (0, 1, 2, 3), "fused": None}[whole]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_dead_value_is_one_finding(name):
    checkpoint = FAMILIES[name]()
    view = canonical(checkpoint)
    layer = view.moe_layers[0]
    role = view.roles_in(layer)[-1]
    if role not in ("input_scale", "weight_scale_2"):
        return
    slot = view.slot(layer, 1, "down", role)
    values = np.array(checkpoint.read(slot.name), np.float32)
    dead = np.float32(np.inf if view.divisors_in(layer) else 0.0)
    if slot.index is None:
        values[...] = dead
    else:
        values[slot.index] = dead
    report = audit(changed(checkpoint, replace={slot.name: tensor(values)}))
    [(code, _, at, projection, experts)] = found(report)
    assert (code, at, projection) == ("scale.zero", layer, "down")
    assert experts == (None if view.dialects[layer].arrangement == "fused" else (1,))


@pytest.mark.parametrize("name", ["DeepSeek-R1", "Qwen3", "Qwen3-Next", "Step-3.5", "Llama 4", "MiniMax-M2"])
def test_forgetting_the_exclude_list_is_one_warning(name):
    """Attention in BF16 that nobody excluded: a server builds it quantised."""
    checkpoint = FAMILIES[name]()
    bare = {"quantization": {**checkpoint.hf_quant_config["quantization"], "exclude_modules": ["lm_head"]}}
    tensors = checkpoint.read_tensors()
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    report = audit(memory_checkpoint(tensors, config=config, hf_quant_config=bare))
    plain = [item for item in found(report) if item[0] != "config.unquantised-not-excluded"]
    assert plain == []
    # Qwen3's attention is quantised: there is nothing to warn of but the router, which no server quantises.
    assert bool(found(report)) == (name != "Qwen3")


# Two towers with experts, as in models that think and talk.


def towers(lost=(), scale=None):
    out = {**experts("thinker.model.layers.0.mlp.experts"), **experts("thinker.model.layers.1.mlp.experts")}
    out |= {**experts("talker.model.layers.0.mlp.experts")}
    out = {name: item for name, item in out.items() if name not in lost}
    return memory_checkpoint({**out, **(scale or {})}, config=config(2), hf_quant_config=sidecar("NVFP4", ["lm_head"]))


def test_the_smaller_tower_is_audited_too():
    report = audit(towers())
    assert codes(report) == [("audit.partial", "info")]
    assert report.coverage["input_scale"].expected == 24
    name = "talker.model.layers.0.mlp.experts.2.up_proj.input_scale"
    report = audit(towers(lost=[name]))
    assert found(report) == [("scale.missing", "backend", 0, "up", (2,))]
    assert next(item for item in report.findings if item.severity == "backend").tensors == (name,)
    report = audit(towers(scale={name: tensor(np.float32(np.nan))}))
    assert found(report) == [("scale.nan", "backend", 0, "up", (2,))]
    main = "thinker.model.layers.0.mlp.experts.2.up_proj.input_scale"
    assert found(audit(towers(lost=[main]))) == [("scale.missing", "backend", 0, "up", (2,))]


@pytest.mark.parametrize("name", ["layers.1.attn.wkv", "layers.0.ffn.shared_experts.w2"])
def test_an_fp8_module_without_the_scale_that_its_namesakes_have(name):
    checkpoint = deepseek_v4()
    report = audit(changed(checkpoint, drop=[f"{name}.scale"]))
    assert found(report) == [("scale.missing", "error", int(name.split(".")[1]), None, None)]
    assert report.findings[0].tensors == (f"{name}.scale",)
    assert "safe" not in {item.outcome for item in report.backends}
    # Every server builds it by the configuration's blocks, in whatever layers it is.
    parts = name.split(".")
    every = [f"{at}.{'.'.join(parts[2:])}.scale" for at in ("layers.0", "layers.1", "mtp.0")]
    assert found(audit(changed(checkpoint, drop=every))) == [("scale.missing", "error", None, None, None)]
    [row] = found(audit(changed(checkpoint, drop=every[-1:])))
    assert row[:2] == ("scale.missing", "error")


def _without(checkpoint, *modules):
    names = [name for name in checkpoint.tensors if name.startswith(tuple(f"{module}." for module in modules))]
    assert names
    return audit(changed(checkpoint, drop=names))


@pytest.mark.parametrize(
    ("build", "module", "layer"),
    [
        (deepseek_r1, "model.layers.0.mlp.down_proj", 0), (deepseek_r1, "model.layers.0.mlp.up_proj", 0),
        (deepseek_r1, "model.layers.1.mlp.shared_experts.gate_proj", 1),
        (deepseek_v4, "layers.0.ffn.shared_experts.w2", 0),
        (FAMILIES["Nemotron 3 Super"], "backbone.layers.4.mixer.shared_experts.down_proj", 4),
        (FAMILIES["Gemma 4"], "model.language_model.layers.0.mlp.up_proj", 0),
    ],
)  # fmt: skip
def test_an_mlp_without_one_of_its_projections(build, module, layer):
    """Shared experts and dense layers are no routed experts, and a server needs them all the same."""
    report = _without(build(), module)
    assert found(report) == [("scale.missing", "error", layer, None, None)]
    assert (report.findings[0].role, report.findings[0].tensors) == ("weight", (f"{module}.weight",))
    assert "safe" not in {item.outcome for item in report.backends}


def test_a_layer_without_its_shared_expert():
    parent = "model.layers.1.mlp.shared_experts"
    # Of two layers each may be the odd one, unless the configuration speaks of shared experts.
    assert not [item for item in found(_without(deepseek_r1(), parent)) if item[0] == "scale.missing"]
    checkpoint = deepseek_r1()
    checkpoint.config.update(n_shared_experts=1, moe_intermediate_size=WIDTH)
    assert not found(audit(checkpoint))
    report = _without(checkpoint, parent)
    assert found(report) == [("scale.missing", "error", 1, None, None)]
    assert sorted(report.findings[0].tensors) == [f"{parent}.{kind}_proj.weight" for kind in ("down", "gate", "up")]


def test_a_dead_input_scale_of_a_shared_expert_is_not_every_backend_s():
    checkpoint = deepseek_r1()
    name = "model.layers.1.mlp.shared_experts.up_proj.input_scale"
    report = audit(changed(checkpoint, replace={name: tensor(np.float32(np.nan))}))
    assert found(report) == [("scale.nan", "backend", 1, None, None)]
    assert "marlin" in report.findings[0].advice


def test_quark_s_global_section_means_attention_too():
    checkpoint = FAMILIES["Quark"]()
    section = checkpoint.config["quantization_config"]
    for exclude, alarms in ((section["exclude"], 0), (["lm_head", "re:.*mlp.gate"], 1), (None, 1)):
        quant = {**checkpoint.config, "quantization_config": {**section, "exclude": exclude}}
        expected = [("config.unquantised-not-excluded", "warn", None, None, None)] if alarms else []
        report = audit(memory_checkpoint(checkpoint.read_tensors(), config=quant))
        assert found(report) == expected
        assert all(".self_attn." in name for item in report.findings for name in item.tensors)


@pytest.mark.parametrize("apart", [False, True])
def test_quark_s_promise_of_stored_input_scales(apart):
    checkpoint = FAMILIES["Quark"]()
    section = checkpoint.config["quantization_config"]
    tensors = checkpoint.read_tensors()
    scales = {
        name.replace(".weight_scale", ".input_scale"): tensor(np.float32(0.02))
        for name in tensors if name.endswith(".weight_scale")
    }  # fmt: skip
    for dynamic, stored, alarms in ((True, False, 0), (False, False, 1), (False, True, 0)):
        entry = {**section["global_quant_config"], "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": dynamic}}
        new = {"layer_quant_config": {"*mlp.experts*": entry}} if apart else {"global_quant_config": entry}
        quant = {**checkpoint.config, "quantization_config": {**section, **new}}
        report = audit(memory_checkpoint({**tensors, **(scales if stored else {})}, config=quant))
        assert found(report) == [("config.conflict", "warn", None, None, None)] * alarms
        assert all("is_dynamic" in item.message for item in report.findings)


def test_an_empty_sidecar_names_no_algorithm():
    for sidecar_ in ({}, {"quantization": {}}):
        report = audit(
            memory_checkpoint(FAMILIES["Qwen3"]().read_tensors(), config=config(2), hf_quant_config=sidecar_)
        )
        assert ("config.incomplete", "backend") in codes(report)
