"""The page on the mega-kernel as a reader in either language meets it."""

import json
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from nvfp4viz.figures import mega_kernel as figures
from nvfp4viz.figures.scaling import power_of_two
from nvfp4viz.formats import decode_e2m1, decode_e4m3, padded_place, unpack_nibbles, utccp_transpose, widen_e2m1
from nvfp4viz.quant.tensor_core_k32_step import STEP_K32
from nvfp4viz.ui import i18n
from nvfp4viz.ui.mega_kernel_parts import PARTS, layer
from nvfp4viz.ui.mega_layout_parts import USUAL
from nvfp4viz.ui.mega_step import RULES, SLOTS, describe, picture
from nvfp4viz.ui.numbers import four

from .conftest import clean, guessed, shown_code_output, texts

PAGE = "mega_kernel"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "Mega-kernel", "zh": "巨型内核（mega-kernel）"}
ROWS, NAN, MOST, WIDEN = (f"{PAGE}.predict.{name}" for name in ("rows", "nan", "most", "widen"))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_opens_by_link(open_page, lang, part):
    at = open_page(PAGE, lang=lang, part=part)
    assert at.title[0].value == TITLES[lang]
    assert len(at.get("plotly_chart")) == (1 if part in ("bytes", "between") else 0)


@pytest.mark.parametrize(
    ("lang", "said"),
    [
        ("en", "0 of 262,144 codes of gate and up change: they only move. Numbers change in 2 quantisations to FP8"),
        ("zh", "gate 与 up 的 262,144 个编码里有 0 个变化：它们只是搬动位置。数值在 2 次量化到 FP8"),
    ],
)
def test_it_opens_with_what_moves_and_what_changes(open_page, lang, said):
    at = open_page(PAGE, lang=lang)
    assert said in texts(at)
    assert len(at.radio) > 0  # what the tensor core makes of a code is still asked


@pytest.mark.parametrize(
    "query",
    [
        {"part": "nowhere"},
        {"k": "128"},
        {"rows": "-1"},
        {"codes": "x"},
        {"swizzle": "256B"},
        {"w": "128"},
        {"r": "64"},
        {"data": "gemma"},
        {"route": "12"},
        {"group": "4"},
        {"limit": "3"},
        {"step": "big"},
        {"rule": "6"},
        {"slot": "33"},
    ],
    ids=lambda query: " ".join(f"{name}={value}" for name, value in query.items()),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, query):
    at = open_page(PAGE, **query)
    (name,) = query
    assert f"`{name}=" in texts(at)


# ------------------------------------------------------------------ packed bytes


def component(at, name: str) -> dict:
    """The data that a component of ours was given."""
    from google.protobuf.json_format import MessageToDict

    for node in at.get("bidi_component"):
        proto = MessageToDict(node.proto)
        if name in proto["componentName"]:
            return json.loads(proto["json"])
    raise AssertionError(f"no component {name}")


def test_the_map_is_the_library_s(open_page):
    data = component(open_page(PAGE), "place_map")
    codes = unpack_nibbles(layer("even").w13[0, 0, :64])
    assert data["labels"] == [f"{code:X}" for code in codes]
    assert data["places"] == [2 * byte + nibble for byte, nibble in map(padded_place, range(128))]
    assert len(set(data["places"])) == 128
    assert data["to"]["count"] == 2 * data["from"]["count"] == 256
    byte, _ = padded_place(19)
    assert f"In shared memory that byte lies at {byte} (0x{byte:02X}), in atom 1." in data["said"][19]


def test_the_usual_tensor_is_accepted_and_a_narrow_one_refused_with_its_reason(open_page):
    assert "**Accepted.** All demands hold (8 of them)." in texts(open_page(PAGE))
    at = open_page(PAGE, codes="192", stride="96")
    assert "**Refused** by the driver, for: codes a row." in texts(at)
    assert "| K is a multiple of 128 codes | 192 | broken |" in texts(at)
    at.number_input(key=f"{PAGE}.codes").set_value(256).run()
    clean(at)
    assert "for: room for a row." in texts(at)
    assert "| A row of 128 bytes fits into it | 96 | broken |" in texts(at)
    at.number_input(key=f"{PAGE}.stride").set_value(USUAL.stride).run()
    assert "**Accepted.**" in texts(clean(at))


def test_all_sixteen_codes_are_widened_in_the_table_once_it_was_asked_what_changes(open_page):
    at = open_page(PAGE)
    assert "| 0x30 |" not in texts(at)
    guessed(at, WIDEN, "half")
    assert "Your guess: two: ±0.5" in texts(at)
    assert "0 of 16. E4M3 has every value that E2M1 has" in texts(at)
    for code, byte in enumerate(widen_e2m1(range(16)).tolist()):
        assert decode_e4m3([byte])[0] == decode_e2m1([code])[0]
        bits = f"{byte:08b}"
        assert f"| 0x{byte:02X} | `{bits[0]} {bits[1:5]} {bits[5:]}` |" in texts(at)


# ------------------------------------------------------------------ scales and rows


def test_the_scales_map_is_utccp_s_order(open_page):
    at = open_page(PAGE, part="scales", w="97")
    data = component(at, "place_map")
    order = utccp_transpose(np.arange(128)[:, None])[:, 0]
    assert [int(order[place]) for place in data["places"]] == list(range(128))
    assert data["places"][97] == 4 * 1 + 3
    assert "Row 97: the scales of 128 elements make one word" in texts(at)


def test_rows_are_asked_before_they_are_shown(open_page):
    at = open_page(PAGE, part="rows")
    assert not at.get("bidi_component") or "place_map" not in str(at.get("bidi_component"))
    guessed(at, ROWS, "one")
    assert "It turns out to be: **behind the first 8 gate rows**" in texts(at)
    data = component(at, "place_map")
    assert data["places"][32] == 8
    assert data["places"][:9] == [0, 1, 2, 3, 4, 5, 6, 7, 16]


# ------------------------------------------------------------------ numbers


def test_a_nan_becomes_the_clamp_s_limits(open_page):
    at = open_page(PAGE, part="between")
    assert "The gate becomes" not in texts(at)
    guessed(at, NAN, "limit")
    assert "As you predicted: **an ordinary number" in texts(at)
    assert "The gate becomes 10, the up −10;" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("query", [{"route": "11", "group": "3", "limit": "2"}, {"data": "outliers", "route": "6"}])
def test_other_groups_are_the_library_s(open_page, lang, query):
    at = open_page(PAGE, lang=lang, part="between", **query)
    seen = figures.between_of(
        layer(query.get("data", "even")).run,
        int(query["route"]),
        int(query.get("group", 0)),
        float(query.get("limit", 10)),
    )
    assert f"`0x{seen.scale:02X}`" in texts(at)
    assert f" {int(seen.clamped.sum())} " in texts(at)
    assert f"| 0x{int(seen.codes[0]):02X} |" in texts(at)


@pytest.mark.parametrize("name", figures.STEPS)
@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_step_of_the_tensor_core_is_drawn(open_page, lang, name):
    at = open_page(PAGE, lang=lang, part="step", step=name, rule="3", slot="32")
    trace = figures.explain_step(figures.STEPS[name])
    assert f"0x{trace.result_bits:08X}" in texts(at)
    drawn = component(at, "tensor_core")["picture"]
    assert len(drawn["steps"]) == len(RULES)
    assert len(drawn["terms"]) == SLOTS == STEP_K32 + 1
    assert all(len(step["formulas"]) == SLOTS for step in drawn["steps"])
    assert (drawn["chart"] is None) == (trace.special is not None)
    if drawn["chart"]:
        assert len(drawn["chart"]["rows"]) == SLOTS + 2


def test_the_presets_show_what_their_names_say():
    traces = {name: figures.explain_step(settings) for name, settings in figures.STEPS.items()}
    lost = {name: [term for term in trace.terms if term.lost] for name, trace in traces.items()}
    assert not lost["whole"]
    assert float(traces["whole"].result) == traces["whole"].exact
    assert any(term.aligned for term in lost["cut"])  # some terms lose only a part
    assert any(not term.aligned for term in lost["huge"])  # there, all
    assert float(traces["zeros"].result) == 0
    assert [bool(term.value) for term in lost["zeros"]] == [True]  # the accumulator alone was there to lose
    assert traces["nan"].special == "nan"
    assert float(traces["overflow"].result) == float("inf")


def test_a_formula_has_the_library_s_numbers():
    settings = figures.STEPS["cut"]
    trace = figures.explain_step(settings)
    drawn = picture(settings, trace)
    for slot, term in enumerate(trace.terms):
        assert f"= {term.shift};" in drawn["steps"][3]["formulas"][slot].replace("−", "-")
        assert str(term.aligned) in drawn["steps"][3]["formulas"][slot].replace("−", "-")
    assert f"0x{trace.result_bits:08X}" in drawn["steps"][4]["formulas"][0]


def test_what_matters_most_is_asked_and_computed(open_page):
    at = open_page(PAGE, part="layer")
    guessed(at, MOST, "accumulate")
    assert "It turns out to be: **the two quantisations to FP8**" in texts(at)
    assert len(at.get("plotly_chart")) == 1
    error = layer("even").error
    assert figures.percent_of(error.share(*figures.QUANTISING)) in texts(at)
    for stage in error.stages:
        assert figures.percent_of(stage.worst) in texts(at)


# ------------------------------------------------------------------ the code shown


@pytest.mark.parametrize("query", [{}, {"k": "126", "data": "outliers", "codes": "64"}], ids=str)
def test_the_code_of_the_bytes_gives_the_picture_s_and_the_map_s_numbers(open_page, query):
    at = open_page(PAGE, **query)
    drawn = [text for bars in json.loads(at.get("plotly_chart")[0].proto.spec)["data"] for text in bars["text"]]
    said = component(at, "place_map")["said"][int(query.get("k", 19))]
    output = shown_code_output(at, PAGE)
    assert len(drawn) == 6
    for text in drawn:
        assert f": {text} change" in output
    assert "128 codes: 64 bytes, then 128 with 64 in gaps" in output
    code, value, nibble, byte, hex_, place, address, atom = re.match(
        r"Code \d+ is (\S+), (\S+): the (\w+) nibble of byte (\d+) \((\S+)\)\. "
        r"In shared memory that byte lies at (\d+) \((\S+)\), in atom (\d+)",
        said,
    ).groups()
    value = value.replace("−", "-")
    assert f"code {query.get('k', 19)} is {code}, {value}: the {nibble} nibble of byte {byte} ({hex_})" in output
    assert f"in shared memory at byte {place} ({address}), atom {atom}" in output
    assert f"{widen_e2m1(range(16)).tobytes().hex(' ')} of another value: 0" in output
    assert ("width 64 is refused (limit 128)" in output) == ("codes" in query)


@pytest.mark.parametrize("w", ["33", "127"])
def test_the_code_of_the_scales_gives_the_row_s_word_and_place(open_page, w):
    at = open_page(PAGE, part="scales", w=w)
    said, shown = component(at, "place_map")["said"][int(w)], texts(at)
    output = shown_code_output(at, PAGE)
    word, place, lane, quarter, byte = re.search(
        r"word (\S+): place (\d+), that is lane (\d+), word (\d) of the lane\..* byte (\d+) of the tile", said
    ).groups()
    assert f"row {w}: word {word}, place {place}: lane {lane}, word {quarter}" in output
    assert f"its first byte lies at byte {byte} of the tile" in output
    for group, scale, power in re.findall(r"group (\d): (\S+) = 2\*\*(\S+), bits", output):
        assert f"| {group} | {scale} | {power_of_two(int(power))} |" in shown
    assert output.count("= 2**") == 4


@pytest.mark.parametrize("r", ["32", "5"])
def test_the_code_of_the_rows_gives_the_place_and_the_partner(open_page, r):
    at = guessed(open_page(PAGE, part="rows", r=r), ROWS, "one")
    drawn = component(at, "place_map")
    output = shown_code_output(at, PAGE)
    stored, place, partner = re.search(
        r"row (\d+) of the checkpoint's weight\. The kernel has it in row (\d+); its partner is in row (\d+)",
        drawn["said"][int(r)],
    ).groups()
    name = drawn["labels"][int(r)]
    told = f"{name} is row {stored} of the checkpoint's weight: the kernel's row {place}, its partner in {partner}"
    assert told in output
    order = sorted(drawn["labels"], key=lambda label: drawn["places"][drawn["labels"].index(label)])
    assert f"kernel: {' '.join(order)}" in output


@pytest.mark.parametrize("query", [{}, {"data": "outliers", "route": "6", "group": "3", "limit": "2"}], ids=str)
def test_the_code_between_the_products_gives_the_group_s_numbers(open_page, query):
    at = open_page(PAGE, part="between", **query)
    shown = texts(at)
    output = shown_code_output(at, PAGE)
    weight, largest, asked, byte, power, clamped, count = re.search(
        r"weight (\S+), largest (\S+), over 448 (\S+)\nscale byte (\S+) = 2\*\*(\S+), (\d+) of (\d+)", output
    ).groups()
    assert f"Routing weight {weight}. The largest magnitude is {largest}; over the largest E4M3" in shown
    assert f"that is {asked}, and the next power of two is **{power_of_two(int(power))}** (`{byte}`)" in shown
    assert f"The clamp moved {clamped} of {count}." in shown
    told = {
        line[0]: line[1:]
        for line in re.findall(
            r"^(\d+): gate (\S+), up (\S+), product (\S+), weighted (\S+), (\S+) = (\S+)$", output, re.MULTILINE
        )
    }
    rows = [line.strip("| ").split(" | ") for line in shown.splitlines() if re.match(r"\| \d+ \|", line)]
    assert (len(told), len(rows)) == (32, 8)
    for k, _, _, *cells, e4m3, decoded in rows:
        assert told[k][4] == e4m3
        # the page writes the shortest digits that read back the same float32
        for mine, its in zip((*told[k][:4], told[k][5]), (*cells, decoded), strict=True):
            assert np.float32(mine) == np.float32(its.replace("−", "-"))


@pytest.mark.parametrize("name", figures.STEPS)
def test_the_code_of_a_step_gives_its_result_and_the_chosen_term(open_page, name):
    at = open_page(PAGE, part="step", step=name, slot="32")
    shown = texts(at)
    output = shown_code_output(at, PAGE)
    trace = figures.explain_step(figures.STEPS[name])
    assert f"result 0x{trace.result_bits:08X}" in output
    assert f"0x{trace.result_bits:08X}" in shown
    if trace.special is None:
        cut, term = sum(bool(term.lost) for term in trace.terms), trace.terms[32]
        assert f"{cut} of 33 terms cut" in output
        assert (
            f"term 32: {term.significand} * 2**{term.exponent}, shifted by {term.shift}, kept {term.aligned}" in output
        )


@pytest.mark.parametrize("data", figures.DATA)
def test_the_code_of_the_layer_gives_every_effect_and_bound(open_page, data):
    at = open_page(PAGE, part="layer", data=data)
    guessed(at, MOST, "accumulate")
    shown = texts(at)
    output = shown_code_output(at, PAGE)
    error = layer(data).error
    for name in (*error.effects, "total"):
        assert f"{name}: {100 * error.relative(name):.3g} % of the output" in output
    assert f"**{re.search('total: (.*) of the output', output)[1]}** of the output" in shown
    for stage in error.stages:
        largest, bound, used = re.search(rf"{stage.id}: error (\S+), bound (\S+), used (.*) at most", output).groups()
        assert f"| {four(float(largest))} | {four(float(bound))} | {used} |" in shown


def test_downloads_open(open_page):
    at = open_page(PAGE)
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())


@pytest.mark.parametrize("lang", LANGUAGES)
def test_what_is_called_the_exact_sum_has_all_its_digits_or_says_that_it_has_not(lang, monkeypatch):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    seen = set()
    for settings in figures.STEPS.values():
        trace = figures.explain_step(settings)
        if trace.special is not None or not math.isfinite(float(trace.result)) or trace.result != trace.exact:
            continue
        (shown,) = re.findall(r"(≈ )?([−\d.]+)[^(（]*[(（]`0x", describe(trace))
        digits = Fraction(shown[1].replace("−", "-"))
        assert (digits == Fraction(float(trace.result))) == (not shown[0])
        seen.add(shown[1])
    assert "3.3369140625" in seen


@pytest.mark.parametrize(
    ("lang", "said"), [("en", "reads both A and B from shared memory"), ("zh", "从共享内存读取 A 和 B")]
)
def test_scales_go_to_tensor_memory_and_operands_do_not(open_page, lang, said):
    """The `_SS` form reads both operands from shared memory (corrections.md)."""
    seen = texts(open_page(PAGE, lang=lang, part="scales"))
    assert said in seen
    assert "`_SS`" in seen
