"""tiny-moe on several ranks: recorded routes are real, ranks compute one process's bits, a stale scale costs loss."""

import numpy as np
import pytest

from nvfp4viz.errors import InputError
from nvfp4viz.model import corpus
from nvfp4viz.moe import eplb
from nvfp4viz.moe.parallel import Placement, place
from nvfp4viz.serving import expert_parallel as ep
from nvfp4viz.serving import load, route_trace
from sample_checkpoints import ensure
from sample_checkpoints.record_routes import DOCUMENTS, ROUTES, record

RANKS = 4


@pytest.fixture(scope="module")
def served():
    return load(ensure("tiny-moe-nvfp4-full"), device="cpu")


@pytest.fixture(scope="module")
def trace():
    return route_trace.RouteTrace.read(ROUTES)


@pytest.fixture(scope="module")
def plans(trace):
    """Every layer's placement before and after EPLB, four redundant slots, on mixed traffic."""
    start = place(64, RANKS, redundant=4)
    load_ = route_trace.load_of(route_trace.traffic(trace)[:8], 64)
    slots = eplb.rebalance(load_, 68, RANKS, old=np.tile(start.slots, (len(load_), 1)))
    return [start] * len(slots), [Placement(row, RANKS, 64) for row in slots]


def test_recorded_routes_are_what_the_model_routes(trace):
    again = record(documents=2)
    assert trace.domains.tolist() == [domain for domain in corpus.DOMAINS for _ in range(DOCUMENTS)]
    for at, (domain, number) in enumerate((domain, number) for domain in corpus.DOMAINS for number in range(2)):
        assert np.array_equal(again.document(at), trace.document(trace.of(domain)[number]))


@pytest.mark.parametrize("before", [route_trace.EVERY, "news", "arithmetic"])
@pytest.mark.parametrize("after", [route_trace.EVERY, "code", "news"])
def test_traffic_reads_no_document_twice(trace, before, after):
    steps = route_trace.traffic(trace, before, after)
    assert len(steps) == route_trace.STEPS
    joined = np.concatenate(steps)
    assert joined.shape[1:] == (4, 4)
    assert not {tuple(step.tobytes() for step in steps[:8])} & {tuple(step.tobytes() for step in steps[8:])}
    counted = route_trace.load_of(steps, 64)
    assert (counted.sum(axis=1) == 4 * len(joined)).all()


def balanced(trace, before, after, layer, ranks=RANKS, extra=0, window=8):
    return route_trace.balance(
        route_trace.traffic(trace, before, after), layer, experts=64, ranks=ranks, extra=extra, window=window
    )


def test_packing_alone_balances_steady_traffic_where_ranks_hold_many_experts(trace):
    for layer in range(4):
        found = balanced(trace, "code", "code", layer)
        assert found.after.ratio < 1.05 < found.before.ratio
        assert (found.new[layer].replicas == 1).all()


def test_replicas_are_needed_where_one_expert_outweighs_a_rank(trace):
    alone, copied = (balanced(trace, "code", "code", 1, ranks=16, extra=extra) for extra in (0, 1))
    assert alone.after.ratio > 1.5
    assert copied.after.ratio < 0.8 * alone.after.ratio


def test_a_plan_for_yesterday_s_traffic_can_be_worse_than_none(trace):
    found = balanced(trace, "news", "code", 3)
    assert found.after.ratio > 1.5 > 1.2 > found.before.ratio


def test_rows_are_those_of_the_traffic(trace):
    steps = route_trace.traffic(trace)
    found = balanced(trace, route_trace.EVERY, route_trace.EVERY, 2, extra=1, window=3)
    for rows in (found.without, found.rebalanced):
        assert rows.sum(axis=1).tolist() == [4 * len(step) for step in steps[8:]]
    assert route_trace.step_ratio(found.without) >= found.before.ratio


def test_a_layer_s_batch_is_what_its_experts_were_given(served):
    x, routing = ep.layer_batch(served, ["12 + 34 =", "def f(x):\n"], 2)
    assert x.shape == (21, 128)  # with each text's opening mark
    assert routing.ids.shape == (21, 4)
    with pytest.raises(InputError, match="0 to 3"):
        ep.layer_batch(served, ["12"], 4)


@pytest.mark.parametrize(("ranks", "redundant"), [(2, 4), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_ranks_compute_a_real_layer_to_the_bit(served, ranks, redundant):
    pytest.importorskip("torch")
    answer, wrong, values = ep.check(served, [corpus.DEMO_PROMPTS["news"]], 1, ranks, redundant)
    assert wrong == 0
    assert values == answer.out.size > 5000
    assert answer.rows.min() > 0


def test_moving_everything_keeps_the_model_s_bits(served, plans):
    old, new = plans
    assert any((a.slots != b.slots).any() for a, b in zip(old, new, strict=True))
    ids = list(range(5, 60))
    logits = ep.moved(served, old, new).logits(ids)
    assert np.array_equal(logits.view(np.uint32), served.logits(ids).view(np.uint32))


def test_scales_that_stay_behind_cost_loss_on_the_cutlass_path(served, plans):
    texts = [corpus.held_out_documents(domain, 1)[0] for domain in corpus.DOMAINS]
    effect = ep.move_effect(served, *plans, texts)
    assert effect.moved == effect.before
    assert effect.stayed > effect.before
    assert 0 < effect.wrong <= effect.changed < effect.slots
    assert effect.worst > 1.4
    assert effect.empty == 0


def test_an_expert_in_a_slot_without_a_scale_silences_a_healthy_answer(plans):
    """The holed export answers news; then a busy expert moves to where a scale was never written."""
    holed = load(ensure("tiny-moe-nvfp4-holes"), device="cpu")
    effect = ep.move_effect(holed, *plans, corpus.held_out_documents("news", 1))
    assert effect.moved == effect.before < 0.5
    assert effect.empty > 0
    assert np.isnan(effect.stayed)
    prompt = corpus.DEMO_PROMPTS["news"]
    assert set(holed.generate(prompt, 4).token_ids) != {0}
    assert set(ep.moved(holed, *plans, scales_move=False).generate(prompt, 4).token_ids) == {0}


def test_a_scale_of_the_whole_layer_cannot_stay_behind(plans):
    """FlashInfer's backends use one maximum for all experts: every slot's scale is every expert's."""
    served = load(ensure("tiny-moe-nvfp4-full"), backend="vllm-flashinfer-cutlass", device="cpu")
    effect = ep.move_effect(served, *plans, ["12 + 34 = 46"])
    assert effect.changed > 0
    assert (effect.wrong, effect.worst) == (0, 1)
    assert effect.stayed == effect.moved == effect.before


def test_the_command_says_that_bits_are_equal(capsys):
    pytest.importorskip("torch")
    assert ep.main(["--ranks", "1", "--layer", "0"]) == 0
    assert "0 of" in capsys.readouterr().out
    assert ep.main(["--ranks", "3"]) == 2
    assert "3 ranks" in capsys.readouterr().err
