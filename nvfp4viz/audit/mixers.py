"""A layer that has lost all that mixes its tokens: attention, or the recurrence or convolution in its place.

Kinds of layers alternate in many models, so that no two neighbours need be alike; but a layer with an MLP and the norms
of its sisters, and nothing between them, is none of any kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.linears import Linear, missing_finding
from nvfp4viz.audit.module_names import MIXERS, is_draft
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.shapes import is_size, text_part
from nvfp4viz.checkpoint import CanonicalView, Checkpoint

_IN_LAYER = re.compile(r"^(.*?(?:^|\.)layers)\.(\d{1,6})\.([^.]+)\.?(.*)$")
# What a configuration calls its list of layers' kinds.
_KINDS = re.compile(r"^(?:layer_types|layers?_block_types?|block_types?|hybrid_override_pattern)$")

Layers = dict[int, dict[str, set[str]]]
"""By layer, by part of it: the weights below that part that are no norms' (of a part without any, none)."""


def mixer_findings(
    checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear], told: Iterable[str] = ()
) -> Iterator[Finding]:
    """``scale.missing`` of a weight: all that mixes tokens, in the one layer of a family that has nothing of it.

    Named are the weights that all layers of its kind have; where the kind is unknown, those of all layers; and where
    these have none in common, the layer alone.

    Parameters
    ----------
    told
        Names of weights that another finding tells of.
    """
    config = checkpoint.config or {}
    # Layers searched one by one may have no attention.
    if not view.moe_layers or any(holder.get("block_configs") for holder in (config, text_part(config))):
        return
    first = view.moe_layers[0]
    family = f".{view.blocks[first]}".rpartition(f".{first}.")[0].removeprefix(".")
    layers = _layers(family, view, linears)
    bare = [number for number, parts in layers.items() if not any(map(_mixes, parts.items()))]
    if len(bare) != 1 or len(layers) < 2:
        return
    [lost] = bare
    sisters = {number: parts for number, parts in layers.items() if number != lost}
    norms, start = _norms(layers[lost]), f"{family}.{lost}."
    # One norm is that of the layer's only half.
    alike = len(norms) > 1 and any(_norms(parts) == norms for parts in sisters.values())
    has_mlp = lost in view.experts_in or any(map(_is_mlp, layers[lost].items()))
    # What is stored in a way that is not known here may be a mixer.
    if not (alike and has_mlp) or any(name.startswith(start) for name in told) or _has_more(checkpoint, start):
        return
    kinds = _kinds(config)
    known = len(kinds) > max(layers) and any(kinds[number] == kinds[lost] for number in sisters)
    mates = [number for number in sisters if not known or kinds[number] == kinds[lost]]
    common = set.intersection(*(_weights(layers[number]) for number in mates))
    if common:
        yield missing_finding("weight", [f"{start}{name}" for name in sorted(common)], view)
        return
    parts = sorted({part for number in mates for part in filter(MIXERS.search, layers[number]) if "norm" not in part})
    yield make(
        "scale.missing", "error", text="scale.missing.mixer", role="weight", layer=lost, tensors=[start[:-1]],
        fill={"parts": ", ".join(parts), "numbers": [lost]},
    )  # fmt: skip


def _layers(family: str, view: CanonicalView, linears: Iterable[Linear]) -> Layers:
    found: Layers = {}
    for linear in linears:
        match = _IN_LAYER.match(linear.name)
        if match is None or match[1] != family or is_draft(linear.name, view.layers):
            continue
        below = found.setdefault(int(match[2]), {}).setdefault(match[3], set())
        suffix = next((name for name in ("weight", "weight_packed") if name in linear.tensors), None)
        if suffix is not None and "norm" not in linear.name.rpartition(".")[2]:
            below.add(f"{match[4]}.{suffix}" if match[4] else suffix)
    return found


def _mixes(part: tuple[str, set[str]]) -> bool:
    name, weights = part
    return bool(weights and MIXERS.search(name) and "norm" not in name)


def _is_mlp(part: tuple[str, set[str]]) -> bool:
    name, weights = part
    return bool(weights and not MIXERS.search(name) and "norm" not in name)


def _norms(parts: Iterable[str]) -> set[str]:
    return {part for part in parts if "norm" in part}


def _weights(parts: Mapping[str, set[str]]) -> set[str]:
    return {f"{part}.{name}" for part, names in parts.items() if _mixes((part, names)) for name in names}


def _has_more(checkpoint: Checkpoint, start: str) -> bool:
    """Is there a matrix in a part of this layer that mixes, or something of the layer in a file that cannot be read?"""
    if any(name.startswith(start) for name in checkpoint.unreadable):
        return True
    for name, entry in checkpoint.tensors.items():
        if name.startswith(start) and len(entry.shape) > 1:
            part = name[len(start) :].partition(".")[0]
            if MIXERS.search(part) and "norm" not in part:
                return True
    return False


def _kinds(config: Mapping[str, Any]) -> Sequence[Any]:
    """What kind each layer is of, as the configuration says it in one of several ways; empty where it does not."""
    holder = text_part(config)
    listed = next((value for key, value in holder.items() if _KINDS.match(key) and isinstance(value, (list, str))), ())
    count = holder.get("num_hidden_layers")
    if listed or not is_size(count):
        return listed
    every = holder.get("full_attention_interval")
    if is_size(every):
        return [(layer + 1) % every == 0 for layer in range(count)]
    period, offset = holder.get("attn_layer_period"), holder.get("attn_layer_offset", 0)
    return [layer % period == offset for layer in range(count)] if is_size(period) else ()
