"""Whole layers that are not there: lost with a shard, left out of all shards, or without their experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from nvfp4viz.audit.facts import CLAIMS, Facts
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.layer_kinds import are_halves, kinds_of, mixes_tokens
from nvfp4viz.audit.module_names import MIXERS, family_of, is_draft
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.shapes import text_part
from nvfp4viz.audit.texts import id_list, layer_list
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, QuantConfig, TensorEntry, printable
from nvfp4viz.checkpoint.canonical_view import config_experts

# Parts of a name that only layers with experts have: routers, and what runs beside the routed experts.
_BESIDE = re.compile(
    r"(?:^|\.)(?:gate|router(?:_bias)?|shared?_experts?|shared_expert_gate|e_score_correction_bias)(?:\.|$)"
)
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router)\.(?:.*\.)?weight$")
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.(.+)$")
# Names with the word that are beside the routed experts.
_NO_EXPERTS = re.compile(r"shared?_experts?|per_expert_scale")
# What a configuration calls it when some layers have no experts.
_DENSE_KEYS = re.compile(r"dense|mlp_only|moe_layer|interleave|sparse_step|block_configs|block_type|hybrid")


def layer_findings(facts: Facts) -> Iterator[Finding]:
    """``expert.absent`` of whole layers, and ``audit.partial`` where a shard that is reported took them along."""
    yield from _without_experts(facts)
    yield from _unseen(facts)


def _without_experts(facts: Facts) -> Iterator[Finding]:
    """Layers that should have experts, or an MLP, and have none: a shard that nobody misses."""
    view = facts.view
    if not view.moe_layers or facts.checkpoint.blind_files:
        return
    first = view.moe_layers[0]
    family, _, tail = f".{view.blocks[first]}".rpartition(f".{first}.")
    family = family.removeprefix(".")
    bare = [at for at in range(max(view.layers or 0, view.moe_layers[-1] + 1)) if at not in view.experts_in]
    if not (family and bare):
        return
    lost = _numbers_after(f"{family}.", facts.checkpoint.unreadable)
    bare = [layer for layer in bare if str(layer) not in lost]
    paths = _paths(facts, f"{family}.")
    among = set().union(*(paths.get(layer, ()) for layer in view.moe_layers))
    ids = tuple(range(view.experts))
    left = []
    for layer in bare:
        beside = sorted(path for path in paths.get(layer, set()) & among if _is_beside(path, tail))
        if not beside:
            left.append(layer)
            continue
        router = next((path for path in beside if _ROUTER.search(path)), None)
        yield make(
            "expert.absent", "error", text=f"expert.absent.layer{'' if router else '.beside'}", layer=layer,
            experts=ids, tensors=[f"{family}.{layer}.{tail}"], count=len(ids),
            fill={"router": printable(f"{family}.{layer}.{router or beside[0]}", 200)},
        )  # fmt: skip
    parts = {layer: {path.partition(".")[0] for path in found} for layer, found in paths.items()}
    for layer in _halves(facts, parts, left, tail):
        fill = {"parts": ", ".join(sorted(parts[layer])), "module": tail.partition(".")[0]}
        yield make(
            "expert.absent", "error", text="expert.absent.mlp", layer=layer, tensors=[f"{family}.{layer}.{tail}"],
            count=1, fill=fill,
        )  # fmt: skip


def no_layer_findings(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """``expert.absent`` where routers or nothing at all is stored, the configuration counts experts, and none is there.

    Nothing may be stored that could be experts in a layout that is not read here: no name speaks of them, and no tensor
    of a router's layer holds one matrix for each.
    """
    if view.moe_layers or checkpoint.blind_files or checkpoint.unreadable or checkpoint.source.only is not None:
        return
    if view.layers and not len(checkpoint.tensors):
        claimed = config_experts(checkpoint.config or {}, view.layers - 1) or 0
        algo = _algo_beside(checkpoint.quant_config, "model.layers.0.mlp.gate.weight")
        fill = {**layer_list(list(range(view.layers))), "claimed": claimed, "algo": algo}
        if claimed > 1 and algo is not None:
            yield make("expert.absent", "error", text="expert.absent.all.empty", count=view.layers, fill=fill)
        return
    counts, routers = set(), dict[int, str]()
    for name, entry in checkpoint.tensors.items():
        place = _IN_LAYER.match(name)
        if place is None or not _ROUTER.search(place[2]) or "attn" in place[2] or is_draft(name, view.layers):
            continue
        claimed = config_experts(checkpoint.config or {}, int(place[1])) or 0
        if claimed > 1 and claimed in entry.shape:
            counts.add(claimed)
            routers.setdefault(int(place[1]), name)
    if not routers or any(_may_be_experts(name, entry, counts) for name, entry in checkpoint.tensors.items()):
        return
    layers = sorted(routers)
    names = [routers[layer] for layer in layers]
    fill = {
        **layer_list(layers), "claimed": max(counts), "router": printable(names[0], 200),
        "algo": _algo_beside(checkpoint.quant_config, names[0]),
    }  # fmt: skip
    yield make("expert.absent", "error", text="expert.absent.all", tensors=names, fill=fill)


def _algo_beside(quant: QuantConfig, router: str) -> str | None:
    """The four-bit algorithm of the experts that a router chooses among; None where they are in none, or excluded."""
    above = router.split(".")
    start = above.index("layers") + 2
    # Beside the router or above it, on its own or in a module of their own.
    heads = [".".join(above[:end]) for end in range(start, len(above))]
    names = [f"{head}.{tail}" for head in heads for tail in ("experts", "moe.experts", "mlp.experts", "moe")]
    below = [entry for section in quant.sections for name in names for entry in section.listed_below(name).values()]
    listed = [entry["quant_algo"] for entry in below if isinstance(entry, dict) and "quant_algo" in entry]
    algo = quant.algo_of(*names) or next((str(found).upper() for found in listed), None)
    mixed = quant.algo == "MIXED_PRECISION"
    if not algo or not ("FP4" in algo or algo.startswith(CLAIMS)) or quant.leaves_out(*names):
        return None
    return algo if mixed or not all(quant.is_excluded(name) for name in names) else None


def _may_be_experts(name: str, entry: TensorEntry, counts: set[int]) -> bool:
    if len(entry.shape) >= 3 and entry.shape[0] in counts:
        return True
    return "expert" in _NO_EXPERTS.sub("", name)


def _paths(facts: Facts, begin: str) -> dict[int, set[str]]:
    """What stands after the layer's number in every name that is no expert's, by layer."""
    found: dict[int, set[str]] = {}
    experts = {module.name for module in facts.view.modules.values() if module.whole}
    for name in facts.checkpoint.tensors:
        if ".experts." in name or not name.startswith(begin):
            continue
        number, _, path = name[len(begin) :].partition(".")
        if number.isascii() and number.isdecimal() and len(number) <= 6 and name.rpartition(".")[0] not in experts:
            found.setdefault(int(number), set()).add(path)
    return found


def _is_beside(path: str, tail: str) -> bool:
    """A path inside a layer that stands beside, above or below its experts, and never in a dense layer."""
    head, parent = path.partition(".")[0], tail.partition(".")[0]
    return (head == parent or bool(_BESIDE.fullmatch(head))) and bool(_BESIDE.search(path))


def _halves(facts: Facts, parts: Mapping[int, set[str]], bare: Iterable[int], tail: str) -> list[int]:
    """Layers with the norms of a layer with experts, and its attention if it has any, and nothing of an MLP.

    A norm stands before each half of a layer, so a layer of both norms has both halves.  Where another MLP runs beside
    the experts (Gemma 4) its being there says little: then nearly all layers must have experts, and the configuration
    must not speak of dense ones.
    """
    view, config = facts.view, facts.checkpoint.config or {}
    if any(holder.get("block_configs") for holder in (config, text_part(config))):
        return []
    kinds = kinds_of(config, max(parts, default=0) + 1)
    # What a layer of attention or of a recurrence alone has lost, `nvfp4viz.audit.mixers` tells.
    mixing = {layer for layer, kind in enumerate(kinds) if are_halves(kinds) and mixes_tokens(kind)}
    bare = [layer for layer in bare if layer not in mixing]
    parent = tail.partition(".")[0]
    full = [parts[layer] for layer in view.moe_layers if layer in parts]
    known = set().union(*full)
    found, beside = [], []
    for layer in bare:
        own = parts.get(layer, set())
        norms, mixers = _norms(own), {part for part in own if MIXERS.search(part)}
        alike = any(
            _norms(other) and _norms(other) <= norms and (not mixers or any(map(MIXERS.search, other)))
            for other in full
        )
        if parent in own or not alike:
            continue
        rest = own - norms - mixers
        if not {part for part in rest if part not in known or _MLP.search(part)}:
            found.append(layer)
        elif rest <= known:
            beside.append(layer)
    keys = {key: value for holder in (config, text_part(config)) for key, value in holder.items()}
    dense = any(_DENSE_KEYS.search(key) and value not in (None, 0, 1, [], False) for key, value in keys.items())
    return found if dense or 2 * len(beside) > len(full) else sorted([*found, *beside])


_MLP = re.compile(r"mlp|moe|expert|ffn|feed_?forward|router")


def _norms(parts: Iterable[str]) -> set[str]:
    return {part for part in parts if "norm" in part}


def unseen_layers(facts: Facts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the layers that the configuration counts: those of which the shards have no tensor.

    Returns
    -------
    lost, absent
        In shards that are missing or cannot be read; and in none, as far as anybody knows.
    """
    checkpoint, view = facts.checkpoint, facts.view
    if not (view.layers and view.moe_layers):
        return (), ()
    family = family_of(view)
    known = {layer for layer, _, _ in view.modules}
    unseen = [layer for layer in range(view.layers) if layer not in known]
    if not (unseen and family):
        return (), ()
    begin = f"{family}."
    # Dense layers have no experts, and other tensors.
    read = _numbers_after(begin, checkpoint.tensors)
    unseen = [layer for layer in unseen if str(layer) not in read]
    lost = set(unseen) if checkpoint.blind_files else set(map(int, _numbers_after(begin, checkpoint.unreadable)))
    return tuple(sorted(lost & set(unseen))), tuple(layer for layer in unseen if layer not in lost)


def _numbers_after(begin: str, names: Iterable[str]) -> set[str]:
    """What stands between ``begin`` and the next dot, where it is a number.

    >>> sorted(_numbers_after("model.layers.", ["model.layers.3.mlp", "model.layers.3.x", "model.layers.norm.weight"]))
    ['3']
    """
    start = len(begin)
    found = {name[start : start + 7].partition(".")[0] for name in names if name.startswith(begin)}
    return {number for number in found if number.isdecimal() and number.isascii()}


def _unseen(facts: Facts) -> Iterator[Finding]:
    """Layers of which nothing is said: an error where no shard is to blame, else a note beside the shard's."""
    lost, absent = unseen_layers(facts)
    for code, severity, text, layers in (
        ("expert.absent", "error", "expert.absent.unseen", absent),
        ("audit.partial", "info", "audit.partial.layers", lost),
    ):
        if layers:
            fill = {"unseen": id_list(layers), "numbers": layers, "layers": facts.view.layers}
            only = layers[0] if len(layers) == 1 else None
            yield make(code, severity, text=text, layer=only, count=len(layers), fill=fill)
