"""A page waits for the kernels in sight, and not at all once they are loaded."""

from __future__ import annotations

import threading

import pytest
from streamlit.testing.v1 import AppTest

from nvfp4viz.ui import kernels


class Slow(threading.Thread):
    """A compiler that finishes one of three kernels while the page looks on."""

    done, total = 1, 3

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.finish = threading.Event()

    def run(self) -> None:
        self.finish.wait(30)


def page() -> None:
    import streamlit as st

    from nvfp4viz.ui.kernels import wait_for_kernels

    st.title("drawn before")
    wait_for_kernels()
    st.write("drawn after")


def test_loaded_kernels_cost_no_word() -> None:
    app = AppTest.from_function(page, default_timeout=120).run()
    assert [text.value for text in app.markdown] == ["drawn after"]
    assert not app.exception


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_says_how_far_the_compiler_is(monkeypatch: pytest.MonkeyPatch, language: str) -> None:
    compiler, seen = Slow(), []

    class Bar:
        def progress(self, share: float, text: str) -> None:
            seen.append((share, text))
            compiler.finish.set()

        def empty(self) -> None:
            seen.append("gone")

    compiler.start()
    monkeypatch.setattr(kernels, "warm_in_background", lambda: compiler)
    monkeypatch.setattr(kernels.st, "empty", Bar)
    monkeypatch.setattr("nvfp4viz.ui.i18n.lang", lambda: language)
    kernels.wait_for_kernels()
    share, text = seen[0]
    assert share == pytest.approx(1 / 3)
    assert "1" in text
    assert "3" in text
    assert ("内核" in text) == (language == "zh")
    assert seen[-1] == "gone"


def test_what_follows_keeps_its_place_when_nobody_waits_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A component that moved up would be built anew in the browser, and the reader's focus lost with it."""
    compiler = Slow()
    compiler.start()
    threading.Timer(0.5, compiler.finish.set).start()
    monkeypatch.setattr("nvfp4viz.ui.kernels.warm_in_background", lambda: compiler)
    app = AppTest.from_function(page, default_timeout=120).run()
    assert not compiler.is_alive()
    waited = {place: node.type for place, node in app.main.children.items()}
    app.run()
    assert {place: node.type for place, node in app.main.children.items()} == waited
