"""Sizes of shared experts and of dense layers' MLPs: against the configuration, their other layers and one another.

As for routed experts (`shapes`), a server allocates them by the configuration alone and stops at another shape.  Which
number of the configuration is theirs differs from family to family, so that it counts only where its name says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.fp8 import Said, misfit, said_of
from nvfp4viz.audit.linears import SUFFIXES, Linear, fp8_scale, missing_finding, stored_beginnings
from nvfp4viz.audit.module_names import family_of, is_draft
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.routers import router_names
from nvfp4viz.audit.scales import block_width
from nvfp4viz.audit.shapes import (
    Size,
    as_stored,
    configured_sizes,
    functions_of,
    hidden_and_width,
    is_latent,
    is_size,
    matrix_size,
    text_part,
)
from nvfp4viz.audit.texts import layer_list
from nvfp4viz.audit.unread import unread_below
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, printable
from nvfp4viz.checkpoint.canonical_view import config_experts
from nvfp4viz.checkpoint.dialects import PROJECTIONS

_MODULE = re.compile(r"^(.*?(?:^|\.)(?:layers|blocks|h))\.(\d{1,6})\.(.+)\.([^.]+)$")
_TOWER = re.compile(r"tower|vision|visual|audio|talker")
_DENSE = ("mlp", "feed_forward", "ffn", "mixer")
_SHARED = ("shared_expert", "shared_experts", "share_expert", "shared_mlp")
# Widths of a shared expert by name, and how many are stored as one.
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
    "share_expert_dim",
)  # fmt: skip
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")

Parts = dict[str, tuple[Size, str]]
"""Rows and values, and the module's name, by projection."""


def mlp_findings(checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear]) -> Iterator[Finding]:
    """``weight.shape`` of shared experts and dense MLPs; ``config.conflict`` where all have another width."""
    config = checkpoint.config or {}
    holder = text_part(config)
    hidden = _hidden(view) or configured_sizes(config)[0]
    mlps = _mlps(view, linears, said_of(checkpoint, view))
    found = {
        hidden_and_width(kind, size)[0]
        for layers in mlps.values() for parts in layers.values() for kind, (size, _) in parts.items()
    }  # fmt: skip
    # Every name of the checkpoint is looked at to know, and only where it makes a difference.
    if found - {hidden} and is_latent(checkpoint, config):
        hidden = None
    for path, layers in mlps.items():
        yield from _of_path(path, layers, hidden, _widths(holder, path.rpartition(".")[2]), _may_vary(holder))


def absent_findings(checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear]) -> Iterator[Finding]:
    """``scale.missing`` of a weight: an MLP without one of its projections, or a layer without its shared expert.

    Only what the names of the others prove: a gate without up or down, a projection or a shared expert that the other
    layers have.
    """
    holder = text_part(checkpoint.config or {})
    if checkpoint.blind_files or checkpoint.source.only is not None or holder.get("block_configs"):
        return
    linears = tuple(linears)
    yield from _no_shared(checkpoint, view, linears, holder)
    for path, layers in mlp_kinds(view, linears).items():
        every = {kind: disk for kinds in layers.values() for kind, disk in kinds.items()}
        if "gate_up" in every:
            continue
        # An up without a down is a piece of something.
        gate = {"up_proj": "gate_proj", "w3": "w1"}.get(every.get("up", "")) if "down" in every else None
        if (
            "gate" not in every
            and gate
            and _is_gated(checkpoint, view)
            and not _other_gate(checkpoint, view, layers, path)
        ):
            every["gate"] = gate
        if every.get("gate") == "gate_proj":
            every |= {"up": "up_proj", "down": "down_proj"}
        due = {layer: kinds.keys() for layer, kinds in layers.items()}
        if path.rpartition(".")[2] in _SHARED:
            without = [layer for layer in view.moe_layers if layer not in layers]
            said = any(is_size(holder.get(key)) for key in (*_SHARED_WIDTHS, *_SHARED_COUNTS))
            if said or 2 * len(without) <= len(layers):
                due |= {layer: {}.keys() for layer in without}
        elif not any(view.blocks[layer].endswith(f".{path}.experts") for layer in view.moe_layers):
            # An MLP beside the experts (Gemma 4), which nearly all layers with experts have.
            without = [layer for layer in view.moe_layers if layer not in layers]
            if 2 * len(without) <= len(layers.keys() & set(view.moe_layers)):
                due |= {layer: {}.keys() for layer in without}
        family = family_of(view)
        modules = [
            f"{family}.{layer}.{path}.{disk}."
            for layer, kinds in sorted(due.items()) for kind, disk in every.items() if kind not in kinds
        ]  # fmt: skip
        # What it has may have a name that this version does not know.
        stored = stored_beginnings(checkpoint, modules)
        heads = [f"{family}.{layer}.{path}." for layer in due]
        # In a file that cannot be read it may be stored in another way: in one tensor, or under another name.
        others = tuple(head for head in heads if _has_other(checkpoint, head, every.values()))
        names = [f"{module}weight" for module in modules if module not in stored and not module.startswith(others)]
        if names:
            yield missing_finding("weight", names, view)


def _has_other(checkpoint: Checkpoint, head: str, known: Collection[str]) -> bool:
    """Is a matrix of an MLP known, and cannot be read, that is none of its projections as they are called here?"""
    below = (rest.partition(".") for rest in unread_below(checkpoint, head))
    return any(first not in known and rest in SUFFIXES for first, _, rest in below)


def _no_shared(
    checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear], config: Mapping[str, Any]
) -> Iterator[Finding]:
    """The configuration counts shared experts, and no name speaks of one; experts beyond its count may be they.

    In families that always have one, and count none, its width says as much of layers that have their router.
    """
    key = next((key for key in _SHARED_COUNTS if _shared_count(config, key) is not None), None)
    end = ""
    if key is None:
        key, end = _always_shared(checkpoint, view, config), ".width"
    claims = {layer: config_experts(checkpoint.config or {}, layer) for layer in view.moe_layers}
    if key is None or any(claims[layer] != view.experts_in[layer] for layer in view.moe_layers):
        return
    # Experts' names are by far the most.
    if any(_SHARED_NAME.search(linear.name) for linear in linears):
        return
    if not any(_SHARED_NAME.search(name) for name in (*checkpoint.tensors, *checkpoint.unreadable)):
        layers = list(view.moe_layers)
        fill = {"key": key, "claimed": _shared_count(config, key) or config[key], **layer_list(layers)}
        tensors = [view.blocks[layer].rpartition(".")[0] for layer in layers]
        yield make("expert.absent", "error", text=f"expert.absent.shared{end}", tensors=tensors, fill=fill)


def _shared_count(config: Mapping[str, Any], key: str) -> int | None:
    """A count, or the largest of a list that has one for each layer (HunYuan), as long as none of them is zero."""
    found = config.get(key)
    counts = found if isinstance(found, list) and found else [found]
    return max(counts) if all(map(is_size, counts)) else None


# A draft layer's shared head is none, and a gate that weighs one is not the expert.
_SHARED_GATE = "shared_expert_gate"
_SHARED_NAME = re.compile(rf"share(?!d_head|{_SHARED_GATE[5:]}(?:\.|$))|residual_mlp|common_expert|dense_expert")
# Families that read such a width; elsewhere it may have been left in a copied configuration.
_ALWAYS_SHARED = {
    "shared_expert_intermediate_size": re.compile(r"qwen2moe|qwen3next|qwen35moe"),
    "shared_intermediate_size": re.compile(r"granitemoe(?:shared|hybrid)"),
    "share_expert_dim": re.compile(r"step3"),
}


def _always_shared(checkpoint: Checkpoint, view: CanonicalView, config: Mapping[str, Any]) -> str | None:
    """The key of a shared expert's width, where the family or a gate beside the router says that every layer has one.

    Experts and nothing else are a piece, and miss nothing.
    """
    key = next((key for key in _ALWAYS_SHARED if is_size(config.get(key))), None)
    routed = [any(name in checkpoint.tensors for name in router_names(view.blocks[at])) for at in view.moe_layers]
    if key is None or not all(routed):
        return None
    whole = checkpoint.config or {}
    names = [whole.get("model_type"), config.get("model_type"), *_listed(whole), *_listed(config)]
    family = re.sub(r"[^a-z0-9 ]", "", " ".join(map(str, names)).lower())
    gates = (f"{view.blocks[at].rpartition('.')[0]}.{_SHARED_GATE}.weight" for at in view.moe_layers)
    return key if _ALWAYS_SHARED[key].search(family) or any(gate in checkpoint.tensors for gate in gates) else None


def _listed(config: Mapping[str, Any]) -> list[Any]:
    found = config.get("architectures")
    return found if isinstance(found, list) else []


def _is_gated(checkpoint: Checkpoint, view: CanonicalView) -> bool:
    """Have the routed experts gates?  Then every other MLP of the model has one."""
    gated = any({"gate", "gate_up"} & set(view.projections_in[layer]) for layer in view.moe_layers)
    return gated and not any("relu" in name or "no_mul" in name for name in functions_of(checkpoint.config or {}))


def _other_gate(checkpoint: Checkpoint, view: CanonicalView, layers: Iterable[int], path: str) -> bool:
    """Is something stored of these MLPs that may be a gate under another name?"""
    starts = tuple(f"{family_of(view)}.{layer}.{path}." for layer in layers)
    return any(
        re.search(r"gate|w13|(?:^|\.)w1\.", name.partition(f".{path}.")[2])
        for name in (*checkpoint.tensors, *checkpoint.unreadable)
        if name.startswith(starts)
    )


def mlp_kinds(view: CanonicalView, linears: Iterable[Linear]) -> dict[str, dict[int, dict[str, str]]]:
    """Projections of the model's own MLPs under the names that they have, by path inside a layer, by layer."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    family = family_of(view) if view.moe_layers else None
    for linear in linears:
        match = _place(view, linear)
        if match is not None and match[1] == family:
            found.setdefault(match[3], {}).setdefault(int(match[2]), {})[PROJECTIONS[match[4]]] = match[4]
    return found


def _place(view: CanonicalView, linear: Linear) -> re.Match[str] | None:
    """Before the layer's number, the number, the path and the projection of one of the model's own MLPs."""
    match = _MODULE.match(linear.name)
    if match is None or match[4] not in PROJECTIONS or is_draft(linear.name, view.layers):
        return None
    named = match[3].rpartition(".")[2] in (*_DENSE, *_SHARED) and not _TOWER.search(match[1])
    return match if named else None


def _hidden(view: CanonicalView) -> int | None:
    """The hidden size of the first expert in most layers; that it is not the configuration's is said already."""
    found: Counter[int] = Counter()
    for layer in view.moe_layers:
        dialect = view.dialects[layer]
        for kind in view.projections_in[layer]:
            module = view.module(layer, 0, kind)
            weight, scale = module.tensors.get("weight"), module.tensors.get("weight_scale")
            if dialect is None or module.state != "quantised" or weight is None or scale is None:
                continue
            if block_width(weight, scale) == dialect.group:
                found[hidden_and_width(kind, matrix_size(weight, scale))[0]] += 1
    return found.most_common(1)[0][0] if found else None


def _mlps(view: CanonicalView, linears: Iterable[Linear], said: Said) -> dict[str, dict[int, Parts]]:
    """The model's own MLPs: by path inside a layer, by layer."""
    found: dict[str, dict[str, dict[int, Parts]]] = {}
    for linear in linears:
        match = _place(view, linear)
        size = None if match is None else _size(linear, said)
        if match is not None and size is not None:
            layers = found.setdefault(match[1], {}).setdefault(match[3], {})
            layers.setdefault(int(match[2]), {})[PROJECTIONS[match[4]]] = (size, linear.name)
    if view.moe_layers:
        return found.get(family_of(view), {})
    return max(found.values(), key=lambda paths: max(map(len, paths.values())), default={})


def _size(linear: Linear, said: Said) -> Size | None:
    """Rows and values of a module's matrix; None where another finding says that its blocks are wrong."""
    weight = linear.tensors.get("weight", linear.tensors.get("weight_packed"))
    if weight is None or len(weight.shape) != 2:
        return None
    scale = fp8_scale(linear) if linear.format == "FP8" else None
    if scale is not None and misfit(said, weight, scale, linear.name) is not None:
        return None
    if linear.format in ("FP8", "plain"):
        return weight.shape[0], weight.shape[1]
    scale = linear.tensors.get("weight_scale", linear.tensors.get("scale"))
    if scale is None or len(scale.shape) != 2 or linear.format not in ("NVFP4", "MXFP4"):
        return None
    fits = block_width(weight, scale) == (16 if linear.format == "NVFP4" else 32)
    return matrix_size(weight, scale) if fits else None


def _widths(config: Mapping[str, Any], last: str) -> dict[int, str]:
    """Widths that the configuration explains, each with the key to name; none where it does not speak of them."""
    if config.get("block_configs") or any("auto_adjust" in key for key in config):
        # Searched one by one, or computed from the number (LFM2).
        return {}
    routed = config.get("moe_intermediate_size")
    if last in _SHARED:
        found = {config[key]: key for key in _SHARED_WIDTHS if is_size(config.get(key))}
        for key in _SHARED_COUNTS:
            if is_size(config.get(key)) and is_size(routed):
                found.setdefault(config[key] * routed, f"{key} × moe_intermediate_size")
        if "intermediate_size_mlp" in config and is_size(config.get("intermediate_size")):
            found.setdefault(config["intermediate_size"], "intermediate_size")
        return found
    # "intermediate_size" is the experts' in families without dense layers, and then nothing is compared with it.
    dense = {key: value for key, value in config.items() if re.search(r"intermediate|ffn", key)}
    if not any(is_size(value) for key, value in dense.items() if "moe" not in key and "shared" not in key):
        return {}
    found = {value: key for key, value in reversed(dense.items()) if is_size(value)}
    if any("double_wide" in key for key in config):
        found |= {2 * value: key for value, key in found.items()}
    return found


def _may_vary(config: Mapping[str, Any]) -> bool:
    """Layers may have widths of their own: a list of them, layers searched one by one, or no size at all."""
    lists = any(isinstance(value, list) and re.search("intermediate|ffn|mlp", key) for key, value in config.items())
    double = any("double_wide" in key for key in config)
    return bool(lists or double or config.get("block_configs") or configured_sizes(config) == (None, None))


def _of_path(
    path: str, layers: Mapping[int, Parts], hidden: int | None, widths: Mapping[int, str], vary: bool
) -> Iterator[Finding]:
    """One kind of MLP in all its layers."""
    flat = {
        layer: {kind: hidden_and_width(kind, size) for kind, (size, _) in parts.items()}
        for layer, parts in layers.items()
    }
    every = [pair for pairs in flat.values() for pair in pairs.values()]
    usual = tuple(Counter(pair[axis] for pair in every).most_common(1)[0][0] for axis in (0, 1))
    stored = {pair[1] for pair in every}
    against = len(stored) == 1 and bool(widths) and not stored & set(widths)
    if against:
        # All agree on another width: one contradiction.
        [found] = stored
        claimed, key = next(iter(widths.items()))
        where = tuple(sorted(layers))
        names = [name for layer in where for _, name in layers[layer].values()]
        fill = {
            "key": key, "claimed": claimed, "found": found, "module": printable(path, 100), **layer_list(where),
        }  # fmt: skip
        yield make("config.conflict", "error", text="config.conflict.size.linear", tensors=names, count=1, fill=fill)
    wrong: dict[tuple[str, Size, Size], list[int]] = {}
    for layer, pairs in flat.items():
        width = _width_of(list(pairs.values()), usual[1], {} if against else widths, vary)
        for kind, pair in pairs.items():
            expected = (hidden or usual[0], width)
            if pair != expected:
                wrong.setdefault((kind, layers[layer][kind][0], as_stored(kind, *expected)), []).append(layer)
    for (kind, size, expected), where_found in wrong.items():
        where = tuple(sorted(where_found))
        names = [f"{layers[layer][kind][1]}.weight" for layer in where]
        fill = {
            "found": list(size), "expected": list(expected), "module": printable(path, 100), **layer_list(where),
        }  # fmt: skip
        yield make(
            "weight.shape", "error", text="weight.shape.linear", role="weight", projection=kind,
            layer=where[0] if len(where) == 1 else None, tensors=names, fill=fill,
        )  # fmt: skip


def _width_of(pairs: list[Size], usual: int, widths: Mapping[int, str], vary: bool) -> int:
    """What one MLP's width should be: the configuration's, most layers', or what most of its own projections have."""
    own = [width for _, width in pairs]
    said = [width for width in own if width in widths]
    if widths and not said:
        return usual if usual in widths else next(iter(widths))
    if not vary and not (said and len(set(own)) == 1 and len(widths) > 1):
        return usual
    return max(said or own, key=own.count)
