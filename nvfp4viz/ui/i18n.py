"""The reader's language: ``?lang=en|zh``, else the browser's, kept when they move on and when they switch."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

from nvfp4viz.figures import words as texts
from nvfp4viz.figures.words import LANGUAGES, has_words, words

_KEY = "lang"
_SWITCH = "lang_switch"
_GIVEN = "_lang_given"
_NAMED = "_named_choices"
NAMES = {"en": "English", "zh": "中文"}


def lang() -> str:
    """The language of this session: ``"en"`` or ``"zh"``."""
    return st.session_state.get(_KEY) or _from_browser()


def t(key: str, **values: object) -> str:
    """A text in the reader's language; see :mod:`nvfp4viz.figures.words` for keys."""
    return words(lang(), key, **values)


def listed(names: Iterable[str]) -> str:
    """Words one after the other, with the comma of the reader's language between them."""
    return texts.listed(lang(), names)


def has(key: str) -> bool:
    """Whether the reader's language has a text under ``key``."""
    return has_words(lang(), key)


def _from_browser() -> str:
    locale = (st.context.locale or "en").lower()
    return "zh" if locale.startswith("zh") else "en"


def settle_language() -> None:
    """Take the language from the link, the session or the browser, in this order.

    What it says is left for `given_languages`, which tells of several and of one that is none of ours: the run of a
    cold deep link ends before it draws anything.

    A link without a language gets it from the foot of the page, in the browser: a write here would be one more entry in
    the browser's history, and Back would stay on the page.
    """
    asked = st.query_params.get(_KEY)
    written = st.session_state.get("_lang_written")
    if asked is not None and asked != written:
        if asked in LANGUAGES:
            st.session_state[_KEY] = asked
        st.session_state[_GIVEN] = st.query_params.get_all(_KEY)
    st.session_state.setdefault(_KEY, _from_browser())
    if asked is not None and asked != st.session_state[_KEY]:
        st.query_params[_KEY] = st.session_state[_KEY]
    st.session_state["_lang_written"] = st.session_state[_KEY]


def given_languages() -> tuple[list[str], bool]:
    """What the link says of the language, and whether it ends on none of ours; told once, to the page that notes it."""
    given: list[str] = st.session_state.pop(_GIVEN, [])
    return given, bool(given) and given[-1] not in LANGUAGES


def language_switch() -> None:
    """Two segments, English and 中文.  Switching keeps everything else on the page."""
    st.session_state[_SWITCH] = lang()
    st.segmented_control(
        t("ui.language"),
        LANGUAGES,
        format_func=NAMES.__getitem__,
        key=_SWITCH,
        required=True,
        label_visibility="collapsed",
        on_change=_switched,
    )


def outlives_a_switch(key: str) -> None:
    """Note a widget whose choices have names in the reader's language.

    The browser knows a choice by its name, and reads it back in the next run as one of the names of the run before:
    after another language it would be none of them, and the box would still show it.
    """
    st.session_state.setdefault(_NAMED, set()).add(key)


def _switched() -> None:
    for key in st.session_state.get(_NAMED, ()):
        if key in st.session_state:
            st.session_state[key] = st.session_state[key]  # set by us, so that the browser takes the new name
    chosen = st.session_state[_SWITCH]
    st.session_state[_KEY] = chosen
    st.query_params[_KEY] = chosen
    st.session_state["_lang_written"] = chosen
