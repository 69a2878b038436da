"""Gates that no expert of any layer has, in a model that has them.

One layer's are missed by the others'; of all that are gone only the configuration, a shared expert and the names tell,
for experts without a gate exist (Nemotron's, whose function is ReLU²).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.linears import Linear
from nvfp4viz.audit.mlp_shapes import mlp_kinds
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.shapes import functions_of
from nvfp4viz.audit.texts import layer_list
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, printable


def gate_findings(checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear]) -> Iterator[Finding]:
    """``expert.absent``: an error where the model must have gates, a note where nothing says whether it has."""
    layers = view.moe_layers
    if not layers or checkpoint.blind_files or checkpoint.source.only is not None:
        return
    if any({"gate", "gate_up"} & set(view.projections_in[at]) or "up" not in view.projections_in[at] for at in layers):
        return
    functions = functions_of(checkpoint.config or {})
    if any("relu" in name or "no_mul" in name for name in functions):
        return
    if any(_is_other_gate(name, view) for name in (*checkpoint.tensors, *checkpoint.unreadable)):
        return
    why, fill = _why(view, linears, functions)
    # NemotronH's experts have no gate, and no other family keeps its own there.
    if why in ("", ".function") and all("mixer" in view.blocks[at].split(".") for at in layers):
        return
    names = dict.fromkeys(
        view.module(at, expert, "gate").name for at in layers for expert in range(view.experts_in[at])
    )
    yield make(
        "expert.absent", "error" if why else "info", text=f"expert.absent.gate{why or '.open'}", projection="gate",
        layer=layers[0] if len(layers) == 1 else None, tensors=names, fill={**layer_list(layers), **fill},
    )  # fmt: skip


def _why(view: CanonicalView, linears: Iterable[Linear], functions: Iterable[str]) -> tuple[str, Mapping[str, Any]]:
    """What says that experts are gated (how the text's key ends), and what the text names of it."""
    for path, layers in mlp_kinds(view, linears).items():
        if any({"gate", "gate_up"} & kinds.keys() for kinds in layers.values()):
            return ".sister", {"module": printable(path, 100)}
    up = view.module(view.moe_layers[0], 0, "up").name
    if "w3" in up.split("."):
        return ".name", {"up": printable(up, 200)}
    # SiLU without a gate is no expert's of a published family; GELU was one's before gates were.
    named = next((name for name in functions if name in ("silu", "swish", "swiglu")), None)
    return (".function", {"function": named}) if named else ("", {})


def _is_other_gate(name: str, view: CanonicalView) -> bool:
    """Is it an expert's tensor that may be a gate under a name, or with a suffix, that is not read here?"""
    for layer in view.moe_layers:
        block = view.blocks[layer]
        if name.startswith(block) and name[len(block) : len(block) + 1] in (".", "_"):
            parts = name[len(block) + 1 :].split(".")
            # A router stands among stacked experts, and a shared expert may.
            if any("share" in part or "router" in part for part in parts) or parts[0] == "gate":
                return False
            return any("gate" in part or part in ("w1", "w13", "v1", "linear_1", "linear_fc1") for part in parts)
    return False
