"""Dequantise, maxima, activation and quantise in one pass, and the self-test: the CPU's bits."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import formats, quant
from nvfp4viz.device import ops, selftest
from nvfp4viz.device import selftest_data as data
from nvfp4viz.device.dispatch import to_cuda
from nvfp4viz.errors import DeviceError
from nvfp4viz.moe.experts import activate

# --------------------------------------------------------------------------------------------- dequantise


def test_every_pair_of_bytes_decodes_as_on_the_cpu():
    """Every packed byte under every scale byte, all recipes, garbage global scales, both layouts, BF16 and float32."""
    count = 0
    for ours, theirs in data.decoded_pairs():
        assert (ours == theirs).all()
        count += 1
    assert count > 300


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("form", ["rows", "ranges"])
def test_decoding_with_a_scale_for_each_row_or_range(torch, form, layout):
    sizes = np.array([5, 0, 1, 129, 0, 7])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    x = data.coarse("bf16", (int(offsets[-1]), 16 * 23), 20)
    given = np.resize(np.float32([1.0, 2688 / 3.7, 1e-6, -3.0, np.inf]), len(x) if form == "rows" else len(sizes))
    per_row = given if form == "rows" else np.repeat(given, sizes)
    where = to_cuda(offsets) if form == "ranges" else None
    q = ops.quantize(to_cuda(x), recipe="ieee", global_scale=to_cuda(given), offsets=where, layout=layout)
    for dtype, unsigned in ((torch.float32, np.uint32), (torch.bfloat16, np.uint16)):
        signed = torch.int32 if dtype == torch.float32 else torch.int16
        found = ops.dequantize(q, dtype).view(signed).cpu().numpy().view(unsigned)
        wide = np.float32 if dtype == torch.float32 else ml_dtypes.bfloat16
        for i in range(len(x)):
            row = quant.quantize(x[i : i + 1], recipe="ieee", global_scale=per_row[i], path="numpy")
            assert (found[i] == quant.dequantize(row, wide, path="numpy").view(unsigned)[0]).all()


# -------------------------------------------------------------------------------------------------- maxima


@pytest.mark.parametrize("dtype", data.DTYPES)
def test_maxima(torch, dtype):
    for x in (*data.matrices(dtype), data.coarse(dtype, (3000, 64), 21), data.patterns(dtype, (1, 7), 22)):
        found = ops.amax(to_cuda(x)).cpu().numpy().view(np.uint32)
        assert found[0] == quant.amax(x).view(np.uint32)
        if x.shape[1] % 8:
            continue
        rows = ops.amax(to_cuda(x), per="token").cpu().numpy().view(np.uint32)
        expected = np.array([quant.amax(row) for row in x]).view(np.uint32)
        assert (rows == expected).all()
        bounds = np.array([0, 0, len(x) // 3, len(x) // 3, len(x)], np.int32)
        experts = ops.amax(to_cuda(x), to_cuda(bounds)).cpu().numpy().view(np.uint32)
        expected = np.array([quant.amax(x[low:high]) for low, high in itertools.pairwise(bounds)])
        assert (experts == expected.view(np.uint32)).all()
    zero = torch.zeros(4, 64, device="cuda")
    assert ops.amax(zero).item() == 0


# ---------------------------------------------------------------------------------------------- activation


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_every_gate(activation):
    """All 65536 BF16 gates with ups of several sizes and of random bits."""
    for found, expected in data.activated_pairs(activation):
        assert data.differing_bytes(found, expected, "linear") == 0


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("recipe", ["ieee", "vllm-cuda"])
def test_activation_with_scales_of_ranges(torch, recipe, activation, layout, size):
    """The table in shared memory (large) and through the cache (small); ordinary gates and random bits."""
    rows = 130 if size == "small" else 6100
    width = 704
    generator = np.random.default_rng(23)
    x = data.as_dtype(generator.standard_normal((rows, 2 * width)) * 2, "bf16")
    x[-40:] = data.patterns("bf16", (40, 2 * width), 24)
    offsets = np.int32([0, 0, rows // 2, rows // 2 + 1, rows])
    given = np.float32([1.0, 500.0, np.inf, 2688 / 3.7])
    q = ops.activation_quantize(
        to_cuda(x),
        activation=activation,
        recipe=recipe,
        global_scale=to_cuda(given),
        offsets=to_cuda(offsets),
        layout=layout,
    )
    y = activate(x, activation, fused=True)
    parts = [
        data.on_cpu(y[low:high], recipe, given[e])
        for e, (low, high) in enumerate(itertools.pairwise(offsets))
        if high > low
    ]
    assert (q.packed.cpu().numpy() == np.concatenate([p[0] for p in parts])).all()
    scales = q.scales.cpu().numpy()
    if layout == "linear":
        assert (scales == np.concatenate([p[1] for p in parts])).all()
    else:
        expected = np.concatenate([formats.swizzle_128x4(p[1]) for p in parts])
        assert (scales[: len(expected)] == expected).all()
        assert not scales[len(expected) :].any()


def test_activation_in_software_gives_the_same_bytes(torch):
    x = to_cuda(data.as_dtype(np.random.default_rng(25).standard_normal((64, 512)), "bf16"))
    for activation in ("silu", "gelu_tanh"):
        hard, soft = (
            ops.activation_quantize(x, activation=activation, global_scale=300.0, soft=flag) for flag in (False, True)
        )
        assert torch.equal(hard.packed, soft.packed)
        assert torch.equal(hard.scales, soft.scales)


# ----------------------------------------------------------------------------------------------- self-test


def test_the_sweeps_find_nothing_on_this_gpu():
    """2^32 patterns through every conversion and the reciprocal."""
    here = selftest.instructions()
    checks = [*selftest.conversions(here), *selftest.unpacking(here)]
    checks.append(selftest.reciprocal(here["approximate reciprocal"]))
    assert {check.name: check.differing for check in checks if check.differing} == {}
    assert sum(check.compared for check in checks) > 1 << 33


def test_a_report_can_fail_and_says_where():
    checks = (selftest.Check("a", "a against b", 10, 3, "0x3f800000"), selftest.Check("c", "c against d", 0, None))
    report = selftest.SelfTest("GPU", (9, 0), "sm_90", "13.0", "13.0", {}, "3.12", "today", {}, {}, checks, 1.0)
    assert not report.passed
    text = selftest.to_markdown(report)
    assert "BITS DIFFER" in text
    assert "| a against b | 10 | 3 | 0x3f800000 |" in text
    assert "not available here" in text


def test_out_of_memory_is_a_clear_error(torch):
    from nvfp4viz.device.ops.groups import empty

    with pytest.raises(DeviceError) as error:
        empty("quantize", (1 << 24, 1 << 24), torch.uint8, torch.device("cuda"))
    assert error.value.code == "ops.memory"
