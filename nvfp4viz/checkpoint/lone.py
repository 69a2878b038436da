"""A file that lies alone, without a number or an index: is it a whole model, or a shard of one?

Only what no whole model is counts: not one expert that has all of its tensors, or layers with their norms and no
embedding before them or no norm behind.  ``model.safetensors`` is what a model in one file is called, and what lies
beside a configuration is a model, but for later layers with their norms and neither end.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from nvfp4viz.checkpoint.dialects import PACKED, PROJECTIONS, recognise
from nvfp4viz.checkpoint.dialects.collect import collect, is_tower, layer_number
from nvfp4viz.checkpoint.index import is_numbered
from nvfp4viz.checkpoint.source import CONFIG, HF_QUANT_CONFIG, INDEX_SUFFIX
from nvfp4viz.checkpoint.table import TensorTable

if TYPE_CHECKING:
    from nvfp4viz.checkpoint.open import Checkpoint

WHOLE = "model.safetensors"
OTHERS = "*.safetensors"
"""Stands for the shards of which nobody knows names or number."""

_CODES = ("weight", "", "weight_packed", "qweight", "blocks")
# Suffixes that only a quantised module has.
_SCALES = frozenset({
    "weight_scale", "weight_scale_2", "weight_global_scale", "weight_scale_inv", "input_scale", "input_global_scale",
})  # fmt: skip
_BLOCK_SCALE = re.compile(r"(?!input|activation).*scale")
# Small examples have experts, and perhaps a router or a projection of attention; a model's layers have norms.
_INSIDE = re.compile(r"norm")
# Of a draft, which may be a file of its own, and of what stands after a model's last layer.
_ELSEWHERE = re.compile(r"embed|head\.|(?:^|\.)(?:wte|ln_f|output|eh_proj|[eh]norm|mtp\w*)\.")
_FIRST, _LAST = re.compile(r"embed|(?:^|\.)wte\."), re.compile(r"norm|(?:^|\.)ln_f\.")


def settle_lone(checkpoint: Checkpoint, names: Collection[str]) -> None:
    """Note in ``part``, ``beside`` and ``blind_files`` that the one file of a checkpoint is only a part of one.

    Parameters
    ----------
    names
        All files of the source.
    """
    if len(checkpoint.files) != 1 or checkpoint.index is not None or checkpoint.beside or checkpoint.problems:
        return
    file = checkpoint.files[0].file
    if is_numbered(file) or any(name.endswith(INDEX_SUFFIX) for name in names):
        return
    told = file == WHOLE or {CONFIG, HF_QUANT_CONFIG} & set(names)
    if _is_from_the_middle(checkpoint.tensors):
        checkpoint.part = "ends"
    elif not told:
        checkpoint.part = why_a_part(checkpoint.tensors)
    if checkpoint.part is not None:
        checkpoint.beside = checkpoint.blind_files = (OTHERS,)


def why_a_part(table: TensorTable) -> str | None:
    """What tells that these are not all tensors of a model: ``"pieces"`` or ``"ends"``; None where nothing does."""
    parts = collect(table).parts
    experts: dict[tuple[str, int | None], dict[str, bool]] = {}
    for part in parts:
        types = {suffix: table.kinds[table.kind[row]][0] for suffix, row in part.rows.items()}
        kinds = experts.setdefault((part.block, part.expert), {})
        kinds[PROJECTIONS[part.projection]] = _is_whole(types, part.arrangement)
    if experts:
        # One without a gate has up and down, and one tensor may hold gate and up.
        if not any(all(own.values()) and "down" in own and {"up", "gate_up"} & own.keys() for own in experts.values()):
            return "pieces"
        return "ends" if _lacks_an_end(table) else None
    modules: dict[str, dict[str, str]] = {}
    for row, name in enumerate(table.names):
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = table.kinds[table.kind[row]][0]
    packed = [
        types for types in modules.values()
        if _SCALES & types.keys() or types.get("weight") in PACKED or types.get("weight_packed") in PACKED
    ]  # fmt: skip
    return "pieces" if packed and not any(_is_whole(types, "expert") for types in packed) else None


def _is_whole(types: Mapping[str, str], arrangement: str) -> bool:
    """Has a projection its weight, and where that is packed its scales?  Activation scales are not every format's."""
    dialect = recognise(types, arrangement, None)
    if dialect is not None:
        second = ("weight_scale_2",) if dialect.block == "NVFP4" else ()
        due = [role for role in ("weight", "weight_scale", *second) if role in dialect.certain]
        return set(due) <= {dialect.role_of(suffix) for suffix in types}
    codes = next((types[suffix] for suffix in _CODES if suffix in types), None)
    return codes is not None and (codes not in PACKED or any(map(_BLOCK_SCALE.match, types)))


def _lacks_an_end(table: TensorTable) -> bool:
    """Are there layers with norms, or one end of a model, but no embedding before the layers or no norm behind them?

    A draft's own are not the model's.
    """
    places = [(name, *layer_number(name, None)[:2]) for name in table.names]
    outside = [name for name, layer, draft in places if layer is None and not draft]
    ends = [any(map(each.search, outside)) for each in (_FIRST, _LAST)]
    inside = any(_INSIDE.search(name) for name, layer, _ in places if layer is not None)
    return not all(ends) and (inside or any(ends))


def _is_from_the_middle(table: TensorTable) -> bool:
    """Are there layers with norms, but not the first, and nothing of either end?"""
    places = [(name, *layer_number(name, None)[:2]) for name in table.names if not is_tower(name)]
    layers = {layer for _, layer, _ in places if layer is not None}
    if not layers or min(layers) == 0 or any(draft for *_, draft in places):
        return False
    ends = any(_ELSEWHERE.search(name) or (layer is None and _LAST.search(name)) for name, layer, _ in places)
    return not ends and any(_INSIDE.search(name) for name, layer, _ in places if layer is not None)
