"""A router, or a projection of attention, that one layer lacks and its sisters have."""

import pytest

from nvfp4viz.audit import audit
from nvfp4viz.audit.routers import router_names
from nvfp4viz.checkpoint import canonical, memory_checkpoint
from tests.audit.families import FAMILIES, H, bf16, config, experts, plain, sidecar
from tests.audit.reading import found, outcomes
from tests.audit.test_families import changed

LOST = [("scale.missing", "error")]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def said(report):
    return [(code, severity) for code, severity, *_ in found(report)]


def routers_of(checkpoint):
    view = canonical(checkpoint)
    names = {at: [one for one in router_names(view.blocks[at]) if one in checkpoint.tensors] for at in view.moe_layers}
    return {at: one[0] for at, one in names.items() if one}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_without_its_router(family):
    checkpoint = FAMILIES[family]()
    routers = routers_of(checkpoint)
    assert len(routers) == 2
    for layer, name in routers.items():
        report = audit(changed(checkpoint, drop=[name]))
        assert said(report) == LOST
        [item] = [one for one in report.findings if one.severity == "error"]
        assert (item.role, item.layer, item.tensors, item.count) == ("weight", layer, (name,), 1)
        stopped = outcomes(report)
        assert stopped["tensorrt-llm"] in ("load-error", "unsupported")
        assert "safe" not in stopped.values()
    assert said(audit(changed(checkpoint, drop=routers.values()))) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_without_a_projection_of_its_attention(family):
    checkpoint = FAMILIES[family]()
    view = canonical(checkpoint)
    last = view.moe_layers[-1]
    names = [name for name in checkpoint.tensors if f".{last}." in name and name.endswith(".weight")]
    for part in ("v_proj", "q_proj", "kv_b_proj", "wq_a"):
        hit = [name for name in names if f"attn.{part}." in name]
        if not hit or family == "Nemotron 3 Super":
            continue
        [name] = hit
        module = name.removesuffix(".weight")
        report = audit(changed(checkpoint, drop=[one for one in checkpoint.tensors if one.startswith(f"{module}.")]))
        [item] = [one for one in report.findings if one.severity == "error"]
        assert (item.code, item.role, item.layer, item.tensors) == ("scale.missing", "weight", last, (name,))
        assert "safe" not in outcomes(report).values()


def model(*layers, **more):
    """Layers with experts, a router, and the attention that each is given."""
    out = plain("model.embed_tokens", "lm_head")
    for k, parts in enumerate(layers):
        at = f"model.layers.{k}"
        out |= {**experts(f"{at}.mlp.experts"), f"{at}.mlp.gate.weight": bf16(4, H)}
        out |= plain(*(f"{at}.self_attn.{part}" for part in parts))
    quant = sidecar("NVFP4", ["lm_head", "*mlp.gate", "*self_attn*"])
    return memory_checkpoint(out, config=config(len(layers), **more), hf_quant_config=quant)


def test_one_layer_of_many():
    whole, hole = ATTENTION, ("q_proj", "k_proj", "o_proj")
    assert said(audit(model(whole, whole, whole, whole))) == []
    for at in range(4):
        report = audit(model(*[hole if k == at else whole for k in range(4)]))
        assert said(report) == LOST
        assert report.findings[0].tensors == (f"model.layers.{at}.self_attn.v_proj.weight",)


@pytest.mark.parametrize(
    "layers",
    [
        # Every other layer takes its values from its keys.
        [ATTENTION, ("q_proj", "k_proj", "o_proj")] * 2,
        [ATTENTION] * 5 + [("q_proj", "k_proj", "o_proj")] * 2,
        # The first layer has no low rank, or a fused projection.
        [("q_proj", "kv_b_proj", "o_proj"), *[("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")] * 3],
        [("qkv_proj", "o_proj"), *[ATTENTION] * 3],
        # One layer has more.
        [(*ATTENTION, "kv_b_proj"), *[ATTENTION] * 3],
        # Attention in some layers only.
        [(), ATTENTION, (), ATTENTION],
        # Gates and indexers are nobody's.
        [(*ATTENTION, "g_proj"), (*ATTENTION, "g_proj"), ATTENTION, (*ATTENTION, "g_proj")],
    ],
)
def test_layers_that_differ_on_purpose(layers):
    assert said(audit(model(*layers))) == []


@pytest.mark.parametrize("key", ["attention_k_eq_v", "num_kv_shared_layers", "block_configs"])
def test_a_configuration_that_says_that_layers_share(key):
    value = [{}] * 4 if key == "block_configs" else 1
    assert said(audit(model(ATTENTION, ATTENTION, ATTENTION, ("q_proj", "o_proj"), **{key: value}))) == []


def test_a_name_that_is_longer_is_there():
    checkpoint = model(ATTENTION, ATTENTION, ATTENTION)
    for name in ("model.layers.1.mlp.gate.weight", "model.layers.1.self_attn.v_proj.weight"):
        renamed = {f"{name}_scale_of_a_later_version": bf16(4, H)}
        assert said(audit(changed(checkpoint, drop=[name], replace=renamed))) == []


def test_more_layers_without_a_router_than_with_one_prove_nothing():
    checkpoint = model(ATTENTION, ATTENTION, ATTENTION)
    names = [f"model.layers.{k}.mlp.gate.weight" for k in range(3)]
    assert said(audit(changed(checkpoint, drop=names[:2]))) == []
    assert said(audit(changed(checkpoint, drop=names[:1]))) == LOST


def test_a_layer_of_experts_alone_is_a_piece():
    checkpoint = model(ATTENTION, ATTENTION)
    mine = [name for name in checkpoint.tensors if ".layers.1." in name and ".experts." not in name]
    assert said(audit(changed(checkpoint, drop=mine))) == []
    assert said(audit(changed(checkpoint, drop=[name for name in mine if name.endswith(".mlp.gate.weight")]))) == LOST


def normed(checkpoint):
    """The same with the norms that every layer has."""
    layers = {name.split(".")[2] for name in checkpoint.tensors if name.startswith("model.layers.")}
    norms = {f"model.layers.{k}.{name}": bf16(H) for k in layers for name in NORMS}
    tensors = {**checkpoint.read_tensors(), **norms}
    return memory_checkpoint(tensors, config=checkpoint.config, hf_quant_config=checkpoint.hf_quant_config)


NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_layer_that_has_lost_its_whole_attention(lost):
    """One of four that is gone is found by the other three; all four are found by the other layers."""
    whole = normed(model(ATTENTION, ATTENTION, ATTENTION))
    assert said(audit(whole)) == []
    start = f"model.layers.{lost}.self_attn."
    report = audit(changed(whole, drop=[name for name in whole.tensors if name.startswith(start)]))
    assert said(report) == LOST
    [item] = [one for one in report.findings if one.severity == "error"]
    assert (item.role, item.layer, item.count) == ("weight", lost, 4)
    assert "safe" not in outcomes(report).values()


def test_layers_of_another_mixer_have_not_lost_attention():
    """Recurrent layers, a layer without either by design (Puzzle's), and a piece of a file."""
    recurrent = normed(model(ATTENTION, ATTENTION, ()))
    tensors = recurrent.read_tensors() | plain("model.layers.2.linear_attn.in_proj")
    assert (
        said(audit(memory_checkpoint(tensors, config=recurrent.config, hf_quant_config=recurrent.hf_quant_config)))
        == []
    )
    searched = normed(model(ATTENTION, ATTENTION, (), block_configs=[{}, {}, {"attention": {"no_op": True}}]))
    assert said(audit(searched)) == []
    # Two layers without: a pattern.
    assert said(audit(normed(model(ATTENTION, (), ATTENTION, ())))) == []
    assert said(audit(model(ATTENTION, ATTENTION, ()))) == []
