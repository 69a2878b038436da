"""Figures about routing, plans and routers."""

import re

import numpy as np
import pytest

from nvfp4viz.figures import planner as plan_figures
from nvfp4viz.figures import routers, routing
from nvfp4viz.model import planner
from nvfp4viz.model.routing_log import RoutingLog
from nvfp4viz.moe.router_comparison import ROUTERS, compare_routers
from sample_checkpoints import ROUTING

THEMES = ["light", "dark"]
LANGUAGES = ["en", "zh"]
TABLE = np.array([[5, 1, 0]])
LOGITS = [2.0, -1.0, 0.5, 1.5, float("nan"), 1.0, 0.0, -2.0]
NAMES = {name: name for name in ROUTERS}


@pytest.fixture(scope="module")
def news():
    return RoutingLog.read(ROUTING, "news")


@pytest.fixture(scope="module")
def calibration():
    return RoutingLog.read(ROUTING, "calibration")


@pytest.fixture(scope="module")
def picked():
    return compare_routers(LOGITS, 3, bias=np.zeros(8), token=0, table=TABLE, groups=4, top_groups=2)


def centres(path, points):
    """``[layer, expert]`` of every cell that an SVG path marks with so many points."""
    at = np.array(re.findall(r"(-?[\d.]+),(-?[\d.]+)", path), float).reshape(-1, points, 2)
    return ((at.max(axis=1) + at.min(axis=1)) / 2).round().astype(int)[:, ::-1].tolist()


def numbers_of(texts):
    """The count that each cell's text names; 0 where it names none."""
    return [
        ["".join(re.findall(r"[：:] ?(?:路由来 )?([\d,]+)", text)).replace(",", "") or 0 for text in row]
        for row in texts
    ]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
class TestFigures:
    def test_maps(self, calibration, theme, lang):
        used = RoutingLog.read(ROUTING, "arithmetic").totals()
        seen = calibration.totals()
        figure = routing.map_figure({"a": used, "b": seen}, theme=theme, lang=lang)
        hatches, frames = figure.layout.shapes[:2], figure.layout.shapes[2]
        for heat, hatch, counts in zip(figure.data, hatches, (used, seen), strict=True):
            # A slot without a token has no colour; it has a hatch.
            assert (np.isnan(heat.z) == (counts == 0)).all()
            assert centres(hatch.path, 6) == np.argwhere(counts == 0).tolist()
        assert centres(frames.path, 4) == np.argwhere((used > 0) & (seen == 0)).tolist()
        assert len(centres(frames.path, 4)) == routing.blind_routes(used, seen)[1]
        assert (hatches[1].yref, frames.yref) == ("y2", "y2")
        missed = [int(text) for row in numbers_of(figure.data[1].text) for text in row]
        assert sum(missed) == routing.blind_routes(used, seen)[0] + seen.sum()
        said = routing.describe_maps(used, seen, lang)
        assert f"{routing.blind_routes(used, seen)[0]:,}" in said
        assert routing.describe_maps(seen, seen, lang) != said

    def test_one_map(self, calibration, theme, lang):
        empty = calibration.totals(0)
        figure = routing.map_figure({"a": empty}, theme=theme, lang=lang)
        assert len(figure.data) == 1
        assert len(centres(figure.layout.shapes[0].path, 6)) == empty.size

    @pytest.mark.parametrize("documents", [0, 1, 512])
    def test_holes(self, calibration, theme, lang, documents):
        figure = routing.holes_figure(calibration, documents, theme=theme, lang=lang)
        assert figure.data[0].y[-1] == (calibration.totals() == 0).sum()
        if documents:
            assert list(figure.data[1].y) == [calibration.holes_after()[documents]]
        said = routing.describe_holes(calibration, documents, lang)
        assert str(calibration.holes_after()[documents]) in said

    def test_a_plan_hides_what_came_until_it_is_asked_for(self, news, theme, lang):
        plans = planner.plan_unseen(news.part(0, 64), [64, 128, 512])
        hidden, shown = (plan_figures.plan_figure(news, plans, r, theme=theme, lang=lang) for r in (False, True))
        assert len(shown.data) == len(hidden.data) + 1
        assert shown.data[-1].y[-1] == news.holes_after()[512]
        assert max(hidden.data[-1].x) == news.tokens_after()[64]
        styles = {trace.line.dash or "solid" for trace in shown.data}
        assert len(styles) == 3  # told apart without colour
        said = plan_figures.describe_plan(plans[-1], lang)
        assert str(plans[-1].low) in said
        assert str(plans[-1].high) in said

    def test_check(self, news, theme, lang):
        checks = planner.check_planner({"news": news}, 64, 256, level=0.5)
        figure = plan_figures.check_figure(checks, {"news": "N"}, theme=theme, lang=lang)
        bars, inside, outside = figure.data
        assert len(bars.base) == len(checks)
        assert len(inside.x) == sum(check.held for check in checks)
        assert len(outside.x) == sum(not check.held for check in checks) > 0
        assert inside.marker.symbol != outside.marker.symbol
        assert f"{sum(check.held for check in checks)}" in plan_figures.describe_check(checks, lang)
        assert "50 %" in plan_figures.describe_check(checks, lang)

    def test_routers(self, picked, theme, lang):
        figure = routers.routers_figure(picked, NAMES, LOGITS, [0.0] * 8, 4, theme=theme, lang=lang)
        bars = [trace for trace in figure.data if trace.type == "bar"]
        assert len(bars[0].x) + len(bars[1].x) == 3 * len(picked)
        assert len(bars[1].x) == 6  # Gemma 4's and those of torch, hatched
        assert bars[1].marker.pattern.shape == "/"
        texts = [trace for trace in figure.data if trace.type == "scatter"]
        assert set(texts[1].text) == {"N"}
        assert figure.layout.xaxis.ticktext[4] == "<b>4</b><br>NaN<br>0"
        said = routers.describe_routers(picked, NAMES, lang)
        assert f"{len({frozenset(one.ids) for one in picked.values()})}" in said


def test_rows_are_complete(calibration, news, picked):
    rows = routing.map_rows({"a": calibration.totals()})
    assert len(rows) == 256
    assert sum(row["a"] == 0 for row in rows) == 53
    curve = routing.hole_rows(calibration)
    steps = sorted({int(n) for n in calibration.holes_after()}, reverse=True)
    assert [row["slots_without_a_token"] for row in curve] == [*steps, 53]
    plans = planner.plan_unseen(news.part(0, 64), [64, 512])
    assert "unseen" not in plan_figures.plan_rows(news, plans, False)[-1]
    assert plan_figures.plan_rows(news, plans, True)[-1]["unseen"] == news.holes_after()[512]
    checks = planner.check_planner({"news": news}, 64, 512)
    assert [row["held"] for row in plan_figures.check_rows(checks)] == [check.held for check in checks]
    cells = routers.router_rows(picked, LOGITS)
    assert len(cells) == 8 * len(picked)
    assert sum(row["rank"] is not None for row in cells) == 3 * len(picked)


def test_closings_name_documents_and_slots(calibration):
    found = routing.closings(calibration, 512, 100)
    assert [at for at, _ in found] == sorted((at for at, _ in found), reverse=True)
    assert sum(len(slots) for _, slots in found) == 256 - 53
    for at, slots in found:
        for layer, expert in slots:
            assert calibration.totals(at - 1)[layer, expert] == 0
            assert calibration.totals(at)[layer, expert] > 0
    assert len(routing.closings(calibration, 512, 3)) == 3
    assert routing.closings(calibration, 0, 3) == []
