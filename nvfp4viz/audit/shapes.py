"""The experts' sizes: of one expert against the others, of one projection against the others, and of the configuration.

A server allocates ``(E, 2I, H)`` and ``(E, H, I)`` by the configuration and copies every expert into its slice, so that
a matrix of another shape stops the load, whatever its blocks and scales are.  Sizes are compared as rows × values, so
packing and orientation do not matter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nvfp4viz.audit.facts import Facts
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.linears import FP8
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.scales import block_width
from nvfp4viz.audit.texts import layer_list
from nvfp4viz.checkpoint import Checkpoint, TensorEntry
from nvfp4viz.checkpoint.dialects.per_expert import PROJECTION_ORDER

Size = tuple[int, int]
"""Rows (out) and values of a row (in) of one expert's matrix."""


def shape_findings(facts: Facts, config: Mapping[str, Any]) -> Iterator[Finding]:
    """``weight.shape``, and ``config.conflict`` where all experts agree on another size than the configuration.

    Parameters
    ----------
    config
        The configuration that these experts belong to; empty for another tower's.
    """
    sizes, widths = _sizes(facts), _listed_widths(config)
    usual: dict[str, dict[Size, int]] = {}
    for (_, projection), found in sizes.items():
        for size, experts in found.items():
            usual.setdefault(projection, {}).setdefault(size, 0)
            usual[projection][size] += len(experts)
    layers: dict[int, dict[str, Size]] = {}
    for (layer, projection), found in sizes.items():
        # Most experts are right; of two halves, the one that other layers agree with.
        own = max(found, key=lambda size: (len(found[size]), usual[projection][size]))
        kinds = {at: as_stored(projection, hidden_and_width(projection, own)[0], width) for at, width in widths.items()}
        if all(any(kinds.get(at) == size for at in experts) for size, experts in found.items()):
            # Every size is one that the configuration lists; the first kind's is held against other projections.
            own = kinds[min(kinds)]
        else:
            kinds = {}
        layers.setdefault(layer, {})[projection] = own
        for size, experts in found.items():
            odd = tuple(sorted(at for at in experts if kinds.get(at, own) != size))
            if odd:
                yield _odd_one(facts, layer, projection, size, kinds.get(odd[0], own), odd)
    yield from _between_projections(facts, layers, config)


def _listed_widths(config: Mapping[str, Any]) -> dict[int, int]:
    """Each expert's width where the configuration lists several kinds of experts (ERNIE 4.5 VL: of text, of images).

    >>> _listed_widths({"moe_num_experts": [2, 1], "moe_intermediate_size": [128, 64]})
    {0: 128, 1: 128, 2: 64}
    """
    holder = text_part(config)
    counts, widths = holder.get("moe_num_experts"), holder.get("moe_intermediate_size")
    if not isinstance(counts, list) or not isinstance(widths, list) or len(counts) != len(widths):
        return {}
    if not all(map(is_size, (*counts, *widths))) or sum(counts) > 100_000:
        return {}
    return dict(enumerate(width for count, width in zip(counts, widths, strict=True) for _ in range(count)))


def _sizes(facts: Facts) -> dict[tuple[int, str], dict[Size, list[int]]]:
    """Experts by size, of each layer and projection; matrices whose blocks are wrong have a finding of their own.

    FP8 experts in tensors of their own count too; fused ones may be stored either way around.
    """
    kinds = facts.view.table.kind.tolist()
    known: dict[tuple[str, int, int], Size | None] = {}
    out: dict[tuple[int, str], dict[Size, list[int]]] = {}
    for (layer, expert, projection), module in facts.view.modules.items():
        rows = module.tensors.rows
        dialect = facts.view.dialects.get(layer)
        if dialect is None and module.state == "other" and not module.whole:
            weight = module.tensors.get("weight", module.extras.get("weight"))
            if weight is not None and weight.dtype in FP8 and len(weight.shape) == 2:
                # One value a byte; scales of another shape have a finding of their own.
                size = weight.shape[0], weight.shape[1]
                out.setdefault((layer, projection), {}).setdefault(size, []).append(expert)
            continue
        if module.state != "quantised" or dialect is None or "weight" not in rows or "weight_scale" not in rows:
            continue
        key = (dialect.block, kinds[rows["weight"]], kinds[rows["weight_scale"]])
        if key not in known:
            weight, scale = module.tensors["weight"], module.tensors["weight_scale"]
            known[key] = matrix_size(weight, scale) if block_width(weight, scale) == dialect.group else None
        size = known[key]
        if size is not None and layer in facts.needs:
            out.setdefault((layer, projection), {}).setdefault(size, []).append(expert)
    return out


def matrix_size(weight: TensorEntry, scale: TensorEntry) -> Size:
    """Rows and values of one expert's matrix; the scales tell along which axis two values share a byte.

    >>> weight = TensorEntry("w", "U8", (8, 32, 64), "f", 0, 16384)
    >>> matrix_size(weight, TensorEntry("s", "F8_E4M3", (8, 4, 64), "f", 0, 2048))
    (64, 64)
    """
    pair = 1 if weight.dtype == "F4" else 2
    packed, scales = weight.shape, scale.shape
    if len(packed) == len(scales) + 1:
        return packed[-3], packed[-2] * packed[-1] * pair
    if packed[-2] == scales[-2]:
        return packed[-2], packed[-1] * pair
    return packed[-1], packed[-2] * pair


def _odd_one(facts: Facts, layer: int, projection: str, size: Size, own: Size, experts: tuple[int, ...]) -> Finding:
    place = facts.place(layer, (projection,), "weight", experts)
    fill = {"found": list(size), "expected": list(own)}
    return make("weight.shape", "error", role="weight", layer=layer, projection=projection, **place, fill=fill)


def _between_projections(
    facts: Facts, layers: Mapping[int, Mapping[str, Size]], config: Mapping[str, Any]
) -> Iterator[Finding]:
    """Gate and up are I × H, down is H × I: sizes that do not fit one another, or all of them not the configuration."""
    against: dict[tuple[str, int, int], list[int]] = {}
    wrong: dict[tuple[str, Size, Size], list[int]] = {}
    strays: dict[tuple[int, int], list[int]] = {}
    width_key = _width_key(facts, config)
    claimed = configured_sizes(config, width_key)
    stream = _usual_hidden(facts, layers)
    for layer, own in layers.items():
        flat = {kind: hidden_and_width(kind, own[kind]) for kind in PROJECTION_ORDER if kind in own}
        here = claimed if layer in facts.view.moe_layers else (None, None)
        agreed = []
        for axis, name in enumerate(("hidden_size", width_key)):
            values = [size[axis] for size in flat.values()]
            said = here[axis]
            stray = axis == 0 and stream not in (None, *values) and layer in facts.view.moe_layers
            if said is not None and len(set(values)) == 1 and values[0] != said:
                if axis == 0 and is_latent(facts.checkpoint, config):
                    # Narrower than the model, and all alike.
                    if stray:
                        strays.setdefault((values[0], stream or 0), []).append(layer)
                else:
                    against.setdefault((name, said, values[0]), []).append(layer)
                said = values[0]
            elif said is None and len(set(values)) == 1 and stray:
                strays.setdefault((values[0], stream or 0), []).append(layer)
            said = stream if said is None and axis == 0 else said
            # Without a word of the configuration the majority is right, and of two the first: its input is the token.
            agreed.append(said if said in values else max(values, key=values.count))
        for kind, size in flat.items():
            if size != tuple(agreed):
                expected = as_stored(kind, agreed[0], agreed[1])
                wrong.setdefault((kind, own[kind], expected), []).append(layer)
    for (kind, found, expected), where in wrong.items():
        yield make(
            "weight.shape", "error", text="weight.shape.projection", role="weight", projection=kind,
            layer=where[0] if len(where) == 1 else None,
            tensors=_names(facts, where, kind), count=len(where),
            fill={"found": list(found), "expected": list(expected), **layer_list(where)},
        )  # fmt: skip
    for (hidden, usual), where in strays.items():
        fill = {"found": hidden, "expected": usual, **layer_list(where)}
        yield make(
            "weight.shape", "error", text="weight.shape.hidden", role="weight",
            layer=where[0] if len(where) == 1 else None,
            tensors=_names(facts, where, facts.view.projections_in[where[0]][0]), count=len(where), fill=fill,
        )  # fmt: skip
    for (name, said, value), where in against.items():
        fill: dict[str, Any] = {"key": name, "claimed": said, "found": value, **layer_list(where)}
        multiple = _padded_to(said, value)
        if multiple is not None:
            # A loader may cut off what it does not know, or stop.
            fill["multiple"] = multiple
            yield make("config.conflict", "backend", text="config.conflict.size.padded", count=1, fill=fill)
        else:
            yield make("config.conflict", "error", text="config.conflict.size", count=1, fill=fill)


def _usual_hidden(facts: Facts, layers: Mapping[int, Mapping[str, Size]]) -> int | None:
    """The hidden size of most of the model's own experts' layers; all of them take in what the layer before gave."""
    # Of two that are as many the first one's counts: its input is the token.
    found = Counter(
        hidden_and_width(kind, own[kind])[0]
        for kind in PROJECTION_ORDER for layer, own in layers.items() if kind in own and layer in facts.view.moe_layers
    )  # fmt: skip
    return found.most_common(1)[0][0] if found else None


def hidden_and_width(kind: str, size: Size) -> Size:
    """Hidden size and intermediate width of one projection, from its rows and values.

    >>> hidden_and_width("down", (64, 32)), hidden_and_width("gate_up", (64, 64))
    ((64, 32), (64, 32))
    """
    rows, values = size
    if kind == "down":
        return rows, values
    return values, rows // 2 if kind == "gate_up" and rows % 2 == 0 else rows


def as_stored(kind: str, hidden: int, width: int) -> Size:
    """The inverse of `hidden_and_width`."""
    return (hidden, width) if kind == "down" else (2 * width if kind == "gate_up" else width, hidden)


def _names(facts: Facts, layers: Iterable[int], kind: str) -> list[str]:
    return [facts.view.slot(layer, 0, kind, "weight").name for layer in layers]


def configured_sizes(
    config: Mapping[str, Any], width_key: str = "moe_intermediate_size"
) -> tuple[int | None, int | None]:
    """Hidden and expert width as the configuration of the text model says them, None where it does not.

    Parameters
    ----------
    width_key
        The experts' width; ``intermediate_size`` is theirs in some families and the dense layers' in others.
    """
    holder = text_part(config)
    if holder.get("block_configs"):
        # Layers searched one by one (Puzzle) have sizes of their own.
        return None, None
    found = (holder.get(key) for key in ("hidden_size", width_key))
    hidden, width = (value if is_size(value) else None for value in found)
    return hidden, width


def is_size(value: Any) -> bool:
    """A whole number above zero, as JSON has them."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# Families whose experts are as wide as `intermediate_size` says: they have no dense layers, or another key for them.
_ONE_WIDTH = re.compile(r"gpt_?oss|mixtral|minimax(?:_?m2)?$|phimoe|granitemoe|olmoe|llama_?4")


def _width_key(facts: Facts, config: Mapping[str, Any]) -> str:
    """The key of the experts' width: ``intermediate_size`` where the family, or nothing but experts, proves it."""
    holder, usual = text_part(config), "moe_intermediate_size"
    if any(re.search("moe|expert", key) and re.search("intermediate|ffn|width|hidden|dim", key) for key in holder):
        return usual
    names = [holder.get("model_type"), config.get("model_type")]
    lists = [found for one in (holder, config) if isinstance(found := one.get("architectures"), list)]
    names += [re.sub(r"For[A-Z].*", "", name) for found in lists for name in found if isinstance(name, str)]
    known = [name.lower().removesuffix("_text") for name in names if isinstance(name, str)]
    view = facts.view
    if known:
        return "intermediate_size" if any(map(_ONE_WIDTH.match, known)) else usual
    # Mixtral's names, and no layer without experts.
    everywhere = view.layers is not None and len(view.moe_layers) >= view.layers
    mixtral = everywhere and all(".block_sparse_moe." in f".{view.blocks[layer]}" for layer in view.moe_layers)
    return "intermediate_size" if view.dialect == "gpt-oss" or mixtral else usual


# Where a configuration names the function; NemotronH's own key stands beside Mamba's, which is another.
_FUNCTION_KEYS = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")


def functions_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the configuration calls the MLPs' activation functions, in lower case."""
    found = (holder.get(key) for holder in (config, text_part(config)) for key in _FUNCTION_KEYS)
    return tuple(dict.fromkeys(name.lower() for name in found if isinstance(name, str)))


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is the text model's."""
    text = config.get("text_config")
    return text if isinstance(text, dict) and text else config


def _padded_to(said: int, found: int) -> int | None:
    """The multiple to which a packer probably padded a size for its kernels, or None.

    >>> _padded_to(2880, 3072), _padded_to(2880, 2944), _padded_to(64, 96)
    (256, 128, None)
    """
    if not said < found <= said * 5 // 4:
        return None
    return next((to for to in (64, 128, 256, 512) if said % to and found == -(-said // to) * to), None)


def is_latent(checkpoint: Checkpoint, config: Mapping[str, Any]) -> bool:
    """Experts that live in a narrower space than the model (Nemotron 3 Super: 1024 of 4096)."""
    keys = (*config, *text_part(config))
    return any("latent" in name for names in (keys, checkpoint.tensors) for name in names)
