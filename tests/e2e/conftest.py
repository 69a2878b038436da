"""A server of our app on a free port, and Chromium."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvfp4viz.figures.words import words

ROOT = Path(__file__).parents[2]
# Chromium must not talk to anybody: a test looks for requests that leave this machine.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
START_SECONDS = 60
LOCAL = re.compile(r"(http|ws)://127\.0\.0\.1:|data:|blob:|file:|about:")
# Both languages and both themes once each.
LOOKS = pytest.mark.parametrize(("lang", "theme"), [("en", "light"), ("zh", "dark")])
# Streamlit's own: it puts landmarks and roles in places that we do not choose.  Contrast and names are ours.
RULES = [
    "color-contrast",
    "heading-order",
    "button-name",
    "label",
    "link-name",
    "aria-input-field-name",
    "aria-toggle-field-name",
]
# True once every element has kept its place for a quarter of a second.
STEADY = """() => {
  const boxes = [];
  const walk = root => root.querySelectorAll('*').forEach(element => {
    const { x, y, width, height } = element.getBoundingClientRect();
    boxes.push(x, y, width, height);
    if (element.shadowRoot) walk(element.shadowRoot);
  });
  walk(document);
  const places = boxes.map(Math.round).join();
  if (window.placesBefore !== places) [window.placesBefore, window.steadySince] = [places, performance.now()];
  return performance.now() - window.steadySince > 250;
}"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One Streamlit process."""

    def __init__(self, folder: Path) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"streamlit-{self.port}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streamlit", "run", "app.py", "--server.port", str(self.port)],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "STREAMLIT_SERVER_FILE_WATCHER_TYPE": "none"},
            )
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=1) as answer:
                    if answer.read() == b"ok":
                        return
            except OSError:
                time.sleep(0.1)
        pytest.fail(f"the app did not start within {START_SECONDS} s:\n{self.log.read_text()}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)


@pytest.fixture
def new_server(tmp_path: Path) -> Iterator[Server]:
    """A server that nobody has visited yet."""
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server shared by all tests; read its ``url``."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator["object"]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, server) -> Iterator[Callable]:
    """``visit("/e2m1?x=1", width=390, theme="dark")`` → the page once its title is drawn.

    The page has ``.seen``: every URL that it asked for; none may lie on another machine, whatever the test is about.
    """
    contexts = []

    def go(path: str, *, width: int = 1280, theme: str = "light", locale: str = "en-US", at: Server = server):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, locale=locale, reduced_motion="reduce"
        )
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.seen = []
        page.on("request", lambda request: page.seen.append(request.url))
        page.goto(at.url + path)
        page.wait_for_selector("h1")
        settle(page)
        return page

    yield go
    asked = [url for context in contexts for page in context.pages for url in getattr(page, "seen", ())]
    for context in contexts:
        context.close()
    assert [url for url in asked if not LOCAL.match(url)] == [], "asked of another machine"


def settle(page) -> None:
    """Wait until the page is drawn and every element keeps its place."""
    drawn(page)
    # A drawing is made anew once its box has its width: on a slow machine that comes after its first words.
    page.wait_for_function(STEADY, polling=50)


def drawn(page) -> None:
    """Wait until Streamlit has finished running and drawing."""
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")
    page.wait_for_function("!document.querySelector('[data-testid=stSkeleton]')")
    # A component's script comes after its markup: its buttons have no words until it has run.
    page.wait_for_function(
        """() => [...document.querySelectorAll('*')].every(element => !element.shadowRoot ||
             [...element.shadowRoot.querySelectorAll('button, label')].every(part =>
               part.textContent.trim() || part.getAttribute('aria-label')))"""
    )


def skip_question(page, lang: str = "en") -> None:
    """Pass the question without a guess; the answer is on the page when this returns."""
    skip = page.get_by_role("button", name=words(lang, "ui.predict.skip"))
    skip.click()
    skip.wait_for(state="detached")
    settle(page)


def widen(page) -> None:
    """From a phone to a desk."""
    page.set_viewport_size({"width": 1280, "height": 900})
    settle(page)


def overflow(page) -> int:
    """By how much the page is wider than its frame; Streamlit scrolls inside a container, not in the document."""
    return page.locator("[data-testid=stMain]").evaluate("main => main.scrollWidth - main.clientWidth")


def violations(page) -> list[tuple[str, list, str]]:
    """What axe finds wrong with contrast and names: rule, place and summary."""
    from axe_playwright_python.sync_playwright import Axe

    page.wait_for_load_state("networkidle")
    result = Axe().run(page, options={"runOnly": {"type": "rule", "values": RULES}})
    return [
        (violation["id"], node["target"], node.get("failureSummary", ""))
        for violation in result.response["violations"]
        for node in violation["nodes"]
    ]
