"""Loading experts: every tensor in its slot, and what the other slots hold."""

import numpy as np
import pytest

from nvfp4viz.checkpoint import canonical, memory_checkpoint, tensor
from nvfp4viz.errors import ServingError
from nvfp4viz.serving import ALLOCATORS, load_parameters
from nvfp4viz.serving.loader import ROLES, refill
from tests.audit.layouts import LAYOUTS

HOLES = [(0, 2, "gate"), (0, 2, "up"), (0, 2, "down"), (1, 5, "down")]


def load(checkpoint, **options):
    return load_parameters(checkpoint, canonical(checkpoint), **options)


def test_every_tensor_lands_in_its_slot(make_checkpoint, name_of):
    checkpoint = make_checkpoint()
    parameters, report = load(checkpoint)
    assert report.complete
    assert [(c.role, c.expected, c.written) for c in report.counts] == [
        (role, 36, 36) for role in ("weight", "weight_scale", "weight_scale_2", "input_scale")
    ]
    for p in parameters:
        assert p.w13_weight.shape == (6, 64, 32)
        assert p.w13_weight_scale.shape == (6, 64, 4)
        assert p.w2_weight.shape == (6, 64, 16)
        assert p.w2_weight_scale.shape == (6, 64, 2)
        assert p.w13_input_scale.shape == p.w13_weight_scale_2.shape == (6, 2)
        assert p.w2_input_scale.shape == p.w2_weight_scale_2.shape == (6,)
        for expert in range(6):
            gate, up, down = (checkpoint.read(name_of(p.layer, expert, x, "weight")) for x in ("gate", "up", "down"))
            assert (p.w13_weight[expert] == np.concatenate([gate, up])).all()
            assert (p.w2_weight[expert] == down).all()
            for projection in ("gate", "up", "down"):
                for role in ("weight_scale_2", "input_scale"):
                    stored = checkpoint.read_scalar(name_of(p.layer, expert, projection, role))
                    assert p.values(role, projection)[expert] == stored
        assert not p.w13_weight.flags.writeable


def test_unwritten_slots_are_named(make_checkpoint, name_of):
    _, report = load(make_checkpoint(without=[name_of(*hole) for hole in HOLES]))
    assert [(s.layer, s.expert, s.projection, s.role) for s in report.unwritten] == [
        (*hole, "input_scale") for hole in HOLES
    ]
    assert report.unwritten[0].name == name_of(0, 2, "gate")
    assert report.experts_without("input_scale") == {0: (2,), 1: (5,)}
    assert report.experts_without("weight") == {}
    assert {c.role: c.expected - c.written for c in report.counts}["input_scale"] == 4


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_only_unwritten_slots_differ_between_allocators(make_checkpoint, name_of, allocator):
    without = [name_of(*hole) for hole in HOLES]
    full, _ = load(make_checkpoint())
    held, report = load(make_checkpoint(without=without), allocator=allocator)
    for a, b in zip(full, held, strict=True):
        for projection in ("gate", "up", "down"):
            for expert in range(6):
                same = a.values("input_scale", projection)[expert] == b.values("input_scale", projection)[expert]
                assert same == ((a.layer, expert, projection) not in HOLES)
    assert report.allocator == allocator


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])  # scales, and divisors
@pytest.mark.parametrize("before", ALLOCATORS)
@pytest.mark.parametrize("after", ALLOCATORS)
def test_a_load_onto_other_memory_is_that_allocator_s_load(layout, before, after):
    """Every bit, whatever memory held the first time, with holes in every role; the first load keeps its own."""
    tensors = LAYOUTS[layout].tensors()
    for expert, kind, role in [(0, "gate", "weight"), (3, "up", "weight_scale"), (3, "down", "weight_scale_2"),
                               (1, "gate", "input_scale"), (5, "down", "input_scale")]:  # fmt: skip
        del tensors[LAYOUTS[layout].name(expert, kind, role)]
    checkpoint = LAYOUTS[layout].open(tensors)
    view = canonical(checkpoint)
    first, report = load_parameters(checkpoint, view, allocator=before, seed=1)
    kept = [bits(p) for p in first]
    found, told = refill(first, report, view, after, seed=7)
    expected, said = load_parameters(checkpoint, view, allocator=after, seed=7)
    assert [bits(p) for p in found] == [bits(p) for p in expected]
    assert [bits(p) for p in first] == kept
    assert repr(told) == repr(said)
    assert not any(getattr(p, name).flags.writeable for p in found for name in ("w13_weight", "w2_input_scale"))


def bits(parameters):
    names = [f"{name}_{role}" for name in ("w13", "w2") for role in ROLES]
    return {name: getattr(parameters, name).tobytes() for name in names}


def test_memory_that_is_not_known_is_refused():
    checkpoint = LAYOUTS["modelopt"].open()
    view = canonical(checkpoint)
    with pytest.raises(ServingError, match="twos"):
        refill(*load_parameters(checkpoint, view), view, "twos")


def test_what_each_allocator_leaves(make_checkpoint, name_of):
    checkpoint = make_checkpoint(without=[name_of(*hole) for hole in HOLES])

    def held(allocator, seed=0):
        _, report = load(checkpoint, allocator=allocator, seed=seed)
        return [slot.value for slot in report.unwritten]

    assert held("zeros") == [0.0] * 4
    assert held("ones") == [1.0] * 4
    assert np.isnan(held("nan")).all()
    # The neighbour of w13_input_scale is w13_weight_scale_2: same shape, allocated before it.
    scales = [checkpoint.read_scalar(name_of(*hole, "weight_scale_2")) for hole in HOLES]
    assert held("neighbour") == [float(value) for value in scales]
    assert held("random", 1) == held("random", 1)
    assert held("random", 1) != held("random", 2)


def test_missing_weights_are_held_memory_too(make_checkpoint, name_of):
    names = [name_of(1, 3, "up", role) for role in ("weight", "weight_scale", "weight_scale_2")]
    for allocator, codes, block, scale in (("zeros", 0, 0, 0.0), ("nan", 0x7F, 0x7F, None), ("ones", 0x38, 0x38, 1.0)):
        parameters, report = load(make_checkpoint(without=names), allocator=allocator)
        assert [slot.role for slot in report.unwritten] == ["weight", "weight_scale", "weight_scale_2"]
        assert (parameters[1].w13_weight[3, 32:] == codes).all()
        assert (parameters[1].w13_weight_scale[3, 32:] == block).all()
        value = parameters[1].w13_weight_scale_2[3, 1]
        assert np.isnan(value) if scale is None else value == scale
        assert report.unwritten[0].value is None
    full, _ = load(make_checkpoint())
    parameters, _ = load(make_checkpoint(without=names), allocator="neighbour")
    assert (parameters[1].w13_weight[3, 32:] == full[0].w13_weight[3, 32:]).all()


def test_a_role_that_the_scheme_does_not_read_is_not_expected(make_checkpoint, name_of):
    checkpoint = make_checkpoint(without=[name_of(*hole) for hole in HOLES])
    _, report = load(checkpoint, roles=("weight", "weight_scale", "weight_scale_2"))
    assert report.complete


def with_divisors(input_scale, experts=2):
    """compressed-tensors, of which the last expert's down has no activation scale."""
    rng = np.random.default_rng(2)
    tensors = {}
    for expert in range(experts):
        for projection, rows, columns in (("gate", 32, 64), ("up", 32, 64), ("down", 64, 32)):
            name = f"model.layers.0.mlp.experts.{expert}.{projection}_proj"
            tensors[f"{name}.weight_packed"] = tensor(rng.integers(0, 256, (rows, columns // 2), np.uint8))
            scales = rng.integers(0x30, 0x7F, (rows, columns // 16), np.uint8)
            tensors[f"{name}.weight_scale"] = tensor(scales, "F8_E4M3")
            tensors[f"{name}.weight_global_scale"] = tensor(np.float32([4096.0]))
            if (expert, projection) != (experts - 1, "down"):
                tensors[f"{name}.input_global_scale"] = tensor(input_scale)
    return memory_checkpoint(tensors, name="divisors")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bits", [0, 1, 0x80000000, 0x807FFFFF, 0x7F800000, 0x7F800001, 0xFF800001, 0x7FC00000])
def test_a_divisor_of_any_bits_is_inverted_without_a_word(bits):
    """Stored, and left in the memory of an empty slot: a signalling NaN and a small number are numbers like others."""
    stored = np.array([bits], np.uint32).view(np.float32)
    parameters, _ = load(with_divisors(stored))
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / stored
    np.testing.assert_array_equal(parameters[0].w2_input_scale[:1], inverse)
    # What a block of random memory holds: numbers too small to invert and signalling NaN among them.
    for seed in range(4):
        load(with_divisors(np.float32([512.0]), experts=16), allocator="random", seed=seed)


def test_compressed_tensors_divisors_become_multipliers():
    """2688/amax in the file; an empty slot holding zero inverts to Inf, as vLLM's loader makes it."""
    parameters, report = load(with_divisors(np.float32([512.0])))
    assert (parameters[0].w13_weight_scale_2 == 1 / 4096).all()
    assert parameters[0].w2_input_scale[0] == np.float32(1 / 512)
    assert np.isinf(parameters[0].w2_input_scale[1])
    assert [slot.name.rsplit(".", 1)[1] for slot in report.unwritten] == ["input_global_scale"]


def test_refusals(make_checkpoint, name_of):
    with pytest.raises(ServingError) as wrong:
        load(make_checkpoint(), allocator="sevens")
    assert wrong.value.code == "serving.allocator"

    empty = memory_checkpoint({"model.norm.weight": tensor(np.ones(8, np.float32))}, name="dense")
    with pytest.raises(ServingError) as wrong:
        load(empty)
    assert wrong.value.code == "serving.no-experts"

    checkpoint = make_checkpoint()
    tensors = checkpoint.read_tensors() | {name_of(1, 4, "up", "weight"): tensor(np.zeros((32, 16), np.uint8))}
    with pytest.raises(ServingError) as wrong:
        load(memory_checkpoint(tensors, config=checkpoint.config))
    assert wrong.value.code == "serving.shape"
    assert wrong.value.params["tensor"] == name_of(1, 4, "up", "weight")
