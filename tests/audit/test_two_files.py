"""``config.json`` and ``hf_quant_config.json`` that differ: who goes by which, and that a severity is what happens."""

import json

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import MemorySource, tensor
from nvfp4viz.checkpoint.writer import file_bytes
from tests.audit.config_faults import section_of
from tests.audit.layouts import ALLOWED, LAYOUTS, MLP, bf16, fp8, linear, modelopt, with_quant
from tests.audit.reading import NARROW, found, outcomes
from tests.checkpoint.checkpoint_fixtures import CONFIG, FLAT, QUANT, SHAPES, base, opened

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


# Exclude lists: each file's for its own readers.

OTHERS = [name for name in outcomes(audit(opened(base()))) if name != "tensorrt-llm"]
VLLM = [name for name in OTHERS if name.startswith("vllm")]
GATE = ["lm_head", "*mlp.gate"]
LAYER_1 = ["model.layers.1.mlp.experts*"]
Q = "model.layers.0.self_attn.q_proj"


def listing(tensors, first, second, layers=2):
    """Two files with an exclude list each (None: no such field)."""
    section, body = {**FLAT, "ignore": first}, {**QUANT["quantization"], "exclude_modules": second}
    section = {key: item for key, item in section.items() if item is not None}
    config = {**CONFIG, "num_hidden_layers": layers, "quantization_config": section}
    return audit(opened(tensors, config, {"quantization": {k: item for k, item in body.items() if item is not None}}))


def plain(layer, *experts):
    """Two layers, of which some experts of one are in BF16."""
    tensors = base(2)
    for expert in experts:
        at = f"model.layers.{layer}.mlp.experts.{expert}."
        tensors = {name: item for name, item in tensors.items() if not name.startswith(at)}
        for kind, shape in SHAPES.items():
            tensors[f"{at}{kind}_proj.weight"] = tensor(np.zeros(shape, ml_dtypes.bfloat16))
    return tensors


def stopped(report):
    return [name for name, outcome in outcomes(report).items() if outcome != "safe"]


@pytest.mark.parametrize("of_config", [True, False])
def test_a_layer_in_bf16_that_one_list_leaves_out(of_config):
    tensors, long = plain(1, *range(4)), GATE + LAYER_1
    report = listing(tensors, *((long, GATE) if of_config else (GATE, long)))
    every = (0, 1, 2, 3)
    assert sorted(found(report)) == [("weight.unquantised", "backend", 1, kind, every) for kind in sorted(SHAPES)]
    assert stopped(report) == (["tensorrt-llm"] if of_config else OTHERS)
    assert {one.possible for one in report.backends if one.text != NARROW} == {()}
    wrong, readers = ("hf_quant_config.json", "TensorRT-LLM") if of_config else ("config.json", "vLLM")
    for language in ("en", "zh"):
        message, _ = describe(report.findings[0], language)
        assert message.index(wrong) < message.index(readers)
    # In both lists it is sound; in none it is wrong for everybody.
    assert found(listing(tensors, long, long[::-1])) == []
    report = listing(tensors, GATE, GATE)
    assert {row[:2] for row in found(report)} == {("weight.unquantised", "error")}
    assert set(stopped(report)) == {"tensorrt-llm", *OTHERS}
    # An older file that is no list excludes nothing, and one without an algorithm is not gone by.
    assert stopped(listing(tensors, long, None)) == ["tensorrt-llm"]
    config = {**CONFIG, "num_hidden_layers": 2, "quantization_config": {**FLAT, "ignore": long}}
    quant = {"quantization": {**QUANT["quantization"], "quant_algo": None}}
    assert found(audit(opened(tensors, config, quant))) == []


@pytest.mark.parametrize("of_config", [True, False])
def test_a_packed_layer_that_one_list_leaves_out(of_config):
    long = GATE + LAYER_1
    report = listing(base(2), *((long, GATE) if of_config else (GATE, long)))
    assert found(report) == [("config.excluded-but-quantised", "backend", None, None, None)]
    assert stopped(report) == (VLLM if of_config else ["tensorrt-llm"])
    assert found(listing(base(2), GATE, GATE)) == []
    both = listing(base(2), long, long)
    assert found(both) == found(report)
    assert set(stopped(both)) == {*VLLM, "tensorrt-llm"}


def test_the_modules_that_one_list_leaves_out_are_counted_by_that_list():
    """What the other file singles out changes no number."""

    def of_layer(report):
        return [item.count for item in report.findings if item.text == "config.excluded-but-quantised"]

    named = [*GATE, "model.layers.0.mlp.experts.2.down_proj"]
    assert of_layer(listing(base(2), named, GATE + LAYER_1)) == of_layer(listing(base(2), GATE, GATE + LAYER_1)) != []


def test_an_expert_in_bf16_that_one_list_names():
    tensors, long = plain(1, 2), [*GATE, "model.layers.1.mlp.experts.2*"]
    # vLLM packs it with its layer, list or no list; TensorRT-LLM's list does not name it.
    report = listing(tensors, long, GATE)
    assert set(stopped(report)) == {*VLLM, "tensorrt-llm"}
    assert {item.text for item in report.findings} == {"weight.unquantised", "weight.unquantised.left-alone"}
    assert {item.severity for item in report.findings} == {"backend"}
    report = listing(tensors, GATE, long)
    assert stopped(report) == OTHERS
    assert {item.text for item in report.findings} == {"weight.unquantised"}


@pytest.mark.parametrize("of_config", [True, False])
def test_an_ordinary_layer_that_one_list_leaves_out(of_config):
    long = [*GATE, Q]
    lists = (long, GATE) if of_config else (GATE, long)
    reader = ("TensorRT-LLM", "vLLM") if of_config else ("vLLM", "TensorRT-LLM")
    for tensors, code, who in (
        (bf16(16, 32), "config.unquantised-not-excluded", reader[0]),
        (None, "config.excluded-but-quantised", reader[1]),
    ):
        more = linear(Q) if tensors is None else {f"{Q}.weight": tensors}
        report = listing({**base(), **more}, *lists, layers=1)
        assert found(report) == [(code, "warn", None, None, None)]
        assert who in report.findings[0].message
        # Of vLLM it is known that it builds what its list does not leave out as quantised.
        known = tensors is not None and not of_config
        assert stopped(report) == [name for name in outcomes(report) if name.startswith("vllm-")] * known
    # FP8 under a four-bit label, where no list leaves it alone.
    report = listing({**base(), **fp8(Q)}, *lists, layers=1)
    [item] = [one for one in report.findings if one.code == "config.conflict"]
    assert item.severity == "backend"
    assert stopped(report) == (["tensorrt-llm"] if of_config else OTHERS)


def test_two_spellings_of_one_list():
    """What the lists exclude is compared, not how they say it."""
    spelled = ["lm_head", "*mlp.gate*", "model.layers.*.mlp.gate"], ["lm_head", "model.layers.*.mlp.gate"]
    assert listing(base(2), *spelled).findings == ()
    # A name that is not there, and a head that only one list leaves out.
    assert listing(base(2), [*GATE, "model.vision*"], GATE).findings == ()
    head = {**base(2), "lm_head.weight": bf16(64, 32)}
    report = listing(head, GATE, ["*mlp.gate"])
    assert found(report) == [("config.conflict", "warn", None, None, None)]
    assert "lm_head" in report.findings[0].message
    assert report.findings[0].count == 1
    assert stopped(report) == []
    assert listing(head, GATE, ["*mlp.gate", "lm_head*"]).findings == ()


# A file that is none, or lacks what its reader looks up.

BROKEN = {
    "not JSON": b"{", "LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n", "list": b"[]",
    "empty": b"",
}  # fmt: skip


def files(config, sidecar):
    out = {"model.safetensors": file_bytes(base())}
    for name, content in (("config.json", config), ("hf_quant_config.json", sidecar)):
        if content is not None:
            out[name] = content if isinstance(content, bytes) else json.dumps(content).encode()
    return audit(MemorySource(out))


@pytest.mark.parametrize("kind", BROKEN)
def test_one_broken_file_of_two(kind):
    good = {**CONFIG, "quantization_config": FLAT}
    report = files(good, BROKEN[kind])
    assert found(report) == [("config.invalid", "backend", None, None, None)]
    assert stopped(report) == ["tensorrt-llm"]
    assert "TensorRT-LLM" in report.findings[0].message
    # Everybody reads config.json, whose other numbers no other file has; and the older one where nothing else speaks.
    for report in (files(BROKEN[kind], QUANT), files(CONFIG, BROKEN[kind])):
        assert found(report) == [("config.invalid", "error", None, None, None)]
        assert set(stopped(report)) == {*OTHERS, "tensorrt-llm"}
    assert found(files(good, QUANT)) == []


@pytest.mark.parametrize("sidecar", [{}, QUANT["quantization"], {"quantization": None}])
def test_an_older_file_without_the_object_that_its_reader_looks_up(sidecar):
    report = files({**CONFIG, "quantization_config": FLAT}, sidecar)
    assert found(report) == [("config.incomplete", "backend", None, None, None)]
    assert stopped(report) == ["tensorrt-llm"]


def test_a_label_that_asks_for_scales_which_are_not_there():
    """The older file alone is a KeyError in TensorRT-LLM, and beside another file it is the same one."""
    tensors = {name: item for name, item in base().items() if not name.endswith("input_scale")}
    for report in (both(None, "NVFP4", tensors), both("W4A16_NVFP4", "NVFP4", tensors)):
        [reader] = [one for one in report.backends if one.name == "tensorrt-llm"]
        assert (reader.outcome, reader.possible) == ("load-error", ())
    [reader] = [one for one in both("W4A16_NVFP4", "NVFP4").backends if one.name == "tensorrt-llm"]
    assert reader.possible == ("load-error", "safe")
