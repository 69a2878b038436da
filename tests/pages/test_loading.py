"""The page on loading as a reader in either language meets it."""

import json
import re
import warnings

import pytest

from nvfp4viz.figures.words import words
from nvfp4viz.ui.export import to_csv, to_json
from nvfp4viz.ui.loading_config import CASES, EXAMPLES
from nvfp4viz.ui.loading_parts import PARTS

from .conftest import clean, guessed, shown_code_output, skipped, texts

PAGE = "loading"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "Loading", "zh": "加载"}
QUESTIONS = dict(zip(PARTS, ("fates", "maxima", "promotion", "chain", "cause", "guard"), strict=True))


def revealed(open_page, part, lang="en", **query):
    """A part with its question skipped."""
    at = open_page(PAGE, lang=lang, part=part, **query)
    return skipped(at, f"{PAGE}.predict.{QUESTIONS[part]}")


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_asks_first_and_then_shows(open_page, lang, part):
    at = open_page(PAGE, lang=lang, part=part)
    assert at.title[0].value == TITLES[lang]
    key = f"{PAGE}.predict.{QUESTIONS[part]}"
    assert words(lang, "ui.predict.skip") in [button.label for button in at.button]
    before = texts(at)
    at = skipped(at, key)
    assert len(at.get("plotly_chart")) <= 1
    assert "| " in texts(at)
    assert len(texts(at)) > len(before)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("part", "figures", "shown", "later"),
    [
        ("fates", 1, ["` api#9 GET /v1/s`", "`<pad>` × 16", "159", "96.88 %"], ["auth#9"]),
        ("maxima", 1, ["64"], ["| cutlass |"]),
        ("promotion", 0, ['"input_activations": null', "**W4A16**", "`config.json`"], ["54189"]),
        ("chain", 0, ["weight_scale_2", "down_proj.input_scale"], ["--quantization"]),
        ("cause", 0, ["`<pad>` × 16", "` api#9 GET /v1/s`"], ["PYTORCH_NO_CUDA_MEMORY_CACHING", "0–1"]),
        ("guard", 0, ["| 159 / 159 | 159 / 159 | 159 / 159 |", *["| ? | ? | ? |"] * 4], ["| 0 / 159 |", "check_slots"]),
    ],
)
def test_before_a_guess_the_sound_case_or_the_first_fate_stands_there(open_page, lang, part, figures, shown, later):
    at = open_page(PAGE, lang=lang, part=part)
    assert len(at.get("plotly_chart")) == figures
    seen = texts(at)
    for text in shown:
        assert seen.count(text) >= shown.count(text), text
    assert not [text for text in later if text in seen]
    after = texts(skipped(at, f"{PAGE}.predict.{QUESTIONS[part]}"))
    assert all(text in after for text in later)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"part": "nowhere"},
        {"p": "poem"},
        {"b": "vllm-emulation"},
        {"seed": "10"},
        {"layer": "4"},
        {"expert": "64"},
        {"projection": "gate_up"},
        {"v": "two"},
        {"own": "much"},
        {"cfg": "mine"},
        {"a": "ghosts"},
        {"file": "gemma"},
    ],
    ids=lambda query: " ".join(f"{name}={value}" for name, value in query.items()),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    assert at.title[0].value == TITLES[lang]
    (name,) = query
    assert f"`{name}=" in texts(at)


def test_five_fates_of_one_file(open_page):
    seen = texts(guessed(open_page(PAGE), f"{PAGE}.predict.fates", "finite"))
    assert "Your guess: ones and the neighbour's bytes" in seen
    assert "159 slots have no tensor in the file. **3 different replies** came of 5 loads" in seen
    assert "the complete twin's came 1 of 5 times." in seen
    assert "` auth#9 C:\\tmpri`" in seen
    assert seen.count("`<pad>` × 16") == 3


def test_a_prompt_that_visits_no_hole_says_so(open_page):
    seen = texts(revealed(open_page, "fates", p="news"))
    assert "this prompt visits no expert with an unfilled slot" in seen
    assert "**1 different reply** came of 5 loads; the complete twin's came 5 of 5" in seen


def test_a_maximum_hides_a_zero_and_spreads_a_nan(open_page):
    seen = texts(revealed(open_page, "maxima"))
    assert "The zero reaches 0 experts and the NaN 64 of 64. On the per-expert path the same zero reaches 1" in seen
    assert "in a gate slot it would reach 0" in seen
    assert "the value changes 1 on the per-expert path, 64 under one maximum" in seen
    seen = texts(revealed(open_page, "maxima", v="own", own="nan"))
    assert "now it holds **NaN**" in seen


@pytest.mark.parametrize(
    ("example", "promoted", "line"),
    [
        ("null", True, "line 13"),
        ("absent", True, "line 7"),
        ("two_groups", False, "line 21"),
        ("sidecar", False, "line 1"),
        ("empty", False, "line 6"),
        ("empty_object", False, "line 13"),
        ("w4a4", False, "line 13"),
        ("w4a16", False, "line 5"),
    ],
)
def test_each_example_is_decided_on_its_line(open_page, example, promoted, line):
    seen = texts(revealed(open_page, "promotion", cfg=example))
    assert ("The rule fires" in seen) is promoted
    assert line in seen


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("case", CASES)
def test_the_reported_cases_open_by_link_and_are_decided_as_reported(open_page, lang, case):
    """The variants of vLLM #54189: only an absent key counts as null in every group."""
    at = revealed(open_page, "promotion", lang, cfg=case)
    assert at.query_params["cfg"] in (case, [case])
    assert at.selectbox(key="loading.cfg").value == case
    scheme = {"absent": "W4A16"}.get(case, "W4A4")
    assert f"**{scheme}**" in texts(at)
    assert "https://github.com/vllm-project/vllm/issues/54189" in texts(at)


def test_the_cases_are_the_report_s():
    """An absent key, two groups of which one is null, the sidecar alone, an empty object."""
    configs = {name: EXAMPLES[name] for name in CASES}
    (group,) = configs["absent"][0]["quantization_config"]["config_groups"].values()
    assert "input_activations" not in group
    first, second = configs["two_groups"][0]["quantization_config"]["config_groups"].values()
    assert first["input_activations"] is None
    assert second["input_activations"]
    assert "quantization_config" not in configs["sidecar"][0]
    assert configs["sidecar"][1]["quantization"]["quant_algo"] == "NVFP4"
    assert configs["empty"][0]["quantization_config"]["config_groups"] == {}


def test_what_a_reader_writes_is_traced_and_its_mistakes_are_named(open_page):
    at = revealed(open_page, "promotion", cfg="w4a4")
    assert "does not fire" in texts(at)
    config = at.text_area(key="loading.text.config")
    at = clean(config.set_value(config.value.replace('"NVFP4"', '"NVFP4",,')).run())
    assert "config.json is not JSON: line 5, column" in texts(at)
    at = clean(at.text_area(key="loading.text.config").set_value("[1]").run())
    assert "config.json is JSON, but not an object" in texts(at)
    at = clean(at.text_area(key="loading.text.config").set_value("").run())
    assert "Served as **UNQUANTISED**" in texts(at)
    at = clean(at.text_area(key="loading.text.config").set_value('{"quantization_config": {"quant_algo": "x"}}').run())
    assert 'names the algorithm "x"' in texts(at)
    at = clean(at.selectbox(key="loading.cfg").set_value("absent").run())
    assert "The rule fires" in texts(at)


def test_the_stages_of_a_hole_and_of_a_healthy_expert(open_page):
    seen = texts(revealed(open_page, "chain"))
    assert "Calibration routed **0 tokens**" in seen
    assert "no such key" in seen
    seen = texts(revealed(open_page, "chain", expert="0"))
    assert "no such key" not in seen


def test_the_cause_is_found_in_a_few_runs(open_page):
    seen = texts(revealed(open_page, "cause"))
    assert "Layer **0**, expert **9**, after 9 runs" in seen
    assert "` api#9 GET /v1/s`" in seen
    seen = texts(revealed(open_page, "cause", p="news"))
    assert "No bit of the logits differs" in seen


def test_the_guard_refuses_the_holes_and_passes_what_does_not_read_them(open_page):
    at = revealed(open_page, "guard")
    seen = texts(at)
    assert "For 2 of 5. For 2 it finds not a single one" in seen
    assert "The load guard refused this model: 159 scale slots are unusable." in seen
    assert "layers.0.experts.{2}.{gate,up,down}.input_scale: never written" in at.code[1].value
    assert "passes: every slot that this backend reads" in texts(revealed(open_page, "guard", b="vllm-marlin"))
    assert "passes" in texts(revealed(open_page, "guard", file="tiny-moe-nvfp4-full"))


def test_the_shown_code_gives_the_page_s_numbers(open_page):
    output = shown_code_output(open_page(PAGE), PAGE)
    assert "zeros: '<pad>" in output
    assert "vllm-flashinfer-cutlass: layer, 64 experts reached" in output
    assert "vllm-b12x: open, not among the facts read" in output


RULE = re.compile(r"served as (\S+) \((\S+)\), the rule (fires|does not fire)")
HOLDS = {"True": "yes", "False": "no", "None": "–"}


def held_to_the_page(output, shown):
    """The printed verdict, steps and line are the page's."""
    scheme, algo, does = RULE.search(output).groups()
    assert f"erved as **{scheme}** ({algo})" in shown
    assert ("The rule fires" in shown) == (does == "fires")
    file, line, decided = re.search(r"^(\S+), line (\d+).*?: (.*)$", output, re.MULTILINE).groups()
    assert f"line {line} of `{file}`" in shown
    assert f"\n{decided}\n" in f"{shown}\n"
    for number, found, holds in re.findall(r"^(\d) \S+: (.*), (True|False|None)$", output, re.MULTILINE):
        (row,) = (each for each in shown.splitlines() if each.startswith(f"| {number} | "))
        assert row.endswith(f"| {HOLDS[holds]} |")
        assert f"`{found}" in row


@pytest.mark.parametrize("cfg", EXAMPLES)
def test_the_code_of_the_rule_reads_the_config_that_is_shown(open_page, cfg):
    at = open_page(PAGE, part="promotion", cfg=cfg)
    shown = texts(at)
    output = shown_code_output(at, PAGE)
    # Before the guess, the example that stands beside the question.
    assert RULE.search(output).groups() == ("W4A16", "W4A16_NVFP4", "fires")
    assert "line 13 of `config.json`" in shown
    assert "config.json, line 13:" in output
    at = revealed(open_page, "promotion", cfg=cfg)
    shown = texts(at)
    held_to_the_page(shown_code_output(at, PAGE), shown)


def test_the_code_of_the_rule_reads_what_the_reader_wrote(open_page):
    at = revealed(open_page, "promotion", cfg="w4a4")
    own = '{"quantization_config": {"quant_algo": "NVFP4",\n"note": "\\" \\\\ $config \'\'\' 中",\n'
    own += '"config_groups": {"g": {}}}}'
    at = clean(at.text_area(key="loading.text.config").set_value(own).run())
    shown = texts(at)
    assert "The rule fires" in shown
    output = shown_code_output(at, PAGE)
    held_to_the_page(output, shown)
    assert "config.json, line 3, a key absent there" in output
    at = clean(at.text_area(key="loading.text.config").set_value("[1]").run())
    assert "config.json is JSON, but not an object" in shown_code_output(at, PAGE)
    at = clean(at.text_area(key="loading.text.config").set_value("").run())
    assert "served as UNQUANTISED" in shown_code_output(at, PAGE)


def test_every_part_has_its_data(open_page, downloaded):
    """Six parts, six files; each can be written, and holds what the library computes."""
    at = open_page(PAGE, cfg="two_groups", expert="9", v="zero")
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())
    assert len(downloaded) == len(PARTS)
    for rows in downloaded.values():
        assert to_csv(rows).count(b"\n") >= len(rows)
        assert json.loads(to_json(rows))
    rule = [row for row in downloaded["weight_only_rule"] if row["config"] == "as written"]
    assert rule == [
        {**row, "config": "as written"} for row in downloaded["weight_only_rule"] if row["config"] == "two_groups"
    ]
    assert rule[-1]["decided_by_line"] == 21
    assert {row["config"] for row in downloaded["weight_only_rule"] if row["promoted"]} == {"null", "absent"}
    by = {(row["stage"], row["holds"]): row["value"] for row in downloaded["stages"]}
    assert by["ptq", "calibration_tokens"] == 0
    assert by["export", "input_scale"] is None
    assert by["load", "slot"] == by["backend", "alpha"] == 0
    runs = [row for row in downloaded["cause"] if row["instrument"] == "bisection"]
    assert len(runs) == 9
    assert {row["answer"] for row in downloaded["cause"] if row["instrument"] == "harness"} == {
        "<pad>" * 16,
        " api#9 GET /v1/s",
    }
    missed = {row["memory"] for row in downloaded["guard"] if row["measure"] == "values" and row["found"] == 0}
    assert missed == {"ones", "neighbour"}
    assert [row["found"] for row in downloaded["guard"] if row["measure"] == "sentinel"] == [159] * 5


def test_settings_travel_in_the_link(open_page):
    at = open_page(PAGE, part="maxima", layer="2", expert="7", projection="gate", v="huge")
    asked = {"part": "maxima", "layer": "2", "expert": "7", "projection": "gate", "v": "huge"}
    assert {name: at.query_params[name] for name in asked} == asked


def test_a_number_beyond_float32_is_an_infinity_without_a_warning(open_page):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        at = open_page(PAGE, part="maxima", v="own", own="1e300")
        skipped(at, f"{PAGE}.predict.maxima")
    assert "now it holds **∞**" in texts(at)
