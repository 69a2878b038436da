"""The page on online quantisation as a reader in either language meets it."""

import ast
import json
import re

import numpy as np
import pytest

import nvfp4viz.quant.online_memory
from nvfp4viz.errors import FormatError
from nvfp4viz.figures.online import SHAPES
from nvfp4viz.quant.online import WAYS, peak_buffers
from nvfp4viz.quant.per_token import VERSIONS
from nvfp4viz.ui import online_memory
from nvfp4viz.ui.loading_parts import quoted
from nvfp4viz.ui.numbers import exact, four
from nvfp4viz.ui.online_memory import MEASURED, recorded_times
from nvfp4viz.ui.online_parts import PARTS, WEIGHTS, ways_of, weights_of
from nvfp4viz.ui.online_token import ROWS, TOKEN_BACKEND

from .conftest import guessed, shown_code_output, skipped, texts

PAGE = "online_quantisation"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "Online quantisation", "zh": "在线量化"}
QUESTIONS = dict(zip(PARTS, ("step", "memory", "ranks", "zero"), strict=True))


def revealed(open_page, part, lang="en", **query):
    """A part with its question skipped."""
    at = open_page(PAGE, lang=lang, part=part, **query)
    return skipped(at, f"{PAGE}.predict.{QUESTIONS[part]}")


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_asks_first_and_then_shows(open_page, lang, part):
    at = open_page(PAGE, lang=lang, part=part)
    assert at.title[0].value == TITLES[lang]
    assert len(at.get("plotly_chart")) == (part == "ways")
    at = revealed(open_page, part, lang)
    assert len(at.get("plotly_chart")) == (part != "token")
    assert "| " in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"part": "x"},
        {"layer": "4"},
        {"w": "up"},
        {"n": "-1"},
        {"shape": "gemma"},
        {"tp": "3"},
        {"p": "x"},
        {"row": "x"},
    ],
    ids=lambda query: " ".join(f"{name}={value}" for name, value in query.items()),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    assert at.title[0].value == TITLES[lang]
    (name,) = query
    assert f"`{name}=" in texts(at)


def test_the_cast_is_asked_for_before_the_middle_way_is_shown(open_page):
    at = open_page(PAGE)
    assert "folded in float32" not in texts(at)
    seen = texts(guessed(at, f"{PAGE}.predict.step", "fold"))
    assert "Your guess: the product in float32" in seen
    assert "Folding in float32 without it changes 369 codes, the cast 33.7 times as many" in seen
    assert "| folded, cast to BF16 | 12,419 / 1,048,576 | 2,196 / 65,536 |" in seen


def test_one_changed_element_is_followed(open_page):
    seen = texts(revealed(open_page, "ways"))
    assert "the weight is −0.023925781" in seen
    assert "| folded, cast to BF16 | −132 |" in seen
    other = texts(revealed(open_page, "ways", n="7"))
    assert "the weight is −0.023925781" not in other


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("weight", ["gate_up_proj", "down_proj"])
def test_what_the_answer_says_of_one_weight_holds_for_all(layer, weight):
    direct, folded, cast = ways_of(layer, weight)
    assert (direct.codes_differ, direct.scales_differ) == (0, 0)
    assert cast.codes_differ > 4 * folded.codes_differ > 0
    assert cast.scales_differ > 4 * folded.scales_differ


def cells(seen, way):
    """The row of a way in the table of memory: counted, measured, above."""
    table = seen.split("| measured (KiB) |")[1]
    row = next(line for line in table.splitlines() if line.startswith(f"| {way} |"))
    return [float(cell.replace(",", "")) for cell in row.split(" | ")[1:3]]


def test_memory_is_measured_beside_what_is_counted(open_page):
    """The page's numbers are those of a process that packed this layer: above the count, by less than a tenth."""
    assert weights_of(0, WEIGHTS[0]).shape == SHAPES[MEASURED]
    seen = texts(revealed(open_page, "memory"))
    for way, name in zip(WAYS, ("direct", "folded in float32", "folded, cast to BF16"), strict=True):
        counted, measured = cells(seen, name)
        assert counted * 1024 == sum(peak_buffers(SHAPES[MEASURED], way).values())
        assert counted < measured < 1.1 * counted
    assert "Layer 0, 64 × 128 × 128 weights, 2 MiB in BF16. **Measured** at the peak" in seen


def test_measured_once_for_the_same_weight(open_page, monkeypatch):
    """A second look measures nothing: a process that must not start shows it."""
    first = texts(revealed(open_page, "memory", layer="1"))
    monkeypatch.setattr(online_memory, "measure_peaks", None)
    again = texts(revealed(open_page, "memory", layer="1"))
    assert cells(first, "direct") == cells(again, "direct")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_where_no_process_starts_the_count_still_stands(open_page, monkeypatch, lang):
    def refuse(weights):
        raise FormatError("online.process", reason="Operation not permitted")

    online_memory._measured.clear()
    monkeypatch.setattr(online_memory, "measure_peaks", refuse)
    at = revealed(open_page, "memory", lang)
    assert "Operation not permitted" in texts(at)
    assert len(at.get("plotly_chart")) == 1
    monkeypatch.setattr(nvfp4viz.quant.online_memory, "measure_peaks", refuse)
    output = shown_code_output(at, PAGE)
    assert "Operation not permitted" in output
    assert "= 0.5625 MiB by count" in output


def test_memory_of_a_large_model_is_counted_and_times_are_recorded_ones(open_page):
    seen = texts(revealed(open_page, "memory", shape="deepseek_v4_flash"))
    assert "256 × 4096 × 4096 weights, 8192 MiB in BF16. **Counted** at the peak" in seen
    assert "KiB more" not in seen
    assert "24576 MiB" in seen  # six bytes for each of 256 × 4096 × 4096 weights, counted and not rounded
    assert "24580" not in seen
    assert "10.67 times as much" in seen or "10.7 times as much" in seen
    gpu, one, ranges = recorded_times()
    assert gpu.startswith("NVIDIA")
    assert 0 < one < ranges
    assert f"kernels on an {gpu}, one large matrix: {four(one)} µs" in seen


def test_a_shared_maximum_leaves_no_trace(open_page):
    seen = texts(revealed(open_page, "ranks", tp="4", w="down_proj"))
    assert "| shared by an all-reduce | 0 / 524,288 | 0 / 32,768 |" in seen
    assert "With each rank's own. On 2 ranks 3.33 % of the codes" in seen


def test_scales_per_token_answer_in_spite_of_the_holes(open_page):
    seen = texts(revealed(open_page, "token"))
    assert "| `nvfp4_per_token` | ` api#9 GET /v1/s` | vllm-flashinfer-trtllm | 1 |" in seen
    assert "`<pad>` × 16" in seen
    assert "2 of 4: the fast mode of both versions" in seen
    for row, nan in zip(ROWS, (0, 0, 2), strict=True):
        table = texts(revealed(open_page, "token", row=row)).split("A row of zeros, by version")[1]
        assert table.count("| yes |") == nan


def rows(shown):
    """The tables' rows, by their first cell."""
    found = [line.strip("| ").replace("`", "").replace("−", "-").split(" | ") for line in shown.splitlines()]
    return {(row[0], len(row)): row[1:] for row in found if len(row) > 1}


NAMES = dict(zip(WAYS, ("direct", "folded in float32", "folded, cast to BF16"), strict=True))


@pytest.mark.parametrize("query", [{}, {"n": "7"}, {"layer": "2", "w": "down_proj", "n": "3"}], ids=str)
def test_the_code_of_the_ways_gives_both_bars_and_the_chosen_element(open_page, query):
    at = revealed(open_page, "ways", **query)
    shown = texts(at)
    bars = json.loads(at.get("plotly_chart")[0].proto.spec)["data"]
    output = shown_code_output(at, PAGE)
    table = rows(shown)
    for k, (way, name) in enumerate(NAMES.items()):
        line, element = re.findall(rf"^{way}: (.*)$", output, re.MULTILINE)
        codes, codes_share, scales, scales_share, db = re.fullmatch(
            r"(.+) codes \((.+ %)\) and (.+) block scales \((.+ %)\) differ, (.+) dB", line
        ).groups()
        told = table[name, 5]
        assert (codes.replace("of", "/"), scales.replace("of", "/"), db) == tuple(told[:3])
        assert [codes_share, scales_share] == [bar["text"][k] for bar in bars]
        value, byte, scaled, code = re.fullmatch(
            r"(\S+) enters, block scale (\S+), scaled (\S+), code (\S+)", element
        ).groups()
        entered, _, shown_byte, shown_scaled, shown_code, _ = table[name, 7]
        assert (byte, code) == (shown_byte, shown_code)
        assert (np.float32(value), np.float32(scaled)) == (np.float32(entered), np.float32(shown_scaled))
    place = re.search(
        r"^expert (\d+), row (\d+), column (\d+): weight (\S+), encode scale (\S+)$", output, re.MULTILINE
    )
    expert, row, column, weight, encode = place.groups()
    weight, encode = exact(float(weight)), exact(float(encode))
    assert f"Expert {expert}, row {row}, column {column}: the weight is {weight}, the expert's" in shown
    assert f"encode scale **{encode}**" in shown


@pytest.mark.parametrize("query", [{}, {"layer": "1"}, {"shape": "deepseek_v4_flash"}], ids=str)
def test_the_code_of_the_memory_gives_the_shown_shape_s_peaks(open_page, query):
    at = revealed(open_page, "memory", **query)
    shown = texts(at)
    output = shown_code_output(at, PAGE)
    counted = dict(re.findall(r"^(\w+): (.*) KiB = .* by count$", output, re.MULTILINE))
    measured = dict(re.findall(r"^(\w+): about (\d+) KiB measured$", output, re.MULTILINE))
    assert tuple(counted) == WAYS
    if "shape" in query:
        direct, _, cast = re.findall(r"= (\S+ MiB) by count", output)
        assert f"the direct way holds {direct} more, folding and casting **{cast}**" in shown
        assert not measured
        return
    for way, name in NAMES.items():
        assert f"| {name} | {counted[way]} |" in shown
        # The code writes tens of KiB, and another run's Python objects may be some hundred bytes more or fewer.
        assert abs(float(measured[way]) - cells(shown, name)[1]) <= 5 + 1


@pytest.mark.parametrize("query", [{}, {"tp": "4", "w": "down_proj", "layer": "3"}], ids=str)
def test_the_code_of_the_ranks_gives_both_maxima(open_page, query):
    at = revealed(open_page, "ranks", **query)
    shown = texts(at)
    output = shown_code_output(at, PAGE)
    for which, name in (("shared", "shared by an all-reduce"), ("local", "each rank's own")):
        codes, scales, db = re.search(rf"{which}: (.+) codes and (.+) block scales differ, (.+) dB", output).groups()
        assert f"| {name} | {codes.replace('of', '/')} | {scales.replace('of', '/')} | {db} |" in shown
    experts, every, factor = re.search(r"(\d+) of (\d+) experts .* factor of (\S+)", output).groups()
    assert f"**{experts} of {every} experts** have another" in shown
    assert f"by up to a factor of {factor}." in shown


@pytest.mark.parametrize("query", [{}, {"p": "code", "row": "tiny"}], ids=str)
def test_the_code_of_the_tokens_gives_the_answers_and_the_chosen_row(open_page, query):
    at = revealed(open_page, "token", **query)
    shown = texts(at)
    output = shown_code_output(at, PAGE)
    for backend, name in (("vllm-cutlass", "static scales, from the file"), (TOKEN_BACKEND, "`nvfp4_per_token`")):
        answer, low, high = re.search(rf"^{backend}: (.*), input scales (\S+) to (\S+)$", output, re.MULTILINE).groups()
        spread = exact(float(low)) if low == high else f"{four(float(low))} … {four(float(high))}"
        assert f"| {name} | {quoted(ast.literal_eval(answer))} | {backend} | {spread} |" in shown
    table = shown.split("A row of zeros, by version")[1]
    for version in VERSIONS:
        decode, encode, byte, codes, nan = re.search(
            rf"^{version}: decode (\S+), encode (\S+), (\S+), (\[.*\]), NaN (\w+)$", output, re.MULTILINE
        ).groups()
        codes = " ".join(ast.literal_eval(codes))
        cells_ = (
            f"{four(float(decode))} | {four(float(encode))} | `{byte}` | `{codes}` | {'yes' if nan == 'True' else 'no'}"
        )
        assert f" | {cells_} |" in table
    assert output.count("NaN") == len(VERSIONS)
