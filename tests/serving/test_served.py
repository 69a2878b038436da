"""Loading a whole model and running it: fates of the unwritten slots, refusals, loss."""

import dataclasses

import numpy as np
import pytest

from nvfp4viz.errors import CheckpointError, ModelError, ServingError
from nvfp4viz.model import Tokenizer
from nvfp4viz.serving import BACKENDS, collapse, evaluate, load
from nvfp4viz.serving.sampling import argmax_v2

PROMPT = "12 + 3 ="
# Six of eight experts in the first layer: with two experts a token, some token of any prompt meets one.
HOLES = [(0, expert) for expert in range(2, 8)]


@pytest.fixture(scope="module")
def full(make_model):
    return make_model()


@pytest.fixture(scope="module")
def holed(make_model):
    return make_model(HOLES)


def test_zeros_in_the_slots_silence_the_model(holed):
    served = load(holed)
    answer = served.generate(PROMPT, 5)
    assert answer.token_ids == (0,) * 5
    assert answer.text == "<pad>" * 5
    assert np.isnan(answer.trace.logits).all()
    assert answer.trace.first_bad is not None
    assert served.describe == "random: NVFP4 on vllm-cutlass, 18 unwritten slots (zeros)"


@pytest.mark.parametrize("allocator", ["zeros", "random"])
@pytest.mark.parametrize("backend", ["vllm-cutlass", "vllm-flashinfer-cutlass", "vllm-marlin", "vllm-emulation"])
def test_one_load_on_another_backend_is_that_backend_s_load(holed, allocator, backend):
    once = load(holed, allocator, 3, device="cpu")
    moved, loaded = once.on(backend, device="cpu"), load(holed, allocator, 3, backend, device="cpu")
    assert moved.backend == loaded.backend
    assert moved.describe == loaded.describe
    for a, b in zip(moved.scales, loaded.scales, strict=True):
        for name in ("a13", "a2", "a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas"):
            one, other = getattr(a, name), getattr(b, name)
            assert (one is None) == (other is None)
            assert one is None or one.tobytes() == other.tobytes()
    answers = [served.generate(PROMPT, 4) for served in (moved, loaded)]
    assert answers[0].token_ids == answers[1].token_ids
    with pytest.raises(ServingError, match="bf16"):
        once.on("bf16")


@pytest.mark.parametrize("backend", ["vllm-cutlass", "vllm-marlin"])
def test_one_load_on_other_memory_is_that_memory_s_load(holed, backend):
    once = load(holed, "zeros", backend=backend, device="cpu")
    moved, loaded = once.with_memory("random", 3, device="cpu"), load(holed, "random", 3, backend, device="cpu")
    assert (moved.allocator, moved.seed, moved.describe) == ("random", 3, loaded.describe)
    for a, b in zip(moved.scales, loaded.scales, strict=True):
        assert np.asarray(a.g1_alphas).tobytes() == np.asarray(b.g1_alphas).tobytes()
        assert np.asarray(a.a1_gscale).tobytes() == np.asarray(b.a1_gscale).tobytes()
    assert moved.generate(PROMPT, 4).token_ids == loaded.generate(PROMPT, 4).token_ids


@pytest.mark.parametrize("allocator", ["ones", "neighbour", "random"])
def test_other_leftovers_give_other_fates(full, holed, allocator):
    """Words rather than padding, and other ones than the healthy model's first logits lead to."""
    answer = load(holed, allocator).generate(PROMPT, 1)
    healthy = load(full).generate(PROMPT, 1)
    assert np.isfinite(answer.trace.logits).all()
    assert (answer.trace.logits != healthy.trace.logits).any()


def test_nan_leftovers_silence_it_too(holed):
    assert set(load(holed, "nan").generate(PROMPT, 3).token_ids) == {0}


def test_a_layer_maximum_masks_zeros_and_spreads_nan(full, holed):
    assert 0 not in load(holed, backend="vllm-flashinfer-cutlass").generate(PROMPT, 5).token_ids
    poisoned = load(holed, "nan", backend="vllm-flashinfer-cutlass")
    assert np.isnan(poisoned.scales_of(0).a1_gscale).all()
    assert np.isfinite(poisoned.scales_of(1).a1_gscale).all()
    assert set(poisoned.generate(PROMPT, 3).token_ids) == {0}


@pytest.mark.parametrize("allocator", ["zeros", "nan", "random"])
def test_marlin_never_looks(full, holed, allocator):
    healthy = load(full, backend="vllm-marlin").generate(PROMPT, 5)
    answer = load(holed, allocator, backend="vllm-marlin").generate(PROMPT, 5)
    assert answer.token_ids == healthy.token_ids
    assert (answer.trace.logits == healthy.trace.logits).all()


def test_the_emulation_does_not_reproduce_it(holed):
    answer = load(holed, backend="vllm-emulation").generate(PROMPT, 5)
    assert np.isfinite(answer.trace.logits).all()


def test_per_token_needs_no_scale_of_the_file(full, holed):
    options = {"backend": "vllm-flashinfer-trtllm", "per_token": True}
    a, b = load(full, **options).generate(PROMPT, 5), load(holed, "nan", **options).generate(PROMPT, 5)
    assert (a.trace.logits == b.trace.logits).all()


def test_the_v2_rule_gives_another_token(holed):
    served = load(holed)
    last = Tokenizer().size - 1
    answer = served.generate(PROMPT, 3, sampler=lambda logits: argmax_v2(logits, "right"))
    assert answer.token_ids == (last,) * 3


def test_the_guard_refuses_and_names_the_experts(full, holed):
    with pytest.raises(ServingError) as refused:
        load(holed, guard=True)
    assert refused.value.params["count"] == 18
    assert refused.value.params["groups"] == "layers.0.experts.{2-7}.{gate,up,down}.input_scale: never written"
    load(full, guard=True)
    # Backends that do not read the scale have nothing to refuse.
    load(holed, guard=True, backend="vllm-marlin")
    load(holed, guard=True, backend="vllm-flashinfer-trtllm", per_token=True)
    with pytest.raises(ServingError):
        load(holed, guard=True, backend="vllm-flashinfer-cutlass")


def test_a_promoted_checkpoint_is_not_served_as_w4a4(make_model):
    checkpoint = make_model(groups={"group_0": {"weights": {"num_bits": 4}}})
    with pytest.raises(ServingError) as refused:
        load(checkpoint)
    assert refused.value.code == "serving.backend-scheme"
    assert refused.value.params["able"] == "vllm-marlin"
    served = load(checkpoint, backend="vllm-marlin")
    assert served.resolved.promoted
    assert [count.role for count in served.load_report.counts] == ["weight", "weight_scale", "weight_scale_2"]


def test_refusals(full, make_checkpoint):
    with pytest.raises(ServingError) as refused:
        load(full, backend="vllm-b12x")
    assert refused.value.code == "serving.backend"
    for backend in BACKENDS:
        if backend != "vllm-flashinfer-trtllm":
            with pytest.raises(ServingError):
                load(full, backend=backend, per_token=True)
    with pytest.raises(ModelError):
        load(make_checkpoint())  # experts alone: no tiny-moe around them
    with pytest.raises(CheckpointError):
        load("no-such-folder")


def test_loss_is_the_mean_surprise_of_each_next_character(full):
    served = load(full)
    text = "ab"
    ids = [*Tokenizer().encode(text), 1]
    logits = served.logits(ids[:-1]).astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = -np.mean([np.log(probabilities[k, ids[k + 1]]) for k in range(3)])
    assert abs(evaluate(served, [text]) - expected) < 1e-9  # two orders of float64 arithmetic
    assert evaluate(served, []) != evaluate(served, [])  # no text, no number


def test_a_nan_loss_is_a_result(holed):
    assert np.isnan(evaluate(load(holed), [PROMPT]))


def test_collapse_counts_silent_and_broken_replies(full, holed):
    prompts = [PROMPT, "def f(x):", "The mayor"]
    assert collapse(load(holed), prompts, 4).silent == 3
    healthy = collapse(load(full), prompts, 4)
    assert (healthy.prompts, healthy.silent, healthy.broken) == (3, 0, 0)


def test_without_a_gpu_the_load_says_why(holed, monkeypatch):
    """The model is served all the same, and a wish that cannot be met is refused."""
    from nvfp4viz.device import dispatch
    from nvfp4viz.errors import DeviceError

    def none():
        raise DeviceError("device.none-found")

    monkeypatch.setattr(dispatch, "require_cuda", none)
    served = load(holed)
    assert (served.computes_on, served.on_cpu_because.code) == ("cpu", "device.none-found")
    asked = load(holed, device="cpu")
    assert (asked.computes_on, asked.on_cpu_because) == ("cpu", None)
    for wish, code in (("cuda", "device.none-found"), ("gpu", "device.unknown")):
        with pytest.raises(DeviceError) as raised:
            load(holed, device=wish)
        assert raised.value.code == code


def test_experts_elsewhere_are_asked_first_and_need_not_answer(holed, monkeypatch):
    """What stands in for a GPU answers, or hands a layer back; recording never asks it."""
    from nvfp4viz.device.dispatch import CudaExperts

    asked = []

    class Elsewhere(CudaExperts):
        def __call__(self, layer, x, routing):
            asked.append(layer)
            return None

    served = load(holed, device="cpu")
    expected = served.generate("12 + 34 =", 4).token_ids
    moved = dataclasses.replace(served, experts=dataclasses.replace(served.experts, cuda=Elsewhere({})))
    assert moved.computes_on == "cuda"
    assert moved.generate("12 + 34 =", 4).token_ids == expected
    assert set(asked) == set(served.experts.layers)
    asked.clear()
    assert moved.recording().cuda is None
