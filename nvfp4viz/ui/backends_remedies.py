"""The scoreboard of remedies: each really run, rows as they finish, and the verdict after the reader's own."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np
import streamlit as st

from nvfp4viz.figures import backends as figures
from nvfp4viz.model.corpus import DEMO_PROMPTS, DOMAINS, held_out_documents
from nvfp4viz.serving.remedies import MARGIN, REMEDIES, excess, judge, wrong_domains
from nvfp4viz.ui import caches, errors, predict, snippets, story_runs
from nvfp4viz.ui.caches import Ask
from nvfp4viz.ui.device_line import name_of
from nvfp4viz.ui.i18n import lang, listed, t
from nvfp4viz.ui.numbers import four
from nvfp4viz.ui.story_cards import answer_html, draw, style, table_html, verdict
from nvfp4viz.ui.theme import theme

if TYPE_CHECKING:
    from nvfp4viz.serving.remedies import RemedyResult
    from nvfp4viz.ui.lesson import Lesson

ORDER = (figures.REFERENCE, *(name for name in REMEDIES if name != figures.REFERENCE))
SHOWN = ("news", "arithmetic", "json")
"""Prompts whose replies stand in the table; all are asked."""
_DONE, _HELD = "backends.done", "backends.held"


def ask() -> Ask:
    """Every domain's prompt, and held-out text of every domain."""
    texts = tuple((domain, tuple(held_out_documents(domain, story_runs.LOSS_TEXTS))) for domain in DOMAINS)
    return Ask(tuple(DEMO_PROMPTS[domain] for domain in DOMAINS), texts, story_runs.REMEDY_TOKENS)


def result(name: str) -> RemedyResult:
    """A remedy's result, from the cache where it has been run; slots that stay open read as zeros."""
    return caches.remedy(name, story_runs.holed("zeros"), story_runs.FULL, ask())


def names() -> dict[str, str]:
    """What the story calls each remedy."""
    return {name: t(f"empty_answer.remedies.names.{name}") for name in REMEDIES}


def finished() -> dict[str, RemedyResult]:
    """What this session has run so far, in the order run."""
    return {name: result(name) for name in ORDER if name in st.session_state.get(_DONE, ())}


def everything() -> dict[str, RemedyResult]:
    """All results; runs what is left."""
    return {name: result(name) for name in ORDER}


def scoreboard() -> list[dict[str, object]]:
    """Every remedy's verdict, cost, replies and losses, to download; runs what is left."""
    return figures.scoreboard_rows(everything(), DOMAINS)


def snippet() -> dict[str, object]:
    """What fills ``backends_remedies``."""
    return {
        "broken": story_runs.HOLED,
        "whole": story_runs.FULL.sample,
        "documents": story_runs.LOSS_TEXTS,
        "tokens": story_runs.REMEDY_TOKENS,
        "reference": figures.REFERENCE,
    }


def run_snippet(source: str) -> str:
    """Its output, from the results that the page has, or as soon as it has them."""
    return snippets.run(source, {"results": {name: result(name) for name in REMEDIES}})


def remedies_part(page: Lesson) -> None:
    """Run, row by row; then ask; then losses and verdicts."""
    st.html(style())
    page.prose("remedies.lead", tokens=story_runs.REMEDY_TOKENS, prompts=len(DOMAINS), texts=story_runs.LOSS_TEXTS)
    results = _run(page)
    if len(results) < len(ORDER) or not _asked(page, results):
        return
    st.markdown(page.t("remedies.seen", wrong=_list(page, _wrong(results)), guessed=_list(page, _guessed(results))))
    page.figure(
        figures.loss_figure(results, names(), theme=theme(), lang=lang()),
        alt=page.t("remedies.alt"),
        finding=figures.describe_losses(results, names(), lang()),
        rows=lambda: figures.loss_rows(results),
    )
    page.prose("remedies.text", margin=four(MARGIN))
    guard = results["load-guard"].refusal
    if guard is not None:
        with st.expander(t("empty_answer.remedies.guard_title")):
            errors.show(guard, key="guard")


def _wrong(results: dict[str, RemedyResult]) -> list[str]:
    return [name for name in REMEDIES if judge(results[name], results[figures.REFERENCE]) == "wrong"]


def _guessed(results: dict[str, RemedyResult]) -> list[str]:
    right = [name for name in REMEDIES if judge(results[name], results[figures.REFERENCE]) == "right"]
    return [name for name in right if REMEDIES[name].guesses]


def _list(page: Lesson, found: list[str]) -> str:
    return listed(names()[name] for name in found) or page.t("remedies.nobody")


def _asked(page: Lesson, results: dict[str, RemedyResult]) -> bool:
    """The question, once every reply is there to be looked at."""
    wrong = _wrong(results)
    options = ("fill-one", "fill-fallback", "peer-max", "layer-maximum", "several", "none")
    answer = "none" if not wrong else wrong[0] if len(wrong) == 1 and wrong[0] in options else "several"
    reference = results[figures.REFERENCE]
    worst = max(
        ((value, domain, name) for name in wrong for domain, value in excess(results[name], reference).items()),
        default=(0.0, DOMAINS[0], ""),
    )
    replies = [reply.text for reply in results[worst[2]].replies] if worst[2] else []
    same = sum(text == reply.text for text, reply in zip(replies, reference.replies, strict=False))
    return predict.ask(
        "backends.predict.wrong",
        options,
        answer=answer,
        **{option.replace("-", "_"): names()[option] for option in options if option in REMEDIES},
        wrong=_list(page, wrong),
        domain=t(f"figures.backends.domains.{worst[1]}"),
        more=f"{worst[0]:.3f}",
        margin=four(MARGIN),
        same=same,
        prompts=len(DOMAINS),
    )


def _run(page: Lesson) -> dict[str, RemedyResult]:
    """Run what is left, a row at a time; Stop keeps what is done."""
    controls, bar, place = st.empty(), st.empty(), st.empty()
    results = finished()
    held = st.session_state.get(_HELD, False)
    if len(results) < len(ORDER):
        label, icon = ("remedies.go_on", ":material/play_arrow:") if held else ("remedies.stop", ":material/stop:")
        controls.button(page.t(label), icon=icon, key="backends.hold", on_click=_hold, args=(not held,))
    with place:
        draw(_table(page, results))
    for name in () if held else [name for name in ORDER if name not in results]:
        share = len(results) / len(ORDER)
        bar.progress(share, page.t("remedies.busy", name=names()[name], done=len(results), all=len(ORDER)))
        with errors.passing(bar):
            results[name] = result(name)
        st.session_state[_DONE] = (*st.session_state.get(_DONE, ()), name)
        with place:
            draw(_table(page, results))
    bar.empty()
    if len(results) == len(ORDER):
        controls.button(page.t("remedies.again"), icon=":material/refresh:", key="backends.again", on_click=_again)
    return results


def _hold(wanted: bool) -> None:
    st.session_state[_HELD] = wanted


def _again() -> None:
    caches.forget_remedies()
    st.session_state.pop(_DONE, None)


def _revealed() -> bool:
    key = "backends.predict.wrong"
    return bool(st.session_state.get(f"predict.guess.{key}") or st.session_state.get(f"predict.skipped.{key}"))


def _table(page: Lesson, results: dict[str, RemedyResult]) -> str:
    head = ["remedy", "verdict", *SHOWN, "size", "time"]
    rows = []
    for name in REMEDIES:
        label = f'{escape(names()[name])}<div class="note">{escape(t(f"empty_answer.remedies.notes.{name}"))}</div>'
        if name not in results:
            rows.append([f'<span class="pending">{label}</span>', *("" for _ in head[1:])])
            continue
        rows.append([label, _verdict(page, name, results), *_cells(page, results[name])])
    return table_html([("", _head(page, column)) for column in head], rows)


def _head(page: Lesson, column: str) -> str:
    return t(f"figures.backends.domains.{column}") if column in SHOWN else page.t(f"columns.{column}")


def _verdict(page: Lesson, name: str, results: dict[str, RemedyResult]) -> str:
    if not _revealed() or len(results) < len(ORDER):
        return f'<span class="hidden-reply">{escape(page.t("remedies.covered"))}</span>'
    reference = results[figures.REFERENCE]
    kind = judge(results[name], reference)
    mark = verdict(kind, t(f"empty_answer.verdict.{kind}"))
    if REMEDIES[name].guesses:
        mark += f'<div class="note">≈ {escape(t("empty_answer.remedies.guess"))}</div>'
    off = [t(f"figures.backends.domains.{domain}") for domain in wrong_domains(results[name], reference)]
    if off:
        mark += f'<div class="note">{escape(page.t("remedies.off", domains=listed(off)))}</div>'
    return mark


def _cells(page: Lesson, one: RemedyResult) -> list[str]:
    """Replies with their losses (once revealed), bytes and tokens, and the time."""
    seconds = one.load_seconds + one.generate_seconds + one.loss_seconds
    if one.refusal is not None:
        stopped = f'<span class="note">{escape(t("empty_answer.remedies.no_reply"))}</span>'
        return [stopped, *["–"] * (len(SHOWN) - 1), "–", escape(page.t("remedies.took", seconds=f"{seconds:.2f}"))]
    cells = []
    for domain in SHOWN:
        reply = one.replies[DOMAINS.index(domain)]
        text = f'<div class="text">{answer_html(story_runs.reply_to(domain, reply), most=2, trim=True)}</div>'
        if _revealed():
            loss = one.losses[domain]
            written = "NaN" if np.isnan(loss) else four(loss)
            text += f'<div class="note">{escape(t("empty_answer.remedies.loss", loss=written))}</div>'
        cells.append(text)
    size = page.t("remedies.size", bytes=f"{one.bytes:,}", tokens=one.tokens)
    took = page.t("remedies.took_on", seconds=f"{seconds:.2f}", device=name_of(one.computed_on))
    return [*cells, escape(size), escape(took)]
