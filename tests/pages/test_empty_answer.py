"""The story, step by step, in both languages, on the shipped samples; every number is compared with the library's."""

import json
import re

import numpy as np
import pytest

from nvfp4viz import serving
from nvfp4viz.audit import audit, naive_check
from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.errors import ModelError
from nvfp4viz.figures.coverage import STATUSES, meet
from nvfp4viz.figures.words import words
from nvfp4viz.model import Tokenizer
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving.chain import trace_chain, twin_of
from nvfp4viz.serving.remedies import REMEDIES
from nvfp4viz.ui import caches, snippets, story_cards, story_chain, story_runs
from sample_checkpoints import ensure

from .conftest import clean, guessed, texts

LANGUAGES = ["en", "zh"]
BEATS = range(1, 6)


def html(at) -> str:
    """All HTML blocks of ours, as one string, without our style sheet."""
    return "\n".join(block.proto.body for block in at.get("html") if "<style>" not in block.proto.body)


def component(at, key: str) -> dict:
    """The data that a mounted component was given."""
    for block in at.get("bidi_component"):
        if key in block.proto.id or key in str(block.proto):
            return json.loads(block.proto.json)
    raise AssertionError(key)


def turn_to(at, beat: int):
    """Choose a step; the remedies take a while on a machine that does other things as well."""
    return clean(at.button(key=f"story.step.{beat}").click().run(timeout=240))


@pytest.fixture(scope="module")
def broken():
    return serving.load(ensure(story_runs.HOLED))


@pytest.fixture(scope="module")
def bf16():
    return serving.load(ensure(story_runs.BF16.sample), backend="bf16")


@pytest.mark.parametrize("beat", BEATS)
@pytest.mark.parametrize(("lang", "mode"), [("en", ""), ("zh", ""), ("zh", "workshop")])
def test_every_step_opens(open_page, lang, beat, mode):
    query = {"mode": mode} if mode else {}
    at = turn_to(open_page("empty_answer", lang=lang, **query), beat)
    steps = [at.button(key=f"story.step.{number}") for number in BEATS]
    assert len({step.label for step in steps}) == len(BEATS)
    notes = words(lang, "empty_answer.workshop.notes")
    assert (notes in [box.label for box in at.expander]) == (mode == "workshop")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_first_screen_shows_the_contrast(open_page, lang, bf16, broken):
    at = open_page("empty_answer", lang=lang)
    prompt = DEMO_PROMPTS["arithmetic"]
    answer = bf16.generate(prompt, story_runs.TOKENS).text
    silence = broken.generate(prompt, story_runs.TOKENS)
    assert set(silence.token_ids) == {0}
    first = html(at)
    assert answer.strip() in first
    assert first.count('class="pad"') == story_cards.MOST_PADS
    assert f"{len(silence.token_ids)}" in texts(at)
    assert answer.strip() in texts(at)


@pytest.mark.parametrize(
    "query",
    [
        {"beat": "9"},
        {"beat": "0"},
        {"beat": "two"},
        {"prompt": "poem"},
        {"fate": "ghosts"},
        {"seed": "-1"},
        {"beat": "4", "link": "nowhere"},
        {"beat": "3", "layer": "77", "expert": "9999"},
        {"beat": "3", "role": "w7"},
        {"mode": "cinema"},
        {"ask": "<script>alert(1)</script>"},
    ],
    ids=str,
)
def test_a_bad_link_leaves_the_page_usable(open_page, query):
    at = open_page("empty_answer", **query)
    assert at.button(key="story.step.1")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_bad_value_is_named(open_page, lang):
    assert "fate=ghosts" in texts(open_page("empty_answer", lang=lang, fate="ghosts"))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ("Grüße 37 + 45 =", "prompt.unknown-characters"),
        ("今天天气", "prompt.unknown-characters"),
        ("   ", "prompt.empty"),
        ("1 + " * 60, "prompt.too-long"),
    ],
    ids=["umlauts", "chinese", "blank", "long"],
)
def test_a_prompt_that_cannot_be_read_says_why(open_page, lang, asked, code):
    at = open_page("empty_answer", lang=lang)
    at.text_input(key="empty_answer.ask").set_value(asked).run()
    clean(at)
    assert code in texts(at)
    at.text_input(key="empty_answer.ask").set_value("19 + 23 =").run()
    clean(at)
    assert code not in texts(at)
    assert "19 + 23 =" in html(at)


def test_a_prompt_of_one_s_own_is_answered_both_ways(open_page, bf16, broken):
    at = open_page("empty_answer", ask="58 + 14 =")
    assert bf16.generate("58 + 14 =", story_runs.TOKENS).text.strip() in html(at)
    assert html(at).count("58 + 14 =") == 2


def test_markup_in_a_prompt_stays_text(open_page):
    at = open_page("empty_answer", ask="<b>1 + 1 =</b>")
    assert "<b>1 + 1" not in html(at)
    assert "&lt;b&gt;1 + 1 =&lt;/b&gt;" in html(at)


def test_replies_are_covered_until_the_prediction(open_page, broken):
    at = open_page("empty_answer", beat="2")
    assert 'class="pad"' not in html(at)
    assert html(at).count("hidden-reply") == 3
    silent = [
        name
        for name in story_runs.PROMPT_IDS
        if set(broken.generate(DEMO_PROMPTS[name], story_runs.TOKENS).token_ids) == {0}
    ]
    assert silent == ["arithmetic", "code"]  # the story needs news to survive
    guessed(at, "empty_answer.predict.which", "all")
    assert "hidden-reply" not in html(at)
    assert "Arithmetic and code" in texts(at)
    reply = json.loads(at.code[0].value.split("\n\n", 1)[1])
    assert reply["choices"][0]["text"] == "<pad>" * story_runs.TOKENS
    assert reply["usage"]["completion_tokens"] == story_runs.TOKENS
    at.toggle(key="story.skip_special").set_value(True).run()
    assert json.loads(at.code[0].value.split("\n\n", 1)[1])["choices"][0]["text"] == ""
    assert at.code[0].value.startswith("HTTP/1.1 200 OK")


def test_the_map_is_the_load_report(broken):
    grid = story_runs.coverage(story_runs.holed("zeros"))
    holes = broken.load_report.experts_without("input_scale")
    for role in grid.roles:
        found = {layer: tuple(np.flatnonzero(grid.holes(role)[row])) for row, layer in enumerate(grid.layers)}
        assert {layer: experts for layer, experts in found.items() if experts} == holes
    assert all(len(experts) > 0 for experts in holes.values())
    assert len(holes) == len(grid.layers)


def test_the_map_s_first_bad_route_is_the_chain_s(broken):
    for name in ("arithmetic", "code"):
        build = story_runs.holed("zeros")
        overlay = story_runs.overlay(story_runs.run(build, name)[1].generation)
        token, row, expert = meet(story_runs.coverage(build), overlay, "w13").first
        chain = trace_chain(broken, DEMO_PROMPTS[name], n=2)
        assert (token, row, expert) == (chain.position, chain.layer, chain.expert)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_map_says_what_it_shows(open_page, lang):
    at = open_page("empty_answer", lang=lang, beat="3", prompt="arithmetic")
    build = story_runs.holed("zeros")
    overlay = story_runs.overlay(story_runs.run(build, "arithmetic")[1].generation)
    met = meet(story_runs.coverage(build), overlay, "w13")
    numbers = re.findall(r"\d+", texts(at))
    assert {str(met.into_holes), str(met.routes)} <= set(numbers)
    assert component(at, "story.map")["routes"]["first"]["expert"] == met.first[2]


def test_a_slot_in_the_link_is_read_out(open_page):
    grid = story_runs.coverage(story_runs.holed("zeros"))
    row, expert = np.argwhere(grid.status[0] == STATUSES.index("present"))[0]
    at = open_page("empty_answer", beat="3", layer=str(grid.layers[row]), expert=str(expert))
    bits = int(np.float32(grid.values[0, row, expert]).view(np.uint32))
    assert f"0x{bits:08X}" in texts(at)


@pytest.mark.parametrize("fate", serving.ALLOCATORS)
def test_the_chain_names_its_fate_and_shows_the_slot(open_page, fate):
    at = open_page("empty_answer", beat="4", fate=fate, link="slot")
    assert f"**{at.segmented_control(key='empty_answer.fate').format_func(fate)}**" in texts(at)
    served = serving.load(ensure(story_runs.HOLED), allocator=fate)
    chain = trace_chain(served, DEMO_PROMPTS["arithmetic"], n=2)
    data = component(at, "story.chain")
    assert data["open"] == "slot"
    assert len(data["links"]) == len(story_chain.LINKS)
    slot = next(link for link in data["links"] if link["id"] == "slot")
    assert f"0x{int(chain.slots[0].value.view(np.uint32)):08X}" in slot["hole"]


def test_the_links_hold_the_trace_s_numbers(broken):
    chain = trace_chain(broken, DEMO_PROMPTS["arithmetic"], n=4)
    twin = twin_of(chain, serving.load(ensure(story_runs.FULL.sample)), n=4)
    links = {link.id: link for link in story_chain.links_of(chain, twin)}
    assert links["key"].hole.startswith("0")
    assert links["slot"].hole == "0  0x00000000"
    assert links["reciprocal"].hole == "∞  0x7F800000"
    assert links["block_scale"].hole.startswith("0x7F")
    assert links["codes"].hole == "7777 7777 7777 7777"
    assert f"{len(Tokenizer().vocabulary)}" in links["logits"].hole
    assert links["token"].hole == "id 0  <pad>"
    assert twin is not None
    assert links["token"].twin != links["token"].hole
    assert all(links[name].state == "bad" for name in ("reciprocal", "product", "residual", "logits", "token"))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("ask", ["你", "   ", "x" * 121, "caf\u00e9"])
def test_a_prompt_that_cannot_be_read_leaves_no_card_running(open_page, lang, ask):
    at = open_page("empty_answer", lang=lang, ask=ask)
    assert len([block for block in at.caption if "prompt." in block.value]) == 1
    assert words(lang, "empty_answer.card.running") not in html(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("beat", [1, 5])
def test_a_run_that_fails_leaves_nothing_running(open_page, lang, beat, monkeypatch):
    """Whatever fails while a card or a bar says that it runs takes that word with it."""
    at = open_page("empty_answer", lang=lang, beat="2")

    def fail(*_, **__):
        raise ModelError("prompt.empty")

    monkeypatch.setattr(caches, "remedy" if beat == 5 else "generation", fail)
    turn_to(at, beat)
    assert len([block for block in at.caption if "prompt.empty" in block.value]) == 1
    assert words(lang, "empty_answer.card.running") not in html(at)
    assert "pending" not in html(at)
    assert not at.get("progress")


def test_different_leftovers_really_differ():
    """The page must not claim that missing means zero: the measured outcomes are not all alike."""
    outcomes = {}
    for fate in serving.ALLOCATORS:
        reply, _ = story_runs.run(story_runs.holed(fate), "arithmetic")
        outcomes[fate] = reply.token_ids
    assert set(outcomes["zeros"]) == {0}
    assert set(outcomes["nan"]) == {0}
    assert set(outcomes["ones"]) != {0}


@pytest.mark.parametrize("lang", LANGUAGES)
def test_remedies_are_run_and_judged(open_page, lang):
    at = turn_to(open_page("empty_answer", lang=lang), 5)
    table = html(at)
    assert table.count("<tr>") == len(REMEDIES) + 2  # the head, and the file without any remedy
    for kind in ("right", "refused", "silent", "wrong"):
        assert f'verdict {kind}"' in table


def test_the_naive_check_passes_what_the_audit_does_not(open_page):
    checkpoint = open_checkpoint(ensure(story_runs.HOLED))
    assert naive_check(checkpoint).passed
    report = audit(ensure(story_runs.HOLED))
    assert report.verdict == "backend"
    said = texts(turn_to(open_page("empty_answer"), 5))
    assert words("en", "explorer.verdicts.backend") in said
    assert "scale.missing" in said


def test_the_code_gives_the_page_s_numbers(bf16, broken):
    values = {
        "prompt": "arithmetic",
        "bf16": story_runs.BF16.sample,
        "broken": story_runs.HOLED,
        "fate": "zeros",
        "seed": 0,
        "tokens": story_runs.TOKENS,
    }
    printed = snippets.run(snippets.fill("empty_answer", values))
    reply = {build: story_runs.run(build, "arithmetic")[0] for build in (story_runs.BF16, story_runs.holed("zeros"))}
    healthy = reply[story_runs.BF16]
    answer = "".join(t for t, number in zip(healthy.tokens, healthy.token_ids, strict=True) if number > 2)
    assert f"BF16:  {answer}" in printed
    assert "NVFP4: " + "<pad>" * story_runs.TOKENS in printed
    chain = trace_chain(broken, DEMO_PROMPTS["arithmetic"], n=story_runs.TOKENS)
    assert f"token {chain.position} meets layer {chain.layer} expert {chain.expert}" in printed
    assert f"logits: {chain.logit_nans} -> token 0" in printed


def test_the_code_is_run_on_the_page(open_page):
    at = open_page("empty_answer", beat="4")
    at.session_state["empty_answer.open.code"] = True
    clean(at.run())
    assert any("NVFP4: <pad>" in block.value for block in at.code)
