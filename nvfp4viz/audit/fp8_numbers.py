"""The numbers among the scales of FP8 experts: one a tensor, or a vector of one an expert.

They lie among the other scalars and are read with them; scales of rows and of blocks are read by ``--deep`` alone
(`nvfp4viz.audit.deep_findings`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from nvfp4viz.audit.facts import is_scalar
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.linears import FP8
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.scales import severity_of
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, Module, TensorEntry
from nvfp4viz.checkpoint.dtypes import SCALE_BYTES
from nvfp4viz.checkpoint.numbers import CLASSES, classify

# What an FP8 expert's weight scale is called; fused ones lose what stands before the parameter's name.
SCALES = ("weight_scale", "scale", "weight_scale_inv", "scale_inv", "weight_quantizer.scale")
# Quark's name for it stands below a part of its own.
INPUTS = ("input_scale", "input_quantizer.scale")


def fp8_scales(module: Module) -> dict[str, TensorEntry]:
    """By role the scales of an expert's projection in FP8; none where it is in another format."""
    tensors = {**module.tensors, **module.extras}
    weight = tensors.get("weight", tensors.get(""))
    if weight is None or weight.dtype not in FP8 or len(weight.shape) < 2:
        return {}
    found = {
        role: next((tensors[suffix] for suffix in names if suffix in tensors), None)
        for role, names in (("weight_scale", SCALES), ("input_scale", INPUTS))
    }
    return {role: entry for role, entry in found.items() if entry is not None}


def is_read(entry: TensorEntry, experts: int) -> bool:
    """One number, or one for each of so many experts that share the tensor."""
    vector = entry.dtype in SCALE_BYTES and prod(entry.shape) == experts == max(entry.shape, default=0)
    return is_scalar(entry) or vector


def fp8_number_findings(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """``scale.zero`` and its like: one finding a layer, projection, role and class."""
    layers = {layer for layer, dialect in view.dialects.items() if dialect is None}
    # By tensor: its layer, projection and role, and the expert whose it is alone.
    singles: dict[str, tuple[int, str, str, int | None]] = {}
    vectors: dict[str, tuple[int, str, str]] = {}
    for (layer, expert, projection), module in view.modules.items() if layers else ():
        if layer not in layers or module.state != "other":
            continue
        for role, entry in fp8_scales(module).items():
            if is_scalar(entry):
                singles[entry.name] = layer, projection, role, None if module.whole else expert
            elif module.whole and is_read(entry, view.experts_in[layer]):
                vectors[entry.name] = layer, projection, role
    found: dict[tuple[int, str, str, str], list[tuple[str, int | None, np.float32]]] = {}
    stored = checkpoint.read_scalars(singles, partly=True)
    kinds = classify(np.array(list(stored.values()), np.float32)).tolist()
    for (name, value), kind in zip(stored.items(), kinds, strict=True):
        if kind:
            layer, projection, role, alone = singles[name]
            found.setdefault((layer, projection, role, CLASSES[kind]), []).append((name, alone, value))
    for (name, (layer, projection, role)), values in zip(
        vectors.items(), checkpoint.vectors(list(vectors), partly=True), strict=True
    ):
        kinds = [] if checkpoint.tensors[name].file in checkpoint.lost else classify(values).tolist()
        for expert, kind in enumerate(kinds):
            if kind:
                found.setdefault((layer, projection, role, CLASSES[kind]), []).append((name, expert, values[expert]))
    for (layer, projection, role, kind_name), bad in sorted(found.items()):
        experts = tuple(sorted(expert for _, expert, _ in bad if expert is not None))
        yield make(
            f"scale.{kind_name}", severity_of(role), text="scale.value.fp8.number", role=role, layer=layer,
            projection=projection, experts=experts or None, tensors=dict.fromkeys(name for name, _, _ in bad),
            count=len(bad), value=bad[0][2], fill={"kind": kind_name},
        )  # fmt: skip
