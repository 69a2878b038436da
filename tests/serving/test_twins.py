"""The trace of one layer of tiny-moe, healthy and faulty, made again step by step from the raw tensors."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.moe.activation import gelu_tanh_and_mul
from nvfp4viz.quant import mma_matmul, mma_step_reference, quantize
from nvfp4viz.serving import load
from nvfp4viz.serving.twins import TWINS, fill_scales, trace_twins
from sample_checkpoints import ensure

BF16 = ml_dtypes.bfloat16
FATES = ("zeros", "ones", "nan", "neighbour", "random")


@pytest.fixture(scope="module")
def calibrated():
    return load(ensure("tiny-moe-nvfp4-full"), device="cpu")


@pytest.fixture(scope="module")
def holed():
    return {fate: load(ensure("tiny-moe-nvfp4-holes"), allocator=fate, device="cpu") for fate in FATES}


@pytest.fixture(scope="module")
def twins(calibrated, holed):
    return {fate: trace_twins(calibrated, holed[fate], DEMO_PROMPTS["arithmetic"], 0) for fate in FATES}


def same(found, expected):
    return found.shape == expected.shape and found.tobytes() == np.ascontiguousarray(expected).tobytes()


def rounded(values):
    """Float32 to BF16 with CUDA's one NaN."""
    out = values.astype(BF16)
    out.view(np.uint16)[np.isnan(values)] = 0x7FFF
    return out


def product(row_packed, row_scales, alpha, packed, scales):
    acc = mma_matmul(row_packed[None], row_scales[None], packed, scales)[0]
    with np.errstate(all="ignore"):
        return acc, rounded(acc * alpha)


@pytest.mark.parametrize("side", ["healthy", "faulty"])
@pytest.mark.parametrize("fate", FATES)
def test_the_nine_steps_made_again_are_the_record(twins, fate, side):
    record = twins[fate]
    trace, layer, x = getattr(record, side), getattr(record, f"{side}_experts"), record.x
    plan = trace.dispatch
    ids, weights = plan.ids, trace.weights
    tokens, top_k = ids.shape
    # 2: by expert, then token, then rank
    order = sorted((int(ids[t, j]), t, j) for t in range(tokens) for j in range(top_k))
    assert plan.a_map.tolist() == [t for _, t, _ in order]
    assert all(plan.c_map[t * top_k + j] == row for row, (_, t, j) in enumerate(order))
    offset = padded = 0
    for expert in range(layer.count):
        count = sum(e == expert for e, _, _ in order)
        assert (plan.expert_offsets[expert], plan.blockscale_offsets[expert]) == (offset, padded)
        assert plan.problem_sizes1[expert].tolist() == [count, 128, 128]
        assert plan.problem_sizes2[expert].tolist() == [count, 128, 64]
        offset, padded = offset + count, padded + (count + 127) // 128 * 128
    c3 = {}
    for row, (expert, t, j) in enumerate(order):
        assert same(trace.input.values[row], x[t])
        first = quantize(x[t], recipe="vllm-cuda", global_scale=layer.a1_gscale[expert], path="reference")  # 3
        assert same(trace.input.packed[row], first.packed)
        assert same(trace.input.scales[row], first.scales)
        acc1, c1 = product(
            first.packed, first.scales, layer.g1_alphas[expert], layer.w13_packed[expert], layer.w13_scales[expert]
        )  # 4
        assert same(trace.acc1[row], acc1)
        assert same(trace.c1[row], c1)
        c2 = gelu_tanh_and_mul(c1[None])[0]  # 5
        assert same(trace.intermediate.values[row], c2)
        second = quantize(c2, recipe="vllm-cuda", global_scale=layer.a2_gscale[expert], path="reference")  # 6
        assert same(trace.intermediate.packed[row], second.packed)
        assert same(trace.intermediate.scales[row], second.scales)
        acc2, c3[t, j] = product(
            second.packed, second.scales, layer.g2_alphas[expert], layer.w2_packed[expert], layer.w2_scales[expert]
        )  # 7
        assert same(trace.acc2[row], acc2)
        assert same(trace.c3[row], c3[t, j])
    for t in range(tokens):
        total = np.zeros(128, np.float32)
        for j in range(top_k):
            assert same(trace.routes[t, j], c3[t, j])  # 8
            weight = weights[t, j].astype(BF16).astype(np.float32)
            total = total + rounded(c3[t, j].astype(np.float32) * weight).astype(np.float32)
        assert same(trace.out[t], rounded(total))  # 9


@pytest.mark.parametrize("fate", FATES)
def test_accumulators_follow_the_seven_rules(twins, fate):
    """One scalar at a time, for the rows of a broken expert and one sound row."""
    record = twins[fate]
    trace, layer = record.faulty, record.faulty_experts
    broken = np.flatnonzero(np.isin(trace.dispatch.row_expert, record.missing))
    assert len(broken) == 3
    for row in [*broken, 0]:
        expert = trace.dispatch.row_expert[row]
        codes = np.stack([trace.input.packed[row] & 15, trace.input.packed[row] >> 4], axis=-1).ravel()
        for n in (0, 1, 77, 127):
            weights = layer.w13_packed[expert, n]
            weight_codes = np.stack([weights & 15, weights >> 4], axis=-1).ravel()
            acc = np.float32(0)
            for k in (0, 64):
                at, blocks = slice(k, k + 64), slice(k // 16, k // 16 + 4)
                acc = mma_step_reference(
                    codes[at],
                    weight_codes[at],
                    trace.input.scales[row, blocks],
                    layer.w13_scales[expert, n, blocks],
                    acc,
                )
            assert same(np.float32(acc).reshape(1), trace.acc1[row, n : n + 1])


@pytest.mark.parametrize(
    ("fate", "first_nan", "broken"),
    [("zeros", 6, 3), ("ones", None, 0), ("nan", 3, 3), ("neighbour", None, 0), ("random", None, 0)],
)
def test_each_fate_parts_at_the_first_quantiser(twins, fate, first_nan, broken):
    record = twins[fate]
    found = record.comparison
    assert found.first_difference == 3
    assert found.first_nan == first_nan
    assert record.tokens_broken == broken
    hit = np.isin(record.healthy.dispatch.ids, record.missing)
    for step in range(2, 8):
        assert (found.differs[step] == hit.ravel()).all()
    assert (found.differs[8].reshape(hit.shape) == hit.any(axis=1, keepdims=True)).all()


def test_differences_are_those_of_the_bits(twins):
    record = twins["zeros"]
    a, b = record.healthy, record.faulty
    rows = a.dispatch.c_map
    for step, tensors in {
        2: (a.input.scales, b.input.scales, a.input.packed, b.input.packed),
        3: (a.c1.view(np.uint16), b.c1.view(np.uint16)),
        5: (a.intermediate.scales, b.intermediate.scales, a.intermediate.packed, b.intermediate.packed),
        6: (a.c3.view(np.uint16), b.c3.view(np.uint16)),
    }.items():
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        other = np.logical_or.reduce([(one != two).any(axis=1) for one, two in pairs])
        assert (record.comparison.differs[step] == other[rows]).all()


def test_the_filled_twin_is_the_load_of_a_completed_file(calibrated, holed):
    """Its missing keys put in from the other export, loaded by the server itself."""
    from nvfp4viz.checkpoint import memory_checkpoint, open_checkpoint

    broken, whole = (open_checkpoint(ensure(f"tiny-moe-nvfp4-{name}")) for name in ("holes", "full"))
    tensors = broken.read_tensors()
    donors = whole.read_tensors()
    for slot in holed["zeros"].load_report.unwritten:
        assert slot.name not in tensors
        tensors[slot.name] = donors[slot.name]
    completed = memory_checkpoint(
        tensors, config=broken.config, hf_quant_config=broken.hf_quant_config, name="completed"
    )
    loaded = load(completed, device="cpu")
    assert loaded.load_report.complete
    for layer in range(4):
        missing = holed["nan"].load_report.experts_without("input_scale")[layer]
        filled = fill_scales(holed["nan"].experts.layers[layer], calibrated.experts.layers[layer], missing)
        for name in ("a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas"):
            assert same(getattr(filled, name), getattr(loaded.experts.layers[layer], name))


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("layer", range(4))
def test_both_runs_read_the_healthy_model_s_input(calibrated, holed, layer, twin):
    record = trace_twins(calibrated, holed["zeros"], DEMO_PROMPTS["logs"], layer, twin=twin, most=5)
    assert len(record.token_ids) == 5
    assert same(record.healthy.weights, record.faulty.weights)
    kept = {}

    def tap(at, x, routing):
        kept[at] = x
        return calibrated.experts(at, x, routing)

    calibrated.model.forward(record.token_ids, tap)
    assert same(record.x, kept[layer])


def test_a_prompt_that_is_cut_gives_the_same_rows(calibrated, holed):
    """A token's result does not depend on what comes after it, so a picture may show the first few."""
    short, long = (
        trace_twins(calibrated, holed["zeros"], DEMO_PROMPTS["logs"], 0, most=most).faulty.out for most in (6, 16)
    )
    assert same(short, long[:6])


def test_another_calibration_differs_in_sound_rows_too(calibrated, holed):
    record = trace_twins(calibrated, holed["zeros"], DEMO_PROMPTS["arithmetic"], 0, twin="calibrated")
    hit = np.isin(record.healthy.dispatch.ids, record.missing).ravel()
    assert record.comparison.differs[2][~hit].any()
    assert (record.comparison.nan[6] == hit).all()
