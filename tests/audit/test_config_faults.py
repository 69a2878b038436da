"""Configuration against tensors: what the matrix cannot show, and the sound twin of every contradiction in it."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import tensor
from tests.audit.config_faults import (
    CONFIG_FAULTS,
    Case,
    _listing_second,
    _second,
    exclude_key,
    section_of,
    shared,
    with_section,
)
from tests.audit.families import FAMILIES
from tests.audit.layouts import (
    ALLOWED,
    DSV4_QUANT,
    EXPERTS,
    HIDDEN,
    LAYOUTS,
    MLP,
    QUARK_QUANT,
    SIZES,
    TWO_LEVELS,
    WIDTH,
    bf16,
    linear,
    modelopt,
    mx_draft,
    packed,
    with_quant,
)
from tests.audit.reading import found, outcomes
from tests.audit.test_families import changed
from tests.checkpoint.checkpoint_fixtures import CONFIG as FOUR
from tests.checkpoint.checkpoint_fixtures import QUANT, base, opened

CASES = [
    pytest.param(layout, case, id=f"{layout.id}-{fault}")
    for layout in LAYOUTS.values()
    for fault, build in CONFIG_FAULTS.items()
    if isinstance(case := build(layout), Case)
]


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_severity_and_forecast_agree(layout, case):
    """An error stops every load, ``backend`` some, and a warning none that is not asked for the draft layer."""
    report = case.report(layout)
    worst = max(("info", "warn", "backend", "error").index(severity) for _, severity, *_ in case.expected)
    stopped = {name for name, outcome in outcomes(report).items() if outcome == "load-error"}
    served = {name for name, outcome in outcomes(report).items() if outcome == "safe"}
    # What a scheme has no path for is unsupported, whatever the file is like.
    if worst == 3:
        assert stopped
        assert not served
    elif worst == 2:
        assert stopped
        assert served
    else:
        assert not stopped
        assert served == {name for name, outcome in outcomes(audit(layout.open())).items() if outcome == "safe"}
    for item in report.findings:
        for language in ("en", "zh"):
            message, advice = describe(item, language)
            assert message
            assert advice or item.severity == "info"
            assert "{" not in message + advice


# Of Inkling only the second-level scale's name is public.
PUBLIC = [layout for layout in LAYOUTS.values() if layout.id != "Inkling"]

# Sound twins: everything as in the faults, and no contradiction.


def silent(layout, tensors, **changes):
    report = audit(layout.open(tensors, **changes))
    return sorted(item.code for item in report.findings) == sorted(layout.notes)


@pytest.mark.parametrize("layout", PUBLIC, ids=[layout.id for layout in PUBLIC])
def test_a_sound_draft_layer_in_every_layout(layout):
    tensors = {**layout.tensors(), **_second(layout)}
    if layout.id == "DeepSeek V4, three formats":
        tensors = layout.tensors()
    assert silent(layout, tensors, **with_section(layout, _listing_second(layout)))


@pytest.mark.parametrize("layout", PUBLIC, ids=[layout.id for layout in PUBLIC])
def test_a_sound_second_layer_of_which_no_size_is_configured(layout):
    section = _listing_second(layout)
    tensors = {name: item for name, item in layout.tensors().items() if not name.startswith("mtp.")}
    for changes in ({"hidden_size": None}, {"hidden_size": None, "moe_intermediate_size": None}, {}):
        both = {**tensors, **_second(layout)}
        assert silent(layout, both, **with_section(layout, section, num_hidden_layers=2, **changes))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("how", ["n_shared_experts", "shared_expert_intermediate_size", None])
def test_a_sound_shared_expert(layout, how):
    """Twice as wide where the configuration says so, or where it does not speak of shared experts."""
    parent = layout.prefix.rpartition(".")[0]
    tensors = layout.tensors()
    # A family without gates has none in its shared expert either.
    for disk in ("gate_proj", "up_proj", "down_proj")[layout.id == "non-gated" :]:
        tensors |= shared(layout, f"{parent}.shared_experts.{disk}", 64, 64)
    section = section_of(layout)
    key = exclude_key(section)
    quantised = "shared_experts.up_proj.weight_scale" in " ".join(tensors)
    if key is not None and not quantised and "quantized_layers" not in section:
        section[key] = [*section[key], "*shared_experts*", f"{parent}.shared_experts"]
    if quantised and "quantized_layers" in section:
        named = {f"{parent}.shared_experts": {"quant_algo": layout.block, "group_size": 16}}
        section["quantized_layers"] = {**section["quantized_layers"], **named}
    told = {} if how is None else {how: 2 if how == "n_shared_experts" else 2 * WIDTH}
    assert silent(layout, tensors, **with_section(layout, section, **told))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_sound_number_of_experts(layout):
    router = layout.prefix.rpartition(".")[0] + ".gate.weight"
    assert silent(layout, {**layout.tensors(), router: bf16(EXPERTS, HIDDEN)})


# Quark's labels (vLLM's quark.py: an entry by pattern, else the global one).


def quark(**section):
    return with_quant({**QUARK_QUANT, **section})


def weight(dtype, **more):
    return {"weight": {"dtype": dtype, "group_size": 32, **more}, "input_tensors": {"dtype": dtype}}


FP4 = weight("fp4")
QUARKS = [id for id, layout in LAYOUTS.items() if layout.dialect == "quark" and layout.block == "MXFP4"]
SOUND_QUARK = {
    "attention in FP8": {"layer_quant_config": {"*self_attn*": weight("fp8_e4m3"), "lm_head": weight("int8")}},
    "experts by pattern": {"global_quant_config": weight("fp8_e4m3"), "layer_quant_config": {"*mlp.experts*": FP4}},
    "experts by expression of one": {
        "global_quant_config": weight("fp8_e4m3"), "layer_quant_config": {f"{MLP}.0.down_proj": FP4},
    },
    "experts of a language model": {
        "global_quant_config": weight("int8"), "layer_quant_config": {f"model.language_model.{MLP[6:]}*": FP4},
    },
    "nothing said": {"global_quant_config": {}},
    "no section": {"global_quant_config": None},
    "by class of module": {"global_quant_config": weight("int8"), "layer_type_quant_config": {"MoE": FP4}},
    "activations in FP8": {"global_quant_config": {**FP4, "input_tensors": {"dtype": "fp8_e4m3"}}},
}  # fmt: skip
WRONG_QUARK = {
    "fp8": {"global_quant_config": weight("fp8_e4m3")},
    "int4": {"global_quant_config": weight("int4")},
    "int8": {"global_quant_config": weight("int8")},
    "fp6": {"global_quant_config": weight("fp6_e2m3")},
    "uint4": {"global_quant_config": weight("uint4")},
    "int4 below fp8": {"global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}},
    "NVFP4": {"global_quant_config": {"weight": TWO_LEVELS, "input_tensors": TWO_LEVELS}},
    "experts by pattern": {"layer_quant_config": {"*experts*": weight("fp8_e4m3")}},
    "one projection": {"layer_quant_config": {"*.down_proj": weight("int8")}},
}  # fmt: skip


@pytest.mark.parametrize("id", QUARKS)
@pytest.mark.parametrize("wrong", WRONG_QUARK)
def test_quark_labels_that_contradict_the_tensors(id, wrong):
    report = audit(LAYOUTS[id].open(config=quark(**WRONG_QUARK[wrong])))
    assert found(report) == [("config.conflict", "error", None, None, None)]
    assert report.findings[0].text == "config.conflict.format"


@pytest.mark.parametrize("id", QUARKS)
@pytest.mark.parametrize("sound", SOUND_QUARK)
def test_quark_labels_of_these_tensors(id, sound):
    assert found(audit(LAYOUTS[id].open(config=quark(**SOUND_QUARK[sound])))) == []


def test_quarks_nvfp4_is_not_its_mxfp4():
    layout = LAYOUTS["Quark NVFP4"]
    assert found(audit(layout.open(config=with_quant(QUARK_QUANT)))) == [("config.conflict", "error", None, None, None)]
    # A calibrated model whose scales are called as ModelOpt calls them.
    renamed = {name.replace("input_scale_2", "input_scale"): item for name, item in layout.tensors().items()}
    assert found(audit(layout.open(renamed))) == []
    attention = {f"{name}_2" if name.endswith("input_scale") else name: item for name, item in linear("model.layers.0.self_attn.o_proj").items()}  # fmt: skip  # noqa: E501
    assert found(audit(layout.open({**layout.tensors(), **attention}))) == []
    del attention["model.layers.0.self_attn.o_proj.input_scale_2"]
    report = audit(layout.open({**layout.tensors(), **attention}))
    assert found(report) == [("scale.missing", "backend", 0, None, None)]
    assert report.findings[0].tensors == ("model.layers.0.self_attn.o_proj.input_scale_2",)


# compressed-tensors: which group means the experts (vLLM's find_matched_target).

PACKED = [id for id, layout in LAYOUTS.items() if layout.dialect == "compressed-tensors"]


def targets(layout, *names, **more):
    section = section_of(layout)
    group = {**section["config_groups"]["group_0"], "targets": list(names), **more}
    return {"config": {**layout.config, "quantization_config": {**section, "config_groups": {"group_0": group}}}}


@pytest.mark.parametrize("id", PACKED)
@pytest.mark.parametrize(
    "names",
    [
        ["re:.*self_attn.*"], ["re:.*shared_expert.*"], ["lm_head"], ["Attention"], ["Embedding"], [],
        ["re:.*layers\\.7\\..*"], ["model.layers.0.mlp"],
    ],
)  # fmt: skip
def test_targets_that_miss_the_experts(id, names):
    layout = LAYOUTS[id]
    report = audit(layout.open(**targets(layout, *names)))
    assert found(report) == [("config.conflict", "error", None, None, None)]
    assert report.findings[0].text == "config.conflict.untargeted"
    assert layout.prefix in report.findings[0].message


@pytest.mark.parametrize("id", PACKED)
@pytest.mark.parametrize(
    "names",
    [
        ["Linear"], ["re:.*experts.*"], ["re:.*layers\\.0\\..*"], ["re:.*\\.gate_proj$", "re:.*(up|down)_proj$"],
        ["FusedMoE"], ["Qwen3MoeExperts"], ["re:.*self_attn.*", "Linear"], ["re:model.*.experts"],
        ["re:language_model\\.model\\.layers.*experts.*"],
    ],
)  # fmt: skip
def test_targets_that_mean_the_experts(id, names):
    layout = LAYOUTS[id]
    assert found(audit(layout.open(**targets(layout, *names)))) == []


@pytest.mark.parametrize("id", PACKED)
def test_targets_by_name(id):
    layout = LAYOUTS[id]
    every = [f"{layout.prefix}.{e}.{disk}" for e in range(EXPERTS) for disk in layout.disk.values()]
    assert found(audit(layout.open(**targets(layout, *every)))) == []
    without = [name for name in every if "down" not in name]
    assert found(audit(layout.open(**targets(layout, *without)))) == [("config.conflict", "error", None, None, None)]


def test_groups_of_two_four_bit_formats():
    """MXFP4 experts beside NVFP4 attention and the reverse: each group speaks for its own modules."""
    four, small = packed()["config_groups"]["group_0"], packed(group=32, activations=False)["config_groups"]["group_0"]
    experts, attention = ["re:.*experts.*"], ["re:.*self_attn.*"]
    for id, own, other in (("compressed-tensors MXFP4", small, four), ("compressed-tensors", four, small)):
        layout = LAYOUTS[id]
        for groups in (
            {"a": {**other, "targets": attention}, "b": {**own, "targets": experts}},
            {"a": {**own, "targets": ["Linear"]}, "b": {**other, "targets": attention}},
            {"a": {**other, "targets": ["Linear"]}, "b": {**own, "targets": experts}},
        ):
            section = {**section_of(layout), "format": "mixed-precision", "config_groups": groups}
            assert found(audit(layout.open(config=with_quant(section)))) == []
        section = {**section_of(layout), "config_groups": {"a": {**other, "targets": experts}}}
        assert found(audit(layout.open(config=with_quant(section)))) == [("config.conflict", "error", None, None, None)]


def test_weight_only_experts_beside_w4a4_attention():
    layout = LAYOUTS["compressed-tensors W4A16"]
    four = packed()["config_groups"]["group_0"]
    groups = {
        "a": {**four, "targets": ["re:.*self_attn.*"]},
        "b": {**four, "input_activations": None, "targets": ["re:.*experts.*"]},
    }
    section = {**section_of(layout), "config_groups": groups}
    assert silent(layout, layout.tensors(), config=with_quant(section))
    groups["b"] = {**four, "targets": ["re:.*experts.*"]}
    report = audit(layout.open(config=with_quant({**section, "config_groups": groups})))
    assert [code for code, *_ in found(report)] == ["scheme.mislabelled"]


def test_no_groups_at_all():
    layout = LAYOUTS["compressed-tensors"]
    for groups in ({}, None):
        section = {**section_of(layout), "config_groups": groups}
        report = audit(layout.open(config=with_quant(section)))
        assert found(report) == [("config.conflict", "error", None, None, None)]


# Draft layers.


def test_deepseeks_own_draft_experts_stay_as_they_were():
    """NVIDIA's DeepSeek V4: the model's experts in NVFP4, the draft's still in MXFP4, whatever names them."""
    layout = LAYOUTS["DeepSeek V4, three formats"]
    for section in (
        {**DSV4_QUANT, "moe_quant_algo": "NVFP4"},
        {**DSV4_QUANT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {layout.prefix: {"quant_algo": "NVFP4"}}},
        {**DSV4_QUANT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"*.ffn.experts": {"quant_algo": "NVFP4"}}},
    ):
        for dtype in ({}, {"expert_dtype": "fp4"}):
            assert found(audit(layout.open(config=with_quant(section, **dtype)))) == []


@pytest.mark.parametrize("block", ["mtp.layers.0.mlp.experts", "mtp.0.mlp.experts", "model.layers.1.mlp.experts"])
def test_a_quantised_draft_of_an_allow_list(block):
    layout = LAYOUTS["MIXED_PRECISION"]
    tensors = {**layout.tensors()} | {
        name.replace(MLP, block): item for name, item in layout.tensors().items() if name.startswith(MLP)
    }
    for listed, expected in (
        ({block: {"quant_algo": "NVFP4"}}, None),
        ({f"model.{block}": {"quant_algo": "NVFP4"}}, None),
        ({}, "config.conflict.left-out.draft"),
        ({block: {"quant_algo": "FP8"}}, "config.conflict.format.draft"),
    ):
        quant = modelopt("MIXED_PRECISION", exclude=(), quantized_layers={**ALLOWED, **listed})
        report = audit(layout.open(tensors, quant=quant))
        assert [item.text for item in report.findings] == ([expected] if expected else [])
        assert set(outcomes(report).values()) == {"safe"}
        if expected:
            assert block in report.findings[0].message


# DeepSeek V4 under a foreign method, or with experts called something else.


NAMED_WRONG = [("config.conflict", "error", None, None, None)]


@pytest.mark.parametrize("id", ["DeepSeek V4", "DeepSeek V4, U8"])
@pytest.mark.parametrize(
    ("section", "dtype"),
    [
        ({"quant_method": "awq", "bits": 4}, "fp4"), ({"quant_method": "gptq", "bits": 4}, "fp4"),
        ({"quant_method": "bitsandbytes"}, "fp4"), ({"quant_method": "compressed-tensors"}, "fp4"),
        (DSV4_QUANT, "int4"), (DSV4_QUANT, "fp8"), (DSV4_QUANT, "int8"), (DSV4_QUANT, "bf16"),
    ],
)  # fmt: skip
def test_deepseek_v4_called_something_else(id, section, dtype):
    layout = LAYOUTS[id]
    config = with_quant(section, expert_dtype=dtype)
    assert found(audit(layout.open(config=config))) == NAMED_WRONG
    # The draft layer's experts beside them are called the same by the same word.
    assert found(audit(layout.open({**layout.tensors(), **mx_draft()}, config=config))) == NAMED_WRONG


@pytest.mark.parametrize("id", ["DeepSeek V4", "DeepSeek V4, U8"])
@pytest.mark.parametrize("method", ["fp8", "deepseek_v4_fp8", "mxfp4"])
@pytest.mark.parametrize("dtype", ["fp4", None])
def test_deepseek_v4_under_its_own_names(id, method, dtype):
    layout = LAYOUTS[id]
    assert (
        found(audit(layout.open(config=with_quant({**DSV4_QUANT, "quant_method": method}, expert_dtype=dtype)))) == []
    )


# An allow-list that names experts one by one.


def each(*left_out, algo="NVFP4", **others):
    names = {f"{MLP}.{e}.{p}_proj" for e in range(EXPERTS) for p in ("gate", "up", "down")} - set(left_out)
    rest = {name: entry for name, entry in ALLOWED.items() if name != MLP}
    return modelopt("MIXED_PRECISION", exclude=(), quantized_layers={n: {"quant_algo": algo} for n in names} | rest)


@pytest.mark.parametrize("expert", range(EXPERTS))
def test_one_projection_of_an_expert_left_out(expert):
    layout = LAYOUTS["MIXED_PRECISION"]
    name = f"{MLP}.{expert}.up_proj"
    report = audit(layout.open(quant=each(name)))
    assert found(report) == [("config.conflict", "warn", 0, None, (expert,))]
    assert report.findings[0].tensors == (name,)
    assert found(audit(layout.open(quant=each()))) == []


def test_one_expert_called_fp8():
    layout = LAYOUTS["MIXED_PRECISION"]
    quant = each()
    quant["quantization"]["quantized_layers"][f"{MLP}.5.up_proj"] = {"quant_algo": "FP8"}
    report = audit(layout.open(quant=quant))
    assert found(report) == [("config.conflict", "warn", 0, None, (5,))]
    assert "FP8" in report.findings[0].message


def test_ways_to_list_all_experts():
    layout = LAYOUTS["MIXED_PRECISION"]
    rest = {name: entry for name, entry in ALLOWED.items() if name != MLP}
    nv = {"quant_algo": "NVFP4"}
    for names in (
        [f"{MLP}.{e}" for e in range(EXPERTS)],
        [f"{MLP}.*"],
        [f"{MLP}.{e}.*" for e in range(EXPERTS)],
        [f"{MLP}.0.gate_proj", f"{MLP}.*"],
        [MLP, f"{MLP}.3.up_proj"],
        [f"{MLP}.gate_up_proj", f"{MLP}.down_proj"],
        [f"{MLP}.{e}.w1" for e in range(EXPERTS)],
    ):
        quant = modelopt("MIXED_PRECISION", exclude=(), quantized_layers={**rest, **dict.fromkeys(names, nv)})
        assert found(audit(layout.open(quant=quant))) == [], names


# Sizes beside the routed experts.


def mlp(prefix, width, hidden=32, kinds=("gate", "up", "down")):
    out = {}
    for kind in kinds:
        rows, columns = (hidden, width) if kind == "down" else (width, hidden)
        out |= linear(f"{prefix}.{kind}_proj", rows, columns)
    return out


def model(config=None, **widths):
    """Three layers of the small model, each with an MLP beside the experts."""
    out = base(3)
    for path, sizes in widths.items():
        for layer, width in enumerate(sizes):
            out |= mlp(f"model.layers.{layer}.mlp{'.' + path if path != 'dense' else ''}", width)
    return opened(out, {**FOUR, "num_hidden_layers": 3, **(config or {})}, QUANT)


@pytest.mark.parametrize("path", ["shared_expert", "shared_experts"])
def test_a_shared_expert_of_another_size_than_its_peers(path):
    for config in ({}, {"shared_expert_intermediate_size": 48}, {"n_shared_experts": 3}):
        assert found(audit(model(config, **{path: (48, 48, 48)}))) == []
        report = audit(model(config, **{path: (48, 16, 48)}))
        assert found(report) == [("weight.shape", "error", 1, kind, None) for kind in ("gate", "up", "down")]
        assert set(outcomes(report).values()) == {"load-error"}
        assert path in report.findings[0].message


def test_a_dense_mlp_against_the_configuration():
    for config in ({}, {"intermediate_size": 64}, {"intermediate_size_mlp": 64, "intermediate_size": 16}):
        assert found(audit(model(config, dense=(64, 64, 64)))) == []
    for config in ({"intermediate_size": 96}, {"intermediate_size": 96, "intermediate_size_mlp": 32}):
        report = audit(model(config, dense=(64, 64, 64)))
        assert found(report) == [("config.conflict", "error", None, None, None)]
        assert report.findings[0].params["found"] == 64
        assert set(outcomes(report).values()) == {"load-error"}
    report = audit(model({"intermediate_size": 64}, dense=(64, 64, 32)))
    assert found(report) == [("weight.shape", "error", 2, kind, None) for kind in ("gate", "up", "down")]


def test_widths_that_differ_on_purpose():
    for config in (
        {"intermediate_size": [64, 32, 64]},
        {"block_configs": [{}, {}, {}], "intermediate_size": 16},
        {"intermediate_size": 32, "use_double_wide_mlp": True},
        {"ffn_multipliers": [2.0, 1.0, 2.0]},
    ):
        assert found(audit(model(config, dense=(64, 32, 64)))) == []


def test_a_width_that_is_computed():
    config = {"intermediate_size": 96, "block_auto_adjust_ff_dim": True}
    assert found(audit(model(config, dense=(64, 64, 64)))) == []


@pytest.mark.parametrize("kind", ["gate", "up", "down"])
@pytest.mark.parametrize("path", ["mlp", "mlp.shared_expert"])
def test_one_projection_of_another_size(kind, path):
    parts = base(1) | mlp(f"model.layers.0.{path}", 48)
    for hidden, width in ((32, 16), (64, 48)):
        tensors = parts | mlp(f"model.layers.0.{path}", width, hidden, kinds=(kind,))
        report = audit(opened(tensors))
        assert found(report) == [("weight.shape", "error", 0, kind, None)]
    assert found(audit(opened(parts))) == []


def test_towers_drafts_and_attention_have_sizes_of_their_own():
    others = {}
    for prefix in (
        "model.visual.blocks.0.mlp", "vision_tower.layers.0.mlp", "mtp.layers.0.mlp.shared_expert",
        "model.layers.1.mlp", "model.layers.0.linear_attn", "talker.model.layers.0.mlp",
    ):  # fmt: skip
        others |= mlp(prefix, 80, 96)
    assert found(audit(opened({**base(), **others}, {**FOUR, "intermediate_size": 64}))) == []


def test_a_dense_model():
    tensors = {}
    for layer in range(3):
        tensors |= mlp(f"model.layers.{layer}.mlp", 48)
    config = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
    assert found(audit(opened(tensors, config))) == []
    assert found(audit(opened(tensors, {**config, "intermediate_size": 64}))) == [
        ("config.conflict", "error", None, None, None)
    ]
    short = tensors | mlp("model.layers.1.mlp", 32)
    assert {code for code, *_ in found(audit(opened(short, config)))} == {"weight.shape"}
    # Nothing says what is right.
    assert found(audit(opened(short, {"num_hidden_layers": 3}))) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_their_widths_configured(name):
    """Every family's shared and dense MLPs are as wide as its experts here, DeepSeek V4's twice as wide."""
    checkpoint = FAMILIES[name]()
    said = {"n_shared_experts": 2} if name == "DeepSeek-V4" else {
        "intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH,
        "moe_shared_expert_intermediate_size": WIDTH,
        # Only where there are some.
        **({"n_shared_experts": 1} if any("share" in each for each in checkpoint.tensors) else {}),
    }  # fmt: skip
    nested = "text_config" in checkpoint.config
    inner = {**(checkpoint.config["text_config"] if nested else checkpoint.config), **said}
    again = changed(checkpoint)
    again.config.clear()
    again.config.update({**checkpoint.config, "text_config": inner} if nested else inner)
    assert found(audit(again)) == []


# Hidden sizes.


def test_experts_of_two_hidden_sizes():
    layout = LAYOUTS["modelopt"]
    wide = {kind: (2 * r if kind == "down" else r, c if kind == "down" else 2 * c) for kind, (r, c) in SIZES.items()}
    tensors = {**layout.tensors(), **_second(layout, wide)}
    silent = {"num_hidden_layers": 2, "num_experts": EXPERTS}
    for config in (silent, {"text_config": silent}, {**silent, "block_configs": [{}, {}]}):
        report = audit(layout.open(tensors, config=config))
        assert found(report) == [("weight.shape", "error", 1, None, None)]
        assert report.findings[0].text == "weight.shape.hidden"
        assert set(outcomes(report).values()) == {"load-error"}
        assert found(audit(layout.open({**layout.tensors(), **_second(layout)}, config=config))) == []
    # The majority is right, whichever layer comes first.
    third = {name.replace("layers.1", "layers.2"): item for name, item in _second(layout, wide).items()}
    report = audit(layout.open({**tensors, **third}, config={**silent, "num_hidden_layers": 3}))
    assert found(report) == [("weight.shape", "error", 0, None, None)]
    latent = {**silent, "moe_latent_size": 64, "hidden_size": 256}
    assert found(audit(layout.open(tensors, config=latent))) == [("weight.shape", "error", 1, None, None)]


# More experts than are configured.


def routers(rows, layout=None, name="mlp.gate.weight"):
    tensors = base(1, experts=8)
    del tensors["model.layers.0.mlp.gate.weight"]
    return {**tensors, f"model.layers.0.{name}": tensor(np.zeros((rows, 32), np.float16))}


@pytest.mark.parametrize("name", ["mlp.gate.weight", "mlp.router.weight", "router.proj.weight"])
def test_experts_that_no_token_reaches(name):
    """Padded for expert parallelism: vLLM's and SGLang's loaders differ from model to model, others go by number."""
    report = audit(opened(routers(6, name=name), {**FOUR, "num_experts": 6}))
    assert found(report) == [("config.conflict", "backend", None, None, None)]
    assert (report.findings[0].text, report.findings[0].count) == ("config.conflict.experts.unused", 2)
    for item in report.backends:
        engine = item.name.startswith(("vllm", "sglang"))
        assert (item.outcome, item.possible) == (("load-error", ("load-error", "safe")) if engine else ("safe", ()))
    report = audit(opened(routers(8, name=name), {**FOUR, "num_experts": 6}))
    assert found(report) == [("config.conflict", "error", None, None, None)]
    assert set(outcomes(report).values()) == {"load-error"}
    assert found(audit(opened(routers(8, name=name), {**FOUR, "num_experts": 8}))) == []
