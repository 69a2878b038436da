"""Replies as cards, as server JSON, and as a table: records in, HTML out.  Every text that is not ours is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

import streamlit as st

from nvfp4viz.figures.palette import css_variables
from nvfp4viz.ui.i18n import t

MOST_PADS = 6
"""Padding tokens drawn on a card; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One prompt and what one build of the model made of it.

    Attributes
    ----------
    prompt_id
        ``"news"``, ``"arithmetic"``, ``"code"`` or ``"own"``.
    prompt
        Its text.
    prompt_tokens
        Number of its tokens, with ``<bos>``.
    tokens
        Texts of the answer's tokens.
    token_ids
        Their ids.
    limit
        The most tokens that were asked for.
    """

    prompt_id: str
    prompt: str
    prompt_tokens: int
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    limit: int

    @property
    def pads(self) -> int:
        """How many of the answer's tokens are ``<pad>``, id 0."""
        return sum(token == 0 for token in self.token_ids)

    @property
    def silent(self) -> bool:
        """Nothing but ``<pad>``."""
        return self.pads == len(self.token_ids) > 0

    @property
    def finish_reason(self) -> str:
        return "length" if len(self.token_ids) >= self.limit else "stop"


@cache
def style() -> str:
    """The page's style sheet with the palette in front; the palette's variables live on ``.story``."""
    sheet = (Path(__file__).parent / "story.css").read_text(encoding="utf-8")
    return f"<style>{css_variables().replace(':host', '.story, [class*=st-key-story_]')}{sheet}</style>"


def draw(html: str, *, tall: bool = False, extra: str = "") -> None:
    """Put HTML of ours on the page, under the page's style."""
    st.html(f'<div class="story {"tall" if tall else ""} {extra}">{html}</div>')


def answer_html(reply: Reply, most: int = MOST_PADS, *, trim: bool = False) -> str:
    """The answer token by token: text as text, ``<pad>`` as a hatched chip, long runs of it counted.

    ``trim`` drops the white space in front, for a table.
    """
    parts, pads = [], 0
    for token, text in zip(reply.token_ids, reply.tokens, strict=True):
        if token == 0:
            pads += 1
            if pads <= most:
                parts.append('<span class="pad">&lt;pad&gt;</span>')
        elif text not in ("<bos>", "<eos>"):
            parts.append(escape(text))
    if pads > most:
        parts.append(f'<span class="more"> … {escape(t("empty_answer.card.more", n=pads - most))}</span>')
    if reply.finish_reason == "length" and not reply.pads:
        parts.append('<span class="more">…</span>')
    return "".join(parts).lstrip() if trim else "".join(parts)


def card(title: str, status: str, reply: Reply, foot: str = "") -> str:
    """One reply card."""
    bottom = f"<footer><span>{escape(foot)}</span></footer>" if foot else ""
    return (
        f'<section class="reply{" silent" if reply.silent else ""}">'
        f'<header><b>{escape(title)}</b><span class="mono">{escape(status)}</span></header>'
        f'<p class="text"><span class="prompt">{escape(reply.prompt)}</span>'
        f'<span class="answer">{answer_html(reply)}</span></p>{bottom}</section>'
    )


def waiting(title: str, prompt: str, why: str) -> str:
    """A card whose answer is not shown yet: being computed, or covered until a prediction."""
    return (
        f'<section class="reply"><header><b>{escape(title)}</b></header>'
        f'<p class="text"><span class="prompt">{escape(prompt)}</span>'
        f'<span class="hidden-reply">{escape(why)}</span></p></section>'
    )


def cards(parts: Iterable[str], *, tall: bool = False, kind: str = "") -> None:
    """Cards side by side, on a phone one below the other; ``kind``: ``"hero"``, ``"rows"`` or nothing."""
    draw(f'<div class="{"rows" if kind == "rows" else f"cards {kind}"}">{"".join(parts)}</div>', tall=tall)


def server_json(reply: Reply, model: str, *, skip_special_tokens: bool) -> str:
    """The reply in the shape of an OpenAI-style completions endpoint, with the numbers of this run.

    No server ran: the shape shows what a client would see, status 200 included.
    """
    text = "".join(
        token
        for token, number in zip(reply.tokens, reply.token_ids, strict=True)
        if not (skip_special_tokens and number < 3) and token not in ("<bos>", "<eos>")
    )
    body = {
        "object": "text_completion",
        "model": model,
        "choices": [{"index": 0, "text": text, "finish_reason": reply.finish_reason}],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": len(reply.token_ids),
            "total_tokens": reply.prompt_tokens + len(reply.token_ids),
        },
    }
    return "HTTP/1.1 200 OK\n\n" + json.dumps(body, indent=2, ensure_ascii=False)


def verdict(kind: str, text: str) -> str:
    """A verdict in its frame: each kind has its own line, not only its colour."""
    return f'<span class="verdict {kind}">{escape(text)}</span>'


def table_html(head: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    """A table of HTML cells; ``head`` is (class, text) a column.  On a phone each row becomes a block."""
    top = "".join(f'<th scope="col" class="{css}">{escape(text)}</th>' for css, text in head)
    body = ""
    for row in rows:
        cells = ""
        for place, ((css, text), cell) in enumerate(zip(head, row, strict=True)):
            label = escape(text if place else "", quote=True)
            cells += f'<td class="{css}" data-label="{label}">{cell}</td>'
        body += f"<tr>{cells}</tr>"
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
