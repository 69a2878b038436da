"""Where two runs of a layer part, on a layer small enough to say it beforehand."""

from dataclasses import replace

import numpy as np
import pytest
from test_w4a4_experts import make_layer, route

from nvfp4viz.moe import run_w4a4_experts
from nvfp4viz.moe.steps import STEPS, compare_steps, step_outputs

AT = {step: number for number, step in enumerate(STEPS, start=1)}


def run(layer, x, routing, **options):
    return run_w4a4_experts(x, routing, layer, record=True, **options).trace


def changed(layer, name, expert, value):
    values = getattr(layer, name).copy()
    values[expert] = value
    return replace(layer, **{name: values})


@pytest.mark.parametrize(
    ("name", "value", "differs", "nan"),
    [
        ("a1_gscale", 1.0, "quantize_1", None),
        ("a1_gscale", np.nan, "quantize_1", "quantize_1"),
        ("g1_alphas", 1.0, "gemm_1", None),
        ("a2_gscale", 1.0, "quantize_2", None),
        ("g2_alphas", np.nan, "gemm_2", "gemm_2"),
        ("g2_alphas", 0.0, "gemm_2", None),
    ],
)
def test_a_scale_is_first_seen_at_the_step_that_reads_it(name, value, differs, nan):
    layer = make_layer()
    x, routing = route(6, 2)
    expert = int(routing.ids[2, 1])
    found = compare_steps(run(layer, x, routing), run(changed(layer, name, expert, value), x, routing))
    assert found.first_difference == AT[differs]
    assert found.first_nan == (None if nan is None else AT[nan])
    hit = (routing.ids == expert).ravel()
    assert (found.differs[AT[differs] - 1] == hit).all()
    assert (found.differs[AT["unpermute"] - 1] == hit).all()
    tokens = np.repeat((routing.ids == expert).any(axis=1), 2)
    assert not found.differs[-1][~tokens].any()
    assert not found.nan_before.any()
    if nan:
        assert (found.nan[-1] == tokens).all()
    if value == 0:
        assert (found.zero[AT["gemm_2"] - 1] == hit).all()


def test_equal_runs_differ_nowhere():
    x, routing = route(6, 2)
    found = compare_steps(run(make_layer(), x, routing), run(make_layer(), x, routing))
    assert found.first_difference is None
    assert found.first_nan is None


def test_other_routes_are_no_twins():
    x, routing = route(6, 2)
    _, other = route(6, 2, seed=9)
    with pytest.raises(AssertionError, match="other routes"):
        compare_steps(run(make_layer(), x, routing), run(make_layer(), x, other))


def test_a_route_to_another_rank_has_no_row():
    layer = make_layer()
    x, routing = route(6, 2)
    here = np.array([0, 1, 2, -1, -1], np.int32)
    broken = changed(layer, "a1_gscale", 1, np.nan)
    found = compare_steps(run(layer, x, routing, expert_map=here), run(broken, x, routing, expert_map=here))
    assert (found.differs[2] == (routing.ids == 1).ravel()).all()
    assert not found.nan[2:8, (routing.ids > 2).ravel()].any()


def test_every_step_hands_on_what_its_line_says():
    x, routing = route(6, 2)
    found = step_outputs(run(make_layer(), x, routing))
    assert tuple(found) == STEPS
    assert {step: [tensor.shape for tensor in tensors] for step, tensors in found.items()} == {
        "route": [(12, 1), (12, 1)],
        "permute": [(12, 128)],
        "quantize_1": [(12, 64), (12, 8)],
        "gemm_1": [(12, 128)],
        "activate": [(12, 64)],
        "quantize_2": [(12, 32), (12, 4)],
        "gemm_2": [(12, 128)],
        "unpermute": [(12, 128)],
        "sum": [(6, 128)],
    }
