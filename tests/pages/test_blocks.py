"""The page on blocks in a GEMM as a reader in either language meets it."""

import re

import pytest

from nvfp4viz.figures import blocks
from nvfp4viz.figures.words import words
from nvfp4viz.quant.grouping import GROUPINGS, place_of, storage
from nvfp4viz.serving import matrix
from nvfp4viz.ui import explorer_open
from nvfp4viz.ui.blocks_parts import PARTS, outlier_products, tiny_moe_products

from .conftest import clean, guessed, shown_code_output, skipped, texts

PAGE = "blocks"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "Blocks in a GEMM", "zh": "GEMM 里的块"}
BEST, SCALES = f"{PAGE}.predict.best", f"{PAGE}.predict.scales"


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_opens_by_link(open_page, lang, part):
    at = open_page(PAGE, lang=lang, part=part)
    assert at.title[0].value == TITLES[lang]
    assert len(at.get("plotly_chart")) <= 1


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"part": "nowhere"},
        {"along": "m"},
        {"m": "16"},
        {"n": "-1"},
        {"n": "1.5"},
        {"data": "gemma"},
        {"size": "3"},
        {"size": "inf"},
        {"layer": "4"},
        {"expert": "64"},
        {"w_rows": "0"},
        {"w_blocks": "99999"},
        {"e_row": "-3"},
        {"e_k": "one"},
        {"layout": "64x4"},
        {"s_rows": "0"},
        {"s_cols": "65"},
        {"s_row": "nan"},
        {"s_col": "9" * 5000},
    ],
    ids=lambda query: " ".join(f"{name}={value[:8]}" for name, value in query.items()),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    assert at.title[0].value == TITLES[lang]
    (name,) = query
    assert f"`{name}=" in texts(at)


def test_it_opens_where_the_sentence_is_seen(open_page):
    at = open_page(PAGE)
    assert len(at.get("plotly_chart")) == 1
    assert "This output needs **4** multiplications by scales for 64 products" in texts(at)
    terms = [run.term for run in blocks.inner_sum(3, 5).runs["k"]]
    assert f"Without global scales it is {sum(terms)}.".replace("-", "−") in texts(at)  # to the last digit


def test_the_other_directions_are_asked_for_before_they_are_shown(open_page):
    at = open_page(PAGE)
    assert "Along the rows" not in texts(at)
    guessed(at, SCALES, "same")
    assert "Your guess: 4 times, as before" in texts(at)
    assert "64 times. Along a column every step of k leads into another block" in texts(at)
    assert "Along K there are 4, in tiles 16, along the rows 64" in texts(at)
    assert "Along the rows, neighbours in one *column* share a scale" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("along", GROUPINGS)
def test_every_grouping_of_an_output_is_shown(open_page, lang, along):
    at = open_page(PAGE, lang=lang, along=along, m="0", n="15")
    assert f"**{len(blocks.inner_sum(0, 15).runs[along])}**" in texts(at)


def test_the_best_grouping_is_asked_before_it_is_shown(open_page):
    at = open_page(PAGE, part="error")
    assert len(at.get("plotly_chart")) == 0
    guessed(at, BEST, "k")
    assert len(at.get("plotly_chart")) == 1
    assert "Your guess: along K" in texts(at)
    assert "Along K 8.5 dB, along the rows 17.2 dB, in tiles 11.3 dB" in texts(at)


@pytest.mark.parametrize(
    "query", [{"size": "1"}, {"data": "tiny_moe"}, {"data": "tiny_moe", "layer": "3", "expert": "63"}]
)
@pytest.mark.parametrize("lang", LANGUAGES)
def test_other_data_are_compared(open_page, lang, query):
    at = open_page(PAGE, lang=lang, part="error", **query)
    skipped(at, BEST)
    assert len(at.get("plotly_chart")) == 1


def checkpoint_part(open_page, lang="en", **query):
    at = open_page(PAGE, lang=lang, part="error", data="checkpoint", **query)
    return skipped(at, BEST)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({}, "NVFP4"),
        ({"checkpoint": "tiny-moe-bf16", "layer": "3", "expert": "63", "projection": "down"}, "BF16"),
        ({"checkpoint": "tiny-moe-mxfp4", "projection": "up"}, "MXFP4"),
        ({"checkpoint": "gemma4-skeleton", "layer": "29", "expert": "127"}, "NVFP4"),
        ({"checkpoint": "tiny-moe-bf16", "of": "other"}, "`model.embed_tokens.weight`"),
        (
            {"of": "other", "tensor": "model.layers.1.self_attn.o_proj.weight"},
            "`model.layers.1.self_attn.o_proj.weight`",
        ),
    ],
    ids=str,
)
def test_a_tensor_of_a_checkpoint_is_compared(open_page, lang, query, said):
    at = checkpoint_part(open_page, lang, **query)
    assert len(at.get("plotly_chart")) == 1
    assert said in texts(at)
    sample = at.session_state["checkpoint"]
    assert words(lang, f"samples.{sample}") in [
        caption.value for caption in at.caption
    ]  # whole, where the select cuts it
    for name, value in query.items():
        key = name if name in ("checkpoint", "layer", "expert", "projection") else f"{PAGE}.{name}"
        assert str(at.session_state[key]) == value


@pytest.mark.parametrize(
    ("query", "named", "allowed"),
    [
        ({"layer": "4"}, "layer=4", "0 … 3"),
        ({"expert": "64"}, "expert=64", "0 … 63"),
        ({"projection": "gate_up"}, "projection=gate_up", "gate, up, down"),
        ({"of": "other", "tensor": "no.such.weight"}, "tensor=no.such.weight", "model.embed_tokens.weight …"),
        ({"checkpoint": "elsewhere"}, "checkpoint=elsewhere", "tiny-moe-bf16"),
        ({"checkpoint": "tiny-moe-bf16", "projection": "down", "take": "window", "row": "128"}, "row=128", "0 … 127"),
    ],
    ids=str,
)
def test_links_are_held_to_the_open_checkpoint(open_page, query, named, allowed):
    at = open_page(PAGE, part="error", data="checkpoint", **query)
    said = [caption.value for caption in at.caption if f"`{named}`" in caption.value]
    assert len(said) == 1
    assert allowed in said[0]


def test_a_piece_says_how_much_was_read(open_page):
    at = checkpoint_part(open_page, of="other", tensor="model.embed_tokens.weight")
    assert "99 × 128." in texts(at)
    assert "Measured: rows 0–95 and columns 0–127, 96 × 128 values" in texts(at)


def test_what_the_explorer_has_open_is_offered(open_page):
    """Files of the reader's own: they are in this session, and in no link."""
    path = explorer_open.caches.sample_path("tiny-moe-bf16")
    at = open_page(PAGE, part="error", data="checkpoint")
    at.session_state["explorer.now"] = explorer_open.open_folder(path, "upload")
    at = skipped(at, BEST)
    assert "`model.layers.0.experts.gate_up_proj[0]`, BF16" in texts(at)
    assert not [box for box in at.selectbox if box.key == "checkpoint"]
    clean(at.run())
    at.session_state[f"{PAGE}.source"] = "sample"
    assert "NVFP4, 64 × 128" in texts(clean(at.run()))


def test_the_explorer_remembers_what_is_no_sample(open_page):
    at = open_page("explorer")
    assert at.session_state["explorer.now"] is None


@pytest.mark.parametrize(
    "query",
    [{"checkpoint": "tiny-moe-bf16", "expert": "9"}, {"of": "other", "tensor": "model.layers.0.mlp.down_proj.weight"}],
    ids=str,
)
def test_the_code_shown_repeats_the_comparison(open_page, query):
    at = checkpoint_part(open_page, **query)
    output = shown_code_output(at, PAGE)
    for along in GROUPINGS:
        decibels = output.split(f"{along}: ")[1].split(" dB")[0]
        assert f"{decibels} dB" in texts(at).replace(output, "")


@pytest.mark.parametrize(
    "query",
    [{}, {"layout": "8x4", "s_rows": "77", "s_cols": "9", "s_row": "40", "s_col": "7"}],
    ids=str,
)
def test_the_code_shown_follows_the_scale_of_the_map(open_page, query):
    at = open_page(PAGE, part="swizzle", **query)
    scales, size, padding = re.search(
        r"([\d,]+) scales take ([\d,]+) bytes in this layout; ([\d,]+) of them are padding", texts(at)
    ).groups()
    row, column = (query.get(name, default) for name, default in (("s_row", 33), ("s_col", 1)))
    output = shown_code_output(at, PAGE)
    assert f"{scales} scales take {size} bytes, {padding} of them padding" in output
    assert f"scale ({row}, {column}): byte" in output
    assert f"row={row}, column={column}, padding=False" in output


def test_padding_and_global_scales_are_told_as_they_are(open_page):
    """Columns are padded as well; only one of two kernels writes there; every matrix has a global scale of its own."""
    said = texts(open_page(PAGE, part="swizzle"))
    assert "Rows and columns are padded to whole tiles, which are four columns wide." in said
    assert "its kernel for experts leaves there what memory held" in said
    assert "gate, up and down have one each" in texts(open_page(PAGE, part="shapes"))


def test_the_code_shown_multiplies_the_expert_that_is_shown(open_page):
    output = shown_code_output(open_page(PAGE, part="error", data="tiny_moe", layer="2", expert="9"), PAGE)
    assert output.splitlines() == [line for found in tiny_moe_products(2, 9) for line in told(found)]


@pytest.mark.parametrize("size", blocks.SIZES)
def test_the_code_shown_gives_every_bar_of_the_comparison(open_page, size):
    output = shown_code_output(open_page(PAGE, part="error", size=f"{size:g}"), PAGE)
    for found in outlier_products(size):
        assert "\n".join(told(found)) in output


def told(found):
    """What the code says of one grouping: all that its bars and its table show."""
    values = (
        (name, getattr(found, at).sqnr_db) for name, at in (("activations", "x"), ("weight", "w"), ("product", "y"))
    )
    return (
        f"{found.along}: " + ", ".join(f"{name} {value:.1f} dB" for name, value in values),
        f"    {found.x.zeroed} activations and {found.w.zeroed} weights became zero,"
        f" {found.scale_products} scales an output",
    )


def test_real_channels_of_one_size_have_no_better_direction():
    """The page says so of tiny-moe: within a decibel, for every layer."""
    for layer in range(4):
        values = [found.y.sqnr_db for found in tiny_moe_products(layer, 0)]
        assert max(values) - min(values) < 1


@pytest.mark.parametrize(("rows", "steps"), [("128", "4"), ("1", "1"), ("65536", "2048")])
def test_sizes_and_places_are_the_library_s(open_page, rows, steps):
    n, k = int(rows), 32 * int(steps)
    at = open_page(PAGE, part="shapes", w_rows=rows, w_blocks=steps, e_row=str(n - 1), e_k=str(k - 1))
    found, place = storage(n, k), place_of(n - 1, k - 1, k)
    assert f"({found.packed[0]}, {found.packed[1]})" in texts(at)
    assert f"A weight ({n}, {k}) is" in texts(at), "no comma for thousands inside a shape"
    assert f"byte {place.offset_128x4:,}." in texts(at)
    assert "**4.5 bits a weight** for NVFP4, 4.25 for MXFP4" in texts(at)
    assert "12.5 % of the packed bytes, MXFP4's 6.25 %" in texts(at)


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
def test_padding_is_counted(open_page, layout):
    at = open_page(PAGE, part="swizzle", layout=layout, s_rows="150", s_cols="6")
    size = {"128x4": 2048, "8x4": 1216}[layout]
    assert f"900 scales take {size:,} bytes in this layout; {size - 900:,} of them are padding" in texts(at)


def test_a_place_outside_the_shape_falls_back_into_it(open_page):
    at = open_page(PAGE, part="swizzle", s_rows="2", s_cols="1", s_row="900", s_col="60")
    assert (at.session_state[f"{PAGE}.s_row"], at.session_state[f"{PAGE}.s_col"]) == (1, 0)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("query", "named", "kept"),
    [
        ({"part": "swizzle", "s_rows": "100", "s_row": "500"}, ("s_row=500", "0 … 99"), {"s_row": 33}),
        ({"part": "swizzle", "s_cols": "6", "s_col": "63"}, ("s_col=63", "0 … 5"), {"s_col": 1}),
        ({"part": "shapes", "w_rows": "100", "e_row": "100"}, ("e_row=100", "0 … 99"), {"e_row": 33}),
        ({"part": "shapes", "w_blocks": "3", "e_k": "96"}, ("e_k=96", "0 … 95"), {"e_k": 83}),
    ],
    ids=str,
)
def test_a_place_that_the_shape_of_its_link_lacks_is_named(open_page, lang, query, named, kept):
    at = open_page(PAGE, lang=lang, **query)
    (said,) = [caption.value for caption in at.caption if f"`{named[0]}`" in caption.value]
    assert named[1] in said
    assert {name: at.session_state[f"{PAGE}.{name}"] for name in kept} == kept


def test_a_place_comes_down_with_a_shape_that_the_reader_makes_smaller(open_page):
    at = open_page(PAGE, part="swizzle", s_rows="100", s_row="99", s_col="5")
    clean(at.number_input(key=f"{PAGE}.s_rows").set_value(101).run())
    assert (at.session_state[f"{PAGE}.s_row"], at.session_state[f"{PAGE}.s_col"]) == (99, 5)
    at.number_input(key=f"{PAGE}.s_rows").set_value(50)
    clean(at.number_input(key=f"{PAGE}.s_cols").set_value(4).run())
    assert (at.session_state[f"{PAGE}.s_row"], at.session_state[f"{PAGE}.s_col"]) == (49, 3)
    assert not [caption.value for caption in at.caption if "s_row" in caption.value or "s_col" in caption.value]


@pytest.mark.parametrize(
    "query", [{}, {"along": "rows", "size": "100"}, {"w_rows": "7", "w_blocks": "3"}, {"w_blocks": "1"}], ids=str
)
def test_the_code_shown_gives_the_page_s_numbers(open_page, query):
    output = shown_code_output(open_page(PAGE, **query), PAGE)
    if not query:
        assert "k 0-15: -12.0 * 26624.0 = -319488.0" in output
        # The exact output, as the page has it.
        assert "output -5953664" in output
        assert "product 8.5 dB" in output


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"data": "outliers", "size": "100"}, {"outlier_size": 100.0}),
        (
            {"data": "tiny_moe", "layer": "2", "expert": "9"},
            {"checkpoint": "tiny-moe-bf16", "tensor": "model.layers.2.experts.gate_up_proj", "index": 9},
        ),
        (
            {"data": "checkpoint", "checkpoint": "tiny-moe-bf16", "layer": "3", "expert": "7", "projection": "down"},
            {"checkpoint": "tiny-moe-bf16", "tensor": "model.layers.3.experts.down_proj", "index": 7, "stored": "BF16"}
            | {"rows": "0…127", "columns": "0…63"},
        ),
        (
            {"data": "checkpoint", "checkpoint": "tiny-moe-nvfp4-holes", "of": "other"}
            | {"tensor": "model.embed_tokens.weight"},
            {"checkpoint": "tiny-moe-nvfp4-holes", "tensor": "model.embed_tokens.weight", "index": None}
            | {"rows": "0…95", "columns": "0…127"},
        ),
    ],
    ids=str,
)
def test_the_download_says_what_was_measured(open_page, downloaded, query, says):
    at = open_page(PAGE, part="error", **query)
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())
    rows = downloaded["grouping_error"]
    assert [row["grouping"] for row in rows] == list(GROUPINGS)
    assert [{name: row[name] for name in says} for row in rows] == [says] * len(GROUPINGS)


def test_the_download_of_a_part_names_its_rows_and_columns(open_page, downloaded, monkeypatch):
    monkeypatch.setattr(matrix, "MOST", 32 * 32)
    monkeypatch.setattr(matrix, "MOST_COLUMNS", 32)
    query = {"part": "error", "data": "checkpoint", "checkpoint": "tiny-moe-bf16", "projection": "down"}
    for more, rows, columns in (
        ({"take": "window", "row": "40", "column": "20"}, "32…63", "16…47"),
        ({"take": "spread"}, "0…15 32…47 80…95 112…127", "0…15"),
    ):
        at = open_page(PAGE, **query, **more)
        at.session_state[f"{PAGE}.download"] = True
        clean(at.run())
        assert {(row["rows"], row["columns"]) for row in downloaded["grouping_error"]} == {(rows, columns)}


def test_downloads_open(open_page):
    at = open_page(PAGE)
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())
