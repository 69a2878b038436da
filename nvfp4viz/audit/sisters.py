"""Routers and attention projections that one layer lacks and its sisters have.

Nothing but the other layers says that they belong there, so they must agree: every layer with experts chooses them by a
router, and attention lacks a projection in one layer only, beside the others of its kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from nvfp4viz.audit.linears import SUFFIXES, Linear, is_weightless, missing_finding, stored_beginnings
from nvfp4viz.audit.mixers import mixer_findings
from nvfp4viz.audit.module_names import ATTENTION, is_draft
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.routers import router_names
from nvfp4viz.audit.shapes import text_part
from nvfp4viz.checkpoint import CanonicalView, Checkpoint
from nvfp4viz.checkpoint.dialects.recognise import UNREAD

_PLACE = re.compile(r"^(.*?(?:^|\.)layers)\.(\d{1,6})\.(.+)\.([^.]+)$")
_HEAD = re.compile(r"^(.*?(?:^|\.)layers)\.(\d{1,6})\.([^.]+)")
# Layers that take keys and values from one another, or from one projection, and layers searched one by one.
_SHARES = re.compile(r"k_eq_v|kv_shared|share_kv|kv_share|cross_attention|cross_decoder|block_configs")


def sister_findings(checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear]) -> Iterator[Finding]:
    """``scale.missing`` of a weight: a router, a projection of attention, or all of it."""
    if checkpoint.blind_files or checkpoint.source.only is not None:
        return
    config = checkpoint.config or {}
    linears = tuple(linears)
    names = _routers(checkpoint, view)
    shares = text_part(config).get("use_cla") or any(_SHARES.search(key) for key in (*config, *text_part(config)))
    if not shares:
        modules = [*linears, *_unread(checkpoint)]
        kinds = _attention(view, modules)
        names += [*_projections(kinds), *_whole_attention(view, modules, kinds)]
    # A longer name, such as a packed one's, is one too.
    stored = stored_beginnings(checkpoint, names)
    lost = [name for name in names if name not in stored]
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
"""By family and path inside a layer, by layer: attention's projections that are stored."""


def _attention(view: CanonicalView, linears: Iterable[Linear]) -> Kinds:
    kinds: Kinds = {}
    for linear in linears:
        last = linear.name.rpartition(".")[2]
        # One that has lost its weight and kept its scales is told of as such (`weightless`).
        known = last in ATTENTION and (linear.format != "other" or is_weightless(linear))
        match = _PLACE.match(linear.name) if known else None
        if match is not None and not is_draft(linear.name, view.layers):
            kinds.setdefault((match[1], match[3]), {}).setdefault(int(match[2]), set()).add(last)
    return kinds


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
            lost += [f"{family}.{without[0]}.{path}.{last}.weight" for last in sorted(usual)]
    return lost


def _projections(kinds: Kinds) -> list[str]:
    """A projection that one layer's attention lacks, while all others that have the others have it."""
    lost = []
    for (family, path), layers in kinds.items():
        # Sliding and full attention may differ; one layer alone among many of one kind does not.
        (usual, _), *others = Counter(map(frozenset, layers.values())).most_common()
        odd = [layer for layer, parts in layers.items() if parts != usual]
        if len(odd) == 1 and len(others) == 1 and layers[odd[0]] < usual:
            lost += [f"{family}.{odd[0]}.{path}.{last}.weight" for last in sorted(usual - layers[odd[0]])]
        elif len(odd) == 1 and len(layers) == 2 and usual < layers[odd[0]]:
            # Of two layers the one with more is the whole one.
            short = next(layer for layer in layers if layer != odd[0])
            lost += [f"{family}.{short}.{path}.{last}.weight" for last in sorted(layers[odd[0]] - usual)]
    return lost
