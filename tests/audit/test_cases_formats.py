"""Public reports about layouts, number formats and weights (cases 7, 10, 11, 18 to 33), with their healthy twins."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.audit import audit, pre_quant
from nvfp4viz.checkpoint import tensor
from tests.audit.layouts import (
    EXPERTS,
    HIDDEN,
    LAYOUTS,
    MLP,
    bf16,
    ct_linear,
    fp8,
    linear,
    modelopt,
    packed,
    typed,
    with_quant,
)
from tests.audit.reading import codes, found, outcomes
from tests.checkpoint.checkpoint_fixtures import CONFIG as FOUR
from tests.checkpoint.checkpoint_fixtures import base, opened, without

ALL = tuple(range(EXPERTS))


# 7. Model-Optimizer#1063: the exporter looks at expert 0 alone, and a whole stacked projection has no scales.


def test_07_a_stacked_projection_without_scales():
    layout = LAYOUTS["stacked"]
    tensors = layout.tensors()
    del tensors["model.layers.0.moe.up_proj.input_scale"]
    report = audit(layout.open(tensors))
    assert report.format.dialect == "modelopt-stacked"
    assert found(report) == [("scale.missing", "backend", 0, "up", ALL)]
    [finding] = [item for item in report.findings if item.code == "scale.missing"]
    assert finding.tensors == ("model.layers.0.moe.up_proj.input_scale",)
    assert report.coverage["input_scale"].missing == EXPERTS
    by = outcomes(report)
    assert by["vllm-cutlass"] == "undefined"
    assert by["tensorrt-llm"] == "load-error"
    assert by["vllm-marlin"] == "ignored"


def test_07_one_dead_expert_inside_the_vector():
    """A stacked file's key list is complete whatever its values are."""
    layout = LAYOUTS["stacked"]
    tensors = layout.tensors()
    layout.put(tensors, 5, "gate", "input_scale", 0.0)
    assert found(audit(layout.open(tensors))) == [("scale.zero", "backend", 0, "gate", (5,))]


# 10. sglang#23625: scales of one projection absent; nibble order and large scales are nothing that a file shows.


def test_10_a_projection_without_scales_and_swapped_nibbles():
    lost = without(base(), *(f"experts.{e}.up_proj.input_scale" for e in range(4)))
    report = audit(opened(lost))
    assert found(report) == [("scale.missing", "backend", 0, "up", (0, 1, 2, 3))]
    swapped = {
        name: typed((item.data << 4) | (item.data >> 4), "U8") if name.endswith("proj.weight") else item
        for name, item in base().items()
    }
    assert audit(opened(swapped)).findings == ()


# 11. vllm#37462: a loader that matches names with "weight" only.


def test_11_a_sound_stacked_file_gets_a_note():
    report = audit(LAYOUTS["stacked"].open())
    assert codes(report) == [("loader.note", "info")]
    assert "vllm#37462" in report.findings[0].message


def test_11_so_does_a_sound_file_of_that_family():
    report = audit(opened(base(), {**FOUR, "architectures": ["Step3p5ForCausalLM"]}))
    assert codes(report) == [("loader.note", "info")]
    assert codes(audit(opened(base()))) == []


# 18. vllm#49638: fused names with underscores.


def test_18_fused_names():
    layout = LAYOUTS["fused"]
    report = audit(layout.open())
    assert (report.format.dialect, report.format.scheme) == ("modelopt-fused", "W4A4")
    assert codes(report) == [("loader.note", "info")]
    assert report.model.projections == ("gate_up", "down")
    assert report.model.experts == EXPERTS


@pytest.mark.parametrize("kind", ["gate_up", "down"])
def test_18_one_missing_scale_is_the_whole_layers(kind):
    layout = LAYOUTS["fused"]
    tensors = layout.tensors()
    del tensors[layout.name(0, kind, "input_scale")]
    report = audit(layout.open(tensors))
    assert found(report) == [("scale.missing", "backend", 0, kind, None)]
    [finding] = [item for item in report.findings if item.code == "scale.missing"]
    assert finding.count == 1
    by = {item.name: item for item in report.backends}
    assert (by["vllm-cutlass"].outcome, by["vllm-cutlass"].scope) == ("undefined", "layer")
    assert by["tensorrt-llm"].outcome == "load-error"


def test_18_transposed_weights_of_llama_4():
    """The packed axis is the input, whichever axis that is."""
    layout = LAYOUTS["fused"]
    tensors = layout.tensors()
    for kind, (rows, columns) in {"gate_up": (64, 64), "down": (64, 32)}.items():
        tensors[layout.name(0, kind, "weight")] = typed(np.full((EXPERTS, columns // 2, rows), 0x21, np.uint8), "U8")
        shape = (EXPERTS, columns // 16, rows)
        tensors[layout.name(0, kind, "weight_scale")] = typed(np.full(shape, 0x38, np.uint8), "F8_E4M3")
    assert codes(audit(layout.open(tensors))) == [("loader.note", "info")]


# 20. Gemma 4's three namings are in the matrix; what looks like a scale and is none must not be counted.


@pytest.mark.parametrize("name", ["Gemma 4, .moe.", "Gemma 4, nvidia", "Gemma 4, CT"])
def test_20_one_view_of_three_namings(name):
    layout = LAYOUTS[name]
    report = audit(layout.open())
    assert found(report) == []
    assert report.coverage["input_scale"].expected == EXPERTS * 3
    tensors = layout.tensors()
    del tensors[layout.name(2, "gate", "input_scale")]
    assert found(audit(layout.open(tensors))) == [("scale.missing", "backend", 0, "gate", (2,))]


# 21. sglang#14102, #29151: a dense fused layer with one scalar.


def test_21_a_fused_dense_layer():
    report = audit(opened({**base(), **linear("model.layers.0.mlp.gate_up_proj", 64, 32)}))
    assert codes(report) == [("loader.note", "info")]
    assert "sglang#29151" in report.findings[0].message
    # In a model without experts as well: nothing is said of the experts that it does not have.
    dense = audit(opened(linear("model.layers.0.mlp.gate_up_proj", 64, 32)))
    assert found(dense) == []


# 22. auto-round#2380: q, k and v with scales of their own.


def attention(*values, names=("to_q", "to_k", "to_v")):
    out = {}
    for name, value in zip(names, values, strict=True):
        at = f"blocks.0.attn1.{name}"
        out[f"{at}.weight_packed"] = typed(np.full((HIDDEN, HIDDEN // 2), 0x21, np.uint8), "U8")
        out[f"{at}.weight_scale"] = typed(np.full((HIDDEN, HIDDEN // 16), 0x38, np.uint8), "F8_E4M3")
        out[f"{at}.weight_global_scale"] = tensor(np.float32([value]))
        out[f"{at}.input_global_scale"] = tensor(np.float32([500.0]))
    return out


def test_22_attention_that_was_not_grouped():
    config = {"quantization_config": packed()}
    report = audit(opened(attention(12343.0, 5334.0, 8001.0), config, None))
    assert found(report) == [("scale.pair-mismatch", "warn", 0, None, None)]
    assert report.findings[0].value == pytest.approx(12343 / 5334, rel=1e-3)  # four digits are shown
    assert found(audit(opened(attention(8001.0, 8001.0, 8001.0), config, None))) == []


def test_22_which_names_are_siblings_can_be_said():
    config = {"quantization_config": packed()}
    strange = attention(12343.0, 5334.0, 8001.0, names=("a", "b", "c"))
    assert found(audit(opened(strange, config, None))) == []
    report = audit(opened(strange, config, None), siblings=[("a", "b", "c")])
    assert [code for code, *_ in found(report)] == ["scale.pair-mismatch"]


@pytest.mark.parametrize("ratio", [1.0, 1 + 1e-6, 1.25])
def test_22_shared_experts_too(ratio):
    at = "model.layers.0.mlp.shared_experts"
    size = (FOUR["hidden_size"], FOUR["hidden_size"])
    up = linear(f"{at}.up_proj", *size, second=1e-4 * ratio)
    shared = {**linear(f"{at}.gate_proj", *size), **up, **linear(f"{at}.down_proj", *size)}
    expected = [("scale.pair-mismatch", "warn", 0, None, None)] if ratio > 1.1 else []
    assert found(audit(opened({**base(), **shared}))) == expected


# Ordinary layers have the experts' faults.


@pytest.mark.parametrize(
    ("role", "severity"),
    [("input_scale", "backend"), ("weight_scale_2", "error"), ("weight_scale", "error"), ("weight", "error")],
)
@pytest.mark.parametrize("name", ["mlp.shared_experts.up_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_an_ordinary_layer_lacks_a_tensor(name, role, severity):
    module = f"model.layers.0.{name}"
    tensors = {**base(), **linear(module, FOUR["hidden_size"], FOUR["hidden_size"])}
    assert found(audit(opened(tensors))) == []
    del tensors[f"{module}.{role}"]
    report = audit(opened(tensors))
    assert found(report) == [("scale.missing", severity, 0, None, None)]
    assert report.findings[0].tensors == (f"{module}.{role}",)


@pytest.mark.parametrize(
    ("suffix", "role", "severity"),
    [
        ("input_global_scale", "input_scale", "backend"), ("weight_global_scale", "weight_scale_2", "error"),
        ("weight_scale", "weight_scale", "error"), ("weight_packed", "weight", "error"),
    ],
)  # fmt: skip
def test_an_ordinary_layer_of_compressed_tensors(suffix, role, severity):
    module = "model.layers.0.mlp.shared_expert.down_proj"
    layout = LAYOUTS["compressed-tensors"]
    tensors = {**layout.tensors(), **ct_linear(module)}
    assert found(audit(layout.open(tensors))) == []
    lost = {name: item for name, item in tensors.items() if name != f"{module}.{suffix}"}
    report = audit(layout.open(lost))
    assert found(report) == [("scale.missing", severity, 0, None, None)]
    assert report.findings[0].role == role
    if suffix.endswith("global_scale"):
        dead = {**tensors, f"{module}.{suffix}": tensor(np.float32([np.inf]))}
        assert found(audit(layout.open(dead))) == [("scale.zero", severity, 0, None, None)]


def test_weight_only_ordinary_layers_lack_nothing():
    module = "model.layers.0.self_attn.o_proj"
    tensors = without({**base(), **linear(module)}, "input_scale")
    quant = modelopt("W4A16_NVFP4")
    assert found(audit(opened(tensors, FOUR, quant))) == []
    # Listed one by one, each has its own algorithm.
    layers = {MLP: {"quant_algo": "NVFP4"}, module: {"quant_algo": "W4A16_NVFP4"}}
    mixed = modelopt("MIXED_PRECISION", exclude=(), quantized_layers=layers)
    tensors = without({**base(), **linear(module)}, f"{module}.input_scale")
    assert found(audit(opened(tensors, FOUR, mixed))) == []


def test_the_convention_of_ordinary_layers():
    modules = [f"model.layers.{k}.self_attn.o_proj" for k in range(3)]
    right = {name: item for module in modules for name, item in linear(module).items()}
    wrong = {name: item for module in modules for name, item in linear(module, second=1e4).items()}
    assert found(audit(opened({**base(), **right}))) == []
    assert found(audit(opened({**base(), **wrong}))) == [("scale.convention", "error", None, None, None)]


def test_block_width_of_ordinary_layers():
    module = "model.layers.0.self_attn.o_proj"
    tensors = {**base(), **linear(module)}
    tensors[f"{module}.weight_scale"] = typed(np.full((HIDDEN, HIDDEN // 32), 0x38, np.uint8), "F8_E4M3")
    assert found(audit(opened(tensors))) == [("block-scale.group", "error", 0, None, None)]


# 26. omlx#2159: U8 that is E8M0.


def test_26_exponents_stored_as_plain_bytes():
    report = audit(LAYOUTS["DeepSeek V4, U8"].open())
    assert (report.format.dialect, report.format.scheme) == ("deepseek-v4", "MXFP4")
    assert codes(report) == [("format.ambiguous", "info")]
    assert "E8M0" in report.findings[0].message
    assert codes(audit(LAYOUTS["DeepSeek V4"].open())) == []


# 27. E4M3 against E8M0 is `test_27` of test_cases and two rows of the matrix.


def test_27_every_expert_with_the_other_width():
    for columns, dtype in ((1, "F8_E4M3"), (2, "F8_E8M0")):
        tensors = {
            name: typed(np.full((item.shape[0], max(columns * item.shape[1] // 2, 1)), 0x38, np.uint8), dtype)
            if name.endswith("up_proj.weight_scale")
            else item
            for name, item in base().items()
        }
        report = audit(opened(tensors))
        assert found(report) == [("block-scale.group", "error", 0, "up", (0, 1, 2, 3))]


# 28. vllm#47528: garbled with tensor parallelism; the file is sound.


def test_28_a_sound_deepseek_v4():
    layout = LAYOUTS["DeepSeek V4"]
    assert codes(audit(layout.open())) == []
    assert found(audit(layout.open(), tp=1)) == []


# 29. Automodel#2034: the same names hold FP8 in -Base and FP4 in -Flash.


def test_29_types_decide_not_names():
    base_file = {
        f"layers.0.ffn.experts.{e}.{w}.{s}": item
        for e in range(EXPERTS)
        for w in ("w1", "w2", "w3")
        for s, item in (
            ("weight", typed(np.full((128, 128), 0x38, np.uint8), "F8_E4M3")),
            ("scale", tensor(np.ones((1, 1), np.float32))),
        )
    }
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    config = with_quant({"quant_method": "fp8", "weight_block_size": [128, 128]}, expert_dtype="fp8", **sizes)
    report = audit(opened(base_file, config, None))
    assert (report.format.dialect, report.format.scheme) == ("unknown", "UNQUANTISED")
    assert codes(report) == [("audit.partial", "info")]
    assert report.backends == ()
    assert audit(LAYOUTS["DeepSeek V4"].open()).format.scheme == "MXFP4"


# 30. TRT-LLM#16196, #16433: three formats in one file.


def test_30_three_formats():
    layout = LAYOUTS["DeepSeek V4, three formats"]
    report = audit(layout.open())
    assert (report.format.dialect, report.format.scheme) == ("mixed", "MIXED")
    assert codes(report) == []
    # Only the NVFP4 experts have activation scales, and all experts have block scales.
    assert report.coverage["input_scale"].expected == EXPERTS * 3
    assert report.coverage["weight_scale"].expected == EXPERTS * 6


@pytest.mark.parametrize("suffix", ["weight", "scale"])
def test_30_the_draft_experts_are_audited_in_their_own_format(suffix):
    layout = LAYOUTS["DeepSeek V4, three formats"]
    tensors = layout.tensors()
    del tensors[f"mtp.0.ffn.experts.3.w2.{suffix}"]
    assert found(audit(layout.open(tensors))) == [("scale.missing", "error", 1, "down", (3,))]


def test_30_excluded_is_not_the_same_as_bf16():
    layout = LAYOUTS["DeepSeek V4, three formats"]
    section = {**layout.config["quantization_config"], "exclude_modules": ["*attn*", "mtp*"]}
    report = audit(layout.open(config={**layout.config, "quantization_config": section}))
    assert codes(report) == [("loader.note", "info")]
    assert "TensorRT-LLM#16196" in report.findings[0].message


def test_30_an_allow_list_names_the_experts():
    layout = LAYOUTS["DeepSeek V4, three formats"]
    section = {
        "quant_method": "fp8", "quant_algo": "MIXED_PRECISION", "weight_block_size": [128, 128],
        "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}},
    }  # fmt: skip
    assert codes(audit(layout.open(config=with_quant(section)))) == []


# 31. vllm#54900, #54556: excluded FP8 attention whose scales were renamed.


def test_31_a_scale_that_contradicts_the_exclusion():
    layout = LAYOUTS["Quark"]
    section = {**layout.config["quantization_config"], "exclude": ["model.layers.0.self_attn.q_proj", "*gate"]}
    config = {**layout.config, "quantization_config": section}
    tensors = {**layout.tensors(), **fp8("model.layers.0.self_attn.q_proj")}
    report = audit(layout.open(tensors, config=config))
    assert found(report) == [("config.excluded-but-quantised", "warn", None, None, None)]
    assert report.findings[0].tensors == ("model.layers.0.self_attn.q_proj.weight_scale",)
    plain = {**layout.tensors(), "model.layers.0.self_attn.q_proj.weight": bf16(HIDDEN, HIDDEN)}
    assert found(audit(layout.open(plain, config=config))) == []


# 32, 33. Quark's names.


@pytest.mark.parametrize("name", ["Quark", "Quark, quantizer names", "Quark, static FP8 inputs"])
def test_32_33_quark(name):
    layout = LAYOUTS[name]
    report = audit(layout.open())
    assert (report.format.dialect, report.format.scheme) == ("quark", "MXFP4")
    assert codes(report) == []
    tensors = layout.tensors()
    lost = layout.name(4, "up", "weight_scale")
    del tensors[lost]
    report = audit(layout.open(tensors))
    assert found(report) == [("scale.missing", "error", 0, "up", (4,))]
    assert report.findings[0].tensors == (lost,)


def test_33_an_input_scale_does_not_make_it_nvfp4():
    layout = LAYOUTS["Quark, static FP8 inputs"]
    assert audit(layout.open()).format.scheme == "MXFP4"
    tensors = layout.tensors()
    layout.put(tensors, 2, "down", "input_scale", np.nan)
    assert found(audit(layout.open(tensors))) == [("scale.nan", "backend", 0, "down", (2,))]


# 6. AWQ scales of ones.


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_06_scales_of_ones(dtype, monkeypatch):
    layout = LAYOUTS["NVFP4_AWQ"]
    tensors = layout.tensors()
    tensors[f"{MLP}.3.up_proj.pre_quant_scale"] = tensor(np.ones(HIDDEN, dtype))
    report = audit(layout.open(tensors))
    assert found(report) == [("scheme.pre-quant-scale", "warn", 0, "up", (3,))]
    # In a large model only the first numbers of most vectors are read, with the same result.
    whole = audit(layout.open(tensors)).container.bytes_read
    monkeypatch.setattr(pre_quant, "LIMIT", 0)
    probed = audit(layout.open(tensors))
    # What was not read is said.
    partial = [item for item in probed.findings if item.code == "audit.partial"]
    assert [item.count for item in partial] == [3 * EXPERTS - 1]
    assert tuple(item for item in probed.findings if item not in partial) == report.findings
    assert probed.container.bytes_read < whole
    almost = np.ones(HIDDEN, np.float32)
    almost[-1] = 0.5
    tensors[f"{MLP}.3.up_proj.pre_quant_scale"] = tensor(almost.astype(dtype))
    assert found(audit(layout.open(tensors))) == []
