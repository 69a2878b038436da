"""The self-test's CPU part passes, and would notice a wrong bit."""

import numpy as np
import pytest

from nvfp4viz import formats, quant
from nvfp4viz.device import cpu_checks


def test_everything_agrees():
    checks = list(cpu_checks.run_checks())
    assert [check.id for check in checks] == list(cpu_checks.CHECKS)
    for check in checks:
        assert check.differing_bits == 0, check.id
        assert check.bits > 0
        assert check.inputs > 0


def test_bits_are_counted_in_every_type():
    assert cpu_checks.differing_bits(np.float32([1.0, np.nan]), np.float32([1.0, np.nan])) == 0
    assert cpu_checks.differing_bits(np.float32([0.0]), np.float32([-0.0])) == 1
    assert cpu_checks.differing_bits(np.uint8([0b1010, 7]), np.uint8([0b0101, 7])) == 4


@pytest.mark.parametrize(
    ("module", "name", "check"),
    [(formats, "e2m1_code_scalar", "to_e2m1"), (formats, "e4m3_byte_scalar", "to_e4m3")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_wrong_code_is_seen(monkeypatch, module, name, check):
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda x: right(x) ^ (x == 3.0))
    inputs, one, other = cpu_checks.CHECKS[check]()
    assert inputs == 1 << 16
    assert cpu_checks.differing_bits(one, other) == 1


def test_a_wrong_matrix_step_is_seen(monkeypatch):
    right = quant.mma_step_reference
    monkeypatch.setattr(quant, "mma_step_reference", lambda *a: np.nextafter(right(*a), np.float32(np.inf)))
    _, one, other = cpu_checks.CHECKS["matrix_step"]()
    assert cpu_checks.differing_bits(one, other) > 0
