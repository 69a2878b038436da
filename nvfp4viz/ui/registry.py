"""Which pages there are, in reading order.  To add one: a line here, a file in ``pages/``, a text file per language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import streamlit as st

from nvfp4viz.ui.i18n import lang, t

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class PageEntry:
    """One page.  ``id`` names its script, its texts and its address; it never changes with the language.

    ``kernels`` tells whether drawing it computes with Numba's kernels: then it waits for them, in sight.
    """

    id: str
    group: str
    default: bool = False
    kernels: bool = True

    @property
    def script(self) -> str:
        return f"pages/{self.id}.py"


# The default page lives at "/": its own address would show Streamlit's "Page not found".
PAGES = (
    PageEntry("empty_answer", "start", default=True),
    PageEntry("e2m1", "formats", kernels=False),
    PageEntry("two_level_scaling", "formats"),
    PageEntry("blocks", "formats"),
    PageEntry("tensor_core", "formats"),
    PageEntry("mxfp4", "formats"),
    PageEntry("routing", "moe"),
    PageEntry("dataflow", "moe"),
    PageEntry("fusion", "moe"),
    PageEntry("expert_parallel", "moe", kernels=False),
    PageEntry("backends", "serving"),
    PageEntry("loading", "serving"),
    PageEntry("online_quantisation", "serving"),
    PageEntry("mega_kernel", "serving"),
    PageEntry("explorer", "checkpoint", kernels=False),
    PageEntry("fault_lab", "checkpoint"),
    PageEntry("kernel_lab", "kernels"),
    PageEntry("map", "learn", kernels=False),
    PageEntry("glossary", "learn", kernels=False),
)


def streamlit_pages() -> dict[str, list[st.Page]]:
    """The pages for ``st.navigation``, grouped, with titles in the reader's language and constant addresses."""
    groups: dict[str, list[st.Page]] = {}
    for entry in PAGES:
        page = st.Page(
            entry.script,
            title=t(f"{entry.id}.title"),
            url_path=None if entry.default else entry.id,
            default=entry.default,
            help=t(f"{entry.id}.aim"),
        )
        groups.setdefault(t(f"ui.group.{entry.group}"), []).append(page)
    return groups


def entry_of(page_id: str) -> PageEntry:
    """The registry's line for a page."""
    return next(entry for entry in PAGES if entry.id == page_id)


def entry_at(url_path: str) -> PageEntry:
    """The registry's line for an address; the default page's is empty."""
    return next(entry for entry in PAGES if entry.id == url_path or (entry.default and not url_path))


def link(page_id: str, label: str | None = None, **query: str) -> None:
    """A link to another page of ours, with the view it should open on (ids and numbers as in a link)."""
    st.page_link(entry_of(page_id).script, label=label or t(f"{page_id}.title"), query_params=params(query))


def params(query: Mapping[str, str]) -> dict[str, str]:
    """What the address of another page of ours says: the language, the mode if this page's has one, and ``query``."""
    mode = st.query_params.get("mode")
    return {"lang": lang(), **({} if mode is None else {"mode": mode}), **query}


def href(page_id: str, query: Mapping[str, str]) -> str:
    """The same as :func:`link` for a drawing of ours: relative, so that it also holds under a server's base path."""
    entry = entry_of(page_id)
    return f"{'./' if entry.default else entry.id}?{urlencode(params(query))}"
