"""Rows as CSV or JSON, made when somebody downloads them."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from streamlit.runtime.scriptrunner import add_script_run_ctx, get_script_run_ctx

Rows = Sequence[Mapping[str, Any]]


def about(of: Mapping[str, Any], rows: Rows) -> list[dict[str, Any]]:
    """Rows that say what they are about: the settings behind them, in front of each row's own columns.

    A file is read long after the page is closed, and its name does not tell.

    >>> about({"layer": 2}, [{"expert": 0, "error": 0.5}])
    [{'layer': 2, 'expert': 0, 'error': 0.5}]
    """
    taken = of.keys() & rows[0].keys() if rows else ()
    assert not taken, f"the rows have columns of these names: {sorted(taken)}"
    return [{**of, **row} for row in rows]


def to_csv(rows: Rows) -> bytes:
    """UTF-8 with a byte-order mark (Excel reads Chinese), non-finite numbers as ``nan`` and ``inf``.

    A text that a spreadsheet would take for a formula gets a leading quote.

    >>> to_csv([{"code": 1, "name": "=1+1"}]).decode("utf-8-sig").splitlines()
    ['code,name', "1,'=1+1"]
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(rows[0]) if rows else []
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(row[name]) for name in names])
    return out.getvalue().encode("utf-8-sig")


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def to_json(rows: Rows) -> bytes:
    """Valid JSON: NaN and infinities become the strings ``"nan"``, ``"inf"``, ``"-inf"``.

    >>> to_json([{"x": float("nan")}])
    b'[\\n  {\\n    "x": "nan"\\n  }\\n]'
    """
    return json.dumps([dict(row) for row in map(_finite, rows)], ensure_ascii=False, indent=2).encode()


def _finite(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


KINDS = (("csv", to_csv, "text/csv"), ("json", to_json, "application/json"))


def as_shown(make: Callable[[], bytes]) -> Callable[[], bytes]:
    """``make``, reading the settings of the session that calls this.

    Streamlit runs a download's function in a thread that belongs to no session: every setting would read there as its
    default, and the file would hold another state than the page.  What ``make`` would draw is dropped.
    """
    session = get_script_run_ctx()
    if session is None:
        return make
    silent = replace(session, _enqueue=lambda message: None)

    def made() -> bytes:
        with ThreadPoolExecutor(1, "download", add_script_run_ctx, (None, silent)) as thread:
            return thread.submit(make).result()

    return made
