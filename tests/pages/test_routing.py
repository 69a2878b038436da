"""The page on routing as a reader in either language meets it."""

import re

import numpy as np
import pytest

from nvfp4viz.figures import routing as figures
from nvfp4viz.figures.words import catalogue, listed
from nvfp4viz.model import corpus, planner
from nvfp4viz.moe.router_comparison import ROUTERS, compare_routers
from nvfp4viz.ui import router_parts, routing_parts, routing_run

from .conftest import clean, guessed, shown_code_output, skipped, texts

PAGE = "routing"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "Routing", "zh": "路由"}
PLAN, NAN, KINDS = (f"{PAGE}.predict.{name}" for name in ("plan", "nan", "kinds"))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", routing_parts.PARTS)
def test_every_part_opens_by_link(open_page, lang, part):
    at = open_page(PAGE, lang=lang, part=part)
    assert at.title[0].value == TITLES[lang]
    assert len(at.get("plotly_chart")) <= 2


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"part": "nowhere"},
        {"source": "book"},
        {"text": "poems"},
        {"n": "513"},
        {"n": "nan"},
        {"plan": "poems"},
        {"pilot": "8"},
        {"target": "64"},
        {"came": "maybe"},
        {"logits": "1,2"},
        {"bias": "a,b"},
        {"bias": "nan,0,0,0,0,0,0,0"},
        {"bias": "0,0,0,0,0,0,0,1e39"},
        {"token": "16"},
        {"scaling": "0"},
        {"token": "9" * 5000},
        {"ask": "x" * 10_000},
    ],
    ids=lambda query: " ".join(f"{name}={value[:8]}" for name, value in query.items()),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    assert at.title[0].value == TITLES[lang]
    (name,) = query
    assert f"`{name}=" in texts(at)
    if name == "ask":
        assert "500" in texts(at)


def test_it_opens_on_a_prompt_that_calibration_did_not_foresee(open_page):
    at = open_page(PAGE)
    used = routing_parts.prompt_counts(corpus.DEMO_PROMPTS["arithmetic"])
    routes, slots = figures.blind_routes(used, routing_parts.seen())
    assert routes > 0
    assert f"**{routes} of {int(used.sum())} routes**" in texts(at)
    assert f"at {slots} slots" in texts(at)
    assert f"{int((routing_parts.seen() == 0).sum())} of 256 slots without a token" in texts(at)


def test_other_kinds_of_text_are_asked_for_before_they_are_listed(open_page):
    at = open_page(PAGE)
    assert "| Text |" not in texts(at)
    guessed(at, KINDS, "all")
    shares = {}
    for text in set(corpus.DOMAINS) - {corpus.CALIBRATION_DOMAIN}:
        used = routing_parts.log_of(text).totals()
        shares[text] = figures.blind_routes(used, routing_parts.seen())[0] / used.sum()
    assert {text for text, share in shares.items() if share > 1 / 3} == {"arithmetic", "json", "logs"}
    seen = texts(at)
    assert f"3 of 5: arithmetic {100 * shares['arithmetic']:.3g} %, JSON {100 * shares['json']:.3g} %" in seen
    assert "Your guess: all 5" in seen
    assert "| Text |" in seen


def test_every_kind_has_its_row_once_the_question_is_passed(open_page):
    at = open_page(PAGE)
    at = skipped(at, KINDS)
    table = next(text.value for text in at.markdown if text.value.startswith("| Text |"))
    assert len(table.splitlines()) == 2 + len(routing_parts.TEXTS)


def test_a_news_prompt_goes_where_calibration_was(open_page):
    assert "**No route** of" in texts(open_page(PAGE, text="news"))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("text", routing_parts.TEXTS)
def test_recorded_documents_of_every_kind(open_page, lang, text):
    at = open_page(PAGE, lang=lang, source="text", text=text)
    assert len(at.get("plotly_chart")) == 1
    used = routing_parts.log_of(text).totals()
    assert f"{figures.blind_routes(used, routing_parts.seen())[0]:,}" in texts(at)


def test_all_texts_fall_back_to_one_where_a_prompt_is_asked_for(open_page):
    at = open_page(PAGE, text="all")
    assert at.session_state[f"{PAGE}.text"] == "arithmetic"


def test_one_s_own_prompt_is_routed(open_page):
    at = open_page(PAGE, ask="The council said on Friday")
    used = routing_parts.prompt_counts("The council said on Friday")
    routes, _ = figures.blind_routes(used, routing_parts.seen())
    assert (f"**{routes} of" if routes else "**No route** of") in texts(at)
    at.text_input(key=f"{PAGE}.ask").set_value("naïve").run()
    clean(at)
    assert "ï" in texts(at)
    # The number below is another prompt's, and says so.
    assert "number and upper map are those of the prompt for **arithmetic**" in texts(at)
    at.text_input(key=f"{PAGE}.ask").set_value("naive").run()
    assert "could not be read" not in texts(clean(at))


def test_holes_close_as_the_slider_moves(open_page):
    log = routing_parts.log_of("calibration")
    said = []
    for n in (0, 1, 14, 512):
        at = open_page(PAGE, part="calibration", n=str(n))
        said.append(re.search(r"\*\*(\d+) of 256 slots\*\* have no token", texts(at))[1])
    assert said == [str(log.holes_after()[n]) for n in (0, 1, 14, 512)]
    assert int(said[-1]) == (routing_parts.seen() == 0).sum()


def test_the_last_closings_are_named(open_page):
    at = open_page(PAGE, part="calibration", n="14")
    (document, slots), *_ = figures.closings(routing_parts.log_of("calibration"), 14, 5)
    opening = " ".join(corpus.sample("news", 2, document)[-1].split()[:9])
    assert f"| {document} | {', '.join(f'L{layer} E{e}' for layer, e in slots[:6])}" in texts(at)
    assert opening in texts(at)


def test_every_stop_closes_something_or_is_a_power_of_two():
    stops, holes = routing_parts.stops(), routing_parts.log_of("calibration").holes_after()
    assert stops[0] == 0
    assert stops[-1] == 512
    for stop in map(int, stops[1:]):
        assert holes[stop] < holes[stop - 1] or stop & (stop - 1) == 0


def test_the_plan_is_asked_for_before_it_is_shown(open_page):
    at = open_page(PAGE, part="planner")
    assert len(at.get("plotly_chart")) == 0
    guessed(at, PLAN, "few")
    holes = routing_parts.log_of("news").holes_after()
    assert f"{holes[512]} of {holes[64]}. What a kind of text uses" in texts(at)
    assert f"The answer: **most of the {holes[64]}" in texts(at) or f"**most of the {holes[64]}**" in texts(at)
    assert len(at.get("plotly_chart")) == 2


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(("pilot", "target"), [("16", "256"), ("64", "512"), ("128", "1024")])
def test_the_interval_s_record_is_computed(open_page, lang, pilot, target):
    at = open_page(PAGE, lang=lang, part="planner", plan="recipes", pilot=pilot, target=target)
    skipped(at, PLAN)
    checks = planner.check_planner(
        {text: routing_parts.log_of(text) for text in routing_parts.TEXTS}, int(pilot), int(target)
    )
    held = sum(check.held for check in checks)
    shown = texts(at)
    assert (
        f"in {held} of {len(checks)} held-out runs" if lang == "en" else f"{len(checks)} 次留出检验中，区间有 {held} 次"
    ) in shown
    plan = routing_parts.plans_of("recipes", int(pilot), int(target))[-1]
    assert str(plan.low) in shown
    assert str(plan.high) in shown


def test_what_came_is_shown_when_asked_for(open_page):
    at = open_page(PAGE, part="planner", plan="json")
    skipped(at, PLAN)
    came = int(routing_parts.log_of("json").holes_after()[512])
    assert "It came to" not in texts(at)
    at.toggle(key=f"{PAGE}.came").set_value(True).run()
    clean(at)
    assert f"It came to **{came}**" in texts(at)


def test_the_real_run_s_holes_are_read_from_the_file(open_page):
    at = open_page(PAGE, part="run")
    assert routing_run.without_scale() == {0: [40, 42, 82, 98]}
    assert "experts 40, 42, 82, 98" in texts(at)
    assert "4,096 news articles (CNN/DailyMail) of 1,024 tokens, 4,194,304 in all" in texts(at)
    log = routing_parts.log_of("calibration")
    tokens, passes = int(log.tokens.sum()), 2
    assert int(log.totals().sum()) == passes * tokens * 4 * 4
    share = passes * tokens * 4 / 64
    assert f"{tokens:,} tokens, each read {passes} times, would be {share:,.0f} each" in texts(at)
    assert "| `gate_proj.input_scale` | ✓ | ∅ |" in texts(at)
    assert "| `down_proj.input_scale` | ✓ | ✓ |" in texts(at)
    assert "`model.vision_tower*`" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("preset", router_parts.PRESETS)
def test_every_preset_goes_through_every_router(open_page, lang, preset):
    logits = ",".join(str(value) for value in router_parts.PRESETS[preset])
    at = open_page(PAGE, lang=lang, part="routers", logits=logits)
    picked = compare_routers(
        router_parts.PRESETS[preset], 3, bias=router_parts.BIAS, token=5, table=router_parts.TABLE,
        groups=router_parts.GROUPS, top_groups=router_parts.TOP_GROUPS, image_sentinel_lo=router_parts.IMAGE_LO,
    )  # fmt: skip
    lines = [line for line in texts(at).splitlines() if line.startswith("- **")]
    assert len(lines) == len(ROUTERS)
    for line, one in zip(lines, picked.values(), strict=True):
        assert listed(lang, map(str, one.ids)) in line
        assert all(("NaN" if np.isnan(weight) else f"{weight:.4g}") in line for weight in one.weights)


def test_a_place_of_an_image_asks_no_table(open_page):
    lines = {}
    for token in ("10", "11", "15"):
        said = texts(open_page(PAGE, part="routers", token=token)).splitlines()
        lines[token] = next(line for line in said if line.startswith("- **hash**"))
    assert "Row 10 of the table" in lines["10"]
    for token in ("11", "15"):
        assert f"Id {token} stands for a place of an image" in lines[token]
        assert "**hash** chooses 6, 0, 3" in lines[token]  # as √softplus with that bias does


def test_what_was_read_in_a_newer_commit_is_said(open_page):
    at = open_page(PAGE, part="routers")
    said = texts(skipped(at, NAN))
    assert "vLLM 0.33.0, but for the 5 ids of an image" in said
    assert all("`0f5257e`" in catalogue(lang)[f"{PAGE}.routers.text"] for lang in LANGUAGES)


def test_a_preset_is_taken(open_page):
    at = open_page(PAGE, part="routers")
    at.selectbox(key=f"{PAGE}.preset").set_value("ties").run()
    clean(at)
    assert at.session_state[f"{PAGE}.logits"] == router_parts.PRESETS["ties"]
    assert "Experts 2 and 3 are equal" in texts(at)


def test_the_sample_that_is_shown_is_named(open_page):
    """Also where a link brought it, and none is where the numbers are the reader's own."""
    preset = f"{PAGE}.preset"
    assert open_page(PAGE, part="routers").selectbox(key=preset).value == "spread"
    at = open_page(PAGE, part="routers", logits=",".join(map(str, router_parts.PRESETS["nan"])))
    assert at.selectbox(key=preset).value == "nan"
    at.text_input(key=f"{PAGE}.own_logits").set_value("0, 0, 0, 0, 0, 0, 0, 1")
    clean(at.button(key=f"{PAGE}.apply").click().run())
    assert at.selectbox(key=preset).value is None
    clean(at.selectbox(key=preset).set_value("inf").run())
    assert at.session_state[f"{PAGE}.logits"] == router_parts.PRESETS["inf"]


def test_errors_of_one_s_own_numbers_speak_of_experts(open_page):
    at = open_page(PAGE, part="routers")
    for field, text, said in (
        ("logits", "1, 2, 3", "there are 8 experts"),
        ("bias", "0, 0, 0, nan, 0, 0, 0, 0", "bias of expert 3"),
        ("bias", "0, 0, 1e39, 0, 0, 0, 0, 0", "bias of expert 2"),
    ):
        at.text_input(key=f"{PAGE}.own_{field}").set_value(text)
        clean(at.button(key=f"{PAGE}.apply").click().run())
        at.text_input(key=f"{PAGE}.own_{field}").set_value("")
        assert said in texts(at)
        assert "a block has" not in texts(at)


def test_what_is_beyond_float32_is_infinite(open_page):
    at = open_page(PAGE, part="routers", logits="1e308,0,0,0,0,0,0,-1e308")
    assert "A number that is not finite decides here" in texts(at)


@pytest.mark.parametrize(
    "query", [{"bias": "9,9,9,-9,-9,-9,-9,-9"}, {"scaling": "16", "token": "3"}, {"logits": "0,0,0,0,0,0,0,0"}], ids=str
)
def test_the_question_is_about_the_sample_whatever_is_set(open_page, query):
    at = open_page(PAGE, part="routers", **query)
    skipped(at, NAN)
    assert "sorts it first (4, 0, 3)" in texts(at)


def test_another_kind_of_text_takes_the_place_of_one_s_own_prompt(open_page):
    at = open_page(PAGE, ask="The council said on Friday")
    at.selectbox(key=f"{PAGE}.text").set_value("json").run()
    clean(at)
    used = routing_parts.prompt_counts(corpus.DEMO_PROMPTS["json"])
    routes, _ = figures.blind_routes(used, routing_parts.seen())
    assert f"**{routes} of {int(used.sum())} routes**" in texts(at)


def test_one_s_own_logits_are_taken_and_bad_ones_refused(open_page):
    at = open_page(PAGE, part="routers")
    at.text_input(key=f"{PAGE}.own_logits").set_value("0, 0, 0, 0, 0, 0, 0, nan")
    clean(at.button(key=f"{PAGE}.apply").click().run())
    assert "no longer follow the logits in: softmax, grouped (torch), Gemma 4" in texts(at)
    assert np.isnan(at.session_state[f"{PAGE}.logits"][7])
    at.text_input(key=f"{PAGE}.own_logits").set_value("1, 2, three")
    clean(at.button(key=f"{PAGE}.apply").click().run())
    assert "three" in texts(at)
    assert np.isnan(at.session_state[f"{PAGE}.logits"][7])


def why(at, router: str) -> str:
    return next(line for line in texts(at).splitlines() if line.startswith(f"- **{router}**"))


def test_an_infinite_logit_is_no_nan(open_page):
    """∞ − ∞ and ∞ / ∞ make the weights NaN; no logit is."""
    at = open_page(PAGE, part="routers", logits="30,-30,inf,-inf,0,0,0,0", token="3")
    assert 2 in router_parts.TABLE[3]
    said = "\n".join(why(at, router) for router in ("√softplus + bias", "hash", "Gemma 4"))
    assert "A NaN sorts first" not in said
    assert why(at, "Gemma 4").endswith("since ∞ − ∞ is NaN, every weight becomes NaN.")
    assert why(at, "√softplus + bias").endswith("divided by an infinite sum is NaN; finite ones become zero.")
    assert why(at, "hash").endswith("divided by an infinite sum is NaN; finite ones become zero.")
    assert "no longer follow the logits in: softmax, √softplus + bias, hash, Gemma 4" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_where_no_group_is_whole_none_is_named(open_page, lang):
    at = open_page(PAGE, lang=lang, part="routers", logits=",".join(["nan"] * 8))
    line = why(at, "grouped (kernel)" if lang == "en" else "分组（内核）")
    assert "groups ," not in line
    assert "第  组" not in line
    assert ("Of 4 groups 0 have two finite numbers" if lang == "en" else "4 组里有 0 组含两个有限数") in line


def test_the_nan_is_asked_about_before_it_is_explained(open_page):
    at = open_page(PAGE, part="routers")
    assert "falls back to experts" not in texts(at)
    guessed(at, NAN, "softmax")
    assert "sorts it first (4, 0, 3)" in texts(at)
    assert "falls back to experts 0, 1, 2" in texts(at)


@pytest.mark.parametrize(
    "query", [{}, {"plan": "all", "n": "512", "pilot": "16"}, {"logits": "nan,1,2,3,4,5,6,inf", "token": "0"}], ids=str
)
def test_the_code_shown_gives_the_page_s_numbers(open_page, query):
    output = shown_code_output(open_page(PAGE, **query), PAGE)
    log = routing_parts.log_of("calibration")
    n = int(query.get("n", 16))
    assert (
        f"slots without a token: {log.holes_after()[n]} after {n} documents, {log.holes_after()[-1]} after all"
        in output
    )
    if not query:
        plan = routing_parts.plans_of("code", 64, 512)[-1]
        came = routing_parts.log_of("code").holes_after()[512]
        assert f"{plan.low} to {plan.high} predicted after 512; came: {came}" in output


@pytest.mark.parametrize(
    "query",
    [{}, {"text": "news"}, {"source": "text", "text": "all"}, {"source": "text", "text": "news"}, {"ask": "1+1 = ?\n"}],
    ids=str,
)
def test_the_code_shown_gives_the_map_s_numbers(open_page, query):
    at = open_page(PAGE, **query)
    output, shown = shown_code_output(at, PAGE), texts(at)
    routes, every, slots = re.search(
        r"^([0-9,]+) of ([0-9,]+) routes .* at (\d+) slots$", output, re.MULTILINE
    ).groups()
    said = shown.replace(output, "").replace("*", "")
    if routes == "0":
        assert f"No route of {every} goes" in said
    else:
        assert re.search(rf"{routes} of {every} routes \(.*\) go to experts without a scale, at {slots} slots", said)


def test_the_code_shown_plans_for_all_kinds_of_text(open_page):
    plan = routing_parts.plans_of("all", 64, 512)[-1]
    came = routing_parts.log_of("all").holes_after()[512]
    at = open_page(PAGE, plan="all", part="planner")
    output = shown_code_output(at, PAGE)
    assert f"{plan.low} to {plan.high} predicted after 512; came: {came}" in output
    held, runs = re.search(r"The interval held in (\d+) of (\d+) held-out runs \(", texts(skipped(at, PLAN))).groups()
    assert f"the interval held in {held} of {runs} held-out runs" in output
    checks = [check for check in routing_parts.checks_of(64, 512) if check.text == "all"]
    assert f"    all: {sum(check.held for check in checks)}\n" in output


def test_downloads_open(open_page):
    at = open_page(PAGE)
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())
