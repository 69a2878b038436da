"""Figures of expert parallelism say what their records say."""

import re

import numpy as np
import pytest
from plotly.colors import sample_colorscale

from nvfp4viz.figures import expert_parallel as figures
from nvfp4viz.figures.palette import contrast, on_sequential
from nvfp4viz.moe import overlap
from nvfp4viz.moe.parallel import Placement, choose_slots, exchange, imbalance, place
from nvfp4viz.serving import route_trace

THEMES = ["light", "dark"]
LANGUAGES = ["en", "zh"]


def batch(ranks, redundant=0):
    rng = np.random.default_rng(2)
    placed = place(64, ranks, redundant=redundant)
    ids = np.stack([rng.permutation(64)[:4] ** 2 // 64 for _ in range(200)])
    slots = choose_slots(ids, placed)
    return placed, slots, exchange(slots, placed)


def readable(cells, labels, theme):
    """Every cell has its text, and on its colour by 4.5 : 1; where it has none, the page shows."""
    assert list(labels["text"]) == np.array(cells["text"]).ravel().tolist()
    wide = len(cells["z"][0])
    assert [y * wide + x for x, y in zip(labels["x"], labels["y"], strict=True)] == list(range(len(labels["text"])))
    behind = [figures.surface(theme).page if value is None else cividis(value / cells["zmax"])
              for line in cells["z"] for value in line]  # fmt: skip
    for ink, ground in zip(labels["textfont"]["color"], behind, strict=True):
        assert contrast(ink, ground) >= 4.5


def cividis(share):
    rgb = sample_colorscale("Cividis", [share], colortype="tuple")[0]
    return "#" + "".join(f"{round(255 * part):02X}" for part in rgb)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("ranks", [4, 32])
class TestFigures:
    def test_ranks(self, theme, lang, ranks):
        placed, _, layer = batch(ranks, ranks)
        drawn = figures.ranks_drawing(placed, layer, alt="<ranks>", lang=lang)
        assert 'aria-label="&lt;ranks&gt;"' in drawn
        boxes = re.findall(r'<li(.*?) title="(.*?)"><span>(.*?)</span></li>', drawn)
        assert [int(name.rstrip("′")) for *_, name in boxes] == placed.slots.tolist()
        assert [name.endswith("′") for *_, name in boxes] == (placed.replicas[placed.slots] > 1).tolist()
        assert [
            int(re.findall(r"[\d,]+", said)[-1].replace(",", "")) for _, said, _ in boxes
        ] == layer.slot_rows.tolist()
        # A slot without a row is hatched and has no colour; the others' is the logarithm of n + 1.
        assert [look == ' class="idle"' for look, *_ in boxes] == (layer.slot_rows == 0).tolist()
        assert (layer.slot_rows == 0).any()
        top = np.log10(layer.slot_rows.max() + 1)
        for (look, *_), rows in zip(boxes, layer.slot_rows.tolist(), strict=True):
            if rows:
                red, green, blue, ink = re.search(r"rgb\((\d+), (\d+), (\d+)\);color:(#\w+)", look).groups()
                ground = f"#{int(red):02X}{int(green):02X}{int(blue):02X}"
                assert ground == cividis(np.log10(rows + 1) / top)
                assert contrast(ink, ground) >= 4.5
        totals = re.findall(r'<p class="name">.*?<b>([\d,]+)</b>', drawn)
        assert [int(total.replace(",", "")) for total in totals] == layer.rank_rows.tolist()
        said = figures.describe_ranks(placed, layer, lang)
        assert f"{imbalance(layer.rank_rows).ratio:.2f}" in said
        assert sum(row["rows"] for row in figures.slot_rows(placed, layer)) == 800

    def test_matrix(self, theme, lang, ranks):
        _, _, layer = batch(ranks)
        sent, back = layer.dispatch_bytes(4096), layer.combine_bytes(4096)
        figure = figures.matrix_figure(sent, theme=theme, lang=lang).to_dict()
        cells, *labels = figure["data"]
        # Numbers in the cells, and their unit above; where there is no room for them, a colour bar.
        assert len(labels) == (ranks == 4)
        for each in labels:
            readable(cells, each, theme)
        assert cells["showscale"] == (ranks == 32)
        unit = figures.words(lang, "figures.expert_parallel.kilobytes")
        assert [one["text"] for one in figure["layout"].get("annotations", [])] == ([unit] if ranks == 4 else [])
        drawn = np.array([[np.nan if value is None else value for value in row] for row in cells["z"]])
        assert np.isnan(drawn.diagonal()).all()
        assert np.nansum(drawn) * 1000 == pytest.approx(sent.sum())  # thousandths are no binary fractions
        assert f"{int(sent.sum()):,}" in figures.describe_matrix(sent, lang)
        rows = figures.sent_rows(layer, sent, back)
        assert sum(row["dispatch_bytes"] for row in rows) == sent.sum()
        assert sum(row["combine_bytes"] for row in rows) == back.sum()

    @pytest.mark.parametrize("halves", [1, 2])
    def test_timeline(self, theme, lang, ranks, halves):
        placed, slots, whole = batch(ranks)
        machine = overlap.Machine(1e11, 1e-5, 1e15, 5e12)
        parts = [whole] if halves == 1 else overlap.halves(slots, placed)
        bars = overlap.timeline([overlap.phases(part, overlap.LayerSize(4096, 2048), machine) for part in parts])
        drawn = figures.timeline_figure(bars, theme=theme, lang=lang).to_dict()["data"]
        assert [len(kind["x"]) for kind in drawn] == [halves * min(ranks, figures.WRITTEN)] * 3
        ends = [base + width for kind in drawn for base, width in zip(kind["base"], kind["x"], strict=True)]
        assert max(ends) == pytest.approx(1e6 * overlap.total(bars))  # seconds to microseconds and back
        patterns = {(kind["marker"].get("pattern") or {}).get("shape", "") for kind in drawn}
        assert len(patterns) == 3  # not by colour alone
        assert f"{1e6 * overlap.total(bars):,.1f}" in figures.describe_timeline(bars, lang)
        assert len(figures.bar_rows(bars)) == 3 * ranks * halves
        some = {
            "en": "Of 32 ranks the figure has the 4 that compute longest",
            "zh": "图中只画了 32 个 rank 里计算最久的 4 个",
        }
        assert (some[lang] in figures.describe_timeline(bars, lang)) == (ranks == 32)
        for after in (0.5 * overlap.total(bars), 2 * overlap.total(bars)):
            marked = figures.timeline_figure(bars, theme=theme, lang=lang, after=after).to_dict()["layout"]
            assert marked["shapes"][0]["x0"] == marked["annotations"][0]["x"] == 1e6 * after
            # Below all ranks, where it hides no bar.
            low, _ = marked["yaxis"]["range"]
            assert len(figures.lanes(bars)) - 0.5 < marked["annotations"][0]["y"] < low
            assert marked["xaxis"]["range"][1] > 1e6 * max(after, overlap.total(bars))
            assert f"{1e6 * after:,.1f}" in figures.describe_timeline(bars, lang, after)

    def test_balance(self, theme, lang, ranks):
        rng = np.random.default_rng(1)
        placed = place(64, ranks)
        without, rebalanced = rng.integers(0, 99, (2, 8, ranks))
        found = route_trace.Balance(placed, (placed,), (Placement(placed.slots, ranks, 64),), 0, without, rebalanced)
        figure = figures.balance_figure(found, theme=theme, lang=lang).to_dict()
        before, after = figure["data"]
        (mean,) = figure["layout"]["annotations"]
        assert (mean["xref"], mean["x"], mean["xanchor"]) == ("paper", 1, "left"), "beside the bars, over none"
        assert np.array_equal(before["y"], without.sum(axis=0))
        assert np.array_equal(after["y"], rebalanced.sum(axis=0))
        assert before["marker"]["pattern"]["shape"] == "/"
        said = figures.describe_balance(found, lang)
        assert f"{found.before.ratio:.2f}" in said
        assert f"{found.after.ratio:.2f}" in said
        assert len(figures.balance_rows(found)) == 8 * ranks


def test_of_many_ranks_the_busiest_and_the_idlest_are_drawn():
    bars = tuple(overlap.Bar(rank, "compute", 0, 0.0, float(rank)) for rank in range(32))
    assert figures.lanes(bars) == [0, 1, 2, 3, 28, 29, 30, 31]


def test_the_ink_turns_where_both_can_be_read():
    for share in np.linspace(0, 1, 1001):
        assert contrast(on_sequential(share), cividis(share)) >= 4.5, share
