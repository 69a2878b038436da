"""Bad scales of ordinary layers and of the KV cache: what is found reaches the forecast, by value and by reader."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES
from nvfp4viz.checkpoint import tensor
from tests.audit.config_faults import section_of, with_section
from tests.audit.layouts import ALLOWED, LAYOUTS, ct_linear, linear, typed
from tests.audit.reading import NARROW, found, outcomes

SHARED = "model.layers.0.mlp.shared_experts"
ATTENTION = "model.layers.0.self_attn"
UNREADING = {"transformers"}
READS = set(FAMILIES) - UNREADING
# Rows whose kernel for experts reads no activation scale; that for ordinary layers is picked apart.
APART = {name for name, family in FAMILIES.items() if family.reach == "none"} - UNREADING
BY_VALUE = {np.nan: "nan", np.inf: "nan", 0.0: "zero", 4.4e-42: "zero", -1e-4: "degraded"}


def number(value):
    return tensor(np.float32(value))


def shared():
    layout = LAYOUTS["modelopt"]
    out = layout.tensors()
    for last, size in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        out |= linear(f"{SHARED}.{last}", *size)
    return out


def opened(tensors, id="modelopt", **changes):
    return audit(LAYOUTS[id].open(tensors, **changes))


def attention(id="modelopt"):
    make = ct_linear if id == "compressed-tensors" else linear
    out = LAYOUTS[id].tensors()
    for last in ("q_proj", "k_proj", "v_proj", "o_proj"):
        out |= make(f"{ATTENTION}.{last}")
    return out


def test_healthy_ordinary_layers_are_safe_everywhere():
    for report in (
        opened(shared()),
        opened(attention()),
        opened(attention("compressed-tensors"), "compressed-tensors"),
    ):
        assert found(report) == []
        assert set(outcomes(report).values()) == {"safe"}


@pytest.mark.parametrize("value", BY_VALUE)
def test_a_second_level_weight_scale_that_nothing_hides(value):
    report = opened({**shared(), f"{SHARED}.down_proj.weight_scale_2": number(value)})
    assert [row[1] for row in found(report)] == ["error"]
    assert set(outcomes(report).values()) == {BY_VALUE[value]}
    assert {(item.scope, item.layers) for item in report.backends} == {("layer", (0,))}
    assert {f"{SHARED}.down_proj.weight_scale_2" in item.why for item in report.backends} == {True}


@pytest.mark.parametrize("value", BY_VALUE)
def test_fused_siblings_hide_what_is_below_their_own(value):
    """Section 5.2: servers take the largest of q, k and v; a NaN and an infinity win."""
    report = opened({**attention(), f"{ATTENTION}.q_proj.weight_scale_2": number(value)})
    hidden = np.isfinite(value)
    for item in report.backends:
        if item.name == "transformers":
            assert item.outcome == BY_VALUE[value]
        else:
            assert item.outcome == ("degraded" if hidden else "nan")
            assert item.possible == (("degraded", "safe") if hidden else ())
    # Where all three are bad nothing is hidden.
    every = {f"{ATTENTION}.{last}.weight_scale_2": number(value) for last in ("q_proj", "k_proj", "v_proj")}
    assert set(outcomes(opened({**attention(), **every})).values()) == {BY_VALUE[value]}


def test_an_infinite_divisor_is_a_scale_of_zero():
    name = f"{ATTENTION}.o_proj.weight_global_scale"
    report = opened({**attention("compressed-tensors"), name: tensor(np.float32([np.inf]))}, "compressed-tensors")
    assert found(report) == [("scale.zero", "error", 0, None, None)]
    assert set(outcomes(report).values()) == {"zero"}


@pytest.mark.parametrize("value", [*BY_VALUE, None])
def test_an_activation_scale_spoils_what_reads_it(value):
    name = f"{SHARED}.down_proj.input_scale"
    tensors = shared()
    if value is None:
        del tensors[name]
    else:
        tensors[name] = number(value)
    report = opened(tensors)
    assert [row[1] for row in found(report)] == ["backend"]
    assert {outcomes(report)[name] for name in UNREADING} == {"ignored"}
    said = {outcomes(report)[name] for name in READS - {"tensorrt-llm"}}
    assert said == {"undefined" if value is None else BY_VALUE[value]}
    assert outcomes(report)["tensorrt-llm"] == ("load-error" if value is None else BY_VALUE[value])
    for one in report.backends:
        assert ("ignored" in one.possible) == (one.name in APART)
        assert one.name not in APART or one.outcome in (*one.possible, "undefined")
        for language in ("en", "zh"):
            assert ("NVFP4" in describe(one, language)[0]) == (one.name in APART)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("lost", ["q_proj", "k_proj", "o_proj"])
def test_vllm_asks_for_block_scales_of_ordinary_modules(dialect, lost):
    """Section 11: NaN stands in their place before a load; other engines, and all of them for experts, ask nothing."""
    tensors = attention(dialect)
    del tensors[f"{ATTENTION}.{lost}.weight_scale"]
    for one in opened(tensors, dialect).backends:
        if one.name.startswith("vllm"):
            assert (one.outcome, one.possible, one.scope) == ("load-error", (), "model")
            assert "RuntimeError" in describe(one, "en")[0]
            assert f"{lost}.weight_scale" in describe(one, "zh")[0]
        else:
            assert one.outcome == ("load-error" if one.name == "tensorrt-llm" else "undefined")
    layout = LAYOUTS[dialect]
    experts = layout.tensors()
    del experts[layout.name(1, "down", "weight_scale")]
    assert {one.outcome for one in audit(layout.open(experts)).backends if one.name.startswith("vllm")} == {"undefined"}


def test_a_weight_only_label_is_read_by_all():
    """There nothing reads the activation scale of a four-bit layer, whichever kernel it gets."""
    tensors = {**LAYOUTS["modelopt"].tensors(), **shared()}
    layout, name = LAYOUTS["modelopt"], f"{SHARED}.down_proj.input_scale"
    quant = {"quantization": {**layout.quant["quantization"], "quant_algo": "W4A16_NVFP4"}}
    report = opened({**tensors, name: number(np.nan)}, quant=quant)
    assert {outcomes(report)[each] for each in ("vllm-marlin", "vllm-humming", "sglang-marlin")} <= {"safe", "ignored"}
    assert not any({"nan", "degraded"} & {one.outcome, *one.possible} for one in report.backends)


def test_an_activation_scale_that_siblings_hide():
    report = opened({**shared(), f"{SHARED}.gate_proj.input_scale": number(0.0)})
    assert {outcomes(report)[name] for name in READS} == {"safe"}
    assert {item.text for item in report.backends if item.name in READS} - {NARROW} == {"why.linear-masked"}


def test_the_bad_activation_scale_of_a_weight_only_module_is_nobodys():
    tensors = {**LAYOUTS["W4A16"].tensors(), **linear(f"{ATTENTION}.o_proj")}
    for value in (3e-3, np.nan):
        tensors[f"{ATTENTION}.o_proj.input_scale"] = number(value)
        assert found(opened(tensors, "W4A16")) == []


def test_a_missing_activation_scale_names_its_layers():
    tensors = attention()
    del tensors[f"{ATTENTION}.o_proj.input_scale"]
    report = opened(tensors)
    assert {item.layers for item in report.backends if item.name in READS} == {(0,)}


KV = f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.v_proj.v_scale"


@pytest.mark.parametrize("value", [*BY_VALUE, 0.02, 1.0])
def test_scales_of_the_cache(value):
    layout = LAYOUTS["modelopt"]
    quant = {**layout.quant, "quantization": {**section_of(layout), "kv_cache_quant_algo": "FP8"}}
    tensors = {**layout.tensors(), KV[0]: number(value), KV[1]: number(0.02)}
    report = opened(tensors, quant=quant)
    if value > FLT_MIN and np.isfinite(value):
        assert (found(report), set(outcomes(report).values())) == ([], {"safe"})
        return
    assert [row[1] for row in found(report)] == ["error"]
    assert set(outcomes(report).values()) == {BY_VALUE[value]}
    assert {"load-error", "degraded"} <= set(report.backends[0].possible)
    assert "safe" not in report.backends[0].possible
    # Without a word in the configuration the cache may be in BF16.
    assert "safe" in opened(tensors).backends[0].possible


FLT_MIN = float(np.finfo(np.float32).tiny)


# FP8 modules around four-bit experts.


def eight(name, scale=1e-3):
    parts = {"weight": typed(np.full((64, 64), 0x38, np.uint8), "F8_E4M3"), "input_scale": number(1e-3)}
    return {f"{name}.{part}": item for part, item in parts.items()} | (
        {} if scale is None else {f"{name}.weight_scale": number(scale)}
    )


def mixed(algo="FP8", names=("q_proj",)):
    layout = LAYOUTS["MIXED_PRECISION"]
    listed = {f"{ATTENTION}.{last}": {"quant_algo": algo} for last in names}
    return {"quant": {"quantization": {**section_of(layout), "quantized_layers": {**ALLOWED, **listed}}}}


@pytest.mark.parametrize("value", BY_VALUE)
def test_the_weight_scale_of_an_fp8_module(value):
    base, code = LAYOUTS["MIXED_PRECISION"].tensors(), {np.nan: "nan", np.inf: "inf", 0.0: "zero", -1e-4: "negative"}
    name = f"{ATTENTION}.q_proj"
    assert found(opened({**base, **eight(name)}, "MIXED_PRECISION", **mixed())) == []
    report = opened({**base, **eight(name, value)}, "MIXED_PRECISION", **mixed())
    assert found(report) == [(f"scale.{code.get(value, 'subnormal')}", "error", 0, None, None)]
    assert report.findings[0].role == "weight_scale"
    assert set(outcomes(report).values()) == {BY_VALUE[value]}


@pytest.mark.parametrize("algo", ["FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"])
def test_an_fp8_module_of_the_list_has_a_scale(algo):
    base, name = LAYOUTS["MIXED_PRECISION"].tensors(), f"{ATTENTION}.q_proj"
    report = opened({**base, **eight(name, None)}, "MIXED_PRECISION", **mixed(algo))
    assert found(report) == [("scale.missing", "error", 0, None, None)]
    [item] = [one for one in report.findings if one.code == "scale.missing"]
    assert (item.role, item.tensors) == ("weight_scale", (f"{name}.weight_scale",))
    assert "safe" not in outcomes(report).values()


def test_an_fp8_module_that_nothing_names_may_be_cast_as_it_is():
    base = LAYOUTS["MIXED_PRECISION"].tensors()
    assert found(opened({**base, **eight("model.layers.0.other", None)}, "MIXED_PRECISION")) == []


def test_a_group_of_fp8_weights_promises_scales():
    """Lacking it in every layer, no namesake of q tells."""
    layout = LAYOUTS["compressed-tensors"]
    section = section_of(layout)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    group = {"format": "float-quantized", "weights": weights, "targets": ["re:.*self_attn.*"]}
    section = {**section, "format": "mixed-precision", "config_groups": {**section["config_groups"], "group_1": group}}
    changes = with_section(layout, section)
    channel = tensor(np.full((64, 1), 1e-3, np.float32))
    tensors = layout.tensors()
    for last in ("q_proj", "k_proj", "v_proj"):
        tensors |= {**eight(f"{ATTENTION}.{last}"), f"{ATTENTION}.{last}.weight_scale": channel}
    assert found(opened(tensors, "compressed-tensors", **changes)) == []
    del tensors[f"{ATTENTION}.q_proj.weight_scale"]
    report = opened(tensors, "compressed-tensors", **changes)
    assert found(report) == [("scale.missing", "error", 0, None, None)]
    assert report.findings[0].tensors == (f"{ATTENTION}.q_proj.weight_scale",)


@pytest.mark.parametrize("value", BY_VALUE)
def test_a_bad_activation_scale_in_fp8_and_a_missing_one_are_read_by_the_same(value):
    """Transformers reads none; the kernel of FP8 layers is picked apart and may be weight-only. The words say so."""
    base, name = LAYOUTS["MIXED_PRECISION"].tensors(), f"{ATTENTION}.o_proj"
    sound = {**base, **eight(name), f"{name}.input_scale": number(2e-3)}
    bad = opened({**sound, f"{name}.input_scale": number(value)}, "MIXED_PRECISION", **mixed(names=("o_proj",)))
    gone = opened({each: item for each, item in sound.items() if each != f"{name}.input_scale"}, "MIXED_PRECISION",
                  **mixed(names=("o_proj",)))  # fmt: skip
    for one, other in zip(bad.backends, gone.backends, strict=True):
        assert (one.outcome == "ignored") == (other.outcome == "ignored") == (one.name == "transformers")
        if FAMILIES[one.name].engine == "vllm":
            assert "ignored" in one.possible
            assert "ignored" in other.possible
        if one.outcome not in ("ignored", "load-error"):
            assert ("weight-only" in one.why) == ("ignored" in one.possible)
        assert "--linear-backend" not in one.why
    [item] = bad.findings
    # No flag is promised that leaves it unread: of a four-bit module one is.
    assert "--linear-backend" not in item.advice
    assert "--linear-backend" not in describe(item, "zh")[1]
    four = opened({**shared(), f"{SHARED}.down_proj.input_scale": number(value)})
    assert "--linear-backend marlin" in four.findings[0].advice
    assert all("--linear-backend marlin" in each.why for each in four.backends if each.outcome == "ignored")


def beside(both):
    """FP8's o_proj and a four-bit down_proj of a shared expert, with the activation scales that each is given."""
    layout, of = LAYOUTS["MIXED_PRECISION"], {f"{ATTENTION}.o_proj": "FP8"}
    tensors = {**layout.tensors(), **eight(f"{ATTENTION}.o_proj"), f"{ATTENTION}.o_proj.input_scale": number(2e-3)}
    for last, size in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        tensors |= linear(f"{SHARED}.{last}", *size)
        of[f"{SHARED}.{last}"] = "NVFP4"
    listed = {module: {"quant_algo": algo} for module, algo in of.items()}
    quant = {"quantization": {**section_of(layout), "quantized_layers": {**ALLOWED, **listed}}}
    changed = {f"{module}.input_scale": number(value) for module, value in both.items()}
    return opened({**tensors, **changed}, "MIXED_PRECISION", quant=quant)


@pytest.mark.parametrize("value", BY_VALUE)
def test_each_format_has_its_own_words(value):
    eight_bit, four_bit = f"{ATTENTION}.o_proj", f"{SHARED}.down_proj"
    assert found(beside({})) == []
    alone = {module: beside({module: value}) for module in (eight_bit, four_bit)}
    together = beside(dict.fromkeys(alone, value))
    assert len(together.findings) == 2
    for module, report in alone.items():
        [item] = report.findings
        assert item in together.findings
        assert item.tensors == (f"{module}.input_scale",)
    of = {module: {one.name: one for one in report.backends} for module, report in alone.items()}
    for one in together.backends:
        # Where nobody reads the four-bit one the words are those of the other alone.
        if of[four_bit][one.name].outcome == "ignored" != of[eight_bit][one.name].outcome:
            assert one.outcome == of[eight_bit][one.name].outcome
            assert four_bit not in one.why
        elif one.outcome == "ignored":
            assert one.name == "transformers"


def test_one_rule_for_all_unusable_numbers_of_an_fp8_module():
    """The largest float, which an infinite maximum leaves, goes unread by the same as any other."""
    largest = np.finfo(np.float32).max / np.float32(448)
    perhaps = [
        {one.name for one in beside({f"{ATTENTION}.o_proj": value}).backends if "ignored" in one.possible}
        for value in (largest, *BY_VALUE)
    ]
    assert perhaps[0]
    assert all(each == perhaps[0] for each in perhaps)


@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
@pytest.mark.parametrize("values", [[1e-3] * 2, [1e-3, 2e-3, 3e-3], [1e-3] * 4])
def test_several_numbers_of_a_module_that_is_one(role, values):
    """o_proj has no parts; what is fused may keep a number for each of its own."""
    several = tensor(np.float32(values))
    for last, severity in (("o_proj", "error"), ("qkv_proj", "info" if len(values) < 4 else "error")):
        name = f"{ATTENTION}.{last}"
        tensors = {**LAYOUTS["modelopt"].tensors(), **linear(name)}
        assert found(opened(tensors)) == []
        report = opened({**tensors, f"{name}.{role}": several})
        said = [(item.code, item.severity) for item in report.findings if item.code != "loader.note"]
        assert said == [("scale.shape", severity)]
        assert [item.layer for item in report.findings if item.code == "scale.shape"] == [0]


@pytest.mark.parametrize("shape", [(2,), (3,), (64,)])
def test_several_numbers_of_an_fp8_module(shape):
    base, name = LAYOUTS["MIXED_PRECISION"].tensors(), f"{ATTENTION}.o_proj"
    for good in ((), (1,), (1, 1)):
        one = {f"{name}.input_scale": tensor(np.full(good, 2e-3, np.float32))}
        assert found(opened({**base, **eight(name), **one}, "MIXED_PRECISION", **mixed(names=("o_proj",)))) == []
    bad = {f"{name}.input_scale": tensor(np.full(shape, 2e-3, np.float32))}
    report = opened({**base, **eight(name), **bad}, "MIXED_PRECISION", **mixed(names=("o_proj",)))
    assert [row[:2] for row in found(report)] == [("scale.shape", "error")]
    assert set(outcomes(report).values()) == {"load-error"}
