"""Routers, attention's projections and parts of recurrences that a layer lacks and its sisters have.

Nothing but the other layers says that they belong there, so they must agree: every layer with experts chooses them by a
router, and keys or values lack in one layer only, beside the others of its kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nvfp4viz.audit.layer_kinds import are_halves, is_mlp, is_uneven, kinds_of
from nvfp4viz.audit.linears import SUFFIXES, Linear, is_weightless, missing_finding, stored_beginnings
from nvfp4viz.audit.mixers import mixer_findings
from nvfp4viz.audit.module_names import ATTENTION, MIXERS, family_of, is_draft
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.routers import router_names
from nvfp4viz.audit.shapes import text_part
from nvfp4viz.checkpoint import CanonicalView, Checkpoint
from nvfp4viz.checkpoint.dialects.recognise import UNREAD

_PLACE = re.compile(r"^(.*?(?:^|\.)layers)\.(\d{1,6})\.(.+)\.([^.]+)$")
_HEAD = re.compile(r"^(.*?(?:^|\.)layers)\.(\d{1,6})\.([^.]+)")
_IN_PART = re.compile(r"^(.*?(?:^|\.)layers)\.(\d{1,6})\.([^.]+)\.(.+)$")
# Layers that take keys and values from one another, that take values from keys, and that attend to something else.
_SHARES = re.compile(r"kv_shared|share_kv|kv_share|^use_cla$")
_VALUES_ARE_KEYS = re.compile(r"k_eq_v")
_CROSSES = re.compile(r"cross_attention|cross_decoder")
_VALUES = frozenset({"v_proj", "wv"})
_KEYS_AND_VALUES = _VALUES | {"k_proj", "kv_b_proj", "kv_a_proj_with_mqa", "wk", "wkv"}


def sister_findings(checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear]) -> Iterator[Finding]:
    """``scale.missing`` of a weight: a router, a projection of attention, a part of a recurrence, or a whole mixer."""
    if checkpoint.blind_files or checkpoint.source.only is not None:
        return
    config = checkpoint.config or {}
    linears = tuple(linears)
    names = _routers(checkpoint, view)
    keys = {key for holder in (config, text_part(config)) for key, value in holder.items() if value}
    if not is_uneven(config) and not any(map(_CROSSES.search, keys)):
        modules = [*linears, *_unread(checkpoint)]
        shared = _KEYS_AND_VALUES if any(map(_SHARES.search, keys)) else frozenset()
        shared = shared or (_VALUES if any(map(_VALUES_ARE_KEYS.search, keys)) else frozenset())
        kinds = _attention(view, modules)
        of_each = list(_by_kind(view, config, kinds))
        # The only layer of its kind may take its values from its keys; a query and an output have all.
        names += _projections(kinds, shared | _VALUES if of_each else shared)
        names += [name for groups in of_each for name in _projections(groups, shared)]
        names += () if shared else _whole_attention(view, modules, kinds)
        parts = _recurrences(checkpoint, view)
        of_each = list(_by_kind(view, config, parts))
        for groups in of_each or [parts]:
            names += _projections(_without_attention(groups), frozenset(), several=bool(of_each))
    # A longer name, such as a packed one's, is one too.
    stored = stored_beginnings(checkpoint, names)
    lost = [name for name in dict.fromkeys(names) if name not in stored]
    if lost:
        yield missing_finding("weight", lost, view)
    yield from mixer_findings(checkpoint, view, linears, lost)


def _unread(checkpoint: Checkpoint) -> list[Linear]:
    """Modules of which something lies in a file that cannot be read: what a layer has, under whichever names."""
    modules = {
        module: None
        for module, _, suffix in (name.rpartition(".") for name in checkpoint.unreadable)
        if suffix in SUFFIXES and ".experts." not in module
    }
    return [Linear(module, UNREAD, None, {}) for module in modules]


def _routers(checkpoint: Checkpoint, view: CanonicalView) -> list[str]:
    """Routers of layers that have none under any of their names, where most layers have one."""
    names = {layer: router_names(view.blocks[layer]) for layer in view.moe_layers}
    known = (checkpoint.tensors, checkpoint.unreadable)
    found = {
        layer: [at for at, name in enumerate(own) if any(name in held for held in known)]
        for layer, own in names.items()
    }
    without = [layer for layer, places in found.items() if not places]
    if not without or 2 * len(without) > len(found):
        return []
    # Experts and nothing else are a piece of a layer, not a layer without its router.
    without = [layer for layer in without if _has_more(checkpoint, view.blocks[layer], layer)]
    usual = Counter(places[0] for places in found.values() if places).most_common(1)[0][0]
    return [names[layer][usual] for layer in without if usual < len(names[layer])]


def _has_more(checkpoint: Checkpoint, block: str, layer: int) -> bool:
    head, found, _ = block.partition(f".{layer}.")
    start = head + found
    return any(name.startswith(start) and not name.startswith(block) for name in checkpoint.tensors)


Kinds = dict[tuple[str, str], dict[int, set[str]]]
"""By family and path inside a layer, by layer: what is stored there, such as ``q_proj.weight``."""


def _attention(view: CanonicalView, linears: Iterable[Linear]) -> Kinds:
    """Attention's projections."""
    kinds: Kinds = {}
    for linear in linears:
        last = linear.name.rpartition(".")[2]
        # One that has lost its weight and kept its scales is told of as such (`weightless`).
        known = last in ATTENTION and (linear.format != "other" or is_weightless(linear))
        match = _PLACE.match(linear.name) if known else None
        if match is not None and not is_draft(linear.name, view.layers):
            kinds.setdefault((match[1], match[3]), {}).setdefault(int(match[2]), set()).add(f"{last}.weight")
    return kinds


def _recurrences(checkpoint: Checkpoint, view: CanonicalView) -> Kinds:
    """Everything but biases and scales in parts that mix tokens, vectors such as ``A_log`` among them."""
    kinds: Kinds = {}
    for name in (*checkpoint.tensors, *checkpoint.unreadable):
        match = None if ".experts." in name else _IN_PART.match(name)
        if match is None or not MIXERS.search(match[3]) or "norm" in match[3] or is_draft(name, view.layers):
            continue
        module, _, last = match[4].rpartition(".")
        if last == "bias" or "scale" in last or "zero" in last:
            continue
        # Codes are a weight under whichever name.
        stored = f"{module}.weight" if module and "weight" in last else match[4]
        kinds.setdefault((match[1], match[3]), {}).setdefault(int(match[2]), set()).add(stored)
    return kinds


def _without_attention(groups: Kinds) -> Kinds:
    """The groups of layers of which none has a projection of attention: of these `_attention` speaks."""
    return {
        place: layers
        for place, layers in groups.items()
        if not any(name.partition(".")[0] in ATTENTION for names in layers.values() for name in names)
    }


def _by_kind(view: CanonicalView, config: Mapping[str, Any], groups: Kinds) -> Iterator[Kinds]:
    """The same for the layers of each kind that the configuration knows, where it does."""
    family = family_of(view) if view.moe_layers else None
    numbers = [number for place, layers in groups.items() if place[0] == family for number in layers]
    kinds = kinds_of(config, max(numbers) + 1) if numbers else ()
    for kind in dict.fromkeys(map(str, kinds)):
        if are_halves(kinds) and is_mlp(kind):
            continue
        mine = {number for number, own in enumerate(kinds) if str(own) == kind}
        yield {
            place: {number: names for number, names in layers.items() if number in mine}
            for place, layers in groups.items()
            if place[0] == family
        }


def _whole_attention(view: CanonicalView, linears: Iterable[Linear], kinds: Kinds) -> list[str]:
    """All projections of the one layer that has none, while all else of it is what the other layers have."""
    parts: dict[str, dict[int, set[str]]] = {}
    for linear in linears:
        match = _HEAD.match(linear.name)
        if match is not None:
            parts.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    lost = []
    for (family, path), layers in kinds.items():
        usual, head, beside = next(iter(layers.values())), path.partition(".")[0], parts.get(family, {})
        without = [
            number for number in beside.keys() - layers.keys() if not is_draft(f"{family}.{number}.x", view.layers)
        ]
        if len(layers) < 2 or len(without) != 1 or any(each != usual for each in layers.values()):
            continue
        own = beside[without[0]]
        # A norm stands before attention; a piece of a layer has none.
        whole = any("norm" in part for part in own)
        if whole and head not in own and any(own | {head} == beside.get(number) for number in layers):
            lost += [f"{family}.{without[0]}.{path}.{name}" for name in sorted(usual)]
    return lost


def _projections(groups: Kinds, shared: frozenset[str], *, several: bool = True) -> Iterator[str]:
    """What a layer's attention or recurrence lacks, while the others have it.

    Parameters
    ----------
    shared
        Projections that layers take from elsewhere, as the configuration says.
    several
        Several layers that lack it are no kind of their own.
    """
    for (family, path), layers in groups.items():
        sets = {
            layer: frozenset(name for name in names if name.partition(".")[0] not in shared)
            for layer, names in layers.items()
        }
        # Sliding and full attention may differ; a few layers that lack a part of what most have do not.
        usual = max(Counter(sets.values()).items(), key=lambda item: (item[1], len(item[0])), default=(frozenset(), 0))[
            0
        ]
        odd = {layer: names for layer, names in sets.items() if names != usual}
        if not odd or 2 * len(odd) > len(sets) or not all(names < usual for names in odd.values()):
            continue
        for layer, names in odd.items():
            for name in sorted(usual - names):
                # Several layers may take keys and values from others.
                if len(odd) == 1 or (several and name.partition(".")[0] not in _KEYS_AND_VALUES):
                    yield f"{family}.{layer}.{path}.{name}"
