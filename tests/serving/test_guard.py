"""The load guard, on our loader and on its own."""

import numpy as np
import pytest

from nvfp4viz.checkpoint import canonical
from nvfp4viz.errors import ServingError
from nvfp4viz.serving import LoadGuard, check_slots, load_parameters
from nvfp4viz.serving.served import run_guard


def refusal(checkpoint, roles=("weight", "weight_scale", "weight_scale_2", "input_scale"), **options):
    view = canonical(checkpoint)
    parameters, _ = load_parameters(checkpoint, view, **options)
    with pytest.raises(ServingError) as refused:
        run_guard(parameters, view, roles)
    return refused.value


@pytest.mark.parametrize("allocator", ["zeros", "ones", "nan", "neighbour", "random"])
def test_unwritten_slots_are_refused_whatever_memory_held(make_checkpoint, name_of, allocator):
    holes = [name_of(0, e, p) for e in (1, 2, 3, 5) for p in ("gate", "up", "down")] + [name_of(1, 4, "down")]
    error = refusal(make_checkpoint(without=holes), allocator=allocator)
    assert error.code == "serving.guard"
    assert error.params["count"] == 13
    assert error.params["groups"] == (
        "layers.0.experts.{1-3,5}.{gate,up,down}.input_scale: never written; "
        "layers.1.experts.{4}.down.input_scale: never written"
    )


def test_the_refusal_speaks_both_languages(make_checkpoint, name_of):
    error = refusal(make_checkpoint(without=[name_of(0, 2, "up")]))
    for language in ("en", "zh"):
        assert "layers.0.experts.{2}.up.input_scale" in error.text(language)["why"]
    assert error.text("zh")["what"] != error.text("en")["what"]


@pytest.mark.parametrize(
    ("value", "reason"), [(0.0, "0"), (np.nan, "NaN"), (np.inf, "Inf"), (-2e-3, "< 0"), (-np.inf, "Inf")]
)
@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
def test_impossible_values_are_refused(make_checkpoint, name_of, value, reason, role):
    error = refusal(make_checkpoint(replace={name_of(1, 0, "gate", role): value}))
    assert error.params["groups"] == f"layers.1.experts.{{0}}.gate.{role}: {reason}"


def test_a_missing_packed_weight_is_found_by_the_counter(make_checkpoint, name_of):
    error = refusal(make_checkpoint(without=[name_of(0, 0, "gate", "weight")]))
    assert error.params["groups"] == "layers.0.experts.{0}.gate.weight: never written"


def test_a_sound_load_passes(make_checkpoint):
    view = canonical(make_checkpoint())
    parameters, _ = load_parameters(make_checkpoint(), view)
    run_guard(parameters, view, ("weight", "weight_scale", "weight_scale_2", "input_scale"))


def test_a_weight_only_load_is_left_alone(make_checkpoint, name_of):
    """Loud about nothing: a backend that does not read activation scales needs none."""
    holes = [name_of(layer, e, p) for layer in (0, 1) for e in range(6) for p in ("gate", "up", "down")]
    checkpoint = make_checkpoint(without=holes)
    view = canonical(checkpoint)
    parameters, _ = load_parameters(checkpoint, view)
    run_guard(parameters, view, ("weight", "weight_scale", "weight_scale_2"))


def test_a_long_list_is_cut_and_says_so():
    guard = LoadGuard(range(40), 4, projections=["gate"])
    for layer in range(40):
        guard.inspect(layer, "gate", "input_scale", np.float32([1, 0, 1, 1]))
    with pytest.raises(ServingError) as refused:
        guard.check()
    assert refused.value.params["count"] == 40
    assert refused.value.params["groups"].endswith("… +28")
    assert len(guard.findings()) == 40


class TorchLike:
    """The few methods that the guard calls on a tensor, under torch's names."""

    def __init__(self, values):
        self.values = np.array(values, np.float32)

    def __len__(self):
        return len(self.values)

    def fill_(self, value):
        self.values[...] = value
        return self

    def detach(self):
        return self

    def float(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return self.values


def test_tensors_of_another_library():
    guard = LoadGuard([0], 3)
    scale = guard.arm(TorchLike([0, 0, 0]))
    scale.values[:2] = 1e-3
    guard.inspect(0, "down", "input_scale", scale)
    assert [str(found) for found in guard.findings()] == ["layers.0.experts.{2}.down.input_scale: never written"]
    assert check_slots({(0, "down"): scale}) == guard.findings()


def test_real_torch_tensors():
    torch = pytest.importorskip("torch")
    guard = LoadGuard([0], 4)
    w13 = guard.arm(torch.empty(4, 2, dtype=torch.bfloat16))
    w13[[0, 1, 3]] = 0.01
    guard.inspect(0, "gate", "input_scale", w13[:, 0])
    with pytest.raises(ServingError, match=r"layers\.0\.experts\.\{2\}\.gate\.input_scale: never written"):
        guard.check()


def test_what_the_guard_was_never_shown_is_refused():
    guard = LoadGuard(layers=[0, 1], experts=8)
    for projection in ("gate", "up", "down"):
        guard.inspect(0, projection, "input_scale", np.full(8, 1e-3, np.float32))
    with pytest.raises(ServingError) as refused:
        guard.check()
    assert (
        refused.value.params["groups"] == "layers.1.experts.{0-7}.{gate,up,down}.input_scale: never shown to the guard"
    )
    assert guard.findings() == ()
    for projection in ("gate", "up", "down"):
        guard.inspect(1, projection, "input_scale", np.full(8, 1e-3, np.float32))
    guard.check()


@pytest.mark.parametrize(
    ("layer", "projection", "role"), [(9, "gate", "input_scale"), (0, "foo", "input_scale"), (0, "gate", "bar")]
)
def test_slots_that_the_model_does_not_have_are_no_evidence(layer, projection, role):
    with pytest.raises(ServingError) as refused:
        LoadGuard(layers=[0], experts=8).inspect(layer, projection, role, np.ones(8, np.float32))
    assert refused.value.code == "serving.guard-unknown"
    for language in ("en", "zh"):
        assert f"layers.{layer}" in refused.value.text(language)["what"]
        assert "8" in refused.value.text(language)["why"]


@pytest.mark.parametrize("count", [0, 7, 9])
def test_another_number_of_values_is_no_evidence(count):
    with pytest.raises(ServingError) as refused:
        LoadGuard(layers=[0], experts=8).inspect(0, "gate", "input_scale", np.ones(count, np.float32))
    assert refused.value.code == "serving.guard-count"
    for language in ("en", "zh"):
        assert f" {count} " in refused.value.text(language)["what"]
        assert " 8 " in refused.value.text(language)["what"]


@pytest.mark.parametrize(("layers", "experts"), [([], 8), ([0], 0), ([0, 1], {0: 8, 1: 0})])
def test_a_guard_of_nothing_is_refused(layers, experts):
    with pytest.raises(ServingError, match="no layers or no experts"):
        LoadGuard(layers, experts)


def test_a_write_to_an_expert_that_is_not_there_is_refused():
    with pytest.raises(ServingError, match=r"layers\.0\.experts\.8\.up"):
        LoadGuard(layers=[0], experts=8).wrote(0, 8, "up", "input_scale")


def test_layers_of_different_sizes():
    guard = LoadGuard({0: 2, 3: 4}, {0: 2, 3: 4}, projections=["down"])
    guard.inspect(0, "down", "input_scale", np.ones(2, np.float32))
    guard.inspect(3, "down", "input_scale", np.ones(4, np.float32))
    guard.check()
