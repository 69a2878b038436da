"""Routers of another shape than their experts ask for."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import file_bytes, memory_checkpoint
from tests.audit.families import FAMILIES, E, H, bf16, config, experts, f32, nvfp4, plain, sidecar
from tests.audit.layouts import fp8, typed
from tests.audit.reading import codes, found, outcomes
from tests.audit.test_families import changed
from tests.audit.test_sisters import routers_of

ODD = [("weight.shape", "error")]
SHAPES = {"half the rows": (E // 2, H), "more rows": (2 * E, H), "narrow": (E, H // 2), "turned": (H, E)}


def said(report):
    return [(code, severity) for code, severity, *_ in found(report)]


def texts(report):
    return [item.text for item in report.findings if item.code == "weight.shape"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_of_one_layer(family, shape):
    checkpoint = FAMILIES[family]()
    for layer, name in routers_of(checkpoint).items():
        report = audit(changed(checkpoint, replace={name: bf16(*SHAPES[shape])}))
        assert said(report) == ODD
        [item] = [one for one in report.findings if one.severity == "error"]
        assert (item.role, item.layer, item.tensors, item.count) == ("weight", layer, (name,), 1)
        assert str(list(SHAPES[shape])) in item.message
        assert f"[{E}, {H}]" in item.message
        assert set(outcomes(report).values()) <= {"load-error", "unsupported"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("shape", "severity", "text"),
    [("half the rows", "error", ""), ("more rows", "info", ".more"), ("narrow", "error", ""),
     ("turned", "info", ".turned")],
)  # fmt: skip
def test_the_same_in_all_layers(family, shape, severity, text):
    """Rows for experts without weights, and matrices stored the other way round, may be a family's own."""
    checkpoint = FAMILIES[family]()
    # A draft's is one of them.
    names = [name for name in checkpoint.tensors if name.startswith("mtp.") and name.endswith("ffn.gate.weight")]
    names += [*routers_of(checkpoint).values()]
    if family == "DeepSeek-R1":
        names.append("model.layers.3.mlp.gate.weight")
    report = audit(changed(checkpoint, replace=dict.fromkeys(names, bf16(*SHAPES[shape]))))
    assert texts(report) == [f"weight.shape.router{text}"]
    [item] = [one for one in report.findings if one.code == "weight.shape"]
    assert (item.severity, item.count) == (severity, len(names))
    for language in ("en", "zh"):
        assert "{" not in "".join(describe(item, language))


def model(router, layers=2, *, quant=None, gate="mlp.gate.weight", **more):
    """Layers with experts and a router each, under any name, of any shape and type."""
    out = plain("model.embed_tokens", "lm_head")
    for k in range(layers):
        at = f"model.layers.{k}"
        out |= {**experts(f"{at}.mlp.experts"), f"{at}.{gate}": router(k) if callable(router) else router}
        out[f"{at}.input_layernorm.weight"] = bf16(H)
    said = sidecar("NVFP4", ["lm_head", "*mlp.gate", "*gate.wg", "*router*", *(quant or ())])
    return memory_checkpoint(
        out, config=None if more.pop("bare", False) else config(layers, **more), hf_quant_config=said
    )


@pytest.mark.parametrize(
    "gate", ["mlp.gate.weight", "mlp.gate.wg.weight", "mlp.router.weight", "mlp.router.classifier.weight",
             "mlp.router.layer.weight", "mlp.router.gate.weight", "router.proj.weight"],
)  # fmt: skip
def test_a_router_under_any_of_its_names(gate):
    assert said(audit(model(bf16(E, H), gate=gate))) == []
    assert said(audit(model(lambda k: bf16(E - 1 + k, H), gate=gate))) == ODD


def test_experts_without_weights_have_rows_too():
    """LongCat-Flash: `zero_expert_num` of them."""
    assert codes(audit(model(bf16(E + 2, H), zero_expert_num=2))) == []
    report = audit(model(lambda k: bf16(E + 2 * k, H), zero_expert_num=2))
    assert said(report) == ODD
    assert report.findings[0].params["expected"] == [E + 2, H]
    # Nothing else tells of them.
    assert codes(audit(model(bf16(E + 2, H)))) == [("weight.shape", "info")]
    assert said(audit(model(bf16(E + 2, H), layers=1))) == ODD


def test_a_list_of_experts_by_modality():
    """ERNIE 4.5 VL stores a turned matrix for text and one for images."""
    for stored in (bf16(H, E // 2), bf16(E // 2, H), bf16(H, E), bf16(E, H)):
        assert codes(audit(model(stored, num_experts=None, moe_num_experts=[E // 2, E // 2]))) == []
    report = audit(model(lambda k: bf16(H, E // 2 + k), num_experts=None, moe_num_experts=[E // 2, E // 2]))
    assert said(report) == ODD


def test_a_number_of_experts_by_layer():
    report = audit(model(lambda k: bf16(E, H), num_experts=[E, E]))
    assert said(report) == []
    assert said(audit(model(lambda k: bf16(E - k, H), num_experts=[E, E]))) == ODD


def test_padded_experts_that_no_token_is_sent_to():
    for layers in (1, 2):
        padded = audit(model(bf16(E - 1, H), layers, num_experts=E - 1))
        assert said(padded) == [("config.conflict", "backend")]
        # Nobody says how many there are.
        silent = audit(model(bf16(E - 1, H), layers, bare=True))
        assert texts(silent) == ["weight.shape.router.fewer"]
        assert "error" not in {item.severity for item in silent.findings}
    assert ("weight.shape", "error") in said(audit(model(lambda k: bf16(E - k, H), bare=True)))


def test_where_configuration_and_experts_differ_each_is_good_enough():
    for rows in (E, E + 1):
        assert said(audit(model(bf16(rows, H), num_experts=E + 1))) == [("expert.absent", "error")] * 2
    assert said(audit(model(bf16(E, H), hidden_size=2 * H))) == [("config.conflict", "error")]
    assert said(audit(model(bf16(E, 2 * H), hidden_size=2 * H))) == [("config.conflict", "error")]


def test_a_router_beside_experts_in_a_narrower_space():
    """Nemotron 3 Super: the router reads the model's vector, the experts a latent one."""
    for more in ({}, {"hidden_size": None}):
        wide = {"moe_latent_size": H, "hidden_size": 4 * H, **more}
        assert said(audit(model(bf16(E, 4 * H), **wide))) == []
        assert said(audit(model(lambda k: bf16(E, 4 * H if k < 2 else 3 * H), 3, **wide))) == ODD
    assert said(audit(model(bf16(E, 4 * H)))) == ODD


@pytest.mark.parametrize(
    "store",
    [
        lambda at, rows: {f"{at}.weight": f32(rows, H)},
        lambda at, rows: {**fp8(at), f"{at}.weight": typed(np.full((rows, H), 0x38, np.uint8), "F8_E4M3")},
        lambda at, rows: nvfp4(at, rows, H, 1),
    ],
    ids=["F32", "FP8", "NVFP4"],
)
def test_a_router_in_another_format(store):
    for rows, expected in (((E, E), []), ((E, 2 * E), [("weight.shape", "error", 1, None, None)])):
        checkpoint = model(bf16(E, H))
        new = {}
        for k in range(2):
            new |= store(f"model.layers.{k}.mlp.gate", rows[k])
        report = audit(changed(checkpoint, replace=new))
        assert [item for item in found(report) if item[0] == "weight.shape"] == expected


def test_what_is_no_matrix():
    """One kind of router more, where all layers have it; a layer's alone is wrong."""
    cube = bf16(2, E, H)
    assert codes(audit(model(cube))) == []
    assert said(audit(model(lambda k: cube if k else bf16(E, H)))) == ODD
    for odd in (bf16(E * H), bf16()):
        assert said(audit(model(lambda k, odd=odd: odd if k else bf16(E, H)))) == ODD


def test_a_draft_layers_router():
    checkpoint = FAMILIES["DeepSeek-V4"]()
    [name] = [one for one in checkpoint.tensors if one == "mtp.0.ffn.gate.weight"]
    report = audit(changed(checkpoint, replace={name: bf16(E // 2, H)}))
    assert said(report) == ODD
    assert report.findings[0].draft


def test_routers_without_experts_are_nobodys():
    tensors = {name: item for name, item in model(bf16(2, 2)).read_tensors().items() if ".experts." not in name}
    assert texts(audit(memory_checkpoint(tensors, config=config(2), hf_quant_config=None))) == []


def test_beside_experts_in_fp8():
    """Their scales are another check's; what they are many and wide is seen all the same."""
    tensors = {name: item for name, item in model(bf16(E, H)).read_tensors().items() if ".experts." not in name}
    for k in range(2):
        for e in range(E):
            for part in ("gate_proj", "up_proj", "down_proj"):
                tensors |= fp8(f"model.layers.{k}.mlp.experts.{e}.{part}", "weight_scale_inv")
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    said_so = {**config(2, moe_intermediate_size=H), "quantization_config": section}
    whole = audit(memory_checkpoint(tensors, config=said_so))
    assert "audit.partial" in {item.code for item in whole.findings}
    assert said(whole) == []
    name = "model.layers.1.mlp.gate.weight"
    for rows, columns in SHAPES.values():
        assert said(audit(memory_checkpoint({**tensors, name: bf16(rows, columns)}, config=said_so))) == ODD


def test_another_towers_routers():
    """Its layers are numbered from zero again, and its sizes are its own."""
    tensors = model(bf16(E, H)).read_tensors()
    for k in range(2):
        at = f"talker.model.layers.{k}.mlp"
        tensors |= {**experts(f"{at}.experts"), f"{at}.gate.weight": bf16(E, H)}
    quant = sidecar("NVFP4", ["lm_head", "*mlp.gate"])
    assert said(audit(memory_checkpoint(tensors, config=config(2), hf_quant_config=quant))) == []
    odd = {**tensors, "talker.model.layers.1.mlp.gate.weight": bf16(E // 2, H)}
    report = audit(memory_checkpoint(odd, config=config(2), hf_quant_config=quant))
    assert said(report) == ODD
    assert report.findings[0].tower


def test_a_shard_alone_may_hold_a_part_of_the_experts(tmp_path):
    tensors = model(bf16(E, H)).read_tensors()
    part = {name: item for name, item in tensors.items() if not any(f".experts.{e}." in name for e in (2, 3))}
    alone = tmp_path / "model-00001-of-00002.safetensors"
    alone.write_bytes(file_bytes(part))
    assert texts(audit(alone)) == []
    assert texts(audit(tmp_path)) == []
