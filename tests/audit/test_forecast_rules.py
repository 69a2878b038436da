"""Forecasts that rest on something else than a scale: what a backend's class takes, and what is not known of it."""

import re

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe, for_ranks, run_audit
from nvfp4viz.audit.backends import FAMILIES
from nvfp4viz.audit.parallel import expert_width
from nvfp4viz.checkpoint import Tensor
from nvfp4viz.serving.selection import MOE, MoeRequest, select_moe
from tests.audit.layouts import CONFIG, EXPERTS, HIDDEN, LAYOUTS, WIDTH, bf16, modelopt, packed, with_quant
from tests.audit.reading import found, outcomes
from tests.audit.test_shapes import resized

STATIC = "Quark, static FP8 inputs"
READING = {name for name, family in FAMILIES.items() if family.reach != "none" and family.mxfp4}


def with_config(layout, **more):
    """The layout's configuration with further settings where the text model's are."""
    config = layout.config
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **more}}
    return {**config, **more}


def unsupported(report):
    return {item.name: item.why for item in report.backends if item.outcome == "unsupported"}


FUNCTIONS = {
    "hidden_act": {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"},
    "hidden_activation": {"gelu_pytorch_tanh": "gelu_tanh"},
    "mlp_hidden_act": {"relu2": "relu2_no_mul"},
}


@pytest.mark.parametrize("id", ["modelopt", "Gemma 4, .moe.", "fused", "stacked", "compressed-tensors", "W4A16"])
@pytest.mark.parametrize(("key", "name"), [(key, name) for key, names in FUNCTIONS.items() for name in names])
def test_the_experts_activation_function_decides_who_serves_them(id, key, name):
    """Section 5.1: the class's list of activations; an explicit choice of another is refused, without a fallback."""
    layout = LAYOUTS[id]
    report = audit(layout.open(config=with_config(layout, **{key: name})))
    assert found(report) == []
    function = FUNCTIONS[key][name]
    refusing = {
        row.id for row in MOE
        if row.id in FAMILIES and (layout.scheme not in row.serves or function not in (row.activations or [function]))
    }  # fmt: skip
    # Others than vLLM's were not read.
    assert {item for item in unsupported(report) if item.startswith("vllm")} == refusing
    assert (function == "silu" or layout.scheme == "W4A16") or len(refusing) >= (function != "relu2_no_mul")
    for row in MOE:
        if row.id in refusing and row.flag:
            gpu = "sm_100" if row.devices and row.devices[0][0] == 100 else "sm_120"
            request = MoeRequest(gpu, function, layout.scheme, humming=True, choice=row.flag)
            assert select_moe(request).error is not None, row.id


def test_a_function_that_nobody_lists_refuses_nothing():
    """What vLLM takes an unheard-of name for was not read."""
    layout = LAYOUTS["modelopt"]
    assert unsupported(audit(layout.open(config=with_config(layout, hidden_act="quick_gelu")))) == {}


@pytest.mark.parametrize("limit", [7.0, 7, None])
def test_a_clamped_gate_is_more_than_one_backend_applies(limit):
    layout = LAYOUTS["modelopt"]
    report = audit(layout.open(config=with_config(layout, swiglu_limit=limit)))
    assert found(report) == []
    assert set(unsupported(report)) == ({"vllm-flashinfer-b12x"} if limit else set())


def test_a_bad_scale_does_not_hide_that_a_class_refuses():
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    layout.put(tensors, 3, "down", "input_scale", np.nan)
    report = audit(layout.open(tensors, config=with_config(layout, hidden_act="gelu_pytorch_tanh")))
    assert outcomes(report)["vllm-flashinfer-cutedsl"] == "unsupported"
    assert outcomes(report)["vllm-cutlass"] == "nan"


def test_only_vllm_s_backends_are_chosen_explicitly():
    """A weight-only checkpoint: SGLang and TensorRT-LLM have no ``--moe-backend`` of vLLM's."""
    refused = unsupported(audit(LAYOUTS["W4A16"].open()))
    assert {"vllm-cutlass", "sglang-flashinfer", "sglang-generic", "tensorrt-llm"} <= set(refused)
    for name, why in refused.items():
        assert ("vLLM" in why) == name.startswith("vllm"), (name, why)


# Quark's MXFP4 with one FP8 scale of activations a module.


@pytest.mark.parametrize(
    ("id", "projection"),
    [(id, kind) for id, one in LAYOUTS.items() if one.block == "MXFP4" and one.with_input for kind in one.kinds],
)
@pytest.mark.parametrize(
    ("value", "outcome"),
    [(0.0, "zero"), (np.nan, "nan"), (np.inf, "nan"), (-1e-3, "degraded"), (4.4e-42, "zero"), (None, "undefined")],
)
def test_a_bad_static_input_scale_reaches_every_backend_that_may_read_it(id, projection, value, outcome):
    """A finding is ``backend`` where it is wrong on some, and the report says which (`audit.md`)."""
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    if value is None:
        del tensors[layout.name(3, projection, "input_scale")]
    else:
        layout.put(tensors, 3, projection, "input_scale", layout.stored(value))
    report = audit(layout.open(tensors))
    assert [row[1] for row in found(report)] == ["backend"]
    for item in report.backends:
        if item.name in READING:
            alone = layout.arrangement == "expert"
            assert (item.outcome, item.scope, item.layers) == (outcome, "experts" if alone else "layer", (0,)), item
            # That it reads them at all is not known.
            assert {"ignored", outcome} - {"undefined"} <= set(item.possible)
            assert ("expert 3" in item.why) == alone
        else:
            assert item.outcome in ("ignored", "unsupported")
        for language in ("en", "zh"):
            assert "MXFP4 has block scales only" not in describe(item, language)[0]


def test_so_does_one_under_quark_s_other_name():
    """``input_quantizer.scale`` (vllm#49420)."""
    layout = LAYOUTS[STATIC]
    names = {".weight_scale": ".weight_quantizer.scale", ".input_scale": ".input_quantizer.scale"}
    tensors = {}
    for name, item in layout.tensors().items():
        for old, new in names.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        tensors[name] = item
    assert found(audit(layout.open(tensors))) == []
    lost = f"{layout.prefix}.3.up_proj.input_quantizer.scale"
    report = audit(layout.open({name: item for name, item in tensors.items() if name != lost}))
    assert [item.tensors for item in report.findings] == [(lost,)]
    assert {name for name, outcome in outcomes(report).items() if outcome == "undefined"} == READING


@pytest.mark.parametrize("id", [id for id, one in LAYOUTS.items() if one.block == "MXFP4"])
def test_healthy_mxfp4_says_what_it_has(id):
    layout = LAYOUTS[id]
    report = audit(layout.open())
    assert found(report) == []
    why = {item.why for item in report.backends if item.outcome == "safe"}
    assert {"block scales only" in text for text in why} == {not layout.with_input}


@pytest.mark.parametrize("value", [np.nan, 0.0, np.inf, -1e-3])
@pytest.mark.parametrize("id", [id for id, one in LAYOUTS.items() if one.block == "MXFP4" and one.with_input])
def test_static_scales_of_all_layers_are_counted(id, value):
    """Missing ones and unusable ones, whatever each of them does; the sentence begins with the first layer."""
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    healthy = {name.replace("layers.0.", f"layers.{k}."): item for k in (0, 1, 2) for name, item in tensors.items()}
    config = {**layout.config, "num_hidden_layers": 3}
    lost = [layout.name(expert, kind, "input_scale") for kind in layout.kinds for expert in (2, 5)]
    lost = [name.replace("layers.0.", "layers.1.") for name in lost]
    bad = dict(tensors)
    layout.put(bad, 3, "down", "input_scale", value)
    files = {name: item for name, item in healthy.items() if name not in lost}
    files |= {name.replace("layers.0.", "layers.2."): bad[name] for name in layout.names("down", "input_scale")}
    assert found(audit(layout.open(healthy, config=config))) == []
    report = audit(layout.open(files, config=config))
    row = report.coverage["input_scale"]
    number = row.missing + row.invalid
    assert row.missing
    assert row.invalid
    said = [item for item in report.backends if item.text == "why.static-input"]
    assert said
    for item in said:
        assert (item.params["slots"], item.params["layer"], item.layers) == (number, 1, (1, 2))
    assert {item.params["slots"] for item in report.backends if item.text == "why.ignored"} <= {number}


def test_a_static_scale_far_from_its_peers_is_a_warning_alone():
    """How far one may be off was measured for NVFP4's blocks, not for FP8."""
    layout = LAYOUTS[STATIC]
    tensors = layout.tensors()
    layout.put(tensors, 3, "down", "input_scale", layout.get(tensors, 3, "down", "input_scale") * 1000)
    report = audit(layout.open(tensors))
    assert [row[:2] for row in found(report)] == [("scale.outlier", "warn")]
    assert set(outcomes(report).values()) <= {"safe", "unsupported"}


# Ranks that cut a block.


def widened(layout, width):
    """The healthy layout with experts of another width, and a configuration that says so."""
    tensors = layout.tensors()
    for kind in layout.kinds:
        size = (HIDDEN, width) if kind == "down" else (2 * width if kind == "gate_up" else width, HIDDEN)
        for expert in range(EXPERTS if layout.arrangement == "expert" else 1):
            tensors = resized(layout, tensors, kind, expert, *size)
    tensors |= {name: bf16(width) for name in tensors if name.endswith(".down_proj.pre_quant_scale")}
    return layout.open(tensors, config=with_config(layout, moe_intermediate_size=width))


@pytest.mark.parametrize(
    "id",
    [id for id, one in LAYOUTS.items() if one.block == "NVFP4" or (one.with_input and one.dialect != "gpt-oss")],
)
def test_ranks_that_cut_a_block_reach_every_server(id):
    """A finding is ``backend`` where it is wrong on some, and the report says which."""
    layout = LAYOUTS[id]
    done = run_audit(layout.open())
    ranks = 2 * expert_width(done.facts) // layout.group
    split = for_ranks(done, ranks, None).report
    assert [item.code for item in split.findings if item.severity == "backend"] == ["parallel.group-split"]
    before = outcomes(done.report)
    for item in split.backends:
        # One that is not chosen at all cuts nothing, and ranks are a server's.
        left = before[item.name] == "unsupported" or item.name == "transformers"
        assert item.outcome == (before[item.name] if left else "load-error")
        assert {"degraded", "load-error"} <= set(item.possible) or left
    # The twin: ranks of whole blocks.
    assert outcomes(for_ranks(done, 1, None).report) == before


@pytest.mark.parametrize(("width", "ranks"), [(128, 16), (128, 3), (256, 32), (1536, 5), (144, 2), (80, 2), (96, 4)])
@pytest.mark.parametrize("id", ["modelopt", "non-gated", "W4A16", "stacked", "compressed-tensors"])
def test_advised_sizes_are_sizes_that_the_next_run_accepts(id, width, ranks):
    done = run_audit(widened(LAYOUTS[id], width))
    assert found(done.report) == []
    [item] = [item for item in for_ranks(done, ranks, None).report.findings if item.severity == "backend"]
    advised = [int(size) for size in re.findall(r"\d+", str(item.params["works"]))]
    more = [int(size) for size in re.findall(r"\d+", str(item.params["more"]))]
    assert advised or more
    for size in (*advised, *more):
        report = for_ranks(done, size, None).report
        assert [row[1] for row in found(report)] == ([] if size in advised else ["backend"]), size
        # Of a width that no number of ranks makes fit, it is refused before anybody asks.
        one = outcomes(for_ranks(done, 1, None).report)
        assert one == outcomes(done.report)
        changed = [name for name, outcome in outcomes(report).items() if outcome != one[name]]
        assert changed == ([] if size in advised or one["vllm-cutlass"] == "unsupported" else ["vllm-cutlass"])
        assert size in advised or outcomes(report)["vllm-cutlass"] == "unsupported"
    for language in ("en", "zh"):
        assert "{" not in "".join(describe(item, language))


FLT_MAX = float(np.finfo(np.float32).max) / 2688


@pytest.mark.parametrize("id", ["modelopt", "w1/w2/w3", "compressed-tensors", "stacked", "non-gated"])
@pytest.mark.parametrize("value", [FLT_MAX, 1e30, 1e-30])
def test_a_number_of_no_bad_class_is_called_far_from_its_peers(id, value):
    """ModelOpt's clamp of an infinite maximum is a finite, positive, normal number."""
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    layout.put(tensors, 3, "down", "input_scale", layout.stored(value))
    forecasts = {item.name: item for item in audit(layout.open(tensors)).backends}
    for name in ("vllm-cutlass", "sglang-generic"):
        assert forecasts[name].outcome == "zero"
        assert forecasts[name].why == (
            "It gives each expert its own scale. Layer 0, expert 3: a value so far from its peers that the output is "
            "lost."
        )
        assert "（）" not in describe(forecasts[name], "zh")[0]


def test_each_expert_is_called_what_it_is():
    """One that is zero beside one that is far: the words of the first are no words about the second."""
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    layout.put(tensors, 3, "down", "input_scale", 0.0)
    layout.put(tensors, 5, "down", "input_scale", FLT_MAX)
    [item] = [item for item in audit(layout.open(tensors)).backends if item.name == "vllm-cutlass"]
    assert "expert 3 (zero)" in item.why


def test_what_was_done_to_one_expert_is_singular():
    layout = LAYOUTS["modelopt"]
    for experts, advice in (((3,), "this expert was"), ((3, 5), "these experts were")):
        tensors = layout.tensors()
        for expert in experts:
            layout.put(tensors, expert, "down", "input_scale", 1.0)
        [item] = [item for item in audit(layout.open(tensors)).findings if item.code == "scale.identity"]
        assert item.advice == f"Check how {advice} calibrated."


# Layers of one file with and without activation scales.

AT = "model.layers.1.mlp.experts"


def two_schemes(first, second, stray=""):
    """Two layers and an allow-list that gives each an algorithm; none is without what it asks for."""
    layout = LAYOUTS["modelopt"]
    tensors = {}
    for at, algo in ((layout.prefix, first), (AT, second)):
        for name, item in layout.tensors().items():
            renamed = name.replace("layers.0.", f"layers.{at.split('.')[2]}.")
            if "input_scale" not in name or algo == "NVFP4" or renamed == stray:
                tensors[renamed] = item
    listed = {
        at: {"quant_algo": algo, "group_size": 16} for at, algo in ((layout.prefix, first), (AT, second))
    }  # fmt: skip
    quant = modelopt("MIXED_PRECISION", exclude=(), quantized_layers=listed)
    return audit(layout.open(tensors, config={**CONFIG, "num_hidden_layers": 2}, quant=quant))


@pytest.mark.parametrize(("algos", "bare"), [(("NVFP4", "W4A16_NVFP4"), 1), (("W4A16_NVFP4", "NVFP4"), 0)])
def test_one_weight_only_layer_is_enough_to_refuse_a_backend(algos, bare):
    report = two_schemes(*algos)
    assert found(report) == []
    assert report.format.scheme == "MIXED"
    expected = {name for name, family in FAMILIES.items() if "W4A16" not in family.schemes}
    assert set(unsupported(report)) == expected
    for item in report.backends:
        if item.name in expected:
            assert (item.scope, item.layers) == ("layer", (bare,))
            assert f"layer {bare} are weight-only" in item.why
            assert ("vLLM" in item.why) == item.name.startswith("vllm")
        else:
            assert item.outcome == "safe"


@pytest.mark.parametrize(("algo", "refused"), [("NVFP4", False), ("W4A16_NVFP4", True)])
def test_two_layers_alike_are_what_one_is(algo, refused):
    report = two_schemes(algo, algo)
    assert found(report) == []
    assert report.format.scheme == ("W4A16" if refused else "W4A4")
    assert bool(unsupported(report)) == refused


def test_a_scale_that_one_weight_only_layer_has_all_the_same():
    report = two_schemes("NVFP4", "W4A16_NVFP4", stray=f"{AT}.3.up_proj.input_scale")
    assert found(report) == [("config.conflict", "warn", 1, "up", (3,))]
    assert report.findings[0].tensors == (f"{AT}.3.up_proj.input_scale",)
    assert report.format.scheme == "MIXED"


def test_groups_that_give_layers_other_activations_say_the_same():
    """compressed-tensors: two groups, told apart by their targets."""
    layout = LAYOUTS["compressed-tensors"]
    tensors = dict(layout.tensors())
    for name, item in layout.tensors().items():
        if "input_global_scale" not in name:
            tensors[name.replace("layers.0.", "layers.1.")] = item
    section = packed()
    with_inputs = section["config_groups"]["group_0"]
    groups = {
        "group_0": {**with_inputs, "targets": ["re:.*layers[.]0[.].*"]},
        "group_1": {**with_inputs, "input_activations": None, "targets": ["re:.*layers[.]1[.].*"]},
    }
    config = {**with_quant({**section, "config_groups": groups}), "num_hidden_layers": 2}
    report = audit(layout.open(tensors, config=config))
    assert found(report) == []
    assert report.format.scheme == "MIXED"
    assert {item.layers for item in report.backends if item.outcome == "unsupported"} == {(1,)}


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "Gemma 4, nvidia"])
@pytest.mark.parametrize("projection", ["gate", "up"])
@pytest.mark.parametrize(
    ("value", "largest", "gates"),
    [(0.0, "degraded", "zero"), (4.4e-42, "degraded", "zero"), (-1e-3, "degraded", "degraded"), (np.nan, "nan", "nan"),
     (np.inf, "nan", "nan")],
)  # fmt: skip
def test_the_larger_of_two_weight_scales_hides_the_smaller_and_no_nan(id, projection, value, largest, gates):
    """TensorRT-LLM takes the larger, vLLM gate's (checkpoints.md 3)."""
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    layout.put(tensors, 3, projection, "weight_scale_2", layout.stored(value))
    said = outcomes(audit(layout.open(tensors)))
    assert said["tensorrt-llm"] == largest
    assert said["vllm-cutlass"] == ("degraded" if projection == "up" else gates)
    # Where both are bad nothing hides it.
    layout.put(tensors, 3, "up" if projection == "gate" else "gate", "weight_scale_2", layout.stored(value))
    assert outcomes(audit(layout.open(tensors)))["tensorrt-llm"] == gates


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "fused", "W4A16"])
def test_a_class_that_takes_no_expert_parallel_ranks(id):
    """Section 5.1: FlashInfer's B12X has "no EP"; one rank is none."""
    checkpoint = LAYOUTS[id].open()
    refusing = {name for name, family in FAMILIES.items() if not family.ranks}
    assert refusing == {"vllm-flashinfer-b12x"}
    split = unsupported(audit(checkpoint, ep=2))
    assert split.keys() - unsupported(audit(checkpoint)).keys() == refusing
    assert "2 expert-parallel ranks" in split["vllm-flashinfer-b12x"]
    for ep in (1, None):
        assert unsupported(audit(checkpoint, ep=ep)) == unsupported(audit(checkpoint))


@pytest.mark.parametrize(
    ("id", "bias", "shape"),
    [
        ("fused", "gate_up_proj_bias", (EXPERTS, 2 * WIDTH)), ("fused", "down_proj_bias", (EXPERTS, HIDDEN)),
        ("modelopt", "0.up_proj.bias", (WIDTH,)),
    ],
)  # fmt: skip
def test_a_class_that_adds_no_biases(id, bias, shape):
    """Section 5.1: EMULATION has "no LoRA/bias"."""
    layout = LAYOUTS[id]
    [module] = {re.sub(r"experts\..*", f"experts.{bias}", name) for name in layout.names("down", "input_scale")}
    report = audit(layout.open({**layout.tensors(), module: bf16(*shape)}))
    assert found(report) == []
    assert {name for name, why in unsupported(report).items() if "bias" in why} == {"vllm-emulation"}


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "w1/w2/w3", "Quark NVFP4", "non-gated"])
def test_an_absent_expert_leaves_its_scales_to_the_layer_s_maximum(id):
    layout = LAYOUTS[id]
    tensors = {name: item for name, item in layout.tensors().items() if ".experts.3." not in name}
    report = audit(layout.open(tensors))
    assert {code for code, *_ in found(report)} <= {"expert.absent", "expert.gap"}
    assert {FAMILIES[item.name].reach for item in report.backends if item.outcome == "undefined"} >= {"layer", "expert"}
    for item in report.backends:
        reach = FAMILIES[item.name].reach
        if item.outcome == "undefined":
            assert item.scope == ("layer" if reach == "layer" else "experts"), item.name


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "w1/w2/w3", "Quark NVFP4", "non-gated"])
@pytest.mark.parametrize("factor", [-1, 2**-9, 2**-13])
def test_what_may_be_meant_may_be_safe(id, factor):
    """A number far below its peers, and a sign that hardware or a weight scale may turn back (4.5)."""
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    for kind in layout.kinds:
        layout.put(
            tensors,
            2,
            kind,
            "input_scale",
            layout.get(tensors, 2, kind, "input_scale") * (factor if factor < 0 or not layout.divisors else 1 / factor),
        )
    for item in audit(layout.open(tensors)).backends:
        if FAMILIES[item.name].reach == "expert":
            assert {"degraded", "safe"} <= set(item.possible) <= {"degraded", "safe", "zero"}, item.name


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -1.0])
def test_one_weight_scale_for_all_experts_reaches_the_layer(value):
    layout = LAYOUTS["fused"]
    tensors = layout.tensors()
    layout.put(tensors, 0, "down", "weight_scale_2", np.float32(value))
    for item in audit(layout.open(tensors)).backends:
        assert item.scope in ("layer", "model"), item.name


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "w1/w2/w3"])
def test_beside_the_worst_stands_only_what_this_backend_suffers_from(id):
    """Humming and Transformers fold each half by its own scale; B12X reads no scale of down."""
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    layout.put(tensors, 3, "down", "weight_scale_2", np.float32(np.nan))
    layout.put(tensors, 5, "up", "weight_scale_2", layout.get(tensors, 5, "up", "weight_scale_2") * 2)
    for item in audit(layout.open(tensors)).backends:
        if item.outcome == "nan":
            assert ("pair-mismatch" in item.why) == FAMILIES[item.name].gate_rules, item.name
    tensors = layout.tensors()
    layout.put(tensors, 3, "gate", "input_scale", np.float32(np.nan))
    layout.put(tensors, 5, "down", "input_scale", layout.stored(0.0) if not layout.divisors else np.float32(np.inf))
    for item in audit(layout.open(tensors)).backends:
        if FAMILIES[item.name].reach == "layer":
            assert ("zero" in item.why) == FAMILIES[item.name].reads_down, item.name


@pytest.mark.parametrize("id", ["fused", "modelopt", "gpt-oss"])
def test_experts_gone_from_one_layer_reach_the_layer(id):
    layout = LAYOUTS[id]
    config = with_config(layout, num_hidden_layers=3)
    out = {}
    for k in range(3):
        own = layout.tensors() if k != 1 else {n: t for n, t in layout.tensors().items() if "experts" not in n}
        out |= {name.replace("layers.0", f"layers.{k}"): item for name, item in own.items()}
    report = audit(layout.open(out, config=config))
    assert {code for code, *_ in found(report)} == {"expert.absent"}
    for item in report.backends:
        if item.outcome == "undefined":
            assert (item.scope, item.layers) == ("layer", (1,)), item.name


@pytest.mark.parametrize("id", ["fused", "stacked", "gpt-oss"])
def test_a_tensor_with_too_few_experts_does_not_fit(id):
    """Its parameter is allocated for all; docs/decisions.md says so of every tensor smaller than its parameter."""
    layout = LAYOUTS[id]
    short = layout.tensors()
    for name, item in short.items():
        if "proj" in name and item.shape[:1] == (8,):
            data = item.data if isinstance(item.data, bytes) else np.asarray(item.data).tobytes()
            short[name] = Tensor(item.dtype, (7, *item.shape[1:]), data[: len(data) // 8 * 7])
    report = audit(layout.open(short))
    assert "expert.absent" in {code for code, *_ in found(report)}
    assert {item.outcome for item in report.backends} <= {"load-error", "unsupported"}


def of_rank(width, tp):
    layout, tensors = LAYOUTS["modelopt"], LAYOUTS["modelopt"].tensors()
    for expert in range(EXPERTS):
        for kind in ("gate", "up"):
            tensors = resized(layout, tensors, kind, expert, width, HIDDEN)
        tensors = resized(layout, tensors, "down", expert, HIDDEN, width)
    report = audit(layout.open(tensors, config=with_config(layout, moe_intermediate_size=width)), tp=tp)
    [cutlass] = [item for item in report.backends if item.name == "vllm-cutlass"]
    return report, cutlass


@pytest.mark.parametrize(("width", "tp"), [(80, None), (80, 1), (160, 2), (96, None), (96, 1), (192, 2)])
def test_rows_that_a_kernel_refuses_are_refused_however_a_rank_came_to_them(width, tp):
    """160 rows a rank are those of vllm#42516; without ranks asked for the finding is a note, as case 38 wants it."""
    report, cutlass = of_rank(width, tp)
    assert found(report) == ([] if tp is None else [("parallel.alignment", "backend", None, None, None)])
    assert (cutlass.outcome, cutlass.possible, cutlass.scope) == ("unsupported", (), "model")
    assert f"{2 * width // (tp or 1)} rows" in cutlass.why


@pytest.mark.parametrize(("width", "tp"), [(32, None), (48, 1), (64, 2)])
def test_rows_that_a_kernel_refuses_of_experts_below_a_tile_are_no_certain_word(width, tp):
    report, cutlass = of_rank(width, tp)
    assert found(report) == []
    assert (cutlass.outcome, cutlass.possible, cutlass.scope) == ("safe", ("safe", "unsupported"), "none")
    assert f"{2 * width // (tp or 1)} rows" in cutlass.why


PER_EXPERT = [name for name, family in FAMILIES.items() if family.reach == "expert"]


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "projection-major", "stacked", "Quark NVFP4"])
def test_a_number_that_was_never_set_stands_beside_what_is_worse(id):
    """It is a note, and counts in the forecast as an outlier in its place does."""
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    layout.put(tensors, 3, "down", "input_scale", layout.stored(0.0))
    layout.put(tensors, 1, "gate", "input_scale", layout.stored(1.0))
    layout.put(tensors, 1, "up", "input_scale", layout.stored(1.0))
    by = {item.name: item for item in audit(layout.open(tensors)).backends}
    for name in PER_EXPERT:
        assert by[name].outcome == "zero"
        assert "scale.identity (input_scale)" in by[name].params["besides"]
    # Where it does no harm it is nobody's cause.
    tensors = layout.tensors()
    for expert in range(EXPERTS):
        for kind in layout.kinds:
            layout.put(tensors, expert, kind, "input_scale", layout.stored(1.0 if expert == 1 else 0.7 + expert / 20))
    layout.put(tensors, 3, "down", "input_scale", layout.stored(0.0))
    report = audit(layout.open(tensors))
    assert any(item.text == "scale.identity" for item in report.findings)
    for item in report.backends:
        assert "scale.identity (input_scale)" not in item.params.get("besides", ()), item.name


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "w1/w2/w3", "stacked", "Quark NVFP4"])
@pytest.mark.parametrize(
    ("gate", "up", "classes"),
    [
        (0.0, 1e30, ""), (1e30, 0.0, ""), (-1.0, 1e30, ""), (0.0, np.nan, "nan"), (np.nan, 0.0, "nan"),
        (0.0, np.inf, "inf"), (0.0, 0.0, "zero"), (-1.0, 0.0, "zero"), (0.0, -1.0, "zero"),
    ],
)  # fmt: skip
def test_a_maximum_hides_what_is_smaller_from_the_words(id, gate, up, classes):
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    for kind, value in (("gate", gate), ("up", up)):
        layout.put(tensors, 3, kind, "input_scale", layout.stored(value))
    for item in audit(layout.open(tensors)).backends:
        if item.name in PER_EXPERT and item.outcome != "safe":
            assert item.params["classes"] == classes, item.name
            assert (item.text == "why.expert-zero.far") == (classes == ""), item.name


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("id", [id for id, one in LAYOUTS.items() if "weight_scale_2" in one.roles])
@pytest.mark.parametrize("value", [0.0, np.inf, 1e-40])
def test_no_server_inverts_a_second_level_weight_scale(id, value, language):
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    layout.put(tensors, 3, layout.kinds[-1], "weight_scale_2", layout.stored(value))
    [item] = [one for one in audit(layout.open(tensors)).findings if one.severity == "error"]
    message, _ = describe(item, language)
    assert not any(word in message for word in ("reciprocal", "倒数"))
    assert "{" not in message
