"""Every remedy is run; what is repaired, what is refused, and how a result is judged."""

import dataclasses

import numpy as np
import pytest

from nvfp4viz.checkpoint import canonical
from nvfp4viz.errors import ServingError
from nvfp4viz.serving import load, resolve_quantization
from nvfp4viz.serving.remedies import (
    REMEDIES,
    RemedyReply,
    RemedyResult,
    change_checkpoint,
    excess,
    judge,
    run_remedy,
    wrong_domains,
)

HOLES = [(0, expert) for expert in range(2, 8)] + [(1, 0)]
PROMPTS = ["12 + 3 =", "The mayor"]
TEXTS = {"sums": ["1 + 2 = 3"], "words": ["The mayor of Oakham"]}


@pytest.fixture(scope="module")
def holed(make_model):
    return make_model(HOLES)


@pytest.fixture(scope="module")
def full(make_model):
    return make_model()


@pytest.mark.parametrize("remedy", [r for r in REMEDIES if r != "load-guard"])
def test_each_remedy_answers(remedy, holed, full):
    result = run_remedy(remedy, PROMPTS, broken=holed, calibrated=full, texts=TEXTS, n=4)
    assert result.refusal is None
    assert [reply.prompt for reply in result.replies] == PROMPTS
    assert not any(reply.silent or reply.nan_fraction for reply in result.replies)
    assert np.isfinite(list(result.losses.values())).all()
    assert list(result.losses) == ["sums", "words"]


def test_the_guard_refuses(holed):
    result = run_remedy("load-guard", PROMPTS, broken=holed)
    assert result.replies == ()
    assert result.refusal.params["groups"] == (
        "layers.0.experts.{2-7}.{gate,up,down}.input_scale: never written; "
        "layers.1.experts.{0}.{gate,up,down}.input_scale: never written"
    )


def test_the_story_needs_a_remedy(holed):
    served = load(holed)
    assert set(served.generate(PROMPTS[0], 4).token_ids) == {0}


def test_weight_only_guesses_nothing(holed, full):
    """Relabelled, without a single activation scale, it is what Marlin makes of the original."""
    changed = change_checkpoint(holed, "weight-only")
    assert resolve_quantization(changed.config, changed.hf_quant_config).algo == "W4A16_NVFP4"
    assert not [name for name in changed.tensors if name.endswith("input_scale")]
    marlin = load(full, backend="vllm-marlin").generate(PROMPTS[0], 4)
    assert load(changed, backend="vllm-marlin").generate(PROMPTS[0], 4).token_ids == marlin.token_ids
    with pytest.raises(ServingError, match="cannot serve a W4A16"):
        load(changed)


@pytest.mark.parametrize(
    ("change", "value"), [("fill-one", 1), ("fill-fallback", np.float32(0.5 / 2688)), ("peer-max", None)]
)
def test_repairs_fill_every_hole_and_nothing_else(holed, change, value):
    changed = change_checkpoint(holed, change)
    served = load(changed, guard=True)
    assert served.load_report.complete
    before, after = load(holed).parameters, served.parameters
    for a, b in zip(before, after, strict=True):
        for projection in ("gate", "up", "down"):
            written = a.written["input_scale", projection]
            old, new = a.values("input_scale", projection), b.values("input_scale", projection)
            assert (new[written] == old[written]).all()
            assert (new[~written] == (old[written].max() if value is None else value)).all()
        assert (a.w13_weight == b.w13_weight).all()
        assert (a.w2_weight_scale == b.w2_weight_scale).all()


def test_the_source_stays_as_it_is(holed):
    names = set(holed.tensors)
    for change in ("weight-only", "fill-one", "fill-fallback", "peer-max"):
        change_checkpoint(holed, change)
    assert set(holed.tensors) == names
    assert holed.config["quantization_config"]["quant_algo"] == "NVFP4"
    missing = [slot for slot in canonical(holed).slots(role="input_scale") if slot.entry is None]
    assert len(missing) == len(HOLES) * 3


def test_the_allocator_matters_only_where_slots_stay_unwritten(holed, full):
    def tokens(remedy, allocator):
        result = run_remedy(remedy, PROMPTS[:1], broken=holed, calibrated=full, allocator=allocator, n=4)
        return result.replies[0].token_ids

    for remedy in ("other-backend", "weight-only", "per-token", "fill-one", "fill-fallback", "peer-max", "calibrate"):
        assert tokens(remedy, "zeros") == tokens(remedy, "nan")
    # A layer maximum is no remedy against every leftover: one NaN slot poisons the layer.
    assert set(tokens("layer-maximum", "nan")) == {0}


def test_unknown_remedies_are_refused(holed):
    with pytest.raises(ServingError) as refused:
        run_remedy("hope", PROMPTS, broken=holed)
    assert refused.value.code == "serving.remedy"


def result_with(losses, *, silent=False, nan=0.0):
    reply = RemedyReply("p", (0, 0) if silent else (5, 6), "", silent, nan)
    return RemedyResult("x", None, (reply,), losses)


@pytest.mark.parametrize(
    ("losses", "options", "verdict"),
    [
        ({"a": 1.0, "b": 2.0}, {}, "right"),
        ({"a": 1.04, "b": 1.9}, {}, "right"),
        ({"a": 1.06, "b": 2.0}, {}, "wrong"),
        ({"a": float("nan"), "b": 2.0}, {}, "wrong"),
        ({"a": 1.0, "b": 2.0}, {"silent": True}, "silent"),
        ({"a": 1.0, "b": 2.0}, {"nan": 0.5}, "silent"),
    ],
)
def test_verdicts(losses, options, verdict):
    reference = result_with({"a": 1.0, "b": 2.0})
    assert judge(result_with(losses, **options), reference) == verdict


def test_a_refusal_is_its_own_verdict():
    refused = dataclasses.replace(result_with({}), refusal=ServingError("serving.guard", count=1, groups="x"))
    assert judge(refused, result_with({})) == "refused"
    assert wrong_domains(result_with({"a": 3.0, "b": 1.0}), result_with({"a": 1.0, "b": 1.0})) == ("a",)


def test_a_result_says_what_it_took(holed, full):
    """Bytes of what was served: the same weights, and only the scalars differ."""
    found = {
        name: run_remedy(name, PROMPTS, broken=holed, calibrated=full, n=4)
        for name in ("calibrate", "peer-max", "weight-only", "other-backend")
    }
    scalars = 4 * 3 * 2 * 8
    assert found["peer-max"].bytes == found["calibrate"].bytes
    assert found["weight-only"].bytes == found["calibrate"].bytes - scalars
    assert found["other-backend"].bytes == found["calibrate"].bytes - 4 * 3 * len(HOLES)
    assert all(result.tokens == sum(len(reply.token_ids) for reply in result.replies) for result in found.values())
    assert {result.computed_on for result in found.values()} <= {"cpu", "cuda"}
    assert run_remedy("load-guard", PROMPTS, broken=holed).bytes == 0


def test_excess_is_the_difference_by_domain():
    reference = RemedyResult("calibrate", None, (), {"a": 1.0, "b": 2.0})
    assert excess(RemedyResult("x", None, (), {"a": 1.5, "b": 2.0}), reference) == {"a": 0.5, "b": 0.0}
