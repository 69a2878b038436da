"""Guessed tokens are read in one call: the answer, and every bit of its trace, is that of a run without guesses."""

import numpy as np
import pytest

from nvfp4viz import serving
from nvfp4viz.model import expect, generate
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.model.tokenizer import EOS
from nvfp4viz.moe.experts import ExpertsResult
from nvfp4viz.serving.loader import ALLOCATORS
from sample_checkpoints import ensure

BACKENDS = ["vllm-cutlass", "vllm-flashinfer-cutlass", "vllm-marlin", "vllm-emulation"]
HOLED = "tiny-moe-nvfp4-holes"


def follow(ids):
    """A guess that these tokens come."""
    return lambda chosen, logits: ids[len(chosen) :]


def bits(values):
    """Every bit of numbers; of a NaN only that it is one: its sign is the processor's choice (IEEE 754, 6.2)."""
    nan = np.isnan(values)
    return np.where(nan, np.zeros((), values.dtype), values).tobytes(), nan.tobytes()


def same(a, b):
    assert a.token_ids == b.token_ids
    assert a.text == b.text
    assert a.trace.first_bad == b.trace.first_bad
    for name in ("routes", "weights", "nan_fraction", "hidden", "logits"):
        one, other = getattr(a.trace, name), getattr(b.trace, name)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert bits(one) == bits(other), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_faulty_model_guessed_right_and_wrong(full, backend, allocator):
    """The healthy answer as the guess, padding once a NaN is there, and nonsense."""
    served = serving.load(ensure(HOLED), allocator, backend=backend, device="cpu")
    for domain in ("logs", "arithmetic", "json"):
        prompt = DEMO_PROMPTS[domain]
        healthy = full.generate(prompt, 16).token_ids
        plain = served.generate(prompt, 16)
        same(served.generate(prompt, 16, guess=follow(healthy)), plain)
        same(served.generate(prompt, 16, guess=lambda chosen, logits: [0] * 99 * bool(np.isnan(logits).any())), plain)
        same(served.generate(prompt, 16, guess=lambda chosen, _: [chosen[-1], 5, 7]), plain)
        same(served.generate(prompt, 16, guess=expect(healthy)), plain)


def test_a_right_guess_is_read_in_one_call(full):
    healthy = full.generate(DEMO_PROMPTS["logs"], 16)
    calls = []

    def counted(layer, x, routing):
        calls.append((layer, len(x)))
        return full.experts(layer, x, routing)

    found = generate(full.model, counted, DEMO_PROMPTS["logs"], 16, guess=follow(healthy.token_ids))
    same(found, healthy)
    assert calls == [(layer, size) for size in (len(healthy.prompt_ids), 15) for layer in range(4)]


@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize("layer", [0, 3])
def test_the_first_position_that_breaks_is_found_whatever_was_guessed(full, place, layer):
    """A NaN at one position of the answer, and one in layer 0 at a later one, which one call for both meets first."""
    prompt = DEMO_PROMPTS["logs"]
    healthy = full.generate(prompt, 16)
    read = [*healthy.prompt_ids, *healthy.token_ids]
    inputs = {}

    def watch(layer, x, routing):
        inputs[layer] = x
        return full.experts(layer, x, routing)

    full.model.forward(read, watch)
    first = len(healthy.prompt_ids) + place
    # Known by its bits, so that it breaks in whichever call it is read.
    breaks = {(layer, inputs[layer][first].tobytes()), (0, inputs[0][first + 3].tobytes())}

    def experts(layer, x, routing):
        result = full.experts(layer, x, routing)
        rows = [k for k, row in enumerate(x) if (layer, row.tobytes()) in breaks]
        if not rows:
            return result
        out = result.out.copy()
        out[rows] = np.nan
        return ExpertsResult(out, tuple(sorted({int(routing.ids[k, 0]) for k in rows})))

    plain = generate(full.model, experts, prompt, 16)
    same(generate(full.model, experts, prompt, 16, guess=follow(healthy.token_ids)), plain)
    assert plain.trace.first_bad[:2] == (first, layer)


def test_a_guess_beyond_the_end_stops_where_the_answer_does(full):
    prompt = "37 + 45 ="
    plain = full.generate(prompt, 64)
    assert plain.token_ids[-1] == EOS
    same(full.generate(prompt, 64, guess=follow([*plain.token_ids, 40, 40, 40])), plain)
    for n in (1, 2, 3):
        same(full.generate(prompt, n, guess=follow(plain.token_ids)), full.generate(prompt, n))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_recorded_answers_are_the_models_and_guessing_them_changes_no_bit(backend):
    """What the pages guess from: each answer is recomputed, and read in fewer calls with the same bits."""
    from nvfp4viz.ui.caches import likely_answer

    served = serving.load(ensure("tiny-moe-nvfp4-full"), backend=backend, device="cpu")
    for prompt in DEMO_PROMPTS.values():
        plain = served.generate(prompt, 32)
        known = likely_answer(prompt)
        if backend == "vllm-cutlass":
            assert known[:32] == plain.token_ids
        same(served.generate(prompt, 32, guess=expect(known)), plain)
    assert likely_answer("a prompt of the reader's") == ()
