"""Figures of fused projections."""

import numpy as np
import pytest

from nvfp4viz.figures import fusion
from nvfp4viz.figures.palette import role
from nvfp4viz.moe.fusion import find_row, trace_row
from nvfp4viz.quant.shared_scale import SHARE_WAYS, share_scale

THEMES = ["light", "dark"]
LANGUAGES = ["en", "zh"]
LAYOUTS = [
    fusion.attention_of("qwen3_30b", 4),
    fusion.attention_of("qwen3_235b", 16),
    fusion.experts_of("tiny_moe", 2),
    fusion.deltanet_of("small", 2, "flat"),
    fusion.deltanet_of("small", 2, "interleaved"),
    fusion.deltanet_of("qwen3_next", 8, "interleaved", "ba"),
]


@pytest.fixture(scope="module")
def found():
    rng = np.random.default_rng(0)
    sizes = {"q": 1, "k": 2, "v": 4}
    return share_scale({name: (size * rng.standard_normal((8, 32))).astype(np.float32) for name, size in sizes.items()})


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.name}-{one.order}-{one.tp}")
class TestRows:
    def test_every_column_is_filled_once(self, layout, theme, lang):
        figure = fusion.rows_figure(layout, theme=theme, lang=lang).to_dict()
        spans = {}
        for bar in figure["data"]:
            for x, base, height in zip(bar["x"], bar["base"], bar["y"], strict=True):
                spans.setdefault(x, []).append((base, base + height))
        assert len(spans) == 1 + layout.tp
        for column in spans.values():
            column.sort()
            assert column[0][0] == 0
            assert column[-1][1] == pytest.approx(1)
            assert [end for _, end in column[:-1]] == pytest.approx([start for start, _ in column[1:]])
        below, above = figure["layout"]["yaxis"]["range"]
        tall = figure["layout"]["height"] - fusion.MARGIN_ABOVE - fusion.MARGIN_BELOW
        room = tall / (below - above)  # of the strips
        assert room == pytest.approx(460 - fusion.MARGIN_ABOVE - fusion.MARGIN_BELOW)
        # Half a mark stands beyond the first and the last row, and its outline.
        assert max(above, 1 - below) < -(fusion.MARK / 2 + 2) / room

    def test_parts_are_told_by_more_than_colour(self, layout, theme, lang):
        figure = fusion.rows_figure(layout, theme=theme, lang=lang).to_dict()
        assert [bar["name"] for bar in figure["data"]] == [part.name for part in layout.parts]
        shapes = {part.name: fusion.STYLES[part.name][1] for part in layout.parts}
        assert len(set(shapes.values())) == len(shapes)
        for bar in figure["data"]:
            # A strip too thin for its label is told by its pattern, and by what one hovers over; no pattern runs
            # through a label.
            # The legend shows the first strip.
            assert bar["text"][0] or not any(bar["text"])
            for text, shape in zip(bar["text"], bar["marker"]["pattern"]["shape"], strict=True):
                assert (
                    (text.replace("<br>", " ").split()[0], shape) == (bar["name"], "")
                    if text
                    else shape == shapes[bar["name"]]
                )
            assert all(bar["name"] in text for text in bar["hovertext"])

    def test_the_followed_row_is_drawn_on_every_rank_that_has_it(self, layout, theme, lang):
        at = layout.tp - 1, layout.rank_rows - 1
        drawn = fusion.rows_figure(layout, theme=theme, lang=lang, follow=at).to_dict()["data"][-1]
        row = trace_row(layout, *at)
        copies = find_row(layout, row.part, row.part_row)
        assert len(drawn["x"]) == 1 + len(copies)
        assert drawn["y"][1:] == [(place + 0.5) / layout.rank_rows for _, place in copies]
        assert drawn["marker"]["color"] == role("route", theme).fill

    def test_the_line_passes_behind_the_columns_and_the_marks_stand_on_their_edges(self, layout, theme, lang):
        """A line over the columns would strike through their labels."""
        at = layout.tp - 1, layout.rank_rows - 1
        *columns, line, marks = fusion.rows_figure(layout, theme=theme, lang=lang, follow=at).to_dict()["data"]
        assert line["zorder"] < min(column["zorder"] for column in columns)
        assert marks["zorder"] > max(column["zorder"] for column in columns)
        assert line["x"] == marks["x"]
        lefts = {place - column["width"] / 2 for column in columns for place in column["x"]}
        assert set(marks["x"]) <= lefts
        assert (line["mode"], marks["mode"]) == ("lines", "markers")

    def test_it_is_said_and_tabled(self, layout, theme, lang):
        said = fusion.describe_rows(layout, lang)
        assert f"{layout.rank_rows:,}" in said
        for part in layout.parts:
            assert f"{layout.rank_units(part) * part.unit_rows:,} {part.name}" in said
        held = layout.tp * layout.rank_rows
        extra = held - layout.whole.rank_rows
        assert extra == 0 or f"{extra:,}" in said
        rows = fusion.run_rows(layout)
        assert sum(row["last_row"] - row["first_row"] + 1 for row in rows) == held


def test_a_label_taller_than_its_strip_is_left_out():
    """Interleaved, the checkpoint's column is cut into strips that no line of text fits into."""
    layout = fusion.deltanet_of("small", 4, "interleaved")
    figure = fusion.rows_figure(layout, theme="light", lang="en", height=520)
    room = 520 - fusion.MARGIN_ABOVE - fusion.MARGIN_BELOW
    bars = [bar for bar in figure.data if bar.type == "bar"]
    strips = [(high * room, text) for bar in bars for high, text in zip(bar.y, bar.text, strict=True)]
    assert all(bool(text) == (high >= fusion.LEAST_STRIP) for high, text in strips)
    assert {bool(text) for _, text in strips} == {True, False}


def test_few_columns_name_heads_and_many_only_parts():
    few, many = (fusion.rows_figure(fusion.attention_of("qwen3_30b", tp), theme="light", lang="en") for tp in (4, 8))
    assert few.data[0].text[1] == "q<br>0–7", "two lines fit a phone's narrow columns"
    assert few.data[1].text[1] == "k 0", "a low strip has room for one"
    assert set(many.data[0].text) == {"q"}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
def test_scales(found, theme, lang):
    figure = fusion.scales_figure(found, theme=theme, lang=lang).to_dict()
    assert [bar["name"] for bar in figure["data"]] == ["q", "k", "v"]
    for bar in figure["data"]:
        assert list(bar["x"]) == [found[way][bar["name"]].summary.sqnr_db for way in SHARE_WAYS]
        assert len(set(bar["y"])) == len(SHARE_WAYS)
    low, high = figure["layout"]["xaxis"]["range"]
    assert low < min(min(bar["x"]) for bar in figure["data"])
    assert high > max(max(bar["x"]) for bar in figure["data"])
    said = fusion.describe_scales(found, lang)
    worst = fusion.worst_part(found, "max")
    assert worst.name == "q"
    for way in ("own", "max", "rerounded", "shared"):
        assert f"{found[way]['q'].summary.sqnr_db:.2f}".replace("-", "−") in said
    assert len(fusion.scale_rows(found)) == len(SHARE_WAYS) * 3


@pytest.mark.parametrize("lang", LANGUAGES)
def test_equal_scales_are_said_to_be_equal(lang):
    one = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    equal = share_scale({"gate": one, "up": -one})
    assert fusion.describe_scales(equal, lang) == fusion.words(lang, "figures.fusion.describe_equal")
