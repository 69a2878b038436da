"""The part of the page on backends that shows what every GPU takes by itself."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from nvfp4viz.serving import selection_linear as linear
from nvfp4viz.serving import selection_mxfp4 as mx
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.serving.selection import GPUS, MOE, MoeRequest, Selection, select_moe
from nvfp4viz.ui.backends_parts import gpus_named

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson

EXPERT_COLUMNS: dict[str, dict[str, Any]] = {
    "w4a4": {},
    "no_flashinfer": {"flashinfer": False},
    "per_token": {"scheme": "W4A4-token"},
    "w4a16": {"scheme": "W4A16"},
}


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
    reach = {row.enum: row.reach for row in MOE}
    of_expert = [row["gpu"] for row in rows if reach.get(row["w4a4"]) == "expert"]
    without = [row["gpu"] for row in rows if reach.get(row["no_flashinfer"]) == "expert"]
    page.finding("defaults.seen", gpus=gpus_named(page, *of_expert), without=gpus_named(page, *without))
    for name, columns in (
        ("experts", tuple(EXPERT_COLUMNS)),
        ("rest", ("linear_w4a4", "linear_w4a16", "gpt_oss", "deepseek_v4")),
    ):
        page.heading(f"defaults.{name}")
        lines = []
        for _, alike in groupby(rows, key=lambda row: [row[column] for column in columns]):
            group = list(alike)
            cells = [
                _marked(page, column, group[0][column], reach) if name == "experts" else group[0][column]
                for column in columns
            ]
            lines.append((gpus_named(page, *(row["gpu"] for row in group)), *cells))
        page.table(("gpu", *columns), lines)
    page.prose("defaults.text", version=VLLM)


def _marked(page: Lesson, column: str, enum: str, reach: dict[str, str]) -> str:
    if enum == "–":
        return page.t("defaults.refused")
    read = page.t("short.token" if column == "per_token" else f"short.{reach[enum]}")
    return page.t("defaults.cell", enum=enum, read=read)
