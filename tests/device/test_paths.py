"""The lab's comparison: every path gives the same bytes, and a difference is counted and found where it is."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import quant
from nvfp4viz.device import dispatch, paths


def test_every_recipe_of_the_kernels_has_a_contrast():
    assert set(paths.CONTRASTS) == set(dispatch.CUDA_RECIPES)
    for recipe, other in paths.CONTRASTS.items():
        assert recipe != other
        assert quant.RECIPES[recipe].scheme == quant.RECIPES[other].scheme


@pytest.mark.parametrize("kind", paths.KINDS)
@pytest.mark.parametrize("recipe", dispatch.CUDA_RECIPES)
def test_all_paths_of_a_recipe_give_the_same_bytes(recipe, kind):
    x = paths.sample(kind, 7, 5, recipe, 1)
    runs = paths.run_paths(x, recipe)
    assert [run.path for run in runs if run.path != "cuda"] == ["numpy", "numba", "reference", "contrast"]
    for run in runs[:-1]:
        found = paths.compare(run, runs[0])
        assert found.differing == 0
        assert found.first is None
        assert found.bytes == runs[0].packed.size + runs[0].scales.size


@pytest.mark.parametrize("kind", ["grid", "normal"])
def test_pytorch_restates_its_recipe(kind):
    runs = paths.run_paths(paths.sample(kind, 16, 8, "ieee", 4), "ieee", torch=True)
    found = {run.path: paths.compare(run, runs[0]).differing for run in runs}
    assert found["torch"] == 0


def test_the_opening_sample_tells_two_recipes_apart():
    """Else the page would show no difference at all."""
    runs = paths.run_paths(paths.sample("grid", 32, 8, "vllm-cuda", 4), "vllm-cuda")
    assert paths.compare(runs[-1], runs[0]).differing > 100


def test_samples_are_seeded_and_of_the_shape_asked_for():
    for kind in paths.KINDS:
        x = paths.sample(kind, 3, 4, "ocp-floor", 9)
        assert x.shape == (3, 128)
        assert x.dtype == ml_dtypes.bfloat16
        assert x.tobytes() == paths.sample(kind, 3, 4, "ocp-floor", 9).tobytes()
        assert x.tobytes() != paths.sample(kind, 3, 4, "ocp-floor", 10).tobytes()
    assert np.isnan(paths.sample("any", 64, 16, "ieee", 0).astype(np.float32)).any()


def test_a_reference_of_some_rows_is_compared_on_those():
    x = paths.sample("normal", 64, 64, "ieee", 0)
    runs = paths.run_paths(x, "ieee")
    reference = next(run for run in runs if run.path == "reference")
    assert len(reference.packed) == paths.REFERENCE_BLOCKS // 64
    assert paths.compare(reference, runs[0]).bytes == len(reference.packed) * (512 + 64)


def _changed(run, name, row, column, value):
    array = getattr(run, name).copy()
    array[row, column] ^= value
    return replace(run, **{name: array})


def test_differences_are_counted_and_the_first_block_is_named():
    truth = paths.run_paths(paths.sample("normal", 4, 4, "ieee", 0), "ieee")[0]
    one = _changed(truth, "packed", 2, 9, 0x10)
    byte = int(truth.packed[2, 9])
    assert paths.compare(one, truth) == paths.Difference(144, 1, ("packed", 2, 9, byte, byte ^ 0x10))
    # block 1 of row 2 comes after block 0 of row 2, whichever array it is in
    two = _changed(one, "scales", 2, 0, 1)
    scale = int(truth.scales[2, 0])
    assert paths.compare(two, truth) == paths.Difference(144, 2, ("scales", 2, 0, scale, scale ^ 1))
