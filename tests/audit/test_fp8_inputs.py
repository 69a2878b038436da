"""Stored activation scales of FP8 that are not there: due by the configuration, by its label, or by a namesake."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES
from nvfp4viz.checkpoint import memory_checkpoint
from tests.audit.config_faults import section_of, with_section
from tests.audit.layouts import ALLOWED, LAYOUTS, typed, with_quant
from tests.audit.reading import NARROW, found, outcomes
from tests.audit.test_fp8 import NAMED, ROWS, WIDE, fp8, in_groups

Q, K, V, OUT = (f"model.layers.0.self_attn.{last}_proj" for last in "qkvo")
ATTENTION = (Q, K, V, OUT)
VLLM = {name for name, family in FAMILIES.items() if family.engine == "vllm"}
HOLE = ("scale.missing", "backend", 0, None, None)


def scale(value=0.01):
    return typed(np.float32(value).reshape(()), "F32")


def eight(modules, without=(), suffix="input_scale"):
    """FP8 modules with one number a tensor, and stored activation scales but for some."""
    out = {}
    for name in modules:
        out |= fp8(name, (64, 64), ())
        if name not in without:
            out[f"{name}.{suffix}"] = scale()
    return out


def codes(report):
    return [(item.text, item.severity) for item in report.findings if item.code == "scale.missing"]


# Attention in FP8 of a checkpoint with four-bit experts: how its configuration promises stored scales, or does not.


def listed(algo, *without, **more):
    layout = LAYOUTS["MIXED_PRECISION"]
    layers = {**ALLOWED, **{name: {"quant_algo": algo} for name in ATTENTION}}
    quant = {"quantization": {**section_of(layout), "quantized_layers": layers}, **more}
    base = {name: item for name, item in layout.tensors().items() if name not in without}
    return lambda tensors: layout.open({**base, **tensors}, quant=quant)


def of_modelopt(inputs):
    """The groups that ModelOpt writes beside its algorithms."""
    weights = {"num_bits": 8, "type": "float", "dynamic": False}
    group = {"weights": weights, "input_activations": inputs, "targets": list(ATTENTION)}
    return {"config_groups": {"group_0": group}}


def grouped(inputs, strategy="tensor"):
    layout = LAYOUTS["compressed-tensors"]
    section = in_groups({"strategy": strategy}, "re:.*self_attn.*")
    section["config_groups"]["group_1"]["input_activations"] = inputs
    return lambda tensors: layout.open({**layout.tensors(), **tensors}, **with_section(layout, section))


def quark(inputs):
    layout = LAYOUTS["Quark"]
    entry = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "input_tensors": inputs}
    section = section_of(layout)
    section = {**section, "layer_quant_config": {**section.get("layer_quant_config", {}), "*self_attn*": entry}}
    return lambda tensors: layout.open({**layout.tensors(), **tensors}, **with_section(layout, section))


FLOAT = {"num_bits": 8, "type": "float", "strategy": "tensor"}
STATIC = {
    "compressed-tensors": grouped({**FLOAT, "dynamic": False}), "compressed-tensors, no word": grouped(FLOAT),
    "Quark": quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}),
}  # fmt: skip
DYNAMIC = {
    "compressed-tensors": grouped({**FLOAT, "dynamic": True}), "local": grouped({**FLOAT, "dynamic": "local"}),
    "weights alone": grouped(None), "Quark": quark({"dtype": "fp8_e4m3", "is_dynamic": True}),
    "Quark, weights alone": quark(None), "per channel and token": listed("FP8_PER_CHANNEL_PER_TOKEN"),
}  # fmt: skip


@pytest.mark.parametrize("id", STATIC)
def test_a_configuration_that_says_static(id):
    opened = STATIC[id]
    sound = eight(ATTENTION)
    healthy = audit(opened(sound))
    assert found(healthy) == []
    before = outcomes(healthy)
    for lost in ([OUT], [Q], [Q, K, V], list(ATTENTION)):
        report = audit(opened({name: item for name, item in sound.items() if name.rpartition(".input")[0] not in lost}))
        assert found(report) == [HOLE]
        [item] = [one for one in report.findings if one.code == "scale.missing"]
        assert (item.role, item.count) == ("input_scale", len(lost))
        assert set(item.tensors) <= {f"{name}.input_scale" for name in lost}
        for one in report.backends:
            if before[one.name] != "safe":
                # It does not serve MXFP4 at all.
                assert one.outcome == before[one.name] == "unsupported"
            elif one.name in VLLM:
                # A fused sibling's scale is larger than the number that stands in.
                hidden = lost == [Q]
                if not hidden:
                    assert (one.outcome, one.possible) == ("zero", ("ignored", "zero"))
                    assert (one.scope, one.layers) == ("layer", (0,))
                    assert item.tensors[0] in one.why
                else:
                    doubt = ("safe", "unsupported") if one.text == NARROW else ()
                    assert (one.outcome, one.possible, one.scope) == ("safe", doubt, "none")
            elif one.name != "transformers":
                assert one.outcome == "undefined"
                assert "safe" in one.possible


@pytest.mark.parametrize("id", DYNAMIC)
def test_a_configuration_that_says_dynamic(id):
    """Nothing is due, not even where some module has one."""
    grain = (64, 1) if "channel" in id else ()
    none = {name: item for each in ATTENTION for name, item in fp8(each, (64, 64), grain).items()}
    assert codes(audit(DYNAMIC[id](none))) == []
    assert codes(audit(DYNAMIC[id]({**none, f"{Q}.input_scale": scale()}))) == []


@pytest.mark.parametrize("dynamic", [None, False])
def test_modelopts_label_means_it_whether_one_is_gone_or_all(dynamic):
    """vLLM fills the same slot either way: zeros, where no fused sibling hides it."""
    groups = {} if dynamic is None else of_modelopt({**FLOAT, "dynamic": dynamic})
    # One of other modules' makes no difference.
    other = "model.layers.0.linear_attn.out_proj.input_scale"
    assert other in LAYOUTS["MIXED_PRECISION"].tensors()
    healthy = audit(listed("FP8", other, **groups)(eight(ATTENTION)))
    assert OUT not in " ".join(name for item in healthy.findings for name in item.tensors)
    before = outcomes(healthy)
    for lost in ([OUT], ATTENTION):
        report = audit(listed("FP8", **groups)(eight(ATTENTION, lost)))
        assert found(report) == [HOLE]
        alone = audit(listed("FP8", other, **groups)(eight(ATTENTION, lost)))
        assert codes(alone) == [("scale.missing.linear.fp8", "backend")]
        for each in (report, alone):
            assert {one.outcome for one in each.backends if one.name in VLLM and before[one.name] != "unsupported"} == {
                "zero"
            }
            assert all(one.outcome == before[one.name] for one in each.backends if one.name == "transformers")
    assert codes(audit(listed("FP8", **groups)(eight(ATTENTION)))) == []


@pytest.mark.parametrize("inputs", [{"num_bits": 8, "type": "float", "dynamic": True}, None])
def test_a_label_that_its_own_group_denies(inputs):
    """ModelOpt's FP8 means stored scales, and the group says that there are none: a note, with the reason."""
    other = "model.layers.0.linear_attn.out_proj.input_scale"
    opened = listed("FP8", other, **of_modelopt(inputs))
    report = audit(opened(eight(ATTENTION, ATTENTION)))
    [item] = [one for one in report.findings if one.code == "scale.missing" and OUT in " ".join(one.tensors)]
    assert (item.text, item.severity) == ("scale.missing.linear.fp8.label", "info")
    assert "contradicts itself" in describe(item)[0]
    assert "自相矛盾" in describe(item, "zh")[0]


def test_a_namesake_in_another_layer():
    """Of modules that no list speaks of, the same module of the next layer tells: a note."""
    layout = LAYOUTS["modelopt"]
    pair = [f"model.layers.{layer}.linear_attn.out_proj" for layer in (0, 1)]

    def opened(without):
        return audit(layout.open({**layout.tensors(), **eight(pair, without)}))

    assert codes(opened([])) == codes(opened(pair)) == []
    assert codes(opened(pair[:1])) == [("scale.missing.linear.fp8.namesake", "info")]


def test_quarks_own_name_for_it_counts():
    opened = STATIC["Quark"]
    assert codes(audit(opened(eight(ATTENTION, suffix="input_quantizer.scale")))) == []


@pytest.mark.parametrize("scheme", ["static", "dynamic", None])
def test_deepseeks_method_says_it_of_the_whole_file(scheme):
    section = {"quant_method": "fp8", **({"activation_scheme": scheme} if scheme else {})}

    def opened(without, **more):
        return audit(memory_checkpoint(eight(ATTENTION, without), config=with_quant({**section, **more})))

    assert codes(opened([])) == []
    expected = [("scale.missing.linear.fp8", "backend")] if scheme == "static" else []
    assert codes(opened([OUT])) == codes(opened(ATTENTION)) == expected
    # By blocks there are none to store, and what the list leaves out is of another origin.
    assert codes(opened(ATTENTION, ignored_layers=[])) == expected
    assert codes(opened([OUT], modules_to_not_convert=["o_proj"])) == []


# Routed experts in FP8.


def experts(prefix, without=(), count=4):
    _, disk = NAMED[prefix]
    out = {}
    for expert in range(count):
        for kind, name in disk.items():
            at = f"{prefix}.{expert}.{name}"
            out |= fp8(at, ROWS[kind], ())
            if (expert, kind) not in without:
                out[f"{at}.input_scale"] = scale()
    return out


PREFIX = "model.layers.0.mlp.experts"
EVERY = [(expert, kind) for expert in range(4) for kind in ROWS]
WHOLE = {
    "static": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
}


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("id", WHOLE)
def test_experts_without_the_scale_that_is_due(id, language):
    config = {**WIDE, "quantization_config": WHOLE[id]}
    assert codes(audit(memory_checkpoint(experts(PREFIX), config=config))) == []
    lost = [(1, "up"), (3, "up"), (2, "down")]
    report = audit(memory_checkpoint(experts(PREFIX, lost), config=config))
    assert found(report) == [
        ("scale.missing", "backend", 0, "up", (1, 3)), ("scale.missing", "backend", 0, "down", (2,)),
    ]  # fmt: skip
    [item] = [one for one in report.findings if one.projection == "up"]
    assert item.tensors == tuple(f"{PREFIX}.{expert}.up_proj.input_scale" for expert in (1, 3))
    assert "1, 3" in describe(item, language)[0]
    none = audit(memory_checkpoint(experts(PREFIX, EVERY), config=config))
    assert {one.severity for one in none.findings if one.code == "scale.missing"} == {"backend"}


def test_experts_that_need_none():
    for section in (
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, {"quant_method": "fp8"},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [256, 512]},
    ):  # fmt: skip
        config = {**WIDE, "quantization_config": section}
        assert codes(audit(memory_checkpoint(experts(PREFIX, EVERY), config=config))) == []


def test_a_layer_of_fp8_experts_beside_four_bit_ones_is_forecast():
    """1.0 in place of one expert's scale is the largest of the layer: precision is lost, for all of it."""
    layout = LAYOUTS["MIXED_PRECISION"]
    prefix = "model.layers.1.mlp.experts"
    layers = {**ALLOWED, prefix: {"quant_algo": "FP8"}}
    quant = {"quantization": {**section_of(layout), "quantized_layers": layers}}
    shapes = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    before = None
    for lost in ((), (5,)):
        tensors = layout.tensors()
        for expert in range(8):
            for kind, disk in NAMED[PREFIX][1].items():
                tensors |= fp8(f"{prefix}.{expert}.{disk}", shapes[kind], ())
                if expert not in lost or kind != "up":
                    tensors[f"{prefix}.{expert}.{disk}.input_scale"] = scale()
        report = audit(layout.open(tensors, quant=quant, config={**layout.config, "num_hidden_layers": 2}))
        assert found(report) == ([("scale.missing", "backend", 1, "up", (5,))] if lost else [])
        if lost:
            for one in report.backends:
                if one.name in VLLM and before[one.name] == "safe":
                    assert (one.outcome, one.possible, one.scope) == ("degraded", ("degraded", "safe"), "layer")
                    assert one.layers == (1,)
        before = {one.name: one.outcome for one in report.backends}
