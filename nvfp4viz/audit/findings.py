"""Make findings, and put them in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from nvfp4viz.audit.report import VERDICTS, Finding, Value, json_value
from nvfp4viz.audit.texts import id_list, words
from nvfp4viz.checkpoint import CanonicalView
from nvfp4viz.checkpoint.dialects.per_expert import PROJECTION_ORDER, ROLES
from nvfp4viz.checkpoint.problems import printable

# A finding shows this many names; the count says how many there are.
NAMES = 3


def make(
    code: str,
    severity: str,
    *,
    text: str | None = None,
    role: str | None = None,
    layer: int | None = None,
    projection: str | None = None,
    experts: tuple[int, ...] | None = None,
    tensors: Iterable[str] = (),
    count: int | None = None,
    value: Any = None,
    fill: Mapping[str, Any] | None = None,
) -> Finding:
    """One finding; ``text`` defaults to the code, ``count`` to the number of tensors.

    Every field is also a placeholder of the text; ``fill`` has further ones, and wins.
    """
    names = tuple(tensors)
    shown = tuple(printable(name, 300) for name in names[:NAMES])
    number: Value = None if value is None else json_value(value)
    filled = {
        "role": role or "",
        "layer": "" if layer is None else layer,
        "projection": projection or "",
        "experts": id_list(experts or ()),
        "tensor": shown[0] if shown else "",
        "count": len(names) if count is None else count,
        "value": "" if number is None else number,
        **safe_words(fill or {}),
    }
    message, advice = words(text or code, filled)
    total = len(names) if count is None else count
    return Finding(
        code, severity, role, layer, projection, experts, shown, total, number, message, advice, text or code, filled
    )


def safe_words(fill: Mapping[str, Any]) -> dict[str, Any]:
    """Placeholders without control characters: names in them come out of files that nobody vouches for.

    >>> safe_words({"tensor": "a\\x1b[31mred", "slots": 2})
    {'tensor': 'a\\\\x1b[31mred', 'slots': 2}
    """
    return {key: printable(value, 500) if isinstance(value, str) else value for key, value in fill.items()}


def with_drafts_named(findings: Iterable[Finding], view: CanonicalView) -> list[Finding]:
    """The same findings, of which those about draft (MTP) layers say so; their numbers are no layers of the model."""
    out = []
    for item in findings:
        layers = {item.layer} if item.layer is not None else set(item.params.get("numbers", ()))
        draft = all(map(view.is_draft, layers)) if layers else item.text == "draft.unquantised"
        if (draft or item.text.endswith(".draft")) and not item.draft and item.tower is None:
            params = {**item.params, "draft": True}
            message, advice = words(item.text, params)
            item = msgspec.structs.replace(item, message=message, advice=advice, params=params, draft=True)
        out.append(item)
    return out


def of_tower(item: Finding, tower: str) -> Finding:
    """The same finding, about experts of another tower: it says so, for its layer is none of the model's."""
    params = {**item.params, "tower": printable(tower, 200)}
    message, advice = words(item.text, params)
    return msgspec.structs.replace(item, message=message, advice=advice, params=params, tower=tower)


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Worst first, then by layer, code, role and projection."""

    def key(item: Finding) -> tuple[Any, ...]:
        projections = (*PROJECTION_ORDER, item.projection)
        roles = (*ROLES, item.role)
        return (
            -VERDICTS.index(item.severity),
            -1 if item.layer is None else item.layer,
            item.code,
            roles.index(item.role),
            projections.index(item.projection),
            item.experts or (),
        )

    return tuple(sorted(findings, key=key))
