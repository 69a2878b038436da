"""The mended copy in memory is the one that would be written, byte for byte, also of files that lie on no disk."""

import pytest

from nvfp4viz.audit import audit
from nvfp4viz.audit.repair import POLICIES, RECORD, apply_repair, plan_repair, repaired_checkpoint, repaired_files
from nvfp4viz.checkpoint import MemorySource, inject, inspect, write_checkpoint
from nvfp4viz.errors import CheckpointError, InputError
from tests.audit.test_repair import BAD, KIND, NO_WEIGHT_ONLY, NVFP4, written
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, without

CELLS = [
    (name, policy, fault)
    for name, layout in NVFP4.items()
    for policy in POLICIES
    for fault in ("missing", "nan")
    if not (policy == "weight-only" and name in NO_WEIGHT_ONLY) and layout.arrangement == "expert"
]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("name", "policy", "fault"), CELLS)
def test_the_files_are_those_of_the_written_copy(name, policy, fault, tmp_path):
    good = written(NVFP4[name], tmp_path / "good")
    inject(good, tmp_path / "bad", fault, layer=0, expert=BAD, projection=KIND, role="input_scale", seed=7)
    before = contents(tmp_path / "bad")
    plan = plan_repair(tmp_path / "bad", policy)
    apply_repair(plan, tmp_path / "out")
    there = contents(tmp_path / "out")
    new = repaired_files(plan)
    assert {**before, **new} == there
    assert set(new) == {file for file in there if before.get(file) != there[file]}
    # The same of an upload, whose name alone differs in the record.
    upload = plan_repair(inspect(MemorySource(before, "bad")), policy)
    assert repaired_files(upload) == new
    assert contents(tmp_path / "bad") == before
    whole = repaired_checkpoint(plan)
    assert {file: whole.source.read_range(file, 0, whole.source.size(file)) for file in whole.source.files()} == there
    report, beside = audit(whole), audit(tmp_path / "out")
    assert (report.findings, report.fingerprint, report.verdict) == (
        beside.findings, beside.fingerprint, beside.verdict,
    )  # fmt: skip


def test_a_single_file_becomes_the_first_of_two_there_too(tmp_path):
    holed = without(base(), "model.layers.0.mlp.experts.1.down_proj.input_scale")
    write_checkpoint(tmp_path / "bad", holed, config=CONFIG, hf_quant_config=QUANT)
    plan = plan_repair(tmp_path / "bad", "peer-max")
    apply_repair(plan, tmp_path / "out")
    new = repaired_files(plan)
    there = contents(tmp_path / "out")
    assert new == {file: data for file, data in there.items() if file in new}
    assert set(there) - set(new) == {"config.json", "hf_quant_config.json"}
    assert RECORD in new
    assert "model.safetensors" not in repaired_checkpoint(plan).source.files()


def test_nothing_to_mend_is_said_and_a_copy_that_still_breaks_is_not_given(tmp_path):
    write_checkpoint(tmp_path / "good", base(), config=CONFIG, hf_quant_config=QUANT)
    with pytest.raises(InputError) as caught:
        repaired_files(plan_repair(tmp_path / "good", "peer-max"))
    assert caught.value.code == "repair.nothing"
    holed = without(base(), "model.layers.0.mlp.experts.1.down_proj.input_scale")
    write_checkpoint(tmp_path / "bad", holed, config=CONFIG, hf_quant_config=QUANT)
    plan = plan_repair(tmp_path / "bad", "peer-max")
    # As if the rule had not found what lacks: another tensor of the same value takes its place.
    [(name, value)] = plan.changes.items()
    plan.changes.clear()
    plan.changes[name.replace("experts.1", "experts.0")] = value
    with pytest.raises(CheckpointError) as caught:
        repaired_files(plan)
    assert caught.value.code == "repair.still-broken"
