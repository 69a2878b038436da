"""*Show me the code*: a snippet per page, filled with the page's own values, and really run to show its output."""

from __future__ import annotations

import ast
import string
from collections.abc import Mapping
from typing import Any

from nvfp4viz.errors import CONTENT


class Written(str):
    """A text of any characters, as a reader wrote it: `literal` escapes whatever could end the literal."""


def fill(page_id: str, values: Mapping[str, Any]) -> str:
    """The page's snippet with ``$name`` replaced by the Python literal of each value."""
    template = (CONTENT / "code" / f"{page_id}.py").read_text(encoding="utf-8")
    return string.Template(template).substitute({name: literal(value) for name, value in values.items()})


def literal(value: Any) -> str:
    """How a value is written in Python.  Only numbers, names and lists of them, and a text that is `Written`: nothing
    else may reach :func:`run`.

    >>> literal([1.5, float("nan"), "e2m1"])
    '[1.5, float("nan"), "e2m1"]'
    >>> print(literal(Written('{"a":\\n 1}')))
    (
        '{"a":\\n'
        ' 1}'
    )
    """
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f'float("{value}")'
    if isinstance(value, Written):
        lines = [repr(str(line)) for line in value.splitlines(keepends=True)]
        return "".join(("(\n", *(f"    {line}\n" for line in lines), ")")) if len(lines) > 1 else repr(str(value))
    if isinstance(value, str) and all(c.isalnum() or c in "-_. :/@%+=~," for c in value):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    raise TypeError(f"{type(value).__name__} does not belong in a snippet")


def run(source: str, names: Mapping[str, Any] | None = None) -> str:
    """What the snippet prints.  It is our own text with literals of ours in it, so it runs in this process.

    ``names`` are what the page has already: a snippet's own assignments to them are passed over.
    """
    given = dict(names or {})
    tree = ast.parse(source)
    tree.body = [line for line in tree.body if not _assigns(line, given)]
    lines: list[str] = []

    def show(*parts: object, sep: str = " ") -> None:
        # Not redirect_stdout: that is global, and other learners' sessions print too.
        lines.append(sep.join(map(str, parts)))

    exec(compile(tree, "<snippet>", "exec"), {**given, "print": show, "__name__": "snippet"})
    return "\n".join(lines)


def _assigns(line: ast.stmt, names: Mapping[str, Any]) -> bool:
    return isinstance(line, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id in names for target in line.targets
    )
