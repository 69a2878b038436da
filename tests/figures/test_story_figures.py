"""How NaN spreads: clean cells and NaN cells are told apart by mark, and the sentence names the first."""

import numpy as np
import pytest

from nvfp4viz.figures.story import describe_nan_spread, nan_spread, nan_spread_rows

TOKENS = ("<bos>", "3", " ", "+")
FRACTION = np.array([[0, 0], [0, 0], [0.5, 1], [0, 1]], np.float32)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_cells_with_nan_carry_their_mark(theme):
    clean, bad = nan_spread(TOKENS, FRACTION, theme=theme, lang="en").data
    assert list(zip(bad.x, bad.y, strict=True)) == [(2, 0), (2, 1), (3, 1)]
    assert set(bad.text) == {"N"}
    assert set(clean.text) == {""}
    assert len(clean.x) + len(bad.x) == FRACTION.size
    np.testing.assert_array_equal(bad.customdata[:, 0], [50, 100, 100])
    assert list(bad.hovertext) == ["␣", "␣", "+"]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_sentence_names_the_first_nan_and_how_far_it_came(lang):
    said = describe_nan_spread(TOKENS, FRACTION, lang)
    assert "`␣`" in said
    assert "2" in said
    assert "4" in said


def test_the_first_nan_is_the_first_to_be_computed():
    """Layer 0 of a later token comes before layer 1 of an earlier one."""
    fraction = np.array([[0, 1], [1, 1]], np.float32)
    assert "token 1" in describe_nan_spread(("a", "b"), fraction, "en")


def test_no_nan_says_so():
    assert describe_nan_spread(TOKENS, FRACTION * 0, "en") == "No NaN in any layer for these 4 tokens."


def test_the_table_has_every_cell():
    rows = nan_spread_rows(TOKENS, FRACTION)
    assert len(rows) == 8
    assert rows[4] == {"token": 2, "text": " ", "layer": 0, "nan_fraction": 0.5}
