"""Layers whose experts, or whose whole MLP, are not there while the rest of the layer is."""

import json

import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES
from nvfp4viz.checkpoint import MemorySource, file_bytes, memory_checkpoint
from tests.audit.layouts import CONFIG, EXPERTS, HIDDEN, WIDTH, bf16, modelopt, packed
from tests.audit.test_two_layouts import layer

ALL = tuple(range(EXPERTS))
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
ATTENTION = tuple(f"self_attn.{part}_proj.weight" for part in "qkvo")
MAMBA = ("mixer.in_proj.weight", "mixer.out_proj.weight", "mixer.conv1d.weight")
# How a layer is stored: layout, what stands before its number, its experts, its router, and what is beside them.
HOMES = {
    "modelopt": ("modelopt", "model.layers", "mlp.experts", "mlp.gate.weight", (*NORMS, *ATTENTION)),
    "projection-major": ("projection-major", "model.layers", "mlp.experts", "mlp.gate.weight", (*NORMS, *ATTENTION)),
    "w1/w2/w3": (
        "w1/w2/w3", "model.layers", "block_sparse_moe.experts", "block_sparse_moe.gate.weight", (*NORMS, *ATTENTION),
    ),
    "non-gated": ("non-gated", "backbone.layers", "mixer.experts", "mixer.gate.weight", ("norm.weight",)),
    "Gemma 4, .moe.": (
        "modelopt", "model.language_model.layers", "moe.experts", "router.proj.weight",
        (*NORMS, *ATTENTION, "router.scale", "router.per_expert_scale", "layer_scalar", "mlp.gate_proj.weight",
         "mlp.up_proj.weight", "mlp.down_proj.weight", "pre_feedforward_layernorm_2.weight"),
    ),
    "Gemma 4, nvidia": (
        "modelopt", "model.language_model.layers", "experts", "router.proj.weight",
        (*NORMS, *ATTENTION, "router.scale", "layer_scalar", "mlp.gate_proj.weight", "mlp.up_proj.weight",
         "mlp.down_proj.weight", "pre_feedforward_layernorm_2.weight"),
    ),
    "fused": ("fused", "model.language_model.layers", "mlp.experts", "mlp.gate.weight", (*NORMS, *ATTENTION)),
    "stacked": (
        "stacked", "model.layers", "moe", "moe.gate.weight",
        (*NORMS, *ATTENTION, "moe.router_bias", "share_expert.up_proj.weight", "share_expert.gate_proj.weight",
         "share_expert.down_proj.weight"),
    ),
    "DeepSeek V4": ("w1/w2/w3", "layers", "ffn.experts", "ffn.gate.weight", ("attn_norm.weight", "ffn_norm.weight",
                                                                           "attn.wq_a.weight", "attn.wo_b.weight")),
}  # fmt: skip
LAYERS = 4


def model(home, *, layers=LAYERS):
    """Layers that are all alike."""
    id, family, tail, router, beside = HOMES[home]
    out = {}
    for number in range(layers):
        at = f"{family}.{number}"
        own = layer(id, f"{at}.{tail}")
        # The router that the helper made has one name for all layouts.
        out |= {name: item for name, item in own.items() if name.startswith(f"{at}.{tail}.")}
        out |= {f"{at}.{name}": bf16(HIDDEN, HIDDEN) for name in beside} | {f"{at}.{router}": bf16(EXPERTS, HIDDEN)}
    return out


def report_of(tensors, layers=LAYERS, **more):
    config = {**CONFIG, "num_hidden_layers": layers, **more}
    quant = modelopt(exclude=("lm_head", "*gate", "*attn*", "*mlp.*_proj", "*share_expert*", "*router*", "*mixer*"))
    return audit(memory_checkpoint(tensors, config=config, hf_quant_config=quant))


def absent(report):
    return [(item.severity, item.text, item.layer, item.experts) for item in report.findings if "absent" in item.code]


def is_experts(home, name, number):
    _, family, tail, router, beside = HOMES[home]
    path = name.removeprefix(f"{family}.{number}.")
    return path.startswith(f"{tail}.") and path != router and path not in beside


@pytest.mark.parametrize("home", HOMES)
def test_every_layer_whole_is_silent(home):
    assert absent(report_of(model(home))) == []


@pytest.mark.parametrize("number", [0, 1, LAYERS - 1])
@pytest.mark.parametrize("home", HOMES)
def test_experts_that_are_gone_beside_their_router(home, number):
    tensors = {name: item for name, item in model(home).items() if not is_experts(home, name, number)}
    report = report_of(tensors)
    assert absent(report) == [("error", "expert.absent.layer", number, ALL)]
    assert all(item.outcome not in ("safe", "ignored") for item in report.backends)


@pytest.mark.parametrize("home", ["stacked", "modelopt"])
def test_experts_and_router_gone_beside_a_shared_expert(home):
    _, family, _, router, _ = HOMES[home]
    beside = "share_expert.up_proj.weight" if home == "stacked" else "mlp.shared_experts.up_proj.weight"
    whole = model(home) | {f"{family}.{k}.{beside}": bf16(WIDTH, HIDDEN) for k in range(LAYERS)}
    lost = (f"{family}.1.{router}", f"{family}.1.moe.router_bias")
    tensors = {name: item for name, item in whole.items() if name not in lost and not is_experts(home, name, 1)}
    report = report_of(tensors)
    [item] = [found for found in report.findings if found.code == "expert.absent"]
    assert (item.text, item.layer, item.experts) == ("expert.absent.layer.beside", 1, ALL)
    for language in ("en", "zh"):
        assert f"{family}.1.{beside.split('.up_')[0]}." in describe(item, language)[0]


@pytest.mark.parametrize("numbers", [(0,), (2,), (1, 2)])
@pytest.mark.parametrize("home", HOMES)
def test_a_layer_that_has_lost_its_whole_mlp(home, numbers):
    """The router and what else stood beside the experts went with them."""
    _, family, tail, router, _ = HOMES[home]
    parent = tail.partition(".")[0]
    gone = {parent, router.partition(".")[0], "share_expert"}
    if home.startswith("Gemma"):
        # Here a dense MLP runs beside them, and is still there.
        gone |= {"router"}
    tensors = {
        name: item
        for name, item in model(home, layers=6).items()
        if not any(name.startswith(f"{family}.{k}.{part}.") for k in numbers for part in gone)
    }
    found = absent(report_of(tensors, 6))
    assert found == [("error", "expert.absent.mlp", number, None) for number in numbers]


@pytest.mark.parametrize("home", ["modelopt", "fused", "stacked"])
def test_dense_layers_and_layers_of_another_mixer_are_whole(home):
    """A dense layer has an MLP of its own; the attention of two kinds of layers may differ."""
    _, family, _, _, _ = HOMES[home]
    tensors = {name: item for name, item in model(home).items() if not name.startswith(f"{family}.0.")}
    dense = (*NORMS, *ATTENTION, *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")))
    tensors |= {f"{family}.0.{name}": bf16(HIDDEN, HIDDEN) for name in dense}
    assert absent(report_of(tensors, first_k_dense_replace=1)) == []
    # The dense layer's own MLP is missed as well.
    without = {name: item for name, item in tensors.items() if not name.startswith(f"{family}.0.mlp.")}
    assert absent(report_of(without, first_k_dense_replace=1)) == [("error", "expert.absent.mlp", 0, None)]
    renamed = {name.replace(".0.self_attn.", ".0.linear_attn."): item for name, item in without.items()}
    assert absent(report_of(renamed)) == [("error", "expert.absent.mlp", 0, None)]


def test_layers_that_are_one_half_by_design_are_whole():
    """Nemotron-H: one norm and one mixer a layer, recurrent, attention or experts."""
    tensors = model("non-gated")
    for number in (0, 2):
        tensors = {name: item for name, item in tensors.items() if not name.startswith(f"backbone.layers.{number}.")}
        parts = MAMBA if number == 0 else tuple(f"mixer.{part}_proj.weight" for part in "qkvo")
        tensors |= {f"backbone.layers.{number}.{name}": bf16(HIDDEN, HIDDEN) for name in ("norm.weight", *parts)}
    assert absent(report_of(tensors, hybrid_override_pattern="ME*E")) == []
    # The same with a name for each: attention has no MLP beside it, and one norm.
    apart = {name: item for name, item in model("modelopt").items() if ".self_attn." not in name}
    apart = {name: item for name, item in apart.items() if "post_attention" not in name}
    for number in (0, 2):
        apart = {name: item for name, item in apart.items() if not name.startswith(f"model.layers.{number}.mlp.")}
        apart |= {f"model.layers.{number}.{name}": bf16(HIDDEN, HIDDEN) for name in ATTENTION}
    assert absent(report_of(apart)) == []


def test_layers_searched_one_by_one_may_have_no_mlp():
    gone = {name: item for name, item in model("modelopt").items() if not name.startswith("model.layers.1.mlp.")}
    blocks = [{"ffn": {"no_op": k == 1}} for k in range(LAYERS)]
    assert absent(report_of(gone, block_configs=blocks)) == []
    assert absent(report_of(gone)) == [("error", "expert.absent.mlp", 1, None)]


def test_a_dense_mlp_beside_the_experts_of_some_layers_is_no_hole():
    """Where the configuration speaks of dense layers, or many layers have no experts, that is how the model is made."""
    family = HOMES["Gemma 4, .moe."][1]

    def without(*numbers):
        starts = tuple(f"{family}.{k}.{part}." for k in numbers for part in ("moe", "router"))
        return {name: item for name, item in model("Gemma 4, .moe.").items() if not name.startswith(starts)}

    assert absent(report_of(without(1))) == [("error", "expert.absent.mlp", 1, None)]
    assert absent(report_of(without(1), mlp_only_layers=[1])) == []
    assert absent(report_of(without(0, 2))) == []


def test_what_went_with_a_lost_file_is_not_called_absent_twice():
    whole = model("modelopt")
    part = {name: item for name, item in whole.items() if name.startswith("model.layers.1.mlp.")}
    rest = {name: item for name, item in whole.items() if name not in part}
    index = {"weight_map": {name: ("b" if name in part else "a") + ".safetensors" for name in whole}}
    files = {"a.safetensors": file_bytes(rest), "model.safetensors.index.json": json.dumps(index).encode()}
    files["config.json"] = json.dumps({**CONFIG, "num_hidden_layers": LAYERS}).encode()
    files["hf_quant_config.json"] = json.dumps(modelopt(exclude=("lm_head", "*gate", "*attn*"))).encode()
    assert absent(audit(MemorySource(files))) == []


# Experts that no layer has any more.


def bare(home, layers=LAYERS):
    """Everything but the routed experts."""
    whole = model(home, layers=layers)
    return {name: item for name, item in whole.items() if not any(is_experts(home, name, k) for k in range(layers))}


def of_experts(report):
    return [(item.severity, item.text, item.count) for item in report.findings if item.code.startswith("expert")]


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("home", HOMES)
def test_no_experts_in_any_layer_beside_their_routers(home, layers, quantised):
    config = {**CONFIG, "num_hidden_layers": layers}
    quant = modelopt(exclude=("*",)) if quantised else None
    report = audit(memory_checkpoint(bare(home, layers), config=config, hf_quant_config=quant))
    assert of_experts(report) == [("error", "expert.absent.all", layers)]
    assert report.verdict == "error"
    [item] = [found for found in report.findings if found.code == "expert.absent"]
    _, family, _, router, _ = HOMES[home]
    for language in ("en", "zh"):
        words = describe(item, language)[0]
        assert f"{family}.0.{router}" in words
        assert str(EXPERTS) in words


def test_models_that_have_no_experts_to_lose():
    tensors = bare("modelopt")
    dense = {**tensors, **{f"model.layers.{k}.mlp.gate_proj.weight": bf16(WIDTH, HIDDEN) for k in range(LAYERS)}}
    no_router = {name: item for name, item in dense.items() if ".mlp.gate." not in name}
    no_count = {name: value for name, value in CONFIG.items() if name != "num_experts"}
    of_attention = {name.replace("mlp.gate", "self_attn.gate"): item for name, item in tensors.items()}
    # One expert is a dense layer; a gate of another size is no router of these.
    for stored, config in (
        (no_router, CONFIG), (tensors, no_count), (tensors, {**no_count, "num_experts": 1}), (of_attention, CONFIG),
        (tensors, {**no_count, "num_experts": EXPERTS + 1}),
    ):  # fmt: skip
        assert of_experts(audit(memory_checkpoint(stored, config=config))) == []


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp.expert_bank.qweight", (8, 8)),
        ("ffn.experts.mlp.w1", (EXPERTS * WIDTH, HIDDEN)),
        ("block_sparse_moe.input_linear.weight", (EXPERTS, 2 * WIDTH, HIDDEN)),
    ],
)
def test_experts_of_a_layout_that_is_not_read_are_none_that_are_gone(name, shape):
    tensors = {**bare("modelopt"), f"model.layers.0.{name}": bf16(*shape)}
    assert of_experts(report_of(tensors)) == []


def test_a_shard_that_is_known_to_be_missing_took_them_along():
    files = {"model-00001-of-00002.safetensors": file_bytes(bare("modelopt"))}
    files["config.json"] = json.dumps({**CONFIG, "num_hidden_layers": LAYERS}).encode()
    assert of_experts(audit(MemorySource(files))) == []
    files["model.safetensors"] = files.pop("model-00001-of-00002.safetensors")
    assert of_experts(audit(MemorySource(files))) == [("error", "expert.absent.all", LAYERS)]


def quants():
    """Configurations that name the experts' format, and the scheme that they mean."""
    entry = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    single = {f"model.layers.0.mlp.experts.{k}.gate_proj": {"quant_algo": "NVFP4"} for k in range(EXPERTS)}
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    plain = ("lm_head", "*mlp.gate", "*self_attn*")
    ignoring = {**packed(), "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"]}
    return {
        "NVFP4": ({}, modelopt(exclude=plain), "W4A4"),
        "W4A16_NVFP4": ({}, modelopt("W4A16_NVFP4", exclude=plain), "W4A16"),
        "compressed-tensors": ({"quantization_config": ignoring}, None, "W4A4"),
        "gpt-oss": ({"quantization_config": {"quant_method": "mxfp4"}}, None, "MXFP4"),
        "DeepSeek V4": ({"expert_dtype": "fp4", "quantization_config": fp8}, None, "MXFP4"),
        "MIXED_PRECISION": ({}, modelopt("MIXED_PRECISION", quantized_layers=entry), "W4A4"),
        "MIXED_PRECISION, one by one": ({}, modelopt("MIXED_PRECISION", quantized_layers=single), "W4A4"),
    }


@pytest.mark.parametrize("id", quants())
def test_what_a_load_without_any_expert_does(id):
    """As where one layer has lost its own: memory as it was, and a KeyError of TensorRT-LLM."""
    more, quant, scheme = quants()[id]
    config = {**CONFIG, "num_hidden_layers": LAYERS, **more}
    report = audit(memory_checkpoint(bare("modelopt"), config=config, hf_quant_config=quant))
    assert of_experts(report) == [("error", "expert.absent.all", LAYERS)]
    assert tuple(item.name for item in report.backends) == tuple(FAMILIES)
    for item in report.backends:
        family = FAMILIES[item.name]
        served = family.mxfp4 if scheme == "MXFP4" else scheme in family.schemes
        if family.engine == "tensorrt-llm":
            assert (item.outcome, item.possible, item.scope) == ("load-error", (), "model")
        elif not served:
            assert item.outcome == "unsupported"
        else:
            assert (item.outcome, item.possible) == ("undefined", ("degraded", "nan", "zero"))
            assert (item.scope, item.layers) == ("layer", tuple(range(LAYERS)))
    if "NVFP4" in id:
        tensors = {name: item for name, item in model("modelopt").items() if not is_experts("modelopt", name, 1)}
        one = audit(memory_checkpoint(tensors, config=config, hf_quant_config=quant))
        assert [(item.outcome, item.possible) for item in one.backends] == [
            (item.outcome, item.possible) for item in report.backends
        ]
    for language in ("en", "zh"):
        assert all("0–3" in describe(item, language)[0] for item in report.backends if item.outcome == "undefined")


@pytest.mark.parametrize("quant", [None, modelopt(exclude=("*",)), modelopt("FP8")])
def test_experts_that_were_never_in_four_bits_have_no_forecast(quant):
    report = audit(memory_checkpoint(bare("modelopt"), config={**CONFIG, "num_hidden_layers": LAYERS},
                                     hf_quant_config=quant))  # fmt: skip
    assert of_experts(report) == [("error", "expert.absent.all", LAYERS)]
    assert report.backends == ()


def test_files_that_hold_nothing_at_all():
    """A header of two braces is a sound file; servers load none of the experts that the configuration counts."""
    quant = modelopt(exclude=("lm_head",))
    report = audit(memory_checkpoint({}, config=CONFIG, hf_quant_config=quant))
    assert of_experts(report) == [("error", "expert.absent.all.empty", CONFIG["num_hidden_layers"])]
    assert {one.outcome for one in report.backends if one.name.startswith("vllm")} == {"undefined"}
    # Of a model without experts, or without a label, nothing is said.
    dense = {key: value for key, value in CONFIG.items() if "expert" not in key}
    for config, label in ((dense, quant), (CONFIG, None)):
        assert of_experts(audit(memory_checkpoint({}, config=config, hf_quant_config=label))) == []
