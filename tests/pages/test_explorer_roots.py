"""The Explorer's server folders: only what the owner named, chosen from a list."""

import os
import shutil

import pytest

from nvfp4viz.audit import audit
from nvfp4viz.ui import explorer_roots, i18n
from nvfp4viz.ui.explorer_open import open_folder
from nvfp4viz.ui.explorer_report import MIMES, report_text
from nvfp4viz.ui.explorer_roots import VARIABLE, offered
from sample_checkpoints import ensure

from .conftest import clean, tab, texts

LANGUAGES = ["en", "zh"]
HOLES = "tiny-moe-nvfp4-holes"
COMPARE = 5


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root with one checkpoint, beside a checkpoint that is not for readers and a link that leads to it."""
    folder, secret = tmp_path / "shared", tmp_path / "secret"
    shutil.copytree(ensure(HOLES), folder / "team" / "holes")
    shutil.copytree(ensure(HOLES), secret)
    (folder / "way-out").symlink_to(secret)
    monkeypatch.setenv(VARIABLE, os.pathsep.join([str(folder), str(tmp_path / "absent"), ""]))
    return folder


@pytest.fixture(autouse=True)
def _language_outside_a_run(request, monkeypatch):
    """As in `test_explorer.py`."""
    language = getattr(request.node, "callspec", None) and request.node.callspec.params.get("lang")
    if language:
        monkeypatch.setattr(i18n, "lang", lambda: language)


def test_only_what_lies_below_a_root_is_offered(root, monkeypatch):
    assert offered() == {"shared/team/holes": root / "team" / "holes"}
    monkeypatch.setenv(VARIABLE, os.pathsep.join([str(root / "team" / "holes"), str(root / "team" / "holes")]))
    assert list(offered()) == ["holes", "holes′"]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_without_roots_there_is_no_such_source(open_page, lang, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    at = open_page("explorer", lang=lang)
    assert len(at.button_group(key="explorer.source").options) == 3


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_checkpoint_below_a_root_opens_and_its_path_is_shown_nowhere(open_page, lang, root):
    at = open_page("explorer", lang=lang)
    assert len(at.button_group(key="explorer.source").options) == 4
    clean(at.button_group(key="explorer.source").set_value("server").run())
    assert at.selectbox(key="explorer.root").options == ["shared/team/holes"]
    count = audit(ensure(HOLES)).coverage["input_scale"]
    assert str(count.missing) in texts(at)
    assert len(at.metric) == 4
    done = open_folder(root / "team" / "holes").audit
    shown = [texts(at), str(at.query_params), str(at.session_state["_link"])]
    for text in [*shown, *(report_text(done, kind, lang) for kind in MIMES)]:
        assert str(root.parent) not in text
        assert "shared" not in text.replace("shared_expert", "")


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("most", [1, 2])
def test_a_list_that_ends_early_says_so(open_page, lang, root, monkeypatch, most):
    monkeypatch.setattr(explorer_roots, "MOST", most)
    at = open_page("explorer", lang=lang)
    clean(at.button_group(key="explorer.source").set_value("server").run())
    assert (i18n.t("explorer.roots.more", most=most) in texts(at)) == (most == 1)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_root_without_checkpoints_says_so(open_page, lang, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    at = open_page("explorer", lang=lang)
    clean(at.button_group(key="explorer.source").set_value("server").run())
    assert i18n.t("explorer.roots.none") in texts(at)
    assert not at.metric


def test_a_link_inside_a_checkpoint_that_leaves_it_is_refused(root):
    """What the owner's command line may follow, a reader of the server may not."""
    folder, outside = root / "team" / "holes", root.parent / "secret"
    shard = sorted(folder.glob("*.safetensors"))[0].name
    (folder / shard).unlink()
    (folder / shard).symlink_to(outside / shard)
    assert audit(folder).verdict == audit(ensure(HOLES)).verdict
    report = open_folder(folder).audit.report
    assert [item.text for item in report.findings if item.code.startswith("container.")] == ["source.outside-folder"]
    assert str(root.parent) not in str(report)


def test_the_second_checkpoint_stays_chosen_while_another_tab_is_open(open_page, tmp_path, monkeypatch):
    for name in ("one", "two"):
        shutil.copytree(ensure("tiny-moe-nvfp4-holes"), tmp_path / "root" / name)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "root"))
    at = tab(open_page("explorer"), "explorer", COMPARE)
    clean(at.button_group(key="explorer.other.source").set_value("server").run())
    clean(at.selectbox(key="explorer.other.root").set_value("root/two").run())
    at = tab(tab(at, "explorer", 0), "explorer", COMPARE)
    assert at.session_state["explorer.other.source"] == "server"
    assert at.selectbox(key="explorer.other.root").value == "root/two"
