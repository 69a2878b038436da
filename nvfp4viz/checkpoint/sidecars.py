"""The JSON files beside the shards, and what is said where they are none; see also `index`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from nvfp4viz.checkpoint.problems import ContainerProblem, from_error, problem
from nvfp4viz.checkpoint.sniff import looks_like
from nvfp4viz.checkpoint.source import Source
from nvfp4viz.errors import CheckpointError

SIDE_LIMIT = 64 * 1024 * 1024


def _writable(value: Any) -> Any:
    r"""The same without halves of surrogate pairs (``"\ud800"``), which JSON may name and no file can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class SideFile:
    """A side file's content (None where it could not be used), its size in bytes, and what is wrong with it."""

    content: dict[str, Any] | None
    nbytes: int
    problems: tuple[ContainerProblem, ...] = ()


def read_side_file(
    source: Source, file: str, code: str = "config.invalid", decode: Callable[[bytes], Any] = msgspec.json.decode
) -> SideFile:
    """Read one JSON object; says what the file is where it is none.

    Parameters
    ----------
    code
        ``"config.invalid"``, or ``"container.index-invalid"`` for an index: the texts have the same last parts.
    decode
        The object's bytes to a dict; what raises ``msgspec.DecodeError`` is read by the standard library instead.
    """
    try:
        size = source.size(file)
        if size > SIDE_LIMIT:
            return SideFile(None, 0, (problem(f"{code}.too-large", file, {"size": size, "limit": SIDE_LIMIT}),))
        data = source.read_range(file, 0, size)
    except CheckpointError as error:
        return SideFile(None, 0, (from_error(code, file, error),))
    problems: list[ContainerProblem] = []
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        problems.append(problem(f"{code}.bom", file, severity="warn"))
    kind = looks_like(data[:512])
    if kind is not None and kind != "json":
        suffix = kind if kind in ("lfs-pointer", "html") else "not-json"
        position = {} if suffix == kind else {"line": 1, "column": 1}
        return SideFile(None, size, (*problems, problem(f"{code}.{suffix}", file, position)))
    try:
        # msgspec is the fast reader; the standard one says where a text goes wrong.
        try:
            content: Any = decode(data)
        except msgspec.DecodeError:
            content = _writable(json.loads(data.decode("utf-8")))
    except json.JSONDecodeError as error:
        params = {"line": error.lineno, "column": error.colno}
        return SideFile(None, size, (*problems, problem(f"{code}.not-json", file, params)))
    except (UnicodeDecodeError, RecursionError, ValueError):
        params = {"line": 1, "column": 1}
        return SideFile(None, size, (*problems, problem(f"{code}.not-json", file, params)))
    if not isinstance(content, dict):
        return SideFile(None, size, (*problems, problem(f"{code}.not-an-object", file)))
    return SideFile(content, size, tuple(problems))
