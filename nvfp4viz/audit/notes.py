"""``loader.note`` and ``format.ambiguous``: a layout is sound, and somebody may still misread it.

Each note names a public report, and stands only where the layout that the report is about is really there.  Of what the
file holds it says nothing: other findings do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nvfp4viz.audit.facts import Facts, is_scalar
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.linears import FP8, Linear
from nvfp4viz.audit.report import Finding
from nvfp4viz.checkpoint import CanonicalView, Checkpoint
from nvfp4viz.checkpoint.dialects import COMPRESSED_TENSORS, DEEPSEEK_V4, QUARK, QUARK_QUANTIZER

_DENSE_FUSED = ("gate_up_proj", "qkv_proj")


def note_findings(facts: Facts, linears: Iterable[Linear]) -> Iterator[Finding]:
    """All notes on a checkpoint whose experts are read in full."""
    view = facts.view
    dialects = {layer: view.dialects[layer] for layer in facts.layers}
    stacked = [layer for layer, dialect in dialects.items() if dialect and dialect.arrangement == "stacked"]
    if stacked or (view.architecture or "").startswith("Step3"):
        yield from layout_note(facts, "names-without-weight", stacked or list(view.moe_layers), "input_scale")
    fused = [layer for layer, dialect in dialects.items() if dialect and dialect.id == "modelopt-fused"]
    yield from layout_note(facts, "underscores", fused, "weight_scale_2")
    packed = [layer for layer, dialect in dialects.items() if dialect == COMPRESSED_TENSORS]
    yield from layout_note(facts, "global-scale", packed, "weight_scale_2")
    dense = [linear for linear in linears if linear.name.rpartition(".")[2] in _DENSE_FUSED]
    names = [
        entry.name
        for linear in dense
        if linear.format == "NVFP4" and (entry := linear.tensor("input_scale")) is not None and is_scalar(entry)
    ]
    if names:
        yield make("loader.note", "info", text="loader.note.dense-fused", tensors=names)
    yield from _ambiguous(facts)


# What ModelOpt may call an FP8 module, and the reader of a list may not know.  The code read dispatches FP8, NVFP4,
# W4A16_NVFP4 and MXFP8 alone there, and leaves any other module unquantised; that of August 2026 knows FP8_PB_WO too,
# of ordinary modules (vllm#54367).  Of 0.33.0 it was not read.
LATE, UNKNOWN = "FP8_PB_WO", ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB")


def mixed_findings(checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear]) -> Iterator[Finding]:
    """``loader.note`` of FP8 modules whose name in a ``MIXED_PRECISION`` list some servers do not know."""
    quant = checkpoint.quant_config
    method = quant.used.method if quant.used is not None else None
    if quant.algo != "MIXED_PRECISION" or not (method is None or method.startswith("modelopt")):
        return
    found: dict[tuple[str, bool], dict[str, None]] = {}
    for linear in linears:
        if linear.format == "FP8" and (algo := quant.listed_algo(linear.name)) in (LATE, *UNKNOWN):
            found.setdefault((algo, False), {})[f"{linear.name}.weight"] = None
    for layer, block in view.blocks.items():
        module = view.module(layer, 0, view.projections_in[layer][0]) if view.projections_in[layer] else None
        weight = module.tensors.get("weight", module.extras.get("")) if module is not None else None
        if module is not None and weight is not None and weight.dtype in FP8:
            algo = quant.listed_algo(block, module.name)
            if algo in (LATE, *UNKNOWN):
                found.setdefault((algo, True), {})[weight.name] = None
    for (algo, experts), names in found.items():
        late = algo == LATE and not experts
        yield make(
            "loader.note", "info", text=f"loader.note.mixed{'.late' * late}", tensors=names,
            fill={"algo": algo, "engines": ("sglang",) if late else ("vllm", "sglang")},
        )  # fmt: skip


def layout_note(facts: Facts, name: str, layers: list[int], role: str) -> Iterator[Finding]:
    """One note over these layers, with the first tensors of a role that they have."""
    tensors: dict[str, None] = {}
    for layer in layers:
        for projection in facts.view.projections_in[layer]:
            entry = facts.view.module(layer, 0, projection).tensors.get(role)
            if entry is not None:
                tensors[entry.name] = None
    if tensors:
        yield make("loader.note", "info", text=f"loader.note.{name}", tensors=tensors, count=len(layers))


def _ambiguous(facts: Facts) -> Iterator[Finding]:
    """U8 where E8M0 is meant: told by the width of 32, and by the configuration where it says so."""
    used = facts.checkpoint.quant_config.used
    settled = used is not None and (used.method or "").startswith("quark")
    names = []
    for layer in facts.layers:
        dialect = facts.view.dialects[layer]
        if dialect not in (DEEPSEEK_V4, QUARK, QUARK_QUANTIZER) or (settled and dialect is not DEEPSEEK_V4):
            continue
        for projection in facts.view.projections_in[layer]:
            entry = facts.view.module(layer, 0, projection).tensors.get("weight_scale")
            if entry is not None and entry.dtype == "U8":
                names.append(entry.name)
    if names:
        yield make("format.ambiguous", "info", role="weight_scale", tensors=names)
