"""A matrix in pieces has the errors of the whole one, also where a number in it is none."""

import numpy as np
import pytest

from nvfp4viz.quant.grouping import compare_tensor
from nvfp4viz.quant.grouping_pieces import compare_pieces


def matrix(at: tuple[int, int] | None = None, value: float = 0.0) -> np.ndarray:
    x = np.random.default_rng(5).standard_normal((64, 96)).astype(np.float32)
    if at is not None:
        x[at] = value
    return x


@pytest.mark.parametrize(
    "x",
    [
        matrix(),
        matrix((3, 3), np.nan),
        matrix((40, 7), np.nan),
        matrix((3, 3), np.inf),
        matrix((63, 95), -np.inf),
        np.zeros((64, 96), np.float32),
    ],
    ids=["finite", "NaN in the first piece", "NaN in the second", "Inf", "-Inf", "zeros"],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_pieces_are_judged_as_the_whole_is(x):
    for whole, parts in zip(compare_tensor(x), compare_pieces(lambda: iter([x[:32], x[32:]])), strict=True):
        assert parts.along == whole.along
        a, b = whole.error, parts.error
        assert np.array_equal(np.float64(a.max_abs), np.float64(b.max_abs), equal_nan=True)
        assert (a.zeroed, a.clipped) == (b.zeroed, b.clipped)
        for one, other in ((a.mse, b.mse), (a.sqnr_db, b.sqnr_db)):
            if np.isfinite(one):
                # The mean is summed in another order: float64's last digits.
                assert other == pytest.approx(one, rel=1e-12)
            else:
                assert np.array_equal(np.float64(one), np.float64(other), equal_nan=True)
