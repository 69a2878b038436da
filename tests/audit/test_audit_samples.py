"""The audit of the shipped samples: it finds what is wrong with each, and nothing else."""

import json

import pytest

from nvfp4viz.audit import audit, naive_check, run_audit
from nvfp4viz.checkpoint import open_checkpoint
from sample_checkpoints import CALIBRATION, SAMPLES, ensure


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_each_sample_has_its_defect_and_no_other(sample):
    report = audit(ensure(sample.id))
    codes = {item.code for item in report.findings if item.severity != "info"}
    assert codes == ({sample.defect} if sample.defect else set())


def test_the_holes_are_the_experts_that_calibration_never_reached():
    """The exporter's own statistics are the oracle: a count of zero routed tokens is a missing scale, three times."""
    counts = json.loads((CALIBRATION / "news.json").read_text())["counts"]
    unseen = {(layer, expert) for layer, row in enumerate(counts) for expert, count in enumerate(row) if count == 0}
    assert unseen
    done = run_audit(ensure("tiny-moe-nvfp4-holes"))
    missing = [row for row in done.rows() if row.status == "missing"]
    assert {(row.layer, row.expert) for row in missing} == unseen
    assert {row.role for row in missing} == {"input_scale"}
    assert done.report.coverage["input_scale"].missing == len(missing) == 3 * len(unseen)


def test_no_weight_is_read():
    report = audit(ensure("tiny-moe-nvfp4-holes"))
    scalars = sum(report.coverage[role].present for role in ("input_scale", "weight_scale_2"))
    # A few ordinary F32 values may lie between the scalars; the packed weights are millions of bytes.
    assert 0 <= report.container.bytes_read - report.container.header_bytes - 4 * scalars < 20_000
    assert report.container.bytes > 10 * report.container.bytes_read


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_the_naive_check_passes_every_sample_the_broken_ones_too(sample):
    """It has something to count in each: experts in one stack are counted like experts apart."""
    done = naive_check(open_checkpoint(ensure(sample.id)))
    assert done.passed
    assert all(step.found > 0 for step in done.steps)


def test_the_gemma_skeleton_names_the_four_experts_of_the_reports():
    report = audit(ensure("gemma4-skeleton"))
    assert [(item.layer, item.projection, item.experts) for item in report.findings if item.severity == "backend"] == [
        (0, "gate", (40, 42, 82, 98)),
        (0, "up", (40, 42, 82, 98)),
    ]


def test_the_mislabelled_one_cannot_be_promoted():
    [finding] = [item for item in audit(ensure("tiny-moe-mislabelled")).findings if item.severity != "info"]
    assert finding.text == "scheme.mislabelled.sidecar"
