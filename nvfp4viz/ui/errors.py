"""Errors as part of the lesson: what happened, why, what to do, in the reader's language.  No traceback, no path."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import streamlit as st

from nvfp4viz.errors import NvError
from nvfp4viz.ui.i18n import lang, t

_LOG = logging.getLogger("nvfp4viz.ui")


def show(error: NvError, *, key: str | None = None) -> None:
    """A panel with the three sentences of an error that a reader caused and can mend."""
    text = error.text(lang())
    with st.container(border=True, key=f"error_{key or error.code.replace('.', '_')}"):
        st.markdown(f"**{escape(text['what'])}**")
        st.markdown(escape(text["why"]))
        st.markdown(t("ui.error.next", next=escape(text["next"])))
        st.caption(t("ui.error.code", code=error.code))


def escape(text: str) -> str:
    """Text that came from a file or a person, safe inside Markdown.

    >>> escape("a*b[c](d)")
    'a\\\\*b\\\\[c\\\\](d)'
    """
    for sign in "\\`*_[]<>$|~#":
        text = text.replace(sign, "\\" + sign)
    return text


@contextmanager
def boundary() -> Iterator[None]:
    """What a page raises ends here: ours as a panel, the unexpected as an apology with a number for the log."""
    try:
        yield
    except NvError as error:
        show(error)
    except Exception:
        ticket = uuid.uuid4().hex[:8]
        _LOG.exception("unexpected error %s", ticket)
        with st.container(border=True, key="error_unexpected"):
            st.markdown(f"**{t('ui.error.unexpected_what')}**")
            st.markdown(t("ui.error.unexpected_why", ticket=ticket))
            st.markdown(t("ui.error.next", next=t("ui.error.unexpected_next")))


@contextmanager
def passing(*places: Any) -> Iterator[None]:
    """What stands only while something runs (cards that say so, a bar) goes when it fails.

    ``places`` are what ``st.empty()`` or ``st.progress()`` gave; the error goes on to whoever shows it.
    """
    try:
        yield
    except Exception:
        for place in places:
            place.empty()
        raise


def fragment(function: Callable[..., Any]) -> Callable[..., Any]:
    """``st.fragment`` with the boundary inside: a fragment's own rerun does not pass through ``app.py``."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with boundary():
            return function(*args, **kwargs)

    return st.fragment(guarded)
