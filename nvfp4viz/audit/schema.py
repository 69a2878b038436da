"""JSON Schemas of what the command line writes, made from the records: ``python -m nvfp4viz.audit.schema``.

They stand in ``docs/schemas`` for other people's scripts and CI gates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from nvfp4viz.audit import diff, repair, report
from nvfp4viz.checkpoint.problems import SEVERITIES

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FOLDER = Path(__file__).parents[2] / "docs" / "schemas"
OUTCOMES = ("safe", "degraded", "undefined", "nan", "zero", "load-error", "ignored", "unsupported")
SCOPES = ("none", "experts", "layer", "model")
SCHEMES = ("W4A4", "W4A16", "W4A8", "MXFP4", "MIXED", "UNQUANTISED")
# Numbers that JSON has no form for.
WORDS = ("nan", "inf", "-inf")
_ENUMS: dict[tuple[str, str], tuple[str, ...]] = {
    ("Report", "verdict"): report.VERDICTS,
    ("FormatInfo", "scheme"): SCHEMES,
    ("Finding", "severity"): tuple(SEVERITIES),
    ("BackendForecast", "outcome"): OUTCOMES,
    ("BackendForecast", "scope"): SCOPES,
    ("RepairRecord", "policy"): repair.POLICIES,
}
_VALUES = (
    ("Finding", "value"),
    ("ChangedValue", "a"),
    ("ChangedValue", "b"),
    ("MendedSlot", "old"),
    ("MendedSlot", "new"),
)


def schemas() -> dict[str, dict[str, Any]]:
    """File name and schema of the report, of a repair's record and of a diff."""
    return {
        "audit-1.schema.json": _schema(report.Report, report.SCHEMA, "nvfp4viz audit --format json"),
        "repair-1.schema.json": _schema(repair.RepairRecord, repair.SCHEMA, "nvfp4viz-repair.json"),
        "diff-1.schema.json": _schema(diff.Diff, diff.SCHEMA, "nvfp4viz diff --format json"),
    }


def _schema(record: type, name: str, title: str) -> dict[str, Any]:
    made = msgspec.json.schema(record)
    kinds = made["$defs"]
    kinds[record.__name__]["properties"]["schema"] = {"const": name}
    for (kind, key), allowed in _ENUMS.items():
        if kind in kinds:
            kinds[kind]["properties"][key] = {"enum": list(allowed)}
    if "BackendForecast" in kinds:
        kinds["BackendForecast"]["properties"]["possible"]["items"] = {"enum": list(OUTCOMES)}
    for kind, key in _VALUES:
        if kind in kinds:
            kinds[kind]["properties"][key] = {"anyOf": [{"type": "number"}, {"enum": list(WORDS)}, {"type": "null"}]}
    for kind in kinds.values():
        # The first sentence of the docstring; the rest is written for readers of the code.
        if "description" in kind:
            kind["description"] = " ".join(kind["description"].split("\n\n")[0].split())
    return {"$schema": DIALECT, "title": title, **made}


def text_of(schema: dict[str, Any]) -> str:
    """As it stands in the file."""
    return json.dumps(schema, indent=2) + "\n"


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, schema in schemas().items():
        (FOLDER / file).write_text(text_of(schema), encoding="utf-8")


if __name__ == "__main__":
    main()
