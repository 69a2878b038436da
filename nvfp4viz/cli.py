"""The command line: ``nvfp4viz audit | show | coverage | inject | repair | diff``, also as ``python -m nvfp4viz``.

stdout carries the report and nothing else; progress goes to stderr, and only where that is a terminal.  Exit code 0:
nothing at or above ``--fail-on``; 1: something was; 2: the source could not be read, or some file of it and nothing was
found in the others, or the copy not be written; 64: bad usage, or stdout could not be written; 130: stopped by Ctrl-C;
143 and 129: by the end of its job or terminal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from nvfp4viz import __version__
from nvfp4viz.cli_output import complain, flush, say, streams
from nvfp4viz.cli_words import LANGUAGES, argparse_speaks, cli_words, language_of
from nvfp4viz.errors import CheckpointError, NvError

OK, UNREADABLE, USAGE, INTERRUPTED = 0, 2, 64, 130
MOST_RANKS = 65536
# Errors of a checkpoint that are really of the command.
_USAGE_CODES = ("checkpoint.exists", "checkpoint.no-tensor", "source.hub-no-revision")
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

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help that cannot be written is no help; argparse says nothing of it."""
        if file is sys.stdout:
            say(message.rstrip("\n"))
        else:
            super()._print_message(message, file)


def main(arguments: Sequence[str] | None = None, loaded: Callable[[], None] = lambda: None) -> int:
    """Run one command; returns the exit code.

    Parameters
    ----------
    arguments
        Words after the program's name; by default this process's.
    loaded
        Called when the command's modules are there and it is about to begin.
    """
    given = sys.argv[1:] if arguments is None else arguments
    language = language_of(given)
    with streams():
        try:
            options = _parsed(given, language)
            language = options.language
            # They bring NumPy, which ``--help`` does without.
            from nvfp4viz import commands
            from nvfp4viz.cli_options import refuse_idle

            refuse_idle(options)
            loaded()
            code: int = commands.RUN[options.command](options)
            flush()
            return code
        except NvError as error:
            words = error.text(language)
            complain("\n".join((words["what"], words["why"], words["next"])))
            unreadable = isinstance(error, CheckpointError) and error.code not in _USAGE_CODES
            return UNREADABLE if unreadable else USAGE
        except KeyboardInterrupt as stop:
            # A command may know more to say than that it stopped.
            complain(cli_words(language, stop.args[0] if stop.args else "stopped"))
            return INTERRUPTED


def _parsed(given: Sequence[str], language: str) -> argparse.Namespace:
    """The words of one command line; argparse answers ``--help`` and bad usage itself, and exits."""
    with argparse_speaks(language):
        parser = build_parser(language)
        try:
            options = parser.parse_args(given)
            if options.command == "audit" and not options.deep and (options.resume or options.scheduler):
                parser.error(cli_words(language, "audit.only-deep"))
        except SystemExit:
            flush()
            raise
    return options


def build_parser(language: str = "en") -> argparse.ArgumentParser:
    """All commands and their options, explained in a language."""

    def words(key: str, **values: object) -> str:
        # argparse fills in what stands after a percent sign.
        return cli_words(language, key, **values).replace("%", "%%")

    parser = _Parser(prog="nvfp4viz", description=words("description"))
    parser.add_argument("--version", action="version", version=f"nvfp4viz {__version__}", help=words("version"))
    parser.add_argument("--language", choices=LANGUAGES, default="en", help=words("language"))
    commands = parser.add_subparsers(dest="command", required=True, metavar=words("command"), parser_class=_Parser)

    def command(name: str) -> argparse.ArgumentParser:
        help = words(f"{name}.help")
        sub = commands.add_parser(name, help=help, description=help)
        # A copy is made of files on this machine; a plan to repair reads others as well.
        key = {"inject": "inject.source", "repair": "repair.source"}.get(name, "source")
        sub.add_argument("source", metavar="SOURCE", help=words(key, source=words("source")))
        if name != "inject":
            sub.add_argument("--revision", metavar="REV", help=words("revision"))
        sub.add_argument("--language", choices=LANGUAGES, default=argparse.SUPPRESS, help=words("language"))
        return sub

    audit = command("audit")
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

    show = command("show")
    show.add_argument("tensor", metavar="TENSOR", help=words("show.tensor"))

    coverage = command("coverage")
    coverage.add_argument("--csv", metavar="FILE", help=words("coverage.csv"))

    inject = command("inject")
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
    inject.add_argument("--seed", type=int, help=words("inject.seed"))

    repair = command("repair")
    repair.add_argument("out", metavar="OUT", help=words("repair.out"))
    repair.add_argument(
        "--policy", required=True, choices=("peer-max", "layer-max", "constant", "weight-only"),
        help=words("repair.policy"),
    )  # fmt: skip
    repair.add_argument("--value", type=float, help=words("repair.value"))
    repair.add_argument("--suspects", action="store_true", help=words("repair.suspects"))
    repair.add_argument("--deep", action="store_true", help=words("repair.deep"))
    repair.add_argument("--apply", action="store_true", help=words("repair.apply"))

    diff = command("diff")
    diff.add_argument("other", metavar="OTHER", help=words("diff.other"))
    diff.add_argument("--format", choices=("text", "json"), default="text", help=words("diff.format"))
    diff.add_argument("--output", metavar="FILE", help=words("diff.output"))
    return parser


def _ranks(language: str, text: str) -> int:
    """A number of ranks for argparse."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= MOST_RANKS):
        raise argparse.ArgumentTypeError(cli_words(language, "audit.ranks", most=f"{MOST_RANKS:,}"))
    return int(text)
