"""The predicted-outcome table of `serving-vllm.md` 4.5, by running: what a bad expert does on VLLM_CUTLASS.

One small layer with random weights.  Every token goes to expert 0, whose input scales are replaced; the table's columns
are what GEMM1 gives and what the expert gives, without and with an all-zero block of 16 in the input of that GEMM.
"""

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.moe import W4A4Experts, run_w4a4_experts

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 2, 64, 32, 5
S13, S2 = np.float32(1.5e-3), np.float32(2e-3)  # weight_scale_2 of w13 and w2


def weights(rng, rows, columns):
    """Random E2M1 codes (no zeros) and block scales between 1 and 448."""
    codes = rng.integers(1, 8, (EXPERTS, rows, columns), np.uint8) | rng.choice(
        [0, 8], (EXPERTS, rows, columns)
    ).astype(np.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed, rng.integers(0x38, 0x7F, (EXPERTS, rows, columns // 16), np.uint8)


def inputs(zero_block):
    """Hidden states; on request the first block of 16 is zero in every token."""
    x = np.random.default_rng(4).standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16)
    if zero_block:
        x[:, :16] = 0
    return x


@dataclass(frozen=True)
class Times:
    """A multiple of the calibrated input scale; anything else in the table is the scale itself."""

    factor: float


OK = Times(1)


def layer(in13, in2, *, zero_intermediate_block=False, s13=S13):
    """The layer with expert 0's input scales replaced, its scales converted as 4.4 says."""
    rng = np.random.default_rng(3)
    w13, w13_scales = weights(rng, 2 * INTERMEDIATE, HIDDEN)
    w2, w2_scales = weights(rng, HIDDEN, INTERMEDIATE)
    if zero_intermediate_block:
        w13 = w13.copy()
        w13[:, :16] = 0  # gate rows 0 to 15 are zero, so the first 16 intermediate values are gelu(0) * up = 0
    a13, a2 = (np.array([value, 1e-3], np.float32) for value in (in13, in2))
    with np.errstate(all="ignore"):
        return W4A4Experts(
            w13, w13_scales, w2, w2_scales,
            np.float32(1) / a13, np.float32(1) / a2, s13 * a13, S2 * a2,
        )  # fmt: skip


ROUTING = SimpleNamespace(ids=np.zeros((TOKENS, 1), np.int32), weights=np.ones((TOKENS, 1), np.float32))


def run(in13, in2, *, zero_block=False, **options):
    """One pass, every tensor kept."""
    scales = [
        c * np.float32(v.factor) if isinstance(v, Times) else v for c, v in zip(calibrated(), (in13, in2), strict=True)
    ]
    return run_w4a4_experts(inputs(zero_block), ROUTING, layer(*scales, **options), record=True).trace


@cache
def calibrated():
    """input_scale = amax/2688 of what each GEMM sees: the first from the input, the second from a run with it."""
    first = np.float32(np.abs(inputs(False).astype(np.float32)).max() / 2688)
    trace = run_w4a4_experts(inputs(False), ROUTING, layer(first, 1.0), record=True).trace
    return first, np.float32(np.abs(trace.intermediate.values.astype(np.float32)).max() / 2688)


def outcome(values, healthy):
    """``nan`` (all of it), ``zero``, ``same`` as healthy, ``near`` zero, or ``wrong``: finite, another number."""
    v, h = values.astype(np.float32), healthy.astype(np.float32)
    if np.isnan(v).all():
        return "nan"
    if np.isnan(v).any():
        return "some nan"
    if (v == 0).all():
        return "zero"
    if (v == h).all():
        return "same"
    return "near zero" if np.abs(v).max() < 1e-20 else "wrong"


TABLE = [
    # in13    in2     zero block?  GEMM1        expert output
    (0.0, OK, False, "zero", "zero"),
    (0.0, OK, True, "nan", "nan"),
    (0.0, 0.0, False, "zero", "nan"),
    (0.0, 0.0, True, "nan", "nan"),
    (OK, 0.0, False, "same", "zero"),
    (np.inf, OK, False, "nan", "nan"),
    (np.inf, OK, True, "nan", "nan"),
    (np.nan, OK, False, "nan", "nan"),
    (OK, np.inf, False, "same", "nan"),
    (OK, np.nan, False, "same", "nan"),
    (1e-38, OK, False, "near zero", "zero"),
    (1e-38, OK, True, "near zero", "zero"),
    (OK, 1e-38, False, "same", "near zero"),
    (1e38, OK, False, "zero", "zero"),
    (1e38, OK, True, "zero", "zero"),
    (OK, 1e38, False, "same", "zero"),
    (Times(1 / 64), OK, False, "wrong", "wrong"),
    # "precision loss, zeros" needs more than the table suggests: E4M3 has 14 binades of normal numbers below 448, so a
    # power of two shifts every block scale and alpha takes it back exactly, until the scales become subnormal.
    (Times(64), OK, False, "same", "same"),
    (Times(2**15), OK, False, "wrong", "wrong"),
    (Times(2**20), OK, False, "zero", "zero"),
    (OK, Times(1 / 64), False, "same", "wrong"),
    (OK, Times(64), False, "same", "same"),
    (OK, Times(2**16), False, "same", "wrong"),
    (OK, Times(2**24), False, "same", "zero"),
    (Times(-1), OK, False, "wrong", "wrong"),
    (OK, Times(-1), False, "same", "wrong"),
]


@pytest.mark.parametrize(("in13", "in2", "zero_block", "gemm1", "output"), TABLE)
def test_predicted_outcomes(in13, in2, zero_block, gemm1, output):
    healthy = run(OK, OK, zero_block=zero_block)
    trace = run(in13, in2, zero_block=zero_block)
    assert outcome(trace.c1, healthy.c1) == gemm1
    assert outcome(trace.out, healthy.out) == output


def test_a_healthy_expert_is_not_a_special_case():
    trace = run(OK, OK)
    assert np.isfinite(trace.out.astype(np.float32)).all()
    assert np.abs(trace.out.astype(np.float32)).max() > 1e-3


def test_zero_second_scale_is_nan_where_the_intermediate_has_a_zero_block():
    """Row 3 of the table: 0, and NaN where a zero block occurs."""
    trace = run(OK, 0.0, zero_intermediate_block=True)
    assert (trace.intermediate.values[:, :16] == 0).all()
    assert trace.intermediate.scales[:, 0].tolist() == [0x7F] * TOKENS
    assert trace.intermediate.scales[:, 1].tolist() == [0x7E] * TOKENS
    assert np.isnan(trace.out.astype(np.float32)).all()


def test_why_both_zero_is_nan():
    """1/0 = Inf; the first GEMM's zeros make every block a zero block; Inf · 0 = NaN, byte 0x7F, and a NaN product."""
    trace = run(0.0, 0.0)
    assert np.isinf(trace.input.gscale).all()
    assert (trace.input.scales == 0x7E).all()  # 448: finite, because no block of the input is zero
    assert np.isfinite(trace.acc1).all()
    assert (trace.acc1 != 0).any()
    assert (trace.alpha1 == 0).all()
    assert (trace.c1.astype(np.float32) == 0).all()
    assert (trace.intermediate.scales == 0x7F).all()
    assert (trace.intermediate.packed == 0x77).all()
    assert (trace.acc2.view(np.uint32) == 0x7FFFFFFF).all()


def test_a_huge_scale_overflows_alpha_into_nan():
    """The parenthesis of the row ``1e38``: codes are zero, and 0 · Inf = NaN once alpha overflows."""
    trace = run(1e38, OK, s13=np.float32(10))
    assert np.isinf(trace.alpha1).all()
    assert np.isnan(trace.out.astype(np.float32)).all()


def test_too_small_a_scale_clips():
    """Block scales saturate at 448 and codes at ±6: the first GEMM sees at most input_scale · 448 · 6."""
    trace = run(Times(1 / 64), OK)
    assert (trace.input.scales == 0x7E).mean() > 0.9
    healthy = run(OK, OK)
    assert np.abs(trace.c1.astype(np.float32)).max() < np.abs(healthy.c1.astype(np.float32)).max() / 8


def test_too_large_a_scale_falls_into_the_subnormals_and_then_to_zero():
    scales = [run(Times(c), OK).input.scales for c in (1, 1024, 65536, 1 << 20)]
    smallest_normal = 0x08
    assert (scales[0] >= smallest_normal).all()
    assert (scales[1] < 0x38).all()
    assert (scales[2] < smallest_normal).all()
    assert (scales[3] == 0).all()


def test_a_negative_second_scale_negates_the_output():
    """The tensor core ignores a block scale's sign; alpha keeps it (`tensor-core.md`)."""
    healthy, negated = run(OK, OK), run(OK, Times(-1))
    assert (negated.intermediate.scales == healthy.intermediate.scales | 0x80).all()
    assert (negated.intermediate.packed == healthy.intermediate.packed).all()
    assert (negated.acc2.view(np.uint32) == healthy.acc2.view(np.uint32)).all()
    assert (negated.c3.astype(np.float32) == -healthy.c3.astype(np.float32)).all()


def test_a_negative_first_scale_negates_what_the_activation_sees():
    healthy, negated = run(OK, OK), run(Times(-1), OK)
    assert (negated.c1.astype(np.float32) == -healthy.c1.astype(np.float32)).all()


def test_other_experts_are_untouched():
    """Per-expert scales: expert 1's rows do not change when expert 0 is broken."""
    routing = SimpleNamespace(ids=np.tile([0, 1], (TOKENS, 1)), weights=np.full((TOKENS, 2), 0.5, np.float32))
    healthy = run_w4a4_experts(inputs(False), routing, layer(*calibrated()), record=True)
    broken = run_w4a4_experts(inputs(False), routing, layer(0.0, 0.0), record=True)
    assert broken.nan_experts == (0,)
    rows = broken.trace.rows_of(1)
    assert (broken.trace.c3[rows].view(np.uint16) == healthy.trace.c3[rows].view(np.uint16)).all()
    assert np.isnan(broken.out.astype(np.float32)).all()
