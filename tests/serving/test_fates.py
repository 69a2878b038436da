"""One file under every allocator, what a guard's measures see of it, and the search for the expert at fault."""

import numpy as np
import pytest

from nvfp4viz.checkpoint import canonical
from nvfp4viz.errors import NvError
from nvfp4viz.model import TinyMoe, expect
from nvfp4viz.serving import ALLOCATORS, load
from nvfp4viz.serving.bisect import bisect_experts
from nvfp4viz.serving.fates import MEASURES, complete_with, fate_of, measures, run_fates
from nvfp4viz.serving.fault_lab import baseline
from nvfp4viz.serving.served import ServedModel

PROMPT = "12 + 34 ="
HOLES = {(0, 1), (0, 2), (0, 5), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7)}


@pytest.fixture(scope="module")
def pair(make_model):
    """A model with holes, and the same model with none."""
    return make_model(HOLES), make_model()


@pytest.fixture(scope="module")
def fates(pair):
    broken, full = pair
    return {fate.allocator: fate for fate in run_fates(broken, complete_with(broken, full), PROMPT, n=4)}


def test_the_complete_twin_differs_in_the_missing_tensors_alone(pair):
    broken, full = pair
    twin = complete_with(broken, full)
    assert set(twin.tensors) == set(full.tensors)
    added = set(full.tensors) - set(broken.tensors)
    assert len(added) == 3 * len(HOLES)
    assert all(name.endswith("input_scale") for name in added)
    for name in broken.tensors:
        assert twin.read_tensor(name).data == broken.read_tensor(name).data


def test_every_fate_is_that_of_its_allocator(pair, fates):
    broken, _ = pair
    assert tuple(fates) == ALLOCATORS
    held = {name: fate.unwritten[0].value for name, fate in fates.items()}
    assert held["zeros"] == 0
    assert held["ones"] == 1
    assert np.isnan(held["nan"])
    for name, fate in fates.items():
        assert fate.text == load(broken, name, device="cpu").generate(PROMPT, 4).text
        assert fate.same_text == (fate.text == fate.effect.healthy.text)


def test_the_twin_is_asked_once_for_all_fates(pair, monkeypatch):
    asked = []
    generate = ServedModel.generate
    monkeypatch.setattr(ServedModel, "generate", lambda *given, **how: asked.append(given) or generate(*given, **how))
    broken, full = pair
    run_fates(broken, full, PROMPT, n=2)
    assert len(asked) == 1 + len(ALLOCATORS)


def test_a_likely_answer_changes_nothing(pair):
    served = load(complete_with(*pair), backend="vllm-marlin", device="cpu")
    plain = baseline(served, None, PROMPT, 4)
    for likely in (plain.answer.token_ids, (5, 6, 7), plain.answer.token_ids[:2]):
        found = baseline(served, None, PROMPT, 4, served.generate(PROMPT, 4, guess=expect(likely)))
        assert found.answer.token_ids == plain.answer.token_ids
        assert found.read == plain.read
        assert found.answer.trace.hidden.tobytes() == plain.answer.trace.hidden.tobytes()


def test_answers_that_others_gave_save_calls_and_change_no_fate(pair, monkeypatch):
    broken, full = pair
    twin = baseline(load(complete_with(broken, full), device="cpu"), None, PROMPT, 16)
    served = load(broken, "random", 2, device="cpu")
    calls = []
    forward = TinyMoe.forward
    monkeypatch.setattr(TinyMoe, "forward", lambda *given: calls.append(given) or forward(*given))
    alone = fate_of(served, twin, "random", 2, "vllm-cutlass")
    slowly = len(calls)
    calls.clear()
    likely = [(5, 6, 7), alone.effect.faulty.token_ids]
    told = fate_of(served, twin, "random", 2, "vllm-cutlass", likely)
    assert len(calls) < slowly
    assert told.effect.faulty.token_ids == alone.effect.faulty.token_ids
    assert told.effect.faulty.trace.hidden.tobytes() == alone.effect.faulty.trace.hidden.tobytes()
    assert told.effect.layer_error.tobytes() == alone.effect.layer_error.tobytes()


def test_nan_in_the_slots_reaches_the_answer_and_ones_do_not_make_nan(fates):
    assert fates["nan"].nan_share > 0
    assert fates["ones"].nan_share == 0
    assert fates["ones"].first_broken is not None
    assert not fates["nan"].same_text


def test_a_complete_file_has_one_fate(pair):
    _, full = pair
    for fate in run_fates(full, full, PROMPT, n=3):
        assert fate.same_text
        assert fate.first_broken is None
        assert fate.unwritten == ()
        assert (fate.effect.layer_error == 0).all()


def test_marlin_has_one_fate_for_every_memory(pair):
    broken, full = pair
    for fate in run_fates(broken, complete_with(broken, full), PROMPT, backend="vllm-marlin", n=3):
        assert fate.first_broken is None
        assert fate.same_text


def test_random_memory_depends_on_its_seed(pair):
    broken, full = pair
    twin = complete_with(broken, full)
    held = [
        run_fates(broken, twin, PROMPT, seed=seed, n=1, allocators=("random",))[0].unwritten[0].value
        for seed in (0, 0, 1)
    ]
    assert held[0] == held[1] != held[2]


def test_an_unknown_allocator_is_refused(pair):
    broken, full = pair
    with pytest.raises(NvError) as caught:
        run_fates(broken, full, PROMPT, allocators=("ghosts",))
    assert caught.value.code == "serving.allocator"


# ------------------------------------------------------------------ measures


def test_values_alone_depend_on_memory_and_the_others_do_not(pair):
    broken, _ = pair
    found = {(r.measure, r.allocator): r for r in measures(broken, canonical(broken))}
    slots = 3 * len(HOLES)
    assert {key[0] for key in found} == set(MEASURES)
    assert all(result.expected == slots for result in found.values())
    for allocator in ALLOCATORS:
        assert found["sentinel", allocator].found == slots
        assert found["counter", allocator].found == slots
    values = {allocator: found["values", allocator].found for allocator in ALLOCATORS}
    assert values["zeros"] == values["nan"] == slots
    assert values["ones"] == values["neighbour"] == 0
    assert 0 < values["random"] < slots


def test_no_measure_finds_anything_in_a_complete_file(pair):
    _, full = pair
    assert all(result.found == result.expected == 0 for result in measures(full, canonical(full)))


# ------------------------------------------------------------------ bisection


def _first_by_hand(broken, twin):
    """Layer and expert as a search through all of them finds it: the first hole that the prompt visits."""
    from nvfp4viz.model import ForwardRecord, Tokenizer

    record = ForwardRecord()
    twin.model.forward(Tokenizer().encode(PROMPT), twin.experts, None, record)
    holes = broken.load_report.experts_without("input_scale")
    for layer, routes in enumerate(record.routes):
        visited = sorted(set(np.asarray(routes).ravel().tolist()) & set(holes.get(layer, ())))
        if visited:
            return layer, visited[0]
    return None, None


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("holes", [HOLES, {(1, e) for e in range(8)}, {(0, 7), (1, 0)}], ids=["many", "late", "few"])
def test_bisection_finds_the_first_hole_that_the_prompt_visits(make_model, allocator, holes):
    broken = make_model(holes)
    twin = load(complete_with(broken, make_model()), device="cpu")
    suspect = load(broken, allocator, device="cpu")
    found = bisect_experts(suspect, twin, PROMPT)
    assert (found.layer, found.expert) == _first_by_hand(suspect, twin)
    assert len(found.steps) <= 1 + 1 + 3


def test_a_sound_model_needs_one_run(make_model):
    twin = load(make_model(), device="cpu")
    found = bisect_experts(load(make_model(), "nan", device="cpu"), twin, PROMPT)
    assert (found.layer, found.expert) == (None, None)
    assert [step.differs for step in found.steps] == [False]
