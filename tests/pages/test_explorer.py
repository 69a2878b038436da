"""The Explorer as a reader in either language meets it."""

import json
import pickle
import re
import struct

import pytest

from nvfp4viz.audit import audit
from nvfp4viz.ui import i18n
from nvfp4viz.ui.samples import SAMPLE_IDS
from nvfp4viz.ui.snippets import fill, run
from sample_checkpoints import ensure

from .conftest import clean, texts

LANGUAGES = ["en", "zh"]
TITLES = {"en": "Explorer", "zh": "检查点浏览器"}
HOLES = "tiny-moe-nvfp4-holes"


@pytest.fixture(scope="module")
def whole() -> bytes:
    return (ensure(HOLES) / "model.safetensors").read_bytes()


@pytest.fixture(autouse=True)
def _language_outside_a_run(request, monkeypatch):
    """AppTest calls ``format_func`` after the run, where the session's language is out of reach."""
    language = getattr(request.node, "callspec", None) and request.node.callspec.params.get("lang")
    if language:
        monkeypatch.setattr(i18n, "lang", lambda: language)


def upload(at, *files: tuple[str, bytes]):
    clean(at.toggle(key="explorer.own").set_value(True).run())
    for name, data in files:
        at.file_uploader(key="explorer.files").upload(name, data)
    return clean(at.run())


@pytest.mark.parametrize("lang", LANGUAGES)
def test_it_opens_on_the_first_hole_of_the_broken_sample(open_page, lang):
    at = open_page("explorer", lang=lang)
    assert at.title[0].value == TITLES[lang]
    first = next(item for item in audit(ensure(HOLES)).findings if item.code == "scale.missing")
    assert at.session_state["layer"] == first.layer
    assert at.session_state["expert"] == first.experts[0]
    assert at.session_state["projection"] == first.projection
    assert at.metric[1].value == "4 × 64"
    assert len(at.get("plotly_chart")) == 1
    assert at.get("plotly_chart")[0].proto.alt


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("sample", SAMPLE_IDS)
def test_every_sample_opens(open_page, lang, sample):
    at = open_page("explorer", lang=lang, checkpoint=sample)
    assert len(at.metric) == 4
    mapped = len(at.get("plotly_chart"))
    assert mapped == (0 if sample in ("tiny-moe-bf16", "tiny-moe-mxfp4") else 1)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"checkpoint": "../../etc"},
        {"role": "weight"},
        {"gpu": "sm_1"},
        {"layer": "-1"},
        {"expert": "many"},
        {"projection": "left"},
        {"unknown": "1"},
    ],
    ids=lambda query: " ".join(query),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page("explorer", lang=lang, **query)
    (name,) = query
    assert f"`{name}=" in texts(at)
    assert len(at.metric) == 4


def test_a_slot_that_this_checkpoint_lacks_falls_back_to_a_hole(open_page):
    at = open_page("explorer", layer="29", expert="120", projection="w13")
    assert (at.session_state["layer"], at.session_state["expert"]) == (0, 9)


def test_a_link_restores_the_slot_and_its_sentence(open_page):
    at = open_page("explorer", layer="2", expert="5", projection="down", role="weight_scale_2")
    assert "Layer 2, expert 5, `down`: `weight_scale_2` is" in texts(at)


def test_findings_can_be_filtered(open_page):
    at = open_page("explorer")
    assert "`scale.missing`" in texts(at)
    pills = next(group for group in at.get("button_group") if "severity" in str(group.proto.id))
    pills.set_value([]).run()
    assert "`scale.missing`" not in texts(clean(at))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("tab", ["anatomy", "backends", "files"])
def test_the_other_tabs(open_page, lang, tab):
    at = open_page("explorer", lang=lang, gpu="sm_120")
    labels = [item.label for item in at.tabs]
    index = ["findings", "anatomy", "backends", "files"].index(tab)
    at.session_state["explorer.tabs"] = labels[index]
    at = clean(at.run())
    wanted = {"anatomy": "input_scale", "backends": "`vllm-marlin`", "files": "`model.safetensors`"}
    assert wanted[tab] in texts(at)


def test_an_upload_gives_the_report_of_the_same_file(open_page, whole):
    folder = ensure(HOLES)
    side = [(name, (folder / name).read_bytes()) for name in ("config.json", "hf_quant_config.json")]
    at = upload(open_page("explorer"), ("model.safetensors", whole), *side)
    assert at.metric[1].value == "4 × 64"
    count = audit(folder).coverage["input_scale"]
    assert f"{count.missing} of {count.expected}" in texts(at)


BAD = {
    "pickle under its own name": ("pytorch_model.bin", pickle.dumps({"w": 1}), "pytorch", "pytorch"),
    "pickle": ("model.safetensors", pickle.dumps({"w": [1.0] * 9}), "pickle", "pickle"),
    "LFS pointer": ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid x\n", "LFS", "LFS"),
    "HTML page": ("model.safetensors", b"<!DOCTYPE html><html><body>404</body></html>", "HTML", "HTML"),
    "zero bytes": ("model.safetensors", b"", "empty", "空"),
    "header of 200 MB": (
        "model.safetensors", struct.pack("<Q", 200_000_000) + b"{}", "header-too-large", "header-too-large",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_bad_upload_gets_its_own_message_and_leaves_the_page_usable(open_page, lang, kind):
    name, data, english, chinese = BAD[kind]
    at = upload(open_page("explorer", lang=lang), (name, data))
    assert (english if lang == "en" else chinese) in texts(at).replace("\\", "")
    assert not at.get("plotly_chart")
    at.toggle(key="explorer.own").set_value(False).run()
    assert clean(at).get("plotly_chart")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_truncated_upload_is_named_and_what_is_there_is_still_drawn(open_page, lang, whole):
    at = upload(open_page("explorer", lang=lang), ("model.safetensors", whole[: len(whole) // 2]))
    assert "`container.truncated`" in texts(at)


def test_markup_in_a_file_name_stays_text(open_page):
    at = upload(open_page("explorer"), ("[x](evil)<b>.safetensors", b"<html>"))
    assert "[x](evil)" not in re.sub(r"`[^`]*`", "", texts(at))


def test_the_slots_can_be_downloaded_and_agree_with_the_report(open_page):
    from nvfp4viz.ui.explorer import slot_rows
    from nvfp4viz.ui.explorer_open import open_sample
    from nvfp4viz.ui.export import to_csv, to_json

    rows = slot_rows(open_sample(HOLES, None))
    missing = [row for row in rows if row["role"] == "input_scale" and row["status"] == "missing"]
    assert len(missing) == audit(ensure(HOLES)).coverage["input_scale"].missing
    assert len(json.loads(to_json(rows))) == len(rows) == to_csv(rows).count(b"\n") - 1


def test_the_code_gives_the_page_s_numbers():
    count = audit(ensure(HOLES)).coverage["input_scale"]
    expected = f"input_scale expected {count.expected} missing {count.missing}"
    assert expected in run(fill("explorer", {"sample": HOLES}))
