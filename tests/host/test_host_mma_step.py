"""``kernels/mma_step.cuh``, the step that GPUs without the instruction compute, against the seven rules.

The header is compiled with g++ and asked the questions of ``test_host_tensor_core.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nvfp4viz.quant import mma_matmul, mma_step_reference
from tests.host.restatement import Restatement, compile_cpp
from tests.host.test_host_tensor_core import BLOCK, INF, KINDS, NAN, SCALES, compare, pack, random_operand

pytestmark = pytest.mark.host
SOURCE = Path(__file__).with_name("mma_step_answers.cpp")


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Restatement:
    folder = tmp_path_factory.mktemp("mma_step")
    return Restatement(compile_cpp(SOURCE, folder / "mma_step_answers"), folder, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_all_pairs_of_codes_at_every_place(header: Restatement, kind: str) -> None:
    """Each of 256 pairs alone at each of the 64 places: a misplaced nibble cannot hide."""
    one = 0x38 if kind == "nvfp4" else 127
    scales = np.full((256, 64 // BLOCK[kind]), one, np.uint8)
    a_code, b_code = (index.ravel().astype(np.uint8) for index in np.indices((16, 16)))
    for place in range(64):
        a, b = np.zeros((256, 64), np.uint8), np.zeros((256, 64), np.uint8)
        a[:, place], b[:, place] = a_code, b_code
        got = header.steps(a, b, scales, scales, np.zeros(256, np.float32), kind).view(np.float32)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        signed = np.concatenate([values, -values])
        np.testing.assert_array_equal(got, signed[a_code] * signed[b_code])
        assert not np.signbit(got[got == 0]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_all_scale_byte_pairs(header: Restatement, kind: str) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 16, (2, 256, 64), dtype=np.uint8)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 64 // BLOCK[kind], 1)
    c = rng.standard_normal((256, 256)).astype(np.float32)
    compare(header, a, b, scales, scales, c, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_one_nan_scale_at_each_place(header: Restatement, kind: str) -> None:
    count = 64 // BLOCK[kind]
    ones = np.full((1, count), 0x38 if kind == "nvfp4" else 127, np.uint8)
    codes = np.full((1, 64), 2, np.uint8)
    for byte in (0x7F, 0xFF):
        for place in range(count):
            bad = ones.copy()
            bad[0, place] = byte
            for a, b in ((bad, ones), (ones, bad)):
                for c in (0.0, np.inf):
                    compare(header, codes, codes, a, b, np.full((1, 1), c, np.float32), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["ordinary", "finite", "subnormal", "zero"])
def test_random_operands_and_any_accumulator_bits(header: Restatement, kind: str, which: str) -> None:
    rng = np.random.default_rng(2)
    a, sa = random_operand(rng, 128, kind, SCALES[kind][which])
    b, sb = random_operand(rng, 128, kind, SCALES[kind][which])
    c = rng.integers(0, 1 << 32, (128, 128), dtype=np.uint32).view(np.float32)
    special = [0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45, 1.1754942e-38, 3.4e38, -3.4e38]
    c[0, : len(special)] = special
    c[64:] = (rng.standard_normal((64, 128)) * 2.0 ** rng.integers(-30, 30, (64, 128))).astype(np.float32)
    compare(header, a, b, sa, sb, c, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_cancellation(header: Restatement, kind: str) -> None:
    rng = np.random.default_rng(3)
    ordinary = list(SCALES[kind]["ordinary"])
    a, sa = random_operand(rng, 128, kind, ordinary)
    b, sb = random_operand(rng, 128, kind, ordinary)
    dots = mma_matmul(pack(a), sa, pack(b), sb, kind=kind)
    compare(header, a, b, sa, sb, -dots, kind)
    compare(header, a, b, sa, sb, np.nextafter(-dots, INF), kind)
    compare(header, a, b, sa, sb, np.nextafter(-dots, -INF), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_scalar_reference(header: Restatement, kind: str) -> None:
    rng = np.random.default_rng(4)
    finite = SCALES[kind]["finite"]
    a, sa = random_operand(rng, 600, kind, finite)
    b, sb = random_operand(rng, 600, kind, finite)
    c = rng.integers(0, 1 << 32, 600, dtype=np.uint32).view(np.float32)
    c[::3] = (rng.standard_normal(200) * 1e3).astype(np.float32)
    steps = zip(a, b, sa, sb, c, strict=True)
    wanted = [int(np.float32(mma_step_reference(*step, kind=kind)).view(np.uint32)) for step in steps]
    assert header.steps(a, b, sa, sb, c, kind).tolist() == wanted
