"""What each command does: open, ask the library, write the answer.  `nvfp4viz.cli` reads the words and says the errors.

stdout carries the answer and nothing else; progress goes to stderr, and only where that is a terminal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nvfp4viz.audit import Audit, describe, run_audit, to_json, to_text
from nvfp4viz.audit.backends import known_gpu
from nvfp4viz.audit.deep import Elsewhere, can_resume
from nvfp4viz.audit.deep_findings import deepen
from nvfp4viz.audit.diff import diff, diff_to_json
from nvfp4viz.audit.html import to_html
from nvfp4viz.audit.markdown import to_markdown
from nvfp4viz.audit.repair import apply_repair, plan_repair
from nvfp4viz.audit.report import VERDICTS
from nvfp4viz.audit.run import without_collector
from nvfp4viz.audit.tables import to_csv
from nvfp4viz.audit.terminal import diff_to_text, repair_to_text
from nvfp4viz.audit.texts import report_words
from nvfp4viz.checkpoint import FAULTS, Checkpoint, inspect, open_checkpoint, preview_tensor, printable
from nvfp4viz.checkpoint import inject as inject_fault
from nvfp4viz.checkpoint.copies import check_place
from nvfp4viz.checkpoint.source import is_address
from nvfp4viz.cli_options import is_hub
from nvfp4viz.cli_output import deliver, flush, say
from nvfp4viz.cli_words import cli_words
from nvfp4viz.errors import InputError
from nvfp4viz.serving.selection import GPUS

OK, FOUND, UNREADABLE = 0, 1, 2


def audit(options: argparse.Namespace) -> int:
    """``nvfp4viz audit``."""
    gpu = _gpu(options.gpu)
    with _progress(cli_words(options.language, "progress.scales"), options.quiet) as progress, without_collector():
        checkpoint = inspect(options.source, revision=options.revision, progress=progress)
        # An address is shown without its secrets, with or without --paths.
        local = options.paths and not is_address(options.source)
        shown = str(Path(options.source).resolve()) if local else None
        done = run_audit(checkpoint, gpu=gpu, shown_as=shown, tp=options.tp, ep=options.ep)
        if options.deep:
            try:
                cluster = _cluster(options, checkpoint)
                done = deepen(done, progress=progress, resume=options.resume, elsewhere=cluster)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("audit.stopped" if can_resume(checkpoint) else "stopped") from None
    deliver(_report(done, options), options.output, read_by_programs=options.format != "text")
    if not any(header.readable for header in done.checkpoint.files):
        return UNREADABLE
    if options.fail_on != "never" and VERDICTS.index(done.report.verdict) >= VERDICTS.index(options.fail_on):
        return FOUND
    # A pass is a word about the whole.
    return UNREADABLE if done.checkpoint.unread else OK


def _report(done: Audit, options: argparse.Namespace) -> str:
    if options.format == "json":
        return to_json(done.report)
    if options.format == "html":
        return to_html(done, options.language)
    if options.format == "md":
        return to_markdown(done.report, options.language)
    if options.format == "csv":
        return to_csv(done.rows())
    colour = options.output in (None, "-") and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    # A pipe gets a width that reads well in an issue.
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
    return to_text(done.report, options.language, colour=colour, width=width)


def _cluster(options: argparse.Namespace, checkpoint: Checkpoint) -> Elsewhere | None:
    """What scans shards on a cluster; its workers open the folder by its full path, and a repository at its commit."""
    if options.scheduler is None:
        return None
    from nvfp4viz.audit.cluster import scan_on_cluster

    place = getattr(checkpoint.source, "pinned", options.source)
    if not is_address(place):
        place = str(Path(place).resolve())

    def alone(seconds: float) -> None:
        # Who waits has to know for what, in a job's log as well.
        if not options.quiet:
            told = cli_words(options.language, "progress.no-workers", seconds=f"{seconds:g}")
            print(told, file=sys.stderr, flush=True)

    return lambda work: scan_on_cluster(options.scheduler, place, work, alone)


def _gpu(text: str | None) -> str | None:
    if text is None:
        return None
    digits = text.lower().removeprefix("sm").removeprefix("_").rstrip("af")
    if not (digits.isascii() and digits.isdigit() and 2 <= len(digits) <= 3) or known_gpu(digits) is None:
        raise InputError("cli.gpu", gpu=printable(text, 40), known=", ".join(gpu for gpu in GPUS if gpu[:3] == "sm_"))
    return f"sm_{digits}"


def show(options: argparse.Namespace) -> int:
    """``nvfp4viz show``."""
    with _progress(cli_words(options.language, "progress.headers")) as progress:
        checkpoint = open_checkpoint(options.source, revision=options.revision, progress=progress)
    preview = preview_tensor(checkpoint, options.tensor)
    entry = preview.entry
    lang = options.language
    place = {"file": printable(entry.file, 500), "begin": entry.begin, "end": entry.end, "size": f"{entry.nbytes:,}"}
    lines = [
        (cli_words(lang, "show.type"), entry.dtype),
        (cli_words(lang, "show.shape"), str(list(entry.shape))),
        (cli_words(lang, "show.file"), cli_words(lang, "show.place", **place)),
    ]
    if preview.slot is not None:
        at = preview.slot
        # As `coverage` has it, and the report's page.
        layer = f"{'D' * preview.draft}{at.layer}"
        where = {"layer": layer, "expert": at.expert, "projection": at.projection, "role": at.role}
        lines.append((cli_words(lang, "show.slot"), cli_words(lang, "show.at", **where)))
    for label, values in preview.rows:
        told = cli_words(lang, f"show.rows.{label}")
        if label == "scale":
            values = values.replace("block", cli_words(lang, "show.block"))
            values = values.replace("second level", cli_words(lang, "show.second"))
        lines.append((told, values))
    say(printable(entry.name, 500))
    for label, text in lines:
        say(f"  {label:<7} {text}")
    return OK


def coverage(options: argparse.Namespace) -> int:
    """``nvfp4viz coverage``."""
    with _progress(cli_words(options.language, "progress.scales")) as progress:
        done = run_audit(inspect(options.source, revision=options.revision, progress=progress))
    if not any(header.readable for header in done.checkpoint.files):
        # No list of slots, not even an empty one, can be told from files that nobody could read.
        raise done.checkpoint.problems[0].error()
    rows = done.rows()
    code = UNREADABLE if done.checkpoint.unread else OK
    if options.csv is not None:
        deliver(to_csv(rows), options.csv, read_by_programs=True)
        return code
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        # Draft layers are marked, because their numbers are no layers of the model.
        at = counts.setdefault((f"D{row.layer}" if row.draft else str(row.layer), row.role), {})
        at[row.status] = at.get(row.status, 0) + 1
    lang = options.language
    head = [cli_words(lang, f"coverage.{key}") for key in ("layer", "role", "status")]
    lines = [f"{head[0]:>5}  {head[1]:<15} {head[2]}"]
    for (layer, role), states in counts.items():
        ranked = sorted(states.items(), key=lambda item: item[0] != "ok")
        shown = ", ".join(f"{count} {_status(status, lang)}" for status, count in ranked)
        lines.append(f"{layer:>5}  {role:<15} {shown}")
    if not rows:
        lines = [cli_words(lang, "coverage.none")]
    elif any(row.draft for row in rows):
        lines.append(cli_words(lang, "coverage.drafts"))
    deliver("\n".join(lines) + "\n", None)
    return code


def _status(status: str, language: str) -> str:
    """A slot's state; in English the report's own word for scripts."""
    if language == "en":
        return status
    if status in ("ok", "not-needed"):
        return cli_words(language, f"coverage.{status}")
    return report_words(language, f"status.{status}")


def inject(options: argparse.Namespace) -> int:
    """``nvfp4viz inject``."""
    done = inject_fault(
        options.source,
        options.out,
        options.fault,
        layer=options.layer,
        expert=options.expert,
        projection=options.projection,
        role=options.role,
        value=options.value,
        seed=options.seed or 0,
    )
    fault, lang = FAULTS[options.fault], options.language
    for key, names in (("changed", done.changed), ("removed", done.removed)):
        for name in names:
            say(cli_words(lang, f"inject.{key}", tensor=printable(name, 500)))
    say(cli_words(lang, "inject.files", rewritten=len(done.rewritten), linked=len(done.linked)))
    asked = False
    if not done.findings:
        asked = bool({"scale.outlier", "scale.filled"} & {*fault.findings})
        say(cli_words(lang, "inject.alone" if asked else "inject.invisible"))
    else:
        codes = cli_words(lang, "inject.or").join(done.findings)
        # A number of one's own, or random bits, may be as plausible as what they replace.
        asked = (options.value is not None or options.fault == "random-bits") and "scale.outlier" in done.findings
        deep = fault.deep or done.findings == ("weight.duplicate-expert",)
        say(cli_words(lang, "inject.deep" if deep else "inject.may" if asked else "inject.finds", codes=codes))
    if asked:
        flush()
        # What a rule leaves open, the copy's own audit settles.
        told = cli_words(lang, "inject.and").join(_scale_codes_at(options))
        say(cli_words(lang, "inject.told" if told else "inject.untold", codes=told))
    return OK


def _scale_codes_at(options: argparse.Namespace) -> list[str]:
    """What the audit of a copy says of the scale that a fault was put into."""
    role = options.role or FAULTS[options.fault].roles[0]
    codes = (
        item.code
        for item in run_audit(options.out).report.findings
        if item.code.startswith("scale.") and item.code != "scale.shape"
        if item.role in (role, None) and item.layer in (options.layer, None)
        if item.projection in (options.projection, None) and (item.experts is None or options.expert in item.experts)
    )
    return list(dict.fromkeys(codes))


def repair(options: argparse.Namespace) -> int:
    """``nvfp4viz repair``."""
    with _progress(cli_words(options.language, "progress.scales")) as progress:
        checkpoint = inspect(options.source, revision=options.revision, progress=progress)
        if options.apply:
            # Before hours of a deep scan.
            check_place(checkpoint, options.out)
        plan = plan_repair(
            checkpoint,
            options.policy,
            value=options.value,
            suspects=options.suspects,
            deep=options.deep,
            progress=progress,
        )
    say(repair_to_text(plan, options.language))
    flush()
    if plan.is_empty:
        return OK
    if not options.apply:
        say(report_words(options.language, "repair.dry"))
        return OK
    with _progress(cli_words(options.language, "progress.copy")) as progress:
        copied = apply_repair(plan, options.out, progress=progress)
    counts = {"rewritten": len(copied.rewritten), "linked": len(copied.linked)}
    out = printable(os.path.basename(os.path.abspath(options.out)), 500)
    say(report_words(options.language, "repair.done", out=out, **counts))
    flush()
    if checkpoint.beside:
        say(report_words(options.language, "repair.part"))
        return OK
    # What it is worth, its own audit says: a number by a rule may be far from what a server needs.
    done = run_audit(options.out).report
    worse = [item for item in done.backends if item.outcome not in ("safe", "ignored", "unsupported")]
    said: dict[str, object] = {}
    if worse:
        first = report_words(options.language, f"outcome.{worse[0].outcome}")
        why = describe(worse[0], options.language)[0]
        said = {"count": len(worse), "of": len(done.backends), "backend": worse[0].name, "outcome": first, "why": why}
    say(report_words(options.language, f"repair.{'worse' if worse else 'sound'}", **said))
    # Small weight scales that a backend folds into bytes are the weights' own.
    if options.policy == "constant" and any(not item.text.startswith("why.folded") for item in worse):
        say(report_words(options.language, "repair.worse_constant"))
    return OK


def compare(options: argparse.Namespace) -> int:
    """``nvfp4viz diff``."""
    with _progress(cli_words(options.language, "progress.scales")) as progress, without_collector():
        sides = [
            inspect(source, revision=options.revision if is_hub(source) else None, progress=progress)
            for source in (options.source, options.other)
        ]
        found = diff(sides[0], sides[1])
    text = diff_to_json(found) if options.format == "json" else diff_to_text(found, options.language)
    deliver(text, options.output, read_by_programs=options.format == "json")
    if not all(any(header.readable for header in side.files) for side in sides):
        return UNREADABLE
    return FOUND if found.differs else OK if found.same else UNREADABLE


RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "audit": audit,
    "show": show,
    "coverage": coverage,
    "inject": inject,
    "repair": repair,
    "diff": compare,
}


@contextmanager
def _progress(words: str, quiet: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on stderr where somebody watches; yields what is told how far the work has come."""
    if quiet or os.environ.get("CI") == "true" or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(words, total=None)

        def told(stage: str, done: int, count: int) -> None:
            bars.update(task, description=f"{words}: {stage}", completed=done, total=count)

        yield told
