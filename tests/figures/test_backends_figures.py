"""The figure of losses: a row a remedy, a mark a domain, filled beyond the margin."""

import pytest

from nvfp4viz.errors import ServingError
from nvfp4viz.figures import backends as figures
from nvfp4viz.figures.words import LANGUAGES
from nvfp4viz.serving.remedies import MARGIN, RemedyResult

REFUSED = RemedyResult("load-guard", ServingError("serving.guard", count=1, groups="x"), ())
RESULTS = {
    "calibrate": RemedyResult("calibrate", None, (), {"news": 0.2, "json": 0.3}),
    "fill-one": RemedyResult("fill-one", None, (), {"news": 0.21, "json": 0.3 + 2 * MARGIN}),
    "peer-max": RemedyResult("peer-max", None, (), {"news": 0.19, "json": float("nan")}),
    "load-guard": REFUSED,
}
NAMES = {name: name.upper() for name in RESULTS}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("lang", LANGUAGES)
def test_marks_are_filled_beyond_the_margin(theme, lang):
    figure = figures.loss_figure(RESULTS, NAMES, theme=theme, lang=lang)
    news, json = figure.data
    assert list(news.y) == ["FILL-ONE", "PEER-MAX"]
    assert [colour == "rgba(0,0,0,0)" for colour in news.marker.color] == [True, True]
    # NaN cannot be drawn, and counts as wrong.
    assert [colour == "rgba(0,0,0,0)" for colour in json.marker.color] == [False, False]
    assert json.x[0] == pytest.approx(2 * MARGIN)
    assert {trace.marker.symbol for trace in figure.data} == {"circle", "square"}


def test_the_finding_names_the_worst():
    finite = {name: result for name, result in RESULTS.items() if name != "peer-max"}
    assert figures.describe_losses(finite, NAMES, "en") == (
        "FILL-ONE is furthest off: 0.100 nats a character above the calibrated model in JSON, "
        "beyond the margin of 0.05."
    )
    assert "PEER-MAX is furthest off: nan" in figures.describe_losses(RESULTS, NAMES, "en")
    close = finite | {"fill-one": RemedyResult("fill-one", None, (), {"news": 0.2, "json": 0.31})}
    assert figures.describe_losses(close, NAMES, "en").startswith("No remedy passes the margin")


def test_rows_hold_every_loss():
    rows = figures.loss_rows(RESULTS)
    assert len(rows) == 6
    assert rows[3] == {"remedy": "fill-one", "domain": "json", "loss": 0.4, "above_calibrated": pytest.approx(0.1)}
