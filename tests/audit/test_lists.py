"""Exclude lists, allow-lists and files that disagree with the tensors in ways that a name alone does not show."""

from time import sleep

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import canonical, tensor
from nvfp4viz.checkpoint.module_rules import Expression, compiled
from tests.audit.config_faults import excluding, section_of, with_section
from tests.audit.layouts import (
    ALLOWED,
    CONFIG,
    EXPERTS,
    HIDDEN,
    LAYOUTS,
    MLP,
    SIZES,
    bf16,
    ct_linear,
    fp8,
    linear,
    modelopt,
    typed,
    with_quant,
)
from tests.audit.reading import NARROW, codes, found, outcomes
from tests.checkpoint.checkpoint_fixtures import CONFIG as FOUR
from tests.checkpoint.checkpoint_fixtures import FLAT, QUANT, base, opened

APART = [layout for layout in LAYOUTS.values() if layout.arrangement == "expert"]
LISTED = [layout for layout in APART if layout.id != "MIXED_PRECISION"]


def number(layout, expert):
    """A pattern for one expert, and one for its projections, as this layout orders them."""
    if layout.projection_major:
        return [f"{layout.prefix}.*.{expert}"]
    return [f"{layout.prefix}.{expert}*"]


def in_bf16(layout, *experts, kinds=None):
    """The healthy file with some experts, or some projections of them, in BF16."""
    tensors = layout.tensors()
    for expert in experts:
        for kind in kinds or layout.kinds:
            module = layout.name(expert, kind, "weight").removesuffix(f".{layout.suffixes['weight']}")
            tensors = {name: item for name, item in tensors.items() if not name.startswith(f"{module}.")}
            tensors[f"{module}.weight"] = bf16(*SIZES[kind])
    return tensors


@pytest.mark.parametrize("layout", LISTED, ids=[layout.id for layout in LISTED])
def test_an_expert_left_in_bf16_on_purpose(layout):
    """File and list agree; vLLM asks the list for the layer's experts as a whole, and others may not."""
    report = audit(layout.open(in_bf16(layout, 5), **excluding(layout, *number(layout, 5))))
    [item] = [item for item in report.findings if item.code not in layout.notes]
    assert (item.text, item.severity, item.layer, item.experts) == ("weight.unquantised.left-alone", "backend", 0, (5,))
    before = outcomes(audit(layout.open()))
    stops = {name for name, outcome in before.items() if name.startswith("vllm") and outcome == "safe"}
    for name, outcome in outcomes(report).items():
        assert outcome == ("load-error" if name in stops else before[name])
    # What the reason says leaves nothing open.
    stopped = [one for one in report.backends if one.text == "why.left-alone"]
    assert {one.name for one in stopped} == stops
    assert all(one.possible == () and one.why.endswith("the load stops.") for one in stopped)


@pytest.mark.parametrize("layout", APART, ids=[layout.id for layout in APART])
@pytest.mark.parametrize("expert", [0, 5, 7])
def test_an_expert_in_bf16_that_no_list_names(layout, expert):
    """All of a layer's experts are one packed parameter; the list may name another expert in BF16."""
    twice = [("weight.unquantised", "error", 0, kind, (expert,)) for kind in layout.kinds]
    report = audit(layout.open(in_bf16(layout, expert)))
    assert sorted(found(report)) == sorted(twice)
    healthy = outcomes(audit(layout.open()))
    # What vLLM refuses while it builds the model never gets to the tensors.
    refused = {name for name, outcome in healthy.items() if outcome == "unsupported" and name.startswith("vllm")}
    stopped = {name: "unsupported" if name in refused else "load-error" for name in healthy}
    assert outcomes(report) == stopped
    if layout in LISTED:
        other = 2
        report = audit(layout.open(in_bf16(layout, other, expert), **excluding(layout, *number(layout, other))))
        assert found(report) == [*twice, ("weight.unquantised", "backend", 0, None, (other,))]
        [note] = [item for item in report.findings if item.text == "weight.unquantised.left-alone"]
        assert note.experts == (other,)
        assert outcomes(report) == stopped


def allowing(layout, *experts):
    """An allow-list of each projection of these experts, as ModelOpt writes one."""
    names = [layout.name(e, kind, "weight").removesuffix(".weight") for e in experts for kind in layout.kinds]
    listed = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names}
    return {"quant": modelopt("MIXED_PRECISION", exclude=(), quantized_layers=listed)}


MODELOPT = [LAYOUTS[id] for id in ("modelopt", "projection-major", "w1/w2/w3", "non-gated", "Gemma 4, .moe.")]


@pytest.mark.parametrize("layout", MODELOPT, ids=[layout.id for layout in MODELOPT])
@pytest.mark.parametrize("expert", [0, 5, 7])
def test_an_expert_in_bf16_that_an_allow_list_leaves_out(layout, expert):
    """vLLM takes the algorithm of any entry below the layer's experts; an allow-list that has all of them is sound."""
    every = allowing(layout, *range(EXPERTS))
    assert found(audit(layout.open(**every))) == []
    others = [at for at in range(EXPERTS) if at != expert]
    report = audit(layout.open(in_bf16(layout, expert), **allowing(layout, *others)))
    assert found(report) == [("weight.unquantised", "backend", 0, None, (expert,))]
    for name, outcome in outcomes(report).items():
        assert outcome == ("load-error" if name.startswith("vllm") else "safe")
    assert {item.possible for item in report.backends} == {()}
    # Listed, it is what the configuration says it is not.
    report = audit(layout.open(in_bf16(layout, expert), **every))
    assert {row[:2] for row in found(report)} == {("weight.unquantised", "error")}
    # A list that names it is a word about it, and changes nothing of how vLLM stores it.
    named = allowing(layout, *others)
    named["quant"]["quantization"]["exclude_modules"] = number(layout, expert)
    report = audit(layout.open(in_bf16(layout, expert), **named))
    assert found(report) == [("weight.unquantised", "backend", 0, None, (expert,))]
    assert report.findings[0].text == "weight.unquantised.left-alone"


@pytest.mark.parametrize("layout", LISTED, ids=[layout.id for layout in LISTED])
@pytest.mark.parametrize("expert", [0, 5, 7])
def test_an_expert_that_is_excluded_and_packed_like_the_others(layout, expert):
    """vLLM asks for the layer; a loader that asks for each module builds this one in BF16."""
    patterns = number(layout, expert)
    report = audit(layout.open(**excluding(layout, *patterns)))
    assert found(report) == [("config.excluded-but-quantised", "warn", 0, None, (expert,))]
    assert outcomes(report) == outcomes(audit(layout.open()))


@pytest.mark.parametrize("pattern", ["re:.*experts\\.5\\..*", "*experts.5.*", f"{MLP}.5.up_proj"])
def test_ways_to_single_an_expert_out(pattern):
    layout = LAYOUTS["modelopt"]
    report = audit(layout.open(**excluding(layout, pattern)))
    assert found(report) == [("config.excluded-but-quantised", "warn", 0, None, (5,))]


@pytest.mark.parametrize("pattern", ["*experts.50.*", "re:.*experts\\.9\\..*", "*shared_experts*", "model.layers.5.*"])
def test_lists_that_mean_other_modules(pattern):
    layout = LAYOUTS["modelopt"]
    assert found(audit(layout.open(**excluding(layout, pattern)))) == []


# A layer's number that is the beginning of another's (vLLM's is_layer_excluded looks for a part of the name).


def twelve(*patterns, config=None, plain=True):
    tensors = base(12)
    if plain:
        tensors = {name: item for name, item in tensors.items() if ".1." not in name.partition("experts")[0]}
        for expert in range(4):
            for kind, shape in (("gate", (16, 32)), ("up", (16, 32)), ("down", (32, 16))):
                tensors[f"model.layers.1.mlp.experts.{expert}.{kind}_proj.weight"] = bf16(*shape)
        tensors["model.layers.1.mlp.gate.weight"] = bf16(4, 32)
    quant = {"quantization": {**QUANT["quantization"], "exclude_modules": ["lm_head", "*mlp.gate", *patterns]}}
    return opened(tensors, {**FOUR, "num_hidden_layers": 12, **(config or {})}, None if config else quant)


def test_a_number_that_others_begin_with():
    report = audit(twelve("model.layers.1"))
    assert found(report) == [("config.excluded-but-quantised", "backend", None, None, None)]
    assert report.findings[0].params["numbers"] == [10, 11]
    for name, outcome in outcomes(report).items():
        assert outcome == ("load-error" if name.startswith("vllm") else "safe")
    assert next(item for item in report.backends if item.name == "vllm-cutlass").layers == (10, 11)


@pytest.mark.parametrize("patterns", [["model.layers.1.*"], ["model.layers.1.mlp*"], ["re:model\\.layers\\.1\\..*"]])
def test_numbers_that_end(patterns):
    assert found(audit(twelve(*patterns))) == []


def test_two_digits_are_the_beginning_of_none_here():
    tensors = {name: item for name, item in base(12).items() if "layers.11." not in name}
    quant = {"quantization": {**QUANT["quantization"], "exclude_modules": ["*mlp.gate", "model.layers.11"]}}
    assert found(audit(opened(tensors, {**FOUR, "num_hidden_layers": 11}, quant))) == []


# All five modules, and with the empty name the experts too.
PARTS = {"": 5, "model": 5, "q": 1}


@pytest.mark.parametrize("pattern", ["mlp.gate", "gate", "model.layers.0.mlp.gate", "", "model", "q"])
def test_a_name_that_is_a_part_of_others(pattern):
    """A dense layer's `gate_proj` is vLLM's `gate_up_proj`, of which the router's name is a part."""
    layout = LAYOUTS["modelopt"]
    quant = modelopt(exclude=(pattern,))
    dense = {}
    for last, size in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        dense |= linear(f"model.layers.0.mlp.{last}", *size)
    dense |= linear("model.layers.0.self_attn.q_proj")
    report = audit(layout.open({**layout.tensors(), **dense}, quant=quant))
    assert found(report) == [("config.excluded-but-quantised", "backend", None, None, None)]
    assert {outcomes(report)[name] for name in ("vllm-cutlass", "vllm-marlin")} == {"load-error"}
    assert outcomes(report)["tensorrt-llm"] == "safe"
    [item] = [one for one in report.findings if one.severity == "backend"]
    # Both halves of the fused module.
    assert (item.text, item.count) == ("config.excluded-but-quantised.part", PARTS.get(pattern, 2))
    # Without such layers the router's name is a part of nothing.
    if "gate" in pattern:
        assert found(audit(layout.open(quant=quant))) == []


DENSE, ATTN, DELTA = (f"model.layers.0.{block}" for block in ("mlp", "self_attn", "linear_attn"))
# What servers build, where, and of what.
FUSED = {
    "gate_up_proj": (DENSE, ("gate_proj", "up_proj")), "qkv_proj": (ATTN, ("q_proj", "k_proj", "v_proj")),
    "in_proj_qkvz": (DELTA, ("in_proj_qkv", "in_proj_z")), "in_proj_ba": (DELTA, ("in_proj_b", "in_proj_a")),
}  # fmt: skip


def fused(id, *patterns, built="gate_up_proj"):
    """A layout with the packed parts of a fused module, and these entries beside those of its list."""
    layout = LAYOUTS[id]
    make = ct_linear if layout.dialect == "compressed-tensors" else linear
    tensors, (parent, parts) = layout.tensors(), FUSED[built]
    for part in (*parts, *(("down_proj",) if parent == DENSE else ())):
        rows, columns = (64, 32) if part == "down_proj" else (32, 64)
        tensors |= make(f"{parent}.{part}", rows, columns)
    return audit(layout.open(tensors, **excluding(layout, *patterns)))


@pytest.mark.parametrize(
    ("id", "entry", "count", "certain"),
    [
        ("modelopt", f"{DENSE}.gate_up_proj", 2, True), ("modelopt", f"{DENSE}.gate_up", 2, True),
        ("modelopt", "*gate_up_proj", 2, True), ("modelopt", "*mlp.gate*", 2, False),
        ("modelopt", f"{DENSE}.gate*", 2, False), ("modelopt", f"{ATTN}.qkv_proj", 3, True),
        ("W4A16", f"{DENSE}.gate_up_proj", 2, True), ("compressed-tensors", f"{DENSE}.gate_up_proj", 2, True),
        ("compressed-tensors", f"{ATTN}.qkv_proj", 3, True),
        ("modelopt", f"{DELTA}.in_proj_qkvz", 2, True), ("modelopt", f"{DELTA}.in_proj_ba", 2, True),
        ("compressed-tensors", f"{DELTA}.in_proj_qkvz", 2, True),
    ],
)  # fmt: skip
def test_an_entry_that_means_the_fused_module(id, entry, count, certain):
    """vLLM builds one module of packed parts, and the list names it: by its own name, or by a star."""
    built = next((name for name in FUSED if entry.endswith(name)), "gate_up_proj")
    assert found(fused(id, built=built)) == []
    report = fused(id, entry, built=built)
    [item] = [one for one in report.findings if one.severity != "info"]
    assert (item.text, item.severity) == ("config.excluded-but-quantised.fused", "backend")
    assert (item.count, item.params["certain"]) == (count, certain)
    before = {one.name: one for one in fused(id, built=built).backends}
    for one in report.backends:
        reads = one.name.startswith(("vllm", "sglang") if id == "compressed-tensors" else "vllm")
        if before[one.name].outcome != "safe":
            continue
        assert one.outcome == ("load-error" if reads else "safe")
        assert one.possible == (() if reads and certain else ("load-error", "safe"))
    for language in ("en", "zh"):
        message, advice = describe(item, language)
        assert entry in message
        assert built in message
        assert ".*" not in advice


@pytest.mark.parametrize(
    ("id", "entries"),
    [
        # The router under a star that ends before the fused name, as exporters write it.
        ("modelopt", ["*mlp.gate.*"]), ("modelopt", ["*mlp.gate"]), ("modelopt", ["*router*"]),
        ("modelopt", ["model.layers.1.mlp.gate_up_proj"]), ("modelopt", ["re:.*gate_up_proj"]),
        # An expression is held against the parts.
        ("compressed-tensors", ["re:.*mlp.gate_up_proj"]), ("compressed-tensors", ["re:.*mlp.gate$"]),
        ("compressed-tensors", ["mlp.gate_up"]), ("compressed-tensors", ["model.layers.1.mlp.gate_up_proj"]),
    ],
)  # fmt: skip
def test_entries_that_mean_no_fused_module(id, entries):
    assert found(fused(id, *entries)) == []


def test_where_each_part_is_named_the_list_speaks_of_ordinary_modules():
    for built, entries in (("gate_up_proj", [f"{DENSE}.gate_proj", f"{DENSE}.up_proj"]), ("qkv_proj", [f"{ATTN}.*"])):
        report = fused("modelopt", *entries, built=built)
        [item] = [one for one in report.findings if one.severity != "info"]
        assert (item.text, item.severity) == ("config.excluded-but-quantised", "warn")
    # What is stored in BF16 may be named as it is built.
    layout = LAYOUTS["modelopt"]
    plain = {f"{DENSE}.{part}.weight": bf16(32, 64) for part in ("gate_proj", "up_proj")}
    tensors = {**layout.tensors(), **plain, f"{DENSE}.down_proj.weight": bf16(64, 32)}
    assert found(audit(layout.open(tensors, **excluding(layout, f"{DENSE}.gate_up_proj", f"{DENSE}.down_proj")))) == []


def test_experts_that_are_excluded_and_packed():
    """The end of a load in vLLM, which builds them in BF16, and where TensorRT-LLM's patterns match their name."""
    layout = LAYOUTS["modelopt"]
    report = audit(layout.open(quant=modelopt(exclude=("*gate", f"{MLP}*"))))
    assert found(report) == [("config.excluded-but-quantised", "backend", None, None, None)]
    for one in report.backends:
        stops = one.name.startswith("vllm") or one.name == "tensorrt-llm"
        assert one.outcome == ("load-error" if stops else "safe")
        assert one.possible == (("load-error", "safe") if one.name == "tensorrt-llm" else ())
    # One that names another module stops nothing.
    head = audit(layout.open({**layout.tensors(), **linear("lm_head")}))
    assert found(head) == [("config.excluded-but-quantised", "warn", None, None, None)]
    assert set(outcomes(head).values()) == {"safe"}
    # What a load does with it was not read, and so the table does not say that it is known.
    assert {one.possible for one in head.backends} == {("load-error", "safe")}
    assert all("lm_head" in one.why for one in head.backends)
    assert {one.possible for one in audit(layout.open()).backends if one.text != NARROW} == {()}


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "W4A16"])
def test_a_warning_about_ordinary_modules_leaves_the_forecast_open(id):
    """Attention in BF16 that nothing leaves out: its code may build it so, or as vLLM does, by the list."""
    layout, name = LAYOUTS[id], "model.layers.0.self_attn.q_proj"
    healthy = audit(layout.open())
    report = audit(layout.open({**layout.tensors(), f"{name}.weight": bf16(64, 64)}))
    assert [(item.code, item.severity) for item in report.findings if item.severity != "info"] == [
        ("config.unquantised-not-excluded", "warn")
    ]
    for one, before in zip(report.backends, healthy.backends, strict=True):
        quantised = before.outcome == "safe" and one.name.startswith("vllm-")
        assert one.outcome == ("load-error" if quantised else before.outcome)
        assert (one.scope == "model") == (one.outcome != "safe")
        if before.outcome == "safe":
            assert one.possible == ("load-error", "safe")
            assert before.possible == (("safe", "unsupported") if before.text == NARROW else ())
            assert name in one.why
            for language in ("en", "zh"):
                assert "{" not in describe(one, language)[0]
    # Beside another fault a load that goes through is not safe, and where it is not forecast to stop that speaks alone.
    lost = layout.name(3, "down", "weight_scale_2")
    tensors = {each: item for each, item in layout.tensors().items() if each != lost}
    worse, alone = (
        audit(layout.open({**tensors, **more})) for more in ({f"{name}.weight": bf16(64, 64)}, {})
    )  # fmt: skip
    for one, before in zip(worse.backends, alone.backends, strict=True):
        if one.name.startswith("vllm-") and before.outcome != "unsupported":
            assert one.outcome == "load-error"
            assert set(one.possible) == {"load-error", *(before.possible or (before.outcome,))}
        else:
            assert (one.outcome, one.possible) == (before.outcome, before.possible)


def test_other_methods_lists_know_no_parts():
    section = {"quant_method": "compressed-tensors", "ignore": ["model.layers.1", "re:.*gate$"]}
    layout = LAYOUTS["compressed-tensors"]
    names = layout.tensors()
    tensors = {name.replace("layers.0", "layers.10"): item for name, item in names.items()}
    config = with_quant({**section_of(layout), **section}, num_hidden_layers=11)
    report = audit(layout.open({**tensors, **names}, config=config))
    assert "config.excluded-but-quantised" not in {code for code, *_ in found(report)}


# Tensors in FP8 that the configuration calls four-bit.


@pytest.mark.parametrize("id", ["modelopt", "W4A16", "compressed-tensors", "Quark", "Quark NVFP4", "ModelOpt MXFP4"])
def test_attention_in_fp8_that_nobody_excluded(id):
    layout = LAYOUTS[id]
    name = "model.layers.0.self_attn.q_proj"
    tensors = {**layout.tensors(), **fp8(name)}
    report = audit(layout.open(tensors))
    assert found(report) == [("config.conflict", "error", None, None, None)]
    assert report.findings[0].tensors == (name,)
    assert "safe" not in outcomes(report).values()
    excluded = audit(layout.open(tensors, **excluding(layout, name)))
    assert "error" not in {severity for _, severity, *_ in found(excluded)}


@pytest.mark.parametrize("id", ["DeepSeek V4", "DeepSeek V4, three formats", "gpt-oss"])
def test_attention_in_fp8_where_that_is_said_or_nothing_is(id):
    layout = LAYOUTS[id]
    tensors = {**layout.tensors(), **fp8("model.layers.0.self_attn.q_proj")}
    assert found(audit(layout.open(tensors))) == []


def test_attention_in_fp8_that_an_allow_list_leaves_out():
    """What it does not name servers build unquantised, and the scales fit nothing."""
    layout = LAYOUTS["MIXED_PRECISION"]
    name = "model.layers.0.self_attn.q_proj"
    report = audit(layout.open({**layout.tensors(), **fp8(name)}))
    assert found(report) == [("config.conflict", "error", None, None, None)]
    assert report.findings[0].tensors == (name,)


@pytest.mark.parametrize("name", ["model.visual.blocks.0.attn.q_proj", "lm_head", "model.embed_tokens"])
def test_towers_and_heads_in_fp8_are_not_asked(name):
    layout = LAYOUTS["modelopt"]
    tensors = {**layout.tensors(), **fp8(name)}
    assert found(audit(layout.open(tensors, quant=modelopt(exclude=("*mlp.gate",))))) == []


def fp8_layer(layer=0):
    out = {}
    for expert in range(EXPERTS):
        for kind in ("gate", "up", "down"):
            module = f"{MLP.replace('0', str(layer))}.{expert}.{kind}_proj"
            out[f"{module}.weight"] = typed(np.full(SIZES[kind], 0x38, np.uint8), "F8_E4M3")
            out[f"{module}.weight_scale"] = tensor(np.float32(0.01))
            out[f"{module}.input_scale"] = tensor(np.float32(0.02))
    return out


def test_experts_in_fp8_that_the_configuration_calls_nvfp4():
    layout = LAYOUTS["modelopt"]
    for quant, expected in (
        (modelopt(), [("config.conflict", "error", None, None, None)]),
        (modelopt("FP8"), []),
        (modelopt(exclude=(f"{MLP}*",)), []),
    ):
        assert found(audit(layout.open(fp8_layer(), quant=quant))) == expected
    two = {**CONFIG, "num_hidden_layers": 2}
    tensors = {**layout.tensors(), **fp8_layer(1)}
    report = audit(layout.open(tensors, config=two))
    assert found(report) == [("config.conflict", "error", 1, None, None)]
    assert set(outcomes(report).values()) == {"load-error"}
    second = MLP.replace("0", "1")
    for allowed in ({second: {"quant_algo": "FP8"}}, {}):
        quant = modelopt("MIXED_PRECISION", exclude=(), quantized_layers={**ALLOWED, **allowed})
        assert found(audit(layout.open(tensors, config=two, quant=quant))) == []


# Allow-lists.


@pytest.mark.parametrize("algo", ["NVFP4", "FP8"])
def test_listed_and_not_quantised(algo):
    layout, name = LAYOUTS["MIXED_PRECISION"], "model.layers.0.self_attn.q_proj"
    quant = modelopt("MIXED_PRECISION", exclude=(), quantized_layers={**ALLOWED, name: {"quant_algo": algo}})
    plain = {**layout.tensors(), f"{name}.weight": bf16(HIDDEN, HIDDEN)}
    assert found(audit(layout.open(plain, quant=quant))) == [
        ("config.unquantised-not-excluded", "warn", None, None, None)
    ]
    assert found(audit(layout.open(plain))) == []
    # Both of ModelOpt's have a stored activation scale.
    eight = {**fp8(name), f"{name}.input_scale": linear(name)[f"{name}.input_scale"]}
    stored = {**layout.tensors(), **(linear(name) if algo == "NVFP4" else eight)}
    assert found(audit(layout.open(stored, quant=quant))) == []


def test_an_allow_list_that_is_none():
    """vLLM's `ModelOptMixedPrecisionConfig` raises an error; what the groups say is not read."""
    layout = LAYOUTS["MIXED_PRECISION"]
    groups = {"group_0": {**FLAT["config_groups"]["group_0"], "targets": [MLP]}}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "config_groups": groups, "ignore": []}
    for config, quant in (
        (with_quant(section), None),
        (with_quant({**section, "quantized_layers": {}}), None),
        (CONFIG, modelopt("MIXED_PRECISION", exclude=(), quantized_layers={})),
    ):
        report = audit(layout.open(config=config, quant=quant))
        assert found(report) == [("config.incomplete", "backend", None, None, None)]
        assert "quantized_layers" in report.findings[0].message
        assert outcomes(report)["vllm-cutlass"] == "load-error"
        assert outcomes(report)["transformers"] == "safe"


@pytest.mark.parametrize("value", [None, "lm_head", {"lm_head": True}])
def test_an_exclude_list_that_is_none(value):
    """vLLM's `from_config` raises an error at it."""
    nested = {"quantization": {**QUANT["quantization"], "exclude_modules": value}}
    flat = {**FOUR, "quantization_config": {**FLAT, "ignore": value}}
    for checkpoint, field in (
        (opened(base(), FOUR, nested), "exclude_modules"),
        (opened(base(), flat, None), "ignore"),
    ):
        report = audit(checkpoint)
        assert found(report) == [("config.incomplete", "backend", None, None, None)]
        assert field in report.findings[0].message
    empty = {**FOUR, "quantization_config": {key: item for key, item in FLAT.items() if key != "ignore"}}
    assert found(audit(opened(base(), empty, None))) == []


# Which file is whose.


def test_the_older_file_is_modelopts():
    layout = LAYOUTS["ModelOpt MXFP4"]
    body = {"quant_algo": "MXFP4", "kv_cache_quant_algo": None, "group_size": 32, "exclude_modules": ["*gate"]}
    report = audit(layout.open(config=CONFIG, quant={"quantization": body}))
    assert (report.format.dialect, codes(report)) == ("modelopt", [])


def test_modelopts_file_does_not_ask_for_deepseeks_experts_type():
    config = {**CONFIG, "expert_dtype": "fp4", "quantization_config": FLAT}
    assert codes(audit(LAYOUTS["modelopt"].open(config=config, quant=None))) == []


@pytest.mark.parametrize(
    ("section", "sound"),
    [
        ({"bits": 4, "data_type": "nv_fp", "group_size": 16, "act_bits": 4}, True),
        ({"bits": 4, "data_type": "nv_fp4_with_static_gs", "group_size": 16}, True),
        ({"bits": 4, "data_type": "int", "group_size": 16}, False),
        ({"bits": 8, "data_type": "fp"}, False),
        ({"bits": 4, "data_type": "int", "extra_config": {"experts": {"data_type": "nv_fp"}}}, True),
    ],
)
def test_auto_round(section, sound):
    report = audit(LAYOUTS["compressed-tensors"].open(config=with_quant({"quant_method": "auto-round", **section})))
    assert found(report) == ([] if sound else [("config.conflict", "error", None, None, None)])


# Numbers that only the layers say.


@pytest.mark.parametrize("config", [None, {"num_hidden_layers": 2}])
def test_experts_that_other_layers_have(config):
    """Without a word of the configuration a layer has as many experts as the largest (checkpoints.md 5, rule 2)."""
    tensors = base(2, experts=8)
    whole = audit(opened(tensors, config, QUANT))
    assert found(whole) == []
    short = {name: item for name, item in tensors.items() if "layers.1.mlp.experts.7." not in name}
    assert found(audit(opened(short, config, QUANT))) == [("expert.absent", "error", 1, None, (7,))]
    # A router has a row for each expert that is kept.
    short |= {"model.layers.1.mlp.gate.weight": bf16(7, 32)}
    own = {"num_hidden_layers": 2, "block_configs": [{"num_local_experts": 8}, {"num_local_experts": 7}]}
    assert found(audit(opened(short, own, QUANT))) == []
    # ModelOpt's Puzzletron writes it further down.
    deep = {"num_hidden_layers": 2, "block_configs": [{"ffn": {"moe": {"num_local_experts": at}}} for at in (8, 7)]}
    assert found(audit(opened(short, deep, QUANT))) == []
    deep["block_configs"][1] = {"ffn": {"moe": {"num_local_experts": 8}}}
    assert found(audit(opened(short, deep, QUANT))) == [("expert.absent", "error", 1, None, (7,))]

    listed = {"num_hidden_layers": 2, "num_experts": [8, 7]}
    # HunYuan's list of a number for each layer.
    assert found(audit(opened(short, listed, QUANT))) == []
    every = audit(opened(short, {**listed, "num_experts": [8, 8]}, QUANT))
    assert found(every) == [("expert.absent", "error", 1, None, (7,))]
    # ERNIE's is by modality, and says nothing of layers.
    assert found(audit(opened(tensors, {"num_hidden_layers": 2, "moe_num_experts": [8, 4]}, QUANT))) == []


def test_draft_layers_of_two_namings_are_two():
    """`mtp.0` and the layer past the last are not one."""
    tensors = base() | {
        name.replace("model.layers.0", head): item
        for head in ("mtp.0", "model.layers.1")
        for name, item in base().items()
        if ".experts." in name
    }
    checkpoint = opened(tensors)
    assert len(canonical(checkpoint).draft_layers) == 2
    assert found(audit(checkpoint)) == []
    del tensors["mtp.0.mlp.experts.2.up_proj.input_scale"]
    report = audit(opened(tensors))
    assert [item.tensors for item in report.findings] == [("mtp.0.mlp.experts.2.up_proj.input_scale",)]


def test_an_allow_list_with_blocks_of_another_width():
    layout, kinds = LAYOUTS["MIXED_PRECISION"], ("NVFP4", "W4A8_NVFP4_FP8")
    for algo in kinds:
        for size, alarms in ((16, []), (32, [("config.conflict", "error", None, None, None)])):
            listed = {**ALLOWED, MLP: {"quant_algo": algo, "group_size": size}}
            report = audit(layout.open(quant=modelopt("MIXED_PRECISION", exclude=(), quantized_layers=listed)))
            assert found(report) == alarms
            assert ("32" in "".join(item.message for item in report.findings)) == bool(alarms)


def test_three_formats_whose_list_forgets_a_layer_name_that_layer():
    """DeepSeek's method beside NVFP4 experts: what `expert_dtype` calls a forgotten layer is what is wrong."""
    layout = LAYOUTS["DeepSeek V4, three formats"]
    section = {key: value for key, value in section_of(layout).items() if key != "moe_quant_algo"}
    for listed, alarms in (({"layers.0.ffn.experts": {"quant_algo": "NVFP4"}}, 0), ({"layers.7.ffn": {}}, 1)):
        inner = {**section, "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
        report = audit(layout.open(**with_section(layout, inner, expert_dtype="fp4")))
        assert codes(report) == [("config.conflict", "error")] * alarms
        assert all("MXFP4" in item.message and "NVFP4" in item.message for item in report.findings)


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "fused"])
def test_every_excluded_module_is_counted(id):
    """One of each kind is asked for its name; all experts of the layer are stored quantised."""
    layout = LAYOUTS[id]
    quant = layout.quant and {
        **layout.quant,
        "quantization": {**layout.quant["quantization"], "exclude_modules": ["*"]},
    }
    config = layout.config
    if quant is None:
        config = {**config, "quantization_config": {**config["quantization_config"], "ignore": ["re:.*experts.*"]}}
    [item] = [
        one for one in audit(layout.open(config=config, quant=quant)).findings
        if one.code == "config.excluded-but-quantised"
    ]  # fmt: skip
    whole = layout.arrangement != "expert"
    assert item.count == len(layout.kinds) * (1 if whole else EXPERTS)
    assert str(item.count) in item.message


ENDLESS = r"re:^(?:(.+?)(?!\1))+$(?<=[A-Z])"


def targets(*expressions):
    group = {"weights": {"num_bits": 4, "type": "float"}, "targets": ["Linear", *expressions]}
    return {"config": {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": group}}}}


@pytest.mark.parametrize(
    "change",
    [
        lambda expression: excluding(LAYOUTS["modelopt"], expression),
        lambda expression: excluding(LAYOUTS["compressed-tensors"], expression),
        lambda expression: targets(expression),
    ],
    ids=["exclude list", "ignore list", "targets"],
)
def test_an_expression_without_end_is_given_up(change, monkeypatch):
    """One in a stranger's configuration would hang the audit and the page; what it means is then nobody's word."""
    layout = LAYOUTS["modelopt"]
    monkeypatch.setattr(Expression, "ONE", 0.05)
    compiled.cache_clear()
    report = audit(layout.open(**change(ENDLESS)))
    [item] = [item for item in report.findings if item.text == "audit.partial.expression"]
    assert (item.severity, item.count) == ("info", 1)
    assert ENDLESS in item.message
    # One that ends, and one that is no expression at all, are nothing to speak of.
    for harmless in (r"re:.*lm_head", "re:("):
        assert "audit.partial.expression" not in [item.text for item in audit(layout.open(**change(harmless))).findings]


@pytest.mark.parametrize("place", ["ignore", "targets"])
def test_an_expression_that_is_none_stops_a_load(place):
    """compressed-tensors' matching calls `re.match` with it as soon as no pattern before it has matched."""
    layout = LAYOUTS["compressed-tensors"]
    section = layout.config["quantization_config"]

    def report_of(*patterns):
        if place == "ignore":
            change = {"ignore": [*section["ignore"], *patterns]}
        else:
            group = section["config_groups"]["group_0"]
            change = {"config_groups": {"group_0": {**group, "targets": ["Linear", *patterns]}}}
        return audit(layout.open(config={**layout.config, "quantization_config": {**section, **change}}))

    sound = report_of("re:.*lm_head$", "re:.*[[:alpha:]]nothing")
    assert found(sound) == []
    report = report_of("re:(unclosed", "re:*")
    assert found(report) == [("config.invalid", "backend", None, None, None)]
    [item] = [one for one in report.findings if one.code == "config.invalid"]
    assert (item.text, item.count) == ("config.invalid.expression", 2)
    for language in ("en", "zh"):
        assert "re:(unclosed" in describe(item, language)[0]
    [one] = [item for item in report_of("re:*").findings if item.code == "config.invalid"]
    assert "holds 1 regular expression that does not compile" in one.message
    before, after = outcomes(sound), outcomes(report)
    assert {name for name in after if after[name] != before[name]} == {
        name for name in after if name.startswith(("vllm", "sglang"))
    }
    # ModelOpt's lists are wildcards: nobody compiles them.
    assert found(audit(LAYOUTS["modelopt"].open(**excluding(LAYOUTS["modelopt"], "re:(unclosed")))) == []


def test_many_slow_names_are_one_slow_expression(monkeypatch):
    """Each within its time, all of them together not."""
    monkeypatch.setattr(Expression, "USUAL", 0.0)
    monkeypatch.setattr(Expression, "ALL", 1e-4)
    expression = Expression("a+")
    answers = [expression.match("aaa") for _ in range(1000)]
    assert answers[0]
    assert expression.too_slow
    assert not answers[-1]


def test_an_expression_is_not_given_up_because_the_machine_is_busy(monkeypatch):
    """A process that waits its turn again and again for hours is not one that computes for a second."""

    class Waiting:
        def match(self, name, timeout):
            sleep(0.002)
            return name if name == "a" else None

    monkeypatch.setattr(Expression, "ALL", 0.05)
    expression = Expression("a")
    expression._pattern = Waiting()
    assert [expression.match(name) for name in ("a", "b") * 50] == [True, False] * 50
    assert not expression.too_slow


@pytest.mark.parametrize("layout", LISTED, ids=[layout.id for layout in LISTED])
def test_a_draft_layer_whose_experts_are_named_one_by_one(layout):
    """As exporters write a list out in full, and as it counts in the model's own layers."""
    weights = [layout.name(e, kind, "weight") for e in range(EXPERTS) for kind in layout.kinds]
    own = [name.removesuffix(f".{layout.suffixes['weight']}") for name in weights]
    named = [name.replace(layout.prefix, "mtp.layers.0.mlp.experts") for name in own]
    sizes = [SIZES[kind] for _ in range(EXPERTS) for kind in layout.kinds]
    drafted = {f"{name}.weight": bf16(*size) for name, size in zip(named, sizes, strict=True)}
    tensors = {**layout.tensors(), **drafted}

    def said(*names):
        report = audit(layout.open(tensors, **excluding(layout, *names)))
        return {item.text for item in report.findings if item.code not in layout.notes}

    assert said(*named) == said("mtp*") == {"draft.unquantised"}
    short = {"draft.unquantised", "config.unquantised-not-excluded.draft"}
    assert said() == said(*named[1:]) == short


@pytest.mark.parametrize("pattern", ["*mlp.experts*", MLP, "re:.*mlp\\.experts.*"])
@pytest.mark.parametrize("sidecar", [False, True])
def test_vllm_asks_the_exclude_list_before_the_allow_list(pattern, sidecar):
    """An allow-list that names the experts, beside an exclude list that names them too."""
    layout = LAYOUTS["MIXED_PRECISION"]
    section = section_of(layout)
    key = "exclude_modules" if sidecar else "ignore"
    section = {**{name: item for name, item in section.items() if name != "exclude_modules"}, key: ["lm_head", pattern]}
    flat = {"config": {**layout.config, "quantization_config": {**section, "quant_method": "modelopt"}}, "quant": None}
    report = audit(layout.open(layout.tensors(), **({"quant": {"quantization": section}} if sidecar else flat)))
    assert codes(report) == [("config.excluded-but-quantised", "backend")]
    for one in report.backends:
        vllm = one.name.startswith("vllm")
        assert (one.outcome, one.possible) == ("load-error" if vllm else "safe", ()) or one.text == NARROW, one.name


@pytest.mark.parametrize("algo", ["FP8", "W4A16_NVFP4", "NVFP4", ""])
def test_an_allow_list_beside_one_name_for_everything_says_nothing(algo):
    """Only MIXED_PRECISION reads it: the file is to every loader what it would be without the list."""
    layout = LAYOUTS["MIXED_PRECISION"]
    section = {**section_of(layout), "quant_algo": algo}
    alone = {key: item for key, item in section.items() if key != "quantized_layers"}
    listed, plain = (audit(layout.open(**with_section(layout, each))) for each in (section, alone))
    assert (listed.findings, listed.backends, listed.format) == (plain.findings, plain.backends, plain.format)
    expected = {"FP8": ("config.conflict", "error"), "W4A16_NVFP4": ("config.conflict", "warn")}
    assert {expected[algo]} <= {*codes(listed)} if algo in expected else codes(listed)


@pytest.mark.parametrize("tail", ["3*", "3.up_proj"])
def test_an_expert_that_both_lists_of_a_mixed_file_name(tail):
    """vLLM asks for the layer as a whole and never notices; a loader that asks for each module does."""
    layout = LAYOUTS["MIXED_PRECISION"]
    names = [layout.name(e, kind, "weight").removesuffix(".weight") for e in range(EXPERTS) for kind in layout.kinds]
    section = section_of(layout)
    others = {name: item for name, item in section["quantized_layers"].items() if name != MLP}
    listed = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names}
    both = {**section, "exclude_modules": [f"{MLP}.{tail}"], "quantized_layers": {**listed, **others}}
    report = audit(layout.open(**with_section(layout, both)))
    assert found(report) == [("config.excluded-but-quantised", "warn", 0, None, (3,))]
    assert codes(audit(layout.open(**with_section(layout, {**both, "exclude_modules": ["lm_head"]})))) == []


@pytest.mark.parametrize("id", ["W4A16", "NVFP4_AWQ"])
@pytest.mark.parametrize("experts", [(0,), (1, 5)])
def test_a_backend_that_is_refused_never_gets_to_the_tensors(id, experts):
    """Experts in BF16 beside a four-bit label stop a load, where somebody loads them."""
    layout = LAYOUTS[id]
    healthy, broken = (
        outcomes(audit(layout.open(tensors))) for tensors in (layout.tensors(), in_bf16(layout, *experts))
    )
    refused = {name for name, outcome in healthy.items() if outcome == "unsupported" and name.startswith("vllm")}
    assert refused
    assert {name for name, outcome in broken.items() if outcome == "unsupported"} == refused
    assert {outcome for name, outcome in broken.items() if name not in refused} == {"load-error"}
