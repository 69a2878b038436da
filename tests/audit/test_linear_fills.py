"""Activation scales of shared experts, dense layers and attention that nobody measured."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.fills import FINGERPRINTS, fills_of_modules
from nvfp4viz.checkpoint import memory_checkpoint, tensor
from tests.audit.families import WIDTH, H, config, experts, norms, sidecar
from tests.audit.layouts import LAYOUTS, linear
from tests.audit.reading import codes, found, outcomes
from tests.audit.test_linear_forecast import ATTENTION, READS, SHARED, UNREADING, attention, number, opened, shared

VALUES = {origin: value for value, origin in FINGERPRINTS}
KNOWN = [origin for origin in VALUES if origin != "default-amax"]


def texts(report):
    return [item.text for item in report.findings if item.code in ("scale.filled", "scale.identity")]


def filled(where, value):
    """Modules by layout, with this effective scale in one of them."""
    with np.errstate(all="ignore"):
        inverse = tensor(np.float32([1]) / np.float32([value]))
    return {
        "shared expert": ("modelopt", {**shared(), f"{SHARED}.down_proj.input_scale": number(value)}),
        "attention": ("modelopt", {**attention(), f"{ATTENTION}.o_proj.input_scale": number(value)}),
        "dense layer": ("modelopt", {**dense(), "model.layers.1.mlp.down_proj.input_scale": number(value)}),
        "lm_head": ("modelopt", {**shared(), **linear("lm_head"), "lm_head.input_scale": number(value)}),
        "compressed-tensors": (
            "compressed-tensors",
            {**attention("compressed-tensors"), f"{ATTENTION}.o_proj.input_global_scale": inverse},
        ),
        "Quark": ("Quark NVFP4", {**quark(), f"{SHARED}.down_proj.input_scale_2": number(value)}),
    }[where]  # fmt: skip


PLACES = ("shared expert", "attention", "dense layer", "lm_head", "compressed-tensors", "Quark")


def dense():
    out = LAYOUTS["modelopt"].tensors()
    for last, size in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        out |= linear(f"model.layers.1.mlp.{last}", *size)
    return out


def quark():
    out = LAYOUTS["Quark NVFP4"].tensors()
    for name, item in shared().items():
        if name.startswith(SHARED):
            out[name.replace("input_scale", "input_scale_2")] = item
    return out


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("origin", VALUES)
def test_one_value_is_one_finding(origin, place):
    id, tensors = filled(place, VALUES[origin])
    report = opened(tensors, id)
    assert texts(report) == [f"scale.filled.linear.{origin}"]
    [item] = [one for one in report.findings if one.code == "scale.filled"]
    assert (item.severity, item.role, item.count) == ("warn" if origin in KNOWN else "info", "input_scale", 1)
    for language in ("en", "zh"):
        assert "{" not in "".join(describe(item, language))
    assert report.coverage["input_scale"].filled == 0
    # Nothing else is made of it.
    healthy = opened(filled(place, 3e-3)[1], id)
    assert [one.code for one in report.findings if one.code != "scale.filled"] == [one.code for one in healthy.findings]
    assert texts(healthy) == []


@pytest.mark.parametrize("place", PLACES)
def test_an_infinite_maximum_makes_zero_of_every_token(place):
    id, tensors = filled(place, VALUES["float-max"])
    healthy, said = outcomes(opened(filled(place, 3e-3)[1], id)), outcomes(opened(tensors, id))
    for name in said:
        served = healthy[name] == "safe"
        assert said[name] == (healthy[name] if not served else "zero" if name in READS else "ignored")
    assert "zero" in said.values()
    # The others are numbers as any other.
    for origin in ("max-bound", "per-token-base", "default-amax"):
        assert outcomes(opened(filled(place, VALUES[origin])[1], id)) == healthy


def test_a_fused_sibling_does_not_hide_the_largest_number():
    report = opened({**shared(), f"{SHARED}.gate_proj.input_scale": number(VALUES["float-max"])})
    assert not any("(;" in one.why for one in report.backends)
    assert found(report) == [("scale.filled", "warn", 0, None, None)]
    assert {outcomes(report)[name] for name in READS} == {"zero"}
    assert {outcomes(report)[name] for name in UNREADING} == {"ignored"}


def test_a_bit_beside_it_is_measured():
    for origin in KNOWN:
        for steps, expected in ((1, 1), (3, 0)):
            value = VALUES[origin] - steps * np.spacing(VALUES[origin])
            assert len(texts(opened({**shared(), f"{SHARED}.down_proj.input_scale": number(value)}))) == expected


def test_an_exact_one_beside_others():
    report = opened({**shared(), f"{SHARED}.down_proj.input_scale": number(1.0)})
    assert report.coverage["input_scale"].filled == 0
    assert texts(report) == ["scale.identity.linear"]
    assert codes(report) == [("scale.identity", "info")]
    # Where all are, they are meant so.
    assert texts(opened({name: number(1.0) if name.startswith(SHARED) and "input" in name else item
                         for name, item in shared().items()})) == []  # fmt: skip


@pytest.mark.parametrize("id", ["W4A16", "W4A8"])
def test_where_nobody_reads_it_or_it_is_over_another_number(id):
    tensors = {**LAYOUTS[id].tensors(), **linear(f"{ATTENTION}.o_proj")}
    for value in VALUES.values():
        tensors[f"{ATTENTION}.o_proj.input_scale"] = number(value)
        assert texts(opened(tensors, id)) == []


def test_fp8_over_its_own_largest_number():
    layout = LAYOUTS["MIXED_PRECISION"]
    name = "model.layers.0.linear_attn.out_proj.input_scale"
    tensors = layout.tensors()
    assert name in tensors
    largest = np.finfo(np.float32).max / np.float32(448)
    report = audit(layout.open({**tensors, name: number(largest)}))
    assert found(report) == [("scale.filled", "warn", 0, None, None)]
    said = outcomes(report)
    assert said["transformers"] == "ignored"
    assert {said[one] for one in said if one != "transformers"} == {"zero"}
    for value in (*VALUES.values(), 1.0):
        if value < 1e30:
            assert texts(audit(layout.open({**tensors, name: number(value)}))) == []


def coarse(layers, filled_in, value, at="down_proj"):
    """A model whose maxima are BF16 numbers; in the first layers a shared expert's scale is this one."""
    out, rng = norms("model.norm"), np.random.default_rng(2)
    for k in range(layers):
        block = f"model.layers.{k}.mlp"
        out |= experts(f"{block}.experts")
        for last, size in (("gate_proj", (WIDTH, H)), ("up_proj", (WIDTH, H)), ("down_proj", (H, WIDTH))):
            module = f"{block}.shared_experts.{last}"
            out |= linear(module, *size)
            amax = np.float32(rng.integers(129, 255)) / np.float32(32)
            out[f"{module}.input_scale"] = number(amax / np.float32(2688))
        # Gate and up read one input.
        out[f"{block}.shared_experts.up_proj.input_scale"] = out[f"{block}.shared_experts.gate_proj.input_scale"]
        if k < filled_in:
            for last in ("gate_proj", "up_proj") if at == "gate_proj" else (at,):
                out[f"{block}.shared_experts.{last}.input_scale"] = number(value)
    return audit(memory_checkpoint(out, config=config(layers), hf_quant_config=sidecar("NVFP4", ["lm_head"])))


@pytest.mark.parametrize("at", ["gate_proj", "down_proj"])
@pytest.mark.parametrize("origin", ["max-bound", "per-token-base", "default-amax"])
def test_a_maximum_in_bf16_may_be_that_number_by_chance(origin, at):
    for filled_in, expected in ((0, 0), (1, 0), (2, 0), (3, 1), (6, 1)):
        report = coarse(6, filled_in, VALUES[origin], at)
        assert len(texts(report)) == expected
    assert texts(coarse(6, 1, VALUES["float-max"], at)) == ["scale.filled.linear.float-max"]


def test_many_modules_have_more_of_them_by_chance():
    values = {
        f"model.layers.{k}.self_attn.o_proj": np.float32((129 + k % 120) / 32) / np.float32(2688) for k in range(320)
    }
    six = VALUES["max-bound"]
    for count, expected in ((0, []), (10, []), (11, ["max-bound"])):
        some = {**values, **dict.fromkeys(list(values)[:count], six)}
        some = {name: value for name, value in some.items() if value != six or name in list(values)[:count]}
        assert list(fills_of_modules(some, [], coarse=False)) == expected


def test_what_is_taken_for_granted_where_all_are_filled():
    for coarse_experts, expected in ((False, ["max-bound"]), (True, [])):
        assert list(fills_of_modules({"lm_head": VALUES["max-bound"]}, [], coarse=coarse_experts)) == expected
    assert fills_of_modules({}, [], coarse=True) == {}
    three = {f"model.layers.{k}.mlp.down_proj": VALUES["max-bound"] for k in range(3)}
    assert list(fills_of_modules(three, [], coarse=True)) == ["max-bound"]


def test_modules_of_several_layers_are_one_finding():
    report = coarse(6, 4, VALUES["max-bound"])
    [item] = [one for one in report.findings if one.code == "scale.filled"]
    assert (item.count, item.layer, item.params["numbers"]) == (4, None, [0, 1, 2, 3])
