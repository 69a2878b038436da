"""One ordinary module whose scale lies far from those of the same module in other layers."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES
from nvfp4viz.audit.namesakes import far_beyond
from nvfp4viz.checkpoint import memory_checkpoint, tensor
from tests.audit.layouts import LAYOUTS, ct_linear, linear
from tests.audit.reading import found, outcomes
from tests.audit.test_fp8_inputs import eight, scale
from tests.audit.test_linear_forecast import APART, READS, number, section_of

LAYERS = 6
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FUSED = PARTS[:3]
AT = "model.layers.3.self_attn.o_proj"
# What modules of three layouts are called, and what their scales are.
ROLES = {
    "modelopt": {"input_scale": "input_scale", "weight_scale_2": "weight_scale_2"},
    "compressed-tensors": {"input_scale": "input_global_scale", "weight_scale_2": "weight_global_scale"},
    "FP8": {"input_scale": "input_scale", "weight_scale": "weight_scale"},
}
CASES = [(id, role) for id, roles in ROLES.items() for role in roles]


def names(layers=LAYERS):
    return [f"model.layers.{layer}.{part}" for layer in range(layers) for part in PARTS]


def healthy(id, layers=LAYERS, seed=None):
    """Ordinary modules alone around one layer of experts; with a seed each layer has numbers of its own."""
    layout = LAYOUTS["compressed-tensors" if id == "compressed-tensors" else "MIXED_PRECISION" if id == "FP8" else id]
    out = layout.tensors()
    if id == "FP8":
        # A scale of 1 says that nobody set it.
        out |= eight(names(layers)) | {f"{name}.weight_scale": number(1e-3) for name in names(layers)}
    for name in names(layers) if id != "FP8" else ():
        out |= ct_linear(name) if id == "compressed-tensors" else linear(name)
    if seed is not None:
        rng = np.random.default_rng(seed)
        drawn = {}
        for name in names(layers):
            for role, suffix in ROLES[id].items():
                wide = 1000 if role == "input_scale" else 30
                # Fused modules have one number.
                parent = name.rpartition(".")[0]
                key = (parent if name.endswith(FUSED) else name, role)
                value = drawn.setdefault(key, 3e-4 * wide ** rng.uniform())
                out[f"{name}.{suffix}"] = stored(id, value, out[f"{name}.{suffix}"].shape)
    return out


def stored(id, value, shape=()):
    number = 1 / value if id == "compressed-tensors" else value
    return tensor(np.full(shape, number, np.float32))


def times(tensors, id, role, factor, at=AT):
    name = f"{at}.{ROLES[id][role]}"
    [value] = np.frombuffer(tensors[name].tobytes(), np.float32)
    return {**tensors, name: tensor(np.full(tensors[name].shape, np.float32(value) * np.float32(factor)))}


def report_of(tensors, id, layers=LAYERS, **changes):
    layout = LAYOUTS["compressed-tensors" if id == "compressed-tensors" else "MIXED_PRECISION" if id == "FP8" else id]
    config = {**layout.config, "num_hidden_layers": layers}
    if id == "FP8":
        listed = {name: {"quant_algo": "FP8"} for name in names(layers)}
        section = section_of(layout)
        section = {**section, "quantized_layers": {**section["quantized_layers"], **listed}}
        changes = {"quant": {"quantization": section}, **changes}
    return audit(layout.open(tensors, config=config, **changes))


def told(report):
    return [item for item in report.findings if item.code == "scale.outlier"]


@pytest.mark.parametrize(("id", "role"), CASES)
@pytest.mark.parametrize("factor", [1e5, 1e8, 1e-5, 1e-8])
def test_one_far_off_is_told(id, role, factor):
    sound = report_of(healthy(id), id)
    report = report_of(times(healthy(id), id, role, factor), id)
    assert told(sound) == []
    assert found(report) == [*found(sound), ("scale.outlier", "warn", 3, None, None)]
    [item] = told(report)
    suffix = "" if role == "input_scale" else ".weight"
    assert (item.text, item.role, item.count) == (f"scale.outlier.linear{suffix}", role, 1)
    assert item.tensors == (f"{AT}.{ROLES[id][role]}",)
    for language in ("en", "zh"):
        assert f"{factor if factor > 1 else 1 / factor:,.0f}" in describe(item, language)[0]
    before = outcomes(sound)
    for one in report.backends:
        if before[one.name] == "unsupported":
            continue
        if role == "input_scale" and one.name not in READS:
            assert one.outcome == "ignored"
            continue
        assert one.outcome == "degraded"
        assert {"degraded", "safe"} <= set(one.possible)
        assert (one.scope, one.layers) == ("layer", (3,))
        vllm = id == "FP8" and FAMILIES[one.name].engine == "vllm"
        assert ("ignored" in one.possible) == (role == "input_scale" and (one.name in APART or vllm))
        for language in ("en", "zh"):
            assert AT in describe(one, language)[0]


@pytest.mark.parametrize(("id", "role"), CASES)
def test_a_weight_is_held_to_the_rule_for_experts_and_an_activation_is_not(id, role):
    for factor in (100, 1 / 100):
        assert len(told(report_of(times(healthy(id), id, role, factor), id))) == (role != "input_scale")
        # Of three layers no one is apart by so little.
        few = report_of(times(healthy(id, 3), id, role, factor, "model.layers.1.self_attn.o_proj"), id, 3)
        assert told(few) == []
    for factor in (50, 1 / 50):
        assert told(report_of(times(healthy(id), id, role, factor), id)) == []


@pytest.mark.parametrize(("id", "role"), CASES)
def test_of_three_layers_one_may_be_told_and_of_two_none(id, role):
    at = "model.layers.1.self_attn.o_proj"
    for layers, expected in ((3, 1), (2, 0)):
        assert len(told(report_of(times(healthy(id, layers), id, role, 1e6, at), id, layers))) == expected


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors"])
def test_one_that_is_stored_the_other_way_up(id):
    sound = healthy(id, seed=7)
    name = f"{AT}.{ROLES[id]['weight_scale_2']}"
    [value] = np.frombuffer(sound[name].tobytes(), np.float32)
    bad = {**sound, name: tensor(np.full(sound[name].shape, 1 / value, np.float32))}
    assert [item.tensors for item in told(report_of(bad, id))] == [(name,)]
    # All of them are one cause.
    suffix = ROLES[id]["weight_scale_2"]
    every = {
        each: tensor((1 / np.frombuffer(item.tobytes(), np.float32)).reshape(item.shape))
        for each, item in sound.items() if each.endswith(suffix) and ".experts." not in each
    }  # fmt: skip
    report = report_of({**sound, **every, name: sound[name]}, id)
    assert told(report) == []
    assert "scale.convention" in [item.code for item in report.findings]


@pytest.mark.parametrize("id", ROLES)
@pytest.mark.parametrize("seed", range(12))
def test_layers_may_differ(id, seed):
    assert told(report_of(healthy(id, seed=seed), id)) == []


def test_layers_may_differ_whatever_their_spread():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        count = int(rng.integers(1, 100))
        assert not far_beyond(rng.uniform(0, np.log2(1000)) * rng.uniform(size=count)).any()
        # A massive activation, in a few layers.
        few = np.where(rng.uniform(size=count) < 0.1, rng.uniform(0, 12), 0)
        assert not far_beyond(rng.normal(0, 0.3, count) + few).any()


def test_halves_are_not_odd():
    for low, high, expected in ((2, 2, 0), (3, 3, 0), (4, 8, 0), (5, 1, 1), (10, 2, 2)):
        assert far_beyond(np.float64([0] * low + [20] * high)).sum() == expected


def test_what_is_cast_is_no_measure():
    """FP8 weights without a scale of their own have 1; a few of them may have one."""
    cast = {f"{name}.weight_scale": number(1.0) for name in names()}
    for factor in (1.0, 2e-3, 1e-6):
        assert told(report_of({**healthy("FP8"), **cast, f"{AT}.weight_scale": number(factor)}, "FP8")) == []


def test_what_has_its_own_finding():
    sound = healthy("modelopt")
    # Fused modules that differ are one finding; three of a kind are told by their namesakes.
    for role in ("input_scale", "weight_scale_2"):
        q, *others = (f"model.layers.3.{part}" for part in FUSED)
        one = times(sound, "modelopt", role, 1e6, q)
        texts = [item.text for item in report_of(one, "modelopt").findings]
        assert not any(text.startswith("scale.outlier.linear") for text in texts)
        for each in others:
            one = times(one, "modelopt", role, 1e6, each)
        [item] = told(report_of(one, "modelopt"))
        assert (item.count, item.layer) == (3, 3)
    # Numbers that no calibration gives, and those that are no scale.
    far = {f"model.layers.{layer}.self_attn.o_proj.input_scale": number(3e-9) for layer in range(LAYERS)}
    for value in (6 / 2688, 0.5 / 2688, 1 / 2688, 1.0, np.nan, np.inf, 0.0, np.finfo(np.float32).max / 2688):
        report = report_of({**sound, **far, f"{AT}.input_scale": number(np.float32(value))}, "modelopt")
        assert told(report) == []
        assert sum(item.tensors == (f"{AT}.input_scale",) for item in report.findings) == 1
    assert len(told(report_of({**sound, **far, f"{AT}.input_scale": number(2e-3)}, "modelopt"))) == 1


def test_where_nobody_reads_it_or_awq_moved_it():
    off = times(healthy("modelopt"), "modelopt", "input_scale", 1e6)
    assert len(told(report_of(off, "modelopt"))) == 1
    vector = {f"{AT}.pre_quant_scale": tensor(np.full(64, 0.5, np.float32))}
    assert told(report_of({**off, **vector}, "modelopt")) == []
    quant = {"quantization": {**LAYOUTS["modelopt"].quant["quantization"], "quant_algo": "W4A16_NVFP4"}}
    assert told(report_of(off, "modelopt", quant=quant)) == []
    # A weight's is everybody's.
    weight = times(healthy("modelopt"), "modelopt", "weight_scale_2", 1e6)
    report = report_of(weight, "modelopt", quant=quant)
    assert len(told(report)) == 1
    assert outcomes(report)["vllm-marlin"] == "degraded"


def test_another_tower_may_have_other_weights():
    """64 times is a rule among modules of one tower."""
    out = {}
    for tower, value in (("model.language_model.layers", 1e-4), ("model.visual.blocks", 1e-4 * 200)):
        for layer in range(12 if "language" in tower else 2):
            out |= eight([f"{tower}.{layer}.attn.proj"])
            out[f"{tower}.{layer}.attn.proj.weight_scale"] = scale(value)
    assert told(audit(memory_checkpoint(out))) == []


def test_several_layers_are_one_finding():
    off = healthy("modelopt", 12)
    for layer in (4, 9):
        off = times(off, "modelopt", "weight_scale_2", 1e6, f"model.layers.{layer}.self_attn.o_proj")
    [item] = told(report_of(off, "modelopt", 12))
    assert (item.layer, item.count, item.params["numbers"]) == (None, 2, [4, 9])


def unset(tensors, id, modules):
    """The same with second-level weight scales of 1.0."""
    ones = {f"{module}.{ROLES[id]['weight_scale_2']}" for module in modules}
    return tensors | {name: tensor(np.ones(tensors[name].shape, np.float32)) for name in ones}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors"])
def test_weight_scales_that_nobody_set(id, seed):
    """One module, the fused ones of a layer, a kind in all layers, or all modules: a note, and no outlier."""
    sound = healthy(id, seed=seed)
    assert found(report_of(sound, id)) == []
    all_of_a_kind = [f"model.layers.{k}.self_attn.o_proj" for k in range(LAYERS)]
    for modules in ([AT], [f"model.layers.2.{part}" for part in FUSED], all_of_a_kind, names()):
        report = report_of(unset(sound, id, modules), id)
        assert found(report) == []
        [item] = [one for one in report.findings if one.code.startswith("scale")]
        assert (item.code, item.role, item.value, item.count) == ("scale.identity", "weight_scale_2", 1.0, len(modules))
        assert item.layer == (None if len(modules) > 3 else int(modules[0].split(".")[2]))
        for one in report.backends:
            assert (one.outcome, one.possible) == ("degraded", ("degraded", "nan", "safe", "zero")), one.name
        for language in ("en", "zh"):
            assert "1.0" in describe(item, language)[0]


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors"])
def test_one_of_fused_modules_that_nobody_set_is_a_mismatch(id):
    report = report_of(unset(healthy(id, seed=1), id, [f"model.layers.2.{FUSED[1]}"]), id)
    told = [item.text for item in report.findings if item.role == "weight_scale_2"]
    assert told == ["scale.pair-mismatch.linear"]
