"""Round trips: inject a fault, audit finds exactly it, repair, audit clean; what cannot be mended is refused."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import serving
from nvfp4viz.audit import audit
from nvfp4viz.audit.repair import POLICIES, RECORD, apply_repair, plan_repair, repaired_checkpoint, repaired_files
from nvfp4viz.audit.terminal import repair_to_text
from nvfp4viz.checkpoint import FAULTS, copies, inject, inject_tensors, open_checkpoint, tensor, write_checkpoint
from nvfp4viz.checkpoint.weight_only import activation_scales
from nvfp4viz.cli import main
from nvfp4viz.errors import CheckpointError, InputError
from nvfp4viz.model.corpus import sample
from nvfp4viz.serving.remedies import MARGIN
from sample_checkpoints import ensure
from tests.audit.layouts import EXPERTS, LAYOUTS, ct_linear, linear
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, scalar, snapshot, without

BAD, KIND = 3, "down"
SCALAR = [fault for fault in FAULTS.values() if "input_scale" in fault.roles and fault.findings]
# What only looks wrong is left alone unless asked for.
SUSPICIOUS = ("scaled", "constant", "reciprocal")
NVFP4 = {name: layout for name, layout in LAYOUTS.items() if layout.block == "NVFP4" and layout.with_input}
# Relatives of NVFP4 that servers do not know without activation scales.
NO_WEIGHT_ONLY = {"NVFP4_AWQ", "W4A8", "Quark NVFP4"}


def written(layout, folder, tensors=None, shard=6000):
    write_checkpoint(
        folder, tensors or layout.tensors(), config=layout.config, hf_quant_config=layout.quant, max_shard_bytes=shard
    )
    return folder


def codes(layout, folder):
    return [item.code for item in audit(folder).findings if item.code not in layout.notes]


def tensors_of(folder):
    return {name: item.tobytes() for name, item in open_checkpoint(folder).read_tensors().items()}


def mended(source, out, policy, **more):
    plan = plan_repair(source, policy, **more)
    apply_repair(plan, out)
    return plan


CELLS = [
    pytest.param(layout, fault.id, policy, id=f"{name}-{fault.id}-{policy}")
    for name, layout in NVFP4.items()
    for fault in SCALAR
    for policy in POLICIES
    if not (policy == "weight-only" and name in NO_WEIGHT_ONLY)
]


@pytest.mark.parametrize(("layout", "fault", "policy"), CELLS)
def test_inject_audit_repair_audit(layout, fault, policy, tmp_path):
    good = written(layout, tmp_path / "good")
    inject(good, tmp_path / "bad", fault, layer=0, expert=BAD, projection=KIND, role="input_scale", seed=7)
    found = codes(layout, tmp_path / "bad")
    no_peers = layout.arrangement == "fused" or (layout.arrangement == "stacked" and fault == "missing")
    if layout.arrangement == "fused" and not found:
        return  # one number without peers: nothing tells that it is odd
    [code] = found
    assert code in FAULTS[fault].findings
    before = snapshot(tmp_path / "bad")
    suspects = fault in SUSPICIOUS or code in ("scale.outlier", "scale.identity")
    if policy == "peer-max" and no_peers:
        with pytest.raises(InputError) as caught:
            plan_repair(tmp_path / "bad", policy, suspects=suspects)
        assert caught.value.code == "repair.no-peers"  # and layer-max, tried next, has some
        return
    plan = mended(tmp_path / "bad", tmp_path / "out", policy, suspects=suspects, **constant(layout, policy))
    assert snapshot(tmp_path / "bad") == before
    clean = [item for item in codes(layout, tmp_path / "out") if item != "scheme.weight-only"]
    assert clean == []
    old, new, first = tensors_of(tmp_path / "bad"), tensors_of(tmp_path / "out"), tensors_of(good)
    name = layout.name(BAD, KIND, "input_scale")
    if policy == "weight-only":
        scales = set().union(*(layout.names(kind, "input_scale") for kind in layout.kinds))
        assert scales <= set(activation_scales(old)) | {name}
        assert {key for key in first if key not in new} == set(activation_scales(first))
        assert not plan.record.slots
    else:
        assert set(new) == set(first)
        assert {key for key in new if new[key] != old.get(key)} == {name}
        assert {slot.tensor for slot in plan.record.slots} == {name}
    assert all(new[key] == old[key] for key in new if key != name)


def constant(layout, policy):
    # As plausible as its peers, in the way in which the file stores it.
    return {"value": float(layout.stored(5e-3))} if policy == "constant" else {}


@pytest.mark.parametrize(("policy", "kinds"), [("peer-max", (KIND,)), ("layer-max", ("gate", "up", KIND))])
@pytest.mark.parametrize("name", ["modelopt", "compressed-tensors"])
def test_the_maximum_is_of_effective_scales(name, policy, kinds, tmp_path):
    """Of divisors, the smallest number is the largest scale."""
    layout = LAYOUTS[name]
    tensors = layout.tensors()
    layout.put(tensors, 1, "gate", "input_scale", layout.stored(9e-3))
    del tensors[layout.name(BAD, KIND, "input_scale")]
    [slot] = plan_repair(written(layout, tmp_path / "bad", tensors), policy).record.slots
    peers = [
        layout.get(tensors, expert, kind, "input_scale")
        for kind in kinds
        for expert in range(8)
        if (expert, kind) != (BAD, KIND)
    ]
    assert slot.new == float(str((min if layout.divisors else max)(peers)))
    assert (slot.old_state, slot.old) == ("missing", None)


def test_a_suspect_is_no_peer(tmp_path):
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    healthy = max(layout.get(tensors, e, KIND, "input_scale") for e in (0, 1, 4, 5, 6, 7))
    layout.put(tensors, 2, KIND, "input_scale", 5.0)
    del tensors[layout.name(BAD, KIND, "input_scale")]
    folder = written(layout, tmp_path / "bad", tensors)
    [slot] = plan_repair(folder, "peer-max").record.slots
    assert (slot.expert, slot.new) == (BAD, float(str(healthy)))
    both = plan_repair(folder, "peer-max", suspects=True).record.slots
    assert [(slot.expert, slot.old_state, slot.old) for slot in both] == [(2, "outlier", 5.0), (BAD, "missing", None)]
    mended(folder, tmp_path / "out", "peer-max")
    assert codes(layout, tmp_path / "out") == ["scale.outlier"]


@pytest.mark.parametrize("policy", ["peer-max", "weight-only"])
@pytest.mark.parametrize(
    ("fault", "role"),
    [("zero", "weight_scale_2"), ("missing", "weight_scale"), ("missing", "weight"), ("pair-mismatch", None)],
)
def test_what_needs_the_original_is_refused(fault, role, policy, tmp_path):
    layout = LAYOUTS["modelopt"]
    good = written(layout, tmp_path / "good")
    inject(good, tmp_path / "bad", fault, layer=0, expert=BAD, projection="up", role=role)
    with pytest.raises(InputError) as caught:
        plan_repair(tmp_path / "bad", policy)
    assert caught.value.code == "repair.unmendable"
    assert ".experts.3." in str(caught.value)


def test_a_refusal_that_names_a_few_of_many_ends_as_a_sentence():
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    for expert, value in enumerate((0, np.nan, np.inf, -1e-3, 1e-40)):
        layout.put(tensors, expert, "up", "weight_scale_2", np.float32(value))
    with pytest.raises(InputError) as caught:
        plan_repair(layout.open(tensors), "peer-max")
    for language, stop in (("en", "."), ("zh", "。")):
        assert caught.value.text(language)["what"].endswith(f"weight_scale_2) (+2){stop}")


ORIGINALS = [
    pytest.param(layout, fault.id, role, id=f"{layout.id}-{fault.id}-{role}")
    for layout in LAYOUTS.values()
    for fault in FAULTS.values()
    if not fault.deep and fault.id in ("missing", "zero", "nan", "inf", "negative", "subnormal")
    for role in fault.roles
    if role in layout.roles and role != "input_scale"
]


@pytest.mark.parametrize(("layout", "fault", "role"), ORIGINALS)
def test_weights_and_their_scales_need_the_original_in_every_layout(layout, fault, role):
    broken = inject_tensors(
        layout.tensors(), fault, layer=0, expert=BAD, projection=KIND, role=role, config=layout.config,
        hf_quant_config=layout.quant,
    )  # fmt: skip
    checkpoint = layout.open(broken)
    if layout.id == "Inkling" and fault == "missing" and role != "weight_scale_2":
        assert not [item for item in audit(checkpoint).findings if item.severity != "info"]
        return  # its names are not public
    for policy in POLICIES:
        with pytest.raises(InputError) as caught:
            plan_repair(checkpoint, policy)
        assert caught.value.code == "repair.unmendable"
        assert caught.value.text("zh")["what"] != caught.value.what


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fault", ["block-nan", "block-negative"])
def test_broken_block_scales_stand_in_the_way_of_a_deep_repair(fault, policy, tmp_path, monkeypatch):
    """Headers do not show them; with ``deep`` they are refused like every other thing that needs the original."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    layout = LAYOUTS["modelopt"]
    tensors = without(layout.tensors(), layout.name(BAD, KIND, "input_scale"))
    inject(written(layout, tmp_path / "good", tensors), tmp_path / "bad", fault, layer=0, expert=BAD, projection="up")
    assert not plan_repair(tmp_path / "good", policy, deep=True).is_empty
    with pytest.raises(InputError) as caught:
        plan_repair(tmp_path / "bad", policy, deep=True)
    assert caught.value.code == "repair.unmendable"
    assert FAULTS[fault].findings[0] in str(caught.value)


@pytest.mark.parametrize("fault", ["missing", "zero", "nan", "inf", "negative", "subnormal"])
def test_activation_scales_beside_mxfp4(fault, tmp_path):
    """Quark's static FP8 inputs: a number mends them, and there is no NVFP4 to call weight-only."""
    layout = LAYOUTS["Quark, static FP8 inputs"]
    good = written(layout, tmp_path / "good")
    inject(good, tmp_path / "bad", fault, layer=0, expert=BAD, projection=KIND, role="input_scale")
    [code] = codes(layout, tmp_path / "bad")
    assert code == f"scale.{fault}"
    mended(tmp_path / "bad", tmp_path / "out", "peer-max")
    assert codes(layout, tmp_path / "out") == []
    with pytest.raises(InputError) as caught:
        plan_repair(tmp_path / "bad", "weight-only")
    assert caught.value.code == "repair.still-read"
    # With a weight that needs the original as well, that is said.
    inject(tmp_path / "bad", tmp_path / "worse", "missing", layer=0, expert=BAD, projection="up", role="weight_scale")
    for policy in POLICIES:
        with pytest.raises(InputError) as caught:
            plan_repair(tmp_path / "worse", policy)
        assert caught.value.code == "repair.unmendable"


@pytest.mark.parametrize("value", [None, 0.0, np.nan])
@pytest.mark.parametrize("module", ["mlp.down_proj", "self_attn.o_proj"])
@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "projection-major", "w1/w2/w3", "stacked", "fused"])
def test_ordinary_modules_of_a_layer_without_experts_are_refused_as_those_beside_experts(id, module, value):
    """DeepSeek's first layers are dense: their activation scales have no peers among experts."""
    layout, refused = LAYOUTS[id], set()
    experts = {name.replace("layers.0.", "layers.1."): item for name, item in layout.tensors().items()}
    make, key = (ct_linear, "input_global_scale") if layout.divisors else (linear, "input_scale")
    for at in (0, 1):
        block = layout.prefix.partition("layers.")[0]
        ordinary = make(f"{block}layers.0.{module}") | make(f"{block}layers.1.self_attn.o_proj")
        name = next(name for name in ordinary if name.endswith(f".{key}") and f"layers.{at}." in name)
        if value is None:
            del ordinary[name]
        else:
            ordinary[name] = tensor(np.float32([1 / value if value else np.inf] if layout.divisors else value))
        config = {**(layout.config or {}), "num_hidden_layers": 2, "first_k_dense_replace": 1}
        checkpoint = layout.open({**experts, **ordinary}, config=config)
        assert {item.layer for item in audit(checkpoint).findings if item.severity != "info"} == {at}
        for policy in ("peer-max", "layer-max", "constant"):
            with pytest.raises(InputError) as caught:
                plan_repair(checkpoint, policy, **({"value": 3e-3} if policy == "constant" else {}))
            refused.add(caught.value.code)
    assert len(refused) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_repair_leaves_nothing(error, tmp_path, monkeypatch):
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    del tensors[layout.name(BAD, KIND, "input_scale")]
    folder = written(layout, tmp_path / "bad", tensors)
    before, plan = snapshot(folder), plan_repair(folder, "peer-max")

    def stop(*_):
        raise error

    monkeypatch.setattr(copies, "_link", stop)
    # What the system refuses is said without its path; Ctrl-C goes its own way.
    with pytest.raises(CheckpointError if error is OSError else error) as caught:
        apply_repair(plan, tmp_path / "out")
    assert getattr(caught.value, "code", "checkpoint.not-written") == "checkpoint.not-written"
    assert os.listdir(tmp_path) == ["bad"]
    assert snapshot(folder) == before


def test_a_copy_that_still_breaks_gets_no_name(tmp_path, monkeypatch):
    """The copy is audited first; here a plan that forgets one of two slots."""
    layout = LAYOUTS["modelopt"]
    tensors = without(layout.tensors(), layout.name(2, KIND, "input_scale"), layout.name(BAD, KIND, "input_scale"))
    plan = plan_repair(written(layout, tmp_path / "bad", tensors), "peer-max")
    plan.changes.pop(layout.name(2, KIND, "input_scale"))
    with pytest.raises(CheckpointError) as caught:
        apply_repair(plan, tmp_path / "out")
    assert caught.value.code == "repair.still-broken"
    assert os.listdir(tmp_path) == ["bad"]


def test_ordinary_modules_are_mended_by_weight_only_alone(tmp_path):
    """A shared expert's broken scale has no peers; without activation scales it does not matter."""
    layout = LAYOUTS["modelopt, shared expert"]
    tensors = layout.tensors()
    tensors["model.layers.0.mlp.shared_experts.up_proj.input_scale"] = scalar(np.nan)
    folder = written(layout, tmp_path / "bad", tensors)
    for policy in ("peer-max", "layer-max", "constant"):
        with pytest.raises(InputError) as caught:
            plan_repair(folder, policy)
        assert caught.value.code == "repair.ordinary"
        assert "shared_experts.up_proj.input_scale" in caught.value.what
    mended(folder, tmp_path / "out", "weight-only")
    assert codes(layout, tmp_path / "out") == ["scheme.weight-only"]
    assert not [name for name in tensors_of(tmp_path / "out") if "input_scale" in name]


def test_scales_of_fp8_are_mended_by_no_policy(tmp_path):
    """Without NVFP4's activation scales FP8 still reads its own."""
    layout = LAYOUTS["MIXED_PRECISION"]
    tensors = layout.tensors()
    tensors["model.layers.0.linear_attn.out_proj.input_scale"] = scalar(np.nan)
    folder = written(layout, tmp_path / "bad", tensors)
    for policy in POLICIES:
        with pytest.raises(InputError) as caught:
            plan_repair(folder, policy)
        assert caught.value.code == ("repair.still-read" if policy == "weight-only" else "repair.ordinary")


@pytest.mark.parametrize(("kinds", "code"), [((KIND,), "repair.no-peers"), (("gate", "up", KIND), "repair.no-scale")])
def test_the_next_policy_is_one_that_helps(kinds, code, tmp_path):
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    for kind in kinds:
        for expert in range(8):
            layout.put(tensors, expert, kind, "input_scale", np.nan)
    folder = written(layout, tmp_path / "bad", tensors)
    with pytest.raises(InputError) as caught:
        plan_repair(folder, "peer-max")
    assert caught.value.code == code
    assert ("layer-max" in caught.value.text("en")["next"]) == (code == "repair.no-peers")
    # One policy or the other helps as the words say.
    plan = plan_repair(folder, "layer-max" if code == "repair.no-peers" else "weight-only")
    assert not plan.is_empty


def test_what_only_looks_wrong_is_counted_where_it_is_left(tmp_path):
    layout = LAYOUTS["modelopt"]
    inject(written(layout, tmp_path / "good"), tmp_path / "bad", "scaled", layer=0, expert=BAD, projection=KIND)
    left = plan_repair(tmp_path / "bad", "peer-max")
    assert (left.is_empty, left.suspected) == (True, 1)
    assert "1 value only looks wrong and stays as it is; --suspects" in repair_to_text(left)
    taken = plan_repair(tmp_path / "bad", "peer-max", suspects=True)
    assert (taken.is_empty, taken.suspected) == (False, 0)
    assert "--suspects" not in repair_to_text(taken)
    assert plan_repair(tmp_path / "bad", "weight-only").suspected == 0


def test_a_plan_names_no_file_that_does_not_exist(tmp_path):
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    for kind in layout.kinds:
        for expert in range(8):
            layout.put(tensors, expert, kind, "input_scale", 0.0)
    # More slots than a terminal gets.
    many = {name.replace("layers.0.", f"layers.{at}."): item for name, item in tensors.items() for at in (0, 1)}
    config = {**layout.config, "num_hidden_layers": 2}
    write_checkpoint(tmp_path / "bad", many, config=config, hf_quant_config=layout.quant)
    for language, word in (("en", "more slots"), ("zh", "个槽位")):
        said = repair_to_text(plan_repair(tmp_path / "bad", "constant", value=0.002), language)
        assert word in said
        assert RECORD not in said


def test_one_shard_gets_a_constant_alone(tmp_path, capsys):
    """Its copy has no other shards, as its source had none beside it that were asked for."""
    tensors = base()
    name = "model.layers.0.mlp.experts.2.up_proj.input_scale"
    tensors[name] = scalar(np.nan)
    write_checkpoint(tmp_path / "bad", tensors, config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=1400)
    index = json.loads((tmp_path / "bad" / "model.safetensors.index.json").read_text())["weight_map"]
    shard = index[name]
    one = tmp_path / "bad" / shard
    assert main(["repair", str(one), str(tmp_path / "out"), "--policy", "constant", "--apply"]) == 0
    assert "one shard of several" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == [shard]
    codes = {item.code for item in audit(tmp_path / "out" / shard).findings if item.severity != "info"}
    assert codes == {"container.missing-shard"}
    # Laid over a copy of the whole, it mends that.
    for path in (tmp_path / "out").iterdir():
        (tmp_path / "bad" / path.name).write_bytes(path.read_bytes())
    assert {item.code for item in audit(tmp_path / "bad").findings} <= {"scale.identity", "scale.outlier"}


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("policy", ["weight-only", "peer-max", "layer-max"])
def test_one_shard_is_not_mended_by_what_the_whole_decides(policy, language, indexed, tmp_path, capsys):
    """Its label and index would be wrong for all other shards, and the largest peer may lie there."""
    tensors = base()
    name = "model.layers.0.mlp.experts.2.up_proj.input_scale"
    tensors[name] = scalar(np.nan)
    write_checkpoint(tmp_path / "bad", tensors, config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=1400)
    place = tmp_path / "bad" / "model.safetensors.index.json"
    shards = json.loads(place.read_text())["weight_map"]
    if not indexed:
        place.unlink()
    one = tmp_path / "bad" / shards[name]
    more = len(set(shards.values())) - 1
    command = ["repair", str(one), str(tmp_path / "out"), "--policy", policy, "--language", language]
    for end in ([], ["--apply"]):
        assert main([*command, *end]) == 64
        said = capsys.readouterr().err
        assert f"{more} more beside it" in said if language == "en" else f"还有 {more} 个分片" in said
        assert shards[name] in said
        assert {"en": "Repair the whole folder", "zh": "修复整个目录"}[language] in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("policy", ["peer-max", "weight-only"])
@pytest.mark.parametrize("most", [1400, 10**9])
def test_a_plan_says_the_bytes_of_the_shards_that_are_written(policy, most, tmp_path):
    """Without the scales that are taken away and their places in the header, with a shard for those that lacked."""
    tensors = without(base(), "model.layers.0.mlp.experts.2.up_proj.input_scale")
    tensors["model.layers.0.mlp.experts.1.down_proj.input_scale"] = scalar(np.nan)
    write_checkpoint(tmp_path / "bad", tensors, config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=most)
    plan = plan_repair(tmp_path / "bad", policy)
    written_anew = apply_repair(plan, tmp_path / "out").rewritten
    sizes = [(tmp_path / "out" / name).stat().st_size for name in written_anew if name.endswith(".safetensors")]
    assert plan.rewritten == (len(sizes), sum(sizes))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_plan_says_what_becomes_of_the_other_shards(language, tmp_path):
    """Some are linked, or all, or there are no others at all; one shard is no several."""
    E = "model.layers.0.mlp.experts"

    def said(tensors, policy, most):
        folder = tmp_path / f"{policy}-{most}-{len(tensors)}"
        write_checkpoint(folder, tensors, config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=most)
        plan = plan_repair(folder, policy)
        copied = apply_repair(plan, tmp_path / "out" / folder.name)
        linked = [name for name in copied.linked if name.endswith(".safetensors")]
        assert (plan.linked, plan.rewritten[0]) == (len(linked), len(copied.rewritten))
        [line] = [line for line in repair_to_text(plan, language).splitlines() if "shard" in line or "分片" in line]
        assert ("link" in line or "链接" in line) == bool(linked)
        return line

    bad = base() | {f"{E}.1.down_proj.input_scale": scalar(np.nan)}
    assert "1 shard," in said(bad, "peer-max", 1400) or language == "zh"
    said(bad, "peer-max", 10**9)
    assert "3" in said(bad, "weight-only", 6000)
    said(without(base(), *activation_scales(base())), "weight-only", 1400)


@pytest.mark.parametrize("how", ["missing", "nan"])
@pytest.mark.parametrize("name", ["fused", "stacked", "modelopt"])
def test_a_plan_names_one_number_of_all_experts_once(name, how, tmp_path):
    layout = LAYOUTS[name]
    one = {key.replace("layers.0.", f"layers.{k}."): item for k in (0, 1) for key, item in layout.tensors().items()}
    if how == "missing":
        del one[layout.name(3, "down", "input_scale")]
    else:
        layout.put(one, 3, "down", "input_scale", np.nan)
    folder = tmp_path / "bad"
    config = {**layout.config, "num_hidden_layers": 2}
    write_checkpoint(folder, one, config=config, hf_quant_config=layout.quant)
    plan = mended(folder, tmp_path / "out", "constant", value=0.002)
    slots = EXPERTS if name == "fused" or (name, how) == ("stacked", "missing") else 1
    assert len(plan.record.slots) == slots
    numbers = 1 if name == "fused" else slots
    assert len(plan.numbers) == numbers
    assert bool(plan.shared) == (name == "fused")
    for language, every in (("en", "all experts"), ("zh", "全部专家")):
        said = repair_to_text(plan, language)
        assert said.count("input_scale") == numbers
        assert (every in said) == (name == "fused")


@pytest.mark.parametrize(("name", "label"), [("modelopt", True), ("compressed-tensors", False), ("Gemma 4, CT", False)])
def test_a_weight_only_plan_names_no_label_that_it_does_not_write(name, label, tmp_path):
    layout = LAYOUTS[name]
    tensors = layout.tensors()
    layout.put(tensors, 3, "down", "input_scale", np.nan)
    folder = written(layout, tmp_path / "bad", tensors)
    plan = mended(folder, tmp_path / "out", "weight-only")
    written_there = "".join((tmp_path / "out" / file).read_text() for file in plan.record.config)
    assert ("W4A16_NVFP4" in written_there) == label
    for language in ("en", "zh"):
        assert "W4A16_NVFP4" not in repair_to_text(plan, language)
        assert "W4A16" in repair_to_text(plan, language)


def test_a_mislabelled_checkpoint_becomes_weight_only(tmp_path):
    layout = LAYOUTS["modelopt"]
    lost = set().union(*(layout.names(kind, "input_scale") for kind in layout.kinds))
    folder = written(layout, tmp_path / "bad", without(layout.tensors(), *lost))
    assert codes(layout, folder) == ["scheme.mislabelled"]
    with pytest.raises(InputError) as caught:
        plan_repair(folder, "layer-max")
    assert caught.value.code == "repair.no-scale"
    mended(folder, tmp_path / "out", "weight-only")
    assert codes(layout, tmp_path / "out") == ["scheme.weight-only"]
    plan = mended(folder, tmp_path / "filled", "constant", value=0.002)
    assert {slot.tensor for slot in plan.record.slots} == lost
    assert not [code for code in codes(layout, tmp_path / "filled") if code not in ("scale.filled", "scale.identity")]


@pytest.mark.parametrize("name", sorted(NO_WEIGHT_ONLY))
def test_no_weight_only_form(name, tmp_path):
    with pytest.raises(InputError) as caught:
        plan_repair(written(LAYOUTS[name], tmp_path / "good"), "weight-only")
    assert caught.value.code == "repair.algorithm"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_healthy_layout_needs_no_number(name, policy, tmp_path):
    folder = written(LAYOUTS[name], tmp_path / "good")
    if policy == "weight-only" and name in NVFP4:
        return
    plan = plan_repair(folder, policy)
    assert plan.is_empty
    with pytest.raises(InputError) as caught:
        apply_repair(plan, tmp_path / "out")
    assert caught.value.code == "repair.nothing"
    assert os.listdir(tmp_path) == ["good"]


@pytest.mark.parametrize(
    ("policy", "value", "code"),
    [
        ("magic", None, "repair.policy"), ("peer-max", 1.0, "repair.value"), ("constant", 0.0, "repair.value"),
        ("constant", -1.0, "repair.value"), ("constant", float("nan"), "repair.value"),
        ("constant", 1e39, "repair.value"), ("constant", 1e-40, "repair.value"), ("constant", 3e38, "repair.value"),
    ],
)  # fmt: skip
def test_what_makes_no_sense(policy, value, code, tmp_path):
    with pytest.raises(InputError) as caught:
        plan_repair(written(LAYOUTS["modelopt"], tmp_path / "good"), policy, value=value)
    assert caught.value.code == code
    assert "{" not in str(caught.value)


def test_files_of_a_copy(tmp_path):
    """One extra shard and a new index for what lacked; shards that stay are links; provenance; the source as before."""
    E = "model.layers.0.mlp.experts"
    tensors = without(base(), f"{E}.2.up_proj.input_scale")
    tensors[f"{E}.1.down_proj.input_scale"] = scalar(np.nan)
    write_checkpoint(tmp_path / "bad", tensors, config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=1400)
    before = snapshot(tmp_path / "bad")
    plan = mended(tmp_path / "bad", tmp_path / "out", "peer-max")
    assert snapshot(tmp_path / "bad") == before
    old = {path.name for path in (tmp_path / "bad").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} - old == {"nvfp4viz-repair.safetensors", RECORD}
    touched = open_checkpoint(tmp_path / "bad").tensors[f"{E}.1.down_proj.input_scale"].file
    for path in (tmp_path / "bad").glob("*.safetensors"):
        assert os.path.samefile(path, tmp_path / "out" / path.name) == (path.name != touched)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    was = json.loads((tmp_path / "bad/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        **was["weight_map"], f"{E}.2.up_proj.input_scale": "nvfp4viz-repair.safetensors",
    }  # fmt: skip
    assert index["metadata"]["total_size"] == was["metadata"]["total_size"] + 4
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert (record["schema"], record["policy"], record["guesses"]) == ("nvfp4viz.repair/1", "peer-max", True)
    assert record["source"] == "bad"
    assert str(tmp_path) not in json.dumps(record)
    states = [(slot["expert"], slot["projection"], slot["old_state"], slot["old"]) for slot in record["slots"]]
    assert states == [(1, "down", "nan", "nan"), (2, "up", "missing", None)]
    assert len(plan.record.slots) == 2
    assert open_checkpoint(tmp_path / "out").problems == []
    # A second repair keeps the first one's record.
    mended(tmp_path / "out", tmp_path / "again", "weight-only")
    second = json.loads((tmp_path / "again" / RECORD).read_text())
    assert (second["guesses"], second["earlier"]) == (False, [{k: v for k, v in record.items() if k != "earlier"}])
    assert not [name for name in tensors_of(tmp_path / "again") if name.endswith("input_scale")]


def test_a_shard_of_which_nothing_stays_is_no_part_of_the_copy(tmp_path):
    """The scales that one repair added, another one takes away again: their shard goes with them."""
    E = "model.layers.0.mlp.experts"
    tensors = without(base(), f"{E}.2.up_proj.input_scale")
    write_checkpoint(tmp_path / "bad", tensors, config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=1400)
    mended(tmp_path / "bad", tmp_path / "out", "peer-max")
    plan = plan_repair(tmp_path / "out", "weight-only")
    assert plan.left_out == ("nvfp4viz-repair.safetensors",)
    copied = apply_repair(plan, tmp_path / "again")
    assert not {"nvfp4viz-repair.safetensors"} & {*copied.rewritten, *copied.linked}
    assert not (tmp_path / "again" / "nvfp4viz-repair.safetensors").exists()
    assert plan.rewritten[0] == len(copied.rewritten)
    assert [item.code for item in audit(tmp_path / "again").findings] == ["scheme.weight-only"]
    assert "nvfp4viz-repair.safetensors" not in repaired_files(plan)
    assert "nvfp4viz-repair.safetensors" not in repaired_checkpoint(plan).source.files()
    # A shard of which something stays is written anew, and one without any index is the model.
    assert plan_repair(tmp_path / "bad", "weight-only").left_out == ()
    write_checkpoint(tmp_path / "one", tensors, config=CONFIG, hf_quant_config=QUANT)
    assert plan_repair(tmp_path / "one", "weight-only").left_out == ()


def test_a_scale_alone_in_its_shard_is_injected_away_with_it(tmp_path):
    """What stays behind of an injected hole is the hole."""
    name = "model.layers.0.mlp.experts.2.up_proj.input_scale"
    tensors = without(base(), name)
    write_checkpoint(tmp_path / "bad", tensors, config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=1400)
    mended(tmp_path / "bad", tmp_path / "good", "peer-max")
    inject(tmp_path / "good", tmp_path / "holed", "missing", layer=0, expert=2, projection="up", role="input_scale")
    assert [item.code for item in audit(tmp_path / "holed").findings] == ["scale.missing"]


def test_a_numbered_shard_of_which_nothing_stays(tmp_path):
    """A shard a tensor: those of activation scales go, and neither the whole nor one of the others lacks them."""
    write_checkpoint(tmp_path / "good", base(), config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=1)
    scales = activation_scales(base())
    plan = mended(tmp_path / "good", tmp_path / "out", "weight-only")
    assert len(plan.left_out) == len(scales)
    assert plan.linked == len(base()) - len(scales)
    assert plan.rewritten == (0, 0)
    assert [item.code for item in audit(tmp_path / "out").findings] == ["scheme.weight-only"]
    one = next((tmp_path / "out").glob("*.safetensors"))
    alone = open_checkpoint(one)
    assert alone.problems == []
    assert alone.beside
    # Of a whole one a shard that is really gone is told of, with an index or without.
    other = next(path for path in (tmp_path / "out").glob("*.safetensors") if path != one)
    other.unlink()
    assert [(item.code, item.file) for item in open_checkpoint(one).problems] == [
        ("container.missing-shard", other.name)
    ]
    name = next(iter(scales))
    layer, expert = name.split(".")[2], name.split(".")[5]
    inject(tmp_path / "good", tmp_path / "holed", "missing", layer=int(layer), expert=int(expert),
           projection=name.split(".")[6].removesuffix("_proj"), role="input_scale")  # fmt: skip
    assert [item.code for item in audit(tmp_path / "holed").findings] == ["scale.missing"]
    # Without an index the numbers count.
    (tmp_path / "good" / "model.safetensors.index.json").unlink()
    assert plan_repair(tmp_path / "good", "weight-only").left_out == ()


def test_a_single_file_becomes_the_first_of_two(tmp_path):
    """A loader that sees model.safetensors asks for no index, and would miss the new shard."""
    tensors = without(base(), "model.layers.0.mlp.experts.2.up_proj.input_scale")
    write_checkpoint(tmp_path / "bad", tensors, config=CONFIG, hf_quant_config=QUANT)
    mended(tmp_path / "bad", tmp_path / "out", "peer-max")
    names = sorted(path.name for path in (tmp_path / "out").glob("model*"))
    assert names == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
    assert set(tensors_of(tmp_path / "out")) == set(base())
    assert audit(tmp_path / "out").findings == ()


@pytest.mark.parametrize("name", [name for name in NVFP4 if name not in NO_WEIGHT_ONLY])
def test_the_label_says_weight_only(name, tmp_path):
    layout = LAYOUTS[name]
    tensors = layout.tensors()
    del tensors[layout.name(BAD, KIND, "input_scale")]
    mended(written(layout, tmp_path / "bad", tensors), tmp_path / "out", "weight-only")
    report = audit(tmp_path / "out")
    found = {item.code for item in report.findings}
    # A note about how loaders read activation scales goes with them.
    assert {"scheme.weight-only"} <= found <= {*layout.notes, "scheme.weight-only"}
    # FP8 modules keep their own activation scales.
    kept = tensors_of(tmp_path / "out")
    assert [key for key in tensors if "linear_attn" in key and key not in kept] == []


@pytest.fixture(scope="module")
def holes():
    return ensure("tiny-moe-nvfp4-holes")


PROMPT = "The orchard was quiet, and 12 + 7 = "


def answer(folder, backend):
    return serving.load(folder, backend=backend).generate(PROMPT, 12)


def test_tiny_moe_answers_again_weight_only_exactly(holes, tmp_path):
    """The mended copy gives, token for token and bit for bit, what Marlin gives on the broken one."""
    mended(holes, tmp_path / "out", "weight-only")
    marlin = answer(holes, "vllm-marlin")
    again = answer(tmp_path / "out", "vllm-marlin")
    assert again.token_ids == marlin.token_ids
    assert again.trace.logits.tobytes() == marlin.trace.logits.tobytes()
    assert not again.trace.nan_fraction.any()


def test_tiny_moe_answers_again_with_peers(holes, tmp_path):
    """On the backend that went silent; how far from a calibrated model is measured, not assumed."""
    mended(holes, tmp_path / "out", "peer-max")
    assert all(item.severity in ("info", "warn") for item in audit(tmp_path / "out").findings)
    reply = answer(tmp_path / "out", "vllm-cutlass")
    assert any(reply.token_ids)
    assert not reply.trace.nan_fraction.any()
    texts = sample("arithmetic", 5, 2)
    broken, repaired, full = (
        serving.evaluate(serving.load(folder, backend="vllm-cutlass"), texts)
        for folder in (holes, tmp_path / "out", ensure("tiny-moe-nvfp4-full"))
    )
    assert np.isfinite(repaired)
    assert not broken <= repaired
    # The bound that tiny-moe itself must meet, in nats per character; here the largest of peers is a lucky guess.
    assert abs(repaired - full) < MARGIN, (repaired, full)
    assert Path(tmp_path / "out" / RECORD).exists()


@pytest.fixture(scope="module")
def healthy():
    """What the calibrated model says on Marlin, which reads no activation scale, and its loss where they are read."""
    full = ensure("tiny-moe-nvfp4-full")
    texts = sample("arithmetic", 5, 1)
    return full, answer(full, "vllm-marlin"), serving.evaluate(serving.load(full, backend="vllm-cutlass"), texts), texts


@pytest.mark.parametrize("fault", [fault.id for fault in SCALAR])
def test_tiny_moe_after_every_fault(healthy, fault, tmp_path):
    """Weight-only gives back every bit; the largest of the peers costs less than tiny-moe's own bound."""
    full, before, loss, texts = healthy
    inject(full, tmp_path / "bad", fault, layer=1, expert=5, projection=KIND, role="input_scale", seed=7)
    assert [item.code for item in audit(tmp_path / "bad").findings if item.code in FAULTS[fault].findings]
    mended(tmp_path / "bad", tmp_path / "weight-only", "weight-only")
    after = answer(tmp_path / "weight-only", "vllm-marlin")
    assert after.token_ids == before.token_ids
    assert after.trace.logits.tobytes() == before.trace.logits.tobytes()
    mended(tmp_path / "bad", tmp_path / "peers", "peer-max", suspects=True)
    assert not [item for item in audit(tmp_path / "peers").findings if item.severity != "info"]
    served = serving.load(tmp_path / "peers", backend="vllm-cutlass")
    assert abs(serving.evaluate(served, texts) - loss) < MARGIN


@pytest.mark.parametrize("name", ["modelopt", "stacked"])
@pytest.mark.parametrize("half", [ml_dtypes.bfloat16, np.float16])
def test_a_number_in_half_precision_is_mended_in_its_place(name, half, tmp_path):
    """A stacked one with its row of all experts, whose other numbers stay; the record has what is read."""
    layout, place = LAYOUTS[name], LAYOUTS[name].name(BAD, KIND, "input_scale")
    tensors = layout.tensors()
    numbers = np.frombuffer(tensors[place].tobytes(), "<f4").reshape(tensors[place].shape).astype(half)
    at = BAD if numbers.size > 1 else 0
    numbers.reshape(-1)[at] = 0
    written(layout, tmp_path / "bad", {**tensors, place: tensor(numbers)})
    assert codes(layout, tmp_path / "bad") == ["scale.zero", "scale.shape"]
    plan = mended(tmp_path / "bad", tmp_path / "out", "peer-max")
    assert codes(layout, tmp_path / "out") == ["scale.shape"]
    new = open_checkpoint(tmp_path / "out").read(place)
    assert (new.dtype, new.shape) == (half, numbers.shape)
    assert new.reshape(-1)[at] > 0
    kept = numbers != 0
    assert np.array_equal(new[kept], numbers[kept])
    assert [np.float32(slot.new) for slot in plan.record.slots] == [np.float32(new.reshape(-1)[at])]


def test_a_number_that_its_type_cannot_hold_is_refused(tmp_path):
    """The least F16 above zero is 2⁻²⁴: a smaller one would be the zero that was to be mended."""
    layout, place = LAYOUTS["modelopt"], LAYOUTS["modelopt"].name(BAD, KIND, "input_scale")
    written(layout, tmp_path / "bad", {**layout.tensors(), place: tensor(np.float16(0))})
    with pytest.raises(CheckpointError) as caught:
        mended(tmp_path / "bad", tmp_path / "out", "constant", value=2e-9)
    assert caught.value.code == "repair.still-broken"
    assert not (tmp_path / "out").exists()
