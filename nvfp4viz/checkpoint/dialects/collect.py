"""Sort a checkpoint's tensors into the projections of its routed experts, in one pass over the names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from nvfp4viz.checkpoint.dialects.per_expert import PROJECTIONS, QUANTIZERS, is_block, parse_module, parse_whole
from nvfp4viz.checkpoint.table import TensorTable

# More experts than this along a tensor's first axis are none.
MOST_EXPERTS = 4096


@dataclass(slots=True)
class Parts:
    """The tensors of one projection, of one expert or (`expert` is None) of all.

    Attributes
    ----------
    projection
        As on disk.
    name
        Everything before the suffix.
    rows
        Rows of the table by suffix; an empty one is the parameter itself.
    arrangement
        ``"expert"``, ``"stacked"`` or ``"fused"``.
    """

    block: str
    expert: int | None
    projection: str
    name: str
    rows: dict[str, int]
    arrangement: str


@dataclass(slots=True)
class Found:
    """All projections found, blocks in order of appearance, and how names are made up."""

    parts: list[Parts] = field(default_factory=list)
    blocks: dict[str, None] = field(default_factory=dict)
    disk_names: dict[str, str] = field(default_factory=dict)
    projection_major: bool = False


def collect(table: TensorTable) -> Found:
    """Sort every tensor of a routed expert into its projection."""
    found = Found()
    # The four tensors of a projection share everything before the last dot: parse it once.
    modules: dict[str, dict[str, int] | None] = {}
    whole: dict[str, dict[str, int]] = {}
    unseen: dict[str, int] = {}
    get = modules.get
    for row, name in enumerate(table.names):
        module, _, suffix = name.rpartition(".")
        bucket = get(module, unseen)
        if bucket is unseen:
            bucket = modules[module] = _open(module, found, whole)
        if bucket is not None:
            bucket[suffix] = row
    _fold_quantizers(modules, found)
    _add_whole(whole, table, found)
    for part in found.parts:
        if part.block not in found.blocks:
            found.blocks[part.block] = None
            found.disk_names.setdefault(PROJECTIONS[part.projection], part.projection)
    return found


def _open(module: str, found: Found, whole: dict[str, dict[str, int]]) -> dict[str, int] | None:
    """A place for a module's tensors; None where it is no routed expert's."""
    bucket: dict[str, int] = {}
    parsed = parse_module(module)
    if parsed is not None and parsed.expert is not None:
        found.parts.append(Parts(parsed.block, parsed.expert, parsed.projection, module, bucket, "expert"))
        found.projection_major |= parsed.projection_major
        found.disk_names[PROJECTIONS[parsed.projection]] = parsed.projection
        return bucket
    if module.endswith(QUANTIZERS):
        return bucket if parse_module(module.rpartition(".")[0]) else None
    parent, _, last = module.rpartition(".")
    if is_block(module) or (last in PROJECTIONS and is_block(parent)):
        whole[module] = bucket
        return bucket
    return None


def _fold_quantizers(modules: Mapping[str, dict[str, int] | None], found: Found) -> None:
    """Quark's ``P.weight_quantizer.scale`` belongs to the projection P."""
    names = [name for name, bucket in modules.items() if bucket and name.endswith(QUANTIZERS)]
    if not names:
        return
    by_name = {part.name: part for part in found.parts}
    for name in names:
        base, _, quantizer = name.rpartition(".")
        part = by_name.get(base)
        if part is None:
            parsed = parse_module(base)
            assert parsed is not None
            part = by_name[base] = Parts(parsed.block, parsed.expert, parsed.projection, base, {}, "expert")
            found.parts.append(part)
        for suffix, row in (modules[name] or {}).items():
            part.rows[f"{quantizer}.{suffix}"] = row


def _add_whole(whole: Mapping[str, dict[str, int]], table: TensorTable, found: Found) -> None:
    """Tensors that hold all experts: stacked ones by module, fused ones by the beginning of their last part."""
    parts: dict[tuple[str, str], Parts] = {}
    for module, bucket in whole.items():
        for last, row in bucket.items():
            parsed = parse_whole(f"{module}.{last}")
            if parsed is None:
                continue
            key = (parsed.block, parsed.projection)
            stacked = not is_block(module)
            if key not in parts:
                name = f"{parsed.block}.{parsed.projection}"
                parts[key] = Parts(*key[:1], None, parsed.projection, name, {}, "fused")
            parts[key].rows[parsed.suffix] = row
            if stacked:
                parts[key].arrangement = "stacked"
    for part in parts.values():
        shapes = {suffix: table.kinds[table.kind[row]][1] for suffix, row in part.rows.items()}
        weight = shapes.get("weight", shapes.get("", shapes.get("blocks")))
        sizes = [shape[0] for shape in shapes.values() if shape]
        # A matrix is one expert's, or a dense layer's.
        if (weight is None or len(weight) > 2) and (not sizes or max(sizes) <= MOST_EXPERTS):
            found.parts.append(part)
            found.disk_names.setdefault(PROJECTIONS[part.projection], part.projection)


_TOWER = re.compile(r"tower|vision|visual|audio")
UNCOUNTED = 100_000
"""The number of the first draft layer of a model whose own layers nobody counts."""
DRAFTS = frozenset({"mtp", "nextn", "mtp_layers"})
"""Parts of a name that say that it is a draft layer's."""
_LAYER = re.compile(r"(?:^|\.)(layers|blocks|h|mtp|nextn|mtp_layers)\.(\d{1,6})(?=\.)")


def is_tower(name: str) -> bool:
    """Is this the name of something in another tower, whose layers are no layers of the language model?"""
    return _TOWER.search(name) is not None


def layer_number(name: str, layers: int | None) -> tuple[int | None, bool, str]:
    """Which layer a name is of, whether it is a draft's, and the name up to the number.

    Parameters
    ----------
    layers
        How many the model has, None where nothing says: draft layers (MTP, nextn) are numbered after them, as vLLM
        does, whether their names count from zero again or not.

    >>> layer_number("model.layers.3.mlp.experts", 4), layer_number("model.layers.4.mlp.experts", 4)
    ((3, False, 'model.layers.3'), (4, True, 'model.layers.4'))
    >>> layer_number("mtp.layers.0.mlp.experts", 4), layer_number("mtp.1.ffn.experts", 4)
    ((4, True, 'mtp.layers.0'), (5, True, 'mtp.1'))
    >>> layer_number("mtp.fc", 4), layer_number("lm_head", 4)
    ((None, True, ''), (None, False, ''))
    """
    match = _LAYER.search(f"{name}.")
    named = not DRAFTS.isdisjoint(name.split("."))
    if match is None:
        return None, named, ""
    number = int(match[2])
    past = layers is not None and number >= layers and match[1] == "layers" and not is_tower(name)
    head = name[: match.end()]
    # Below `mtp` they count from zero again, however deep the draft is.
    if named and not (past and DRAFTS.isdisjoint(head.split("."))):
        number += UNCOUNTED if layers is None else layers
    return number, named or past, head


def layers_of_blocks(
    found: Mapping[str, None], layers: int | None
) -> tuple[dict[int, str], dict[int, str], tuple[str, ...]]:
    """Blocks by layer number: the model's own, its draft layers, and blocks of other towers.

    Draft (MTP, nextn) layers lie outside the model: named ``mtp``, or numbered past its last layer.  The configuration
    counts the model's own; another tower may have more.
    """
    families: dict[str, dict[int, str]] = {}
    past: dict[str, str] = {}
    drafts: dict[int, str] = {}
    for block in found:
        number, draft, _ = layer_number(block, layers)
        match = _LAYER.search(f"{block}.")
        family = block[: match.start()] if match else block
        if draft and DRAFTS.isdisjoint(block.split(".")):
            past[block] = family
        if draft:
            number = (layers or UNCOUNTED) if number is None else number
            while number in drafts:
                number += 1
            drafts[number] = block
        else:
            families.setdefault(family, {})[number or 0] = block
    # What calls itself a tower is not the model, however many layers it has.
    own, main = max(
        families.items(), key=lambda item: (not _TOWER.search(item[0]), len(item[1])), default=("", dict[int, str]())
    )
    left_out = [block for family in families.values() if family is not main for block in family.values()]
    if main:
        others = {block for block, family in past.items() if family != own}
        left_out += [block for block in drafts.values() if block in others]
        drafts = {number: block for number, block in drafts.items() if block not in others}
    return main, drafts, tuple(left_out)
