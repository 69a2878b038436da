"""A router, or a projection of attention, that one layer lacks and its sisters have."""

import re

import pytest

from nvfp4viz.audit import audit, describe
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
    quant = sidecar("NVFP4", ["lm_head", "*mlp.gate", "*self_attn*", "*linear_attn*", "*mamba*"])
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


@pytest.mark.parametrize("key", ["attention_k_eq_v", "num_kv_shared_layers", "use_cla", "block_configs"])
def test_a_configuration_that_says_that_layers_share(key):
    """What it does not explain is missed: nobody shares the query, and values from keys need the keys."""
    value = [{}] * 4 if key == "block_configs" else 1
    shorter = ("q_proj", "k_proj", "o_proj") if key == "attention_k_eq_v" else ("q_proj", "o_proj")
    assert said(audit(model(ATTENTION, ATTENTION, ATTENTION, shorter, **{key: value}))) == []
    for part in shorter if key != "block_configs" else ():
        left = tuple(name for name in shorter if name != part)
        report = audit(model(ATTENTION, shorter, ATTENTION, left, **{key: value}))
        assert said(report) == LOST
        assert report.findings[0].tensors == (f"model.layers.3.self_attn.{part}.weight",)
    # A key that is there and says nothing explains nothing.
    if key == "num_kv_shared_layers":
        assert said(audit(model(ATTENTION, ATTENTION, ATTENTION, ("q_proj", "k_proj", "o_proj"), **{key: 0}))) == LOST


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
    found = (
        re.match(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.\d+\.", name) for name in checkpoint.tensors
    )
    norms = {f"{at}{name}": bf16(H) for at in {one[0] for one in found if one} for name in NORMS}
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


@pytest.mark.parametrize("family", [name for name in FAMILIES if "Nemotron" not in name])
def test_a_layer_of_each_family_that_has_nothing_left_to_mix_its_tokens(family):
    """Whatever alternates there, and whatever layers share; a draft layer is nobody's sister."""
    checkpoint = normed(FAMILIES[family]())
    assert said(audit(checkpoint)) == []
    view = canonical(checkpoint)
    for layer in view.moe_layers:
        start = view.blocks[layer].partition(f".{layer}.")[0] + f".{layer}."
        parts = tuple(f"{start}{part}." for part in ("self_attn", "linear_attn", "attn"))
        gone = [name for name in checkpoint.tensors if name.startswith(parts)]
        assert gone
        report = audit(changed(checkpoint, drop=gone))
        assert said(report) == LOST
        [item] = [one for one in report.findings if one.severity == "error"]
        assert (item.role, item.layer) == ("weight", layer)
        # Only what was there: never another kind's.
        assert {name for name in item.tensors if name not in gone} == set()
        assert "safe" not in outcomes(report).values()


KINDS = {"self_attn": ATTENTION, "linear_attn": ("in_proj_qkvz", "in_proj_ba", "out_proj"), "conv": ("in_proj",)}


def hybrid(pattern, lost=None, **more):
    """Layers of these mixers in turn, with norms and experts; one of them without its mixer."""
    whole = model(*[()] * len(pattern), **more)
    tensors = dict(normed(whole).read_tensors())
    for k, kind in enumerate(pattern):
        if k != lost:
            tensors |= plain(*(f"model.layers.{k}.{kind}.{name}" for name in KINDS[kind]))
    return memory_checkpoint(tensors, config=whole.config, hf_quant_config=whole.hf_quant_config)


LINEAR, FULL = "linear_attn", "self_attn"


@pytest.mark.parametrize("lost", [1, 3, 7])
@pytest.mark.parametrize(
    "told",
    [
        {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2},
        {"full_attention_interval": 4},
        {"attn_layer_period": 4, "attn_layer_offset": 3},
        {"text_config": {"layers_block_type": ["linear", "linear", "linear", "attention"] * 2}},
    ],
)
def test_the_configuration_tells_the_kind_of_a_layer(told, lost):
    pattern = [LINEAR, LINEAR, LINEAR, FULL] * 2
    assert said(audit(hybrid(pattern, **told))) == []
    [item] = [one for one in audit(hybrid(pattern, lost, **told)).findings if one.severity == "error"]
    kind = pattern[lost]
    assert set(item.tensors) <= {f"model.layers.{lost}.{kind}.{name}.weight" for name in KINDS[kind]}
    assert (item.text, item.layer, item.count) == ("scale.missing.linear.weight", lost, len(KINDS[kind]))


@pytest.mark.parametrize("told", [{}, {"layer_types": ["a", "a", "a", "b"]}])
def test_where_nothing_tells_the_kind_the_layer_is_named(told):
    """Four layers of three kinds, or the only one of its kind."""
    pattern = [LINEAR, FULL, LINEAR, FULL if not told else "conv"]
    assert said(audit(hybrid(pattern, **told))) == []
    report = audit(hybrid(pattern, 3, **told))
    assert said(report) == LOST
    [item] = [one for one in report.findings if one.severity == "error"]
    assert (item.text, item.layer, item.tensors) == ("scale.missing.mixer", 3, ("model.layers.3",))
    for language in ("en", "zh"):
        message = describe(item, language)[0]
        assert LINEAR in message
        assert FULL in message
    assert "safe" not in outcomes(report).values()


def test_layers_without_a_mixer_on_purpose():
    """Several of them, searched layers, a piece with one norm or none, a mixer of a name of its own."""
    whole = hybrid([LINEAR, FULL, LINEAR, FULL], 3)
    assert said(audit(whole)) == LOST
    assert said(audit(changed(whole, drop=[name for name in whole.tensors if ".layers.1.self_attn" in name]))) == []
    assert said(audit(hybrid([LINEAR, FULL, LINEAR, FULL], 3, block_configs=[{}] * 4))) == []
    for norms in (NORMS[:1], NORMS):
        assert said(audit(changed(whole, drop=[f"model.layers.3.{name}" for name in norms]))) == []
    for other in ("linear_attn.in_proj.qweight", "mamba.A_packed", "self_attn.q_proj.qweight"):
        assert said(audit(changed(whole, replace={f"model.layers.3.{other}": bf16(H, H)}))) == []
    # Norms inside, and what is no matrix, mix nothing.
    for other in ("self_attn.q_norm.weight", "linear_attn.A_log"):
        assert said(audit(changed(whole, replace={f"model.layers.3.{other}": bf16(H)}))) == LOST
