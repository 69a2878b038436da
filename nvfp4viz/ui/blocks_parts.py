"""The parts of the page on blocks in a GEMM; the page itself chooses one."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from nvfp4viz.figures import blocks as figures
from nvfp4viz.formats import BLOCK, offset_8x4, offset_128x4, offset_linear, scale_at, swizzled_size
from nvfp4viz.quant import grouping
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.ui import blocks_tensor, caches, errors, predict
from nvfp4viz.ui.export import about
from nvfp4viz.ui.i18n import lang
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import exact, near, percent
from nvfp4viz.ui.pick import pick_expert, pick_one
from nvfp4viz.ui.swizzle_map import LAYOUTS, swizzle_map
from nvfp4viz.ui.theme import theme

PAGE = "blocks"
PARTS = ("inner", "error", "shapes", "swizzle")
DATA = ("outliers", "tiny_moe", "checkpoint")
ASKED = 40.0
"""Size of the outliers that the prediction is about."""
K_STEP = 32
"""K comes in steps that NVFP4 and MXFP4 can both divide."""
TINY_MOE = caches.Build("tiny-moe-bf16", backend="bf16")
_CHARACTERS = 96


# ------------------------------------------------------------------ the inner loop


def inner_part(page: Lesson) -> None:
    """One output: its products along K and the scales in its sum; the other groupings' once they are asked for."""
    view = page.view
    record = figures.inner_sum(view["m"], view["n"])
    revealed = _how_many_scales(record)
    stage, side = page.stage()
    with side:
        pick_one(page, "along", grouping.GROUPINGS, label="inner.along", texts="along")
        left, right = st.columns(2)
        left.number_input(page.t("inner.m"), 0, figures.INNER_ROWS - 1, **view.widget("m"))
        right.number_input(page.t("inner.n"), 0, figures.INNER_ROWS - 1, **view.widget("n"))
        runs = record.runs[view["along"]]
        page.finding(
            f"inner.seen.{view['along']}",
            scales=len(runs),
            products=figures.INNER_K,
            run=runs[0].stop - runs[0].start,
            total=_sum(record.total(view["along"])),
        )
        page.glossary("block_scale", "partial_sum", "gemm")
    with stage:
        page.figure(
            figures.inner_figure(
                record,
                view["along"],
                shown=grouping.GROUPINGS if revealed else (view["along"],),
                theme=theme(),
                lang=lang(),
            ),
            alt=page.t("inner.alt"),
            finding=figures.describe_inner(record, lang()) if revealed else page.t("inner.before"),
            rows=lambda: figures.run_rows(record, view["along"]),
        )
    if revealed:
        page.prose("inner.text", block=BLOCK)
    if len(runs) <= BLOCK:
        page.table(
            (">run", ">dot", ">scale", ">term"),
            [
                (f"{r.start}–{r.stop - 1}", exact(float(r.dot)), exact(float(r.scale)), exact(float(r.term)))
                for r in runs
            ],
        )


def inner_rows(page: Lesson) -> list[dict[str, object]]:
    """The runs of the chosen output and grouping as rows."""
    view = page.view
    of = {"m": view["m"], "n": view["n"], "grouping": view["along"]}
    return about(of, figures.run_rows(figures.inner_sum(view["m"], view["n"]), view["along"]))


def _sum(total: float) -> str:
    """As exact as the terms in the table below it: they add up to it."""
    return exact(total) if float(np.float32(total)) == total else near(total)


def _how_many_scales(record: figures.InnerSum) -> bool:
    """Asked: how many scales stand in one output's sum if neighbours in a column share them?"""
    count = {along: len(runs) for along, runs in record.runs.items()}
    answers = {count["k"]: "same", count["tile"]: "some", figures.INNER_K: "each"}
    return predict.ask(
        f"{PAGE}.predict.scales",
        ("same", "some", "each"),
        answer=answers[count["rows"]],
        block=BLOCK,
        products=figures.INNER_K,
        long=figures.INNER_K // count["tile"],
        **count,
    )


# ------------------------------------------------------------------ what it costs


@st.cache_resource(max_entries=16, show_spinner=False)
def outlier_products(size: float) -> tuple[grouping.GroupedProduct, ...]:
    """The GEMM with outlier channels under every grouping."""
    return grouping.compare_grouping(*figures.outlier_pair(size))


class _Watch:
    """Experts that keep what enters them, layer by layer."""

    def __init__(self, experts: Any) -> None:
        self.experts = experts
        self.inputs: dict[int, np.ndarray] = {}

    def __call__(self, layer: int, x: np.ndarray, routing: Any) -> Any:
        self.inputs[layer] = np.array(x)
        return self.experts(layer, x, routing)


@st.cache_resource(max_entries=1, show_spinner=False)
def _inputs() -> dict[int, np.ndarray]:
    """What enters tiny-moe's experts while it reads news: a multiple of sixteen tokens a layer, ``(T, H)`` BF16."""
    from nvfp4viz.model import Tokenizer, corpus

    served = caches.served(TINY_MOE)
    text = "\n".join(corpus.sample("news", 1, 4))[:_CHARACTERS]
    watch = _Watch(served.experts)
    served.model.forward(Tokenizer().encode(text), watch)
    return {layer: x[: len(x) // BLOCK * BLOCK] for layer, x in watch.inputs.items()}


@st.cache_resource(max_entries=64, show_spinner=False)
def tiny_moe_products(layer: int, expert: int) -> tuple[grouping.GroupedProduct, ...]:
    """The first GEMM of a real expert on the real inputs of its layer, under every grouping."""
    opened = caches.checkpoint(TINY_MOE.sample)
    weight = opened.read(_gate_up(layer))[expert]
    return grouping.compare_grouping(_inputs()[layer], weight)


def _gate_up(layer: int) -> str:
    return f"model.layers.{layer}.experts.gate_up_proj"


def error_rows(page: Lesson) -> list[dict[str, object]]:
    """The comparison that the page's settings ask for, as rows, each with what it is about."""
    view = page.view
    if view["data"] == "checkpoint":
        return blocks_tensor.rows_of(page)
    of: dict[str, object] = {"outlier_size": view["size"]}
    if view["data"] == "tiny_moe":
        of = {"checkpoint": TINY_MOE.sample, "tensor": _gate_up(view["layer"]), "index": view["expert"]}
    return about(of, figures.error_rows(products_of(page)))


def products_of(page: Lesson) -> tuple[grouping.GroupedProduct, ...]:
    """The comparison of whole products that the page's settings ask for."""
    view = page.view
    if view["data"] == "outliers":
        return outlier_products(view["size"])
    return tiny_moe_products(view["layer"], view["expert"])


def snippet_of_expert(page: Lesson) -> dict[str, object]:
    """What fills ``blocks_experts``, the code of a real expert's product; nothing where another one is shown."""
    view = page.view
    if (view["part"], view["data"]) != ("error", "tiny_moe"):
        return {}
    return {"layer": view["layer"], "expert": view["expert"], "characters": _CHARACTERS}


def snippet_of_scales(page: Lesson) -> dict[str, object]:
    """What fills ``blocks_scales``, the code of the map of scales; nothing in another part."""
    names = {"rows": "s_rows", "columns": "s_cols", "row": "s_row", "column": "s_col", "layout": "layout"}
    return {name: page.view[of] for name, of in names.items()} if page.view["part"] == "swizzle" else {}


def error_part(page: Lesson) -> None:
    """The same bits a weight, grouped three ways: asked first, then shown."""
    view = page.view
    asked = outlier_products(ASKED)
    values = {one.along: f"{one.y.sqnr_db:.1f}" for one in asked}
    revealed = predict.ask(
        f"{PAGE}.predict.best",
        grouping.GROUPINGS,
        answer=figures.best(asked),
        outliers=figures.OUTLIERS,
        channels=figures.K,
        size=exact(ASKED),
        block=BLOCK,
        **values,
    )
    if revealed:
        stage, side = page.stage()
        with side:
            pick_one(page, "data", DATA, label="error.data", texts="error.of", wrap=True)
            if view["data"] == "outliers":
                st.select_slider(
                    page.t("error.size"), figures.SIZES, format_func=lambda v: f"× {exact(v)}", **view.widget("size")
                )
            elif view["data"] == "tiny_moe":
                pick_expert(page)
            else:
                with errors.boundary():
                    blocks_tensor.pick(page)
                    blocks_tensor.show(page, stage)
            if view["data"] != "checkpoint":
                _products(page, stage)
        page.prose("error.text" if view["data"] != "checkpoint" else "tensor.text")
    page.glossary("outlier_channel", "sqnr", "block_scale")


def _products(page: Lesson, stage: Any) -> None:
    """The finding beside, and the figure of the whole GEMM on the stage."""
    found = products_of(page)
    page.finding(f"error.seen.{page.view['data']}", bits=exact(grouping.storage(BLOCK, K_STEP).bits))
    with stage:
        page.figure(
            figures.error_figure(found, theme=theme(), lang=lang()),
            alt=page.t("error.alt"),
            finding=figures.describe_error(found, lang()),
            rows=lambda: figures.error_rows(found),
        )


# ------------------------------------------------------------------ shapes


def shapes_part(page: Lesson) -> None:
    """What a weight becomes in a checkpoint, and where one element of it is."""
    view = page.view
    left, middle, right, last = st.columns(4)
    left.number_input(page.t("shapes.n"), 1, 65536, **view.widget("w_rows"))
    middle.number_input(page.t("shapes.blocks", step=K_STEP), 1, 2048, **view.widget("w_blocks"))
    n, k = view["w_rows"], view["w_blocks"] * K_STEP
    right.number_input(page.t("shapes.row"), 0, n - 1, **view.widget("e_row"))
    last.number_input(page.t("shapes.column"), 0, k - 1, **view.widget("e_k"))
    nvfp4, mxfp4 = grouping.storage(n, k), grouping.storage(n, k, "mxfp4")
    page.finding(
        "shapes.seen",
        shape=_shape((n, k)),
        packed=_shape(nvfp4.packed),
        scales=_shape(nvfp4.scales),
        bits=exact(nvfp4.bits),
        mx_bits=exact(mxfp4.bits),
        share=percent(nvfp4.scale_bytes / nvfp4.packed_bytes),
        mx_share=percent(mxfp4.scale_bytes / mxfp4.packed_bytes),
    )
    page.table(
        ("tensor", "shape", "type", ">bytes"),
        [
            ("`weight`", _shape((n, k)), "BF16", f"{n * k * 2:,}"),
            ("`weight` · NVFP4", _shape(nvfp4.packed), "uint8", f"{nvfp4.packed_bytes:,}"),
            ("`weight_scale` · NVFP4", _shape(nvfp4.scales), "E4M3", f"{nvfp4.scale_bytes:,}"),
            (page.t("shapes.swizzled"), f"{nvfp4.swizzled_bytes:,}", "E4M3", f"{nvfp4.swizzled_bytes:,}"),
            ("`weight_scale_2` · NVFP4", "( )", "F32", "4"),
            ("`weight` · MXFP4", _shape(mxfp4.packed), "uint8", f"{mxfp4.packed_bytes:,}"),
            ("`weight_scale` · MXFP4", _shape(mxfp4.scales), "UE8M0", f"{mxfp4.scale_bytes:,}"),
        ],
    )
    place = grouping.place_of(view["e_row"], view["e_k"], k)
    page.finding(
        "shapes.place",
        element=_shape((view["e_row"], view["e_k"])),
        byte=_shape(place.byte),
        nibble=page.t("shapes.high" if place.high else "shapes.low"),
        scale=_shape(place.scale),
        offset=f"{place.offset_128x4:,}",
    )
    page.prose("shapes.text", block=BLOCK)


def _shape(shape: tuple[int, int]) -> str:
    """As code writes it: a comma for thousands would read as one more dimension."""
    return f"({shape[0]}, {shape[1]})"


# ------------------------------------------------------------------ swizzle


def swizzle_part(page: Lesson) -> None:
    """Any scale of a tensor, in rows and columns and in the bytes that a kernel reads."""
    view = page.view
    stage, side = page.stage()
    with side:
        st.segmented_control(
            page.t("swizzle.layout"),
            LAYOUTS,
            format_func=lambda name: name.replace("x", "×"),
            required=True,
            **view.widget("layout"),
        )
        left, right = st.columns(2)
        left.number_input(page.t("swizzle.rows"), 1, 1024, **view.widget("s_rows"))
        right.number_input(page.t("swizzle.columns"), 1, 64, **view.widget("s_cols"))
        rows, columns = view["s_rows"], view["s_cols"]
        # A second pair of columns: on a phone they stack, and a row belongs after both sizes.
        left, right = st.columns(2)
        left.number_input(page.t("swizzle.row"), 0, rows - 1, **view.widget("s_row"))
        right.number_input(page.t("swizzle.column"), 0, columns - 1, **view.widget("s_col"))
        size = swizzled_size(rows, columns, view["layout"])
        page.finding("swizzle.seen", scales=rows * columns, size=size, padding=size - rows * columns)
        page.prose(f"swizzle.why.{view['layout']}", version=VLLM)
        page.glossary("swizzle", "block_scale")
    with stage:
        swizzle_map(view, rows=rows, columns=columns)


def offset_rows(page: Lesson) -> list[dict[str, object]]:
    """Every scale of the map's tensor with its byte in each layout."""
    rows, columns = page.view["s_rows"], page.view["s_cols"]
    of = {"tensor_rows": rows, "tensor_columns": columns}
    return [
        of
        | {
            "row": row,
            "column": column,
            "linear": offset_linear(row, column, columns),
            "offset_128x4": offset_128x4(row, column, columns),
            "offset_8x4": offset_8x4(row, column, columns),
        }
        for row in range(rows)
        for column in range(columns)
    ]


def byte_rows(page: Lesson) -> list[dict[str, object]]:
    """Every byte of the map's layout with the row and column that it stands for, padding included."""
    rows, columns, layout = page.view["s_rows"], page.view["s_cols"], page.view["layout"]
    places = (scale_at(byte, rows, columns, layout) for byte in range(swizzled_size(rows, columns, layout)))
    of = {"layout": layout, "tensor_rows": rows, "tensor_columns": columns}
    return [
        of | {"byte": byte, "row": place.row, "column": place.column, "padding": place.padding}
        for byte, place in enumerate(places)
    ]
