"""tiny-moe on the GPU is tiny-moe on the CPU: the same bits in every layer, the same tokens, the same collapse.

Reads checkpoints, so it needs msgspec besides torch, CuPy and pytest.
"""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("msgspec", reason="checkpoints are read with msgspec")

from nvfp4viz.errors import DeviceError
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.moe import Routing
from nvfp4viz.serving import load
from sample_checkpoints import ensure

HOLED, FULL = "tiny-moe-nvfp4-holes", "tiny-moe-nvfp4-full"
TOKENS = 24


@pytest.fixture(scope="module")
def pair():
    """A build on both devices, loaded once."""
    kept = {}

    def build(sample, allocator="zeros", **options):
        key = (sample, allocator, *sorted(options.items()))
        if key not in kept:
            kept[key] = tuple(load(ensure(sample), allocator, device=name, **options) for name in ("cpu", "cuda"))
        return kept[key]

    return build


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("prompt", DEMO_PROMPTS)
@pytest.mark.parametrize("sample", [HOLED, FULL])
def test_the_same_tokens_and_everything_on_the_way(pair, sample, prompt):
    cpu, gpu = (served.generate(DEMO_PROMPTS[prompt], TOKENS) for served in pair(sample))
    assert [served.computes_on for served in pair(sample)] == ["cpu", "cuda"]
    assert gpu.token_ids == cpu.token_ids
    assert gpu.text == cpu.text
    assert gpu.trace.first_bad == cpu.trace.first_bad
    for name in ("routes", "weights", "nan_fraction", "hidden", "logits"):
        assert same_bits(getattr(gpu.trace, name), getattr(cpu.trace, name)), name


def test_the_collapse_is_there(pair):
    """The holed export falls silent on the GPU too: this is what the comparison above is about."""
    gpu = pair(HOLED)[1].generate(DEMO_PROMPTS["arithmetic"], TOKENS)
    assert set(gpu.token_ids) == {0}
    assert gpu.trace.first_bad is not None
    healthy = pair(FULL)[1].generate(DEMO_PROMPTS["arithmetic"], TOKENS)
    assert 0 not in healthy.token_ids
    assert healthy.trace.first_bad is None


@pytest.mark.parametrize("allocator", ["ones", "nan", "neighbour", "random"])
def test_every_fate_of_the_unwritten_slots(pair, allocator):
    cpu, gpu = (served.generate(DEMO_PROMPTS["arithmetic"], 8) for served in pair(HOLED, allocator))
    assert gpu.token_ids == cpu.token_ids
    assert same_bits(gpu.trace.logits, cpu.trace.logits)


def test_the_layer_maximum_on_the_gpu(pair):
    cpu, gpu = (served.generate(DEMO_PROMPTS["json"], 8) for served in pair(HOLED, backend="vllm-flashinfer-cutlass"))
    assert gpu.token_ids == cpu.token_ids
    assert same_bits(gpu.trace.logits, cpu.trace.logits)


@pytest.mark.parametrize("tokens", [1, 2, 33, 200])
@pytest.mark.parametrize("garbage", [False, True], ids=["ordinary", "with NaN and Inf"])
def test_a_layer_alone(pair, tokens, garbage):
    """More tokens than a prompt has, random routes, and residuals that are already broken."""
    cpu, gpu = pair(HOLED)
    rng = np.random.default_rng(tokens)
    for layer, experts in cpu.experts.layers.items():
        hidden, count = 2 * experts.w13_packed.shape[2], experts.count
        x = rng.standard_normal((tokens, hidden)).astype(np.float32)
        if garbage:
            x.flat[rng.integers(0, x.size, 9)] = [np.nan, np.inf, -np.inf, 0, -0.0, 3e38, 1e-40, -1e-38, np.nan]
        ids = np.array([rng.choice(count, 2, replace=False) for _ in range(tokens)], np.int32)
        weights = rng.uniform(0, 1, (tokens, 2)).astype(np.float32)
        routing = Routing(ids, weights, np.zeros((tokens, count), np.float32))
        x = x.astype(ml_dtypes.bfloat16)
        expected, found = cpu.experts(layer, x, routing), gpu.experts(layer, x, routing)
        assert same_bits(found.out, expected.out), layer
        assert found.nan_experts == expected.nan_experts
    assert gpu.experts.cuda.failure is None


def test_what_has_no_kernels_says_so():
    path = ensure(HOLED)
    assert load(path, backend="vllm-marlin").on_cpu_because.code == "device.backend"
    with pytest.raises(DeviceError):
        load(path, backend="vllm-marlin", device="cuda")
