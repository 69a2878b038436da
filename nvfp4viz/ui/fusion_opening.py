"""How the page on fusion opens: rows that move and change nothing, beside the two things that do change bits."""

from __future__ import annotations

from html import escape

from nvfp4viz.figures import fusion as figures
from nvfp4viz.moe.fusion import FusedLayout
from nvfp4viz.moe.fusion_bits import check_layout
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.ui import predict
from nvfp4viz.ui.fusion_parts import PAGE, rows_part
from nvfp4viz.ui.fusion_scale_parts import ASKED_LAYER, measured, shared
from nvfp4viz.ui.i18n import listed
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import four

ASKED_HEADS = ("qwen3_30b", 8)
"""Of the question about heads: more ranks than key-value heads, and twice what the figure opens with."""


def qkv_part(page: Lesson) -> None:
    """QKV under grouped-query attention."""
    rows_part(page, "attn", tuple(figures.ATTENTION), ("fused_projection", "gqa", "tensor_parallel"), _what_differs)
    if _how_many_rows(page):
        page.prose("qkv.text", version=VLLM)


def _what_differs(page: Lesson, layout: FusedLayout) -> None:
    """Three bars, as long as the share of results with other bits: rows that moved, a shared scale, a rounding less."""
    by_id = {one.id: one for one in measured()}
    found = shared("qkv", ASKED_LAYER, 0, 1.0)
    (used,) = {four(part.used_scale) for part in found["max"].values()}
    own = listed(f"{name} {four(part.own_scale)}" for name, part in found["own"].items())
    lines = (
        ("rows", *check_layout(layout), {}),
        ("scale", by_id["max_scale"].values, by_id["max_scale"].differ, {"own": own, "used": used}),
        ("rounding", by_id["silu_quant"].values, by_id["silu_quant"].differ, {}),
    )
    items = "".join(
        f"<li><b>{escape(page.t(f'differs.{name}.name'))}</b>"
        f"<span>{escape(page.t('differs.count', differ=f'{differ:,}', values=f'{values:,}'))}</span>"
        f'<i aria-hidden="true" style="--share: {differ / values:.4%}"></i>'
        f"<small>{escape(page.t(f'differs.{name}.how', **more))}</small></li>"
        for name, values, differ, more in lines
    )
    page.drawing(
        f'<p class="differs">{escape(page.t("differs.heading"))}</p>'
        f'<ul class="differs" aria-label="{escape(page.t("differs.heading"))}">{items}</ul>'
        f'<p class="differs note">{escape(page.t("differs.note", layer=ASKED_LAYER))}</p>'
    )


def _how_many_rows(page: Lesson) -> bool:
    """Asked: what do all ranks hold together when there are fewer key-value heads than ranks?"""
    model, tp = ASKED_HEADS
    heads, kv_heads, _ = figures.ATTENTION[model]
    layout = figures.attention_of(model, tp)
    held = tp * layout.rank_rows
    return predict.ask(
        f"{PAGE}.predict.rows",
        ("same", "more", "refused"),
        answer="more" if held > layout.whole.rank_rows else "same",
        model=figures.MODELS[model],
        heads=heads,
        kv=kv_heads,
        ranks=tp,
        whole=f"{layout.whole.rank_rows:,}",
        held=f"{held:,}",
        extra=f"{held - layout.whole.rank_rows:,}",
        copies=max(map(layout.copies, layout.parts)),
    )
