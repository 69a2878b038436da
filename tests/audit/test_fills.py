"""Which activation scales count as filled in: how many, in which projections, among numbers of which fineness."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.audit import audit, describe, run_audit
from nvfp4viz.audit.deep_findings import deepen
from nvfp4viz.audit.facts import UNREADABLE, ScaleTable
from nvfp4viz.audit.fills import FP8_FINGERPRINTS, divisor_of, fills_of, fills_of_modules
from nvfp4viz.audit.fineness import least_by_chance
from tests.audit.layouts import CT, EXPERTS, HALF, LAYOUTS, ct_linear, in_type, linear, modelopt
from tests.audit.reading import found
from tests.audit.test_lost_shards import sharded

# All layouts whose activation scales count; those with a scale of its own for each expert.
STATIC = {name: layout for name, layout in LAYOUTS.items() if layout.with_input}
SINGLE = {name: layout for name, layout in STATIC.items() if layout.arrangement != "fused"}
EIGHT = ("W4A8", "Quark, static FP8 inputs", "gpt-oss, static FP8 inputs")
SIX = {2688: 6.0, 448: 0.5}


def over(id):
    return 448 if id in EIGHT else 2688


def measured(layout, *, fine, largest=False):
    """The layout with amax of eight bits, or finer; gate and up alike.  ``largest``: the last expert's is far above."""
    tensors = layout.tensors()
    for e in range(EXPERTS):
        for kind in layout.kinds:
            step = 7 * e % 19 + 5 * (kind == "down") + (0.3137 if fine else 0)
            put(layout, tensors, (e,), (kind,), (129 + step) / 32 * (4 if largest and e == EXPERTS - 1 else 1))
    return tensors


def put(layout, tensors, who, kinds, amax):
    for e in who:
        for kind in kinds:
            scale = np.float32(amax) / np.float32(over(layout.id))
            layout.put(tensors, e, kind, "input_scale", layout.stored(scale))


def filled(layout, tensors, **more):
    report = audit(layout.open(tensors, **more))
    return {(item.projection, item.experts) for item in report.findings if item.code == "scale.filled"}, report


def gates(layout):
    return tuple(kind for kind in layout.kinds if kind != "down")


def every(kinds, who):
    return {(kind, tuple(who)) for kind in kinds}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("id", STATIC)
def test_an_exact_number_that_is_stored_in_half_precision_is_measured(id, dtype):
    layout = STATIC[id]
    for fine in (False, True):
        tensors = measured(layout, fine=fine)
        put(layout, tensors, (3,), gates(layout), SIX[over(id)])
        assert filled(layout, in_type(tensors, dtype))[0] == set()
        # Three of eight in all projections are no chance there either.
        tensors = measured(layout, fine=fine)
        put(layout, tensors, (1, 2, 3), layout.kinds, SIX[over(id)])
        whole = layout.arrangement == "fused"
        expected = {(kind, None) for kind in layout.kinds} if whole else every(layout.kinds, (1, 2, 3))
        assert filled(layout, in_type(tensors, dtype))[0] == expected


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("id", SINGLE)
def test_how_many_experts_of_one_projection_are_no_chance(id, fine):
    layout, amax = SINGLE[id], SIX[over(id)]
    for count in (1, 3, 4, 7, 8):
        tensors = measured(layout, fine=fine)
        put(layout, tensors, range(count), ("down",), amax)
        told, report = filled(layout, tensors)
        assert told == (every(("down",), range(count)) if fine or count >= 4 else set())
        if told:
            assert found(report) == [("scale.filled", "warn", 0, "down", tuple(range(count)))]


@pytest.mark.parametrize("id", SINGLE)
def test_gate_and_up_are_one_piece_of_evidence_for_each_token_that_may_have_been_loud(id):
    layout, amax = SINGLE[id], SIX[over(id)]
    for count, expected in ((4, False), (6, False), (7, True)):
        tensors = measured(layout, fine=False, largest=True)
        put(layout, tensors, range(count), gates(layout), amax)
        assert filled(layout, tensors)[0] == (every(gates(layout), range(count)) if expected else set())
        # Unless a louder one was measured, all of them may have been alike; and who routes them must be known.
        tensors = measured(layout, fine=False)
        put(layout, tensors, range(count), gates(layout), 8 * amax)
        assert filled(layout, tensors)[0] == set()
    tensors = measured(layout, fine=False, largest=True)
    put(layout, tensors, range(7), gates(layout), amax)
    without = {key: value for key, value in (layout.config or {}).items() if key != "num_experts_per_tok"}
    if "text_config" in without:
        without["text_config"] = {
            key: value for key, value in without["text_config"].items() if key != "num_experts_per_tok"
        }
    assert filled(layout, tensors, config=without)[0] == set()
    # All alike are one maximum.
    put(layout, tensors, range(8), gates(layout), amax)
    assert filled(layout, tensors)[0] == set()


def test_where_other_numbers_repeat_as_often_repetition_means_nothing():
    layout = LAYOUTS["modelopt"]
    for repeated, expected in ((1, True), (2, False), (4, False)):
        tensors = measured(layout, fine=False)
        put(layout, tensors, range(4), ("down",), 6)
        put(layout, tensors, range(4, 4 + repeated), ("down",), 7)
        assert bool(filled(layout, tensors)[0]) == expected


@pytest.mark.parametrize("projections", ["down", "all"])
def test_where_all_maxima_lie_close_around_the_number_many_are_measured_so(projections):
    """BF16 has one number in 1/32 around 6: of maxima that spread by 1 % most experts have that very one."""
    layout = LAYOUTS["modelopt"]
    kinds = ("down",) if projections == "down" else layout.kinds
    for at, said in ((6.0, False), (4.5, True)):
        tensors = measured(layout, fine=False)
        for expert in range(EXPERTS):
            put(layout, tensors, (expert,), kinds, 6 if expert < 5 else at + (expert - 6) / 32)
        put(layout, tensors, (5,), kinds, at + 1 / 32)
        assert filled(layout, tensors)[0] == (every(kinds, range(5)) if said else set())


def test_experts_that_share_one_maximum_are_one_measurement():
    """ModelOpt gives all experts of a layer one maximum after calibration: 6 in down is measured once in 128 layers."""
    layout = LAYOUTS["modelopt"]
    tensors = measured(layout, fine=False)
    put(layout, tensors, range(8), layout.kinds, 9)
    put(layout, tensors, range(8), ("down",), 6)
    assert filled(layout, tensors)[0] == set()
    # Where the others were measured one by one, it is no maximum of all.
    tensors = measured(layout, fine=False)
    put(layout, tensors, range(8), ("down",), 6)
    assert filled(layout, tensors)[0] == every(("down",), range(8))


@pytest.mark.parametrize("id", EIGHT)
def test_fp8_activations_have_their_own_fingerprints(id):
    layout = LAYOUTS[id]
    for amax, expected in ((0.5, True), (6.0, False), (1.0, False)):
        tensors = measured(layout, fine=True)
        put(layout, tensors, (2,), layout.kinds, amax)
        told, report = filled(layout, tensors)
        who = None if layout.arrangement == "fused" else (2,)
        assert told == ({(kind, who) for kind in layout.kinds} if expected else set())
        assert {item.text for item in report.findings if item.code == "scale.filled"} == (
            {"scale.filled.default-amax.fp8"} if expected else set()
        )
        if expected:
            [item] = [item for item in report.findings if item.projection == "down"]
            assert all("0.5/448" in describe(item, language)[0] for language in ("en", "zh"))
            # An expert with activations as large as others' is clipped, on a server that reads it.
            said = {one.name: one for one in report.backends}
            if id != "W4A8":
                assert set(said["vllm-cutlass"].possible) == {"degraded", "safe"}
                assert said["vllm-marlin"].possible == ()


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("id", SINGLE)
def test_one_expert_with_all_maxima_of_others(id, fine):
    """The maxima of gate and of down are different experts'."""
    layout = SINGLE[id]
    tensors = measured(layout, fine=fine)
    top = 40.3137 if fine else 40.0
    # One loud token for two experts.
    put(layout, tensors, (5, 6), gates(layout), top)
    put(layout, tensors, (1,), ("down",), top)
    assert filled(layout, tensors)[0] == set()
    put(layout, tensors, (3,), layout.kinds, top)
    told, _ = filled(layout, tensors)
    assert told == (every(layout.kinds, (3,)) if fine else set())
    if told and id in ("modelopt", "compressed-tensors"):
        # The codes show that it is no expert written twice.
        deep = deepen(run_audit(layout.open(tensors))).report
        assert {item.code for item in deep.findings if item.severity != "info"} == {"scale.filled"}


# What was not read.


def lost(facts, kind, experts):
    """The facts as they are when these experts' numbers could not be read."""
    table = facts.tables["input_scale", 0, kind]
    table.state[list(experts)] = UNREADABLE
    table.values[list(experts)] = table.stored[list(experts)] = np.nan
    facts.fills.clear()
    return {name: sorted(origins) for name, origins in fills_of(facts, 0).items() if origins}


@pytest.mark.parametrize("id", STATIC)
def test_a_projection_that_was_not_read_agrees_with_nothing(id):
    layout = STATIC[id]
    for kind in layout.kinds:
        for who in (range(8), range(1, 8)):
            tensors = measured(layout, fine=False)
            put(layout, tensors, (0,), [one for one in layout.kinds if one != kind], SIX[over(id)])
            assert lost(run_audit(layout.open(tensors)).facts, kind, who) == {}


@pytest.mark.parametrize("id", SINGLE)
def test_one_number_that_was_read_proves_nothing_of_the_others(id):
    layout = SINGLE[id]
    for fine in (False, True):
        tensors = measured(layout, fine=fine)
        put(layout, tensors, (0,), gates(layout), SIX[over(id)])
        assert lost(run_audit(layout.open(tensors)).facts, gates(layout)[0], range(1, 8)).keys() <= {"up"}
        assert lost(run_audit(layout.open(tensors)).facts, "down", range(8)).keys() <= (
            {*gates(layout)} if fine else set()
        )
    # Nor is a maximum over some the layer's.
    tensors = measured(layout, fine=True)
    put(layout, tensors, (3, 4), layout.kinds, 40.3137)
    assert lost(run_audit(layout.open(tensors)).facts, "down", ()) == {
        kind: ["copied-maximum"] for kind in layout.kinds
    }
    assert lost(run_audit(layout.open(tensors)).facts, "down", (7,)) == {}


@pytest.mark.parametrize("order", ["inserted", "sorted"])
def test_shards_of_a_healthy_fused_layer(order, tmp_path):
    layout = LAYOUTS["fused"]
    tensors = measured(layout, fine=False)
    put(layout, tensors, (0,), ("gate_up",), 6)
    paths = sharded(tmp_path, tensors, layout.config, layout.quant, order, 6)
    for path in paths:
        kept = path.read_bytes()
        assert "scale.filled" not in {item.code for item in audit(str(path)).findings}
        path.unlink()
        assert "scale.filled" not in {item.code for item in audit(str(tmp_path)).findings}
        path.write_bytes(kept[:-30])
        assert "scale.filled" not in {item.code for item in audit(str(tmp_path)).findings}
        path.write_bytes(kept)


# What is healthy.


def numbers(rng, size, coarse, centre):
    out = np.exp(rng.normal(np.log(centre), rng.choice([0.2, 0.5, 1.0]), size)).astype(np.float32)
    return out.astype(ml_dtypes.bfloat16).astype(np.float32) if coarse else out


def loud(rng, size, coarse, top_k, centre):
    """Maxima of gate and up: each token goes to ``top_k`` experts."""
    out = numbers(rng, size, coarse, centre / 8)
    for token in numbers(rng, 2 * size, coarse, centre):
        who = rng.choice(size, top_k, replace=False)
        out[who] = np.maximum(out[who], token)
    return out


@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("size", [8, 32, 64, 128])
def test_nothing_is_said_of_what_was_measured(size, coarse):
    rng = np.random.default_rng(size)
    ids = ("modelopt", "compressed-tensors", "stacked", "W4A8", "Quark, static FP8 inputs")
    known = {id: run_audit(LAYOUTS[id].open()).facts for id in ids}
    for turn in range(3 * 200):
        id = ids[turn % len(ids)]
        facts = known[id]
        facts.fills.clear()
        # Around the exact numbers, where they are likeliest.
        centre = float(rng.choice([0.5, 1, 6, 20]))
        first = loud(rng, size, coarse, facts.view.top_k, centre) if turn % 2 else numbers(rng, size, coarse, centre)
        second = numbers(rng, size, coarse, float(rng.choice([centre, 8])))
        if turn % 8 == 7:
            # One maximum for all experts.
            first, second = np.full_like(first, first.max()), np.full_like(second, second.max())
        for kind in LAYOUTS[id].kinds:
            values = (second if kind == "down" else first) / np.float32(divisor_of(facts, 0))
            stored = np.float32(1) / values if LAYOUTS[id].divisors else values
            if turn % 3 == 2:
                stored = stored.astype(ml_dtypes.bfloat16).astype(np.float32)
            values = np.float32(1) / stored if LAYOUTS[id].divisors else stored
            state = np.zeros(size, np.uint8)
            facts.tables["input_scale", 0, kind] = ScaleTable("input_scale", 0, kind, values, stored, state)
        assert not any(fills_of(facts, 0).values()), (turn, id, first, second)


def test_how_many_are_no_chance():
    rng = np.random.default_rng(1)
    for among in (8, 64):
        least = least_by_chance(among, 1e-2)
        seen = rng.binomial(among, 1 / 128, 200_000)
        assert (seen >= least).mean() <= 1.1e-2
        assert least >= 3
    assert all(least_by_chance(n) >= least_by_chance(n, 1e-4) >= 3 for n in range(300))
    # Fewer than three prove nothing however unlikely they are.
    assert least_by_chance(1) == least_by_chance(2) == 3


# Ordinary modules.


@pytest.mark.parametrize("dtype", HALF)
def test_a_module_whose_divisor_is_stored_in_half_precision(dtype):
    layout = LAYOUTS["compressed-tensors"]
    tensors = layout.tensors()
    for at in range(12):
        module = ct_linear(f"model.layers.0.self_attn.x{at}_proj")
        amax = 6.0 if at == 4 else 4.0 + 0.3137 * at
        module[f"model.layers.0.self_attn.x{at}_proj.{CT['input_scale']}"] = layout.scalar(2688 / amax)
        tensors |= module
    report = audit(layout.open(in_type(tensors, dtype)))
    assert "scale.filled" not in {item.code for item in report.findings}
    # The same numbers in F32 are finer than that.
    assert [item.count for item in audit(layout.open(tensors)).findings if item.code == "scale.filled"] == [1]


def test_fp8_modules_have_the_fingerprint_over_their_own_number():
    for id, name in (
        ("MIXED_PRECISION", "model.layers.0.linear_attn.out_proj"), ("W4A8", "model.layers.0.self_attn.o_proj")
    ):  # fmt: skip
        layout = LAYOUTS[id]
        tensors = {**layout.tensors(), **(linear(name) if id == "W4A8" else {})}
        for value, origin in FP8_FINGERPRINTS:
            report = audit(layout.open({**tensors, f"{name}.input_scale": layout.scalar(value)}))
            [item] = [one for one in report.findings if one.code == "scale.filled"]
            assert (item.text, item.count) == (f"scale.filled.linear.{origin}", 1)
            # That it is written for an ordinary module, nobody knows.
            assert item.severity == ("info" if origin == "default-amax" else "warn")
            assert all("448" in describe(item, language)[0] for language in ("en", "zh"))
            assert "zero" in {one.outcome for one in report.backends} or origin == "default-amax"
    # Where the others are BF16 numbers, one is chance.
    coarse = {f"model.layers.{k}.o_proj": np.float32((129 + k) / 32) / np.float32(448) for k in range(9)}
    coarse["model.layers.9.o_proj"] = FP8_FINGERPRINTS[0][0]
    assert fills_of_modules(coarse, [], coarse=False, over=448) == {}
    finer = {name: value * np.float32(1.0137) if "9" not in name else value for name, value in coarse.items()}
    assert fills_of_modules(finer, [], coarse=True, over=448) == {"default-amax": ["model.layers.9.o_proj"]}


def test_a_layer_that_an_allow_list_gives_fp8_activations():
    layout = LAYOUTS["W4A8"]
    listed = {"model.layers.0.mlp.experts": {"quant_algo": "W4A8_NVFP4_FP8", "group_size": 16}}
    quant = modelopt("MIXED_PRECISION", exclude=(), quantized_layers=listed)
    tensors = measured(layout, fine=True)
    put(layout, tensors, (2,), ("down",), 0.5)
    assert filled(layout, tensors, quant=quant)[0] == every(("down",), (2,))
    # What would be 6/2688 is a measured 1.
    put(layout, tensors, (2,), ("down",), 1.0)
    assert filled(layout, tensors, quant=quant)[0] == set()
