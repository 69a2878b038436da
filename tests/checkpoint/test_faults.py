"""Faults go into copies, at one slot, and leave everything else byte for byte."""

import json
import os

import numpy as np
import pytest
import safetensors.numpy

from nvfp4viz.checkpoint import FAULTS, copies, inject, inject_tensors, open_checkpoint, tensor, write_checkpoint
from nvfp4viz.errors import CheckpointError, InputError
from tests.audit.layouts import LAYOUTS
from tests.checkpoint.checkpoint_fixtures import CONFIG, CT_QUANT, QUANT, base, ct_base, snapshot, without

AT = {"layer": 0, "expert": 1, "projection": "up"}
E = "model.layers.0.mlp.experts"
SLOT = f"{E}.1.up_proj"
# Needs a block scale of another type than BASE has.
E8M0_ONLY = {"exponent-cast"}


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(
        tmp_path / "base", base(), config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=1400, metadata={"format": "pt"}
    )
    return tmp_path / "base"


def changed(fault: str, **more) -> dict[str, bytes | None]:
    """Names that differ from BASE after a fault in memory, with their new bytes."""
    before = base()
    after = inject_tensors(before, fault, **{**AT, **more})
    assert list(after) == [name for name in before if name in after]
    return {
        name: after[name].tobytes() if name in after else None
        for name in before
        if name not in after or after[name].tobytes() != before[name].tobytes()
    }


def number(data: bytes) -> float:
    return np.frombuffer(data, np.float32)[0]


def test_the_registry_has_every_fault_of_the_vocabulary():
    assert list(FAULTS) == [
        "missing",
        "zero",
        "nan",
        "inf",
        "negative",
        "subnormal",
        "scaled",
        "constant",
        "neighbour",
        "random-bits",
        "reciprocal",
        "pair-mismatch",
        "nibble-swap",
        "gate-up-swap",
        "block-nan",
        "block-negative",
        "exponent-cast",
        "zero-weight",
        "duplicate-expert",
    ]


def test_faults_in_a_scalar():
    name = f"{SLOT}.input_scale"
    healthy = number(base()[name].tobytes())
    expected = {
        "zero": 0.0,
        "inf": np.inf,
        "negative": -healthy,
        "scaled": healthy * np.float32(1000),
        "constant": 1.0,
        "reciprocal": np.float32(1) / healthy,
        "neighbour": number(base()[f"{E}.2.up_proj.input_scale"].tobytes()),
    }
    for fault, value in expected.items():
        [(where, data)] = changed(fault).items()
        assert where == name
        assert number(data) == value, fault
    assert np.isnan(number(changed("nan")[name]))
    assert 0 < number(changed("subnormal")[name]) < np.finfo(np.float32).tiny
    assert changed("missing") == {name: None}
    assert number(changed("scaled", value=0.5)[name]) == healthy * np.float32(0.5)
    assert changed("random-bits", seed=3) == changed("random-bits", seed=3) != changed("random-bits", seed=4)


@pytest.mark.parametrize("role", ["weight", "weight_scale", "weight_scale_2", "input_scale"])
def test_any_role_can_go_missing(role):
    assert changed("missing", role=role) == {f"{SLOT}.{role}": None}


def test_faults_in_divisors_mean_the_effective_multiplier():
    """compressed-tensors divides by what it stores: a dead expert shows as inf."""
    name = f"{SLOT}.input_global_scale"
    with np.errstate(all="ignore"):
        for fault, effective in (("zero", 0.0), ("inf", np.inf)):
            stored = number(inject_tensors(ct_base(), fault, **AT)[name].tobytes())
            assert np.float32(1) / stored == effective
        stored = number(inject_tensors(ct_base(), "subnormal", **AT)[name].tobytes())
        assert 0 < np.float32(1) / stored < np.finfo(np.float32).tiny
    before = number(ct_base()[name].tobytes())
    assert number(inject_tensors(ct_base(), "scaled", **AT, value=10)[name].tobytes()) == before / np.float32(10)


def test_a_pair_mismatch_is_in_the_weights_second_level():
    [(name, data)] = changed("pair-mismatch").items()
    assert name == f"{SLOT}.weight_scale_2"
    assert number(data) == number(base()[name].tobytes()) * np.float32(1.25)


def test_faults_in_packed_codes():
    codes = np.frombuffer(base()[f"{SLOT}.weight"].tobytes(), np.uint8)
    swapped = np.frombuffer(changed("nibble-swap")[f"{SLOT}.weight"], np.uint8)
    np.testing.assert_array_equal(swapped & 15, codes >> 4)
    np.testing.assert_array_equal(swapped >> 4, codes & 15)
    assert not any(changed("zero-weight")[f"{SLOT}.weight"])
    assert set(changed("duplicate-expert")) == {name for name in base() if f"{E}.1." in name}
    swap = changed("gate-up-swap")
    assert swap[f"{SLOT}.weight"] == base()[f"{E}.1.gate_proj.weight"].tobytes()
    assert swap[f"{E}.1.gate_proj.weight"] == base()[f"{SLOT}.weight"].tobytes()


@pytest.mark.parametrize(("fault", "byte"), [("block-nan", 0x7F), ("block-negative", None)])
def test_faults_in_one_block_scale(fault, byte):
    [(name, data)] = changed(fault, seed=5).items()
    before = base()[name].tobytes()
    [place] = [k for k in range(len(before)) if data[k] != before[k]]
    assert data[place] == (before[place] | 0x80 if byte is None else byte)


def test_an_exponent_cast_takes_the_value_for_the_byte():
    tensors = base()
    name = f"{SLOT}.weight_scale"
    tensors[name] = tensor(np.array([[120, 127], [128, 130]], np.uint8), "F8_E8M0")
    assert inject_tensors(tensors, "exponent-cast", **AT)[name].tobytes() == bytes([0, 1, 2, 8])
    with pytest.raises(InputError) as caught:
        inject_tensors(base(), "exponent-cast", **AT)
    assert caught.value.code == "fault.format"


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in E8M0_ONLY])
def test_a_folder_gets_the_same_fault_and_nothing_else(folder, tmp_path, fault):
    before = snapshot(folder)
    done = inject(folder, tmp_path / "out", fault, **AT, seed=1)
    assert snapshot(folder) == before
    copy = open_checkpoint(tmp_path / "out")
    assert copy.problems == []
    assert {name: item.tobytes() for name, item in copy.read_tensors().items()} == {
        name: item.tobytes() for name, item in inject_tensors(base(), fault, **AT, seed=1).items()
    }
    # The reference package opens every file of the copy.
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safetensors.safe_open(path, "numpy") as shard:
            assert shard.metadata() == {"format": "pt"}
    # A swap may bring equal scalars, which then do not differ.
    assert set(done.changed) | set(done.removed) >= set(changed(fault, seed=1))
    for file in done.linked:
        if file.endswith(".safetensors"):
            assert os.path.samefile(folder / file, tmp_path / "out" / file)
        else:
            assert not os.path.samefile(folder / file, tmp_path / "out" / file)
    assert len(done.rewritten) + len(done.linked) == len(list(folder.iterdir())) - (fault == "missing")
    assert sorted(os.listdir(tmp_path)) == ["base", "out"]


def test_a_missing_tensor_leaves_the_index_true(folder, tmp_path):
    inject(folder, tmp_path / "out", "missing", **AT)
    old = json.loads((folder / "model.safetensors.index.json").read_text())
    new = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(old["weight_map"]) - set(new["weight_map"]) == {f"{SLOT}.input_scale"}
    assert old["metadata"]["total_size"] - new["metadata"]["total_size"] == 4


def test_a_file_system_without_links_gets_copies(folder, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(copies.os, "link", refuse)
    inject(folder, tmp_path / "out", "zero", **AT)
    assert len(open_checkpoint(tmp_path / "out").tensors) == len(base())


def test_one_file_is_copied_with_its_configuration(folder, tmp_path):
    name = next(path.name for path in folder.glob("*.safetensors") if b"experts.1.up_proj.input" in path.read_bytes())
    inject(folder / name, tmp_path / "out", "zero", **AT)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "hf_quant_config.json", name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_injection_leaves_nothing(folder, tmp_path, monkeypatch, error):
    before = snapshot(folder)

    def stop(*_):
        raise error

    monkeypatch.setattr(copies, "_link", stop)
    # What the system refuses is said without its path; Ctrl-C goes its own way.
    with pytest.raises(CheckpointError if error is OSError else error) as caught:
        inject(folder, tmp_path / "out", "zero", **AT)
    assert getattr(caught.value, "code", "checkpoint.not-written") == "checkpoint.not-written"
    assert os.listdir(tmp_path) == ["base"]
    assert snapshot(folder) == before


@pytest.mark.parametrize("out", ["base", "base/inside", "."])
def test_the_copy_must_lie_elsewhere(folder, tmp_path, out):
    before = snapshot(folder)
    with pytest.raises(InputError) as caught:
        inject(folder, tmp_path / out, "zero", **AT)
    assert caught.value.code == "fault.out-is-source"
    assert snapshot(folder) == before


def test_a_damaged_shard_is_not_rewritten(folder, tmp_path):
    path = next(path for path in folder.glob("*.safetensors") if b"experts.1.up_proj.input" in path.read_bytes())
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError) as caught:
        inject(folder, tmp_path / "out", "zero", **AT)
    assert caught.value.code == "checkpoint.damaged"
    assert os.listdir(tmp_path) == ["base"]


@pytest.mark.parametrize(
    ("fault", "more", "code"),
    [
        ("typo", {}, "fault.unknown"),
        ("zero", {"layer": 1}, "fault.no-such-slot"),
        ("zero", {"expert": 4}, "fault.no-such-slot"),
        ("zero", {"expert": -1}, "fault.no-such-slot"),
        ("zero", {"projection": "sideways"}, "fault.no-such-slot"),
        ("zero", {"role": "weight"}, "fault.role"),
        ("nibble-swap", {"role": "input_scale"}, "fault.role"),
        ("scaled", {"value": float("nan")}, "fault.value"),
        ("scaled", {"value": 1e300}, "fault.value"),
        ("zero", {"value": 1.0}, "fault.value"),
        ("random-bits", {"seed": -1}, "fault.seed"),
        ("block-nan", {"seed": -5}, "fault.seed"),
        ("block-negative", {"seed": -(10**400)}, "fault.seed"),
        ("zero", {"seed": -1}, "fault.seed"),
        ("pair-mismatch", {"projection": "down"}, "fault.pair"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_makes_no_sense_is_refused(fault, more, code):
    with pytest.raises(InputError) as caught:
        inject_tensors(base(), fault, **{**AT, **more})
    assert caught.value.code == code
    assert "{" not in str(caught.value)


def test_a_tensor_that_is_missing_already_cannot_be_broken():
    with pytest.raises(InputError) as caught:
        inject_tensors(without(base(), f"{SLOT}.input_scale"), "zero", **AT)
    assert caught.value.code == "fault.absent"


def test_a_layout_that_is_not_read_in_full_is_refused():
    with pytest.raises(InputError) as caught:
        inject_tensors({"x": tensor(np.float32(1))}, "zero", **AT)
    assert caught.value.code == "fault.layout"
    assert CT_QUANT["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize(
    ("layout", "projections"), [("fused", "gate_up, down"), ("gpt-oss", "gate_up, down"), ("stacked", "gate, up, down")]
)
def test_a_slot_that_is_none_is_refused_with_the_layer_s_own_projections(layout, projections):
    """One tensor may hold gate and up; then neither has a slot of its own."""
    it = LAYOUTS[layout]
    for wrong in ({"expert": 99}, {"projection": "sideways"}):
        where = {**AT, "projection": "down", **wrong}
        with pytest.raises(InputError) as caught:
            inject_tensors(it.tensors(), "missing", config=it.config, hf_quant_config=it.quant, **where)
        assert caught.value.code == "fault.no-such-slot"
        assert caught.value.params["projections"] == projections
        assert f"projections: {projections}." in caught.value.why
