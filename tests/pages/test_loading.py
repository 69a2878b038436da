"""The page on loading as a reader in either language meets it."""

import ast
import json
import re
import warnings

import pytest

from nvfp4viz.figures.words import words
from nvfp4viz.serving.spread import READINGS
from nvfp4viz.serving.stages import STAGES
from nvfp4viz.ui.export import to_csv, to_json
from nvfp4viz.ui.loading_config import CASES, EXAMPLES
from nvfp4viz.ui.loading_parts import PARTS, quoted
from nvfp4viz.ui.numbers import exact, four

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
        # Well, wrongly, and nothing: all three fates of the page's sentence; what the good one costs comes later.
        ("fates", 1, [*["` api#9 GET /v1/s`"] * 2, "auth#9 C:\\tmpri", "`<pad>` × 16", "159", "96.88 %"], ["9.35 %"]),
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
    seen = texts(guessed(open_page(PAGE), f"{PAGE}.predict.fates", "same"))
    assert "Your guess: not at all: it has the same bits" in seen
    assert "It turns out to be: **by more than 1 %**" in seen
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


def test_what_a_slot_lacks_is_said_in_chinese_too(open_page):
    at = revealed(open_page, "guard", "zh")
    said = "".join(part.value for part in at.markdown).replace("\\", "")
    assert "layers.0.experts.{9,28,40}.{gate,up,down}.input_scale: 从未写入；layers.1" in said
    assert "never written" not in said


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_answer_says_whose_random_bits_it_means(open_page, lang):
    """With another seed or prompt the picture beside it shows other fates."""
    for query in ({"seed": "1"}, {"p": "code", "seed": "3"}):
        seen = texts(revealed(open_page, "fates", lang, **query))
        assert {"en": "the random bits of seed 0 end in a NaN", "zh": "种子 0 的随机位"}[lang] in seen
        # Of the opening prompt, both in the answer and below the picture.
        errors = re.findall(r"(?:still|off by|仍偏差|残差偏差) ([\d.]+ %)", seen)
        assert errors == ["9.35 %"] * 2


def test_the_guard_refuses_the_holes_and_passes_what_does_not_read_them(open_page):
    at = revealed(open_page, "guard")
    seen = texts(at)
    assert "For 2 of 5. For 2 it finds not a single one" in seen
    assert "The load guard refused this model: 159 scale slots are unusable." in seen
    assert "layers.0.experts.{2}.{gate,up,down}.input_scale: never written" in at.code[1].value
    assert "passes: every slot that this backend reads" in texts(revealed(open_page, "guard", b="vllm-marlin"))
    assert "passes" in texts(revealed(open_page, "guard", file="tiny-moe-nvfp4-full"))


def rows_of(shown, columns):
    """Cells of the page's table rows that have so many, by the first."""
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in shown.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) == columns}


ALL_FATES = {"zeros: fresh pages": "zeros", "ones: a filled buffer": "ones", "a neighbour's bytes": "neighbour"}
ALL_FATES |= {"NaN: a sentinel": "nan", "random bits": "random"}
FATE = re.compile(
    r"^(\w+): (.*), as the twin: (\w+)\n  first slot (\S+), NaN (.*)%, first broken layer (\w+)$", re.MULTILINE
)


@pytest.mark.parametrize("query", [{}, {"p": "code", "b": "vllm-flashinfer-cutlass", "seed": "3"}], ids=str)
def test_the_code_of_the_fates_prints_the_page_s_answers(open_page, query):
    at = open_page(PAGE, **query)
    # Before the guess, the fates that are drawn with their numbers, whatever the link asks for.
    nothing, wrong = FATE.findall(shown_code_output(at, PAGE))
    assert (nothing[0], nothing[4], wrong[0]) == ("zeros", "96.88", "neighbour")
    assert "96.88 % of the tokens it read end as NaN" in texts(at)
    assert f"over a neighbour's bytes {quoted(ast.literal_eval(wrong[1]))}" in texts(at)
    at = revealed(open_page, "fates", **query)
    output, rows = shown_code_output(at, PAGE), rows_of(texts(at), 6)
    slots = re.match(r"(\d+) slots have no tensor; the complete twin writes (.*)$", output, re.MULTILINE)
    assert f"{slots[1]} slots have no tensor in the file" in texts(at)
    assert rows["complete twin"][0] == quoted(ast.literal_eval(slots[2]))
    found = {name: rest for name, *rest in FATE.findall(output)}
    assert list(found) == list(ALL_FATES.values())  # those of the opening keep their places
    assert [said for said in rows if said in ALL_FATES] == list(ALL_FATES)
    for said, name in ALL_FATES.items():
        text, same, slot, nan, first = found[name]
        layer = "–" if first == "None" else f"L{first}"
        percent = f"{float(nan):g} %" if float(nan) else "0 %"
        held = exact(float(slot))
        assert rows[said] == [quoted(ast.literal_eval(text)), "yes" if same == "True" else "no", held, percent, layer]


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"layer": "1", "expert": "3", "projection": "gate", "v": "thousand"},
        {"layer": "1", "expert": "3", "v": "own", "own": "0.5"},
        {"layer": "3", "projection": "up", "v": "huge"},
    ],
    ids=str,
)
def test_the_code_of_a_spreading_value_prints_the_page_s_numbers(open_page, query):
    # Before the guess every slot holds its own value, and reaches nobody.
    before = shown_code_output(open_page(PAGE, part="maxima", **query), PAGE)
    assert set(re.findall(r"reaches (\d+) experts", before)) == {"0"}
    held, now = re.search(r"the slot held (\S+); now it holds (\S+)", before).groups()
    assert float(held) == float(now)
    at = revealed(open_page, "maxima", **query)
    shown, output = texts(at), shown_code_output(at, PAGE)
    held, now = re.search(r"the slot held (\S+); now it holds (\S+)", output).groups()
    assert f"slot held {exact(float(held))}; now it holds **{exact(float(now))}**" in shown
    rows = {name: row for names, row in rows_of(shown, 7).items() for name in re.split(", ", names)}
    lines = output.splitlines()[1:]
    assert len(lines) == len(READINGS)
    for line in lines:
        name, rest = line.removeprefix("vllm-").split(": ", 1)
        numbers = {key: four(float(value)) for key, value in re.findall(r"(before|now|encode|alpha) ([^,]+),", rest)}
        _, *shown_numbers, reached = rows[name]
        for key, cell in zip(("before", "now", "encode", "alpha"), shown_numbers, strict=True):
            assert numbers.get(key) == (None if cell in ("–", "?") else cell), (name, key)
        assert ("not among the facts read" in rest) == (reached == "?")
        assert reached == "?" or rest.endswith(f", reaches {reached} experts")
    (scale_c,) = re.findall(r"^vllm-flashinfer-trtllm: .*g1_scale_c ([^,]+),", output, re.MULTILINE)
    assert f"encode scale of down ({four(float(scale_c))} for expert" in shown


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"layer": "2", "expert": "5", "projection": "gate", "a": "ones", "b": "vllm-flashinfer-cutlass"},
        {"b": "vllm-marlin"},
    ],
    ids=str,
)
def test_the_code_of_the_stages_prints_the_page_s_numbers(open_page, query):
    before = shown_code_output(open_page(PAGE, part="chain", **query), PAGE)
    assert "--quantization" not in before
    at = revealed(open_page, "chain", **query)
    rows, output = rows_of(texts(at), 4), shown_code_output(at, PAGE)
    assert output.startswith(before)

    def number(text):
        return "none" if text == "None" else exact(float(text))

    def said(pattern):
        return re.search(pattern, output, re.MULTILINE).groups()

    (amax,) = said(r"^BF16: largest weight (.*)$")
    assert rows["BF16"][1] == f"largest weight {number(amax)}"
    tokens, largest = said(r"^PTQ: ([\d,]+) tokens, largest input (.*)$")
    assert rows["PTQ"][1] == f"{tokens} tokens; largest input {number(largest)}"
    scale, key, stored = said(r"^export: weight_scale_2 (\S+) (\S+) (.*)$")
    stored = stored if stored == "no such key" else number(stored)
    assert rows["Export"][1] == f"`weight_scale_2` {number(scale)}; `{key[key.index('experts.') :]}`: {stored}"
    (slot,) = said(r"^load: slot (.*)$")
    assert rows["Load"][1] == f"slot {number(slot)}"
    read, encode, alpha = said(r"^backend: reads (\S+) encode scale (\S+) alpha (\S+)$")
    assert rows["Backend"][1] == f"reads {number(read)}; encode scale {number(encode)}; alpha {number(alpha)}"
    for stage, name in zip(STAGES, ("BF16", "PTQ", "Export", "Load", "Backend"), strict=True):
        (flags,) = said(rf"^flags of {stage}: (.*)$")
        assert rows[name][2] == " · ".join(f"`{flag}`" for flag in flags.split(", "))


@pytest.mark.parametrize("query", [{}, {"p": "code", "a": "random", "seed": "4"}, {"p": "news", "a": "ones"}], ids=str)
def test_the_code_of_the_cause_prints_the_page_s_runs(open_page, query):
    at = open_page(PAGE, part="cause", **query)
    before = shown_code_output(at, PAGE)
    assert len(before.splitlines()) == 2
    at = revealed(open_page, "cause", **query)
    shown, output = texts(at), shown_code_output(at, PAGE)
    assert output.startswith(before)
    for line in before.splitlines():
        name, text = line.split(": ", 1)
        path = {
            "vllm-cutlass": "suspect: per-expert CUTLASS",
            "vllm-marlin": "independent: Marlin, weights decoded to BF16",
        }
        assert f"| {path[name]} | {quoted(ast.literal_eval(text))} |" in shown
    loads = re.findall(r"^(\w+), start (\d): (.*), NaN (.*)%$", output, re.MULTILINE)
    assert len(loads) == 4
    for memory, start, text, nan in loads:
        setting = "`PYTORCH_NO_CUDA_MEMORY_CACHING=1`" if memory == "zeros" else f"caching on, start {start}"
        *_, answer, share = rows_of(shown, 4)[setting]
        assert (answer, share) == (quoted(ast.literal_eval(text)), f"{float(nan):g} %")
    steps = re.findall(r"^(\d) (\w+) 0-(\d+): logits differ (\w+), hold NaN (\w+)$", output, re.MULTILINE)
    runs = {number: row for number, row in rows_of(shown, 5).items() if number.isdigit()}
    assert len(steps) == len(runs)
    for number, over, last, differs, nan in steps:
        assert runs[number][0].startswith(over)
        assert runs[number][1:] == [f"0–{last}", HOLDS[differs], HOLDS[nan]]
    found = re.search(r"^layer (\w+), expert (\w+)$", output, re.MULTILINE).groups()
    assert f"Layer **{found[0]}**, expert **{found[1]}**" in shown or (
        found == ("None", "None") and "No bit of the logits differs" in shown
    )


@pytest.mark.parametrize("query", [{}, {"seed": "5", "file": "tiny-moe-nvfp4-full"}, {"b": "vllm-marlin"}], ids=str)
def test_the_code_of_the_guard_prints_what_each_measure_finds(open_page, query):
    counted = re.compile(r"^(\w+), (\w+): (\d+ / \d+)$", re.MULTILINE)
    at = open_page(PAGE, part="guard", **query)
    before = shown_code_output(at, PAGE)
    assert {memory for memory, _, _ in counted.findall(before)} == {"zeros"}
    assert len(before.splitlines()) == 3
    at = revealed(open_page, "guard", **query)
    shown, output = texts(at), shown_code_output(at, PAGE)
    rows = rows_of(shown, 4)
    printed = {}
    for memory, _, number in counted.findall(output):
        printed.setdefault(memory, []).append(number)
    assert printed == {name: rows[said] for said, name in ALL_FATES.items()}
    last = output.splitlines()[-1]
    assert (" passes" in last) == (" passes: every slot" in shown)
    assert ("The load guard refused this model: 159 scale slots" in last) == (
        "The load guard refused this model: 159 scale slots" in shown
    )


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
