"""The command line: ``nvfp4viz audit | show | coverage | inject | repair | diff``, also as ``python -m nvfp4viz``.

stdout carries the report and nothing else; progress goes to stderr, and only where that is a terminal.  Exit code 0:
nothing at or above ``--fail-on``; 1: something was; 2: the source could not be read, or the copy not be written;
64: bad usage; 130: stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nvfp4viz import __version__
from nvfp4viz.cli_words import LANGUAGES, argparse_speaks, cli_words, language_of
from nvfp4viz.errors import CheckpointError, InputError, NvError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvfp4viz.audit.deep import Elsewhere

OK, FOUND, UNREADABLE, USAGE = 0, 1, 2, 64
INTERRUPTED = 130
MOST_RANKS = 65536
# Errors of a checkpoint that are really of the command.
_USAGE_CODES = ("checkpoint.exists", "checkpoint.no-tensor")
# Of `nvfp4viz.checkpoint.FAULTS`, which costs NumPy to ask; a test holds both to each other.
FAULT_IDS = (
    "missing", "zero", "nan", "inf", "negative", "subnormal", "scaled", "constant", "neighbour", "random-bits",
    "reciprocal", "pair-mismatch", "nibble-swap", "gate-up-swap", "block-nan", "block-negative", "exponent-cast",
    "zero-weight", "duplicate-expert",
)  # fmt: skip
FAIL_ON = ("error", "backend", "warn", "never")


class _Parser(argparse.ArgumentParser):
    """argparse exits with 2 for bad usage, which here means an unreadable source."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    language = language_of(given)
    with argparse_speaks(language):
        parser = build_parser(language)
        options = parser.parse_args(given)
        if options.command == "audit" and not options.deep and (options.resume or options.scheduler):
            parser.error(cli_words(language, "audit.only-deep"))
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except NvError as error:
        words = error.text(options.language)
        print("\n".join((words["what"], words["why"], words["next"])), file=sys.stderr)
        unreadable = isinstance(error, CheckpointError) and error.code not in _USAGE_CODES
        return UNREADABLE if unreadable else USAGE
    except KeyboardInterrupt:
        from nvfp4viz.checkpoint.source import is_address

        # Of a folder and of a commit on the hub it is known that they are the same next time.
        lasting = options.source.startswith("hf://") or not is_address(options.source)
        if options.command == "audit" and options.deep and lasting:
            print(cli_words(options.language, "audit.stopped"), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # `nvfp4viz audit … | head` is no error; stdout must not be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def build_parser(language: str = "en") -> argparse.ArgumentParser:
    """All commands and their options, explained in a language."""

    def words(key: str, **values: object) -> str:
        # argparse fills in what stands after a percent sign.
        return cli_words(language, key, **values).replace("%", "%%")

    parser = _Parser(prog="nvfp4viz", description=words("description"))
    parser.add_argument("--version", action="version", version=f"nvfp4viz {__version__}", help=words("version"))
    parser.add_argument("--language", choices=LANGUAGES, default="en", help=words("language"))
    commands = parser.add_subparsers(dest="command", required=True, metavar=words("command"), parser_class=_Parser)

    def command(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        help = words(f"{name}.help")
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        sub.add_argument("source", metavar="SOURCE", help=words("source"))
        sub.add_argument("--revision", metavar="REV", help=words("revision"))
        sub.add_argument("--language", choices=LANGUAGES, default=argparse.SUPPRESS, help=words("language"))
        return sub

    audit = command("audit", _audit)
    audit.add_argument(
        "--format", choices=("text", "json", "html", "md", "csv"), default="text",
        help=words("audit.format"),
    )  # fmt: skip
    audit.add_argument("--output", metavar="FILE", help=words("audit.output"))
    audit.add_argument("--fail-on", choices=FAIL_ON, default="backend", help=words("audit.fail-on"))
    audit.add_argument("--gpu", metavar="sm_NN", help=words("audit.gpu"))
    audit.add_argument("--tp", type=partial(_ranks, language), metavar="N", help=words("audit.tp"))
    audit.add_argument("--ep", type=partial(_ranks, language), metavar="N", help=words("audit.ep"))
    audit.add_argument("--deep", action="store_true", help=words("audit.deep"))
    audit.add_argument("--resume", action="store_true", help=words("audit.resume"))
    audit.add_argument("--scheduler", metavar="ADDRESS", help=words("audit.scheduler"))
    audit.add_argument("--paths", action="store_true", help=words("audit.paths"))
    audit.add_argument("--quiet", action="store_true", help=words("audit.quiet"))

    show = command("show", _show)
    show.add_argument("tensor", metavar="TENSOR", help=words("show.tensor"))

    coverage = command("coverage", _coverage)
    coverage.add_argument("--csv", metavar="FILE", help=words("coverage.csv"))

    inject = command("inject", _inject)
    inject.add_argument("out", metavar="OUT", help=words("inject.out"))
    inject.add_argument("--fault", required=True, metavar="ID", help=words("inject.fault", faults=", ".join(FAULT_IDS)))
    inject.add_argument("--layer", type=int, required=True, help=words("inject.layer"))
    inject.add_argument("--expert", type=int, required=True, help=words("inject.expert"))
    inject.add_argument(
        "--projection", choices=("gate", "up", "gate_up", "down"), required=True, help=words("inject.projection")
    )
    inject.add_argument(
        "--role", choices=("input_scale", "weight_scale_2", "weight_scale", "weight"), help=words("inject.role")
    )
    inject.add_argument("--value", type=float, help=words("inject.value"))
    inject.add_argument("--seed", type=int, default=0, help=words("inject.seed"))

    repair = command("repair", _repair)
    repair.add_argument("out", metavar="OUT", help=words("repair.out"))
    repair.add_argument(
        "--policy", required=True, choices=("peer-max", "layer-max", "constant", "weight-only"),
        help=words("repair.policy"),
    )  # fmt: skip
    repair.add_argument("--value", type=float, help=words("repair.value"))
    repair.add_argument("--suspects", action="store_true", help=words("repair.suspects"))
    repair.add_argument("--deep", action="store_true", help=words("repair.deep"))
    repair.add_argument("--apply", action="store_true", help=words("repair.apply"))

    diff = command("diff", _diff)
    diff.add_argument("other", metavar="OTHER", help=words("diff.other"))
    diff.add_argument("--format", choices=("text", "json"), default="text")
    diff.add_argument("--output", metavar="FILE", help=words("diff.output"))
    return parser


def _audit(options: argparse.Namespace) -> int:
    from nvfp4viz.audit import run_audit, to_json, to_text
    from nvfp4viz.audit.deep_findings import deepen
    from nvfp4viz.audit.report import VERDICTS
    from nvfp4viz.audit.run import without_collector
    from nvfp4viz.checkpoint import inspect
    from nvfp4viz.checkpoint.source import is_address

    gpu = _gpu(options.gpu)
    with _progress(cli_words(options.language, "progress.scales"), options.quiet) as progress, without_collector():
        checkpoint = inspect(options.source, revision=options.revision, progress=progress)
        # An address is shown without its secrets, with or without --paths.
        local = options.paths and not is_address(options.source)
        shown = str(Path(options.source).resolve()) if local else None
        done = run_audit(checkpoint, gpu=gpu, shown_as=shown, tp=options.tp, ep=options.ep)
        if options.deep:
            done = deepen(done, progress=progress, resume=options.resume, elsewhere=_cluster(options))
    report = done.report
    if options.format == "json":
        text = to_json(report)
    elif options.format == "html":
        from nvfp4viz.audit.html import to_html

        text = to_html(done, options.language)
    elif options.format == "md":
        from nvfp4viz.audit.markdown import to_markdown

        text = to_markdown(report, options.language)
    elif options.format == "csv":
        from nvfp4viz.audit.tables import to_csv

        text = to_csv(done.rows())
    else:
        colour = options.output is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
        text = to_text(report, options.language, colour=colour, width=_width())
    _deliver(text, options.output)
    if not any(header.readable for header in done.checkpoint.files):
        return UNREADABLE
    if options.fail_on == "never":
        return OK
    return FOUND if VERDICTS.index(report.verdict) >= VERDICTS.index(options.fail_on) else OK


def _ranks(language: str, text: str) -> int:
    """A number of ranks for argparse."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= MOST_RANKS):
        raise argparse.ArgumentTypeError(cli_words(language, "audit.ranks", most=f"{MOST_RANKS:,}"))
    return int(text)


def _cluster(options: argparse.Namespace) -> Elsewhere | None:
    """What scans shards on a cluster; its workers open the folder by its full path."""
    if options.scheduler is None:
        return None
    from nvfp4viz.audit.cluster import scan_on_cluster
    from nvfp4viz.checkpoint.source import is_address

    place = options.source if is_address(options.source) else str(Path(options.source).resolve())
    if options.revision and place.startswith("hf://"):
        place = f"{place.partition('@')[0]}@{options.revision}"
    return lambda work: scan_on_cluster(options.scheduler, place, work)


def _gpu(text: str | None) -> str | None:
    if text is None:
        return None
    digits = text.lower().removeprefix("sm").removeprefix("_").rstrip("af")
    if not (digits.isdigit() and 2 <= len(digits) <= 3):
        from nvfp4viz.checkpoint.problems import printable

        raise InputError("cli.gpu", gpu=printable(text, 40))
    return f"sm_{digits}"


def _show(options: argparse.Namespace) -> int:
    from nvfp4viz.checkpoint import open_checkpoint, preview_tensor

    with _progress(cli_words(options.language, "progress.headers"), False) as progress:
        checkpoint = open_checkpoint(options.source, revision=options.revision, progress=progress)
    preview = preview_tensor(checkpoint, options.tensor)
    entry = preview.entry
    lang = options.language
    print(_plain(entry.name))
    lines = [
        (cli_words(lang, "show.type"), entry.dtype),
        (cli_words(lang, "show.shape"), str(list(entry.shape))),
        (
            cli_words(lang, "show.file"),
            cli_words(
                lang, "show.place", file=_plain(entry.file), begin=entry.begin, end=entry.end, size=f"{entry.nbytes:,}"
            ),
        ),
    ]
    if preview.slot is not None:
        at = preview.slot
        where = {"layer": at.layer, "expert": at.expert, "projection": at.projection, "role": at.role}
        lines.append((cli_words(lang, "show.slot"), cli_words(lang, "show.at", **where)))
    for label, values in preview.rows:
        told = cli_words(lang, f"show.rows.{label}")
        if label == "scale":
            values = values.replace("block", cli_words(lang, "show.block"))
            values = values.replace("second level", cli_words(lang, "show.second"))
        lines.append((told, values))
    for label, text in lines:
        print(f"  {label:<7} {text}")
    return OK


def _coverage(options: argparse.Namespace) -> int:
    from nvfp4viz.audit import run_audit
    from nvfp4viz.audit.tables import to_csv
    from nvfp4viz.checkpoint import inspect

    with _progress(cli_words(options.language, "progress.scales"), False) as progress:
        done = run_audit(inspect(options.source, revision=options.revision, progress=progress))
    rows = done.rows()
    if options.csv is not None:
        _deliver(to_csv(rows), None if options.csv == "-" else options.csv)
        return OK
    counts: dict[tuple[int, str], dict[str, int]] = {}
    for row in rows:
        at = counts.setdefault((row.layer, row.role), {})
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
    _deliver("\n".join(lines) + "\n", None)
    return OK


def _status(status: str, language: str) -> str:
    """A slot's state; in English the report's own word for scripts."""
    from nvfp4viz.audit.texts import report_words

    if language == "en":
        return status
    if status in ("ok", "not-needed"):
        return cli_words(language, f"coverage.{status}")
    return report_words(language, f"status.{status}")


def _inject(options: argparse.Namespace) -> int:
    from nvfp4viz.checkpoint import FAULTS, inject

    done = inject(
        options.source,
        options.out,
        options.fault,
        layer=options.layer,
        expert=options.expert,
        projection=options.projection,
        role=options.role,
        value=options.value,
        seed=options.seed,
    )
    fault, lang = FAULTS[options.fault], options.language
    for key, names in (("changed", done.changed), ("removed", done.removed)):
        for name in names:
            print(cli_words(lang, f"inject.{key}", tensor=_plain(name)))
    print(cli_words(lang, "inject.files", rewritten=len(done.rewritten), linked=len(done.linked)))
    if not fault.findings:
        print(cli_words(lang, "inject.invisible"))
    else:
        codes = cli_words(lang, "inject.or").join(fault.findings)
        # A number of one's own, or random bits, may be as plausible as what they replace.
        chosen = options.value is not None or options.fault == "random-bits"
        print(cli_words(lang, "inject.deep" if fault.deep else "inject.may" if chosen else "inject.finds", codes=codes))
    return OK


def _repair(options: argparse.Namespace) -> int:
    from nvfp4viz.audit.repair import apply_repair, plan_repair
    from nvfp4viz.audit.terminal import repair_to_text
    from nvfp4viz.audit.texts import report_words
    from nvfp4viz.checkpoint import inspect

    with _progress(cli_words(options.language, "progress.scales"), False) as progress:
        checkpoint = inspect(options.source, revision=options.revision, progress=progress)
        plan = plan_repair(
            checkpoint,
            options.policy,
            value=options.value,
            suspects=options.suspects,
            deep=options.deep,
            progress=progress,
        )
    print(repair_to_text(plan, options.language))
    if plan.is_empty:
        return OK
    if not options.apply:
        print(report_words(options.language, "repair.dry"))
        return OK
    copied = apply_repair(plan, options.out)
    counts = {"rewritten": len(copied.rewritten), "linked": len(copied.linked)}
    print(report_words(options.language, "repair.done", out=_plain(Path(options.out).name), **counts))
    return OK


def _diff(options: argparse.Namespace) -> int:
    from nvfp4viz.audit.diff import diff, diff_to_json
    from nvfp4viz.audit.run import without_collector
    from nvfp4viz.audit.terminal import diff_to_text
    from nvfp4viz.checkpoint import inspect

    with _progress(cli_words(options.language, "progress.scales"), False) as progress, without_collector():
        sides = [
            inspect(source, revision=options.revision if source.startswith("hf://") else None, progress=progress)
            for source in (options.source, options.other)
        ]
        found = diff(*sides)
    text = diff_to_json(found) if options.format == "json" else diff_to_text(found, options.language)
    _deliver(text, options.output)
    if not all(any(header.readable for header in side.files) for side in sides):
        return UNREADABLE
    return OK if found.same else FOUND


def _plain(text: str) -> str:
    from nvfp4viz.checkpoint.problems import printable

    return printable(text, 500)


def _deliver(text: str, output: str | None) -> None:
    """To stdout, or into a file that is whole or not there at all."""
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = Path(output)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise InputError("cli.output", file=path.name, reason=error.strerror or "") from None
    finally:
        partial.unlink(missing_ok=True)


def _width() -> int:
    """Columns of the terminal; a pipe gets a width that reads well in an issue."""
    import shutil

    return shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120


@contextmanager
def _progress(words: str, quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
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


if __name__ == "__main__":
    sys.exit(main())
