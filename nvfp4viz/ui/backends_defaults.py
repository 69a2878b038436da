"""The part of the page on backends that shows what every GPU takes by itself."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from nvfp4viz.serving import selection_linear as linear
from nvfp4viz.serving import selection_mxfp4 as mx
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.serving.selection import GPUS, MOE, MoeRequest, Selection, select_moe
from nvfp4viz.ui import predict
from nvfp4viz.ui.backends_parts import PAGE, gpus_named

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson

EXPERT_COLUMNS: dict[str, dict[str, Any]] = {
    "w4a4": {},
    "no_flashinfer": {"flashinfer": False},
    "per_token": {"scheme": "W4A4-token"},
    "w4a16": {"scheme": "W4A16"},
}
REACH = {row.enum: row.reach for row in MOE}


def default_rows() -> list[dict[str, str]]:
    """What ``auto`` takes on each GPU: SiLU, one GPU or tensor parallel, nothing optional but FlashInfer."""
    rows = []
    for gpu in GPUS:
        row = {"gpu": gpu}
        for name, fields in EXPERT_COLUMNS.items():
            found = select_moe(MoeRequest(gpu, **fields))
            row[name] = "–" if found.error is not None or found.winner is None else found.winner.enum
        for scheme in linear.LINEAR_SCHEMES:
            row[f"linear_{scheme.lower()}"] = _name(linear.select_linear(linear.LinearRequest(gpu, scheme)))
        for model in mx.MODELS:
            row[model.replace("-", "_")] = _name(mx.select_mxfp4(mx.Mxfp4Request(gpu, model)))
        rows.append(row)
    return rows


def _name(found: Selection) -> str:
    if found.winner is not None:
        return found.winner.enum
    return f"{found.rests_with[0].enum}?" if found.rests_with else "–"


def defaults_part(page: Lesson) -> None:
    """A row for every run of GPUs that behave alike."""
    rows = default_rows()
    with_, without = (_own_scales(rows, column) for column in ("w4a4", "no_flashinfer"))
    if not _where_without_flashinfer(page, rows):
        page.finding("defaults.before", gpus=gpus_named(page, *with_), version=VLLM)
        _table(page, "experts", ("w4a4",), rows)
        return
    page.finding("defaults.seen", gpus=gpus_named(page, *with_), without=gpus_named(page, *without))
    _table(page, "experts", tuple(EXPERT_COLUMNS), rows)
    _table(page, "rest", ("linear_w4a4", "linear_w4a16", "gpt_oss", "deepseek_v4"), rows)
    page.prose("defaults.text", version=VLLM)


def _own_scales(rows: list[dict[str, str]], column: str) -> list[str]:
    """GPUs whose experts read each expert's own scale."""
    return [row["gpu"] for row in rows if REACH.get(row[column]) == "expert"]


def _where_without_flashinfer(page: Lesson, rows: list[dict[str, str]]) -> bool:
    """Asked: who reads each expert's own scale once the package ahead in the list is gone?"""
    multiply = {row.enum: row.multiplies for row in MOE}
    places = {
        "nowhere": [],
        "same": _own_scales(rows, "w4a4"),
        "codes": [row["gpu"] for row in rows if multiply.get(row["w4a4"]) == "fp4"],
        "everywhere": [row["gpu"] for row in rows],
    }
    found = _own_scales(rows, "no_flashinfer")
    more = [gpu for gpu in found if gpu not in places["same"]]
    (own,) = (row.enum for row in MOE if row.reach == "expert")
    return predict.ask(
        f"{PAGE}.predict.uninstalled",
        tuple(places),
        answer=next(option for option, gpus in places.items() if gpus == found),
        same=gpus_named(page, *places["same"]),
        codes=gpus_named(page, *places["codes"]),
        more=gpus_named(page, *more),
        own=own,
    )


def _table(page: Lesson, name: str, columns: tuple[str, ...], rows: list[dict[str, str]]) -> None:
    page.heading(f"defaults.{name}")
    lines = []
    for _, alike in groupby(rows, key=lambda row: [row[column] for column in columns]):
        group = list(alike)
        cells = [
            _marked(page, column, group[0][column]) if column in EXPERT_COLUMNS else group[0][column]
            for column in columns
        ]
        lines.append((gpus_named(page, *(row["gpu"] for row in group)), *cells))
    page.table(("gpu", *columns), lines)


def _marked(page: Lesson, column: str, enum: str) -> str:
    if enum == "–":
        return page.t("defaults.refused")
    read = page.t("short.token" if column == "per_token" else f"short.{REACH[enum]}")
    return page.t("defaults.cell", enum=enum, read=read)
