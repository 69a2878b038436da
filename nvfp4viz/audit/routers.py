"""Routers: what their matrices are called, and whether they fit the experts that they choose among.

A server allocates a router by the configuration, one row for each expert and as wide as the model, and stops at another
shape as it does for experts (`shapes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nvfp4viz.audit.facts import Facts
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.linears import FP8
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.scales import block_width
from nvfp4viz.audit.shapes import configured_sizes, hidden_and_width, is_latent, is_size, matrix_size, text_part
from nvfp4viz.audit.texts import layer_list
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, Module, TensorEntry
from nvfp4viz.checkpoint.canonical_view import EXPERT_KEYS, config_experts
from nvfp4viz.checkpoint.dialects import PACKED
from nvfp4viz.checkpoint.modules import FLOATS

# What a router's matrix is called, below, beside or above a layer's experts.
ROUTERS = (
    "gate.weight", "router.weight", "router.proj.weight", "router.layer.weight", "router.classifier.weight",
    "gate.wg.weight", "router.gate.weight",
)  # fmt: skip
Shape = tuple[int, ...]


def router_names(block: str) -> list[str]:
    """Every name that the router of a block of experts may have.

    >>> router_names("model.layers.0.mlp.experts")[7:9]
    ['model.layers.0.mlp.gate.weight', 'model.layers.0.mlp.router.weight']
    """
    parts = block.split(".")
    above = [".".join(parts[: len(parts) - up]) for up in range(3)]
    return [f"{parent}.{router}" for parent in above if parent for router in ROUTERS]


def router_findings(facts: Facts, config: Mapping[str, Any]) -> Iterator[Finding]:
    """``weight.shape`` of routers that have another number of rows, or another width, than their experts ask for.

    Each number that the configuration or the experts give is good enough: where those two differ, that is said already,
    and a router without rows for experts at the end never chooses them (padding).

    Parameters
    ----------
    config
        The configuration that these experts belong to; empty for another tower's.
    """
    checkpoint, view = facts.checkpoint, facts.view
    # Of ERNIE 4.5 VL, whose list has a number for text and one for images, loaders turn the stored matrix round.
    turns = isinstance(text_part(config).get("moe_num_experts"), list)
    found: dict[int, list[tuple[str, Shape]]] = {}
    for layer in (*view.moe_layers, *view.draft_layers):
        entries = (checkpoint.tensors.get(name) for name in router_names(view.blocks[layer]))
        sizes = [(entry.name, _size(checkpoint, entry)) for entry in entries if entry is not None]
        found[layer] = [(name, size) for name, size in sizes if size is not None]
        if turns:
            found[layer] += [(name, size[::-1]) for name, size in found[layer]]
    found = {layer: routers for layer, routers in found.items() if routers}
    if not found:
        return
    widths = _widths(facts, config, found)
    odd = []
    for layer, routers in found.items():
        counts = _counts(facts, config, layer)
        fits = (len(size) == 2 and size[0] in (counts or size) and size[1] in widths for _, size in routers)
        if not any(fits):
            odd.append((layer, *routers[0], counts))
    # Experts are counted one by one only where something is wrong.
    stored = _stored(view, [layer for layer, *_ in odd])
    more = _weightless(config)
    wrong: dict[tuple[Shape, Shape], dict[int, str]] = {}
    for layer, name, size, counts in odd:
        if size[:1] == (len(stored[layer]) + more,) and len(size) == 2 and size[1] in widths:
            continue
        # The configuration's word comes first in both.
        expected = (next(iter(counts), size[0] if size else 1), next(iter(widths), size[-1] if size else 1))
        wrong.setdefault((size, expected), {})[layer] = name
    for (size, expected), names in wrong.items():
        alike = len(names) == len(found)
        ending = _may_be_meant(size, expected, len(found), config_experts(config, min(names))) if alike else ""
        if ending is None:
            continue
        where = sorted(names)
        yield make(
            "weight.shape", "info" if ending else "error", text=f"weight.shape.router{ending}", role="weight",
            layer=where[0] if len(where) == 1 else None, tensors=[names[layer] for layer in where],
            fill={"found": list(size), "expected": list(expected), **layer_list(where)},
        )  # fmt: skip


def _may_be_meant(size: Shape, expected: Shape, layers: int, claimed: int | None) -> str | None:
    """How the text's key ends for a shape that all layers' routers have, and that may be meant: a family's own kind.

    Empty where it is wrong all the same, None where nothing is said of it.
    """
    if layers > 1 and len(size) != 2:
        return None
    if layers > 1 and size == expected[::-1]:
        return ".turned"
    if layers > 1 and size[0] > expected[0] and size[1] == expected[1]:
        return ".more"
    # Nobody says how many experts there are, and those at the end may be padding.
    padded = len(size) == 2 and size[0] < expected[0] and size[1] == expected[1]
    return ".fewer" if padded and claimed is None else ""


def _stored(view: CanonicalView, layers: Iterable[int]) -> dict[int, set[int]]:
    """The experts of which something is stored, by layer."""
    stored: dict[int, set[int]] = {layer: set() for layer in layers}
    if stored:
        for layer, expert, _ in view.modules:
            if layer in stored:
                stored[layer].add(expert)
    return stored


def _size(checkpoint: Checkpoint, entry: TensorEntry) -> Shape | None:
    """Rows and values of a router, as a shape; None where it is in a format whose values are not counted here."""
    if entry.dtype in FLOATS or entry.dtype in FP8:
        return entry.shape
    scale = checkpoint.tensors.get(f"{entry.name}_scale")
    if entry.dtype in PACKED and scale is not None and len(entry.shape) == 2 and block_width(entry, scale) in (16, 32):
        return matrix_size(entry, scale)
    return None


def _counts(facts: Facts, config: Mapping[str, Any], layer: int) -> dict[int, None]:
    """How many rows a layer's router may have, the likeliest first; none where nobody knows."""
    claimed = config_experts(config, layer)
    if claimed is None and (facts.checkpoint.blind_files or facts.checkpoint.source.only is not None):
        # The others may lie in another shard.
        return {}
    counts = dict.fromkeys(number for number in (claimed, facts.view.experts_in[layer]) if number)
    holder = text_part(config)
    for key in EXPERT_KEYS:
        listed = holder.get(key)
        # A router for each kind of expert (ERNIE 4.5 VL: text and images).
        counts |= dict.fromkeys(number for number in listed if is_size(number)) if isinstance(listed, list) else {}
    more = _weightless(config)
    return dict.fromkeys(number + more for number in counts)


def _weightless(config: Mapping[str, Any]) -> int:
    """Rows of a router for experts that have no weights (LongCat's zero experts, which pass a token on as it is)."""
    number = text_part(config).get("zero_expert_num")
    return number if is_size(number) else 0


def _widths(facts: Facts, config: Mapping[str, Any], found: Mapping[int, list[tuple[str, Shape]]]) -> dict[int, None]:
    """How wide a router may be, the likeliest first: as the model, as some experts, or else as most routers are."""
    said = configured_sizes(config)[0]
    # That layers disagree is said of their experts.
    experts = Counter(hidden for layer in found for hidden in _hidden_of_first(facts.view, layer)).most_common()
    known = dict.fromkeys([*([said] if said is not None else []), *(hidden for hidden, _ in experts)])
    routers = Counter(size[1] for sizes in found.values() for _, size in sizes if len(size) == 2)
    # Experts in a narrower space say nothing of the vector that the router reads (Nemotron 3 Super).
    silent = said is None and not known.keys() >= routers.keys() and is_latent(facts.checkpoint, config)
    if not known or silent:
        known |= dict.fromkeys(width for width, count in routers.items() if count == max(routers.values()))
    return known


def _hidden_of_first(view: CanonicalView, layer: int) -> set[int]:
    """The hidden sizes of the first expert's projections."""
    dialect = view.dialects.get(layer)
    group = dialect.group if dialect else 0
    return {
        hidden_and_width(kind, size)[0]
        for kind in view.projections_in[layer] if (size := _matrix(view.module(layer, 0, kind), group)) is not None
    }  # fmt: skip


def _matrix(module: Module, group: int) -> tuple[int, int] | None:
    weight = module.tensors.get("weight", module.extras.get("weight"))
    scale = module.tensors.get("weight_scale")
    if weight is None:
        return None
    if module.state == "quantised" and scale is not None:
        return matrix_size(weight, scale) if block_width(weight, scale) == group else None
    # Of plain tensors that hold all experts nobody knows which axis is which.
    flat = not module.whole and len(weight.shape) == 2 and weight.dtype in (*FLOATS, *FP8)
    return (weight.shape[0], weight.shape[1]) if flat else None
