"""Scales outside the routed experts: ordinary linear layers, shared experts, the KV cache."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from nvfp4viz.audit.facts import CLASSES, classify, is_scalar
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.scales import severity_of
from nvfp4viz.checkpoint import CanonicalView, Checkpoint

_ROLES = {
    "input_scale": "input_scale",
    "weight_scale_2": "weight_scale_2",
    "input_global_scale": "input_scale",
    "weight_global_scale": "weight_scale_2",
}
_KV = re.compile(r"\.(?:k_proj\.k_scale|v_proj\.v_scale|k_scale|v_scale)$")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d{1,6})\.")


def linear_findings(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """Values of ordinary modules' scalars that no server should use; one finding a code and role."""
    seen = {entry.name for module in view.modules.values() for entry in module.tensors.values()}
    names = [
        name
        for name, entry in checkpoint.tensors.items()
        if name.rpartition(".")[2] in _ROLES and name not in seen and is_scalar(entry)
    ]
    groups: dict[tuple[str, str], list[tuple[str, np.float32]]] = {}
    for name, stored in checkpoint.read_scalars(names).items():
        suffix = name.rpartition(".")[2]
        with np.errstate(divide="ignore"):
            value = np.float32(1) / stored if suffix.endswith("global_scale") else stored
        kind = CLASSES[int(classify(np.array([value], np.float32))[0])]
        if kind != "ok":
            groups.setdefault((_ROLES[suffix], kind), []).append((name, stored))
    for (role, kind), found in sorted(groups.items()):
        layers = {match[1] for name, _ in found if (match := _LAYER.search(name))}
        layer = int(min(layers)) if len(layers) == 1 else None
        yield make(
            f"scale.{kind}", severity_of(role), text="scale.value.linear", role=role, layer=layer,
            tensors=[name for name, _ in found], value=found[0][1], fill={"kind": kind},
        )  # fmt: skip


def kv_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """``kv.*``: scales of a quantised KV cache, reported apart from the experts."""
    names = [name for name, entry in checkpoint.tensors.items() if _KV.search(name) and is_scalar(entry)]
    values = checkpoint.read_scalars(names)
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        kind = CLASSES[int(classify(np.array([value], np.float32))[0])]
        if kind == "zero":
            groups.setdefault("kv.zero", []).append(name)
        elif kind != "ok":
            groups.setdefault("kv.invalid", []).append(name)
        elif value == 1:
            groups.setdefault("kv.identity", []).append(name)
    for code, found in groups.items():
        severity = "info" if code == "kv.identity" else "error"
        yield make(code, severity, tensors=found, value=values[found[0]])
    if not names and _claims_kv(checkpoint):
        yield make("kv.absent", "info", count=1)


def _claims_kv(checkpoint: Checkpoint) -> bool:
    """Does the configuration say that the KV cache is quantised?"""
    quantisation = (checkpoint.hf_quant_config or {}).get("quantization")
    if isinstance(quantisation, dict) and quantisation.get("kv_cache_quant_algo"):
        return True
    section = (checkpoint.config or {}).get("quantization_config")
    return isinstance(section, dict) and bool(section.get("kv_cache_scheme"))
