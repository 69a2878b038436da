"""Figures about loading show their records: cells, marks, sentences and rows."""

import html
from dataclasses import replace

import numpy as np
import pytest
from plotly.colors import sample_colorscale

from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.figures import loading as figures
from nvfp4viz.figures.palette import contrast
from nvfp4viz.figures.words import words
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving import load
from nvfp4viz.serving.fates import complete_with, run_fates
from nvfp4viz.serving.spread import READINGS, spread_value
from sample_checkpoints import ensure

THEMES = ["light", "dark"]


@pytest.fixture(scope="module")
def fates():
    broken, full = (open_checkpoint(ensure(f"tiny-moe-nvfp4-{name}")) for name in ("holes", "full"))
    return run_fates(broken, complete_with(broken, full), DEMO_PROMPTS["code"], n=4)


@pytest.fixture(scope="module")
def layer():
    return load(ensure("tiny-moe-nvfp4-full"), device="cpu").parameters[0]


def test_numbers_can_be_read_on_every_colour(fates):
    for exponent in np.linspace(-3, 0, 61):
        even = [replace(fate, effect=replace(fate.effect, layer_error=np.full(4, 10.0**exponent),
                                             layer_nan=np.zeros(4))) for fate in fates]  # fmt: skip
        heat, *_, text, _ = figures.fates_figure(even, theme="light", lang="en").data
        rgb = sample_colorscale("Cividis", [(heat.z[1][0] - heat.zmin) / (heat.zmax - heat.zmin)], colortype="tuple")[0]
        behind = "#" + "".join(f"{round(255 * part):02X}" for part in rgb)
        assert contrast(text.textfont.color[4], behind) >= 4.5, exponent


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_cell_of_every_fate_is_drawn(fates, theme, lang):
    heat, bars, text, _ = figures.fates_figure(fates, theme=theme, lang=lang).data
    # The complete twin's row comes first.
    assert text.text[:4] == ("=",) * 4
    assert np.isnan(heat.z[0]).all()
    cells = [(fate, k) for fate in fates for k in range(4)]
    assert len(text.text) == 4 + len(cells)
    for (fate, k), shown, colour in zip(cells, text.text[4:], np.ravel(heat.z[1:]), strict=True):
        error, share = fate.effect.layer_error[k], fate.effect.layer_nan[k]
        assert shown.startswith("<b>N</b>") == (share > 0)
        assert (shown == "=") == (share == 0 and error == 0)
        # Only finite errors stand on the colour scale.
        assert np.isfinite(colour) == (share == 0 and error > 0)
    # A box under every other cell, hatched where a NaN is.
    boxes = {
        (row, base + 0.48): pattern
        for row, base, pattern in zip(bars.y, bars.base, bars.marker.pattern.shape, strict=True)
    }
    assert boxes == {
        divmod(at, 4): "/" if shown.startswith("<b>N") else ""
        for at, shown in enumerate(text.text)
        if not shown.endswith("%") or shown.startswith("<b>N")
    }


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_under_each_row_stands_its_reply(fates, lang):
    *_, replies = figures.fates_figure(fates, theme="light", lang=lang).data
    whole, *others = replies.text
    assert html.unescape(whole) == figures.one_line(fates[0].effect.healthy.text)[0].lstrip()
    for fate, shown in zip(fates, others, strict=True):
        line, count = figures.one_line(fate.text)
        assert html.unescape(shown) == f"{'=' if fate.same_text else '≠'} {line}" + (f" × {count}" if count > 1 else "")
        assert "<" not in shown  # Plotly would take a token for a tag
    assert {shown[0] for shown in others} == {"=", "≠"}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_covered_fate_shows_nothing_of_itself(fates, theme, lang):
    names = [fate.allocator for fate in fates[1:]]
    figure = figures.fates_figure(fates[:1], covered=names, theme=theme, lang=lang)
    heat, bars, text, replies = figure.data
    assert text.text[8:] == ("?",) * (4 * len(names))
    assert [row for row in bars.y if row >= 2] == [row for row in range(2, 6) for _ in range(4)]
    assert np.isnan(heat.z[2:]).all()
    assert set(replies.text[2:]) == {words(lang, "figures.loading.covered")}
    assert figure.layout.yaxis.ticktext == figures.fates_figure(fates, theme=theme, lang=lang).layout.yaxis.ticktext


def test_an_unmeasured_fate_shows_its_reply_alone(fates):
    name = fates[1].allocator
    known = figures.fates_figure(fates, theme="light", lang="en")
    figure = figures.fates_figure(fates, unmeasured=[name], theme="light", lang="en")
    heat, _, text, replies = figure.data
    assert np.isnan(heat.z[2]).all()
    assert text.text[8:12] == ("?",) * 4
    assert text.text[:8] + text.text[12:] == known.data[2].text[:8] + known.data[2].text[12:]
    assert replies.text == known.data[3].text


def test_the_sentence_counts_what_the_records_hold(fates):
    said = figures.describe_fates(fates, "en")
    assert f"{len({fate.text for fate in fates})} different repl" in said
    assert "2 end in NaN. The first layer that differs is layer 1." in said
    assert len(figures.fate_rows(fates)) == 5 * 4


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize(("value", "mark"), [(float("nan"), "N"), (float("inf"), "∞"), (1e30, "!")])
def test_reached_experts_are_filled_and_marked(layer, theme, lang, value, mark):
    spreads = spread_value(layer, "down", 9, value)
    figure = figures.spread_figure(spreads, theme=theme, lang=lang)
    (heat,) = figure.data
    # One expert on the per-expert path, all 64 under each of five maxima.
    assert sum(cell == 1 for row in heat.z for cell in row) == sum(s.reached or 0 for s in spreads) == 1 + 5 * 64
    assert {text for row in heat.text for text in row} == {"", mark}
    # The per-expert backend's square comes first; expert 9 stands in its second row and column.
    assert [row[:8].index(1) for row in heat.z[:14] if 1 in row[:8]] == [1]
    # A square of cells for each reading whose rule is known, and a question mark for the other.
    assert sum(cell is not None for row in heat.z for cell in row) == 12 * 64
    notes = [note.text for note in figure.layout.annotations]
    assert notes.count("?") == 1
    for spread in spreads:
        count = "?" if spread.reached is None else f"{spread.reached} / 64"
        assert f"{figures.short_name(spread, lang)}<br><b>{count}</b>" in notes


def test_every_reading_stands_in_one_band():
    rules = [rule for band in figures.BANDS for rule in band]
    assert sorted(rules) == sorted({reading.rule for reading in READINGS})


def test_a_zero_reaches_one_expert(layer):
    spreads = spread_value(layer, "down", 9, 0.0)
    (heat,) = figures.spread_figure(spreads, theme="light", lang="zh").data
    assert [row[1] for row in heat.text if row[1]] == ["0"]
    assert figures.describe_spread(spreads, "en").startswith("Of 64 experts, the value changes 1 on the per-expert")
    rows = figures.spread_rows(spreads)
    assert len(rows) == 12 * 64 + 1
    assert sum(bool(row["changed"]) for row in rows) == 1
    assert [row["backend"] for row in rows if row["changed"] is None] == ["vllm-b12x"]


@pytest.mark.parametrize(
    ("value", "mark"), [(1.0, ""), (0.0, "0"), (-2.0, "−"), (np.nan, "N"), (np.inf, "∞"), (-np.inf, "−∞")]
)
def test_marks(value, mark):
    assert figures.mark_of(value) == mark
