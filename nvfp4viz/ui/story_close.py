"""The last two steps of the story: the chain from key to token, and the remedies."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np
import streamlit as st

from nvfp4viz.figures.coverage import shown
from nvfp4viz.figures.story import describe_nan_spread, nan_spread, nan_spread_rows
from nvfp4viz.serving import ALLOCATORS
from nvfp4viz.serving.remedies import MARGIN, REMEDIES, judge
from nvfp4viz.serving.sampling import V2_BLOCK
from nvfp4viz.ui import caches, errors, story_runs
from nvfp4viz.ui.i18n import lang, listed, t
from nvfp4viz.ui.numbers import four
from nvfp4viz.ui.pick import pick_one
from nvfp4viz.ui.story import workshop
from nvfp4viz.ui.story_cards import answer_html, draw, table_html, verdict
from nvfp4viz.ui.story_chain import chain_view, f32
from nvfp4viz.ui.story_open import pick_prompt
from nvfp4viz.ui.theme import theme

if TYPE_CHECKING:
    from nvfp4viz.serving.chain import ChainTrace
    from nvfp4viz.serving.remedies import RemedyResult
    from nvfp4viz.ui.lesson import Lesson


def chain(page: Lesson) -> None:
    """Step 4: one route followed through its nine links; what memory held is the reader's choice."""
    view = page.view
    page.prose("chain.lead")
    with st.container(horizontal=True, gap="large"):
        name = pick_prompt(page)
        pick_one(page, "fate", ALLOCATORS, label="chain.fate", texts="fates", wrap=True)
        if view["fate"] == "random":
            st.number_input(page.t("chain.seed"), 0, 999, step=1, width=120, **view.widget("seed"))
    fate = view["fate"]
    build = story_runs.holed(fate, view["seed"])
    found, twin = caches.chain(build, story_runs.FULL, story_runs.prompt(name), story_runs.TOKENS)
    words = {"fate": page.t(f"fates.{fate}"), "prompt": page.t(f"prompts.{name}").lower()}
    if found is None:
        page.finding("chain.finding_clean", **words)
    else:
        page.finding(
            "chain.finding",
            **words,
            token=shown(story_runs.text_of(found.token_id)),
            position=found.position,
            layer=found.layer,
            expert=found.expert,
            outcome=_outcome(page, found, name),
        )
        opened = chain_view(found, twin, key="story.chain", open_link=view["link"], tall=workshop())
        view.put(link=opened)
        if found.token_ids[0] == 0:
            st.caption(page.t("chain.sampler", bound=V2_BLOCK))
    if not workshop():
        _fates(page, name, found)
        _spread(page, name)


def _outcome(page: Lesson, found: ChainTrace, name: str) -> str:
    """What came of it, in one sentence."""
    silent = sum(token == 0 for token in found.token_ids)
    if found.first_nan is not None:
        return page.t("chain.outcome_nan", layer=found.first_nan[1], pads=silent, n=len(found.token_ids))
    healthy = story_runs.run(story_runs.FULL, name)[0]
    if healthy.token_ids == found.token_ids:
        return page.t("chain.outcome_same")
    return page.t("chain.outcome_other", text=_line(found.text), healthy=_line("".join(healthy.tokens)))


def _line(text: str) -> str:
    short = text.replace("<eos>", "")
    return "".join(shown(c) if c != " " else c for c in short[:48]) + ("…" if len(short) > 48 else "")


def _fates(page: Lesson, name: str, found: ChainTrace | None) -> None:
    """The same prompt under every fate, row by row as they are computed."""
    page.heading("chain.fates")
    place = st.empty()
    head = [("", page.t(f"chain.fates_head_{column}")) for column in ("fate", "bits", "nan", "reply", "verdict")]
    rows: list[list[str]] = []
    healthy = story_runs.run(story_runs.FULL, name)[0]
    for fate in ALLOCATORS:
        build = story_runs.holed(fate, page.view["seed"])
        reply, timed = story_runs.run(build, name)
        first = timed.generation.trace.first_bad
        nan = page.t("chain.no_nan") if first is None else page.t("chain.at", token=first[0], layer=first[1])
        state = "silent" if reply.silent else "right" if reply.token_ids == healthy.token_ids else "wrong"
        label = escape(page.t(f"fates.{fate}"))
        slot = "–" if found is None else f32(story_runs.slot_value(build, found.layer, found.expert))
        rows.append(
            [
                f"{f'<b>{label}</b>' if fate == page.view['fate'] else label}"
                f'<div class="note">{escape(page.t(f"fate_notes.{fate}"))}</div>',
                f'<span class="text">{slot}</span>',
                escape(nan),
                f'<span class="text">{answer_html(reply, most=2, trim=True)}</span>',
                verdict(state, page.t(f"chain.outcomes.{state}")),
            ]
        )
        with place:
            draw(table_html(head, rows))
    page.prose("chain.fates_note")


def _spread(page: Lesson, name: str) -> None:
    box = page.expander("chain.spread")
    if not box.open:
        return
    with box:
        generation = story_runs.run(story_runs.holed(page.view["fate"], page.view["seed"]), name)[1].generation
        tokens, fraction = story_runs.nan_of(generation)
        page.figure(
            nan_spread(tokens, fraction, theme=theme(), lang=lang()),
            alt=page.t("chain.spread"),
            finding=describe_nan_spread(tokens, fraction, lang()),
            rows=lambda: nan_spread_rows(tokens, fraction),
        )


def remedies(page: Lesson) -> None:
    """Step 5: every remedy run on the same prompts, then the check that passes the broken file beside the audit."""
    page.prose("remedies.lead")
    results = _run_all(page)
    reference = results["calibrate"]
    verdicts = {name: judge(result, reference) for name, result in results.items()}
    # A remedy that invents a scale may be right here; nothing says that it is elsewhere.
    kinds = {name: "guess" if v == "right" and REMEDIES[name].guesses else v for name, v in verdicts.items()}
    said = []
    for kind in ("right", "guess", "silent", "wrong", "refused"):
        names = [page.t(f"remedies.names.{name}") for name in REMEDIES if kinds[name] == kind]
        if names:
            said.append(page.t(f"remedies.found.{kind}", names=listed(names)))
    page.finding("sentence", text=page.t("remedies.gap").join(said))
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        st.button(
            page.t("remedies.run_again"), icon=":material/refresh:", key="story.again", on_click=caches.forget_remedies
        )
    st.caption(page.t("remedies.loss_note", n=story_runs.LOSS_TEXTS, margin=four(MARGIN)))
    guard = results["load-guard"].refusal
    if guard is not None and not workshop():
        with st.expander(page.t("remedies.guard_title")):
            errors.show(guard, key="guard")
    _two_checks(page)


def _run_all(page: Lesson) -> dict[str, RemedyResult]:
    """Run what is not in the cache; the table grows with each result."""
    bar, place = st.empty(), st.empty()
    broken = story_runs.holed(page.view["fate"], page.view["seed"])
    asked = story_runs.ask()
    results: dict[str, RemedyResult] = {}
    # The calibrated model comes first: the others are judged against it.
    order = ["calibrate", *(name for name in REMEDIES if name != "calibrate")]
    for done, name in enumerate(order):
        label = page.t("remedies.progress", name=page.t(f"remedies.names.{name}"), done=done, all=len(order))
        bar.progress(done / len(order), text=label)
        with errors.passing(bar, place):
            results[name] = caches.remedy(name, broken, story_runs.FULL, asked)
        with place:
            draw(_table(page, results), tall=workshop())
    bar.empty()
    return results


def _table(page: Lesson, results: dict[str, RemedyResult]) -> str:
    head = [("", page.t("remedies.head_remedy")), ("", page.t("remedies.head_verdict"))]
    head += [("", page.t(f"prompts.{name}")) for name in story_runs.PROMPT_IDS]
    rows = [_row_of_none(page)]
    for name in REMEDIES:
        label = _label(page, name)
        if name not in results:
            rows.append([f'<span class="pending">{label}</span>', "", *("" for _ in story_runs.PROMPT_IDS)])
            continue
        result = results[name]
        kind = judge(result, results["calibrate"])
        mark = verdict(kind, page.t(f"verdict.{kind}"))
        if REMEDIES[name].guesses:
            mark += f'<div class="note">≈ {escape(page.t("remedies.guess"))}</div>'
        rows.append([label, mark, *_cells(page, result)])
    return table_html(head, rows)


def _label(page: Lesson, name: str) -> str:
    title, note = (escape(page.t(f"remedies.{part}.{name}")) for part in ("names", "notes"))
    return f'{title}<div class="note">{note}</div>'


def _row_of_none(page: Lesson) -> list[str]:
    """The broken file as it is served: what the remedies are for."""
    build = story_runs.holed(page.view["fate"], page.view["seed"])
    replies = [story_runs.run(build, name)[0] for name in story_runs.PROMPT_IDS]
    mark = verdict("silent", page.t("verdict.silent")) if any(reply.silent for reply in replies) else ""
    cells = [f'<div class="text">{answer_html(reply, most=2, trim=True)}</div>' for reply in replies]
    return [_label(page, "none"), mark, *cells]


def _cells(page: Lesson, result: RemedyResult) -> list[str]:
    """A reply and the domain's loss under it, for each prompt."""
    if result.refusal is not None:
        stopped = f'<span class="note">{escape(page.t("remedies.no_reply"))}</span>'
        return [stopped, *('<span class="note">–</span>' for _ in story_runs.PROMPT_IDS[1:])]
    cells = []
    for name, reply in zip(story_runs.PROMPT_IDS, result.replies, strict=True):
        loss = result.losses.get(name, float("nan"))
        written = "NaN" if np.isnan(loss) else four(loss)
        text = answer_html(story_runs.reply_to(name, reply), most=2, trim=True)
        note = escape(page.t("remedies.loss", loss=written))
        cells.append(f'<div class="text">{text}</div><div class="note">{note}</div>')
    return cells


def _two_checks(page: Lesson) -> None:
    """The naive check passes the file that the audit does not."""
    page.heading("remedies.broken_file")
    naive = caches.naive(story_runs.HOLED)
    report = caches.report(story_runs.HOLED)
    left, right = st.columns(2, gap="medium")
    with left, st.container(border=True, key="story_naive"):
        outcome = page.t("remedies.naive_pass" if naive.passed else "remedies.naive_fail")
        st.markdown(f"**{page.t('remedies.naive_title')}** {outcome}")
        st.caption(page.t("remedies.naive_lead"))
        for step in naive.steps:
            st.markdown("- " + page.t(f"remedies.naive_{step.id}", found=step.found, expected=step.expected))
    with right, st.container(border=True, key="story_audit"):
        outcome = t(f"explorer.verdicts.{report.verdict}")
        st.markdown(f"**{page.t('remedies.audit_title')}** {page.t('remedies.audit_verdict', verdict=outcome)}")
        st.caption(page.t("remedies.audit_lead"))
        from nvfp4viz.audit import describe

        for finding in report.findings[:3]:
            message, _ = describe(finding, lang())
            st.markdown(f"- `{finding.code}` {errors.escape(message)}")
        if len(report.findings) > 3:
            st.markdown("- " + page.t("remedies.audit_more", n=len(report.findings) - 3))
    st.code(f"nvfp4viz audit sample_checkpoints/{story_runs.HOLED}", language="bash")
