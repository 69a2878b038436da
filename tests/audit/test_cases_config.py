"""Public reports about configuration, drafts, exclusion and parallelism (cases 34 to 40), with their healthy twins."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, run_audit
from nvfp4viz.audit.parallel import width_ranks
from nvfp4viz.checkpoint import tensor
from nvfp4viz.checkpoint.problems import as_written
from tests.audit.layouts import CONFIG, EXPERTS, HIDDEN, LAYOUTS, MLP, bf16, fp8, linear, modelopt, typed, with_quant
from tests.audit.reading import NARROW, codes, found
from tests.checkpoint.checkpoint_fixtures import CONFIG as FOUR
from tests.checkpoint.checkpoint_fixtures import FLAT, QUANT, base, opened, scalar


def excluding(*patterns):
    return {"quantization": {**QUANT["quantization"], "exclude_modules": list(patterns)}}


# 34. vllm#44087 and others: draft layers that nobody listed, or under another prefix.


def draft(block):
    return {f"{block}.{e}.{p}_proj.weight": bf16(16, 32) for e in range(4) for p in ("gate", "up", "down")}


@pytest.mark.parametrize("block", ["model.layers.1.mlp.experts", "mtp.0.ffn.experts", "mtp.layers.0.mlp.experts"])
@pytest.mark.parametrize(
    ("patterns", "listed"), [(("*gate",), False), (("mtp*", "*layers.1.*"), True), (("mtp", "model.layers.1"), True)]
)
def test_34_drafts(block, patterns, listed):
    report = audit(opened({**base(), **draft(block)}, FOUR, excluding(*patterns)))
    expected = [] if listed else [("config.unquantised-not-excluded", "warn")]
    assert codes(report) == [*expected, ("draft.unquantised", "info")]
    assert report.model.moe_layers == (0,)
    assert report.coverage["input_scale"].expected == 12


def test_34_two_draft_layers_are_two():
    tensors = {**base(), **draft("mtp.0.ffn.experts"), **draft("mtp.1.ffn.experts")}
    report = audit(opened(tensors, FOUR, excluding("mtp*")))
    [finding] = report.findings
    assert (finding.code, finding.count) == ("draft.unquantised", 2)


# A linear layer in BF16 that a server builds as NVFP4 (vllm#52501).


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.mlp.shared_experts.down_proj", True),
        ("lm_head", False),
        ("model.embed_tokens", False),
        ("model.layers.0.mlp.gate", False),
        ("model.layers.0.mlp.shared_expert_gate", False),
        ("model.visual.blocks.0.attn.qkv_proj", False),
        ("model.vision_tower.layers.0.self_attn.q_proj", False),
        ("model.layers.1.self_attn.q_proj", False),  # past the last layer: a draft's
        ("mtp.layers.0.self_attn.q_proj", False),
    ],
)
def test_linear_layers_that_nobody_excluded(name, reported):
    rows = FOUR["num_experts"] if name.endswith("mlp.gate") else FOUR["hidden_size"]
    tensors = {**base(), f"{name}.weight": bf16(rows, FOUR["hidden_size"])}
    expected = [("config.unquantised-not-excluded", "warn", None, None, None)] if reported else []
    assert found(audit(opened(tensors))) == expected
    assert found(audit(opened(tensors, FOUR, excluding("*mlp.gate", name)))) == []
    assert found(audit(opened(tensors, FOUR, excluding("*mlp.gate", f"{name[:-2]}*")))) == []


def test_a_prefix_that_exporters_vary_is_no_difference():
    tensors = {name.replace("model.layers", "model.language_model.layers"): item for name, item in base().items()} | {
        "model.language_model.layers.0.self_attn.q_proj.weight": bf16(HIDDEN, HIDDEN)
    }
    for pattern in (
        "model.layers.0.self_attn*",
        "model.layers.0.self_attn.q_proj",
        "language_model.model.layers.0.self*",
    ):
        assert found(audit(opened(tensors, FOUR, excluding("*gate", pattern)))) == []


BUILT = ("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"))


@pytest.mark.parametrize(("built", "parts"), BUILT)
@pytest.mark.parametrize("pattern", ["model.layers.0.self_attn.{}", "*.{}", "*{}*", "language_model.model.layers.*{}"])
def test_a_list_may_name_modules_as_servers_build_them(built, parts, pattern):
    """vLLM asks its list for the name of the fused module."""
    tensors = base() | {f"model.layers.0.self_attn.{name}.weight": bf16(HIDDEN, HIDDEN) for name in parts}
    report = audit(opened(tensors, FOUR, excluding("*mlp.gate", pattern.format(built))))
    assert found(report) == []
    assert {one.possible for one in report.backends if one.text != NARROW} == {()}
    # Of another module's name nothing follows.
    for other in ("gate_up_proj", "o_proj"):
        report = audit(opened(tensors, FOUR, excluding("*mlp.gate", pattern.format(other))))
        assert found(report) == [("config.unquantised-not-excluded", "warn", None, None, None)]


def test_expressions_of_compressed_tensors_are_held_against_the_parts():
    """Its reader breaks a fused name up before it comes to expressions, and takes the whole name alone as it stands."""
    layout, parent = LAYOUTS["compressed-tensors"], "model.layers.0.self_attn"
    tensors = layout.tensors() | {f"{parent}.{p}_proj.weight": bf16(HIDDEN, HIDDEN) for p in "qkv"}
    for pattern, alarm in ((f"{parent}.qkv_proj", False), ("re:.*qkv_proj$", True), ("re:.*self_attn.*", False)):
        section = {**layout.config["quantization_config"], "ignore": ["lm_head", "re:.*gate$", pattern]}
        report = audit(layout.open(tensors, config={**layout.config, "quantization_config": section}))
        assert ("config.unquantised-not-excluded" in {item.code for item in report.findings}) == alarm, pattern


def test_targets_that_mean_the_experts_only():
    groups = {"group_0": {**FLAT["config_groups"]["group_0"], "targets": ["re:.*experts.*"]}}
    config = {**FOUR, "quantization_config": {**FLAT, "config_groups": groups}}
    tensors = {**base(), "model.layers.0.self_attn.q_proj.weight": bf16(HIDDEN, HIDDEN)}
    assert found(audit(opened(tensors, config, None))) == []
    assert found(audit(opened(tensors, {**FOUR, "quantization_config": FLAT}, None))) == [
        ("config.unquantised-not-excluded", "warn", None, None, None)
    ]


# 35. vllm#45132: excluded, and quantised all the same.


@pytest.mark.parametrize("pattern", ["lm_head", "lm_head*", "lm*"])
def test_35_a_head_that_is_excluded_and_quantised(pattern):
    tensors = {**base(), **linear("lm_head")}
    report = audit(opened(tensors, FOUR, excluding(pattern, "*mlp.gate")))
    assert found(report) == [("config.excluded-but-quantised", "warn", None, None, None)]
    assert found(audit(opened(tensors, FOUR, excluding("*mlp.gate")))) == []


# 36. vllm#25706, sglang#9712, NeMo-RL#3615: spellings of one list, and two files.


@pytest.mark.parametrize("key", ["ignore", "exclude_modules", "modules_to_not_convert", "exclude"])
def test_36_every_spelling_of_the_exclude_list(key):
    section = {name: value for name, value in FLAT.items() if name != "ignore"} | {key: ["lm_head", "*mlp.gate"]}
    tensors = {**base(), **linear("lm_head")}
    report = audit(opened(tensors, {**FOUR, "quantization_config": section}, None))
    assert found(report) == [("config.excluded-but-quantised", "warn", None, None, None)]


def test_36_a_list_of_every_layer_one_by_one():
    names = [
        f"model.layers.{k}.self_attn.{p}" for k in range(61) for p in ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")
    ]
    attention = {f"{name}.weight": bf16(8, 8) for name in names[:4]}
    assert found(audit(opened({**base(), **attention}, FOUR, excluding("*gate", *names)))) == []
    left = audit(opened({**base(), **attention}, FOUR, excluding("*gate", *names[1:])))
    assert found(left) == [("config.unquantised-not-excluded", "warn", None, None, None)]
    assert left.findings[0].tensors == ("model.layers.0.self_attn.q_a_proj.weight",)


def test_36_a_block_width_that_is_not_the_tensors():
    report = audit(opened(base(), {**FOUR, "quantization_config": {**FLAT, "group_size": 32}}, None))
    assert found(report) == [("config.conflict", "error", None, None, None)]


def test_36_groups_of_several_formats():
    """compressed-tensors' ``mixed-precision``: other groups have other widths (vllm#55367)."""
    layout = LAYOUTS["compressed-tensors"]
    section = layout.config["quantization_config"]
    integers = {"weights": {"num_bits": 4, "type": "int", "group_size": 128}, "targets": ["re:.*self_attn.*"]}
    eight = {"weights": {"num_bits": 8, "type": "float", "group_size": None}, "targets": ["Linear"]}
    four = {**section["config_groups"]["group_0"], "targets": ["re:.*experts.*"]}
    groups = {"group_0": integers, "group_1": eight, "group_2": four}
    mixed = with_quant({**section, "format": "mixed-precision", "config_groups": groups})
    attention = {"model.layers.0.self_attn.q_proj.weight": bf16(HIDDEN, HIDDEN)}
    assert found(audit(layout.open({**layout.tensors(), **attention}, config=mixed))) == []


def test_36_a_format_that_is_not_the_tensors():
    layout = LAYOUTS["ModelOpt MXFP4"]
    section = {**layout.config["quantization_config"], "quant_algo": "NVFP4"}
    report = audit(layout.open(config=with_quant(section)))
    assert found(report) == [("config.conflict", "error", None, None, None)]
    assert report.findings[0].text == "config.conflict.format"


@pytest.mark.parametrize("method", ["awq", "gptq", "mxfp4", "compressed-tensors"])
def test_36_another_method_stops_every_load(method):
    layout = LAYOUTS["modelopt"]
    report = audit(layout.open(config=with_quant({"quant_method": method}), quant=None))
    assert [code for code, *_ in found(report)] == ["config.conflict"]
    assert {item.outcome for item in report.backends} == {"load-error"}
    assert {item.outcome for item in audit(layout.open()).backends} == {"safe"}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("value", ["many", -4, 10**9, 0, True, 4.5, {"experts": 8}])
def test_36_a_number_of_experts_that_is_none(value, nested):
    layout = LAYOUTS["modelopt"]
    wrong = {**CONFIG, "num_experts": value}
    report = audit(layout.open(config={"text_config": wrong} if nested else wrong))
    assert found(report) == [("config.invalid", "warn", None, None, None)]
    assert as_written(value, 40) in report.findings[0].message
    # A list speaks of each layer, and null of nothing.
    for sound in (None, [EXPERTS], EXPERTS):
        right = {**CONFIG, "num_experts": sound}
        assert found(audit(layout.open(config={"text_config": right} if nested else right))) == []


# 37. vllm#55367, #56050, #47445: an allow-list.


def allowed(**layers):
    return modelopt("MIXED_PRECISION", exclude=(), quantized_layers=layers)


def test_37_what_an_allow_list_leaves_out_is_unquantised():
    layout = LAYOUTS["MIXED_PRECISION"]
    report = audit(layout.open())
    assert (report.format.dialect, report.format.scheme) == ("modelopt", "W4A4")
    assert codes(report) == []


@pytest.mark.parametrize(
    "name", [MLP, "model.layers.0.mlp", "model.layers.*.mlp.experts", "model.language_model.layers.0.mlp.experts"]
)
def test_37_ways_to_name_the_experts(name):
    layout = LAYOUTS["MIXED_PRECISION"]
    layers = {name: {"quant_algo": "NVFP4"}, "model.layers.0.linear_attn.out_proj": {"quant_algo": "FP8"}}
    assert codes(audit(layout.open(quant=allowed(**layers)))) == []


def test_37_every_projection_named_for_itself():
    layout = LAYOUTS["MIXED_PRECISION"]
    layers = {f"{MLP}.{e}.{p}_proj": {"quant_algo": "NVFP4"} for e in range(EXPERTS) for p in ("gate", "up", "down")}
    assert codes(audit(layout.open(quant=allowed(**layers)))) == []


def test_37_some_layers_weight_only():
    """Qwen3.6: W4A16 entries beside W4A4 ones; their missing activation scales are none."""
    quantised = {**base(2)}
    plain = {name: item for name, item in quantised.items() if not ("layers.1." in name and "input_scale" in name)}
    config = {**FOUR, "num_hidden_layers": 2}
    layers = {MLP: {"quant_algo": "NVFP4"}, MLP.replace("0", "1"): {"quant_algo": "W4A16_NVFP4"}}
    report = audit(opened(plain, config, allowed(**layers)))
    assert codes(report) == []
    assert report.coverage["input_scale"].expected == 12
    both = {**layers, MLP.replace("0", "1"): {"quant_algo": "NVFP4"}}
    report = audit(opened(plain, config, allowed(**both)))
    assert {code for code, *_ in found(report)} == {"scale.missing"}


def test_37_fp8_linears_with_an_input_scale_of_their_own():
    """Nemotron Super: Mamba linears in FP8 carry one; it is judged by its value alone."""
    tensors = {**base(), **fp8("backbone.layers.0.mixer.in_proj")}
    tensors["backbone.layers.0.mixer.in_proj.input_scale"] = scalar(0.05)
    assert found(audit(opened(tensors))) == []
    tensors["backbone.layers.0.mixer.in_proj.input_scale"] = scalar(float("nan"))
    assert found(audit(opened(tensors))) == [("scale.nan", "backend", 0, None, None)]


# 38. 1Cat-vLLM#642, vllm#42516: widths that ranks cut badly.


def of_width(width, gated=True, hidden=HIDDEN):
    layout = LAYOUTS["modelopt"]
    tensors = {}
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    for expert in range(EXPERTS):
        for kind, (rows, columns) in shapes.items():
            if kind == "gate" and not gated:
                continue
            at = f"{MLP}.{expert}.{kind}_proj"
            tensors[f"{at}.weight"] = typed(np.full((rows, columns // 2), 0x21, np.uint8), "U8")
            tensors[f"{at}.weight_scale"] = typed(np.full((rows, columns // 16), 0x38, np.uint8), "F8_E4M3")
            tensors[f"{at}.weight_scale_2"] = scalar(1e-4)
            tensors[f"{at}.input_scale"] = scalar(2e-3 * (1 + 0.1 * expert))
    config = {**CONFIG, "moe_intermediate_size": width, "hidden_size": hidden}
    return layout.open(tensors, config=config if gated else {**config, "mlp_hidden_act": "relu2"})


@pytest.mark.parametrize(
    ("width", "tp", "expected"),
    [
        (80, None, ("parallel.alignment", "info")),
        (64, None, None),
        (96, None, ("parallel.alignment", "info")),
        (128, None, None),
        (704, None, None),
        (768, 8, ("parallel.alignment", "backend")),
        (768, 4, None),
        (2048, 8, None),
        (640, 8, ("parallel.alignment", "backend")),
        (704, 8, ("parallel.group-split", "backend")),
        (80, 2, ("parallel.group-split", "backend")),
        (1536, 5, ("parallel.group-split", "backend")),
        (32, 4, ("parallel.group-split", "backend")),
    ],
)
def test_38_widths_and_ranks(width, tp, expected):
    report = audit(of_width(width), tp=tp)
    assert codes(report) == ([expected] if expected else [])
    if expected and expected[1] == "backend":
        params = report.findings[0].params
        # Of 80 no size is every kernel's.
        works = params["works"] or params["more"]
        assert works
        for size in (int(text) for text in works.split(", ")):
            assert width % (16 * size) == 0


def cutlass(report):
    [item] = [item for item in report.backends if item.name == "vllm-cutlass"]
    assert all(other.outcome == "safe" for other in report.backends if other is not item)
    return item.outcome, item.text


def test_38_a_kernel_that_refuses_is_named():
    assert cutlass(audit(of_width(768), tp=4)) == ("safe", "why.safe")
    assert cutlass(audit(of_width(768), tp=8)) == ("unsupported", "why.alignment")
    # The file is as it was.
    assert cutlass(audit(of_width(768))) == ("safe", "why.safe")
    # Without a gate the kernel's weights are padded, and weight-only experts never come to that kernel.
    assert codes(audit(of_width(768, gated=False), tp=8)) == [("parallel.alignment", "info")]
    tensors = {name: of_width(768).read_tensor(name) for name in of_width(768).tensors if "input_scale" not in name}
    weight_only = {"quantization": {**QUANT["quantization"], "quant_algo": "W4A16_NVFP4"}}
    bare = opened(tensors, {**CONFIG, "moe_intermediate_size": 768}, weight_only)
    assert ("parallel.alignment", "info") in codes(audit(bare, tp=8))


@pytest.mark.parametrize(("hidden", "found"), [(2880, True), (2816, False), (7168, False), (64, False)])
def test_38_a_hidden_size_that_the_second_kernel_does_not_take(hidden, found):
    report = audit(of_width(128, hidden=hidden))
    assert ("parallel.alignment", "backend") in codes(report) if found else codes(report) == []
    assert cutlass(report) == (("degraded", "why.alignment.hidden") if found else ("safe", "why.safe"))


def test_38_a_group_of_32_is_cut_earlier():
    layout = LAYOUTS["DeepSeek V4"]
    assert codes(audit(layout.open(), tp=2)) == [("parallel.group-split", "backend")]
    assert codes(audit(LAYOUTS["modelopt"].open(), tp=2)) == [("parallel.alignment", "info")]


def gpt_oss(width, experts=2, hidden=64):
    at = "model.layers.0.mlp"
    tensors = {f"{at}.router.weight": bf16(experts, hidden)}
    for kind, rows, columns in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
        codes_ = np.full((experts, rows, columns // 32, 16), 0x21, np.uint8)
        tensors[f"{at}.experts.{kind}_proj_blocks"] = typed(codes_, "U8")
        scales = np.full((experts, rows, columns // 32), 118, np.uint8)
        tensors[f"{at}.experts.{kind}_proj_scales"] = typed(scales, "U8")
        tensors[f"{at}.experts.{kind}_proj_bias"] = bf16(experts, rows)
    config = {
        "model_type": "gpt_oss", "num_hidden_layers": 1, "num_local_experts": experts, "num_experts_per_tok": 2,
        "hidden_size": hidden, "intermediate_size": width, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    return opened(tensors, config, None)


@pytest.mark.parametrize("tp", [4, 8, 64])
def test_38_whole_blocks_are_given_out_of_gpt_oss(tp):
    """Its 90 blocks: 23 a rank and 21 for the last of four; 12 and 6 of eight; 2 each of 64 while they last."""
    checkpoint = gpt_oss(2880)
    done = run_audit(checkpoint, tp=tp)
    assert codes(done.report) == [("parallel.alignment", "info")]
    assert done.report.backends == audit(checkpoint).backends
    ranks = width_ranks(done.facts, tp)
    share = -(-90 // tp)
    assert not any(rank.cut for rank in ranks)
    assert [(rank.begin, rank.end) for rank in ranks] == [
        (32 * min(share * k, 90), 32 * min(share * (k + 1), 90)) for k in range(tp)
    ]
    assert done.report.findings[0].params["share"] == share
    assert codes(audit(checkpoint, tp=1)) == []
    # A width that is no whole number of blocks, or another layout of the same width, is cut as before.
    assert codes(audit(of_width(2880), tp=8)) == [("parallel.group-split", "backend")]


def test_38_ranks_are_a_servers():
    outcomes = {item.name: item.outcome for item in audit(of_width(704), tp=8).backends}
    assert {name for name, outcome in outcomes.items() if outcome == "load-error"} == {*outcomes} - {"transformers"}
    assert outcomes["transformers"] == "safe"


def test_38_without_a_gate_rows_are_not_doubled():
    assert codes(audit(of_width(64, gated=False), tp=1)) == [("parallel.alignment", "info")]
    assert codes(audit(of_width(64), tp=1)) == []


# 39. sglang#20869, #23531, #29055: expert parallelism and scales that are sliced on one side only.


def test_39_expert_parallelism():
    layout = LAYOUTS["modelopt"]
    assert codes(audit(layout.open(), ep=2)) == [("loader.note", "info")]
    assert codes(audit(layout.open(), ep=1)) == []
    assert codes(audit(layout.open(), ep=3)) == [("loader.note", "info"), ("parallel.alignment", "info")]
    # Without activation scales there is nothing to slice.
    assert codes(audit(LAYOUTS["DeepSeek V4"].open(), ep=2)) == []


# 40. kekzl/imp#1544: a scale a thousand times its peers is test_40 of test_cases and a row of the matrix.


@pytest.mark.parametrize("factor", [0.1, 10.0, 30.0])
def test_40_what_calibration_does_spread_to(factor):
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    layout.put(tensors, 0, "gate", "input_scale", layout.get(tensors, 0, "gate", "input_scale") * factor)
    assert codes(audit(layout.open(tensors))) == []


# 48. KV-cache scales, in both spellings.


@pytest.mark.parametrize("name", ["self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", "self_attn.k_scale"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.02, []), (1.0, ["kv.identity"]), (0.0, ["kv.zero"]), (-1.0, ["kv.invalid"]), (float("inf"), ["kv.invalid"])],
)
def test_48_kv_scales_in_both_spellings(name, value, expected):
    report = audit(opened({**base(), f"model.layers.0.{name}": scalar(value)}))
    assert [item.code for item in report.findings] == expected


# 46. Tied weights: what is absent on purpose.


@pytest.mark.parametrize("with_head", [False, True])
def test_46_tied_embeddings(with_head):
    tensors = {**base(), "model.embed_tokens.weight": bf16(16, 32)}
    if with_head:
        tensors["lm_head.weight"] = tensor(np.zeros((16, 32), np.float16))
    report = audit(opened(tensors, {**FOUR, "tie_word_embeddings": True}))
    assert codes(report) == []
