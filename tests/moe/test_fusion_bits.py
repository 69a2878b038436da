"""Which kinds of fusion change bits, on tiny-moe's own weights."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.moe.experts import activate
from nvfp4viz.moe.fusion import qkvz_layout
from nvfp4viz.moe.fusion_arrays import misplaced_channels
from nvfp4viz.moe.fusion_bits import TOKENS, measure_fusions
from nvfp4viz.quant.shared_scale import share_scale

SAMPLE = Path(__file__).parents[2] / "sample_checkpoints" / "tiny-moe-bf16"


@pytest.fixture(scope="module")
def weights():
    from nvfp4viz.checkpoint import open_checkpoint

    opened = open_checkpoint(SAMPLE)
    parts = {name: np.asarray(opened.read(f"model.layers.2.self_attn.{name}_proj.weight")) for name in "qkv"}
    return parts, np.asarray(opened.read("model.layers.2.experts.gate_up_proj"))[:8]


@pytest.fixture(scope="module")
def found(weights):
    return {one.id: one for one in measure_fusions(*weights)}


@pytest.mark.parametrize("name", ["bf16", "one_scale", "grouped_gemm", "grouped_quant"])
def test_same_sums_and_same_scales_are_the_same_bits(found, name):
    assert found[name].values > 1000
    assert found[name].differ == 0
    assert found[name].before > found[name].after == 1


def test_a_shared_maximum_changes_the_parts_that_had_another(found, weights):
    parts, _ = weights
    changed = [name for name, part in share_scale(parts)["max"].items() if part.factor != 1]
    outputs = sum(len(parts[name]) for name in changed) * TOKENS
    assert changed == ["k", "v"]
    # Factors of 1.04 and more move every BF16 number that is not zero.
    assert found["max_scale"].differ == outputs


def test_with_equal_maxima_the_maximum_changes_nothing(weights):
    parts, experts = weights
    same = {name: np.roll(parts["q"], shift, axis=0) for shift, name in enumerate("qkv")}
    assert next(one for one in measure_fusions(same, experts) if one.id == "max_scale").differ == 0


def test_one_rounding_less_changes_some_codes(found):
    assert 0 < found["silu_quant"].differ < found["silu_quant"].values / 50


def test_the_fused_kernel_skips_the_rounding_between(weights):
    _, experts = weights
    x = np.random.default_rng(0).standard_normal((TOKENS, 128)).astype(np.float32)
    c1 = (x @ experts[0].astype(np.float32).T).astype(ml_dtypes.bfloat16)
    assert (activate(c1, "silu") != activate(c1, "silu", fused=True)).any()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_convolution_s_channels(tp):
    assert misplaced_channels(qkvz_layout(16, 32, 128, 128, tp)) == (0, 8192)
    wrong, total = misplaced_channels(qkvz_layout(16, 32, 128, 128, tp, "interleaved"))
    assert total == 2 * 16 * 128 + 32 * 128
    assert 0.7 < wrong / total < 1
    # One key head a rank: its q, k and v already stand in the convolution's order.
    assert misplaced_channels(qkvz_layout(4, 8, 128, 128, 4, "interleaved"))[0] == 0
