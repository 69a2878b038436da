"""Layers that have lost all that mixes their tokens: attention, or the recurrence or convolution in its place.

Kinds of layers alternate in many models, so that no two neighbours need be alike; but a layer with an MLP and the norms
of its sisters, and nothing between them, is none of any kind.  Where the configuration says the kind, it is due there,
whatever the others have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.layer_kinds import all_attend, are_halves, is_uneven, kinds_of, mixes_tokens
from nvfp4viz.audit.linears import Linear, missing_finding
from nvfp4viz.audit.module_names import MIXERS, family_of, is_draft
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.texts import layer_list
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, printable
from nvfp4viz.checkpoint.dialects.collect import is_tower

_IN_LAYER = re.compile(r"^(.*?(?:^|\.)layers)\.(\d{1,6})\.([^.]+)\.?(.*)$")

Layers = dict[int, dict[str, set[str]]]
"""By layer, by part of it: the weights below that part that are no norms' (of a part without any, none)."""


def mixer_findings(
    checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear], told: Iterable[str] = ()
) -> Iterator[Finding]:
    """``scale.missing`` of a weight: all that mixes tokens, in layers that have nothing of it.

    Named are the weights that all layers of its kind have; where the kind is unknown, those of all layers; and where
    these have none in common, the layers alone.  Several layers are a fault where the configuration, or the family,
    says that they mix tokens; else they may do without on purpose, and that is a note.

    Parameters
    ----------
    told
        Names of weights that another finding tells of.
    """
    config = checkpoint.config or {}
    if not view.moe_layers or is_uneven(config):
        return
    family = family_of(view)
    layers = _layers(family, view, linears)
    kinds = kinds_of(config, max(layers) + 1) if layers else ()
    bare = [number for number, parts in layers.items() if not any(map(_mixes, parts.items()))]
    full = {number: parts for number, parts in layers.items() if number not in bare}
    if not bare or (not full and _mixes_elsewhere(checkpoint, view, family)):
        return
    told = tuple(told)
    lost: dict[str, list[int]] = {}
    for number in bare:
        start, own = f"{family}.{number}.", layers[number]
        reason = _reason(own, full, kinds[number : number + 1], config, halves=are_halves(kinds))
        with_mlp = number in view.experts_in or any(map(_is_mlp, own.items())) or are_halves(kinds)
        if reason is None or not with_mlp or any(name.startswith(start) for name in told):
            continue
        # What is stored in a way that is not known here may be a mixer.
        if _may_mix(own, full) or _has_more(checkpoint, start):
            continue
        lost.setdefault("alone" if reason == "perhaps" and full and len(bare) == 1 else reason, []).append(number)
    for reason, numbers in lost.items():
        yield from _of_reason(reason, sorted(numbers), family, full, kinds, view)


def _reason(
    own: Mapping[str, Any], full: Layers, kind: Sequence[Any], config: Mapping[str, Any], *, halves: bool
) -> str | None:
    """Why a layer without a mixer should have one: its ``kind``, its ``family``, or ``perhaps`` its sisters' norms."""
    norms = _norms(own)
    if any(map(mixes_tokens, kind)):
        return "kind" if norms else None
    # One norm is that of the layer's only half.
    if halves or len(norms) < 2 or not (any(_norms(parts) == norms for parts in full.values()) or not full):
        return None
    return "family" if all_attend(config) else "perhaps"


def _of_reason(
    reason: str, lost: Sequence[int], family: str, full: Layers, kinds: Sequence[Any], view: CanonicalView
) -> Iterator[Finding]:
    named: list[str] = []
    left: list[int] = []
    for number in lost if reason != "perhaps" else ():
        mates = [other for other in full if not kinds or kinds[other] == kinds[number]]
        if not mates and not mixes_tokens(kinds[number] if kinds else None):
            mates = list(full)
        common = set.intersection(*(_weights(full[other]) for other in mates)) if mates else set()
        named += [f"{family}.{number}.{name}" for name in sorted(common)]
        left += [] if common else [number]
    if named:
        yield missing_finding("weight", named, view)
    if reason == "perhaps":
        left = list(lost)
    if not left:
        return
    parts = sorted({part for parts in full.values() for part in filter(MIXERS.search, parts) if "norm" not in part})
    said = sorted({str(kinds[number]) for number in left}) if reason == "kind" else []
    text = "" if reason == "alone" else f".{reason}"
    yield make(
        "scale.missing", "info" if reason == "perhaps" else "error", text=f"scale.missing.mixer{text}", role="weight",
        layer=left[0] if len(left) == 1 else None, tensors=[f"{family}.{number}" for number in left],
        fill={"parts": ", ".join(parts), "kinds": printable(", ".join(said), 100), **layer_list(left)},
    )  # fmt: skip


def _mixes_elsewhere(checkpoint: Checkpoint, view: CanonicalView, family: str) -> bool:
    """Where no layer has a mixer: are they kept under other names, or is this a piece that has no embedding either?"""
    embedded = False
    for name in (*checkpoint.tensors, *checkpoint.unreadable):
        if ".experts." in name or is_tower(name):
            continue
        embedded = embedded or "embed" in name
        if name.startswith(f"{family}.") or is_draft(name, view.layers):
            continue
        parts = name.split(".")[:-1]
        if any(map(str.isdecimal, parts)) and any(MIXERS.search(part) and "norm" not in part for part in parts):
            return True
    return not embedded


# Parts of a layer that are its MLP, its experts, or what chooses and weighs them.
_OF_MLP = re.compile(r"mlp|moe|expert|ffn|feed_?forward|router|gate")


def _may_mix(own: Mapping[str, set[str]], full: Layers) -> bool:
    """Has a layer a matrix in a part that neither belongs to an MLP nor stands beside the mixer of another layer?"""
    beside = {part for parts in full.values() for part in parts}
    return any(
        _is_mlp((part, names)) and part not in beside and not _OF_MLP.search(part) for part, names in own.items()
    )


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
