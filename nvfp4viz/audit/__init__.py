"""Audit a checkpoint before a server answers 200 with nothing in it.

`audit` returns a `Report` in the shape of the JSON interface ``nvfp4viz.audit/1``; `to_json` and `to_text` write it,
`describe` gives any finding's words in another language, `naive_check` is the check that would not have noticed.
"""

from nvfp4viz.audit.coverage import SlotRow, slot_rows
from nvfp4viz.audit.naive import NaiveCheck, NaiveStep, naive_check
from nvfp4viz.audit.report import BackendForecast, Coverage, Finding, Report, to_json
from nvfp4viz.audit.run import Audit, audit, describe, for_gpu, for_ranks, run_audit
from nvfp4viz.audit.terminal import to_text

__all__ = [
    "Audit",
    "BackendForecast",
    "Coverage",
    "Finding",
    "NaiveCheck",
    "NaiveStep",
    "Report",
    "SlotRow",
    "audit",
    "describe",
    "for_gpu",
    "for_ranks",
    "naive_check",
    "run_audit",
    "slot_rows",
    "to_json",
    "to_text",
]
