"""A configuration that calls quantised weights something else stops every load, however healthy the tensors."""

import copy
import json
import re

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import memory_checkpoint, tensor
from nvfp4viz.errors import ServingError
from nvfp4viz.serving.quant_config import resolve_quantization
from tests.audit.families import FAMILIES
from tests.audit.layouts import (
    ALLOWED,
    EXPERTS,
    HIDDEN,
    LAYOUTS,
    MLP,
    ct_linear,
    fp8,
    linear,
    modelopt,
    packed,
    with_quant,
)
from tests.audit.reading import codes, found, outcomes
from tests.checkpoint.checkpoint_fixtures import CONFIG, FLAT, QUANT, base, opened

SECTION = "quantization_config"
CONFLICT = [("config.conflict", "error", None, None, None)]
WRONG = ["INT4_AWQ", "FP8", "FP8_PB_WO", "NONE", "W8A8", "W4A8_AWQ", "MXFP8", "FP8_PER_CHANNEL_PER_TOKEN"]
SOUND = ["NVFP4", "nvfp4", "W4A8_NVFP4_FP8", "NVFP4_AWQ"]
MODELOPT = [id for id, layout in LAYOUTS.items() if layout.quant and layout.block == "NVFP4" and layout.with_input]


def flat(**changes):
    return {**CONFIG, "quantization_config": {**FLAT, **changes}}


def refused(report):
    return set(outcomes(report).values()) == {"load-error"}


@pytest.mark.parametrize("id", MODELOPT)
@pytest.mark.parametrize("algo", WRONG)
def test_a_wrong_algorithm_in_the_sidecar(id, algo):
    layout = LAYOUTS[id]
    section = {"quant_algo": algo, "quantized_layers": {}}
    quant = {"quantization": {**layout.quant["quantization"], **section}}
    report = audit(layout.open(quant=quant))
    assert found(report) == CONFLICT
    assert report.findings[0].params["claimed"] == algo
    assert refused(report)


@pytest.mark.parametrize("algo", WRONG)
def test_a_wrong_algorithm_in_config_json(algo):
    report = audit(opened(base(), flat(quant_algo=algo), None))
    assert found(report) == CONFLICT
    assert refused(report)
    # A right label in the other file saves nobody but who reads that one first, and the same thing is not said twice.
    report = audit(opened(base(), flat(quant_algo=algo), QUANT))
    assert found(report) == [("config.conflict", "backend", None, None, None)]
    assert {name for name, outcome in outcomes(report).items() if outcome != "load-error"} == {"tensorrt-llm"}


@pytest.mark.parametrize("algo", SOUND)
def test_algorithms_of_these_tensors(algo):
    assert found(audit(opened(base(), flat(quant_algo=algo), None))) == []
    nested = {"quantization": {**QUANT["quantization"], "quant_algo": algo}}
    assert found(audit(opened(base(), CONFIG, nested))) == []


NO_METHOD = [
    layout for layout in LAYOUTS.values() if layout.config and "quant_method" in layout.config.get(SECTION, {})
    and not isinstance(layout.config[SECTION].get("quant_algo"), str)
]  # fmt: skip


@pytest.mark.parametrize("layout", NO_METHOD, ids=[layout.id for layout in NO_METHOD])
def test_no_method_at_all(layout):
    """vLLM asks for an algorithm then, and transformers raises an error; a draft's own format is no second fault."""
    section = {key: value for key, value in layout.config[SECTION].items() if key != "quant_method"}
    report = audit(layout.open(config={**layout.config, SECTION: section}))
    [item] = [item for item in report.findings if item.severity != "info"]
    assert (item.code, item.text, item.severity) == ("config.incomplete", "config.incomplete.method", "backend")
    healthy = outcomes(audit(layout.open()))
    for one in report.backends:
        stops = one.name.startswith(("vllm", "transformers"))
        assert one.outcome == ("load-error" if stops else healthy[one.name])
        assert one.possible == ()
        for language, word in (("en", "lacks quant_method"), ("zh", "缺少 quant_method")):
            assert (word in describe(one, language)[0]) == stops
            assert "transformers" in describe(item, language)[0]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("algo", [None, ""])
def test_no_algorithm_at_all(nested, algo):
    """The groups may say what is meant; vLLM asks for `quant_algo` and raises."""
    sidecar = {"quantization": {**QUANT["quantization"], "quant_algo": algo}} if nested else None
    config = CONFIG if nested else flat(quant_algo=algo)
    with pytest.raises(ServingError) as caught:
        resolve_quantization(config, sidecar)
    assert caught.value.code == "serving.quant-algo"
    report = audit(opened(base(), config, sidecar))
    assert found(report) == [("config.incomplete", "backend", None, None, None)]
    assert "quant_algo" in report.findings[0].message
    assert {outcomes(report)[name] for name in ("vllm-cutlass", "vllm-marlin")} == {"load-error"}


def mixed(**layers):
    return modelopt("MIXED_PRECISION", exclude=(), quantized_layers=layers)


def test_an_allow_list_that_calls_the_experts_fp8():
    layout = LAYOUTS["MIXED_PRECISION"]
    wrong = {**ALLOWED, MLP: {"quant_algo": "FP8"}}
    report = audit(layout.open(quant=mixed(**wrong)))
    assert found(report) == CONFLICT
    assert refused(report)
    assert found(audit(layout.open(quant=mixed(**ALLOWED)))) == []


def test_one_projection_called_fp8():
    layout = LAYOUTS["MIXED_PRECISION"]
    names = {f"{MLP}.{e}.{p}_proj": {"quant_algo": "NVFP4"} for e in range(EXPERTS) for p in ("gate", "up", "down")}
    downs = {name: {"quant_algo": "FP8"} for name in names if "down" in name}
    assert found(audit(layout.open(quant=mixed(**names)))) == []
    assert found(audit(layout.open(quant=mixed(**{**names, **downs})))) == CONFLICT


def test_an_allow_list_without_the_experts():
    layout = LAYOUTS["MIXED_PRECISION"]
    report = audit(layout.open(quant=mixed(**{name: ALLOWED[name] for name in ALLOWED if name != MLP})))
    assert found(report) == CONFLICT
    assert report.findings[0].text == "config.conflict.left-out"
    assert MLP in report.findings[0].message
    assert refused(report)


def test_entries_below_the_experts_under_other_names():
    """A fused module's entry stands for what the exporter split; vLLM asks for the prefix alone."""
    layout = LAYOUTS["MIXED_PRECISION"]
    for name in (f"{MLP}.gate_up_proj", f"{MLP}.3.w1", f"language_model.{MLP}.gate_up_proj"):
        listed = {key: entry for key, entry in ALLOWED.items() if key != MLP} | {name: ALLOWED[MLP]}
        assert "config.conflict" not in {code for code, *_ in found(audit(layout.open(quant=mixed(**listed))))}


def test_one_layer_of_two_is_named():
    tensors, config = base(2), {**CONFIG, "num_hidden_layers": 2}
    second = MLP.replace("0", "1")
    both = {MLP: {"quant_algo": "NVFP4"}, second: {"quant_algo": "W4A16_NVFP4"}}
    bare = {name: item for name, item in tensors.items() if second not in name or "input_scale" not in name}
    assert found(audit(opened(bare, config, mixed(**both)))) == []
    for entry in ({second: {"quant_algo": "FP8"}}, {}):
        report = audit(opened(tensors, config, mixed(**{MLP: both[MLP], **entry})))
        assert found(report) == [("config.conflict", "error", 1, None, None)]


def packed_as(bits, kind, targets=("Linear",), **more):
    weights = {"num_bits": bits, "type": kind, "strategy": "channel", **more}
    return {"weights": weights, "input_activations": weights, "targets": list(targets)}


@pytest.mark.parametrize("id", [id for id, layout in LAYOUTS.items() if layout.dialect == "compressed-tensors"])
@pytest.mark.parametrize(
    ("form", "group"),
    [
        ("float-quantized", packed_as(8, "float")),
        ("pack-quantized", packed_as(4, "int", group_size=128)),
        ("int-quantized", packed_as(8, "int")),
    ],
)
def test_compressed_tensors_of_another_format(id, form, group):
    layout = LAYOUTS[id]
    section = {**layout.config["quantization_config"], "format": form, "config_groups": {"group_0": group}}
    report = audit(layout.open(config={**layout.config, "quantization_config": section}))
    assert found(report) == CONFLICT
    assert refused(report)
    assert found(audit(layout.open())) == []


def test_groups_are_told_apart_by_their_targets():
    layout = LAYOUTS["compressed-tensors"]
    section = layout.config["quantization_config"]
    four = section["config_groups"]["group_0"]

    def said(**groups):
        return found(audit(layout.open(config=with_quant({**section, "config_groups": groups}))))

    experts, attention = ["re:.*experts.*"], ["re:.*self_attn.*"]
    assert said(a=packed_as(8, "float"), b={**four, "targets": experts}) == []
    assert said(a=packed_as(8, "float", attention), b=four) == []
    assert said(a=packed_as(8, "float"), b={**four, "targets": attention}) == CONFLICT
    assert said(a=packed_as(8, "float", experts), b=four) == CONFLICT


@pytest.mark.parametrize("tensors", [linear("model.layers.0.mlp.down_proj"), ct_linear("model.layers.0.mlp.down_proj")])
def test_a_dense_model(tensors):
    assert found(audit(opened(tensors, {"num_hidden_layers": 1}, modelopt("FP8")))) == CONFLICT
    assert found(audit(opened(tensors, {"num_hidden_layers": 1}, modelopt("NVFP4")))) == []
    listed = {"model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}}
    assert found(audit(opened(tensors, {"num_hidden_layers": 1}, mixed(**listed)))) == CONFLICT
    # A list that leaves an ordinary module out may know it by the name of a fused one.
    assert found(audit(opened(tensors, {"num_hidden_layers": 1}, mixed(other={"quant_algo": "FP8"})))) == []


def test_deepseek_v4_without_a_word_about_its_experts():
    """`quant_method: fp8` speaks of what stands around them; `expert_dtype` decides where it is there."""
    layout = LAYOUTS["DeepSeek V4"]
    silent = {key: value for key, value in layout.config.items() if key != "expert_dtype"}
    assert found(audit(layout.open(config=silent))) == []
    assert found(audit(layout.open(config={**silent, "expert_dtype": "fp8"}))) == CONFLICT


# The file that is not read.


@pytest.mark.parametrize("lost", ["group_size", "kv_cache_quant_algo", "exclude_modules"])
def test_a_sidecar_that_nobody_reads_may_lack_fields(lost):
    short = {"quantization": {key: value for key, value in QUANT["quantization"].items() if key != lost}}
    # ModelOpt's own mixed exports do; TensorRT-LLM takes them for null.
    assert codes(audit(opened(base(), flat(), short))) == []
    assert resolve_quantization(flat(), short).source == "config.json"
    report = audit(opened(base(), CONFIG, short))
    assert found(report) == [("config.incomplete", "backend", None, None, None)]
    with pytest.raises(ServingError):
        resolve_quantization(CONFIG, short)


def test_modelopts_own_mixed_export():
    """Two files: an allow-list in both, and neither group size nor excluded modules in the sidecar."""
    layout = LAYOUTS["MIXED_PRECISION"]
    body = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": ALLOWED}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": ALLOWED, "ignore": []}
    both = layout.open(config=with_quant(section), quant={"quantization": body})
    assert codes(audit(both)) == []
    assert resolve_quantization(both.config, both.hf_quant_config).scheme == "MIXED"
    # Alone it lacks nothing that vLLM asks a mixed file for: of the list's entries it takes the group size.
    alone = layout.open(quant={"quantization": body})
    assert codes(audit(alone)) == []
    assert resolve_quantization(alone.config, alone.hf_quant_config).scheme == "MIXED"
    # Without the list, and with a null for excluded modules, it does.
    for change in ({"quantized_layers": {}}, {"exclude_modules": None}):
        report = audit(layout.open(quant={"quantization": body | change}))
        [item] = [item for item in report.findings if item.code == "config.incomplete"]
        assert (item.severity, item.count) == ("backend", 1)
        assert next(iter(change)) in item.message


# `moe_quant_algo` beside a list, and compressed-tensors' `format`: one label is right, and which one a server follows
# is not known.

EITHER = [("config.conflict", "backend", None, None, None)]


def may_stop(report):
    return {one.possible for one in report.backends if one.outcome == "load-error"} == {("load-error", "safe")}


@pytest.mark.parametrize("algo", ["MXFP4", "FP8", "W4A8_MXFP4_FP8"])
@pytest.mark.parametrize("where", ["quant", "config"])
def test_moe_quant_algo_against_the_list(algo, where):
    layout = LAYOUTS["MIXED_PRECISION"]
    body = {**layout.quant["quantization"], "moe_quant_algo": algo}
    changes = {"quant": {"quantization": body}}
    if where == "config":
        changes = {"config": with_quant({"quant_method": "modelopt", **body}), "quant": None}
    report = audit(layout.open(**changes))
    assert found(report) == EITHER
    [item] = report.findings
    assert (item.text, item.params["claimed"], item.params["found"]) == ("config.conflict.moe-algo", algo, "NVFP4")
    assert may_stop(report)
    body["moe_quant_algo"] = "nvfp4"
    assert found(audit(layout.open(quant={"quantization": body}))) == []


def test_moe_quant_algo_of_the_file_that_is_not_read():
    layout = LAYOUTS["MIXED_PRECISION"]
    listed = {**layout.quant["quantization"], "quant_method": "modelopt"}
    for algo, expected in (("MXFP4", EITHER), ("NVFP4", [])):
        quant = {"quantization": {**layout.quant["quantization"], "moe_quant_algo": algo}}
        assert found(audit(layout.open(config=with_quant(listed), quant=quant))) == expected


def test_moe_quant_algo_right_and_the_list_wrong_is_one_finding():
    layout = LAYOUTS["MIXED_PRECISION"]
    body = modelopt("MIXED_PRECISION", exclude=(), quantized_layers={**ALLOWED, MLP: {"quant_algo": "MXFP4"}})
    body["quantization"]["moe_quant_algo"] = "NVFP4"
    report = audit(layout.open(quant=body))
    assert [item.text for item in report.findings] == ["config.conflict.format"]


CT_LAYOUTS = [id for id, layout in LAYOUTS.items() if layout.dialect == "compressed-tensors"]
FORMS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "pack-quantized", "float-quantized", "dense")


@pytest.mark.parametrize("id", CT_LAYOUTS)
@pytest.mark.parametrize("form", [*FORMS, "mixed-precision", None])
def test_how_compressed_tensors_says_that_codes_are_packed(id, form):
    layout = LAYOUTS[id]
    own = layout.config["quantization_config"]["format"]
    section = {**layout.config["quantization_config"], "format": form}
    report = audit(layout.open(config={**layout.config, "quantization_config": section}))
    assert found(report) == ([] if form in (own, "mixed-precision", None) else EITHER)
    if form not in (own, "mixed-precision", None):
        [item] = [one for one in report.findings if one.code == "config.conflict"]
        assert (item.params["claimed"], item.params["found"]) == (form, own)
        assert may_stop(report)


def test_the_format_of_a_group_goes_before_that_of_the_file():
    layout = LAYOUTS["compressed-tensors"]
    section = layout.config["quantization_config"]
    four = section["config_groups"]["group_0"]
    attention = {**packed_as(8, "float", ["re:.*self_attn.*"]), "format": "float-quantized"}

    def said(top, own, **more):
        groups = {"a": {**four, "format": own}, **more}
        return found(audit(layout.open(config=with_quant({**section, "format": top, "config_groups": groups}))))

    assert said("mixed-precision", "nvfp4-pack-quantized", b=attention) == []
    assert said("pack-quantized", "nvfp4-pack-quantized") == []
    assert said("mixed-precision", "pack-quantized", b=attention) == EITHER
    assert said("nvfp4-pack-quantized", "pack-quantized") == EITHER


def test_the_format_of_a_dense_model():
    tensors = ct_linear("model.layers.0.mlp.down_proj")
    for form, expected in (("nvfp4-pack-quantized", []), ("pack-quantized", EITHER)):
        config = {"num_hidden_layers": 1, "quantization_config": packed(form)}
        assert found(audit(opened(tensors, config, None))) == expected


@pytest.mark.parametrize(
    "id", ["modelopt", "projection-major", "w1/w2/w3", "non-gated", "Gemma 4, .moe.", "stacked", "fused"]
)
@pytest.mark.parametrize("one", [True, False])
def test_activation_scales_under_a_weight_only_label(id, one):
    """Servers go by the label: the report says which scales nobody reads, and everything else in it agrees."""
    layout = LAYOUTS[id]
    quant = json.loads(json.dumps(layout.quant).replace('"NVFP4"', '"W4A16_NVFP4"'))
    tensors = layout.tensors()
    kept = layout.name(3, "up" if "up" in layout.kinds else "gate_up", "input_scale")
    if one:
        tensors = {name: item for name, item in tensors.items() if name == kept or "input_scale" not in name}
    report = audit(layout.open(tensors, quant=quant))
    [item] = [item for item in report.findings if item.severity != "info"]
    stored = {name for name in tensors if "input_scale" in name}
    assert (item.code, item.severity, item.role, item.layer) == ("config.conflict", "warn", "input_scale", 0)
    assert item.count == len(stored)
    assert set(item.tensors) <= stored
    assert item.tensors[0] in item.message
    alone = one and layout.arrangement == "expert"
    assert item.projection == ("up" if alone else None)
    assert item.experts == (None if layout.arrangement != "expert" else (3,) if one else tuple(range(8)))
    assert report.format.scheme == "W4A16"
    assert report.coverage["input_scale"].expected == 0
    assert outcomes(report)["vllm-cutlass"] == "unsupported"
    # The twin: the same file without them.
    bare = audit(layout.open({name: item for name, item in tensors.items() if name not in stored}, quant=quant))
    assert found(bare) == []
    assert bare.format.scheme == "W4A16"


# Modules that an allow-list forgets.


def forgetful(id, *modules, together=None):
    """A family whose list has no entry for these modules, or one for all under another name."""
    checkpoint = FAMILIES[id]()
    quant, config = copy.deepcopy(checkpoint.hf_quant_config), copy.deepcopy(checkpoint.config)
    section = quant["quantization"] if quant else config["quantization_config"]
    entries = [section["quantized_layers"].pop(module) for module in modules]
    if together:
        section["quantized_layers"][together] = entries[0]
    return audit(memory_checkpoint(checkpoint.read_tensors(), config=config, hf_quant_config=quant))


LEFT_OUT = {
    "Nemotron 3 Super": ("backbone.layers.0.mixer.out_proj", "backbone.layers.2.mixer.in_proj",
                         "backbone.layers.1.mixer.shared_experts.up_proj"),
    "MiniMax-M3": ("model.layers.1.self_attn.o_proj",),
}  # fmt: skip


@pytest.mark.parametrize(("id", "name"), [(id, name) for id, names in LEFT_OUT.items() for name in names])
def test_a_quantised_module_that_the_list_forgets(id, name):
    assert found(audit(FAMILIES[id]())) == []
    report = forgetful(id, name)
    assert found(report) == [("config.conflict", "error", None, None, None)]
    [item] = [one for one in report.findings if one.code == "config.conflict"]
    assert (item.text, item.tensors) == ("config.conflict.left-out.linear", (name,))
    # As where it forgets the experts.
    assert {one.outcome for one in report.backends} == {"load-error"}
    for language in ("en", "zh"):
        assert name in describe(item, language)[0]


def test_all_modules_of_a_kind_that_it_forgets():
    """No namesake is listed, and their layers' experts are."""
    names = [f"model.layers.{k}.self_attn.{last}_proj" for k in (0, 1) for last in "qkvo"]
    report = forgetful("MiniMax-M3", *names)
    assert found(report) == [("config.conflict", "error", None, None, None)]
    assert [item.count for item in report.findings if item.code == "config.conflict"] == [8]


def test_names_that_stand_for_several_modules():
    """What is fused with a listed module is built as that is, and a list may have a name for all."""
    at = "model.layers.1.self_attn"
    assert found(forgetful("MiniMax-M3", f"{at}.q_proj")) == []
    q, k, v = (f"{at}.{last}_proj" for last in "qkv")
    assert found(forgetful("MiniMax-M3", q, k, v, together=f"{at}.qkv_proj")) == []
    assert found(forgetful("MiniMax-M3", q, k, v, f"{at}.o_proj", together=at)) == []
    assert len(found(forgetful("MiniMax-M3", q, k, v))) == 1


ORDINARY = (
    "lm_head", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.shared_expert.down_proj",
    "model.layers.0.mlp.down_proj",
)  # fmt: skip


def mixed_with(*names, listed=(), excluded=()):
    """The MIXED_PRECISION layout with more NVFP4 modules, some of which its two lists name."""
    layout = LAYOUTS["MIXED_PRECISION"]
    quant = copy.deepcopy(layout.quant)
    quant["quantization"]["quantized_layers"] |= {name: {"quant_algo": "NVFP4", "group_size": 16} for name in listed}
    quant["quantization"]["exclude_modules"] = list(excluded)
    more = {key: item for name in names for key, item in linear(name).items()}
    return audit(layout.open({**layout.tensors(), **more}, quant=quant))


@pytest.mark.parametrize("name", ORDINARY)
def test_a_module_of_a_mixed_file_in_each_of_its_lists(name):
    """Excluded is excluded, whether the allow-list names it or not; in neither list it is forgotten."""
    beside = [name.replace("down", other) for other in ("gate", "up")] if "down" in name else []
    excluded = [("config.excluded-but-quantised", "warn", None, None, None)]
    assert found(mixed_with(name, *beside, listed=[name, *beside])) == []
    assert found(mixed_with(name, *beside, listed=[name, *beside], excluded=[name])) == excluded
    assert found(mixed_with(name, *beside, listed=beside, excluded=[name])) == excluded
    forgotten = mixed_with(name, *beside, listed=beside)
    assert found(forgotten) == CONFLICT
    assert refused(forgotten)
    assert [item.tensors for item in forgotten.findings if item.code == "config.conflict"] == [(name,)]


def test_a_head_in_fp8_that_no_list_names():
    layout, quant = LAYOUTS["MIXED_PRECISION"], LAYOUTS["MIXED_PRECISION"].quant
    tensors = {**layout.tensors(), **fp8("lm_head"), "lm_head.input_scale": tensor(np.float32(2e-3))}
    assert found(audit(layout.open(tensors))) == CONFLICT
    listed = copy.deepcopy(quant)
    listed["quantization"]["quantized_layers"]["lm_head"] = {"quant_algo": "FP8"}
    assert found(audit(layout.open(tensors, quant=listed))) == []


@pytest.mark.parametrize(
    "targets", [["re:.*nothing$"], ["re:.*qkv_proj$"], ["re:.*self_attn\\.[qkv]_proj$"], ["re:.*self_attn\\..*_proj$"]]
)
def test_fp8_that_no_group_of_compressed_tensors_matches(targets):
    """Servers build it unquantised, and its scales have no place."""
    layout = LAYOUTS["compressed-tensors"]
    config = copy.deepcopy(layout.config)
    eight = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    section = config["quantization_config"]
    section["config_groups"]["group_0"]["targets"] = ["re:.*mlp\\.experts\\..*_proj$"]
    section["config_groups"]["group_1"] = {
        "targets": targets, "weights": eight, "input_activations": {**eight, "strategy": "token", "dynamic": True},
        "format": "float-quantized",
    }  # fmt: skip
    section["format"] = "mixed-precision"
    tensors = layout.tensors()
    names = [f"model.layers.0.self_attn.{last}_proj" for last in "qkvo"]
    for name in names:
        tensors |= fp8(name) | {f"{name}.weight_scale": tensor(np.ones((HIDDEN, 1), ml_dtypes.bfloat16))}
    report = audit(layout.open(tensors, config=config))
    left = [name for name in names if not any(re.fullmatch(pattern[3:], name) for pattern in targets)]
    if any("qkv" in pattern for pattern in targets):
        # Servers that build one module of the three ask for its name.
        left = [names[-1]]
    assert found(report) == (CONFLICT if left else [])
    for item in report.findings:
        if item.code == "config.conflict":
            assert (item.text, item.count) == ("config.conflict.untargeted.linear", len(left))
    assert not left or refused(report)
    section["ignore"] = [*section.get("ignore", ()), *left]
    codes = [item.code for item in audit(layout.open(tensors, config=config)).findings if item.severity != "info"]
    assert codes == (["config.excluded-but-quantised"] if left else [])


def test_a_name_that_an_allow_list_may_have_for_it():
    names = [f"model.layers.0.mlp.{kind}_proj" for kind in ("gate", "up", "down")]
    assert found(mixed_with(*names, listed=["model.layers.0.mlp.gate_up_proj"])) == []
    assert found(mixed_with("lm_head", listed=["language_model.lm_head"])) == []
    assert found(mixed_with("lm_head", listed=["lm_head*"])) == []
