"""``config.json`` and ``hf_quant_config.json`` that differ: who goes by which, and that a severity is what happens."""

import pytest

from nvfp4viz.audit import audit, describe
from tests.audit.config_faults import section_of
from tests.audit.layouts import ALLOWED, LAYOUTS, MLP, modelopt, with_quant
from tests.audit.reading import found, outcomes
from tests.checkpoint.checkpoint_fixtures import CONFIG, FLAT, QUANT, base, opened

ALGOS = [
    "NVFP4", "nvfp4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8", "FP8", "FP8_PB_WO", "MXFP8", "MXFP4", "INT4_AWQ",
    "NONE", "MIXED_PRECISION",
]  # fmt: skip
FITS = {"NVFP4", "nvfp4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8"}


def both(first, second, tensors=None, **sides):
    """A ModelOpt checkpoint whose two files name an algorithm each (None: no such file)."""
    config = CONFIG if first is None else {**CONFIG, "quantization_config": {**FLAT, "quant_algo": first, **sides}}
    quant = None if second is None else {"quantization": {**QUANT["quantization"], "quant_algo": second}}
    return audit(opened(base() if tensors is None else tensors, config, quant))


def contradictions(report, healthy):
    """What the findings' severity promises and the forecasts do not keep.

    An error is wrong on every backend, ``backend`` on some, and what is less leaves every forecast as it was.
    """
    bad = {name: outcome not in ("safe", "ignored") for name, outcome in outcomes(report).items()}
    worst = report.verdict
    if worst == "error":
        return [name for name, is_bad in bad.items() if not is_bad]
    if worst == "backend":
        return [] if any(bad.values()) and not all(bad.values()) else ["all" if all(bad.values()) else "none"]
    return [name for name, outcome in outcomes(report).items() if outcome != outcomes(healthy)[name]]


@pytest.mark.parametrize("first", ALGOS)
@pytest.mark.parametrize("second", ALGOS)
@pytest.mark.parametrize("activations", [True, False])
def test_severity_and_forecast_agree_for_every_pair_of_labels(first, second, activations):
    tensors = {name: item for name, item in base().items() if activations or not name.endswith("input_scale")}
    report, alone = both(first, second, tensors), both(first, None, tensors)
    labels = [item for item in report.findings if item.code == "config.conflict" and "weight-only" not in item.text]
    # One cause, one finding.
    assert len(labels) <= 1
    assert bool(labels) == (first.upper() != second.upper() or (first not in FITS and first != "MIXED_PRECISION"))
    if labels or report.verdict in ("ok", "info"):
        # Without activation scales TensorRT-LLM serves these tensors under no label.
        assert contradictions(report, alone) in ([], [] if activations else ["all"])
    # Whoever reads config.json first sees no other file.
    of_config = [name for name in outcomes(report) if name != "tensorrt-llm"]
    assert [outcomes(report)[name] for name in of_config] == [outcomes(alone)[name] for name in of_config]


@pytest.mark.parametrize("wrong", ["FP8", "INT4_AWQ", "MXFP8", "MXFP4"])
@pytest.mark.parametrize("right", ["NVFP4", "nvfp4"])
def test_one_wrong_label_of_two(right, wrong):
    stale = both(right, wrong)
    assert found(stale) == [("config.conflict", "backend", None, None, None)]
    [item] = stale.findings
    assert (item.text, item.params["first"], item.params["second"]) == ("config.conflict.files", "NVFP4", wrong)
    assert {name for name, outcome in outcomes(stale).items() if outcome != "safe"} == {"tensorrt-llm"}
    assert outcomes(stale)["tensorrt-llm"] == "load-error"
    [reader] = [one for one in stale.backends if one.name == "tensorrt-llm"]
    assert reader.possible == ()
    assert wrong in reader.why
    new = both(wrong, right)
    assert found(new) == [("config.conflict", "backend", None, None, None)]
    assert {name for name, outcome in outcomes(new).items() if outcome == "safe"} == {"tensorrt-llm"}
    [item] = new.findings
    assert (item.text, item.params["file"]) == ("config.conflict.format.one-file", "config.json")
    for language in ("en", "zh"):
        message, _ = describe(item, language)
        assert all(word in message for word in ("vLLM", "SGLang", "config.json", "hf_quant_config.json", wrong))
    assert found(both(wrong, wrong)) == [("config.conflict", "error", None, None, None)]
    assert found(both(right, right)) == []
    assert found(both(right, None)) == []
    assert found(both(None, right)) == []


@pytest.mark.parametrize(
    ("first", "second"), [("NVFP4", "W4A16_NVFP4"), ("NVFP4", "NVFP4_AWQ"), ("W4A16_NVFP4", "NVFP4")]
)
def test_two_labels_that_the_tensors_allow(first, second):
    report = both(first, second)
    [item] = [one for one in report.findings if one.text == "config.conflict.files"]
    assert item.severity == "backend"
    [reader] = [one for one in report.backends if one.name == "tensorrt-llm"]
    assert (reader.outcome, reader.possible) == ("load-error", ("load-error", "safe"))


def test_an_older_file_without_an_algorithm_sends_its_reader_to_the_other():
    quant = {"quantization": {**QUANT["quantization"], "quant_algo": None}}
    assert found(audit(opened(base(), {**CONFIG, "quantization_config": FLAT}, quant))) == []
    wrong = {**CONFIG, "quantization_config": {**FLAT, "quant_algo": "FP8"}}
    report = audit(opened(base(), wrong, quant))
    assert found(report) == [("config.conflict", "error", None, None, None)]
    assert set(outcomes(report).values()) == {"load-error"}


def test_a_list_of_the_file_that_vllm_does_not_read():
    """Its allow-list calls the experts FP8; config.json calls all of them NVFP4."""
    layout = LAYOUTS["modelopt"]
    quant = modelopt("MIXED_PRECISION", exclude=(), quantized_layers={MLP: {"quant_algo": "FP8"}})
    section = {"quant_method": "modelopt", **section_of(layout), "exclude_modules": []}
    report = audit(layout.open(config=with_quant(section), quant=quant))
    assert found(report) == [("config.conflict", "backend", None, None, None)]
    assert {name for name, outcome in outcomes(report).items() if outcome != "safe"} == {"tensorrt-llm"}
    quant = modelopt("MIXED_PRECISION", exclude=(), quantized_layers={MLP: ALLOWED[MLP]})
    section = {"quant_method": "modelopt", **quant["quantization"]}
    assert found(audit(layout.open(config=with_quant(section), quant=quant))) == []


def test_deepseeks_method_and_an_older_file_that_is_wrong():
    """`quant_method: fp8` is no claim about the experts; `moe_quant_algo` is, and the older file is against it."""
    layout = LAYOUTS["DeepSeek V4, three formats"]
    assert found(audit(layout.open(quant=modelopt("NVFP4", exclude=())))) == []
    report = audit(layout.open(quant=modelopt("INT4_AWQ", exclude=())))
    assert found(report) == [("config.conflict", "backend", None, None, None)]
    [item] = [one for one in report.findings if one.code == "config.conflict"]
    assert (item.params["first"], item.params["second"]) == ("NVFP4", "INT4_AWQ")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (16, 16, []),
        (16, 32, [("config.conflict", "backend", None, None, None)]),
        (32, 16, [("config.conflict", "error", None, None, None)]),
        (32, 32, [("config.conflict", "error", None, None, None)]),
        (32, 64, [("config.conflict", "error", None, None, None)]),
    ],
)
def test_block_widths(first, second, expected):
    quant = {"quantization": {**QUANT["quantization"], "group_size": second}}
    report = audit(opened(base(), {**CONFIG, "quantization_config": {**FLAT, "group_size": first}}, quant))
    assert found(report) == expected
    assert contradictions(report, both("NVFP4", None)) == []
