"""The self-test without a GPU: it finds what differs, says so, and says plainly that there is no GPU."""

import json
import sys

import numpy as np
import pytest

from nvfp4viz.device import selftest
from nvfp4viz.device import selftest_data as data
from nvfp4viz.errors import DeviceError
from nvfp4viz.formats import swizzle_128x4

REPORT = selftest.SelfTest(
    gpu="Some GPU", capability=(12, 0), target="sm_120a", driver="13.0", nvrtc="13.0", versions={"torch": "2.13"},
    python="3.11", date="2026-11-29 20:00 UTC", sources={"selftest.cu": "abc"},
    instructions={"FP4 conversions": True, "block-scaled MMA": False},
    checks=(
        selftest.Check("e2m1", "one against the other", 100, 0),
        selftest.Check("mma", "this against that", 0, None),
    ),
    seconds=3.2,
)  # fmt: skip


def test_a_report_says_what_was_compared_and_what_is_not_there():
    text = selftest.to_markdown(REPORT)
    assert REPORT.passed
    assert "everything agrees" in text
    assert "| one against the other | 100 | 0 |" in text
    assert "| this against that |  | not available here |" in text
    assert "instructions used: FP4 conversions; not available here: block-scaled MMA" in text
    read = json.loads(selftest.to_json(REPORT))
    assert read["passed"] is True
    assert read["checks"][1]["differing"] is None


@pytest.fixture
def answers(monkeypatch):
    """A GPU that gives NumPy's bytes, but for what the test spoils."""

    def install(spoil):
        def on_gpu(x, recipe, g, layout="linear", soft=False, offsets=None):
            packed, scales = data.on_cpu(x, recipe, g)
            return spoil(packed.copy(), scales if layout == "linear" else swizzle_128x4(scales), recipe, soft)

        monkeypatch.setattr(data, "on_gpu", on_gpu)
        monkeypatch.setattr(data, "matrices", lambda dtype: (data.coarse(dtype, (3, 64), 1),))

    return install


def test_equal_bytes_are_no_finding(answers):
    pytest.importorskip("torch", reason="the ops' names come with them")
    answers(lambda packed, scales, recipe, soft: (packed, scales))
    checks = list(selftest.recipes())
    assert len(checks) == 6
    assert all(check.differing == 0 and check.compared > 500 for check in checks)


def test_one_wrong_byte_is_found_and_named(answers):
    pytest.importorskip("torch", reason="the ops' names come with them")

    def spoil(packed, scales, recipe, soft):
        if recipe == "vllm-even" and soft:
            packed[2, 5] ^= 0x80
        return packed, scales

    answers(spoil)
    differing = {check.name: (check.differing, check.example) for check in selftest.recipes()}
    # three dtypes, two layouts, one of two paths
    assert differing.pop("recipe-vllm-even") == (6, "bf16, matrix 0, global scale None, linear, soft=True")
    assert set(differing.values()) == {(0, "")}


def test_floats_are_compared_by_their_bits():
    a = np.float32([0.0, 1.0, np.nan, 2.0])
    b = np.float32([-0.0, 1.0, -np.nan, 2.0])
    assert data.differing_floats(a, b).tolist() == [0]
    check = selftest._compare("x", "y", iter([(a, a), (a, b)]))
    assert (check.compared, check.differing, check.example) == (8, 1, "case 1, element 0")


def test_the_matrices_are_hostile():
    for dtype in data.DTYPES:
        values = np.concatenate([x.astype(np.float32).ravel() for x in data.matrices(dtype)])
        assert np.isnan(values).any()
        assert np.isinf(values).any()
        assert ((values != 0) & (np.abs(values) < 1e-4)).any()
        raw = data.edges(dtype).view(np.uint32 if dtype == "f32" else np.uint16)
        quiet = {"bf16": 0x40, "f16": 0x200, "f32": 0x400000}[dtype]
        assert (np.isnan(data.edges(dtype).astype(np.float32)) & (raw & quiet == 0)).any(), "no signalling NaN"
    assert {len(x) % 128 for x in data.matrices("bf16")} != {0}


def test_a_gpu_that_goes_down_on_the_way_is_one_line(monkeypatch, capsys, tmp_path):
    """An instruction that a chip does not take after all is an error of torch's, at the next synchronisation."""

    def fall(on_check):
        raise RuntimeError("CUDA error: an illegal instruction was encountered")

    monkeypatch.setattr(selftest, "run", fall)
    monkeypatch.setattr(sys, "argv", ["selftest", "--out", str(tmp_path)])
    assert selftest.main() == 2
    assert capsys.readouterr().err == "RuntimeError: CUDA error: an illegal instruction was encountered\n"


def test_without_a_gpu_it_says_why(monkeypatch, capsys, tmp_path):
    def refuse():
        raise DeviceError("device.no-driver")

    monkeypatch.setattr(selftest, "require_cuda", refuse)
    monkeypatch.setattr(sys, "argv", ["selftest", "--out", str(tmp_path)])
    assert selftest.main() == 2
    assert "no NVIDIA driver" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
