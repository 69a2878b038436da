"""A bias that one layer lacks and all others have."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.biases import bias_findings
from nvfp4viz.checkpoint import canonical, memory_checkpoint, tensor
from tests.audit.families import FAMILIES, H, bf16, config, experts, plain, sidecar
from tests.audit.layouts import LAYOUTS, linear
from tests.audit.reading import found, outcomes
from tests.audit.test_families import changed

LAYERS = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LOST = [("scale.missing", "error", 2, None, None)]


def gpt_oss(layers=LAYERS):
    layout = LAYOUTS["gpt-oss"]
    out = plain("model.embed_tokens", "lm_head")
    for name, item in layout.tensors().items():
        for layer in range(layers if ".layers.0." in name else 1):
            out[name.replace(".layers.0.", f".layers.{layer}.")] = item
    for at in (f"model.layers.{layer}" for layer in range(layers)):
        out |= {f"{at}.mlp.experts.{part}_bias": bf16(8, H) for part in ("gate_up_proj", "down_proj")}
        out |= {f"{at}.mlp.router.weight": bf16(8, H), f"{at}.mlp.router.bias": bf16(8)}
        for part in ATTENTION:
            out |= {f"{at}.self_attn.{part}.weight": bf16(H, H), f"{at}.self_attn.{part}.bias": bf16(H)}
    return lambda **replaced: layout.open({**out, **replaced}, config={**layout.config, "num_hidden_layers": layers})


def qwen2(*layers, **more):
    """Layers with experts and a router whose attention has biases on these projections."""
    out = plain("model.embed_tokens", "lm_head")
    for k, parts in enumerate(layers):
        at = f"model.layers.{k}"
        out |= {**experts(f"{at}.mlp.experts"), f"{at}.mlp.gate.weight": bf16(4, H)}
        out |= plain(*(f"{at}.self_attn.{part}" for part in ATTENTION))
        out |= {f"{at}.self_attn.{part}.bias": bf16(H) for part in parts}
    quant = sidecar("NVFP4", ["lm_head", "*mlp.gate", "*self_attn*"])
    return memory_checkpoint(out, config=config(len(layers), **more), hf_quant_config=quant)


@pytest.mark.parametrize(
    "name",
    [
        *(f"mlp.experts.{part}_bias" for part in ("gate_up_proj", "down_proj")), "mlp.router.bias",
        *(f"self_attn.{part}.bias" for part in ATTENTION),
    ],
)  # fmt: skip
def test_every_bias_of_gpt_oss(name):
    sound, name = audit(gpt_oss()()), f"model.layers.2.{name}"
    report = audit(changed(gpt_oss()(), drop=[name]))
    assert found(sound) == []
    assert found(report) == LOST
    [item] = [one for one in report.findings if one.severity == "error"]
    assert (item.text, item.role, item.tensors, item.count) == ("scale.missing.bias", "bias", (name,), 1)
    before = outcomes(sound)
    for one in report.backends:
        if before[one.name] == "safe":
            assert one.outcome == ("load-error" if one.name == "tensorrt-llm" else "undefined")
            assert "safe" not in one.possible
            assert one.layers == (2,)
            for language in ("en", "zh"):
                assert name in describe(one, language)[0]
        else:
            assert one.outcome == before[one.name]


def test_all_of_a_layer_are_one_finding():
    qkv = ATTENTION[:3]
    assert found(audit(qwen2(qkv, qkv, qkv))) == []
    report = audit(qwen2(qkv, qkv, (), qkv))
    assert found(report) == LOST
    assert report.findings[0].count == 3


@pytest.mark.parametrize(
    "layers",
    [
        # Of two layers neither is the odd one, and half of them are a choice.
        [("q_proj",), ()],
        [("q_proj",), (), ("q_proj",), ()],
        # One layer alone has one.
        [(), (), ("q_proj",), ()],
        [(), (), (), ()],
    ],
)
def test_layers_that_differ_on_purpose(layers):
    assert found(audit(qwen2(*layers))) == []


def test_what_explains_it():
    qkv = ATTENTION[:3]
    short = qwen2(qkv, qkv, (), qkv, block_configs=[{}] * 4)
    assert found(audit(short)) == []
    # Of a projection that is gone too that is what is told.
    whole = qwen2(qkv, qkv, qkv, qkv)
    gone = [name for name in whole.tensors if "layers.2.self_attn.v_proj" in name]
    report = audit(changed(whole, drop=gone))
    assert [item.role for item in report.findings if item.severity == "error"] == ["weight"]
    # A draft layer is a layer of its own kind.
    draft = {f"model.layers.4.self_attn.{part}.weight": bf16(H, H) for part in ATTENTION}
    report = audit(changed(whole, replace=draft))
    assert "bias" not in [item.role for item in report.findings]


def test_a_router_of_another_kind_has_none():
    """DeepSeek V4's first layers look experts up in a table."""
    whole = gpt_oss()()
    name = "model.layers.0.mlp.router.bias"
    table = {"model.layers.0.mlp.router.tid2eid": tensor(np.zeros((16, 2), np.int64))}
    assert found(audit(changed(whole, drop=[name]))) == [("scale.missing", "error", 0, None, None)]
    assert found(audit(changed(whole, drop=[name], replace=table))) == []


def test_a_sequence_numbers_no_layers():
    """``projector.0`` and ``projector.2`` are steps of one module."""
    parts = {f"projector.{at}.weight": bf16(H, H) for at in range(3)}
    parts |= {f"projector.{at}.bias": bf16(H) for at in (0, 2)}
    assert found(audit(changed(qwen2(("q_proj",), ("q_proj",), ("q_proj",)), replace=parts))) == []


def test_a_piece_of_a_model_may_be_cut_anywhere():
    layers = {}
    for at in range(4):
        layers[f"model.layers.{at}.self_attn.q_proj.weight"] = bf16(H, H)
        layers[f"model.layers.{at}.self_attn.q_proj.bias"] = bf16(H)
    for lost, expected in ((0, 0), (1, 1), (3, 0)):
        left = {name: item for name, item in layers.items() if name != f"model.layers.{lost}.self_attn.q_proj.bias"}
        checkpoint = memory_checkpoint(left)
        assert len(list(bias_findings(checkpoint, canonical(checkpoint)))) == expected


SHORT = [("weight.shape", "error", 2, None, None)]


@pytest.mark.parametrize("shape", [(8, H // 2), (7, H), (8, 2 * H), (8,)])
@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_a_bias_of_experts_of_another_shape(part, shape):
    """Loaders cut it for each rank, and some copy as much as there is."""
    name = f"model.layers.2.mlp.experts.{part}_bias"
    report = audit(gpt_oss()(**{name: bf16(*shape)}))
    assert found(report) == SHORT
    [item] = [item for item in report.findings if item.severity == "error"]
    assert (item.role, item.tensors) == ("bias", (name,))
    for language in ("en", "zh"):
        assert name in describe(item, language)[0]
    twin = {one.name: one.outcome for one in audit(gpt_oss()()).backends}
    for one in report.backends:
        if twin[one.name] == "safe":
            assert (one.outcome, one.possible) == ("load-error", ("degraded", "load-error")), one.name


@pytest.mark.parametrize("part", ["self_attn.q_proj", "mlp.router"])
def test_a_bias_of_an_ordinary_module_of_another_shape(part):
    name = f"model.layers.2.{part}.bias"
    report = audit(gpt_oss()(**{name: bf16(12)}))
    assert found(report) == SHORT
    assert set(outcomes(report).values()) <= {"load-error", "unsupported"}


def test_a_bias_has_the_length_of_a_row_of_packed_codes_nowhere():
    """Two values a byte: the axis of bytes is no axis of the matrix."""
    at = "model.layers.2.self_attn.q_proj"
    for length, expected in ((H, []), (H // 2, SHORT)):
        checkpoint = gpt_oss()(**{f"{at}.bias": bf16(length)}, **linear(at))
        shapes = [item for item in audit(checkpoint).findings if item.code == "weight.shape"]
        assert [(item.code, item.severity, item.layer, None, None) for item in shapes] == expected


def test_biases_of_other_forms_are_left_alone():
    """Turned matrices (Paddle), a convolution, a norm, a vector whose weight nobody stores."""
    more = {
        "model.layers.1.self_attn.q_proj.weight": bf16(H // 4, H), "model.layers.1.self_attn.q_proj.bias": bf16(H),
        "model.layers.1.conv1d.weight": bf16(H, 1, 4), "model.layers.1.conv1d.bias": bf16(H),
        "model.layers.1.norm.weight": bf16(H), "model.layers.1.norm.bias": bf16(1, H),
        "model.layers.1.mixer.dt_bias": bf16(3), "model.layers.1.other.bias": bf16(3),
    }  # fmt: skip
    checkpoint = changed(gpt_oss()(), replace=more)
    assert [item.code for item in audit(checkpoint).findings if item.code == "weight.shape"] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_what_they_have(family):
    checkpoint = FAMILIES[family]()
    assert list(bias_findings(checkpoint, canonical(checkpoint))) == []
