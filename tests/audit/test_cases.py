"""Public bug reports, each as the smallest checkpoint that shows it, and its whole kind.

Numbers are those of the specification's case list.  ``codes`` says which findings a report must have, and nothing else
above ``info`` may stand beside them: one cause, one finding.
"""

import re

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import memory_checkpoint, tensor
from tests.audit.layouts import EXPERTS, HALF, HIDDEN, LAYOUTS, bf16, in_type
from tests.audit.reading import found, outcomes
from tests.checkpoint.checkpoint_fixtures import CONFIG, CT_QUANT, FLAT, QUANT, base, ct_base, opened, scalar, without

E = "model.layers.0.mlp.experts"
CT_CONFIG = {**CONFIG, "quantization_config": CT_QUANT}


def flat(**changes):
    return {**CONFIG, "quantization_config": {**FLAT, **changes}}


def group(**changes):
    return {**FLAT["config_groups"]["group_0"], **changes}


# 1. vllm#45212, #51525: an expert that calibration never reached.


def test_01_an_uncalibrated_expert():
    report = audit(opened(without(base(), *(f"{E}.2.{p}_proj.input_scale" for p in ("gate", "up", "down")))))
    assert found(report) == [("scale.missing", "backend", 0, p, (2,)) for p in ("gate", "up", "down")]
    assert report.verdict == "backend"
    by = {item.name: item for item in report.backends}
    assert (by["vllm-cutlass"].outcome, by["vllm-cutlass"].scope) == ("undefined", "experts")
    assert {"nan", "zero"} <= set(by["vllm-cutlass"].possible)
    for name in ("vllm-flashinfer-cutlass", "vllm-flashinfer-trtllm", "vllm-emulation", "sglang-flashinfer"):
        assert (by[name].outcome, by[name].scope) == ("undefined", "layer")
        # Leftover zeros are masked by the maximum.
        assert "safe" in by[name].possible
        assert "nan" in by[name].possible
    assert (by["tensorrt-llm"].outcome, by["tensorrt-llm"].scope) == ("load-error", "model")
    for name in ("vllm-marlin", "vllm-humming", "sglang-marlin", "transformers"):
        assert (by[name].outcome, by[name].scope, by[name].layers) == ("ignored", "none", ())
    assert all(item.layers == (0,) for item in report.backends if item.scope != "none")


# 2. vllm#45320: gate and up of four among 128 experts, in Gemma 4's names.


def test_02_the_gemma_holes():
    block = "language_model.model.layers.{}.moe.experts".format
    holes = [f"experts.{e}.{p}_proj.input_scale" for e in (40, 42, 82, 98) for p in ("gate", "up")]
    config = {"text_config": {"num_experts": 128, "num_hidden_layers": 1}}
    report = audit(opened(without(base(experts=128, block=block), *holes), config))
    assert found(report) == [("scale.missing", "backend", 0, p, (40, 42, 82, 98)) for p in ("gate", "up")]
    assert "40, 42, 82, 98" in report.findings[0].message
    assert report.coverage["input_scale"].missing == 8
    assert report.coverage["input_scale"].expected == 384
    assert outcomes(report)["vllm-marlin"] == "ignored"


# 3. vllm#54189: weight-only tensors under a W4A4 label, and why the promotion rule fires or cannot.

NULL = group(input_activations=None)
ABSENT = {key: value for key, value in group().items() if key != "input_activations"}
PROMOTION = {
    "null": (flat(config_groups={"group_0": NULL}), None, "promoted"),
    "key absent": (flat(config_groups={"group_0": ABSENT}), None, "promoted"),
    "two groups, one null": (
        flat(config_groups={"group_0": NULL, "group_1": group()}), None, "group-with-activations",
    ),
    "sidecar only": (CONFIG, QUANT, "sidecar"),
    "empty groups": (flat(config_groups={}), None, "empty-groups"),
    "no groups": (
        {**CONFIG, "quantization_config": {k: v for k, v in FLAT.items() if k != "config_groups"}}, None, "no-groups",
    ),
    "empty activations": (flat(config_groups={"group_0": group(input_activations={})}), None, "group-with-activations"),
    "AWQ": (flat(quant_algo="NVFP4_AWQ", config_groups={"group_0": NULL}), None, "refused"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMOTION)
def test_03_weight_only_under_a_w4a4_label(name):
    config, quant, reason = PROMOTION[name]
    report = audit(opened(without(base(), "input_scale"), config, quant))
    assert found(report) == [("scheme.mislabelled", "backend", None, None, None)]
    assert report.findings[0].text == f"scheme.mislabelled.{reason}"
    assert report.findings[0].count == 12
    assert report.format.scheme == "W4A16"
    by = outcomes(report)
    assert by["tensorrt-llm"] == "load-error"
    assert by["sglang-generic"] == "undefined"
    if reason == "refused":
        # vLLM does not know NVFP4_AWQ at all, whatever the tensors are.
        assert by["vllm-cutlass"] == by["vllm-marlin"] == "unsupported"
    elif reason == "promoted":
        assert by["vllm-cutlass"] == "unsupported"
        assert by["vllm-marlin"] == "safe"
    else:
        assert by["vllm-cutlass"] == by["vllm-flashinfer-trtllm"] == "undefined"
        assert by["vllm-marlin"] == "ignored"


def test_03_one_activation_scale_makes_it_a_hole_instead():
    """Never judged from one layer or one slot."""
    tensors = {**without(base(), "input_scale"), f"{E}.0.gate_proj.input_scale": scalar(2e-3)}
    codes = {code for code, *_ in found(audit(opened(tensors)))}
    assert codes == {"scale.missing"}


RULED_OUT = {
    "MIXED_PRECISION": "other-algorithm.listed", "compressed-tensors": "other-method.groups",
    "Quark NVFP4": "other-method", "DeepSeek V4, three formats": "other-method", "W4A8": "refused",
    "NVFP4_AWQ": "refused", "modelopt": "sidecar", "stacked": "sidecar", "fused": "sidecar",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in RULED_OUT if name in LAYOUTS])
def test_03_why_the_rule_cannot_fire_is_said_of_the_file_at_hand(name):
    """The value that stops the rule, the entry that would have to change, and no English in the Chinese."""
    layout = LAYOUTS[name]
    tensors = {key: item for key, item in layout.tensors().items() if not key.startswith(layout.prefix)}
    inputs = {layout.name(e, kind, "input_scale") for e in range(EXPERTS) for kind in layout.kinds}
    tensors |= {key: item for key, item in layout.tensors().items() if key not in inputs}
    [item] = [item for item in audit(layout.open(tensors)).findings if item.code == "scheme.mislabelled"]
    assert item.text == f"scheme.mislabelled.{RULED_OUT[name]}"
    message, advice = describe(item)
    assert "found NVFP4" not in message
    # Only where the file has this key for the experts may it be corrected.
    assert ("Set quant_algo" in advice) == (RULED_OUT[name] == "sidecar")
    assert not re.search(r"[a-z]{3,} [a-z]{3,} [a-z]{3,}", describe(item, "zh")[0])


# 4. vllm#42601: each stored class on its own.

STORED = {
    "zero": 0.0, "minus zero": -0.0, "negative": -2e-3, "nan": np.nan, "inf": np.inf, "minus inf": -np.inf,
    "subnormal": 4.4e-42,
}  # fmt: skip
CODE = {"minus zero": "zero", "minus inf": "inf"}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_04_stored_classes(name, role, projection):
    tensors = {**base(), f"{E}.1.{projection}_proj.{role}": scalar(STORED[name])}
    report = audit(opened(tensors))
    severity = "backend" if role == "input_scale" else "error"
    assert found(report) == [(f"scale.{CODE.get(name, name)}", severity, 0, projection, (1,))]
    assert report.findings[0].role == role
    assert report.coverage[role].invalid == 1
    assert report.coverage[role].missing == 0


VALUES_PER_EXPERT = [
    # (gate, up, down) of one expert, and what each reach makes of it
    ((0.0, 0.0, None), "zero", "safe"),
    ((0.0, 0.0, 0.0), "nan", "safe"),
    ((None, None, 0.0), "zero", "safe"),
    ((0.0, None, None), "safe", "safe"),
    ((np.inf, None, None), "nan", "nan"),
    ((None, None, np.inf), "nan", "nan"),
    ((None, np.nan, None), "nan", "nan"),
    ((-2e-3, -2e-3, None), "degraded", "safe"),
    ((-2e-3, None, None), "safe", "safe"),
    ((4.4e-42, 4.4e-42, 4.4e-42), "nan", "safe"),
    ((2.0, 2.0, None), "degraded", "degraded"),
]


@pytest.mark.parametrize(("values", "per_expert", "per_layer"), VALUES_PER_EXPERT)
def test_04_what_backends_make_of_stored_values(values, per_expert, per_layer):
    """The rows of the table of predicted outcomes, for per-expert scales and for one maximum."""
    tensors = base()
    for kind, value in zip(("gate", "up", "down"), values, strict=True):
        if value is not None:
            tensors[f"{E}.1.{kind}_proj.input_scale"] = scalar(value)
    by = outcomes(audit(opened(tensors)))
    assert by["vllm-cutlass"] == by["sglang-generic"] == per_expert
    for name in ("vllm-flashinfer-cutlass", "vllm-flashinfer-trtllm", "vllm-emulation", "tensorrt-llm"):
        assert by[name] == per_layer
    assert by["vllm-marlin"] == by["transformers"] == "ignored"


def test_04_b12x_does_not_read_the_second_scale():
    tensors = {**base(), f"{E}.1.down_proj.input_scale": scalar(np.nan)}
    by = outcomes(audit(opened(tensors)))
    assert by["vllm-flashinfer-b12x"] == "ignored"
    assert by["vllm-flashinfer-cutlass"] == "nan"


# 5, 6. Model-Optimizer#1410, #1142, #1354: AWQ's pre_quant_scale.


def awq(experts=range(4)):
    inputs = {"gate": 32, "up": 32, "down": 16}
    return {
        f"{E}.{e}.{p}_proj.pre_quant_scale": tensor(np.full(size, 0.5, np.float32))
        for e in experts for p, size in inputs.items()
    }  # fmt: skip


def test_05_awq_with_one_uncalibrated_expert():
    tensors = {**without(base(), f"{E}.0.gate_proj.input", f"{E}.0.up_proj.input", f"{E}.0.down_proj.input"), **awq()}
    report = audit(opened(tensors))
    assert {code for code, *_ in found(report)} == {"scale.missing"}
    assert outcomes(report)["tensorrt-llm"] == "load-error"
    assert "gate_proj.input_scale" in next(item.why for item in report.backends if item.name == "tensorrt-llm")


def test_06_awq_on_some_experts_only():
    report = audit(opened({**base(), **awq(range(3))}))
    assert found(report) == [("scheme.pre-quant-scale", "error", 0, p, (3,)) for p in ("gate", "up", "down")]
    assert found(audit(opened({**base(), **awq()}))) == []


# 8, 9. Whole projections and whole ranks.


def test_08_a_projection_wide_hole():
    lost = [f"{E}.{e}.down_proj.input_scale" for e in range(4)]
    report = audit(opened(without(base(), *lost)))
    assert found(report) == [("scale.missing", "backend", 0, "down", (0, 1, 2, 3))]


def test_09_a_rank_without_scales():
    report = audit(
        opened(without(base(), *(f"{E}.{e}.{p}_proj.input" for e in (2, 3) for p in ("gate", "up", "down"))))
    )
    assert found(report) == [("expert.rank-hole", "backend", 0, None, (2, 3))]
    assert report.coverage["input_scale"].missing == 6
    assert outcomes(report)["vllm-cutlass"] == "undefined"


@pytest.mark.parametrize("experts", [(1, 2), (2,), (0, 2), (0, 1, 2)])
def test_09_what_is_no_rank(experts):
    lost = [f"{E}.{e}.{p}_proj.input" for e in experts for p in ("gate", "up", "down")]
    codes = {code for code, *_ in found(audit(opened(without(base(), *lost))))}
    assert codes == {"scale.missing"}


# 10, 12, 13. What is no defect, and what compressed-tensors calls dead.


def test_10_large_input_scales_are_legitimate():
    tensors = {
        name: scalar(float(item.data) * 80_000) if name.endswith("input_scale") else item
        for name, item in base().items()
    }
    assert found(audit(opened(tensors))) == []


@pytest.mark.parametrize(
    "quant",
    [
        {"quant_algo": "W4A16_NVFP4", "with_input_scale": False},
        {"quantization": {**QUANT["quantization"], "quant_algo": "W4A16_NVFP4", "with_input_scale": False}},
    ],
)
def test_12_a_clean_weight_only_checkpoint(quant):
    report = audit(opened(without(base(), "input_scale"), CONFIG, quant))
    assert found(report) == []
    assert [item.code for item in report.findings] == ["scheme.weight-only"]
    assert report.coverage["input_scale"].expected == 0
    by = outcomes(report)
    assert by["vllm-marlin"] == by["vllm-humming"] == by["transformers"] == "safe"
    assert by["vllm-cutlass"] == by["vllm-flashinfer-trtllm"] == "unsupported"


@pytest.mark.parametrize(
    ("stored", "code"), [(1.0, None), (np.nan, "nan"), (np.inf, "zero"), (0.0, "inf"), (-1.0, "negative")]
)
def test_13_values_in_the_divisor_convention(stored, code):
    """An infinite divisor is a scale of zero, and says so; 1.0 is what an untouched observer leaves."""
    tensors = {**ct_base(), f"{E}.1.up_proj.input_global_scale": tensor(np.float32([stored]))}
    report = audit(opened(tensors, CT_CONFIG, None))
    if code is None:
        assert found(report) == []
        assert [item.code for item in report.findings] == ["loader.note", "scale.identity"]
    else:
        assert found(report) == [(f"scale.{code}", "backend", 0, "up", (1,))]
        if code in ("zero", "inf"):
            assert "divisor" in report.findings[0].message


# 14. vllm#54974, TRT-LLM#14199: gate and up with different second-level scales.


@pytest.mark.parametrize(("ratio", "differs"), [(10.0, True), (1.25, True), (1 + 1e-6, False), (1.0, False)])
def test_14_pairs(ratio, differs):
    tensors = {
        **base(),
        f"{E}.1.up_proj.weight_scale_2": scalar(float(base()[f"{E}.1.gate_proj.weight_scale_2"].data) * ratio),
    }
    report = audit(opened(tensors))
    if not differs:
        assert found(report) == []
        return
    assert found(report) == [("scale.pair-mismatch", "backend", 0, None, (1,))]
    assert report.findings[0].value == pytest.approx(1 / ratio, rel=1e-3)  # four digits are shown
    by = outcomes(report)
    assert by["vllm-cutlass"] == by["vllm-marlin"] == by["vllm-flashinfer-trtllm"] == "degraded"
    assert by["vllm-humming"] == by["transformers"] == "safe"


# 15, 16, 17. compressed-tensors.


def test_15_a_missing_global_scale():
    report = audit(opened(without(ct_base(), f"{E}.2.gate_proj.weight_global_scale"), CT_CONFIG, None))
    assert found(report) == [("scale.missing", "error", 0, "gate", (2,))]
    assert found(audit(opened(ct_base(), CT_CONFIG, None))) == []


def test_16_a_rename_without_inversion():
    swapped = {name: scalar(1e4) if name.endswith("weight_scale_2") else item for name, item in base().items()}
    report = audit(opened(swapped))
    assert found(report) == [("scale.convention", "error", 0, None, None)]
    swapped = {
        name: tensor(np.float32([1e-4])) if name.endswith("weight_global_scale") else item
        for name, item in ct_base().items()
    }
    report = audit(opened(swapped, CT_CONFIG, None))
    assert found(report) == [("scale.convention", "error", 0, None, None)]


@pytest.mark.parametrize("sidecar", [None, QUANT])
@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4", "MIXED_PRECISION", "NVFP4_AWQ"])
def test_17_modelopts_section_without_its_method(algo, sidecar):
    """vLLM's ModelOpt answers to its own method, and reads the older file only where there is no section at all."""
    section = {"quant_algo": algo, "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    if algo == "MIXED_PRECISION":
        section["quantized_layers"] = {f"model.layers.{k}.mlp.experts": {"quant_algo": "NVFP4"} for k in range(2)}
    named = audit(opened(base(), {**CONFIG, "quantization_config": {**section, "quant_method": "modelopt"}}, sidecar))
    report = audit(opened(base(), {**CONFIG, "quantization_config": section}, sidecar))
    [item] = [one for one in report.findings if one.code == "config.incomplete"]
    assert (item.severity, item.params["fields"], item.params["engines"]) == (
        "backend", "quant_method", ("vllm", "transformers"),
    )  # fmt: skip
    assert [one for one in report.findings if one.code != "config.incomplete"] == list(named.findings)
    before = outcomes(named)
    for name, outcome in outcomes(report).items():
        stops = name.startswith("vllm") or name == "transformers"
        assert outcome == ("load-error" if stops else before[name])


def test_17_a_nested_section_without_its_method():
    """vLLM knows it by its producer; transformers raises an error at any section without a method."""
    nested = {**QUANT, "producer": {"name": "modelopt"}}
    report = audit(opened(base(), {**CONFIG, "quantization_config": nested}, None))
    assert found(report) == [("config.incomplete", "backend", None, None, None)]
    stopped = {name for name, outcome in outcomes(report).items() if outcome != "safe"}
    assert stopped == {"transformers"}
    named = {**nested, "quant_method": "modelopt"}
    assert found(audit(opened(base(), {**CONFIG, "quantization_config": named}, None))) == []
    # The older file's own shape has no method.
    assert found(audit(opened(base(), CONFIG, QUANT))) == []


def test_17_the_dialect_without_a_method_in_the_config():
    quant = {key: value for key, value in CT_QUANT.items() if key != "quant_method"}
    report = audit(opened(ct_base(), {**CONFIG, "quantization_config": quant}, None))
    assert report.format.dialect == "compressed-tensors"
    # vLLM takes it for ModelOpt's, and finds no algorithm.
    assert found(report) == [("config.incomplete", "backend", None, None, None)]
    assert report.findings[0].params["fields"] == "quant_method"
    by = {item.name: (item.outcome, item.why) for item in report.backends}
    for name, (outcome, why) in by.items():
        # Transformers stops at a section without a method too; SGLang and TensorRT-LLM were not read for it.
        assert outcome == ("load-error" if name.startswith(("vllm", "transformers")) else "safe")
        assert "algorithm" not in why
    assert found(audit(opened(ct_base(), CT_CONFIG, None))) == []


# 19, 20. Names.


def test_19_projection_major_names():
    assert found(audit(opened(base(projection_major=True)))) == []
    lost = without(base(projection_major=True), "experts.up_proj.2.input_scale")
    assert found(audit(opened(lost))) == [("scale.missing", "backend", 0, "up", (2,))]


@pytest.mark.parametrize("block", ["model.layers.{}.moe.experts", "model.layers.{}.experts"])
def test_20_gemma_names(block):
    router = {"model.layers.0.router.per_expert_scale": tensor(np.zeros(4, np.float32))}
    assert found(audit(opened({**base(block=block.format), **router}))) == []
    lost = without(base(block=block.format), "experts.2.up_proj.input_scale")
    assert found(audit(opened({**lost, **router}))) == [("scale.missing", "backend", 0, "up", (2,))]


# 23, 24, 27. Weights.


def test_23_an_expert_that_is_not_quantised_and_not_excluded():
    tensors = without(base(), f"{E}.0.down_proj")
    tensors[f"{E}.0.down_proj.weight"] = tensor(np.zeros((32, 16), np.float16))
    assert found(audit(opened(tensors))) == [("weight.unquantised", "error", 0, "down", (0,))]
    # vLLM packs all of a layer's experts, whatever the list says of one.
    quant = {"quantization": {**QUANT["quantization"], "exclude_modules": [f"{E}.0.down_proj"]}}
    assert found(audit(opened(tensors, CONFIG, quant))) == [("weight.unquantised", "backend", 0, None, (0,))]


def test_24_no_second_level_at_all_and_no_gate():
    tensors = without(base(gated=False, block="backbone.layers.{}.mixer.experts".format), "weight_scale_2")
    report = audit(opened(tensors))
    assert found(report) == [("scale.missing", "error", 0, p, (0, 1, 2, 3)) for p in ("up", "down")]
    assert "gate" not in report.model.projections


@pytest.mark.parametrize(("k", "columns"), [(24, 1), (24, 2), (40, 2), (40, 3)])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_k_that_is_no_whole_number_of_blocks_is_named_itself(k, columns, language):
    one = {
        f"{E}.1.up_proj.weight": tensor(np.zeros((16, k // 2), np.uint8)),
        f"{E}.1.up_proj.weight_scale": tensor(np.full((16, columns), 0x38, np.uint8), "F8_E4M3"),
    }
    report = audit(opened({**base(), **one}))
    assert found(report) == [("block-scale.group", "error", 0, "up", (1,))]
    message, advice = describe(report.findings[0], language)
    assert f" {k}" in message
    assert "16" in message
    assert "16" in advice


def test_an_empty_weight_has_no_blocks_to_speak_of():
    one = {
        f"{E}.1.up_proj.weight": tensor(np.zeros((0, 16), np.uint8)),
        f"{E}.1.up_proj.weight_scale": tensor(np.zeros((0, 2), np.uint8), "F8_E4M3"),
    }
    report = audit(opened({**base(), **one}))
    assert [item.code for item in report.findings] == ["block-scale.group"]
    assert "hold no values" in report.findings[0].message


@pytest.mark.parametrize(("columns", "dtype"), [(1, "F8_E4M3"), (2, "F8_E8M0")])
def test_27_block_scales_of_another_scheme(columns, dtype):
    tensors = {**base(), f"{E}.1.up_proj.weight_scale": tensor(np.full((16, columns), 0x38, np.uint8), dtype)}
    report = audit(opened(tensors))
    assert found(report) == [("block-scale.group", "error", 0, "up", (1,))]
    assert ("32" if columns == 1 else "16") in report.findings[0].message


# 34 to 37. Configuration, drafts, exclusions.


@pytest.mark.parametrize("block", ["model.layers.1.mlp.experts", "mtp.layers.0.mlp.experts"])
def test_34_a_draft_layer_in_bf16_is_not_missing(block):
    plain = {
        f"{block}.{e}.{p}_proj.weight": tensor(np.zeros((16, 32), np.float16)) for e in range(4) for p in ("gate", "up")
    }
    report = audit(opened({**base(), **plain}))
    assert found(report) == [("config.unquantised-not-excluded", "warn", None, None, None)]
    assert [item.code for item in report.findings] == ["config.unquantised-not-excluded", "draft.unquantised"]
    quant = {"quantization": {**QUANT["quantization"], "exclude_modules": ["mtp*", "model.layers.1.*"]}}
    report = audit(opened({**base(), **plain}, CONFIG, quant))
    assert [item.code for item in report.findings] == ["draft.unquantised"]


def test_34_a_quantised_draft_layer_is_audited():
    draft = without(base(block=lambda _: "mtp.layers.0.mlp.experts"), "experts.3.up_proj.input_scale")
    assert found(audit(opened({**base(), **draft}))) == [("scale.missing", "backend", 1, "up", (3,))]


def test_35_excluded_but_quantised():
    head = {f"lm_head.{name.rsplit('.', 1)[1]}": item for name, item in base().items() if f"{E}.0.up_proj" in name}
    report = audit(opened({**base(), **head}))
    assert found(report) == [("config.excluded-but-quantised", "warn", None, None, None)]
    assert report.findings[0].tensors == ("lm_head.weight_scale_2",)


@pytest.mark.parametrize(
    ("config", "quant", "expected"),
    [
        (CONFIG, QUANT, []),
        (flat(), None, []),
        (flat(), QUANT, []),
        (flat(ignore=["lm_head"]), QUANT, [("config.conflict", "warn")]),
        (flat(quant_algo="W4A16_NVFP4"), QUANT, [("config.conflict", "backend"), ("config.conflict", "warn")]),
        (flat(group_size=32), QUANT, [("config.conflict", "error")]),
        (CONFIG, None, [("config.absent", "error")]),
        (None, QUANT, []),
        (None, None, [("config.absent", "warn")]),
        (flat(quant_method="fp8"), None, [("config.conflict", "error")]),
        (CONFIG, {"quantization": {"quant_algo": "NVFP4"}}, [("config.incomplete", "backend")]),
        ({**CONFIG, "num_experts": 3}, QUANT, [("config.conflict", "error")]),
    ],
)
def test_36_the_two_configurations(config, quant, expected):
    report = audit(opened(base(), config, quant))
    assert [(code, severity) for code, severity, *_ in found(report)] == expected
    sources = [
        name
        for name, content in (
            ("config.json", config and config.get("quantization_config")),
            ("hf_quant_config.json", quant),
        )
        if content
    ]
    assert list(report.format.config_sources) == sources
    if ("config.incomplete", "backend") in expected:
        assert outcomes(report)["vllm-marlin"] == "load-error"
        assert outcomes(report)["transformers"] == "safe"


def test_37_a_mixed_file_is_an_allow_list():
    quant = {
        "quantization": {
            **QUANT["quantization"],
            "quant_algo": "MIXED_PRECISION",
            "exclude_modules": [],
            "quantized_layers": {E: {"quant_algo": "NVFP4", "group_size": 16}},
        }
    }
    other = {"model.layers.0.linear_attn.in_proj_a.weight": tensor(np.zeros((4, 32), np.float16))}
    assert found(audit(opened({**base(), **other}, CONFIG, quant))) == []


# 40, 47. Outliers and shapes.


def test_40_one_scale_a_thousand_times_its_peers():
    report = audit(opened({**base(), f"{E}.0.gate_proj.input_scale": scalar(2.0)}))
    assert found(report) == [("scale.outlier", "warn", 0, "gate", (0,))]
    by = {item.name: item for item in report.backends}
    assert (by["vllm-flashinfer-cutlass"].outcome, by["vllm-flashinfer-cutlass"].scope) == ("degraded", "layer")
    assert (by["vllm-cutlass"].outcome, by["vllm-cutlass"].scope) == ("degraded", "experts")


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
def test_40_the_value_and_the_median_are_of_one_kind(id, role):
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    peers = [layout.get(tensors, e, "down", role) for e in range(8)]
    layout.put(
        tensors, 3, "down", role, layout.stored(1000 * float(np.float32(1) / peers[3] if layout.divisors else peers[3]))
    )
    [item] = [item for item in audit(layout.open(tensors)).findings if item.code == "scale.outlier"]
    assert float(item.params["median"]) == pytest.approx(float(np.median(peers)), rel=0.1)
    assert f"{item.params['median']}" in item.message
    assert ("divisor" in item.message) == layout.divisors
    assert item.value == pytest.approx(float(peers[3]) * (0.001 if layout.divisors else 1000))


@pytest.mark.parametrize(("shape", "codes"), [((), []), ((1,), ["scale.shape"]), ((1, 1), ["scale.shape"])])
def test_47_scalars_of_any_shape(shape, codes):
    report = audit(opened(base(scalar_shape=shape)))
    assert found(report) == []
    assert [item.code for item in report.findings] == codes


@pytest.mark.parametrize(
    "item", [tensor(np.zeros(4, np.float32)), tensor(np.zeros(2, np.float16)), tensor(np.zeros(0, np.float32))]
)
def test_47_what_is_no_scalar(item):
    report = audit(opened({**base(), f"{E}.1.down_proj.input_scale": item}))
    assert found(report) == [("scale.shape", "error", 0, "down", (1,))]
    assert report.coverage["input_scale"].invalid == 1


SCALES = ("weight_scale_2", "input_scale")


@pytest.mark.parametrize("dtype", list(HALF))
@pytest.mark.parametrize("id", [id for id, layout in LAYOUTS.items() if layout.block == "NVFP4"])
def test_47_scalars_in_half_precision(id, dtype):
    """Servers copy them into F32 parameters: sound in every layout, and each judged as any other number."""
    layout = LAYOUTS[id]
    healthy = in_type(layout.tensors(), dtype)
    report = audit(layout.open(healthy))
    assert found(report) == []
    halves = [item for item in report.findings if item.text == "scale.shape.half"]
    assert {(item.severity, item.params["dtype"]) for item in halves} == {("info", dtype)}
    scales = {
        layout.name(expert, kind, role)
        for expert in range(8)
        for kind in layout.kinds
        for role in SCALES
        if role in layout.roles
    }
    assert [item.count for item in halves if item.tensors[0] in scales] == [len(scales & set(healthy))]
    assert {item.outcome for item in report.backends} <= {item.outcome for item in audit(layout.open()).backends}
    for value, code in ((0.0, "zero"), (np.nan, "nan"), (-1.0, "negative")):
        tensors = dict(healthy)
        name = layout.name(1, "down", "weight_scale_2")
        old = tensors[name]
        bad = np.frombuffer(old.tobytes(), HALF[dtype]).reshape(old.shape).copy()
        bad.reshape(-1)[1 if bad.size > 1 else 0] = value
        tensors[name] = tensor(bad)
        codes = [item.code for item in audit(layout.open(tensors)).findings if item.severity == "error"]
        inverse = layout.divisors and code == "zero"
        assert codes == ["scale.inf" if inverse else f"scale.{code}"]


# 48. KV-cache scales.


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.01, None), (1.0, ("kv.identity", "info")), (0.0, ("kv.zero", "error")), (np.nan, ("kv.invalid", "error"))],
)
def test_48_kv_scales(value, expected):
    tensors = {**base(), "model.layers.0.self_attn.k_proj.k_scale": scalar(value)}
    report = audit(opened(tensors))
    assert [(item.code, item.severity) for item in report.findings] == ([expected] if expected else [])


@pytest.mark.parametrize("half", ["BF16", "F16"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.5, None), (1.0, ("kv.identity", "info")), (0.0, ("kv.zero", "error")), (np.inf, ("kv.invalid", "error"))],
)
def test_48_kv_scales_in_half_precision(half, value, expected):
    """llm-compressor stores them in the model's type; the first tensor and the last of a file too."""
    quant = {"quantization": {**QUANT["quantization"], "kv_cache_quant_algo": "FP8"}}
    for name in ("model.layers.0.self_attn.k_scale", "zz.v_scale"):
        entry = tensor(np.array(value, np.float16 if half == "F16" else ml_dtypes.bfloat16))
        for tensors in ({name: entry, **base()}, {**base(), name: entry}):
            report = audit(opened(tensors, CONFIG, quant))
            # That the other one is absent is another finding.
            found = [(item.code, item.severity) for item in report.findings if item.code != "kv.absent"]
            assert found == ([expected] if expected else [])


def test_48_a_kv_scale_without_its_partner():
    attention = "model.layers.0.self_attn"
    weights = {f"{attention}.{name}_proj.weight": bf16(32, 32) for name in "kv"}
    excluded = [*QUANT["quantization"]["exclude_modules"], f"{attention}*"]
    quant = {"quantization": {**QUANT["quantization"], "exclude_modules": excluded}}
    for k, v in (("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale")):
        both = {**base(), **weights, f"{attention}.{k}": scalar(0.01), f"{attention}.{v}": scalar(0.02)}
        assert not audit(opened(both, CONFIG, quant)).findings
        for name in (k, v):
            [finding] = audit(opened(without(both, f"{attention}.{name}"), CONFIG, quant)).findings
            assert (finding.code, finding.severity, finding.count) == ("kv.absent", "info", 1)
        # A layer whose values are its keys has no other one.
        keys = without(without(both, f"{attention}.v_proj.weight"), f"{attention}.{v}")
        assert not audit(opened(keys, CONFIG, quant)).findings


def test_48_absent_kv_scales():
    quant = {"quantization": {**QUANT["quantization"], "kv_cache_quant_algo": "FP8"}}
    report = audit(opened(base(), CONFIG, quant))
    assert [(item.code, item.severity) for item in report.findings] == [("kv.absent", "info")]


# Whole experts.


def test_absent_experts_and_gaps_are_one_finding_each():
    report = audit(opened(without(base(), f"{E}.3.")))
    assert found(report) == [("expert.absent", "error", 0, None, (3,))]
    report = audit(opened(without(base(), f"{E}.1.")))
    assert found(report) == [("expert.gap", "error", 0, None, (1,))]
    assert report.coverage["input_scale"].missing == 3
    report = audit(opened(without(base(), f"{E}.1.up_proj")))
    assert found(report) == [("expert.absent", "error", 0, "up", (1,))]
    both = audit(opened(without(base(experts=6), f"{E}.1.", f"{E}.5."), {**CONFIG, "num_experts": 6}))
    assert found(both) == [("expert.absent", "error", 0, None, (5,)), ("expert.gap", "error", 0, None, (1,))]


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.arrangement == "expert"])
def test_whose_word_it_is_that_a_layer_has_more_experts(name):
    """The configuration's or the router's, which is proof; or another layer's, which is a suspicion."""
    layout, last = LAYOUTS[name], EXPERTS - 1
    one = {key: item for key, item in layout.tensors().items() if key.startswith(layout.prefix)}
    second = layout.prefix.replace("layers.0.", "layers.1.")
    short = {key.replace(layout.prefix, second): item for key, item in one.items() if f".{last}." not in key}
    whole = {key.replace(layout.prefix, second): item for key, item in one.items()}
    block = second.rpartition(".")[0]
    router = {f"{block}.gate.weight": bf16(EXPERTS, HIDDEN)}
    config = {**(layout.config or {}), "num_hidden_layers": 2}
    seen = {}
    for text, more, changed in (
        ("expert.absent", {}, config),
        ("expert.absent.router", router, None),
        ("expert.absent.other", {}, None),
    ):
        quant = layout.quant if changed else None
        report = audit(opened({**one, **short, **more}, changed, quant))
        [item] = [item for item in report.findings if item.code == "expert.absent"]
        assert (item.text, item.layer, item.experts) == (text, 1, (last,))
        assert item.severity == ("warn" if text.endswith("other") else "error")
        for language in ("en", "zh"):
            said = describe(item, language)
            assert any(word in said[0] for word in ("onfiguration says", "配置说共")) == (text == "expert.absent")
        seen[text] = {item.name: item for item in report.backends}
        sound = audit(opened({**one, **whole, **more}, changed, quant))
        assert not [item for item in sound.findings if item.code == "expert.absent"]
    for backend, found_here in seen["expert.absent.other"].items():
        proven = seen["expert.absent.router"][backend]
        if found_here.outcome != "unsupported":
            assert found_here.outcome == proven.outcome
            assert "safe" in found_here.possible
            assert "safe" not in proven.possible


def test_a_pruned_model_that_kept_its_numbers():
    """As many experts as the configuration says, with gaps: worth knowing, and no lost shard."""
    tensors = without(base(experts=6), f"{E}.1.", f"{E}.4.")
    report = audit(opened(tensors, {**CONFIG, "num_experts": 4}))
    assert found(report) == []
    assert [(item.code, item.experts) for item in report.findings] == [("expert.gap", (1, 4))]
    assert report.coverage["input_scale"].expected == report.coverage["input_scale"].present == 12
    assert set(outcomes(report).values()) == {"safe"}
    # A loader that counts from zero does not find them all.
    for one in report.backends:
        assert {"load-error", "safe"} <= set(one.possible)
        assert ("zero" in one.possible) == (one.name != "tensorrt-llm")
    # One expert fewer than it says is a gap again.
    report = audit(opened(without(tensors, f"{E}.2."), {**CONFIG, "num_experts": 4}))
    assert {code for code, *_ in found(report)} == {"expert.gap", "config.conflict"}


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_one_layer_with_other_numbers_was_not_pruned(layers):
    """Pruning leaves gaps in nearly every layer: one of four alone is an error, with slots that nobody writes."""
    tensors = {}
    for k in range(layers):
        for name, item in base(experts=4).items():
            number = "4" if k == 0 and f"{E}.1." in name else "1"
            tensors[name.replace("layers.0", f"layers.{k}").replace("experts.1.", f"experts.{number}.")] = item
    report = audit(opened(tensors, {**CONFIG, "num_experts": 4, "num_hidden_layers": layers}))
    [item] = [one for one in report.findings if one.code != "loader.note"]
    text, severity = ("renumbered", "error") if layers == 4 else ("pruned", "info")
    assert (item.text, item.severity, item.experts) == (f"expert.gap.{text}", severity, (1,))
    assert report.coverage["input_scale"].present == 12 * layers
    wanted = {"undefined", "load-error"} if layers == 4 else {"safe"}
    assert set(outcomes(report).values()) == wanted


def test_a_pruned_model_whose_config_agrees_is_sound():
    assert found(audit(opened(base(experts=3), {**CONFIG, "num_experts": 3}))) == []


# Back-filled values.


@pytest.mark.parametrize(
    ("value", "origin"),
    [
        (np.float32(0.5) / np.float32(2688), "default-amax"),
        (np.float32(1.8601191e-4), "default-amax"),
        (np.float32(2.2321429e-3), "max-bound"),
        (np.float32(1.2659e35) * 0 + np.finfo(np.float32).max / np.float32(2688), "float-max"),
        (np.float32(1) / np.float32(2688), "per-token-base"),
    ],
)
def test_fingerprints_of_values_that_nobody_measured(value, origin):
    report = audit(opened({**base(), f"{E}.1.gate_proj.input_scale": scalar(value)}))
    assert found(report) == [("scale.filled", "warn", 0, "gate", (1,))]
    assert report.findings[0].text == f"scale.filled.{origin}"
    assert report.coverage["input_scale"].filled == 1


def test_the_maximum_copied_to_uncalibrated_experts():
    tensors = base(experts=8)
    for kind in ("gate", "up", "down"):
        top = max(float(tensors[f"{E}.{e}.{kind}_proj.input_scale"].data) for e in range(8))
        for expert in (2, 6):
            tensors[f"{E}.{expert}.{kind}_proj.input_scale"] = scalar(top)
    report = audit(opened(tensors, {**CONFIG, "num_experts": 8}))
    assert {code for code, *_ in found(report)} == {"scale.filled"}
    assert all({2, 6} <= set(experts) for *_, experts in found(report))


def spread(coarse: bool) -> dict[str, float]:
    """Eight experts' measured input scales, all different; coarse ones come from BF16 amax."""
    out = {}
    for e in range(8):
        for kind in ("gate", "up", "down"):
            amax = 4.0 + 0.25 * e if coarse else 4.0 + 0.2513 * e
            out[f"{E}.{e}.{kind}_proj.input_scale"] = np.float32(amax) / np.float32(2688)
    return out


def filled(coarse: bool, experts, kinds):
    scales = spread(coarse)
    for kind in kinds:
        for expert in experts:
            scales[f"{E}.{expert}.{kind}_proj.input_scale"] = scales[f"{E}.7.{kind}_proj.input_scale"]
    tensors = {**base(experts=8), **{name: scalar(value) for name, value in scales.items()}}
    return found(audit(opened(tensors, {**CONFIG, "num_experts": 8})))


@pytest.mark.parametrize(
    ("coarse", "experts", "kinds", "noticed"),
    [
        (False, (2,), ("gate", "up", "down"), True),
        (True, (2,), ("gate", "up", "down"), False),  # two of eight may share a BF16 amax by chance
        (True, (2, 5), ("gate", "up", "down"), True),
        (False, (0, 1, 2, 3, 4), ("gate", "up"), False),  # one loud token, routed to all of them
        (False, (2, 3), ("down",), True),
        (False, (2,), ("down",), False),  # what a repair of one slot leaves
        (True, (2, 3), ("down",), False),
        (False, (2, 3), ("gate",), False),
        (False, (0, 1, 2, 3, 4, 5, 6), ("gate", "up", "down"), False),  # a synchronised layer
    ],
)
def test_what_counts_as_a_copied_maximum(coarse, experts, kinds, noticed):
    expected = [("scale.filled", "warn", 0, kind, (*experts, 7)) for kind in kinds]
    assert filled(coarse, experts, kinds) == (expected if noticed else [])


@pytest.mark.parametrize("bound", [7, 10, 49, 56, 100, 55.99963, 48.955318, 24.832679, 99.99546])
def test_the_bound_of_a_clamped_function_is_no_copied_maximum(bound):
    """gpt-oss's SwiGLU ends at 8 x 7, DeepSeek V4's at 10 x 10: what saturates there is equal, and was measured."""
    tensors = {**base(experts=8), **{name: scalar(value) for name, value in spread(coarse=False).items()}}
    tensors |= {f"{E}.{e}.down_proj.input_scale": scalar(np.float32(bound) / np.float32(2688)) for e in (2, 3, 5)}
    assert found(audit(opened(tensors, {**CONFIG, "num_experts": 8}))) == []


def test_synchronised_scales_are_normal():
    """After an amax sync, or with one shared input quantiser, all experts of a layer are equal."""
    tensors = {
        name: scalar(5e-3 if "down" in name else 2e-3) if name.endswith("input_scale") else item
        for name, item in base().items()
    }
    assert found(audit(opened(tensors))) == []


def test_ones_that_nobody_set_are_not_a_copied_maximum():
    tensors = {
        **base(),
        **{f"{E}.{e}.{p}_proj.input_scale": scalar(1.0) for e in (1, 2) for p in ("gate", "up", "down")},
    }
    report = audit(opened(tensors))
    assert found(report) == []
    assert {item.code for item in report.findings} == {"scale.identity"}


@pytest.mark.parametrize(
    ("coarse", "experts", "kinds", "noticed"),
    [
        (False, (2,), ("gate",), True),
        (True, (2,), ("gate",), False),  # BF16 activations do reach exactly 6 now and then
        (True, (2,), ("gate", "up", "down"), False),
        (True, (1, 2, 3), ("gate", "up"), False),  # gate and up see the same token
        (True, (1, 2, 3), ("gate", "up", "down"), True),
        (True, tuple(range(8)), ("gate", "up", "down"), True),
    ],
)
def test_a_fingerprint_that_could_have_been_measured_is_none(coarse, experts, kinds, noticed):
    scales = spread(coarse)
    for kind in kinds:
        for expert in experts:
            scales[f"{E}.{expert}.{kind}_proj.input_scale"] = np.float32(6) / np.float32(2688)
    tensors = {**base(experts=8), **{name: scalar(value) for name, value in scales.items()}}
    report = audit(opened(tensors, {**CONFIG, "num_experts": 8}))
    expected = [("scale.filled", "warn", 0, kind, experts) for kind in kinds]
    assert found(report) == (expected if noticed else [])


# Ordinary layers.


def test_a_shared_expert_with_a_bad_scale():
    shared = {name.replace("experts.0", "shared_experts"): item for name, item in base().items() if f"{E}.0." in name}
    assert found(audit(opened({**base(), **shared}))) == []
    shared["model.layers.0.mlp.shared_experts.up_proj.input_scale"] = scalar(0.0)
    assert found(audit(opened({**base(), **shared}))) == [("scale.zero", "backend", 0, None, None)]


def test_memory_checkpoint_is_what_the_fixtures_use():
    assert memory_checkpoint(base()).name == "in memory"
