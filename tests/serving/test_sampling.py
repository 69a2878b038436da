"""Tokens from logits with and without NaN."""

import numpy as np
import pytest

from nvfp4viz.serving.sampling import V2_BLOCK, argmax_v1, argmax_v2


@pytest.mark.parametrize("size", [1, 2, 99, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("keeps", ["left", "right"])
def test_without_nan_both_runners_agree(size, keeps):
    rng = np.random.default_rng(size)
    for logits in (rng.standard_normal(size), rng.integers(0, 3, size).astype(float), np.full(size, -np.inf)):
        assert argmax_v2(logits.astype(np.float32), keeps) == argmax_v1(logits.astype(np.float32))


def test_v1_gives_pad_for_nan_logits():
    torch = pytest.importorskip("torch")
    for logits in (np.full(99, np.nan, np.float32), np.float32([3, np.nan, 8, np.nan])):
        assert argmax_v1(logits) == int(torch.argmax(torch.from_numpy(logits)))
    assert argmax_v1(np.full(262144, np.nan, np.float32)) == 0


@pytest.mark.parametrize("keeps", ["left", "right"])
def test_v2_gives_some_id_of_the_first_block(keeps):
    assert 0 <= argmax_v2(np.full(262144, np.nan, np.float32), keeps) < V2_BLOCK


def test_one_nan_may_hide_the_true_maximum():
    """V1 finds the NaN; a comparing tree may return the maximum, or neither: here the NaN beats 4 and then loses."""
    logits = np.float32([1, 2, np.nan, 4])
    assert argmax_v1(logits) == 2
    assert argmax_v2(logits, "right") == 3
    assert argmax_v2(logits, "left") == 1
