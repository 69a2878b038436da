"""The map of lessons on a page: two lines of stations from :mod:`nvfp4viz.figures.places`, every lesson a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from nvfp4viz.figures import places
from nvfp4viz.ui import registry
from nvfp4viz.ui.components import load
from nvfp4viz.ui.i18n import lang, t
from nvfp4viz.ui.text import table

_COMPONENT = load("lesson_map")
Link = tuple[str, Mapping[str, str]]


def links() -> tuple[Link, ...]:
    """Every link of the map in table order; the component names a chosen one by its place in here."""
    return tuple((page, stop.query) for page, stops in places.LESSONS.items() for stop in stops)


def lesson_map(path: Sequence[str]) -> None:
    """Draw the map with the lessons of ``path`` numbered; a chosen lesson opens in this session.

    The links are ordinary ones, so that they also open in a new tab; a plain click would load the whole app anew.
    """
    known = links()
    result = _COMPONENT(
        key="lesson_map",
        data={
            "bands": [_band(band, known, path) for band in places.BANDS],
            "everywhere": _lessons(places.EVERYWHERE, known, path),
            "words": table(lang(), "map.picture"),
        },
        on_go_change=_ignore,
    )
    chosen = result.get("go")
    if chosen in range(len(known)):
        page, query = known[chosen]
        st.switch_page(registry.entry_of(page).script, query_params=registry.params(query))


def _ignore() -> None:
    """The run that follows is enough."""


def _band(band: places.Band, known: Sequence[Link], path: Sequence[str]) -> dict[str, Any]:
    return {
        "id": band,
        "title": t(f"map.band.{band}.title"),
        "text": t(f"map.band.{band}.text"),
        "whole": _lessons(places.WHOLE + band, known, path),
        "stations": [
            {
                "name": t(f"map.station.{station.id}.name"),
                "text": t(f"map.station.{station.id}.text"),
                "carries": station.carries,
                "scale": station.scale,
                "lessons": _lessons(station.id, known, path),
            }
            for station in places.stations(band)
        ],
    }


def _lessons(place: str, known: Sequence[Link], path: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "index": known.index((page, query)),
            "label": t(f"{page}.title"),
            "href": registry.href(page, query),
            "step": path.index(page) + 1 if page in path else None,
        }
        for page, query in places.lessons_at(place)
    ]
