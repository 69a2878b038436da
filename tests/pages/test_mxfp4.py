"""The page on MXFP4 and NVFP4 as a reader in either language meets it."""

import re

import pytest

from nvfp4viz.figures import mxfp4 as figures
from nvfp4viz.quant import schemes
from nvfp4viz.quant.recipes import MXFP4_RECIPES
from nvfp4viz.ui.mxfp4_parts import ASKED, BLOCKS, PARTS, RULE, WEIGHTS, closed, real

from .conftest import clean, guessed, shown_code_output, skipped, texts

PAGE = "mxfp4"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "MXFP4 and NVFP4", "zh": "MXFP4 与 NVFP4"}
HALF, CLIPS = f"{PAGE}.predict.half", f"{PAGE}.predict.clips"


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
        {"data": "gemma"},
        {"mx": "vllm-cuda"},
        {"size": "3"},
        {"layer": "4"},
        {"expert": "64"},
        {"w": "gate_proj"},
        {"on": "zero"},
        {"top": "8"},
        {"top": "nan"},
        {"row": "128"},
        {"run": "-1"},
        {"run": "3", "w": "down_proj"},
        {"rule": "ieee"},
        {"stored": "gpt-oss"},
        {"row": "9" * 5000},
    ],
    ids=lambda query: " ".join(f"{name}={value[:8]}" for name, value in query.items()),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    assert at.title[0].value == TITLES[lang]
    name = next(iter(query))
    assert f"`{name}=" in texts(at)


def test_it_opens_on_a_real_weight_in_both(open_page):
    at = open_page(PAGE)
    assert len(at.get("plotly_chart")) == 1
    found = real(0, 0, WEIGHTS[0], RULE)
    mx, nv = found["mxfp4"].summary.sqnr_db, found["nvfp4"].summary.sqnr_db
    more = round(nv, 2) - round(mx, 2)
    assert f"MXFP4 reaches {mx:.2f} dB, NVFP4 **{nv:.2f} dB**: {more:.2f} dB more, for 0.25 bits" in texts(at)
    assert "UE8M0 with blocks of 16" not in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"layer": "3", "expert": "63", "w": "down_proj", "mx": "ocp-floor"},
        {"data": "outliers"},
        {"data": "outliers", "size": "100", "mx": "modelopt-mxfp4"},
    ],
)
def test_other_tensors_are_compared(open_page, lang, query):
    assert len(open_page(PAGE, lang=lang, **query).get("plotly_chart")) == 1


def test_the_smaller_block_is_asked_for_before_it_is_shown(open_page):
    at = open_page(PAGE)
    guessed(at, HALF, "most")
    assert "Your guess: more than half" in texts(at)
    assert "UE8M0 with blocks of 16" in texts(at)
    assert "18.94 dB with blocks of 32, 19.20 dB with blocks of 16, 20.37 dB for NVFP4: 18 % of the way" in texts(at)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_smaller_block_closes_less_than_half_everywhere(weight):
    """What the answer says of one expert holds for the first of every layer, and for every rule."""
    for layer in range(4):
        for rule in MXFP4_RECIPES:
            assert closed(real(layer, 0, weight, rule)) < 0.5


def test_who_clips_is_asked_before_it_is_shown(open_page):
    at = open_page(PAGE, part="rules")
    assert len(at.get("plotly_chart")) == 0
    guessed(at, CLIPS, "floor")
    assert len(at.get("plotly_chart")) == 1
    assert "With the smaller scale 6.5 is beyond 6 and becomes 6. The ceilings take twice the scale: 6.5" in texts(at)
    traces = schemes.compare_rules(figures.sample_block(ASKED))
    floor, ceil = traces["ocp-floor"], traces["flashinfer-ceil"]
    assert floor.decoded[floor.top] == ceil.decoded[ceil.top] == 6
    assert floor.summary.sqnr_db > ceil.summary.sqnr_db
    assert f"{ceil.summary.sqnr_db:.2f} dB against {floor.summary.sqnr_db:.2f} dB" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("rule", MXFP4_RECIPES)
@pytest.mark.parametrize("on", BLOCKS)
def test_every_block_under_every_rule(open_page, lang, on, rule):
    at = open_page(PAGE, lang=lang, part="rules", on=on, rule=rule, w="down_proj", row="127", run="3", top="7")
    skipped(at, CLIPS)
    assert len(at.get("plotly_chart")) == 1
    for name in MXFP4_RECIPES:
        assert f"| {name} | `0x" in texts(at)


def test_the_bits_of_a_rule_are_the_library_s(open_page):
    at = open_page(PAGE, part="rules", on="tiny", rule="deepgemm-ceil")
    skipped(at, CLIPS)
    traces = schemes.compare_rules(figures.sample_block(ASKED, figures.TINY))
    for name, trace in traces.items():
        assert f"| {name} | `0x{trace.scale_byte:02X}` | `{trace.scale_byte:08b}` |" in texts(at)
    for step in traces["deepgemm-ceil"].steps:
        assert f"`{step.bits}`" in texts(at)


@pytest.mark.parametrize("layer", figures.LAYERS)
@pytest.mark.parametrize("lang", LANGUAGES)
def test_bytes_are_the_library_s(open_page, lang, layer):
    at = open_page(PAGE, lang=lang, part="storage", stored=layer)
    for scheme in figures.SHIPPED:
        made = schemes.layer_bytes(figures.matrices_of(layer), scheme)
        assert f"{made.total:,}" in texts(at)
        assert f"{made.bits:.6g}" in texts(at)
    assert "6.25 %" in texts(at)
    assert "12.5 %" in texts(at)


def test_every_model_has_its_source(open_page):
    at = open_page(PAGE, part="models")
    for use in figures.USES:
        assert f"| {use.name} | {use.scheme} |" in texts(at)
        assert use.source in texts(at)


@pytest.mark.parametrize(
    "query",
    [{}, {"on": "tiny", "rule": "deepgemm-ceil", "size": "1"}, {"on": "tiny_moe", "stored": "tiny_moe"}],
    ids=str,
)
def test_the_code_shown_gives_the_page_s_numbers(open_page, query):
    output = shown_code_output(open_page(PAGE, **query), PAGE)
    if not query:
        assert "ocp-floor: byte 0x7F, largest becomes 6, clips True" in output
        assert "6.03125 to 6.96875: byte 0x7F, clips True" in output


@pytest.mark.parametrize(
    "query",
    [{}, {"layer": "2", "expert": "9", "w": "down_proj", "mx": "ocp-floor"}, {"data": "outliers", "size": "40"}],
)
def test_the_code_shown_gives_the_tensor_s_numbers(open_page, query):
    """Those that stand in the sentence and in the table above it."""
    at = open_page(PAGE, **query)
    output = shown_code_output(at, PAGE)
    shown = texts(at).replace(output, "")
    for name in ("mxfp4", "nvfp4"):
        found = re.search(rf"^{name}: ([0-9.]+) bits, ([0-9.]+) dB, (\d+) scale bytes", output, re.MULTILINE)
        assert found[2] in shown
        assert f"| {found[3]} |" in shown


@pytest.mark.parametrize("layer", [None, *list(figures.LAYERS)[1:]])
def test_the_code_shown_gives_the_bytes_of_a_layer(open_page, layer):
    at = open_page(PAGE, part="storage", **({} if layer is None else {"stored": layer}))
    output = shown_code_output(at, PAGE)
    shown = texts(at).replace(output, "")
    for name in ("mxfp4", "nvfp4"):
        found = re.search(rf"^{name}: ([\d,]+) weights in ([\d,]+) bytes", output, re.MULTILINE)
        assert found[1] in shown
        assert found[2] in shown
    shares = re.findall(r"block scales add ([\d.]+)%", output)
    assert [float(share) for share in shares] == [6.25, 12.5]


def test_downloads_open(open_page):
    at = open_page(PAGE)
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())


@pytest.mark.parametrize("rule", MXFP4_RECIPES)
def test_a_rule_is_traced_in_the_reader_s_language(open_page, rule):
    """Formulas keep the names of functions; every other word is the reader's."""
    tables = {}
    for lang in LANGUAGES:
        at = skipped(open_page(PAGE, lang=lang, part="rules", rule=rule), CLIPS)
        tables[lang] = next(part.value for part in at.markdown if "| m = max |x" in part.value.replace("\\|", "|"))
    assert "largest of 32" in tables["en"]
    assert "32 个里最大的" in tables["zh"]
    rows = tables["zh"].splitlines()[2:]
    assert set(re.findall(r"[A-Za-z]{2,}", re.sub(r"`[^`]*`", "", "\n".join(rows)))) <= {
        "max",
        "rcp",
        "floor",
        "ceil",
        "log",
    }
