"""The command line: ``nvfp4viz audit | show | coverage | inject | repair | diff``, also as ``python -m nvfp4viz``.

stdout carries the report and nothing else; progress goes to stderr, and only where that is a terminal.  Exit code 0:
nothing at or above ``--fail-on``; 1: something was; 2: the source could not be read; 64: bad usage.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nvfp4viz import __version__
from nvfp4viz.errors import CheckpointError, InputError, NvError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvfp4viz.audit.deep import Elsewhere

OK, FOUND, UNREADABLE, USAGE = 0, 1, 2, 64
INTERRUPTED = 130
# Errors of a checkpoint that are really of the command.
_USAGE_CODES = ("checkpoint.exists", "checkpoint.no-tensor")
FAIL_ON = ("error", "backend", "warn", "never")


SOURCE = "a folder, a .safetensors file, an *.index.json, http(s)://… of one of these, or hf://owner/name[@revision]"


class _Parser(argparse.ArgumentParser):
    """argparse exits with 2 for bad usage, which here means an unreadable source."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command == "audit" and not options.deep and (options.resume or options.scheduler):
        parser.error("--resume and --scheduler belong to --deep")
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except NvError as error:
        words = error.text(options.language)
        print("\n".join((words["what"], words["why"], words["next"])), file=sys.stderr)
        unreadable = isinstance(error, CheckpointError) and error.code not in _USAGE_CODES
        return UNREADABLE if unreadable else USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # `nvfp4viz audit … | head` is no error; stdout must not be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = _Parser(
        prog="nvfp4viz", description="Check an NVFP4 mixture-of-experts checkpoint, or break a copy of it."
    )
    parser.add_argument("--version", action="version", version=f"nvfp4viz {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        sub.add_argument("source", metavar="SOURCE", help=SOURCE)
        sub.add_argument("--revision", metavar="REV", help="of a repository on the hub: a branch, a tag or a commit")
        sub.add_argument("--language", choices=("en", "zh"), default="en", help="of messages (default: en)")
        return sub

    audit = command("audit", _audit, "look for missing and unusable scales, and say which backends suffer")
    audit.add_argument(
        "--format", choices=("text", "json", "html", "md", "csv"), default="text",
        help="html is one file, md is for an issue, csv has one row a slot",
    )  # fmt: skip
    audit.add_argument("--output", metavar="FILE", help="write the report there instead of stdout")
    audit.add_argument("--fail-on", choices=FAIL_ON, default="backend", help="exit 1 from here on (default: backend)")
    audit.add_argument("--gpu", metavar="sm_NN", help="say which backend vLLM picks there by itself")
    audit.add_argument("--tp", type=_ranks, metavar="N", help="check where N tensor-parallel ranks cut the experts")
    audit.add_argument("--ep", type=_ranks, metavar="N", help="check how N expert-parallel ranks share the experts")
    audit.add_argument("--deep", action="store_true", help="read every packed code and block scale too")
    audit.add_argument(
        "--resume", action="store_true", help="with --deep: go on where a stopped scan of these files was"
    )
    audit.add_argument("--scheduler", metavar="ADDRESS", help="with --deep: spread the shards over a Dask cluster")
    audit.add_argument("--paths", action="store_true", help="name the source with its full path in the report")
    audit.add_argument("--quiet", action="store_true", help="no progress")

    show = command("show", _show, "one tensor: type, shape, place, and the values of its first block")
    show.add_argument("tensor", metavar="TENSOR", help="its full name")

    coverage = command("coverage", _coverage, "status of every layer, expert, projection and role")
    coverage.add_argument("--csv", metavar="FILE", help="one row a slot; - for stdout")

    inject = command("inject", _inject, "write a copy with one fault in it; the source is not changed")
    inject.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
    inject.add_argument("--fault", required=True, metavar="ID")
    inject.add_argument("--layer", type=int, required=True)
    inject.add_argument("--expert", type=int, required=True)
    inject.add_argument("--projection", choices=("gate", "up", "gate_up", "down"), required=True)
    inject.add_argument("--role", choices=("input_scale", "weight_scale_2", "weight_scale", "weight"))
    inject.add_argument("--value", type=float)
    inject.add_argument("--seed", type=int, default=0)

    repair = command("repair", _repair, "mend activation scales on a copy; without --apply, say what would change")
    repair.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
    repair.add_argument(
        "--policy", required=True, choices=("peer-max", "layer-max", "constant", "weight-only"),
        help="the largest of the layer's and projection's other experts, of the layer's, a number, or no activation "
        "scales at all (the only one that guesses nothing)",
    )  # fmt: skip
    repair.add_argument("--value", type=float, help="of the policy constant, as the file stores it (default: 1.0)")
    repair.add_argument("--suspects", action="store_true", help="also replace values that only look wrong")
    repair.add_argument("--deep", action="store_true", help="look into packed codes and block scales first")
    repair.add_argument("--apply", action="store_true", help="write the copy")

    diff = command("diff", _diff, "what two checkpoints do not share; exit code 1 where they differ")
    diff.add_argument("other", metavar="OTHER", help="the other checkpoint, given like the first")
    diff.add_argument("--format", choices=("text", "json"), default="text")
    diff.add_argument("--output", metavar="FILE", help="write there instead of stdout")
    return parser


def _audit(options: argparse.Namespace) -> int:
    from nvfp4viz.audit import run_audit, to_json, to_text
    from nvfp4viz.audit.deep_findings import deepen
    from nvfp4viz.audit.report import VERDICTS
    from nvfp4viz.checkpoint import inspect
    from nvfp4viz.checkpoint.source import is_address

    gpu = _gpu(options.gpu)
    with _progress("reading headers and scales", options.quiet) as progress, _without_collector():
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


def _ranks(text: str) -> int:
    """A number of ranks for argparse."""
    number = int(text)
    if not 1 <= number <= 65536:
        raise ValueError
    return number


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

    with _progress("reading headers", False) as progress:
        checkpoint = open_checkpoint(options.source, revision=options.revision, progress=progress)
    preview = preview_tensor(checkpoint, options.tensor)
    entry = preview.entry
    print(_plain(entry.name))
    print(f"  type    {entry.dtype}")
    print(f"  shape   {list(entry.shape)}")
    print(f"  file    {_plain(entry.file)}, bytes {entry.begin}–{entry.end} ({entry.nbytes:,})")
    if preview.slot is not None:
        at = preview.slot
        print(f"  slot    layer {at.layer}, expert {at.expert}, {at.projection}, {at.role}")
    for label, values in preview.rows:
        print(f"  {label:<7} {values}")
    return OK


def _coverage(options: argparse.Namespace) -> int:
    from nvfp4viz.audit import run_audit
    from nvfp4viz.audit.tables import to_csv
    from nvfp4viz.checkpoint import inspect

    with _progress("reading headers and scales", False) as progress:
        done = run_audit(inspect(options.source, revision=options.revision, progress=progress))
    rows = done.rows()
    if options.csv is not None:
        _deliver(to_csv(rows), None if options.csv == "-" else options.csv)
        return OK
    counts: dict[tuple[int, str], dict[str, int]] = {}
    for row in rows:
        at = counts.setdefault((row.layer, row.role), {})
        at[row.status] = at.get(row.status, 0) + 1
    lines = [f"{'layer':>5}  {'role':<15} status"]
    for (layer, role), states in counts.items():
        shown = ", ".join(f"{count} {status}" for status, count in sorted(states.items(), key=lambda s: s[0] != "ok"))
        lines.append(f"{layer:>5}  {role:<15} {shown}")
    if not rows:
        lines = ["no routed experts with per-expert names"]
    _deliver("\n".join(lines) + "\n", None)
    return OK


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
    fault = FAULTS[options.fault]
    for word, names in (("changed", done.changed), ("removed", done.removed)):
        for name in names:
            print(f"{word} {_plain(name)}")
    print(f"rewrote {len(done.rewritten)} files, linked or copied {len(done.linked)}")
    if not fault.findings:
        print("no check of the files alone can see this fault")
    else:
        deep = " (needs the weights, not only the scales)" if fault.deep else ""
        print(f"the audit should report {' or '.join(fault.findings)}{deep}")
    return OK


def _repair(options: argparse.Namespace) -> int:
    from nvfp4viz.audit.repair import apply_repair, plan_repair
    from nvfp4viz.audit.terminal import repair_to_text
    from nvfp4viz.audit.texts import report_words
    from nvfp4viz.checkpoint import inspect

    with _progress("reading headers and scales", False) as progress:
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
    from nvfp4viz.audit.terminal import diff_to_text
    from nvfp4viz.checkpoint import inspect

    with _progress("reading headers and scales", False) as progress, _without_collector():
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
def _without_collector() -> Iterator[None]:
    """One report, and then the process ends: walking half a million records again and again is a tenth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
