"""Scales of a quantised KV cache, reported apart from everything else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from nvfp4viz.audit.facts import is_scalar
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.module_names import is_draft, is_quantised_by_all
from nvfp4viz.audit.report import Finding
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, printable
from nvfp4viz.checkpoint.numbers import CLASSES, classify

_KV = re.compile(r"\.(?:k_proj\.k_scale|v_proj\.v_scale|k_scale|v_scale)$")
# What stands before, the letter, and everything from it on.
_PARTS = re.compile(r"(.*?\.)(?=([kv])_)((?:\2_proj\.)?\2_scale)")

_WORST = ("nan", "inf", "subnormal", "negative")


def kv_findings(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """``kv.*``: scales of a quantised KV cache, reported apart from the experts; and files that differ about it."""
    tensors = checkpoint.tensors
    named = [name for name in tensors if name.endswith(("k_scale", "v_scale")) and _KV.search(name)]
    names = [name for name in named if is_scalar(tensors[name])]
    # llm-compressor stores them in the model's own type.
    values = checkpoint.read_scalars(names, partly=True)
    groups: dict[str, list[str]] = {}
    kinds: set[str] = set()
    for name, value in values.items():
        kind = CLASSES[int(classify(np.array([value], np.float32))[0])]
        if kind == "zero":
            groups.setdefault("kv.zero", []).append(name)
        elif kind != "ok":
            groups.setdefault("kv.invalid", []).append(name)
            kinds.add(kind)
        elif value == 1:
            groups.setdefault("kv.identity", []).append(name)
    claimed = _claims_kv(checkpoint)
    for code, found in groups.items():
        severity = "info" if code == "kv.identity" else "error"
        # What the worst of them does, the forecast asks, and whether the configuration has them used.
        kind = "zero" if code == "kv.zero" else next((one for one in _WORST if one in kinds), "")
        fill = {} if severity == "info" else {"kind": kind, "claimed": claimed}
        yield make(code, severity, tensors=found, value=values[found[0]], fill=fill)
    yield from _files_differ(checkpoint)
    # Some models have a vector of that name which is no cache's.
    vectors = [name for name in named if name not in names] if (names or claimed) and not _per_head(checkpoint) else []
    if vectors:
        shapes = sorted({f"{tensors[name].dtype}{list(tensors[name].shape)}" for name in vectors})
        fill = {"shape": ", ".join(shapes), "claimed": claimed}
        yield make("kv.invalid", "error", text="kv.invalid.shape", tensors=vectors, fill=fill)
    if checkpoint.blind_files:
        return
    if not named and claimed and not any(map(_KV.search, checkpoint.unreadable)):
        yield make("kv.absent", "info", count=1)
    rest = _rest(checkpoint, view, named) if claimed and named else []
    if rest:
        yield make("kv.absent", "info", text="kv.absent.some", tensors=rest, fill={"stored": len(named)})
        return
    single = [name for name in names if _lacks_partner(checkpoint, name)]
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


# A layer's attention, and what makes keys or values there.
_MAKES = re.compile(r"(.+)\.([kv]|qkv)_proj\.(?:weight|weight_packed)$")
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..+)")
# Fields of models of which not every layer has keys and values of its own.
_HYBRID = re.compile("layer_types|layers_block_type|hybrid|interval|attn_layer|shared_layers")


def _rest(checkpoint: Checkpoint, view: CanonicalView, named: list[str]) -> list[str]:
    """Scales that the configuration asks for and that are not stored, while others are, as the others are called."""
    stored = {(_attention(name), _letter(name)) for name in (*named, *filter(_KV.search, checkpoint.unreadable))}
    wanted: dict[tuple[str, str], str] = {}
    pattern = _PARTS.fullmatch(named[0])
    assert pattern is not None
    for name in checkpoint.tensors:
        found = _MAKES.fullmatch(name)
        if found and is_quantised_by_all(f"{found[1]}.{found[2]}_proj") and not is_draft(found[1], view.layers):
            for letter in "kv" if found[2] == "qkv" else found[2]:
                wanted[found[1], letter] = f"{found[1]}.{pattern[3].replace(pattern[2], letter)}"
    fields = {key for holder in _holders(checkpoint) for key, value in holder.items() if value}
    hybrid = any(_HYBRID.search(key) for key in fields)
    at = _LAYER.fullmatch(_attention(named[0]))
    elsewhere = any("attn" in name and name not in named for name in checkpoint.tensors)
    if at and not (wanted or hybrid or elsewhere):
        # Without any attention in the files the configuration's number of layers is all that tells.
        for layer in range(view.layers or 0):
            for letter in "kv":
                attention = f"{at[1]}{layer}{at[3]}"
                wanted[attention, letter] = f"{attention}.{pattern[3].replace(pattern[2], letter)}"
    if "num_kv_shared_layers" in fields:
        # The last layers take the keys and values of earlier ones.
        return []
    return [name for slot, name in wanted.items() if slot not in stored]


def _holders(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    config = checkpoint.config or {}
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def _attention(name: str) -> str:
    """The module that a scale is of, whatever stands between.

    >>> _attention("model.layers.0.self_attn.k_proj.k_scale"), _attention("model.layers.0.self_attn.attn.v_scale")
    ('model.layers.0.self_attn', 'model.layers.0.self_attn')
    """
    return re.sub(r"(?:\.attn)?(?:\.(?:[kv]|qkv)_proj)?\.[kv]_scale$", "", name)


def _letter(name: str) -> str:
    return name[-len("k_scale")]


def _per_head(checkpoint: Checkpoint) -> bool:
    """compressed-tensors has a scale for each head as well."""
    scheme = _section(checkpoint).get("kv_cache_scheme")
    return isinstance(scheme, dict) and scheme.get("strategy") not in (None, "tensor")


def _section(checkpoint: Checkpoint) -> dict[str, Any]:
    section = (checkpoint.config or {}).get("quantization_config")
    return section if isinstance(section, dict) else {}


def _older(checkpoint: Checkpoint) -> dict[str, Any]:
    section = (checkpoint.hf_quant_config or {}).get("quantization")
    return section if isinstance(section, dict) else {}


def _asked(section: dict[str, Any]) -> str | None:
    """The cache's format in ``kv_cache_quant_algo`` or ``kv_cache_scheme``; None for none.

    >>> _asked({"kv_cache_scheme": {"type": "float", "num_bits": 8}}), _asked({"kv_cache_quant_algo": None})
    ('FP8', None)
    """
    scheme = section.get("kv_cache_quant_algo") or section.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        known = {("float", 8): "FP8", ("float", 4): "NVFP4", ("int", 8): "INT8"}
        bits = scheme.get("num_bits")
        kind = (str(scheme.get("type")), bits if isinstance(bits, int) else str(bits))
        return known.get(kind, f"{kind[0]}{kind[1]}")
    return str(scheme).upper() if scheme else None


def _files_differ(checkpoint: Checkpoint) -> Iterator[Finding]:
    """One file asks for a quantised cache and the other for none, or for another: each server does as its own says."""
    sections = checkpoint.quant_config.sections
    # Without an algorithm the older file sends its reader to the other.
    if len(sections) == 2 and sections[1].explicit and _older(checkpoint):
        first, second = _asked(_section(checkpoint)), _asked(_older(checkpoint))
        if first != second:
            fill = {"first": printable(first or "null", 60), "second": printable(second or "null", 60)}
            yield make("config.conflict", "warn", text="config.conflict.kv", count=1, fill=fill)


def _claims_kv(checkpoint: Checkpoint) -> bool:
    """Does the configuration say that the KV cache is quantised?"""
    return bool(_asked(_section(checkpoint)) or _asked(_older(checkpoint)))
