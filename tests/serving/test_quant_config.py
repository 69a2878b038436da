"""Reading the quantisation config, and the weight-only promotion rule with its four variants."""

import pytest

from nvfp4viz.errors import ServingError
from nvfp4viz.serving import resolve_quantization

NESTED = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}


def flat(groups="unset", algo="NVFP4"):
    body = {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"]}
    if groups != "unset":
        body["config_groups"] = groups
    return {"quantization_config": body}


WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16}
ACTIVATIONS = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}


# The four variants of a group's input_activations, alone and together.
@pytest.mark.parametrize(
    ("groups", "promoted"),
    [
        ({"g": {"weights": WEIGHTS, "input_activations": None}}, True),  # null
        ({"g": {"weights": WEIGHTS}}, True),  # absent counts as null
        ({"g": {"weights": WEIGHTS, "input_activations": {}}}, False),  # an empty object does not
        ({"g": {"weights": WEIGHTS, "input_activations": ACTIVATIONS}}, False),
        ({"g": {"weights": WEIGHTS}, "h": {"input_activations": None}}, True),
        ({"g": {"weights": WEIGHTS}, "h": {"input_activations": ACTIVATIONS}}, False),
    ],
)
def test_a_group_without_input_activations_means_weight_only(groups, promoted):
    resolved = resolve_quantization(flat(groups), None)
    assert resolved.promoted is promoted
    assert resolved.algo == ("W4A16_NVFP4" if promoted else "NVFP4")
    assert resolved.scheme == ("W4A16" if promoted else "W4A4")
    assert resolved.declared_algo == "NVFP4"
    last = resolved.steps[-1]
    assert (last.id, last.holds) == ("no-input-activations", promoted)


@pytest.mark.parametrize(
    ("groups", "stops_at"),
    [("unset", "groups-present"), ({}, "groups-present"), (None, "groups-present"), ([], "groups-present"),
     ({"g": None}, "groups-are-objects"), ({"g": {}, "h": "x"}, "groups-are-objects")],
)  # fmt: skip
def test_without_groups_the_rule_cannot_fire(groups, stops_at):
    """The mislabelled case of #54189: nothing in the config says weight-only, so W4A4 it stays."""
    resolved = resolve_quantization(flat(groups), None)
    assert resolved.scheme == "W4A4"
    assert [step.id for step in resolved.steps if step.holds is False] == [stops_at]


def test_groups_inside_the_nested_object_are_not_looked_at():
    groups = {"g": {"weights": WEIGHTS}}
    inside = resolve_quantization(None, {"quantization": NESTED | {"config_groups": groups}})
    beside = resolve_quantization(None, {"quantization": NESTED, "config_groups": groups})
    assert (inside.promoted, beside.promoted) == (False, True)


@pytest.mark.parametrize(
    ("algo", "scheme"), [("nvfp4", "W4A4"), ("W4A16_NVFP4", "W4A16"), ("MIXED_PRECISION", "MIXED")]
)
def test_only_nvfp4_itself_is_promoted(algo, scheme):
    resolved = resolve_quantization(flat({"g": {"input_activations": {}}}, algo), None)
    assert resolved.scheme == scheme
    assert not resolved.promoted


def test_config_json_wins_over_the_sidecar():
    resolved = resolve_quantization(flat(algo="W4A16_NVFP4"), {"quantization": NESTED})
    assert (resolved.source, resolved.algo) == ("config.json", "W4A16_NVFP4")
    resolved = resolve_quantization({"model_type": "tiny_moe"}, {"quantization": NESTED})
    assert (resolved.source, resolved.algo, resolved.exclude) == ("hf_quant_config.json", "NVFP4", ("lm_head",))


@pytest.mark.parametrize("field", ["group_size", "kv_cache_quant_algo", "exclude_modules"])
def test_the_nested_shape_needs_its_fields(field):
    body = {key: value for key, value in NESTED.items() if key != field}
    with pytest.raises(ServingError) as refused:
        resolve_quantization(None, {"quantization": body})
    assert refused.value.code == "serving.quant-fields"
    assert field in str(refused.value)


def test_a_mixed_file_needs_its_layers_and_nothing_else():
    body = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}},
    }
    assert resolve_quantization(None, {"quantization": body}).scheme == "MIXED"
    for empty in ({}, None):
        with pytest.raises(ServingError) as refused:
            resolve_quantization(None, {"quantization": NESTED | body | {"quantized_layers": empty}})
        assert (refused.value.code, "quantized_layers" in str(refused.value)) == ("serving.quant-fields", True)


@pytest.mark.parametrize("algo", [None, "", "INT4", "NVFP4_AWQ"])
def test_unknown_algorithms_are_refused(algo):
    with pytest.raises(ServingError) as refused:
        resolve_quantization(flat(algo=algo), None)
    assert refused.value.code == "serving.quant-algo"


@pytest.mark.parametrize("section", ["NVFP4", [], 4])
def test_a_section_that_is_no_object_is_refused(section):
    with pytest.raises(ServingError) as refused:
        resolve_quantization({"quantization_config": section}, None)
    assert refused.value.code == "serving.quant-shape"


def test_no_config_is_unquantised():
    for config in (None, {}, {"model_type": "tiny_moe"}):
        assert resolve_quantization(config, None).scheme == "UNQUANTISED"


def test_group_size_defaults_to_16():
    assert resolve_quantization(flat(), None).group_size == 16
    assert resolve_quantization(None, {"quantization": NESTED | {"group_size": None}}).group_size == 16


@pytest.mark.parametrize(("activations", "scheme"), [(ACTIVATIONS, "W4A4"), (None, "W4A16")])
def test_compressed_tensors_has_its_own_reading(activations, scheme):
    groups = {"group_0": {"weights": WEIGHTS, "input_activations": activations}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["a"]}}
    resolved = resolve_quantization(config, None)
    assert (resolved.scheme, resolved.promoted, resolved.exclude) == (scheme, False, ("a",))
