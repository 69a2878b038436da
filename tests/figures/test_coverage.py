"""The coverage map's record: what counts as a hole, how a run meets holes, and what the browser is handed."""

import base64
import dataclasses
import json

import numpy as np
import pytest

from nvfp4viz.figures.coverage import (
    HOLES,
    STATUSES,
    CoverageGrid,
    RouteOverlay,
    coverage_figure,
    coverage_rows,
    describe_coverage,
    describe_routes,
    meet,
    pack,
    pack_cells,
    shown,
)


@pytest.fixture
def grid() -> CoverageGrid:
    """Two layers, five experts; w13 misses (0, 1) and (1, 4), w2 misses only (1, 4)."""
    status = np.zeros((2, 2, 5), np.uint8)
    status[0, 0, 1] = status[0, 1, 4] = status[1, 1, 4] = STATUSES.index("missing")
    values = np.arange(20, dtype=np.float32).reshape(2, 2, 5)
    return CoverageGrid("sample", (3, 7), ("w13", "w2"), status, values, np.full((2, 5), 9, np.int32))


@pytest.fixture
def overlay() -> RouteOverlay:
    """Three tokens, two experts each; token 1 meets the hole of layer 7, and token 2 is routed from NaN in layer 7."""
    ids = np.array([[[0, 2], [0, 1]], [[0, 3], [2, 4]], [[3, 2], [0, 1]]], np.int16)
    blind = np.array([[0, 0, 0], [0, 0, 1], [0, 1, 1]], bool)
    return RouteOverlay(("a", "`", "<pad>"), 2, ids, blind)


def test_every_status_without_a_usable_number_is_a_hole():
    for name in STATUSES:
        grid = CoverageGrid("x", (0,), ("w13",), np.full((1, 1, 1), STATUSES.index(name), np.uint8))
        assert grid.holes("w13")[0, 0] == (name in HOLES)


def test_routes_into_holes_are_counted_and_the_first_is_named(grid, overlay):
    met = meet(grid, overlay, "w13")
    assert met.routes == 10  # twelve, less the two that were chosen from NaN
    assert (met.into_holes, met.holes_hit, met.tokens_hit) == (1, 1, 1)
    assert met.first == (1, 1, 4)
    assert met.per_token == (0, 1, 0)


def test_a_route_chosen_from_nan_never_counts(grid, overlay):
    blind = overlay.blind.copy()
    blind[1, 1] = True
    assert meet(grid, RouteOverlay(overlay.tokens, 2, overlay.ids, blind), "w13").first is None


def test_first_means_first_to_be_computed():
    """The prompt goes through layer 0 as a whole: token 1's hole there comes before token 0's in layer 1."""
    status = np.zeros((1, 2, 4), np.uint8)
    status[0, 0, 3] = status[0, 1, 2] = STATUSES.index("missing")
    grid = CoverageGrid("x", (0, 1), ("w13",), status)
    ids = np.array([[[0], [2]], [[3], [0]], [[3], [2]]], np.int16)
    blind = np.zeros((3, 3), bool)
    assert meet(grid, RouteOverlay(("a", "b", "c"), 2, ids, blind), "w13").first == (1, 0, 3)
    assert meet(grid, RouteOverlay(("a", "b", "c"), 1, ids, blind), "w13").first == (0, 1, 2)


def test_roles_differ(grid):
    assert grid.holes("w13").sum() == 2
    assert grid.holes("w2").sum() == 1


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_sentences_carry_the_numbers(grid, overlay, lang):
    coverage = describe_coverage(grid, "w13", lang)
    assert "2" in coverage
    assert "10" in coverage
    assert "20 %" in coverage
    routes = describe_routes(grid, overlay, "w13", lang)
    assert "7" in routes
    assert "4" in routes
    assert shown("`") in routes


def test_full_coverage_says_so(grid):
    full = CoverageGrid("x", (0,), ("w13",), np.zeros((1, 1, 4), np.uint8))
    assert describe_coverage(full, "w13", "en") == "All 4 slots of `w13` hold a scale."


def test_the_browser_gets_the_same_bytes(grid, overlay):
    packed = pack(grid, lang="en", role_name="w2", overlay=overlay, selected=(1, 4))
    cells = pack_cells(grid)
    assert packed["cells"] == cells["id"]
    status = np.frombuffer(base64.b64decode(cells["status"]), np.uint8).reshape(grid.status.shape)
    np.testing.assert_array_equal(status, grid.status)
    values = np.frombuffer(base64.b64decode(cells["values"]), np.float32).reshape(grid.status.shape)
    np.testing.assert_array_equal(values, grid.values)
    ids = np.frombuffer(base64.b64decode(packed["routes"]["ids"]), np.int16).reshape(overlay.ids.shape)
    np.testing.assert_array_equal(ids, overlay.ids)
    assert packed["routes"]["blindEnd"] == [False, True, True]
    assert packed["role"] == 1
    assert packed["scale"] == "input_scale"
    assert packed["routes"]["first"] == {"token": 1, "layer": 1, "expert": 4}
    assert packed["routes"]["focus"] == 1


def test_the_identity_follows_the_content_not_the_language(grid, overlay):
    english = pack(grid, lang="en", role_name="w13", overlay=overlay)
    assert pack(grid, lang="zh", role_name="w2", overlay=overlay)["id"] == english["id"]
    other = RouteOverlay(overlay.tokens, 2, overlay.ids[:, :, ::-1].copy(), overlay.blind)
    assert pack(grid, lang="en", role_name="w13", overlay=other)["id"] != english["id"]


def test_sixty_one_by_384_stays_small():
    status = np.zeros((2, 61, 384), np.uint8)
    grid = CoverageGrid("big", tuple(range(61)), ("w13", "w2"), status, np.ones(status.shape, np.float32))
    cells = pack_cells(grid)
    assert len(cells["status"]) + len(cells["values"]) < 330_000


def test_a_pick_brings_no_cells():
    """What differs from pick to pick is small, however large the map; the cells are the same bytes each time."""
    status = np.zeros((3, 60, 512), np.uint8)
    grid = CoverageGrid("big", tuple(range(60)), ("gate", "up", "down"), status, np.ones(status.shape, np.float32))
    picks = [pack(grid, lang="en", role_name="up", selected=(7, expert)) for expert in (3, 300)]
    assert picks[0] != picks[1]
    assert all(len(json.dumps(one)) < 4_000 for one in picks)
    assert pack_cells(grid) == pack_cells(dataclasses.replace(grid))


def test_the_cells_are_others_where_one_of_them_is(grid):
    """A status, a number or a count: what the browser holds is then asked for anew."""
    seen = {pack_cells(grid)["id"]}
    for name in ("status", "values", "counts"):
        array = getattr(grid, name)
        changed = np.zeros(grid.status.shape[1:], np.int32) if array is None else array.copy()
        changed.flat[-1] += 1
        seen.add(pack_cells(dataclasses.replace(grid, **{name: changed}))["id"])
    assert len(seen) == 4


def test_the_table_has_a_row_a_slot_and_no_value_where_nothing_is_stored(grid, overlay):
    rows = coverage_rows(grid, overlay)
    assert len(rows) == 20
    hole = next(row for row in rows if (row["role"], row["layer"], row["expert"]) == ("w13", 7, 4))
    assert hole["status"] == "missing"
    assert hole["value"] is None
    assert hole["prompt_routes"] == 1
    kept = next(row for row in rows if (row["role"], row["layer"], row["expert"]) == ("w2", 3, 0))
    assert kept["value"] == 10.0
    assert kept["calibration_tokens"] == 9
    assert kept["prompt_routes"] == 2


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_report_figure_leaves_holes_as_gaps_and_marks_them(grid, overlay, theme):
    figure = coverage_figure(grid, role_name="w13", theme=theme, lang="en", overlay=overlay)
    z = np.asarray(figure.data[0].z)
    np.testing.assert_array_equal(np.isnan(z), grid.holes("w13"))
    marks = next(trace for trace in figure.data if trace.type == "scatter" and trace.mode == "text")
    assert list(marks.text) == ["∅", "∅"]
    assert list(marks.x) == [1, 4]
    assert list(marks.y) == ["L3", "L7"]
