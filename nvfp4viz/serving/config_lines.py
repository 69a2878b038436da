"""Config files as text: read them as a server does, and say which line decided.

`resolve_quantization` works on parsed objects; here its last step is traced back to the line of the text that it
looked at, so that an editor can point there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvfp4viz.errors import ServingError
from nvfp4viz.serving.quant_config import Resolved, RuleStep, resolve_quantization

JsonPath = tuple[str | int, ...]
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
MOST_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class Decision:
    """What the server believes, and where it read the last thing it asked for.

    Attributes
    ----------
    resolved
    step
        The rule's last step: it fired, or this is where it stopped.
    file
        ``"config.json"`` or ``"hf_quant_config.json"``; None for an unquantised model.
    line
        Counted from 1; of the key that decided, or of the object in which that key is absent.
    text
        That line, without the spaces around it.
    absent
        The key that decided is not there, and its absence decided.
    """

    resolved: Resolved
    step: RuleStep
    file: str | None
    line: int | None
    text: str
    absent: bool


def read_configs(config: str, sidecar: str = "") -> Decision:
    """Parse both files and trace the decision.  An empty text is a file that does not exist.

    Raises
    ------
    ServingError
        ``serving.config-long``, ``serving.config-json`` (with line and column), ``serving.config-object``, and what
        `resolve_quantization` refuses.

    >>> found = read_configs('{"quantization_config": {"quant_algo": "NVFP4",\\n "config_groups": {}}}')
    >>> found.resolved.algo, found.step.id, found.line
    ('NVFP4', 'groups-present', 2)
    """
    texts = {"config.json": config, "hf_quant_config.json": sidecar}
    parsed = {name: _parse(name, text) for name, text in texts.items()}
    resolved = resolve_quantization(parsed["config.json"], parsed["hf_quant_config.json"])
    step = resolved.steps[-1]
    if resolved.source is None:
        return Decision(resolved, step, None, None, "", True)
    path = _path_of(step, parsed[resolved.source] or {}, resolved)
    text = texts[resolved.source]
    lines = json_lines(text)
    known = path
    while known not in lines:
        known = known[:-1]
    line = lines[known]
    return Decision(resolved, step, resolved.source, line, text.split("\n")[line - 1].strip(), known != path)


def json_lines(text: str) -> dict[JsonPath, int]:
    """Line, from 1, on which each value of a JSON text begins its key (or, in a list, itself); the whole is ``()``.

    The text must be valid JSON.  Of a repeated key the last one counts, as it does for ``json.loads``.

    >>> json_lines('{"a": [1,\\n 2]}')
    {(): 1, ('a',): 1, ('a', 0): 1, ('a', 1): 2}
    """
    found: dict[JsonPath, int] = {}
    stack: list[str | int] = []  # the key or index that the reader is at, one for each open container
    kinds: list[str] = []
    key_line, waiting = 1, True  # waiting: a value, and not a key, comes next
    line, at = 1, 0
    for token in _TOKEN.finditer(text):
        line += text.count("\n", at, token.start())
        at = token.start()
        sign = token[0]
        if sign == ",":
            if kinds[-1] == "[":
                index = stack[-1]
                assert isinstance(index, int)
                stack[-1] = index + 1
            waiting = kinds[-1] == "["
        elif sign == ":":
            waiting = True
        elif sign in "}]":
            kinds.pop()
            stack.pop()
        elif not waiting:
            stack[-1], key_line = json.loads(sign, strict=False), line
        else:
            in_object = bool(kinds) and kinds[-1] == "{"
            path = tuple(stack)
            if path in found:  # what stood in the earlier value of a repeated key is gone
                for stale in [known for known in found if known[: len(path)] == path]:
                    del found[stale]
            found[path] = key_line if in_object else line
            waiting = False
            if sign in "{[":
                kinds.append(sign)
                stack.append(0 if sign == "[" else "")
                waiting = sign == "["
    return found


def _parse(name: str, text: str) -> Mapping[str, Any] | None:
    if not text.strip():
        return None
    if len(text) > MOST_CHARACTERS:
        raise ServingError("serving.config-long", file=name, characters=len(text), limit=MOST_CHARACTERS)
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ServingError(
            "serving.config-json", file=name, line=error.lineno, column=error.colno, reason=error.msg
        ) from None
    except RecursionError:
        raise ServingError("serving.config-json", file=name, line=1, column=1, reason="nested too deeply") from None
    except ValueError:
        raise ServingError("serving.config-json", file=name, line=1, column=1, reason="a number is too long") from None
    if not isinstance(parsed, dict):
        raise ServingError("serving.config-object", file=name)
    return parsed


def _path_of(step: RuleStep, parsed: Mapping[str, Any], resolved: Resolved) -> JsonPath:
    """Where the step's answer stands."""
    base: JsonPath = ("quantization_config",) if resolved.source == "config.json" else ()
    raw: Any = parsed["quantization_config"] if base else parsed
    if step.id == "file":
        return base
    if step.id in ("shape", "algo", "fields", "algo-exactly-nvfp4"):
        nested = isinstance(raw.get("quantization"), Mapping)
        return (*base, "quantization", "quant_algo") if nested else (*base, "quant_algo")
    groups: JsonPath = (*base, "config_groups")
    if step.id == "groups-present":
        return groups
    named = raw["config_groups"]
    if step.id == "groups-are-objects":
        bad = [name for name, group in named.items() if not isinstance(group, Mapping)]
        return (*groups, bad[0] if bad else next(iter(named)))
    stops = [name for name, group in named.items() if group.get("input_activations") is not None]
    return (*groups, stops[0] if stops else next(iter(named)), "input_activations")
