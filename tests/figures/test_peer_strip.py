"""The strip of one scale among its peers."""

import numpy as np
import pytest

from nvfp4viz.figures.peers import Peers, describe_peers, peers_figure, peers_rows


def strip(picked: int) -> Peers:
    values = np.array([1.0, 2.0, np.nan, 3.0, 0.0], np.float32)
    return Peers("input_scale", 1, "down", values, ("present", "present", "missing", "present", "zero"), picked)


def test_the_median_is_of_the_others_alone():
    assert strip(0).median == 2.5
    assert strip(0).ratio == 1 / 2.5
    assert strip(2).ratio is None


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("picked", [0, 2, 4])
def test_every_expert_has_a_sentence(lang, picked):
    assert str(picked) in describe_peers(strip(picked), lang)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_has_no_logarithm_stands_below_with_its_mark(theme):
    figure = peers_figure(strip(2), theme=theme, lang="en")
    stored, unusable = figure.data[0], figure.data[1]
    assert list(stored.x) == [0, 1, 3]
    assert list(unusable.text) == ["∅", "0"]
    assert max(unusable.y) < min(stored.y)


def test_the_table_has_a_row_an_expert():
    assert [row["value"] for row in peers_rows(strip(0))][:3] == [1.0, 2.0, None]
