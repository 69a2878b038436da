"""Every fault in every layout that can have it: exactly the findings of the matrix, and none in the healthy twin."""

from pathlib import Path

import pytest

from nvfp4viz.audit import audit, run_audit
from tests.audit.fault_matrix import FAULTS, Case, found, markdown
from tests.audit.layouts import LAYOUTS, twin
from tests.audit.linear_faults import LINEAR_FAULTS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_healthy_layout_has_its_notes_and_nothing_else(layout):
    report = audit(layout.open())
    assert (report.format.dialect, report.format.scheme) == (layout.dialect, layout.scheme)
    assert sorted(item.code for item in report.findings) == sorted(layout.notes)
    assert all(item.severity == "info" for item in report.findings)
    for row in report.coverage.values():
        assert row.missing == row.invalid == row.unreadable == row.filled == 0
    assert {item.outcome for item in report.backends} <= {"safe", "unsupported"}
    assert any(item.outcome == "safe" for item in report.backends)
    if layout.id in ("NVFP4_AWQ", "W4A8", "ModelOpt MXFP4"):
        # Not among the algorithms that vLLM's loader takes.
        assert {item.outcome for item in report.backends if item.name.startswith("vllm-")} == {"unsupported"}


CELLS = [
    pytest.param(layout, case, id=f"{layout.id}-{fault}")
    for layout in LAYOUTS.values()
    for fault, build in FAULTS.items()
    if isinstance(case := build(layout), Case)
]


@pytest.mark.parametrize(("layout", "case"), CELLS)
def test_a_fault_is_found_and_nothing_else(layout, case):
    report = case.report(layout)
    assert sorted(found(report, layout), key=str) == sorted(case.expected, key=str)
    for item in report.findings:
        assert item.count >= 1
        assert "{" not in item.message + item.advice
    for one in report.backends:
        # Each reason names what it speaks of.
        assert "()" not in one.why
        assert "  " not in one.why


@pytest.mark.parametrize("fault", LINEAR_FAULTS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_ordinary_modules_are_warned_of_is_not_safe_for_certain(layout, fault):
    case = LINEAR_FAULTS[fault](layout)
    if isinstance(case, Case):
        for one in case.report(layout).backends:
            # Transformers fuses nothing.
            certain = one.name == "transformers" and fault == "fused attention's weight_scale_2 differ"
            assert one.outcome != "safe" or bool(one.possible) != certain


# As many clean files as broken ones, each with numbers of its own.
TWINS = -(-len(CELLS) // len(LAYOUTS))


@pytest.mark.parametrize("seed", range(TWINS))
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_healthy_twin_raises_no_alarm(layout, seed):
    report = audit(layout.open(twin(layout, seed)))
    assert sorted(item.code for item in report.findings) == sorted(layout.notes)


def test_the_page_is_the_matrix():
    assert (DOCS / "audit-matrix.md").read_text(encoding="utf-8") == markdown()


def test_one_number_filled_in_is_filled_for_every_expert():
    layout = LAYOUTS["fused"]
    done = run_audit(layout.open(FAULTS["input_scale filled in"](layout).tensors))
    assert done.report.coverage["input_scale"].filled == 8
    rows = [row for row in done.rows() if row.status == "filled"]
    assert {(row.expert, row.projection, row.role) for row in rows} == {(e, "down", "input_scale") for e in range(8)}
