"""Notes say that a naming is sound, and never that a file is; and what a vector of fused scales is."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import tensor
from tests.audit.layouts import CONFIG, EXPERTS, LAYOUTS
from tests.audit.test_cases_config import of_width

NOTED = [id for id, layout in LAYOUTS.items() if "loader.note" in layout.notes]


@pytest.mark.parametrize("id", NOTED)
def test_a_note_beside_a_broken_file_does_not_call_it_sound(id):
    layout = LAYOUTS[id]
    broken = layout.tensors()
    layout.put(broken, 2, layout.kinds[0], "weight_scale_2", np.float32(np.nan))
    for tensors in (None, broken):
        report = audit(layout.open(tensors), ep=3)
        assert report.verdict == ("error" if tensors else "info")
        notes = [item for item in report.findings if item.code == "loader.note"]
        assert notes
        for item in notes:
            assert "file is" not in describe(item, "en")[0].lower()
            assert "文件" not in describe(item, "zh")[0]


@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
@pytest.mark.parametrize("kind", ["gate_up", "down"])
def test_a_vector_where_one_number_is_usual(kind, role):
    """Accepted, said, and judged expert by expert: a bad number is its expert's."""
    layout = LAYOUTS["fused"]
    name, healthy = layout.name(0, kind, role), layout.tensors()
    one = np.frombuffer(healthy[name].tobytes(), np.float32)[0]
    values = np.float32(one) * (1 + np.arange(EXPERTS, dtype=np.float32) / 50)
    report = audit(layout.open({**healthy, name: tensor(values)}))
    vector = [item for item in report.findings if item.text == "scale.shape.vector"]
    assert [(item.code, item.severity, item.role, item.tensors) for item in vector] == [
        ("scale.shape", "info", role, (name,))
    ]
    assert report.verdict == "info"
    for language in ("en", "zh"):
        assert name in describe(vector[0], language)[0]
    values[5] = np.nan
    report = audit(layout.open({**healthy, name: tensor(values)}))
    [bad] = [item for item in report.findings if item.code == "scale.nan"]
    assert (bad.layer, bad.projection, bad.experts, bad.count) == (0, kind, (5,), 1)
    if role == "input_scale":
        cutlass = next(item for item in report.backends if item.name == "vllm-cutlass")
        assert (cutlass.outcome, cutlass.scope) == ("nan", "experts")
    # One number for all, bad or not, is nobody's own.
    assert not any(item.text == "scale.shape.vector" for item in audit(layout.open()).findings)
    report = audit(layout.open({**healthy, name: layout.scalar(np.nan)}))
    [bad] = [item for item in report.findings if item.code == "scale.nan"]
    assert (bad.experts, bad.count) == (None, 1)


def test_rows_of_experts_without_a_gate_are_not_called_a_gates():
    for gated, text in ((True, "parallel.alignment"), (False, "parallel.alignment.up")):
        report = audit(of_width(64 if gated else 128, gated=gated), tp=2)
        [item] = [found for found in report.findings if found.code == "parallel.alignment"]
        assert (item.text, item.severity, item.params["rows"]) == (text, "info", 64)
        for language in ("en", "zh"):
            assert ("gate" in describe(item, language)[0]) == gated
    assert CONFIG["num_experts"] == EXPERTS
