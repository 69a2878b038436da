"""What a fault does, against plain restatements: routes counted one by one, errors summed term by term."""

import math

import numpy as np
import pytest

from nvfp4viz.checkpoint import FAULTS
from nvfp4viz.errors import InputError
from nvfp4viz.formats import decode_e4m3
from nvfp4viz.model import ForwardRecord
from nvfp4viz.serving import fault_lab, load
from nvfp4viz.serving.fault_lab import (
    FaultSpot,
    break_checkpoint,
    compare,
    count_block_scales,
    scale_use,
    sweep,
)

PROMPT, N = "12 + 3 =", 6
LAYERS, EXPERTS = 2, 8
BACKENDS = ("vllm-cutlass", "vllm-flashinfer-cutlass", "vllm-marlin", "vllm-emulation")


@pytest.fixture(scope="module")
def checkpoint(make_model):
    return make_model()


@pytest.fixture(scope="module")
def serve(checkpoint):
    """``serve(backend, spot=None)`` → the model, broken at a spot."""

    def build(backend="vllm-cutlass", spot=None):
        return load(checkpoint if spot is None else break_checkpoint(checkpoint, spot), backend=backend)

    return build


@pytest.fixture(scope="module")
def healthy(serve):
    return serve()


def reading(served, ids):
    record = ForwardRecord()
    return record, served.model.forward(ids, served.experts, None, record)


def busiest(served, layer=0):
    routes = reading(served, served.generate(PROMPT, N).prompt_ids)[0].routes[layer]
    return int(np.bincount(routes.ravel(), minlength=EXPERTS).argmax())


def never_visited(served, prompt, n):
    """A layer and one of its experts that no token of a prompt and its answer meets."""
    answer = served.generate(prompt, n)
    routes = reading(served, [*answer.prompt_ids, *answer.token_ids])[0].routes
    return next((at, e) for at in range(LAYERS) for e in range(EXPERTS) if e not in routes[at].ravel().tolist())


def bits(array):
    return np.ascontiguousarray(array).view(np.uint16)


# --------------------------------------------------------------------------------------------------- a broken copy


def test_a_broken_copy_differs_in_one_tensor_and_the_source_in_none(checkpoint):
    before = {name: item.tobytes() for name, item in checkpoint.read_tensors().items()}
    broken = break_checkpoint(checkpoint, FaultSpot("nan", 1, 5, "down", "input_scale"))
    after = {name: item.tobytes() for name, item in broken.read_tensors().items()}
    assert [name for name in before if after[name] != before[name]] == [
        "model.layers.1.experts.5.down_proj.input_scale"
    ]
    assert {name: item.tobytes() for name, item in checkpoint.read_tensors().items()} == before
    assert broken.name == "random (nan)"
    assert broken.config == checkpoint.config


def test_a_fault_that_does_not_fit_is_refused(checkpoint):
    with pytest.raises(InputError) as caught:
        break_checkpoint(checkpoint, FaultSpot("pair-mismatch", 0, 0, "down"))
    assert caught.value.code == "fault.pair"


# ----------------------------------------------------------------------------------------------------- comparing


def test_a_model_beside_itself_shows_no_effect(healthy):
    effect = compare(healthy, healthy, FaultSpot("nan", 0, 0, "down"), PROMPT, N)
    assert effect.first_broken is None
    assert effect.layer_error.tolist() == [0.0] * LAYERS
    assert effect.layer_nan.tolist() == [0.0] * LAYERS
    assert effect.healthy_loss == effect.faulty_loss
    assert effect.healthy.token_ids == effect.faulty.token_ids
    assert effect.read == (*effect.healthy.prompt_ids, *effect.healthy.token_ids)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_visits_are_the_positions_routed_to_the_expert(healthy, layer):
    answer = healthy.generate(PROMPT, N)
    routes = reading(healthy, [*answer.prompt_ids, *answer.token_ids])[0].routes[layer].tolist()
    for expert in range(EXPERTS):
        effect = compare(healthy, healthy, FaultSpot("nan", layer, expert, "down"), PROMPT, N)
        assert effect.visits == sum(expert in row for row in routes)


def test_nan_spreads_from_the_broken_layer_on_and_silences_the_answer(serve, healthy):
    spot = FaultSpot("nan", 1, busiest(healthy, 1), "down", "input_scale")
    faulty = serve(spot=spot)
    effect = compare(healthy, faulty, spot, PROMPT, N)
    assert effect.first_broken == 1
    record = reading(faulty, effect.read)[0]
    for layer, hidden in enumerate(record.hidden):
        rows = [any(math.isnan(float(value)) for value in row) for row in hidden]
        assert effect.layer_nan[layer] == np.float32(sum(rows) / len(rows))
    assert effect.layer_nan[0] == 0
    assert effect.layer_nan[1] > 0
    assert effect.layer_error[0] == 0
    assert math.isnan(effect.faulty_loss)
    assert not math.isnan(effect.healthy_loss)
    assert effect.faulty.token_ids == faulty.generate(PROMPT, N).token_ids


def test_the_error_leaves_out_the_positions_that_hold_a_nan(serve, healthy):
    """In the broken layer every position that is still a number is untouched: the error there is zero, not NaN."""
    spot = FaultSpot("nan", 0, busiest(healthy), "down", "input_scale")
    effect = compare(healthy, serve(spot=spot), spot, PROMPT, N)
    assert 0 < effect.layer_nan[0] < 1
    assert effect.layer_error[0] == 0


def test_the_error_is_nan_where_no_position_is_a_number(serve, healthy):
    spot = FaultSpot("nan", 0, 0, "down", "input_scale")
    effect = compare(healthy, serve("vllm-flashinfer-cutlass", spot), spot, PROMPT, N)
    assert effect.layer_nan.tolist() == [1.0] * LAYERS
    assert np.isnan(effect.layer_error).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_error_is_the_root_mean_square_over_the_healthy_one(serve, backend):
    spot = FaultSpot("scaled", 0, busiest(serve(backend)), "down", "weight_scale_2", 3.7)
    good, bad = serve(backend), serve(backend, spot)
    effect = compare(good, bad, spot, PROMPT, N)
    ours, theirs = (reading(served, effect.read)[0].hidden for served in (good, bad))
    for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        pairs = [(float(x), float(y)) for x, y in zip(a.ravel(), b.ravel(), strict=True)]
        error = math.sqrt(math.fsum((x - y) ** 2 for x, y in pairs) / math.fsum(x**2 for x, _ in pairs))
        # float64 sums in another order, rounded to float32: at most one float32 step apart
        assert abs(effect.layer_error[layer] - np.float32(error)) <= np.spacing(np.float32(error))
    assert effect.first_broken == 0
    assert effect.layer_error[0] > 0


def test_an_expert_that_nobody_visits_changes_no_bit(serve, healthy):
    layer, expert = never_visited(healthy, "2", 1)
    spot = FaultSpot("nan", layer, expert, "down", "input_scale")
    effect = compare(healthy, serve(spot=spot), spot, "2", 1)
    assert (effect.visits, effect.first_broken) == (0, None)
    assert effect.healthy_logits.tobytes() == effect.faulty_logits.tobytes()


def test_the_loss_is_of_the_answer_s_tokens_alone(serve, healthy):
    spot = FaultSpot("scaled", 0, busiest(healthy), "down", "weight_scale_2", 3.7)
    faulty = serve(spot=spot)
    effect = compare(healthy, faulty, spot, PROMPT, N)
    start = len(effect.healthy.prompt_ids)
    for served, loss in ((healthy, effect.healthy_loss), (faulty, effect.faulty_loss)):
        logits = reading(served, effect.read)[1].astype(np.float64)
        terms = []
        for at in range(start, len(effect.read)):
            row = logits[at - 1].tolist()
            terms.append(math.log(math.fsum(math.exp(x) for x in row)) - row[effect.read[at]])
        # float64 logarithms of sums in another order
        assert math.isclose(loss, math.fsum(terms) / N, rel_tol=1e-12)


def test_the_logits_are_those_that_the_first_token_is_chosen_from(serve, healthy):
    spot = FaultSpot("scaled", 0, busiest(healthy), "gate", "weight_scale_2", 50.0)
    effect = compare(healthy, serve(spot=spot), spot, PROMPT, N)
    for answer, logits in ((effect.healthy, effect.healthy_logits), (effect.faulty, effect.faulty_logits)):
        assert answer.trace.logits[0].tobytes() == logits.tobytes()
        assert int(np.argmax(logits)) == answer.token_ids[0]


# ------------------------------------------------------------------------------------------------- block scales


def layer_trace(served, ids, layer):
    """Every tensor of one layer's experts over some tokens."""
    kept, keeping = [], served.recording()

    def experts(at, x, routing):
        result = keeping(at, x, routing)
        if at == layer:
            kept.append(result.trace)
        return result

    served.model.forward(ids, experts)
    return kept[0]


@pytest.mark.parametrize(("projection", "which"), [("gate", "input"), ("up", "input"), ("down", "intermediate")])
def test_block_scales_are_those_that_the_expert_s_rows_are_quantised_with(serve, healthy, projection, which):
    spot = FaultSpot("scaled", 1, busiest(healthy, 1), projection, "input_scale", 3.0)
    faulty = serve(spot=spot)
    effect = compare(healthy, faulty, spot, PROMPT, N)
    for served, scales in ((healthy, effect.healthy_scales), (faulty, effect.faulty_scales)):
        trace = layer_trace(served, effect.read, 1)
        rows = np.flatnonzero(trace.dispatch.row_expert == spot.expert)
        assert scales.tobytes() == getattr(trace, which).scales[rows].tobytes()
        assert len(scales) == effect.visits > 0


def test_marlin_has_no_block_scales_of_activations(serve):
    spot = FaultSpot("scaled", 0, 0, "down", "input_scale", 3.0)
    effect = compare(serve("vllm-marlin"), serve("vllm-marlin", spot), spot, PROMPT, N)
    assert effect.healthy_scales is None
    assert effect.faulty_scales is None


def test_every_e4m3_byte_is_counted_as_what_it_is():
    every = np.arange(256, dtype=np.uint8)
    values = np.abs(decode_e4m3(every))
    assert count_block_scales(every) == {
        "normal": int((values >= 2.0**-6).sum()),
        "subnormal": int(((values > 0) & (values < 2.0**-6)).sum()),
        "zero": int((values == 0).sum()),
        "nan": int(np.isnan(values).sum()),
    }


# ------------------------------------------------------------------------------------------------- use of a scale

SCALARS = FAULTS["scaled"].roles


def test_every_scalar_on_every_backend_has_a_use():
    uses = {scale_use(r, p, b) for r in SCALARS for p in ("gate", "up", "down") for b in BACKENDS}
    assert uses == {"unread", "twice", "pair", "layer", "once", "both", "partner"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_what_is_unread_changes_no_bit(serve, backend, projection):
    """Whatever stands there, NaN included; and what is read does change something."""
    good = serve(backend)
    expert = busiest(good)
    for role in SCALARS:
        unread = scale_use(role, projection, backend) in ("unread", "partner")
        spot = FaultSpot("nan", 0, expert, projection, role)
        assert (compare(good, serve(backend, spot), spot, PROMPT, 2).first_broken is None) == unread


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("role", ["weight", "weight_scale", "weight_scale_2", "input_scale"])
def test_what_the_explorer_says_of_each_tensor_s_absence(serve, backend, role):
    """No backend refuses: the slot keeps old memory, and every backend that reads the tensor computes with it."""
    good = serve(backend)
    spot = FaultSpot("missing", 0, busiest(good), "down", role)
    served = serve(backend, spot)
    read_by_all = role != "input_scale"
    if read_by_all or good.backend.reads_input_scale:
        [slot] = served.load_report.unwritten
        assert (slot.expert, slot.role) == (spot.expert, role)
    broken = compare(good, served, spot, PROMPT, 2).first_broken
    if read_by_all or good.backend.scope == "expert":
        assert broken == 0
    elif good.backend.scope == "none":
        assert broken is None
    # one scale a layer: zeros of old memory hide behind the maximum, NaN of it does not
    elif good.backend.scope == "layer":
        nan = FaultSpot("nan", 0, spot.expert, "down", role)
        assert compare(good, serve(backend, nan), nan, PROMPT, 2).first_broken == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
@pytest.mark.parametrize(("fault", "role"), [("zero-weight", "weight"), ("neighbour", "weight_scale")])
def test_every_backend_reads_codes_and_block_scales(serve, backend, projection, fault, role):
    good = serve(backend)
    spot = FaultSpot(fault, 0, busiest(good), projection, role)
    assert compare(good, serve(backend, spot), spot, PROMPT, 2).first_broken == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("projection", ["gate", "down"])
def test_a_weight_s_scale_is_a_factor_of_the_product(serve, backend, projection):
    """Twice the scale, twice the product to the bit: gate's scale doubles gate and up, nothing is taken back."""
    good = serve(backend)
    expert = busiest(good)
    bad = serve(backend, FaultSpot("scaled", 0, expert, projection, "weight_scale_2", 2.0))
    ids = good.generate(PROMPT, 2).prompt_ids
    ours, theirs = (layer_trace(served, ids, 0) for served in (good, bad))
    name = "c3" if projection == "down" else "c1"
    a, b = (getattr(trace, name).astype(np.float32) for trace in (ours, theirs))
    mine = ours.dispatch.row_expert == expert
    assert (b[mine] == 2 * a[mine]).all()
    assert (a[mine] != 0).any()
    assert (b[~mine] == a[~mine]).all()
    assert scale_use("weight_scale_2", projection, backend) == {"gate": "both", "down": "once"}[projection]


@pytest.mark.parametrize(
    ("backend", "projection"),
    [
        ("vllm-cutlass", "pair"),
        ("vllm-cutlass", "down"),
        ("vllm-flashinfer-cutlass", "down"),
        ("vllm-emulation", "down"),
    ],
)
def test_a_power_of_two_on_an_input_scale_cancels(serve, backend, projection):
    """As long as no block scale leaves the normal range; half a decade does not."""
    good = serve(backend)
    if projection == "pair":
        expert = busiest(good)
        projection = max("gate", "up", key=lambda kind: good.parameters_of(0).values("input_scale", kind)[expert])
    else:
        expert = _largest(good, projection) if backend != "vllm-cutlass" else busiest(good)
    ids = good.generate(PROMPT, 2).prompt_ids
    traces = {}
    for factor in (16.0, 64.0, 16 * 10**0.5):  # 16, so that nothing is clipped
        traces[factor] = layer_trace(
            serve(backend, FaultSpot("scaled", 0, expert, projection, "input_scale", factor)), ids, 0
        )
    which = "intermediate" if projection == "down" else "input"
    rows = traces[16.0].dispatch.row_expert == expert
    for factor in (16.0, 64.0):
        scales = getattr(traces[factor], which).scales[rows]
        assert count_block_scales(scales)["normal"] == scales.size
        assert 0x7E not in scales
    assert (bits(traces[16.0].c3[rows]) == bits(traces[64.0].c3[rows])).all()
    assert (bits(traces[16.0].c3) != bits(traces[16 * 10**0.5].c3)).any()


def _largest(served, projection):
    """The expert with the layer's largest input scale of a projection: the one that every backend takes."""
    return int(np.argmax(served.parameters_of(0).values("input_scale", projection)))


def test_gate_and_up_hide_behind_the_larger_of_the_pair(serve, healthy):
    expert = busiest(healthy)
    values = {kind: healthy.parameters_of(0).values("input_scale", kind)[expert] for kind in ("gate", "up")}
    smaller, larger = sorted(values, key=values.get)
    hidden, shown = (FaultSpot("scaled", 0, expert, kind, "input_scale", 0.7) for kind in (smaller, larger))
    assert compare(healthy, serve(spot=hidden), hidden, PROMPT, 2).first_broken is None
    assert compare(healthy, serve(spot=shown), shown, PROMPT, 2).first_broken == 0


@pytest.mark.parametrize("backend", ["vllm-flashinfer-cutlass", "vllm-emulation"])
def test_one_scale_a_layer_hides_the_smaller_and_spreads_the_largest(serve, backend):
    good = serve(backend)
    largest = _largest(good, "down")
    ids = good.generate(PROMPT, 2).prompt_ids
    healthy = layer_trace(good, ids, 0)
    other = int(next(e for e in healthy.dispatch.row_expert if e != largest))
    rows = healthy.dispatch.row_expert == other
    outcomes = {}
    for factor, expert in ((0.7, other), (3.0, largest)):
        spot = FaultSpot("scaled", 0, expert, "down", "input_scale", factor)
        outcomes[factor] = bits(layer_trace(serve(backend, spot), ids, 0).c3)[rows]
    assert (outcomes[0.7] == bits(healthy.c3)[rows]).all()
    assert (outcomes[3.0] != bits(healthy.c3)[rows]).any()
    assert scale_use("input_scale", "down", backend) == "layer"


def test_a_scale_of_its_own_reaches_no_other_expert(serve, healthy):
    expert = busiest(healthy)
    ids = healthy.generate(PROMPT, 2).prompt_ids
    ours = layer_trace(healthy, ids, 0)
    theirs = layer_trace(serve(spot=FaultSpot("scaled", 0, expert, "down", "input_scale", 3.0)), ids, 0)
    same = (bits(ours.c3) == bits(theirs.c3)).all(axis=1)
    assert same[ours.dispatch.row_expert != expert].all()
    assert not same[ours.dispatch.row_expert == expert].all()


# ------------------------------------------------------------------------------------------------------- a sweep


def test_no_change_is_no_damage(checkpoint, healthy):
    spot = FaultSpot("nan", 0, busiest(healthy), "down", "input_scale")
    [point] = sweep(checkpoint, spot, [1.0], PROMPT, n=N)
    effect = compare(healthy, healthy, spot, PROMPT, N)
    assert (point.factor, point.error, point.nan, point.changed) == (1.0, 0.0, 0.0, 0.0)
    assert point.loss == effect.healthy_loss


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_point_is_the_comparison_with_that_factor(checkpoint, serve, backend):
    good = serve(backend)
    at = FaultSpot("scaled", 0, busiest(good), "down", "weight_scale_2", 30.0)
    [point] = sweep(checkpoint, at, [30.0], PROMPT, backend=backend, n=N)
    bad = serve(backend, at)
    effect = compare(good, bad, at, PROMPT, N)
    assert np.float32(point.error) == effect.layer_error[-1]
    assert point.nan == effect.layer_nan[-1]
    assert point.loss == effect.faulty_loss
    ours, theirs = (reading(served, effect.read)[1] for served in (good, bad))
    choices = [int(np.argmax(a)) != int(np.argmax(b)) for a, b in zip(ours, theirs, strict=True)]
    assert point.changed == sum(choices) / len(choices)
    assert point.changed > 0


def test_nan_is_counted_and_never_hides_in_an_average(checkpoint, healthy):
    """A factor that overflows to infinity: 1/Inf = 0, and the epilogue's 0 times Inf is NaN."""
    spot = FaultSpot("scaled", 0, busiest(healthy), "down", "input_scale")
    [point] = sweep(checkpoint, spot, [3e38], PROMPT, n=2)
    assert point.factor == 3e38
    broken = break_checkpoint(checkpoint, FaultSpot("scaled", 0, spot.expert, "down", "input_scale", 3e38))
    ids = healthy.generate(PROMPT, 2)
    hidden = reading(load(broken), [*ids.prompt_ids, *ids.token_ids])[0].hidden[-1]
    assert point.nan == np.isnan(hidden.astype(np.float32)).any(axis=1).mean()
    assert math.isnan(point.loss) == (point.nan > 0)


def test_a_sweep_computes_one_point_at_a_time(checkpoint, monkeypatch):
    built = []
    original = fault_lab.break_checkpoint
    monkeypatch.setattr(fault_lab, "break_checkpoint", lambda c, at: built.append(at.value) or original(c, at))
    points = sweep(checkpoint, FaultSpot("nan", 0, 0, "down", "input_scale"), [0.5, 2.0, 8.0], PROMPT, n=1)
    assert built == []
    assert next(points).factor == 0.5
    assert built == [0.5]
