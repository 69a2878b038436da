"""Whole layers that are not there: lost with a shard, left out of all shards, or without their experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nvfp4viz.audit.facts import Facts
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.texts import id_list
from nvfp4viz.checkpoint import printable
from nvfp4viz.checkpoint.dialects import parse_expert_name


def layer_findings(facts: Facts) -> Iterator[Finding]:
    """``expert.absent`` of whole layers, and ``audit.partial`` where a shard that is reported took them along."""
    yield from _without_experts(facts)
    yield from _unseen(facts)


def _without_experts(facts: Facts) -> Iterator[Finding]:
    """Layers whose router is there and of whose experts nothing is: a shard that nobody misses."""
    view = facts.view
    if not view.moe_layers or facts.checkpoint.blind_files:
        return
    first = view.moe_layers[0]
    block = view.blocks[first]
    family, _, tail = block.rpartition(f".{first}.")
    if not family or not tail.endswith(".experts"):
        return
    unread = {parsed.block for name in facts.checkpoint.unreadable if (parsed := parse_expert_name(name))}
    tensors = facts.checkpoint.tensors
    known = set(view.blocks.values())
    for layer in range(max(view.layers or 0, view.moe_layers[-1] + 1)):
        here = f"{family}.{layer}.{tail}"
        router = f"{here.removesuffix('.experts')}.gate.weight"
        if here in known or here in unread or router not in tensors:
            continue
        ids = tuple(range(view.experts))
        names = [here]
        yield make(
            "expert.absent", "error", text="expert.absent.layer", layer=layer, experts=ids, tensors=names,
            count=len(ids), fill={"router": printable(router, 200)},
        )  # fmt: skip


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
    first = view.moe_layers[0]
    family = f".{view.blocks[first]}".rpartition(f".{first}.")[0].removeprefix(".")
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
