"""The Fault lab as a reader in either language meets it."""

import json

import pytest

from nvfp4viz.checkpoint import FAULTS
from nvfp4viz.ui import fault_lab, i18n
from nvfp4viz.ui.fault_lab import FAULT_IDS
from nvfp4viz.ui.snippets import fill, run

from .conftest import clean, texts

LANGUAGES = ["en", "zh"]
PAGE = "fault_lab"
TITLES = {"en": "Fault lab", "zh": "故障实验室"}
EMPTY = {"en": "The answer is empty.", "zh": "回答是空的。"}


@pytest.fixture(autouse=True)
def _language_outside_a_run(request, monkeypatch):
    """AppTest calls ``format_func`` after the run, where the session's language is out of reach."""
    language = getattr(request.node, "callspec", None) and request.node.callspec.params.get("lang")
    if language:
        monkeypatch.setattr(i18n, "lang", lambda: language)


def tab(at, index: int):
    at.session_state["fault_lab.tabs"] = [item.label for item in at.tabs][index]
    return clean(at.run())


@pytest.mark.parametrize("lang", LANGUAGES)
def test_it_opens_on_a_collapse_at_the_expert_that_the_prompt_visits_most(open_page, lang):
    at = open_page(PAGE, lang=lang)
    assert at.title[0].value == TITLES[lang]
    assert EMPTY[lang] in texts(at)
    expert = fault_lab.busiest("vllm-cutlass", "37 + 45 =", 0)
    assert at.session_state["expert"] == expert
    chart = at.get("plotly_chart")[0].proto
    assert chart.alt
    bars = [trace for trace in json.loads(chart.spec)["data"] if trace["type"] == "bar"]
    assert len(bars) == 1
    assert "NaN" in texts(at)


@pytest.mark.parametrize("fault", FAULT_IDS)
def test_every_fault_runs_and_the_audit_agrees_with_its_entry(open_page, fault):
    projection = "gate" if fault == "pair-mismatch" else "down"
    at = tab(open_page(PAGE, fault=fault, projection=projection), 1)
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


def test_a_fault_that_does_not_fit_is_explained(open_page):
    at = open_page(PAGE, fault="pair-mismatch", projection="down")
    assert "Choose gate or up" in texts(at)
    at.selectbox(key="projection").set_value("gate").run()
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


def test_an_expert_that_the_prompt_never_visits_changes_nothing(open_page):
    routes = fault_lab.caches.generation(fault_lab.healthy_build("vllm-cutlass"), "37 + 45 =", fault_lab.TOKENS)
    seen = set(routes.generation.trace.routes[:, 0].ravel().tolist())
    never = next(expert for expert in range(fault_lab.EXPERTS) if expert not in seen)
    at = open_page(PAGE, layer="0", expert=str(never))
    assert "Nothing changes, to the bit." in texts(at)
    clean(at.button(key="fault_lab.busiest").click().run())
    assert EMPTY["en"] in texts(at)


def test_a_backend_that_never_reads_the_scale_does_not_notice(open_page):
    assert "Nothing changes, to the bit." in texts(open_page(PAGE, backend="vllm-marlin"))


def test_the_code_gives_the_page_s_numbers():
    values = {"sample": fault_lab.BASE, "fault": "nan", "layer": 0, "expert": 58, "projection": "down"}
    values |= {"role": "input_scale", "value": None, "seed": 0, "backend": "vllm-cutlass"}
    printed = run(fill(PAGE, values | {"prompt": "own", "own": list(b"37 + 45 ="), "tokens": 8}))
    assert "faulty:  " + "<pad>" * 8 in printed
    assert "the audit finds: ['scale.nan']" in printed
