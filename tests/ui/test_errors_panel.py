"""A reader sees three sentences or an apology, never a traceback and never a path."""

import pytest
from streamlit.testing.v1 import AppTest

from nvfp4viz.ui.errors import escape


def _known() -> None:
    import streamlit as st

    from nvfp4viz.errors import FormatError
    from nvfp4viz.ui.errors import boundary

    st.session_state["lang"] = st.session_state.get("asked", "en")
    with boundary():
        raise FormatError("format.code-range", code=16, format="e2m1", limit=15)


def _unknown() -> None:
    import streamlit as st

    from nvfp4viz.ui.errors import boundary

    st.session_state["lang"] = st.session_state.get("asked", "en")
    with boundary():
        raise ZeroDivisionError("secret /home/someone/model")
    st.write("the rest of the app goes on")


def _all(at: AppTest) -> str:
    assert not at.exception
    return "\n".join(str(part.value) for part in [*at.markdown, *at.caption])


@pytest.mark.parametrize(("language", "next_words"), [("en", "What to do:"), ("zh", "怎么办：")])
def test_a_known_error_says_what_why_and_next(language, next_words):
    at = AppTest.from_function(_known)
    at.session_state["asked"] = language
    text = _all(at.run())
    assert next_words in text
    assert "16" in text
    assert "format.code-range" in text


@pytest.mark.parametrize(("language", "words"), [("en", "could not be drawn"), ("zh", "没能画出来")])
def test_an_unforeseen_error_is_an_apology_with_a_ticket(language, words, caplog):
    at = AppTest.from_function(_unknown)
    at.session_state["asked"] = language
    text = _all(at.run())
    assert words in text
    assert "secret" not in text
    assert "Traceback" not in text
    assert "the rest of the app goes on" in text
    ticket = caplog.records[-1].args[0]
    assert ticket in text
    assert "secret" in caplog.text  # the log has it


def test_text_from_outside_cannot_become_markup():
    assert escape("<b>[x](y)|`z`") == r"\<b\>\[x\](y)\|\`z\`"
