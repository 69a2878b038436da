"""Scales of a quantised KV cache, reported apart from everything else."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from nvfp4viz.audit.facts import CLASSES, classify, is_scalar
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.checkpoint import Checkpoint

_KV = re.compile(r"\.(?:k_proj\.k_scale|v_proj\.v_scale|k_scale|v_scale)$")
# What stands before, the letter, and everything from it on.
_PARTS = re.compile(r"(.*?\.)(?=([kv])_)((?:\2_proj\.)?\2_scale)")


def kv_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """``kv.*``: scales of a quantised KV cache, reported apart from the experts."""
    tensors = checkpoint.tensors
    named = [name for name in tensors if name.endswith(("k_scale", "v_scale")) and _KV.search(name)]
    names = [name for name in named if is_scalar(tensors[name])]
    # llm-compressor stores them in the model's own type.
    values = checkpoint.read_scalars(names, partly=True)
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
    single = [] if checkpoint.blind_files else [name for name in names if _lacks_partner(checkpoint, name)]
    if single:
        yield make("kv.absent", "info", text="kv.absent.partner", tensors=single)


def _lacks_partner(checkpoint: Checkpoint, name: str) -> bool:
    """Is the other one of keys and values not there, though its projection is?  Gemma 4 has layers without values."""
    attention, own, tail = _PARTS.fullmatch(name).groups()  # type: ignore[union-attr]
    other = "v" if own == "k" else "k"
    tensors, partner = checkpoint.tensors, f"{attention}{tail.replace(own, other)}"
    if partner in tensors or partner in checkpoint.unreadable:
        return False
    return any(f"{attention}{other}_proj.{weight}" in tensors for weight in ("weight", "weight_packed"))


def _claims_kv(checkpoint: Checkpoint) -> bool:
    """Does the configuration say that the KV cache is quantised?"""
    quantisation = (checkpoint.hf_quant_config or {}).get("quantization")
    if isinstance(quantisation, dict) and quantisation.get("kv_cache_quant_algo"):
        return True
    section = (checkpoint.config or {}).get("quantization_config")
    return isinstance(section, dict) and bool(section.get("kv_cache_scheme"))
