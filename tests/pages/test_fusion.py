"""The page on fusion as a reader in either language meets it."""

import re

import pytest

from nvfp4viz.figures import fusion as figures
from nvfp4viz.figures.words import listed
from nvfp4viz.moe.fusion import find_row, trace_row
from nvfp4viz.ui.fusion_parts import PARTS, RANKS, WHICH
from nvfp4viz.ui.fusion_scale_parts import ASKED_LAYER, FACTORS, STRETCHES, WHAT, measured, shared

from .conftest import clean, guessed, shown_code_output, skipped, texts

PAGE = "fusion"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "Fusion", "zh": "融合"}
CUT, MAXIMUM, BITS, ROWS = (f"{PAGE}.predict.{name}" for name in ("cut", "maximum", "bits", "rows"))
QUESTIONS = {"deltanet": CUT, "scale": MAXIMUM, "kinds": BITS}
FIGURES = {"qkv": 1, "w13": 1, "deltanet": 2, "scale": 1, "kinds": 0, "unchanged": 0}


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_opens_by_link(open_page, lang, part):
    at = open_page(PAGE, lang=lang, part=part)
    assert at.title[0].value == TITLES[lang]
    if part in QUESTIONS:
        assert len(at.get("plotly_chart")) == 0
        skipped(at, QUESTIONS[part])
    assert len(at.get("plotly_chart")) == FIGURES[part]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"part": "moe"},
        {"tp": "3"},
        {"tp": "many"},
        {"attn": "llama"},
        {"ffn": "small"},
        {"gdn": "tiny_moe"},
        {"which": "qkv"},
        {"rank": "4"},
        {"row": "-1"},
        {"row": "1280"},
        {"row": "9" * 5000},
        {"what": "w2"},
        {"layer": "4"},
        {"expert": "64"},
        {"stretch": "3"},
    ],
    ids=lambda query: " ".join(f"{name}={value[:8]}" for name, value in query.items()),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    assert at.title[0].value == TITLES[lang]
    (name,) = query
    assert f"`{name}=" in texts(at)


def test_it_opens_on_rows_that_are_all_accounted_for(open_page):
    at = open_page(PAGE)
    layout = figures.attention_of("qwen3_30b", 4)
    assert figures.describe_rows(layout, "en") in texts(at)
    assert layout.tp * layout.rank_rows * 4 == 20_480


def differing(at):
    """The opening's drawing: (name, differ, values, the bar's share in percent) of each line."""
    (markup,) = [html.proto.body for html in at.get("html") if "differs" in html.proto.body]
    line = r"<li><b>(.*?)</b><span>(.*?)</span><i [^>]*--share: ([\d.]+)%"
    found = re.findall(line, markup)
    return [
        (name, *sorted(int(n.replace(",", "")) for n in re.findall(r"[\d,]+", said)), float(share))
        for name, said, share in found
    ]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("tp", [1, 4])
def test_it_opens_on_what_changes_no_bits_and_what_does(open_page, lang, tp):
    at = open_page(PAGE, lang=lang, tp=str(tp))
    by_id = {one.id: one for one in measured()}
    rows, *others = differing(at)
    assert rows[1:] == (0, tp * figures.attention_of("qwen3_30b", tp).rank_rows * 4, 0.0)
    for drawn, one in zip(others, (by_id["max_scale"], by_id["silu_quant"]), strict=True):
        assert drawn[1:3] == (one.differ, one.values)
        assert 0 < one.differ < one.values
        assert drawn[3] == pytest.approx(100 * one.differ / one.values, abs=5e-5)  # four digits behind the point
    found = shared("qkv", ASKED_LAYER, 0, 1.0)
    (markup,) = [html.proto.body for html in at.get("html") if "differs" in html.proto.body]
    for name, part in found["own"].items():
        assert f"{name} {part.own_scale:.4g}" in markup
    assert len({part.own_scale for part in found["own"].values()}) == 3


def test_a_split_that_is_refused_has_nothing_to_compare(open_page):
    at = open_page(PAGE, attn="tiny_moe", tp="8")
    assert not [html for html in at.get("html") if "differs" in html.proto.body]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_row_is_followed(open_page, lang):
    at = open_page(PAGE, lang=lang, attn="qwen3_235b", tp="8", rank="5", row="1100")
    layout = figures.attention_of("qwen3_235b", 8)
    found = trace_row(layout, 5, 1100)
    assert (found.part, found.unit, found.tensor) == ("k", 2, "k_proj")
    holders = listed(lang, (str(rank) for rank, _ in find_row(layout, found.part, found.part_row)))
    assert holders == {"en": "4, 5", "zh": "4、5"}[lang]
    assert holders in texts(at)
    assert f"`k_proj`{', row ' if lang == 'en' else ' 的第 '}{found.tensor_row}" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("model", figures.ATTENTION)
@pytest.mark.parametrize("tp", RANKS)
def test_every_split_is_drawn_or_refused(open_page, lang, model, tp):
    at = open_page(PAGE, lang=lang, attn=model, tp=str(tp))
    possible = figures.ATTENTION[model][0] % tp == 0
    assert len(at.get("plotly_chart")) == possible
    assert ("fusion.uneven" in texts(at)) == (not possible)


def test_the_order_of_the_backends_is_named(open_page):
    at = open_page(PAGE, part="w13", ffn="tiny_moe", tp="16", rank="15", row="7")
    assert "is row 63 of **up**: `up_proj`, row 63" in texts(at)
    assert "| `FLASHINFER_CUTEDSL` |" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_heads_on_several_ranks_are_asked_for_before_they_are_told(open_page, lang):
    at = open_page(PAGE, lang=lang)
    assert "vLLM" not in texts(at)
    if lang == "en":
        guessed(at, ROWS, "same")
        assert "Your guess: as many as the checkpoint, 5,120" in texts(at)
    else:
        skipped(at, ROWS)
    layout = figures.attention_of("qwen3_30b", 8)
    held = 8 * layout.rank_rows
    assert held == sum(run.rows for run in layout.runs) > layout.whole.rank_rows
    assert ("6,144, which are 1,024 more" if lang == "en" else "6,144 行，多出 1,024 行") in texts(at)
    assert (held, held - layout.whole.rank_rows) == (6144, 1024)
    assert "vLLM" in texts(at)


def test_what_can_be_cut_is_asked_before_it_is_shown(open_page):
    at = open_page(PAGE, part="deltanet")
    assert len(at.get("plotly_chart")) == 0
    guessed(at, CUT, "flat")
    assert "Of Qwen3-Next-80B-A3B's 12,288 rows the first of 4 pieces" in texts(at)
    assert "interleaved: 512 q · 512 k · 1,024 v · 1,024 z. Flat: 2,048 q · 1,024 k." in texts(at)
    assert len(at.get("plotly_chart")) == 2


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("model", figures.DELTANET)
@pytest.mark.parametrize("tp", [1, 4, 16])
def test_both_orders_side_by_side(open_page, lang, which, model, tp):
    at = open_page(PAGE, lang=lang, part="deltanet", gdn=model, which=which, tp=str(tp), rank=str(tp - 1), row="1")
    skipped(at, CUT)
    possible = figures.DELTANET[model][0] % tp == 0
    assert len(at.get("plotly_chart")) == (2 if possible else 0)
    assert ("fusion.uneven" in texts(at)) == (not possible)


def test_the_maximum_is_asked_before_it_is_shown(open_page):
    at = open_page(PAGE, part="scale")
    guessed(at, MAXIMUM, "nothing")
    found = shared("qkv", ASKED_LAYER, 0, 1.0)
    worst = figures.worst_part(found, "max")
    assert worst.name == "v"
    assert f"{worst.summary.sqnr_db:.2f} dB signal to error instead of 20.56 dB" in texts(at)
    assert f"{found['shared']['v'].summary.sqnr_db:.2f} dB. The format can share a scale" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("stretch", [STRETCHES[0], STRETCHES[-1]])
def test_other_weights_share_a_scale(open_page, lang, what, stretch):
    at = open_page(PAGE, lang=lang, part="scale", what=what, layer="3", expert="17", stretch=f"{stretch:g}")
    skipped(at, MAXIMUM)
    found = shared(what, 3, 17, stretch)
    for way in found:
        for part in found[way].values():
            assert figures.decibels(part.summary.sqnr_db) in texts(at)


def test_sharing_reaches_as_far_as_the_block_scales(open_page):
    """What the page's text says of multiplying by powers of two."""
    near, far = (shared("qkv", 0, 0, stretch) for stretch in (STRETCHES[1], STRETCHES[-1]))
    own = near["own"]["v"].summary.sqnr_db
    assert far["own"]["v"].summary.sqnr_db == own
    assert own - near["shared"]["v"].summary.sqnr_db < 0.1
    assert far["shared"]["v"].summary.sqnr_db < own - 2


def test_which_kind_changes_bits_is_asked_before_it_is_shown(open_page):
    at = open_page(PAGE, part="kinds")
    assert "Measured on tiny-moe" not in texts(at)
    guessed(at, BITS, "weights_kernels")
    assert "As you predicted" in texts(at) or "as predicted" in texts(at).lower()
    for one in measured():
        assert f"| {one.before}\u00a0→\u00a0{one.after} | {one.values:,} | {one.differ:,} |" in texts(at)


def test_what_stays_counts_the_channels(open_page):
    at = open_page(PAGE, part="unchanged", gdn="qwen3_next", tp="1")
    assert "The convolution has 8,192 channels" in texts(at)


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"tp": "16", "attn": "tiny_moe"},
        {"tp": "1", "row": "900", "layer": "0"},
        # No layout has the rank that another part or a link has left behind.
        {"part": "unchanged", "tp": "1"},
        {"part": "unchanged", "rank": "12"},
        {"tp": "8", "attn": "tiny_moe", "rank": "15"},
    ],
    ids=str,
)
def test_the_code_shown_gives_the_page_s_numbers(open_page, query):
    output = shown_code_output(open_page(PAGE, **query), PAGE)
    if not query:
        assert "qkv: 1280 rows a rank; FusedRow(part='k', unit=1" in output
        for name, part in shared("qkv", ASKED_LAYER, 0, 1.0)["max"].items():
            assert f"{name}: own scale {part.own_scale:.4g}, served with {part.used_scale:.4g}" in output
        for one in measured():
            assert (f"{one.id}: {one.differ:,} of {one.values:,} differ" in output) == (one.differ > 0)
        assert "4,096 channels meet another channel's kernel" in output


@pytest.mark.parametrize(
    "query", [{}, {"what": "expert", "stretch": "262144", "expert": "9"}, {"what": "mlp", "layer": "1"}], ids=str
)
def test_the_code_of_one_scale_measures_the_weights_that_are_shown(open_page, query):
    at = open_page(PAGE, part="scale", **query)
    output = shown_code_output(at, PAGE)
    what, layer, expert = query.get("what", "qkv"), int(query.get("layer", ASKED_LAYER)), int(query.get("expert", 0))
    found = shared(what, layer, expert, float(query.get("stretch", 1)))
    lines = dict(line.split(" ", 1) for line in output.splitlines() if not line.startswith("input"))
    assert list(lines) == list(found)
    for way, parts in found.items():
        for name, one in parts.items():
            assert f"'{name}': 'x {one.factor:.4g}, {one.summary.sqnr_db:.2f} dB'" in lines[way]
    assert output.count("subnormal block scales") == len(FACTORS)


@pytest.mark.parametrize("query", [{}, {"tp": "2", "rank": "1", "row": "77"}], ids=str)
def test_the_code_follows_one_row_through_both_orders(open_page, query):
    at = skipped(open_page(PAGE, part="deltanet", **query), CUT)
    shown = texts(at)
    lines = [line for line in shown_code_output(at, PAGE).splitlines() if line.startswith("qkvz")]
    found = [re.search(r"part='(\w+)'.*part_row=(\d+).*tensor_row=(\d+)", line).groups() for line in lines]
    assert [part for part, _, _ in found] == [found[0][0]] * 2
    assert found[0][1] == found[1][1]
    for _, _, row in found:
        assert f"{int(row):,}" in shown


def test_the_code_of_the_kinds_counts_what_the_page_counts(open_page):
    at = skipped(open_page(PAGE, part="kinds"), BITS)
    shown = texts(at)
    output = shown_code_output(at, PAGE)
    for one in measured():
        assert f"{one.differ:,} of {one.values:,} differ" in output
        assert f"| {one.values:,} | {one.differ:,} |" in shown


def test_downloads_open(open_page):
    at = open_page(PAGE)
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())
