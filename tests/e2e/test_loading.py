"""Loading and online quantisation in a browser: every part fits a phone, passes axe, and answers a choice."""

import pytest

from nvfp4viz.serving import load
from nvfp4viz.ui.loading_parts import PARTS as LOADING
from nvfp4viz.ui.online_parts import PARTS as ONLINE
from sample_checkpoints import ensure

from .conftest import LOOKS, overflow, skip_question, violations, widen

PLACES = [*(("loading", part) for part in LOADING), *(("online_quantisation", part) for part in ONLINE)]


@LOOKS
@pytest.mark.parametrize(("name", "part"), PLACES)
def test_a_part_fits_a_phone_and_passes_axe(visit, lang, theme, name, part):
    page = visit(f"/{name}?lang={lang}&part={part}", width=390, theme=theme)
    assert overflow(page) <= 0
    assert violations(page) == []
    skip_question(page, lang)
    assert overflow(page) <= 0
    widen(page)
    assert violations(page) == []


def test_a_config_is_written_and_judged_at_once(visit):
    page = visit("/loading?lang=en&part=promotion&cfg=w4a4")
    skip_question(page)
    page.get_by_text("The rule does not fire").wait_for()
    box = page.get_by_label("config.json", exact=True)
    assert "mono" in box.evaluate("node => getComputedStyle(node).fontFamily").lower()
    box.fill('{"quantization_config": {"quant_algo": "NVFP4",\n"config_groups": {"g": {}}}}')
    box.press("Control+Enter")
    page.get_by_text("The rule fires").wait_for()
    box.fill('{"quantization_config": ')
    box.press("Control+Enter")
    page.get_by_text("config.json is not JSON").wait_for()


def test_another_value_spreads_and_lands_in_the_link(visit):
    page = visit("/loading?lang=en&part=maxima&v=zero")
    skip_question(page)
    page.get_by_text("the value changes 1 on the per-expert path, 0 under one maximum").wait_for()
    page.get_by_text("gate", exact=True).click()
    page.wait_for_url(lambda url: "projection=gate" in url)
    page.get_by_text("the value changes 0 on the per-expert path").wait_for()


def test_no_choice_is_cut_off_at_its_column(visit):
    page = visit("/online_quantisation?lang=zh&part=memory")
    skip_question(page, "zh")
    page.wait_for_function(
        """() => { const group = [...document.querySelectorAll('[data-testid=stButtonGroup]')]
                     .find(one => one.textContent.includes('DeepSeek'));
                   const edge = group && group.getBoundingClientRect().right;
                   return group && [...group.querySelectorAll('button')]
                     .every(button => button.getBoundingClientRect().right <= edge + 1); }"""
    )


def test_what_is_downloaded_is_what_is_shown(visit):
    """Streamlit makes the file in a thread without a session, where every setting would read as its default."""
    page = visit("/loading?lang=en&part=maxima&v=zero&layer=2&expert=3&projection=down")
    page.get_by_role("button", name="Download data").click()
    with page.expect_download() as caught:
        page.get_by_role("button", name="spread.csv", exact=True).click()
    lines = caught.value.path().read_text(encoding="utf-8-sig").splitlines()
    names = lines[0].split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in lines[1:]]
    assert [(row["backend"], row["expert"], row["input_scale_read"]) for row in rows if row["changed"] == "True"] == [
        ("vllm-cutlass", "3", "0.0")
    ]
    parameters = load(ensure("tiny-moe-nvfp4-full"), device="cpu").parameters[2]
    assert [float(row["input_scale_before"]) for row in rows[:64]] == parameters.w2_input_scale.tolist()
