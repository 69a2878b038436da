"""What a link says that could not be used, or only in part: kept in the session while the reader stays on the page."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

_MOST_CHARACTERS, _MOST_VALUES = 40, 4
_KEPT = "_notes"


@dataclass(frozen=True, slots=True)
class Note:
    """A link value that could not be used, or one setting's several values, of which ``value`` was the last."""

    name: str
    value: str
    known: bool = True  # a setting of this page at all
    values: tuple[str, ...] = ()  # all of them, as far as they are told


def notes() -> list[Note]:
    """Those of the page that is open."""
    found: list[Note] = st.session_state[_KEPT]
    return found


def forget_notes() -> None:
    """Another page's notes belong to it."""
    st.session_state[_KEPT] = []


def add_note(name: str, value: str, *, known: bool = True) -> None:
    """Note a value that could not be used."""
    _add(Note(name, value[:_MOST_CHARACTERS], known))


def add_several(name: str, values: list[str]) -> None:
    """Note that a link says several things of one setting; the last counts."""
    told = [value[:_MOST_CHARACTERS] for value in values]
    if len(told) > _MOST_VALUES:
        told[_MOST_VALUES - 2 : -1] = ["…"]
    _add(Note(name, told[-1], values=tuple(told)))


def are_several(name: str) -> bool:
    """Whether the address says several things of one setting; the same one twice is one."""
    return len(set(st.query_params.get_all(name))) > 1


def _add(note: Note) -> None:
    if note not in notes():
        st.session_state[_KEPT] = [*notes(), note]
