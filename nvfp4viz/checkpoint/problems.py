"""What is wrong with files, as data: a code of the audit vocabulary, and a text in each language."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from nvfp4viz.errors import CheckpointError

SEVERITIES = ("info", "warn", "backend", "error")
# Code of a file that a source does not give, and what the source says where there is no such file.
UNREAD = "container.unreadable"
NO_FILE = ("source.not-found", "source.not-a-file", "source.nothing-there")


@dataclass(frozen=True, slots=True)
class ContainerProblem:
    """One thing wrong with one file.

    Attributes
    ----------
    code
        Of the audit vocabulary, such as ``"container.truncated"`` or ``"config.invalid"``.
    severity
        ``"info"``, ``"warn"`` or ``"error"``.
    file
        The file's name inside the source; never a path of this machine.
    text
        Key of its words in ``errors_checkpoint.toml``: the code itself, or the code with one more part
        (``"container.not-safetensors.lfs-pointer"``).
    params
        Values of the text's placeholders; names out of files have been through `printable`.
    tensors
        Names of the tensors concerned, as far as they are known.
    """

    code: str
    severity: str
    file: str
    text: str
    params: dict[str, object] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()

    @property
    def unread(self) -> bool:
        """Nobody knows whether the file is sound: this program could not read it."""
        return self.code == UNREAD and self.text not in NO_FILE

    def error(self) -> CheckpointError:
        """The same as an exception, for callers that cannot go on."""
        return CheckpointError(self.text, **self.params)


def problem(
    text: str,
    file: str,
    params: Mapping[str, object] | None = None,
    *,
    severity: str = "error",
    tensors: tuple[str, ...] = (),
) -> ContainerProblem:
    """Make a problem; its code is the first two parts of ``text``, and ``file`` is always a placeholder.

    >>> problem("container.not-safetensors.zip", "model.bin").code
    'container.not-safetensors'
    """
    code = ".".join(text.split(".")[:2])
    return ContainerProblem(code, severity, file, text, {"file": printable(file), **(params or {})}, tensors)


def from_error(code: str, file: str, error: CheckpointError) -> ContainerProblem:
    """What a source said of one of its files, as a problem with that error's own words.

    ``code`` is for a file that is not there; one that was not given may be sound, and is `UNREAD`.
    """
    code = code if error.code in NO_FILE else UNREAD
    return ContainerProblem(code, "error", file, error.code, {**error.params, "file": printable(file)})


def lost_since(file: str, error: CheckpointError) -> ContainerProblem:
    """A file that was read as far as its header, and not beyond: it is `UNREAD`, whatever became of it."""
    if error.code in NO_FILE:
        # It was there a moment ago.
        error = CheckpointError("source.changed", name=printable(file))
    return from_error(UNREAD, file, error)


def as_written(value: object, limit: int = 160) -> str:
    """A value of a JSON file as the file has it, for messages: a text keeps its quotes, so that "8" is not taken for 8.

    >>> as_written("8"), as_written(8), as_written(None), as_written([True, 0.5])
    ('"8"', '8', 'null', '[true,0.5]')
    """
    return printable(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str), limit)


def system_words(error: BaseException) -> str:
    """Why the system refuses (a full disk, no permission), without the path that its own message would name.

    >>> system_words(PermissionError(13, "Permission denied", "/home/me/model"))
    'Permission denied'
    >>> system_words(ValueError("embedded null byte"))
    'ValueError'
    """
    return getattr(error, "strerror", None) or type(error).__name__


def printable(text: str, limit: int = 160) -> str:
    """Untrusted text made safe for a terminal: no control or direction characters, bounded length.

    >>> printable("a\\x1b[31mred")
    'a\\\\x1b[31mred'
    """
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"
