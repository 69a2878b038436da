"""What a link restores: the shared cursor and a page's own settings, as ids and numbers, never as translated labels.

A page declares its settings once::

    view = open_view("e2m1", x=number(-1e6, 1e6, default=2.5), format=choice(FORMATS, default="e2m1"))
    st.slider(..., **view.widget("x"))     # key and persistence
    view["x"]                              # the value
    view.put(x=3.0)                        # set it from a component's callback
    view.write_link()                      # after the widgets: the address bar follows

Values live in the session under ``view.key(name)``; the address bar holds those that differ from their default.  What a
link says is checked here, once: a value that makes no sense is named in ``view.notes``, and not written again; of
several values of one setting the last counts, and that is named, too.  Where the range is known only after something
was opened, the page says it then: ``view.refine("layer", integer(0, 3))``; where another setting decides it,
``view.bound("row", rows - 1)``.

The browser's Back and Forward bring an earlier address.  What that address leaves out stands at its default there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st

from nvfp4viz.ui.i18n import given_languages, outlives_a_switch
from nvfp4viz.ui.link_notes import Note, add_note, add_several, are_several, forget_notes, notes

CURSOR = ("checkpoint", "layer", "expert", "projection", "block", "element")
MODES = ("reader", "workshop")
# Settled elsewhere, so no page complains about them.
_COMMON = {"lang", "mode", *CURSOR}

Allowed = str | tuple[str, dict[str, object]]
"""What a setting may be, for the reader: plain numbers and ids, or a text key with its values."""


@dataclass(frozen=True, slots=True)
class Param:
    """How one setting is written in a link.  ``parse`` raises ``ValueError``; ``allowed`` is shown to the reader."""

    default: Any
    parse: Callable[[str], Any]
    allowed: Allowed
    write: Callable[[Any], str] = str
    in_browser: bool = False  # a component writes it into the address, and no widget holds it


def integer(low: int, high: int | None, default: int | None = None) -> Param:
    """A whole number from ``low`` to ``high``; with no ``high``, as far as integers of 32 bits go."""

    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= (_MOST if high is None else high):
            raise ValueError(text)
        return value

    return Param(default, parse, f"{low}, {low + 1}, {low + 2} …" if high is None else f"{low} … {high}")


def in_browser(param: Param) -> Param:
    """A setting that a component alone changes, by writing it into the address."""
    return replace(param, in_browser=True)


def number(low: float, high: float, default: float | None = None) -> Param:
    """A finite number from ``low`` to ``high``; written so that it reads back to the same float."""

    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:  # also refuses NaN
            raise ValueError(text)
        return value

    return Param(default, parse, f"{low:g} … {high:g}", write=repr_number)


def numbers(count: int, default: Sequence[float], most: float = math.inf) -> Param:
    """Exactly ``count`` numbers separated by commas; ``nan``, ``inf`` and ``-inf`` are values too.

    With ``most``, numbers from ``-most`` to ``most`` alone.
    """

    def parse(text: str) -> tuple[float, ...]:
        values = tuple(float(part) for part in text.split(","))
        if len(values) != count or (most < math.inf and not all(abs(value) <= most for value in values)):
            raise ValueError(text)
        return values

    allowed = ("ui.allowed.numbers", {"count": count, "example": "1.5,-2,0"})
    return Param(tuple(default), parse, allowed, write=lambda v: ",".join(map(repr_number, v)))


def choice(options: Sequence[str], default: str | None = None) -> Param:
    """One id out of ``options``."""

    def parse(text: str) -> str:
        if text not in options:
            raise ValueError(text)
        return text

    return Param(default, parse, ", ".join(options))


def choices(options: Sequence[str]) -> Param:
    """Any of ``options``, each once, with commas between them; none by default."""

    def parse(text: str) -> tuple[str, ...]:
        found = text.split(",")
        if len(set(found)) != len(found) or not set(found) <= set(options):
            raise ValueError(text)
        return tuple(name for name in options if name in found)

    return Param((), parse, ("ui.allowed.choices", {"options": ", ".join(options)}), write=",".join)


def flag(default: bool = False) -> Param:
    """On or off, written ``1`` or ``0``."""

    def parse(text: str) -> bool:
        return {"1": True, "0": False}[text] if text in ("0", "1") else _refuse(text)

    return Param(default, parse, "0, 1", write=lambda v: "1" if v else "0")


MOST_TEXT = 500
"""Characters of a reader's text that a link carries: an address of thousands is cut on its way."""


def text() -> Param:
    """A reader's own text, of at most `MOST_TEXT` characters; its widget needs ``max_chars``."""

    def parse(written: str) -> str:
        return written if len(written) <= MOST_TEXT else _refuse(written)

    return Param(None, parse, ("ui.allowed.text", {"count": f"{MOST_TEXT:,}"}))


def slug(default: str | None = None) -> Param:
    """An opaque id such as a sample's name: letters, digits, dot, dash, underscore.  Never a path."""

    def parse(text: str) -> str:
        return text if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text) else _refuse(text)

    return Param(default, parse, "a-z 0-9 . _ -")


def _refuse(text: str) -> Any:
    raise ValueError(text)


def repr_number(value: float) -> str:
    """The shortest text that reads back to the same double.

    >>> repr_number(2.0), repr_number(0.1), repr_number(float("nan"))
    ('2', '0.1', 'nan')
    """
    value = float(value)
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15 and math.copysign(1, value) * value >= 0:
        return str(int(value)) if value or math.copysign(1, value) > 0 else "-0.0"
    return repr(value)


_MOST = 2**31 - 1
# As wide as any checkpoint; a page that has one open refines them.
_CURSOR_PARAMS = {
    "checkpoint": slug(),
    "layer": integer(0, None),
    "expert": integer(0, None),
    "projection": choice(("w1", "w2", "w3", "w13", "gate", "up", "gate_up", "down")),
    "block": integer(0, None),
    "element": integer(0, 31),
}


class View:
    """A page's settings in this session; made by :func:`open_view`."""

    def __init__(self, page: str, params: dict[str, Param]) -> None:
        self.page = page
        self.params = params
        self._declared = dict(params)  # before anything was opened that refines them
        self.arrived = False  # the first run on this page
        self.asked: set[str] = set()  # settings that this run has taken from a link
        self.notes: list[Note] = []

    def key(self, name: str) -> str:
        """Session and widget key of a setting; the cursor's fields are shared by all pages."""
        return name if name in CURSOR else f"{self.page}.{name}"

    def widget(self, name: str) -> dict[str, Any]:
        """Keyword arguments that tie a widget to a setting: its key, and keeping its value on other pages."""
        outlives_a_switch(self.key(name))
        return {"key": self.key(name), "persist_state": "session"}

    def __getitem__(self, name: str) -> Any:
        return st.session_state.get(self.key(name), self.params[name].default)

    def put(self, **values: Any) -> None:
        """Set settings; in a callback, or before the widget that shows them is drawn."""
        st.session_state["_edited"] = True
        for name, value in values.items():
            st.session_state[self.key(name)] = value

    def defaults(self, *names: str) -> None:
        """Back to the default: a reset button's callback.  What is opened next refines it anew."""
        self.put(**{name: self._declared[name].default for name in names or self._declared})

    def query(self) -> dict[str, str]:
        """What the link to this view says, without the language."""
        found = {}
        for name, param in self.params.items():
            value = self[name]
            if value is not None and value != param.default:
                found[name] = param.write(value)
        return found

    def refine(self, name: str, param: Param) -> None:
        """The real range of a setting, once what is open tells it.

        A value out of it falls back to the default: named if a link brought it, silently if another page did.
        """
        self.params[name] = param
        value = self[name]
        if value is None:
            return
        try:
            param.parse(param.write(value))
        except ValueError:
            self._tell(name, param.write(value))
            self.put(**{name: param.default})

    def bound(self, name: str, high: int) -> None:
        """The largest index that another setting leaves, such as a row of so many; before its widget is drawn.

        A larger one that a link brought is named and falls back to the default, or to ``high`` below it; one that was
        there when the reader made the other setting smaller comes down to ``high``, without a word.
        """
        default, value = self.params[name].default, self[name]
        # The default stays as it is: another would write the address twice in a run.
        self.params[name] = integer(0, high, default=default)
        if value > high and self._tell(name, str(value)):
            value = default
        # Set anew in any case: a widget of other bounds would begin at its lowest value.
        st.session_state[self.key(name)] = min(value, high)

    def _tell(self, name: str, written: str) -> bool:
        """Note a value that is of no use here if it is a link's; whether it was."""
        asked = name in self.asked
        if asked:
            add_note(name, written)
            self.notes = notes()
        return asked

    def address(self) -> dict[str, str]:
        """All that the link to this view says: the language, the mode if the link has one, and :meth:`query`."""
        kept = {"lang": st.session_state.get("lang", ""), "mode": st.query_params.get("mode", "")}
        if kept["mode"] not in MODES:
            del kept["mode"]
        return {name: value for name, value in kept.items() if value} | self.query()

    def write_link(self) -> None:
        """Bring the address bar up to date: at once, so that a run that takes long already shows under its own address,
        and again after the widgets, also at the end of a fragment.

        One write, because each makes an entry in the browser's history; and none for the language alone, which
        :meth:`Lesson.foot` puts in without an entry.
        """
        wanted, now = self.address(), st.query_params.to_dict()
        if wanted | {"lang": ""} != now | {"lang": ""} or any(map(are_several, now)):
            st.query_params.from_dict(wanted)
        self._remember()
        st.session_state.pop("_unheard", None)

    def trust_link(self) -> None:
        """After the run of arrival, whose settings the browser itself puts into the address.

        Streamlit goes on knowing the address as it was; the next run must not take what is missing there for the
        reader's Back.
        """
        self._remember()
        st.session_state["_unheard"] = {name for name in self.query() if name not in st.query_params}

    def _remember(self) -> None:
        """What the address says now, and the settings behind it: what differs in the next run was changed since."""
        st.session_state["_link"], st.session_state["_shown"] = self.query(), self._texts()
        st.session_state.pop("_edited", None)

    def _texts(self) -> dict[str, str | None]:
        values = {name: st.session_state.get(self.key(name)) for name in self.params}
        return {name: None if value is None else self.params[name].write(value) for name, value in values.items()}

    def is_edited(self) -> bool:
        """Whether a widget or a component has changed a setting since the address was written.

        Then an address that says otherwise is only late: the browser sent the change before it heard of the address of
        the run before.  The reader's Back comes with no change.
        """
        return st.session_state.get("_edited", False) or self._texts() != st.session_state.get("_shown")


def open_view(page: str, **params: Param) -> View:
    """Read a page's settings from the link, or from this session, or take their defaults.

    The cursor's fields (``checkpoint``, ``layer``, ``expert``, ``projection``, ``block``, ``element``) may be declared
    with tighter bounds than the general ones; they are read and written on every page.
    """
    view = View(page, {**_CURSOR_PARAMS, **params})
    view.arrived = st.session_state.get("_view_page") != page
    if view.arrived:
        # Another page's notes and link belong to it.
        st.session_state.update(_view_page=page, _link={})
        forget_notes()
    for name in filter(are_several, st.query_params):
        if name in view.params or name in _COMMON:
            add_several(name, st.query_params.get_all(name))
    _settle_mode()
    _settle_language()
    written = st.session_state["_link"]
    differs = {name for name in view.params if st.query_params.get(name) != written.get(name)}
    unheard = st.session_state.pop("_unheard", set())
    if differs and differs <= {name for name in unheard if name not in st.query_params}:
        differs = set()  # Streamlit has not heard of these yet; the reader went nowhere
    follows = view.arrived or not view.is_edited()
    for name, param in view.params.items():
        # What a component has written is never late: the address is where it keeps that.
        if name in differs and (follows or param.in_browser):
            _follow(view, name, st.query_params.get(name))
    for name in st.query_params:
        if name not in view.params and name not in _COMMON:
            add_note(name[:40], st.query_params[name], known=False)
    for name, param in view.params.items():
        # A page without a checkpoint leaves the cursor's fields open, and the next one has a default for them.
        open_field = name in CURSOR and st.session_state.get(view.key(name)) is None
        if open_field or view.key(name) not in st.session_state:
            st.session_state[view.key(name)] = param.default
        else:
            _recheck(view, name, param)
            if view.arrived:
                # Set anew: what another page's widget left behind does not reach a widget of other bounds or options.
                view.put(**{name: view[name]})
    view.notes = notes()
    return view


def _follow(view: View, name: str, raw: str | None) -> None:
    """Take a setting from a link that differs from the one written last: a new link, or the browser's Back."""
    param = view.params[name]
    if raw is None:  # written once, and gone: Back to where it stood at its default
        view.put(**{name: param.default})
        return
    try:
        view.put(**{name: param.parse(raw)})
        view.asked.add(name)
    except (ValueError, OverflowError):
        add_note(name, raw)


def _settle_language() -> None:
    given, refused = given_languages()  # put aside before any page runs
    if len(set(given)) > 1:
        add_several("lang", given)
    if refused:
        add_note("lang", given[-1])


def _settle_mode() -> None:
    """``?mode=`` holds for all pages and for the rest of the session."""
    asked = st.query_params.get("mode")
    if asked in MODES:
        st.session_state["mode"] = asked
    elif asked is not None:
        add_note("mode", asked)


def _recheck(view: View, name: str, param: Param) -> None:
    """The cursor comes from other pages: a layer that this page's checkpoint lacks falls back to the default."""
    if name in CURSOR and view[name] is not None:
        try:
            param.parse(param.write(st.session_state[view.key(name)]))
        except ValueError:
            st.session_state[view.key(name)] = param.default


def hex_digits(count: int, default: str) -> Param:
    """Exactly ``count`` hex digits, kept in lower case."""

    def parse(text: str) -> str:
        return text.lower() if re.fullmatch(rf"[0-9a-fA-F]{{{count}}}", text) else _refuse(text)

    return Param(default, parse, ("ui.allowed.hex", {"count": count, "example": default}))


def real(default: float | None = None) -> Param:
    """Any float, also ``nan``, ``inf`` and ``-0.0``."""
    return Param(default, float, ("ui.allowed.real", {"example": "-2.5e3"}), write=repr_number)


def option(values: Sequence[float], default: float) -> Param:
    """One number out of a list, such as the stops of a slider."""

    def parse(text: str) -> float:
        value = float(text)
        if value not in values:
            raise ValueError(text)
        return value

    return Param(default, parse, ", ".join(map(repr_number, values)), write=repr_number)
