"""The part of the routing page about a real run: how Gemma 4 is calibrated and exported, and where it can break."""

from __future__ import annotations

from typing import Any

import streamlit as st

from nvfp4viz.model.calibration_run import GEMMA4
from nvfp4viz.model.config import TinyMoeConfig
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.ui import caches
from nvfp4viz.ui.i18n import listed
from nvfp4viz.ui.lesson import Lesson

SKELETON = "gemma4-skeleton"


def without_scale() -> dict[int, list[int]]:
    """Layer → experts of the Gemma 4 skeleton whose gate has a weight scale and no input scale."""
    names = caches.checkpoint(SKELETON).tensors
    found: dict[int, list[int]] = {}
    for layer in range(GEMMA4.layers):
        for expert in range(GEMMA4.experts):
            stem = _stem(layer, expert) + "gate_proj."
            if stem + "weight_scale" in names and stem + "input_scale" not in names:
                found.setdefault(layer, []).append(expert)
    return found


def _stem(layer: int, expert: int) -> str:
    return f"model.language_model.layers.{layer}.moe.experts.{expert}."


def run_part(page: Lesson) -> None:
    """What really happens when Gemma 4 is quantised, step by step."""
    missing = without_scale()
    layer, experts = next(iter(missing.items()))
    names = caches.checkpoint(SKELETON).tensors
    sidecar = caches.checkpoint(SKELETON).hf_quant_config or {}
    log = caches.routing_log("calibration")
    tiny, tokens, routed = TinyMoeConfig(), int(log.tokens.sum()), int(log.totals().sum())
    values: dict[str, Any] = {
        "experts": GEMMA4.experts,
        "layers": GEMMA4.layers,
        "top": GEMMA4.top_k,
        "slots": f"{GEMMA4.slots:,}",
        "linears": f"{3 * GEMMA4.slots:,}",
        "documents": f"{GEMMA4.documents:,}",
        "length": f"{GEMMA4.length:,}",
        "tokens": f"{GEMMA4.tokens:,}",
        "share": f"{GEMMA4.even_share:,.0f}",
        "tiny_tokens": f"{tokens:,}",
        "tiny_share": f"{routed / log.counts[0].size:,.0f}",
        "passes": routed // (tokens * tiny.num_hidden_layers * tiny.top_k_experts),
        "holes": int(log.holes_after()[-1]),
        "of": log.counts[0].size,
        "tensor": f"…experts.{experts[0]}.gate_proj.input_scale",
        "excluded": listed(f"`{name}`" for name in sidecar["quantization"]["exclude_modules"]),
        "layer": layer,
        "missing": listed(map(str, experts)),
        "count": len(experts),
        "version": VLLM,
    }
    page.prose("run.before", **values)
    steps = ("unfuse", "prepare", "route", "amax", "export", "rename", "load")
    told = (
        page.t(
            "run.step", happens=page.t(f"run.{step}.happens", **values), breaks=page.t(f"run.{step}.breaks", **values)
        )
        for step in steps
    )
    st.markdown("\n".join(f"{at}. {text}" for at, text in enumerate(told, start=1)))
    page.finding("run.seen", **values)
    page.heading("run.keys")
    kinds = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    whole = next(expert for expert in range(GEMMA4.experts) if expert not in experts)
    page.table(
        ("key", ">whole", ">holed"),
        [
            (
                f"`{projection}.{kind}`",
                *(
                    "✓" if f"{_stem(layer, expert)}{projection}.{kind}" in names else "∅"
                    for expert in (whole, experts[0])
                ),
            )
            for projection in ("gate_proj", "up_proj", "down_proj")
            for kind in kinds
        ],
    )
    page.prose("run.text", whole=whole, holed=experts[0], **values)
