"""Where answers go: to stdout, or into a file that is whole or not there at all, and that is none of the checkpoint's.

What is written may be refused: by a full disk, or because a script has closed stdout.  The command then ends with a
sentence as for bad usage, never with 1, which means that something was found.  Who stops reading (``| head``) has seen
enough, and the exit code says what it says to others.  Light: NumPy comes with errors only.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nvfp4viz.errors import InputError

# What loaders, or people, take for a part of a checkpoint when it lies in its folder.
_BELONGS = re.compile(
    r".+\.(safetensors|bin|pt|pth|gguf|ckpt|model|tiktoken|jinja|py)|.*index\.json|.*config\.json"
    r"|(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|nvfp4viz-repair|readme|license)(\.\w+)?",
    re.IGNORECASE,
)


class _Closed(io.TextIOBase):
    """Stands for the stdout that a shell has closed (``>&-``), for which Python has None."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


@contextmanager
def streams() -> Iterator[None]:
    """stdout and stderr while one command runs: both there, and in the end nothing in them that cannot be written.

    Python would try again as it ends, say so in its own words and exit with 120.
    """
    known = sys.stdout, sys.stderr
    # Nor does a file that is opened next get the free number that others take for stdout's.
    with open(os.devnull, "w") as nowhere:
        if sys.stdout is None:
            sys.stdout = _Closed()
        if sys.stderr is None:
            sys.stderr = nowhere
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError):
                    with suppress(OSError, ValueError):
                        os.dup2(nowhere.fileno(), stream.fileno())
            sys.stdout, sys.stderr = known


def say(text: str) -> None:
    """Write lines to stdout.

    Raises
    ------
    InputError
        ``cli.stdout``.
    """
    with _refusals():
        sys.stdout.write(f"{text}\n")


def flush() -> None:
    """Send off what was said; raises as `say`."""
    with _refusals():
        sys.stdout.flush()


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # What is left, and all that follows, goes nowhere.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    except OSError as error:
        from nvfp4viz.checkpoint.problems import system_words

        raise InputError("cli.stdout", reason=system_words(error)) from None


def complain(text: str) -> None:
    """Write lines to stderr, as far as they can be written: the exit code says it too."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def refuse_own_files(output: str | None, sources: Iterable[str]) -> None:
    """Look at where a report is to go, before it is made.

    Raises
    ------
    InputError
        ``cli.output-weights`` for a name of weights, ``cli.output-source`` for a file of a checkpoint that is read.
    """
    if output in (None, "-"):
        return
    path = Path(os.path.realpath(str(output)))
    if path.suffix == ".safetensors":
        raise InputError("cli.output-weights", file=_shown(path))
    if any(_is_of(path, Path(source)) for source in sources):
        raise InputError("cli.output-source", file=_shown(path))


def _is_of(path: Path, source: Path) -> bool:
    """Is this the source, or a file of its folder that belongs to the checkpoint, by whatever link it is reached?"""
    folder = source if source.is_dir() else source.parent
    with suppress(OSError, ValueError):
        if path.parent.samefile(folder) and _BELONGS.fullmatch(path.name):
            return True
    with suppress(OSError, ValueError):
        own = [folder / name for name in os.listdir(folder) if _BELONGS.fullmatch(name)]
        return path.exists() and any(item.exists() and path.samefile(item) for item in (source, *own))
    return False


def deliver(text: str, output: str | None, read_by_programs: bool = False) -> None:
    """To stdout, or into a file that is whole or not there at all.

    Files, and what programs read, are UTF-8 whatever the terminal's encoding is.

    Raises
    ------
    InputError
        ``cli.output``; and as `say`.
    """
    if output in (None, "-"):
        if read_by_programs and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        with _refusals():
            sys.stdout.write(text)
            sys.stdout.flush()
        return
    from nvfp4viz.checkpoint.problems import system_words

    # A link stays a link to the new content.
    path = Path(os.path.realpath(str(output)))
    partial = path.with_name(f".{path.name[:40]}.partial-{os.getpid()}")
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            # A device or a pipe is written to, not replaced by a file.
            path.write_text(text, encoding="utf-8")
            return
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except (OSError, ValueError) as error:
        raise InputError("cli.output", file=_shown(path), reason=system_words(error)) from None
    finally:
        # It may be that it could not be made either.
        with suppress(OSError, ValueError):
            partial.unlink(missing_ok=True)


def _shown(path: Path) -> str:
    from nvfp4viz.checkpoint import printable

    return printable(path.name)
