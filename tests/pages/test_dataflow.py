"""The dataflow page in both languages, and what its component is handed, held to the record bit by bit."""

import base64
import json

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.figures import dataflow as facts
from nvfp4viz.figures.words import words
from nvfp4viz.formats import decode_e2m1, decode_e4m3
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.moe.steps import STEPS
from nvfp4viz.serving import load
from nvfp4viz.serving.loader import ALLOCATORS
from nvfp4viz.serving.twins import TWINS, trace_twins
from nvfp4viz.ui import dataflow_parts as parts
from nvfp4viz.ui import i18n
from nvfp4viz.ui.dataflow_lab import picture
from sample_checkpoints import ensure

from .conftest import clean, guessed, shown_code_output, skipped, texts

PAGE = "dataflow"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "Dataflow of a layer", "zh": "一层的数据流"}
QUESTION = f"{PAGE}.predict.first"
KINDS = {
    "x": ml_dtypes.bfloat16,
    "packed1": np.uint8,
    "scales1": np.uint8,
    "acc1": np.float32,
    "c1": ml_dtypes.bfloat16,
    "c2": ml_dtypes.bfloat16,
    "packed2": np.uint8,
    "scales2": np.uint8,
    "acc2": np.float32,
    "c3": ml_dtypes.bfloat16,
}


@pytest.fixture(scope="module")
def runs():
    healthy = load(ensure("tiny-moe-nvfp4-full"), device="cpu")
    holed = {fate: load(ensure("tiny-moe-nvfp4-holes"), allocator=fate, device="cpu") for fate in ALLOCATORS}

    def make(prompt="arithmetic", layer=0, fate="zeros", twin="filled"):
        return trace_twins(healthy, holed[fate], DEMO_PROMPTS[prompt], layer, twin=twin, most=parts.MOST)

    return make


def revealed(at):
    return skipped(at, QUESTION)


def bits(text, rows):
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(rows, -1)


def raw(values):
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def record_of(trace):
    return {
        "x": trace.input.values,
        "packed1": trace.input.packed,
        "scales1": trace.input.scales,
        "acc1": trace.acc1,
        "c1": trace.c1,
        "c2": trace.intermediate.values,
        "packed2": trace.intermediate.packed,
        "scales2": trace.intermediate.scales,
        "acc2": trace.acc2,
        "c3": trace.c3,
    }


# ------------------------------------------------------------------ what the browser gets


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("fate", ALLOCATORS)
@pytest.mark.parametrize(("prompt", "layer"), [("arithmetic", 0), ("logs", 1), ("news", 3)])
def test_the_browser_gets_the_record_s_bits(runs, prompt, layer, fate, twin):
    twins = runs(prompt, layer, fate, twin)
    data = json.loads(json.dumps(picture(twins, covered=False), allow_nan=False))
    rows, tokens = twins.healthy.dispatch.rows, len(twins.token_ids)
    sent = data["faulty"]["rows"]
    before, after = record_of(twins.healthy), record_of(twins.faulty)
    for name, dtype in KINDS.items():
        assert before[name].dtype == dtype
        found = bits(data["healthy"][name], rows)
        assert (found == raw(before[name])).all()
        if sent:
            # the browser lays the rows that were sent over the healthy ones
            found = found.copy()
            found[sent] = bits(data["faulty"][name], len(sent))
        assert (found == raw(after[name])).all()
    for side, trace in (("healthy", twins.healthy), ("faulty", twins.faulty)):
        assert (bits(data[side]["out"], tokens) == raw(trace.out)).all()


def test_only_rows_that_differ_are_sent_twice(runs):
    twins = runs()
    data = picture(twins, covered=False)
    assert len(data["faulty"]["rows"]) == 3
    assert {int(twins.healthy.dispatch.row_expert[row]) for row in data["faulty"]["rows"]} <= set(twins.missing)


def test_the_browser_gets_maps_offsets_and_sizes(runs):
    twins = runs("logs", 1)
    plan = twins.faulty.dispatch
    data = picture(twins, covered=False)
    for number, route in enumerate(data["routes"]):
        expert = data["experts"][route["expert"]]
        assert (route["token"], route["rank"]) == divmod(number, 4)
        assert route["row"] == plan.c_map[number]
        assert plan.a_map[route["row"]] == route["token"]
        assert expert["id"] == plan.ids[route["token"], route["rank"]]
        assert expert["offset"] <= route["row"] < expert["end"]
        assert expert["scaleOffset"] == plan.blockscale_offsets[expert["id"]]
        assert expert["sizes1"] == " × ".join(map(str, plan.problem_sizes1[expert["id"]]))
        assert expert["sizes2"] == " × ".join(map(str, plan.problem_sizes2[expert["id"]]))
        assert expert["missing"] == (expert["id"] in twins.missing)
        weight = np.float32(twins.faulty.weights[route["token"], route["rank"]])
        assert route["weight"].endswith(f"0x{weight.view(np.uint32):08X}")
        assert route["rounded"].endswith(f"0x{weight.astype(ml_dtypes.bfloat16).view(np.uint16):04X}")
        for side, experts in (("healthy", twins.healthy_experts), ("faulty", twins.faulty_experts)):
            for name in ("a1_gscale", "g1_alphas", "a2_gscale", "g2_alphas"):
                value = getattr(experts, name)[expert["id"]]
                assert expert[side][name].endswith(f"0x{value.view(np.uint32):08X}")


def test_codes_are_looked_up_in_the_library_s_values(runs):
    values = picture(runs(), covered=True)["values"]
    for name, decode, count in (("e2m1", decode_e2m1, 16), ("e4m3", decode_e4m3, 256)):
        for text, value in zip(values[name], decode(np.arange(count, dtype=np.uint8)), strict=True):
            if np.isnan(value):
                assert text == "NaN"
            else:
                assert np.float32(text.replace("−", "-")) == value


@pytest.mark.parametrize("fate", ALLOCATORS)
def test_marks_say_what_the_comparison_found(runs, fate):
    twins = runs("logs", 1, fate)
    found = twins.comparison
    data = picture(twins, covered=False)
    assert len(data["marks"]) == len(STEPS)
    for step, signs in enumerate(data["marks"]):
        for route, sign in enumerate(signs):
            assert (sign == ".") == (not found.differs[step, route])
            assert (sign == "N") == found.nan[step, route]
            if sign == "0":
                assert found.zero[step, route]
    assert (data["first"], data["firstNan"]) == (found.first_difference, found.first_nan)


def test_nothing_of_the_faulty_run_is_sent_before_the_guess(runs):
    twins = runs(fate="nan")
    data = picture(twins, covered=True)
    assert data["faulty"] is data["marks"] is data["first"] is data["firstNan"] is None
    assert not any(expert["missing"] or expert["faulty"] for expert in data["experts"])
    assert {step["said"] for step in data["steps"]} == {words("en", f"{PAGE}.said.covered")}


def test_steps_are_signed_as_they_use_the_input_scale(runs):
    """The encode scale is one over it; alpha is it times weight_scale_2."""
    twins = runs(twin="calibrated")
    experts, stored = twins.healthy_experts, load(ensure("tiny-moe-nvfp4-full"), device="cpu").parameters[0]
    for number, scale, weight in (
        (1, stored.w13_input_scale.max(axis=1), stored.w13_weight_scale_2.max(axis=1)),
        (2, stored.w2_input_scale, stored.w2_weight_scale_2),
    ):
        assert (getattr(experts, f"a{number}_gscale") == np.float32(1) / scale).all()
        assert (getattr(experts, f"g{number}_alphas") == scale * weight).all()
    signs = [step["scale"] for step in picture(twins, covered=True)["steps"]]
    assert dict(zip(STEPS, signs, strict=True)) == dict.fromkeys(STEPS, "") | {
        "quantize_1": "÷", "gemm_1": "×", "quantize_2": "÷", "gemm_2": "×",
    }  # fmt: skip


# ------------------------------------------------------------------ sentences and tables


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        ({}, "nan", ["step 3, Quantise with a1", "3 of 40 rows", "step 6, Quantise with a2", "3 of 10 tokens"]),
        ({"fate": "nan"}, "nan", ["step 3, Quantise with a1**, and 3 of 10 tokens"]),
        ({"fate": "ones"}, "finite", ["No NaN appears", "3 of 10 tokens"]),
        ({"prompt": "news"}, "same", ["All 64 rows agree"]),
        ({"twin": "calibrated"}, "nan", ["40 of 40 rows; 3 go to experts without a scale"]),
    ],
    ids=str,
)
def test_the_finding_tells_what_happened(runs, settings, key, said):
    text = facts.describe_twins(runs(**settings), "en")
    assert all(part in text for part in said), text
    assert facts.describe_twins(runs(**settings), "zh") != text


def test_tables_hold_every_route_and_every_expert(runs):
    twins = runs()
    routes, experts = facts.route_rows(twins), facts.expert_rows(twins)
    plan = twins.healthy.dispatch
    assert len(routes) == plan.ids.size
    assert [row["c_map"] for row in routes] == plan.c_map.tolist()
    assert {row["first_difference"] for row in routes if row["expert"] in twins.missing} == {3}
    assert {row["first_nan"] for row in routes if row["expert"] in twins.missing} == {6}
    assert [row["expert_offset"] for row in experts] == plan.expert_offsets[:-1].tolist()
    assert [row["blockscale_offset"] for row in experts] == plan.blockscale_offsets[:-1].tolist()
    assert [row["expert"] for row in experts if row["missing"]] == list(twins.missing)


def test_the_first_row_shown_goes_to_a_broken_expert(runs):
    twins = runs()
    route = facts.first_bad_route(twins)
    assert twins.healthy.dispatch.ids.ravel()[route] in twins.missing
    assert facts.first_bad_route(runs("news")) == 0


# ------------------------------------------------------------------ the page


@pytest.mark.parametrize("lang", LANGUAGES)
def test_it_asks_before_it_shows(open_page, monkeypatch, lang):
    monkeypatch.setattr(i18n, "lang", lambda: lang)  # AppTest formats a select's options outside of the session
    at = open_page(PAGE, lang=lang)
    assert at.title[0].value == TITLES[lang]
    finding = facts.describe_twins(parts.asked(), lang)
    assert finding not in texts(at)
    guessed(at, QUESTION, "sum")
    assert finding in texts(at)
    assert words(lang, f"{QUESTION}.options.quantize_1") in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("fate", ALLOCATORS)
@pytest.mark.parametrize("twin", TWINS)
def test_every_setting_opens_by_link(open_page, monkeypatch, runs, lang, fate, twin):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    at = revealed(open_page(PAGE, lang=lang, fate=fate, twin=twin, layer="1", prompt="logs"))
    assert facts.describe_twins(runs("logs", 1, fate, twin), lang) in texts(at)


def test_a_prompt_of_one_s_own_is_read(open_page):
    at = revealed(open_page(PAGE, prompt="own", ask="7 + 8 ="))
    assert "28 rows" in texts(at) or "32 rows" in texts(at)
    at = open_page(PAGE, prompt="own")
    assert "Write a prompt" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("ask", ["", "你好"])
def test_without_a_run_there_is_no_file_and_the_page_says_when_there_will_be(open_page, monkeypatch, lang, ask):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    at = open_page(PAGE, lang=lang, prompt="own", ask=ask)
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())
    assert words(lang, "ui.no_data") in texts(at)
    assert not at.get("download_button")
    at.session_state[f"{PAGE}.ask"] = "7 + 8 ="
    clean(at.run())
    assert words(lang, "ui.no_data") not in texts(at)
    assert len(at.get("download_button")) == 4


def test_a_prompt_that_cannot_be_read_is_named(open_page):
    at = open_page(PAGE, prompt="own", ask="你好")
    assert "你" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [{"step": "0"}, {"step": "10"}, {"step": "x"}, {"route": "64"}, {"layer": "4"}, {"fate": "dust"}, {"twin": "no"},
     {"seed": "-1"}, {"prompt": "poem"}],
    ids=str,
)  # fmt: skip
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    assert at.title[0].value == TITLES[lang]
    ((name, value),) = query.items()
    assert f"`{name}={value}`" in texts(at)


def test_a_link_keeps_step_and_route(open_page):
    at = open_page(PAGE, step="5", route="7")
    assert at.query_params["step"] in ("5", ["5"])
    assert at.query_params["route"] in ("7", ["7"])


def test_starting_over_forgets_what_the_component_wrote_into_the_address(open_page):
    at = open_page(PAGE)
    at.query_params["step"] = "7"  # as the browser does, without telling the server
    clean(at.button(key=f"{PAGE}.reset").click().run())
    assert at.session_state[f"{PAGE}.step"] is None
    assert "step" not in at.query_params


def test_what_the_component_wrote_into_the_address_outlives_another_setting(open_page):
    at = open_page(PAGE)
    at.query_params["step"] = "7"
    clean(at.selectbox(key=f"{PAGE}.fate").set_value("nan").run())
    assert at.session_state[f"{PAGE}.step"] == 7
    assert at.query_params["step"] in ("7", ["7"])


@pytest.mark.parametrize("query", [{}, {"fate": "random", "seed": "3", "layer": "1", "twin": "calibrated"}], ids=str)
def test_the_code_shown_gives_the_page_s_numbers(open_page, query):
    output = shown_code_output(open_page(PAGE, **query), PAGE)
    if not query:
        assert "first difference at step 3 first NaN at step 6" in output
        assert "experts without a scale: (9, 28, 40)" in output
        assert "scale bytes after  7f 7f 7f 7f" in output


def test_tables_sources_and_downloads_open(open_page):
    at = revealed(open_page(PAGE))
    for name in ("open.details.tables", "sources", "download"):
        at.session_state[f"{PAGE}.{name}"] = True
    clean(at.run())
    assert len(at.dataframe) == 2
    assert "run_cutlass_moe_fp4" in texts(at)
    assert "vLLM 0.33.0" in texts(at)
