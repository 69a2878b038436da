"""A layout of which only one tensor's name is public (Inkling): what is not known is not called a defect."""

import pytest

from nvfp4viz.audit import audit
from nvfp4viz.audit.backends import FAMILIES
from tests.audit.layouts import CONFIG, EXPERTS, LAYOUTS, modelopt, with_quant
from tests.audit.reading import codes, found, outcomes

INKLING = LAYOUTS["Inkling"]
ACTIVATIONS = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}


def flat(algo, activations):
    group = {"weights": ACTIVATIONS, "input_activations": activations, "targets": ["Linear"]}
    return with_quant(
        {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["*gate"], "config_groups": {"group_0": group}}
    )


def second_level_alone():
    """Only what the report that made the layout public shows."""
    return {name: item for name, item in INKLING.tensors().items() if name.endswith((".scale2", "gate.weight"))}


@pytest.mark.parametrize("tensors", [INKLING.tensors, second_level_alone])
@pytest.mark.parametrize(
    ("config", "quant"),
    [
        (flat("NVFP4", ACTIVATIONS), None),
        (flat("NVFP4", None), None),
        (CONFIG, modelopt("NVFP4", exclude=("*gate",))),
    ],
    ids=["activations", "promoted", "sidecar"],
)
def test_activation_scales_whose_name_nobody_knows_are_not_missing(tensors, config, quant):
    """`scheme.mislabelled` needs a scale that would be there if there were any; here nobody knows its name."""
    report = audit(INKLING.open(tensors(), config=config, quant=quant))
    assert codes(report) == [("audit.partial", "info")]
    assert report.format.scheme == "W4A4"
    assert report.coverage["input_scale"].expected == 0
    # vLLM serves the promoted one as W4A16.
    promoted = config == flat("NVFP4", None)
    refusing = {n for n, own in FAMILIES.items() if own.engine == "vllm" and "W4A16" not in own.schemes}
    assert {item.name for item in report.backends if item.outcome != "safe"} == (refusing if promoted else set())


def test_a_forecast_says_what_it_does_not_know():
    report = audit(INKLING.open(second_level_alone(), config=flat("NVFP4", ACTIVATIONS), quant=None))
    assert {item.why for item in report.backends} == {
        "The second-level weight scales, the only ones whose name is public in this layout, are there and usable; "
        "nothing is known of the others."
    }


def test_labelled_weight_only_it_is_weight_only():
    report = audit(INKLING.open())
    assert report.format.scheme == "W4A16"
    assert codes(report) == [("audit.partial", "info")]
    assert {item.name for item in report.backends if item.outcome == "safe"} == {
        name for name, family in FAMILIES.items() if "W4A16" in family.schemes
    }


def test_where_the_name_is_known_absence_counts():
    """The twin: Step's stacked layout under the same label."""
    layout = LAYOUTS["stacked"]
    tensors = {name: item for name, item in layout.tensors().items() if not name.endswith("input_scale")}
    assert [row[:2] for row in found(audit(layout.open(tensors)))] == [("scheme.mislabelled", "backend")]


@pytest.mark.parametrize("tensors", [INKLING.tensors, second_level_alone])
@pytest.mark.parametrize("kind", INKLING.kinds)
def test_a_layer_without_anything_of_one_projection_lacks_the_tensor_whose_name_is_public(tensors, kind):
    lost = f"{INKLING.prefix}.{INKLING.disk[kind]}"
    kept = {name: item for name, item in tensors().items() if not name.startswith(lost)}
    report = audit(INKLING.open(kept))
    every = tuple(range(EXPERTS))
    assert found(report) == [("scale.missing", "error", 0, kind, every)]
    [item] = [item for item in report.findings if item.severity == "error"]
    assert (item.role, item.tensors) == ("weight_scale_2", (f"{lost}.scale2",))
    assert report.model.projections == ("gate_up", "down")
    assert report.coverage["weight_scale_2"].missing == EXPERTS
    assert set(outcomes(report).values()) == {"undefined", "load-error", "unsupported"}


def test_the_same_in_one_of_two_layers():
    second = {name.replace("layers.0.", "layers.1."): item for name, item in INKLING.tensors().items()}
    config = {**CONFIG, "num_hidden_layers": 2}
    assert found(audit(INKLING.open({**INKLING.tensors(), **second}, config=config))) == []
    kept = {name: item for name, item in second.items() if "w13_weight" not in name}
    report = audit(INKLING.open({**INKLING.tensors(), **kept}, config=config))
    assert found(report) == [("scale.missing", "error", 1, "gate_up", tuple(range(EXPERTS)))]
