"""The Fault lab as a reader in either language meets it."""

import json
import math

import numpy as np
import pytest

from nvfp4viz.checkpoint import FAULTS
from nvfp4viz.formats import decode_e4m3
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving.fault_lab import FaultSpot
from nvfp4viz.ui import fault_lab, i18n
from nvfp4viz.ui.fault_lab import FAULT_IDS
from nvfp4viz.ui.snippets import fill, run

from .conftest import clean, skipped, tab, texts

LANGUAGES = ["en", "zh"]
PAGE = "fault_lab"
TITLES = {"en": "Fault lab", "zh": "故障实验室"}
EMPTY = {"en": "The answer is empty.", "zh": "**回答是空的**。"}


@pytest.fixture(autouse=True)
def _language_outside_a_run(request, monkeypatch):
    """AppTest calls ``format_func`` after the run, where the session's language is out of reach."""
    language = getattr(request.node, "callspec", None) and request.node.callspec.params.get("lang")
    if language:
        monkeypatch.setattr(i18n, "lang", lambda: language)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_it_opens_on_a_collapse_at_the_expert_that_the_prompt_visits_most(open_page, lang):
    at = open_page(PAGE, lang=lang)
    assert at.title[0].value == TITLES[lang]
    assert EMPTY[lang] in texts(at)
    expert = fault_lab.busiest("vllm-cutlass", DEMO_PROMPTS["arithmetic"], 0)
    assert at.session_state["expert"] == expert
    chart = at.get("plotly_chart")[0].proto
    assert chart.alt
    bars = [trace for trace in json.loads(chart.spec)["data"] if trace["type"] == "bar"]
    assert len(bars) == 1
    assert "NaN" in texts(at)


@pytest.mark.parametrize("fault", FAULT_IDS)
def test_every_fault_runs_and_the_audit_agrees_with_its_entry(open_page, fault):
    projection = "gate" if fault == "pair-mismatch" else "down"
    at = tab(open_page(PAGE, fault=fault, projection=projection), PAGE, 1)
    spec = FAULTS[fault]
    if spec.findings and not spec.deep:
        assert any(f"`{code}`" in texts(at) for code in spec.findings)
    elif spec.deep:
        assert "reads the weights themselves" in texts(at)
    else:
        assert "No check of the file can see" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"fault": "meteor"},
        {"layer": "4"},
        {"expert": "64"},
        {"projection": "w13"},
        {"role": "bias"},
        {"role": "weight"},
        {"value": "nan"},
        {"seed": "-1"},
        {"prompt": "poem"},
        {"backend": "vllm"},
    ],
    ids=lambda query: " ".join(map("=".join, query.items())),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    (name,) = query
    assert f"`{name}=" in texts(at)
    assert EMPTY[lang] in texts(at)


def test_a_link_to_a_place_where_the_fault_does_not_fit_is_named(open_page):
    at = open_page(PAGE, fault="pair-mismatch", projection="down")
    assert "`projection=down`" in texts(at)
    assert at.get("plotly_chart")


def test_another_fault_brings_its_own_roles(open_page):
    at = open_page(PAGE)
    at.selectbox(key="fault_lab.fault").set_value("nibble-swap").run()
    assert clean(at).selectbox(key="fault_lab.role").value == "weight"


@pytest.mark.parametrize(("asked", "words"), [("", "Write a prompt above"), ("中文", "character")])
def test_a_prompt_that_cannot_be_used_is_explained(open_page, asked, words):
    at = open_page(PAGE, prompt="own", **({"ask": asked} if asked else {}))
    assert words in texts(at)
    assert not at.get("plotly_chart")
    # Settings that could not be tried on anything are not half drawn.
    assert not [box for box in at.selectbox if box.key == "fault_lab.fault"]


def test_an_expert_that_the_prompt_never_visits_changes_nothing(open_page):
    routes = fault_lab.caches.generation(
        fault_lab.healthy_build("vllm-cutlass"), DEMO_PROMPTS["arithmetic"], fault_lab.TOKENS
    )
    seen = set(routes.generation.trace.routes[:, 0].ravel().tolist())
    never = next(expert for expert in range(fault_lab.EXPERTS) if expert not in seen)
    at = open_page(PAGE, layer="0", expert=str(never))
    assert "Nothing changes, to the bit." in texts(at)
    assert "is routed to expert" in texts(at)  # that is why, not the backend
    clean(at.button(key="fault_lab.busiest").click().run())
    assert EMPTY["en"] in texts(at)


def test_a_backend_that_never_reads_the_scale_does_not_notice(open_page):
    at = open_page(PAGE, backend="vllm-marlin")
    assert "Nothing changes, to the bit." in texts(at)
    assert "the same bits on `vllm-marlin`" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_one_scale_a_layer_is_said_to_reach_every_expert(open_page, lang):
    at = open_page(PAGE, lang=lang, backend="vllm-flashinfer-cutlass")
    assert fault_lab.t("fault_lab.seen.shared", backend="vllm-flashinfer-cutlass", layer=0) in texts(at)
    assert "vllm-cutlass` takes" not in texts(open_page(PAGE, lang=lang))


@pytest.mark.parametrize("fault", ["gate-up-swap", "duplicate-expert"])
def test_a_fault_that_moves_whole_matrices_names_no_single_tensor(open_page, fault):
    assert "damaged `weight` of" not in texts(open_page(PAGE, fault=fault))


def test_the_token_named_is_the_first_that_differs(open_page):
    at = open_page(PAGE, fault="scaled", value="1000", role="weight_scale_2", projection="down", prompt="recipes")
    spot = FaultSpot("scaled", 0, at.session_state["expert"], "down", "weight_scale_2", 1000.0)
    effect = fault_lab.result(fault_lab.Trial(spot, "vllm-cutlass", DEMO_PROMPTS["recipes"])).effect
    good, bad = effect.healthy.token_ids, effect.faulty.token_ids
    assert good != bad
    first = next(k for k in range(max(len(good), len(bad))) if good[k : k + 1] != bad[k : k + 1])
    assert f"from token {first + 1} on" in texts(at)


# ------------------------------------------------------------------------------------------ the sweep and its claims


def swept(open_page, lang="en", **query):
    """The sweep's tab, with the answer to its question shown."""
    at = tab(open_page(PAGE, lang=lang, **query), PAGE, 2)
    return skipped(at, "fault_lab.predict.big")


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("query", "use"),
    [
        ({}, "twice"),
        ({"projection": "gate"}, "pair"),
        ({"backend": "vllm-marlin"}, "unread"),
        ({"backend": "vllm-flashinfer-cutlass"}, "layer"),
        ({"role": "weight_scale_2"}, "once"),
        ({"role": "weight_scale_2", "projection": "gate"}, "both"),
        ({"role": "weight_scale_2", "projection": "up"}, "partner"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_answer_tells_how_this_scale_enters_on_this_backend(open_page, lang, query, use):
    """Which is which is recomputed on every backend in ``tests/serving/test_fault_lab.py``."""
    shown = texts(swept(open_page, lang, **query))
    for other in ("unread", "twice", "pair", "layer", "once", "both", "partner"):
        said = fault_lab.t(f"fault_lab.sweep.use.{other}", backend=query.get("backend", "vllm-cutlass"))
        assert (said in shown) == (other == use)
    powers = fault_lab.t("fault_lab.sweep.powers")
    assert (powers in shown) == (use in ("twice", "pair", "layer"))


def test_the_block_scales_are_counted_on_the_page(open_page):
    at = swept(open_page)
    spot = FaultSpot("scaled", 0, at.session_state["expert"], "down", "input_scale", fault_lab.SURPRISE)
    effect = fault_lab.result(fault_lab.Trial(spot, "vllm-cutlass", DEMO_PROMPTS["arithmetic"])).effect
    magnitudes = np.abs(decode_e4m3(effect.faulty_scales))
    normal, zero = int((magnitudes >= 2.0**-6).sum()), int((magnitudes == 0).sum())
    rest = magnitudes.size - normal - zero
    assert f"{normal} are normal E4M3 numbers with the factor, {rest} subnormal and {zero} zero" in texts(at)
    # the factor that the page asks about does leave the normal range here
    assert normal < (np.abs(decode_e4m3(effect.healthy_scales)) >= 2.0**-6).sum()


def test_the_factors_are_half_decades_and_no_powers_of_two_but_one():
    logs = np.log10(fault_lab.FACTORS)
    assert np.allclose(np.diff(logs), 0.5, rtol=0, atol=1e-12)  # log10 of a rounded power
    powers = [factor for factor in fault_lab.FACTORS if math.frexp(factor)[0] == 0.5]
    assert powers == [1.0]
    assert math.frexp(fault_lab.SURPRISE)[0] == 0.5


@pytest.mark.parametrize("projection", ["gate", "down"])
def test_a_power_of_two_changes_no_bit_while_the_block_scales_stay_normal(projection):
    """On the page's own model and slot; half a decade does change some."""
    expert = fault_lab.busiest("vllm-cutlass", DEMO_PROMPTS["arithmetic"], 0)

    def effect(factor):
        spot = FaultSpot("scaled", 0, expert, projection, "input_scale", factor)
        return fault_lab.result(fault_lab.Trial(spot, "vllm-cutlass", DEMO_PROMPTS["arithmetic"])).effect

    for factor in (2.0, 4.0, 8.0):
        done = effect(factor)
        for scales in (done.healthy_scales, done.faulty_scales):
            assert (np.abs(decode_e4m3(scales)) >= 2.0**-6).all()
        assert done.first_broken is None
    assert effect(10**0.5).first_broken == 0


@pytest.mark.parametrize("projection", ["gate", "up"])
def test_one_of_a_pair_hides_below_its_partner(projection):
    """In this export both have seen the same input, so the other one is as large."""
    expert = fault_lab.busiest("vllm-cutlass", DEMO_PROMPTS["arithmetic"], 0)
    spot = FaultSpot("scaled", 0, expert, projection, "input_scale", 10**-0.5)
    assert (
        fault_lab.result(fault_lab.Trial(spot, "vllm-cutlass", DEMO_PROMPTS["arithmetic"])).effect.first_broken is None
    )


def test_the_code_gives_the_page_s_numbers():
    expert = fault_lab.busiest("vllm-cutlass", DEMO_PROMPTS["arithmetic"], 0)
    values = {"sample": fault_lab.BASE, "fault": "nan", "layer": 0, "expert": expert, "projection": "down"}
    values |= {"role": "input_scale", "value": None, "seed": 0, "backend": "vllm-cutlass"}
    printed = run(fill(PAGE, values | {"prompt": "own", "own": list(DEMO_PROMPTS["arithmetic"].encode()), "tokens": 8}))
    assert "faulty:  " + "<pad>" * 8 in printed
    assert "the audit finds: ['scale.nan']" in printed
