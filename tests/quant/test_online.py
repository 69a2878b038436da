"""Online packing: scalar and vectorised in equal bits, the ways, the ranks, and what is counted."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.errors import NvError
from nvfp4viz.formats import bf16_to_f32, f32_to_bf16
from nvfp4viz.moe import quantize_rows
from nvfp4viz.quant import amax, online, quantize
from nvfp4viz.quant.online import (
    WAYS,
    compare_ranks,
    compare_ways,
    expert_scales,
    first_lost,
    fold,
    pack_online,
    peak_buffers,
    shard,
)

BF16 = ml_dtypes.bfloat16


def weights(seed=0, shape=(3, 8, 32), scale=0.1):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * scale).astype(BF16)


def edges():
    """Zero experts, huge and tiny ones, signed zeros, infinities, NaN, BF16 subnormals, and products on ties."""
    w = weights(1, (8, 4, 32))
    w[0] = 0
    w[1] *= BF16(2.0**100)
    w[2] *= BF16(2.0**-100)
    w[3, :, ::2] = BF16(-0.0)
    w[4, 0, 0] = np.inf
    w[5, 0, 0] = np.nan
    w[6] = np.array([1, 257, 0x80, 0x8001], np.uint16).view(BF16)[:, None]
    w[7] = (np.arange(128).reshape(4, 32) / 32).astype(BF16)
    return w


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("w", [weights(), weights(2, (2, 5, 16), 1e3), edges()], ids=["small", "large", "edges"])
def test_scalar_and_vectorised_give_the_same_bits(way, w):
    fast, slow = pack_online(w, way), pack_online(w, way, path="reference")
    assert (fast.packed == slow.packed).all()
    assert (fast.scales == slow.scales).all()
    assert fast.encode.tobytes() == slow.encode.tobytes()
    assert fast.launches == slow.launches == (len(w) if way == "direct" else 1)


def test_the_scale_is_torch_s_with_its_floor():
    tops = np.float32([1.0, 0.3, 0.0, 1e-9, 2688.0])
    w = np.zeros((5, 1, 16), BF16)
    for g, top in zip(expert_scales(w, tops), tops, strict=True):
        low = max(top, np.float32(1e-8))
        assert g == np.float32(2688) * (np.float32(1) / low)


def test_gate_and_up_share_an_expert_s_maximum():
    w = weights()
    w[1, -1, 0] = 50  # a row of up
    assert amax(w[1]) == 50
    made = pack_online(w)
    assert made.encode[1] == np.float32(2688) * (np.float32(1) / np.float32(50))
    assert made.scale_2[1] == np.float32(1) / made.encode[1]


def test_direct_is_one_quantisation_an_expert_and_one_launch_with_a_scale_a_row_gives_the_same():
    w = weights(3, (4, 6, 64))
    made = pack_online(w)
    for e in range(4):
        q = quantize(w[e], recipe="vllm-cuda", global_scale=made.encode[e])
        assert (q.packed == made.packed[e]).all()
        assert (q.scales == made.scales[e]).all()
    packed, scales = quantize_rows(w.reshape(24, 64), np.repeat(made.encode, 6))
    assert (packed == made.packed.reshape(24, -1)).all()
    assert (scales == made.scales.reshape(24, -1)).all()


def test_a_power_of_two_as_scale_makes_all_ways_equal():
    """Then folding and casting are exact: the difference is the rounding of the product and nothing else."""
    w = weights()
    tops = np.full(3, 2688 / 2**11, np.float32)
    assert (expert_scales(w, tops) == 2**11).all()
    made = [pack_online(w, way, tops=tops) for way in WAYS]
    for other in made[1:]:
        assert (other.packed == made[0].packed).all()
        assert (other.scales == made[0].scales).all()


def test_the_cast_rounds_each_product_once():
    w = weights()
    g = expert_scales(w)
    exact = bf16_to_f32(w).astype(np.float64) * g[:, None, None]
    assert (fold(w, g, cast=False) == exact.astype(np.float32)).all()
    assert (fold(w, g, cast=True) == f32_to_bf16(exact.astype(np.float32))).all()


def test_ways_are_compared_code_by_code():
    w = weights(5, (4, 32, 64))
    ways = compare_ways(w)
    direct = ways[0].weights
    codes = np.stack([direct.packed & 15, direct.packed >> 4], -1)
    for one in ways:
        mine = np.stack([one.weights.packed & 15, one.weights.packed >> 4], -1)
        assert one.codes_differ == (mine != codes).sum()
        assert one.scales_differ == (one.weights.scales != direct.scales).sum()
        assert (one.codes, one.blocks) == (w.size, w.size // 16)
        decoded = one.weights.decode()
        assert one.summary.mse == pytest.approx(np.mean((decoded.astype(np.float64) - w.astype(np.float64)) ** 2))
    assert ways[2].codes_differ > ways[1].codes_differ


def test_a_lost_element_is_one_whose_code_the_cast_changed():
    w = weights(5, (4, 32, 64))
    ways = compare_ways(w)
    seen = set()
    for index in range(ways[2].codes_differ + 1):
        lost = first_lost(w, ways, index)
        at = lost.column % 16
        direct, _, cast = (int(trace.codes[at]) for trace in lost.traces)
        assert direct != cast
        assert lost.weight == np.float32(w[lost.expert, lost.row, lost.column])
        assert lost.folded == lost.weight * lost.encode
        assert lost.cast == np.float32(BF16(lost.folded))
        seen.add((lost.expert, lost.row, lost.column))
    assert len(seen) == ways[2].codes_differ  # the last one is the first again
    zero = np.zeros((1, 2, 16), BF16)
    assert first_lost(zero, compare_ways(zero)) is None


@pytest.mark.parametrize(("way", "cast"), [("folded_f32", False), ("folded_bf16", True)])
def test_counted_buffers_are_those_that_tracemalloc_sees(way, cast):
    """Of the fold: the copies, and above them no more than the temporaries of one expert of many."""
    w = weights(7, (64, 32, 64))
    g = expert_scales(w)
    fold(w, g, cast=cast)
    tracemalloc.start()
    folded = fold(w, g, cast=cast)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counted = peak_buffers(w.shape, way)
    copies = sum(size for name, size in counted.items() if name.startswith("folded"))
    assert folded.nbytes == counted[way]
    # Casting holds integers for the rows at hand, an expert's 2048 elements; the kilobytes are NumPy's headers.
    assert copies <= peak <= copies + 13 * w[0].size + 4096


@pytest.mark.parametrize("way", WAYS)
def test_rows_taken_together_leave_no_trace_in_the_bits(way, monkeypatch):
    w = edges()
    whole = pack_online(w, way)
    monkeypatch.setattr(online, "FOLD_PORTION", 96)
    monkeypatch.setattr(online, "QUANTIZE_PORTION", 96)
    parts = pack_online(w, way)
    assert (parts.packed == whole.packed).all()
    assert (parts.scales == whole.scales).all()


def test_counted_output_is_what_is_made():
    w = weights(7, (4, 8, 32))
    made = pack_online(w)
    assert peak_buffers(w.shape, "direct") == {"codes": made.packed.nbytes, "block_scales": made.scales.nbytes}


# ------------------------------------------------------------------ ranks


@pytest.mark.parametrize("projection", ["gate_up", "down"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_shared_maximum_gives_the_bytes_of_one_rank(projection, ranks):
    w = weights(9, (3, 16, 64))
    shared, local = compare_ranks(w, ranks, projection)
    assert (shared.codes_differ, shared.scales_differ) == (0, 0)
    assert shared.summary == compare_ways(w)[0].summary
    assert (local.codes_differ > 0) == (ranks > 1)
    assert shared.scales_2.shape == local.scales_2.shape == (ranks, 3)
    assert (shared.scales_2 == shared.scales_2[0]).all()
    # The rank that holds the maximum has the shared scale as its own.
    assert (local.scales_2.max(axis=0) == shared.scales_2[0]).all()


def test_ranks_hold_rows_of_gate_and_of_up_or_columns_of_down():
    w = np.arange(2 * 8 * 32).reshape(2, 8, 32).astype(BF16)
    first, second = shard(w, 2, "gate_up")
    assert (first == w[:, [0, 1, 4, 5]]).all()
    assert (second == w[:, [2, 3, 6, 7]]).all()
    assert (shard(w, 2, "down")[1] == w[:, :, 16:]).all()


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: pack_online(weights().astype(np.float32)), "online.weights"),
        (lambda: pack_online(weights()[0]), "online.weights"),
        (lambda: pack_online(weights(), "twice"), "online.way"),
        (lambda: pack_online(weights(shape=(2, 4, 24))), "quantize.block"),
        (lambda: compare_ranks(weights(), 3, "gate_up"), "online.ranks"),
        (lambda: compare_ranks(weights(), 4, "down"), "online.ranks"),
        (lambda: compare_ranks(weights(), 0, "down"), "online.ranks"),
    ],
)
def test_refusals(call, code):
    with pytest.raises(NvError) as caught:
        call()
    assert caught.value.code == code
