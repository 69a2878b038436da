"""What a GPU adds to the Kernel lab: its path among the others, PyTorch on the device, and rates measured now."""

import statistics

import pytest

from benchmarks.bench_gpu_moe import gpu_times
from nvfp4viz.device import dispatch, gpu_rates, paths


@pytest.mark.parametrize("kind", paths.KINDS)
@pytest.mark.parametrize("recipe", dispatch.CUDA_RECIPES)
def test_the_cuda_path_gives_the_same_bytes(recipe, kind):
    runs = paths.run_paths(paths.sample(kind, 33, 17, recipe, 4), recipe)
    found = {run.path: paths.compare(run, runs[0]) for run in runs}
    assert found["cuda"].differing == 0
    assert found["cuda"].bytes == runs[0].packed.size + runs[0].scales.size


@pytest.mark.parametrize("kind", ["grid", "normal"])
def test_pytorch_on_the_gpu_gives_them_too(kind):
    runs = paths.run_paths(paths.sample(kind, 33, 17, "ieee", 4), "ieee", torch=True)
    found = {run.path: paths.compare(run, runs[0]).differing for run in runs}
    assert found["torch"] == found["cuda"] == 0


def test_rates_are_those_of_memory_and_not_of_a_cache(torch):
    """No kernel moves more than a copy by much: its bytes are counted once, and they come from memory."""
    _, candidates = gpu_rates.candidates()
    times = gpu_times(torch, {name: call for name, (call, _) in candidates.items()}, 5)
    rates = {name: moved / statistics.median(times[name]) for name, (_, moved) in candidates.items()}
    assert set(rates) == {"copy", "quantise", "dequantise", "amax"}
    for name, rate in rates.items():
        assert 0.1 < rate / rates["copy"] < 2, name
