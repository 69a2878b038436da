"""Opens a page as a reader would: from ``app.py``, with a link."""

import importlib
import pkgutil
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import nvfp4viz.ui
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.registry import entry_of
from nvfp4viz.ui.snippets import run

ROOT = Path(__file__).parents[2]

# Tests replace `i18n.lang` for a moment: a module that is first imported then would keep the replacement for good.
for _module in pkgutil.iter_modules(nvfp4viz.ui.__path__):
    importlib.import_module(f"nvfp4viz.ui.{_module.name}")


@pytest.fixture(scope="session", autouse=True)
def _no_warming():
    """Pages load the kernels they need themselves; loading all of them beside every test would only slow it."""
    before = nvfp4viz.ui.shell.warm_in_background
    nvfp4viz.ui.shell.warm_in_background = lambda: None
    yield
    nvfp4viz.ui.shell.warm_in_background = before


def strips(at: AppTest) -> list[str]:
    """The Explorer's drawings of a slot among its peers."""
    return [each.proto.body for each in at.get("html") if 'class="peers"' in each.proto.body]


def texts(at: AppTest) -> str:
    """Everything a reader can read on the page, in one string."""
    parts = [*at.title, *at.header, *at.subheader, *at.markdown, *at.caption, *at.code]
    return "\n".join(str(part.value) for part in parts)


def clean(at: AppTest) -> AppTest:
    """Fail if the page ended in an exception or in the panel for unforeseen ones."""
    assert not at.exception, at.exception
    assert "could not be drawn" not in texts(at), texts(at)
    assert "没能画出来" not in texts(at), texts(at)
    return at


def shown_code_output(at: AppTest, page_id: str) -> str:
    """Open *Show me the code*, hold what stands under it to a run of what is shown, and return it."""
    at.session_state[f"{page_id}.open.code"] = True
    clean(at.run())
    *_, source, output = (block.value for block in at.code)  # the foot's are the last
    assert run(source) == output
    return output


def tab(at: AppTest, page_id: str, index: int) -> AppTest:
    """Open the tab at ``index``, as a click does."""
    at.session_state[f"{page_id}.tabs"] = [item.label for item in at.tabs][index]
    return clean(at.run())


def guessed(at: AppTest, key: str, option: str) -> AppTest:
    """Answer the question under the text key ``key``."""
    return clean(at.radio(key=f"predict.asked.{key}").set_value(option).run())


def skipped(at: AppTest, key: str) -> AppTest:
    """Pass that question without a guess."""
    return clean(at.button(key=f"predict.skip.{key}").click().run())


@pytest.fixture
def open_page():
    """``open_page("e2m1", lang="zh", x="2.5")`` → the AppTest after its first run."""

    def open_it(page_id: str, lang: str = "en", **query: str) -> AppTest:
        at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60)
        at.query_params["lang"] = lang
        for name, value in query.items():
            at.query_params[name] = value
        if not entry_of(page_id).default:
            # A page's address is its file's name, so the first run may already be there: a deep link.
            at.switch_page(f"pages/{page_id}.py")
        at.run()
        return clean(at)

    return open_it


@pytest.fixture
def downloaded(monkeypatch):
    """What each download of the page would hold, as rows, once the page has run with its downloads open."""
    given = {}
    monkeypatch.setattr(Lesson, "_downloads", lambda self, data: given.update({n: rows() for n, rows in data.items()}))
    return given
