"""``process_weights_after_loading`` per backend: maxima, reciprocals, alphas, and where one bad slot spreads."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4viz.checkpoint import canonical
from nvfp4viz.errors import ServingError
from nvfp4viz.serving import load_parameters, process_weights_after_loading
from nvfp4viz.serving.loader import LayerParameters
from nvfp4viz.serving.scales import ONE_MAXIMUM, close, process_weights_after_loading_reference
from nvfp4viz.serving.selection import MOE
from tests.equal_bits import same_fields

LAYER_WIDE = (
    "vllm-flashinfer-trtllm", "vllm-flashinfer-cutedsl", "vllm-flashinfer-cutedsl-batched", "vllm-flashinfer-cutlass",
    "vllm-emulation",
)  # fmt: skip


def convert(checkpoint, backend, layer=0, **options):
    parameters, _ = load_parameters(checkpoint, canonical(checkpoint))
    return parameters[layer], process_weights_after_loading(parameters[layer], backend, **options)


# Without -0: which zero is the larger is open, and one over it is an infinity of either sign.
EDGES = np.float32([0, np.nan, np.inf, -np.inf, 1e-45, 1e-38, 3.4e38, 1, 1e-8, 2e-8, 1.00001])


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([row.id for row in MOE]), st.integers(1, 5), st.booleans(), st.floats(0, 1), st.integers(0, 2**32)
)
def test_expert_by_expert_gives_the_same_bits(backend, experts, per_token, share, seed):
    rng = np.random.default_rng(seed)

    def some(*shape):
        values = rng.lognormal(-5, 2, shape)
        return np.where(rng.random(shape) < share / 2, rng.choice(EDGES, shape), values).astype(np.float32)

    none = np.zeros((experts, 0, 0), np.uint8)
    pairs = some(experts, 2)
    pairs[rng.random(experts) < 0.5, 1] = pairs[0, 0]
    parameters = LayerParameters(3, none, none, some(experts, 2), pairs, none, none, some(experts), some(experts), {})
    if rng.integers(2):
        pairs[:], parameters.w2_input_scale[:] = pairs[0, 0], parameters.w2_input_scale[0]
    options = {"per_token": per_token, "a16": True}
    fast = process_weights_after_loading(parameters, backend, **options)
    slow = process_weights_after_loading_reference(parameters, backend, **options)
    names = [field.name for field in fields(fast)]
    arrays = [name for name in names if isinstance(getattr(fast, name), np.ndarray)]
    same_fields(fast, slow, arrays)
    for name in set(names) - set(arrays):
        assert getattr(fast, name) == getattr(slow, name), name


def test_cutlass_takes_the_larger_shard_of_each_expert(make_checkpoint):
    loaded, scales = convert(make_checkpoint(), "vllm-cutlass")
    assert (scales.a13 == loaded.w13_input_scale.max(axis=1)).all()
    assert (scales.a2 == loaded.w2_input_scale).all()
    assert (scales.a1_gscale == np.float32(1) / scales.a13).all()
    assert (scales.g1_alphas == loaded.w13_weight_scale_2[:, 0] * scales.a13).all()
    assert (scales.g2_alphas == loaded.w2_weight_scale_2 * scales.a2).all()
    assert scales.warnings == ()


@pytest.mark.parametrize("backend", LAYER_WIDE)
def test_layer_wide_backends_take_one_maximum(make_checkpoint, backend):
    loaded, scales = convert(make_checkpoint(), backend)
    assert (scales.a13 == loaded.w13_input_scale.max()).all()
    assert (scales.a2 == loaded.w2_input_scale.max()).all()


def test_marlin_reads_none_of_it(make_checkpoint, name_of):
    loaded, scales = convert(make_checkpoint(replace={name_of(0, 1, "gate"): np.nan}), "vllm-marlin")
    assert scales.a13 is scales.a2 is scales.a1_gscale is scales.a2_gscale is None
    assert (scales.g1_alphas == loaded.w13_weight_scale_2[:, 0]).all()


def test_the_emulation_keeps_weight_scale_2_as_alpha_and_warns(make_checkpoint):
    loaded, scales = convert(make_checkpoint(), "vllm-emulation")
    assert (scales.g2_alphas == loaded.w2_weight_scale_2).all()
    assert scales.warnings == ("input-scale-not-unique",)


def test_one_missing_shard_hides_behind_the_maximum(make_checkpoint, name_of):
    """A zero in w1 alone is masked by w3; a large or NaN value is not."""
    healthy, _ = convert(make_checkpoint(), "vllm-cutlass")
    for value, seen in ((0.0, healthy.w13_input_scale[2, 1]), (5.0, np.float32(5))):
        _, scales = convert(make_checkpoint(replace={name_of(0, 2, "gate"): value}), "vllm-cutlass")
        assert scales.a13[2] == seen
    _, scales = convert(make_checkpoint(replace={name_of(0, 2, "gate"): np.nan}), "vllm-cutlass")
    assert np.isnan(scales.a13).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("backend", LAYER_WIDE)
def test_a_layer_wide_maximum_is_immune_to_zeros_and_poisoned_by_nan(make_checkpoint, name_of, backend):
    zeros = {name_of(0, 2, "gate"): 0.0, name_of(0, 2, "up"): 0.0, name_of(0, 3, "down"): 0.0}
    _, scales = convert(make_checkpoint(replace=zeros), backend)
    assert np.isfinite(scales.a1_gscale).all()
    assert np.isfinite(scales.a2_gscale).all()
    _, scales = convert(make_checkpoint(replace={name_of(0, 4, "up"): np.nan}), backend)
    assert np.isnan(scales.a1_gscale).all()
    _, scales = convert(make_checkpoint(replace={name_of(0, 4, "up"): np.inf}), backend)
    assert (scales.a1_gscale == 0).all()
    # The other layer has its own maximum.
    _, scales = convert(make_checkpoint(replace={name_of(0, 4, "up"): np.nan}), backend, layer=1)
    assert np.isfinite(scales.a1_gscale).all()


def test_zero_slots_become_infinite_encode_scales_and_zero_alphas(make_checkpoint, name_of):
    holes = [name_of(0, 2, projection) for projection in ("gate", "up", "down")]
    _, scales = convert(make_checkpoint(without=holes), "vllm-cutlass")
    assert np.isinf(scales.a1_gscale).tolist() == [False, False, True, False, False, False]
    assert np.isinf(scales.a2_gscale[2])
    assert scales.g1_alphas[2] == scales.g2_alphas[2] == 0


def test_mismatched_second_level_scales_use_the_gate(make_checkpoint, name_of):
    """Not the maximum: up is then mis-scaled by gate/up.  One warning, without the experts' ids."""
    replace = {name_of(0, 1, "up", "weight_scale_2"): 9e-4, name_of(0, 4, "gate", "weight_scale_2"): np.nan}
    loaded, scales = convert(make_checkpoint(replace=replace), "vllm-cutlass")
    assert scales.mismatched == (1, 4)
    assert scales.warnings == ("scale-2-mismatch",)
    assert scales.w13_weight_scale_2[1] == loaded.w13_weight_scale_2[1, 0]


def test_allclose_has_an_absolute_term():
    """atol 1e-8: pairs of tiny scales pass whatever their ratio."""
    assert close(np.float32(3e-9), np.float32(9e-9))
    assert not close(np.float32(3e-7), np.float32(9e-7))
    assert close(np.float32(np.inf), np.float32(np.inf))
    assert not close(np.float32(np.nan), np.float32(np.nan))


def test_per_token_overrides_both_input_scales(make_checkpoint, name_of):
    holes = [name_of(0, 2, projection) for projection in ("gate", "up", "down")]
    loaded, scales = convert(make_checkpoint(without=holes), "vllm-flashinfer-trtllm", per_token=True)
    assert (scales.a1_gscale == 1).all()
    assert (scales.a2_gscale == 1).all()
    assert (scales.g1_alphas == loaded.w13_weight_scale_2[:, 0]).all()


def test_which_backends_take_one_maximum():
    """4.4, step 3; the table of backends says the same, and B12X's own rule was not read."""
    assert set(ONE_MAXIMUM) == {*LAYER_WIDE, "vllm-flashinfer-b12x"}


def test_trtllm_takes_the_first_product_into_the_second_s_codes(make_checkpoint, name_of):
    """``g1_scale_c = g1 * a2_gscale``: so a bad slot of down reaches the first product's output too."""
    _, scales = convert(make_checkpoint(), "vllm-flashinfer-trtllm")
    assert (scales.g1_scale_c == scales.g1_alphas * scales.a2_gscale).all()
    _, scales = convert(make_checkpoint(replace={name_of(0, 1, "down"): np.nan}), "vllm-flashinfer-trtllm")
    assert np.isfinite(scales.g1_alphas).all()
    assert np.isnan(scales.g1_scale_c).all()
    _, scales = convert(make_checkpoint(), "vllm-flashinfer-cutlass")
    assert scales.g1_scale_c is None


def test_flashinfer_s_b12x_folds_scale_2_and_leaves_down_out(make_checkpoint):
    loaded, scales = convert(make_checkpoint(), "vllm-flashinfer-b12x")
    assert (scales.a13 == loaded.w13_input_scale.max()).all()
    assert scales.a2 is None
    assert (scales.a2_gscale == 1).all()
    assert (scales.w13_weight_scale_2 == 1).all()
    assert (scales.w2_weight_scale_2 == 1).all()
    assert scales.g1_alphas is scales.g2_alphas is None


@pytest.mark.parametrize("backend", ["vllm-humming", "vllm-flashinfer-moe-ep-cutedsl"])
def test_two_read_no_input_scale_and_keep_their_alphas_to_themselves(make_checkpoint, backend):
    _, scales = convert(make_checkpoint(), backend)
    assert {scales.a13, scales.a2, scales.a1_gscale, scales.a2_gscale, scales.g1_alphas, scales.g2_alphas} == {None}


def test_b12x_was_read_with_a16_forced_alone(make_checkpoint):
    with pytest.raises(ServingError) as caught:
        convert(make_checkpoint(), "vllm-b12x")
    assert caught.value.code == "serving.conversion-unread"
    loaded, scales = convert(make_checkpoint(), "vllm-b12x", a16=True)
    assert (scales.a13 == 1).all()
    assert (scales.a2 == 1).all()
    assert (scales.g1_alphas == loaded.w13_weight_scale_2[:, 0]).all()
