"""Scales of FP8 and MXFP4 modules and of FP8 experts whose weight is gone: ``scale.missing`` of the weight.

Of NVFP4 the second-level scale tells the format without it (`linears`, `scales`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.fp8 import said_of
from nvfp4viz.audit.fp8_numbers import INPUTS, SCALES
from nvfp4viz.audit.linears import FP8, Linear, is_weightless, missing_finding
from nvfp4viz.audit.module_names import is_quantised_by_all
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.unread import may_lie_unread
from nvfp4viz.checkpoint import CanonicalView, Checkpoint
from nvfp4viz.checkpoint.dialects.per_expert import QUANTIZERS

# What is left of a module whose weight is gone.
_BESIDE_WEIGHT = frozenset({"weight_scale", "weight_scale_inv", "scale", "weight_scale_2", "input_scale", "bias"})


def weightless_findings(checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear]) -> Iterator[Finding]:
    """One finding for all ordinary modules, and one a layer and projection of routed experts.

    A name with a scale and no weight may be something else (a router's ``scale``): its namesakes must be quantised, or
    every exporter quantise it, or the configuration mean it.
    """
    if checkpoint.blind_files:
        return
    linears = tuple(linears)
    # Quark's own names for a scale stand below a part of their own.
    bare = [linear.name for linear in linears if is_weightless(linear) and not linear.name.endswith(QUANTIZERS)]
    names = [f"{name}.weight" for name in _lost(checkpoint, view, linears, bare)] if bare else []
    if names:
        yield missing_finding("weight", names, view)
    yield from _of_experts(checkpoint, view)


def _lost(checkpoint: Checkpoint, view: CanonicalView, linears: tuple[Linear, ...], bare: list[str]) -> dict[str, None]:
    said = said_of(checkpoint, view)
    kinds = {_last_two(linear.name) for linear in linears if linear.format in ("NVFP4", "MXFP4", "FP8")}
    lost = {
        name: None for name in bare if _last_two(name) in kinds or said.promises(name) or is_quantised_by_all(name)
    }  # fmt: skip
    # Codes under another name, such as ``qweight``, are codes.
    for name in (*checkpoint.tensors, *checkpoint.unreadable) if lost else ():
        module, _, suffix = name.rpartition(".")
        if module in lost and suffix not in _BESIDE_WEIGHT:
            del lost[module]
    return lost


def _last_two(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-2:])


def _of_experts(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """The same for the experts of layers that are FP8 throughout."""
    layers = {layer for layer, dialect in view.dialects.items() if dialect is None}
    gone: dict[tuple[int, str], dict[int, str]] = {}
    eight_bit: set[int] = set()
    for (layer, expert, projection), module in view.modules.items() if layers else ():
        if layer not in layers or module.state != "other" or module.whole:
            continue
        weight = module.tensors.get("weight")
        if weight is not None and weight.dtype in FP8:
            eight_bit.add(layer)
        elif weight is None and {*module.tensors, *module.extras} <= {*SCALES, *INPUTS, "bias"}:
            gone.setdefault((layer, projection), {})[expert] = f"{module.name}.weight"
    for (layer, projection), names in gone.items():
        lost = {
            expert: name
            for expert, name in names.items()
            if not may_lie_unread(checkpoint, name.removesuffix(".weight"), "weight")
        }
        if layer in eight_bit and lost:
            yield make(
                "scale.missing", "error", text="scale.missing.weight", role="weight", layer=layer,
                projection=projection, experts=tuple(sorted(lost)), tensors=[lost[expert] for expert in sorted(lost)],
            )  # fmt: skip
