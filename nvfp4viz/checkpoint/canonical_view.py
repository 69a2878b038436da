"""One view of every layout: layer × expert × projection × role → slot.

Names and types decide; the configuration is a second opinion (the audit compares the two).  Only headers are used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from nvfp4viz.checkpoint.dialects import PROJECTIONS, Dialect, parse_expert_name, parse_whole
from nvfp4viz.checkpoint.dialects.collect import UNCOUNTED, collect, layer_number, layers_of_blocks
from nvfp4viz.checkpoint.dialects.per_expert import PROJECTION_ORDER, ROLES, parse_module
from nvfp4viz.checkpoint.modules import FLOATS, Module, ModuleReader, is_one_number, projections_due, table_of
from nvfp4viz.checkpoint.quantconfig import QuantConfig
from nvfp4viz.checkpoint.source import HF_QUANT_CONFIG
from nvfp4viz.checkpoint.table import TensorEntry, TensorTable

# Names that hold the number of routed experts, as the model families spell it.
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "num_experts_per_token", "top_k")


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one tensor, or for one row of a tensor that holds all experts.

    Attributes
    ----------
    name
        The tensor's name, or the name it would have.
    entry
        Where it lies; None where the checkpoint does not have it.
    index
        Row along the tensor's first axis; None where the tensor is this slot's alone, or one number for all experts.
    """

    layer: int
    expert: int
    projection: str
    role: str
    name: str
    entry: TensorEntry | None
    index: int | None = None


@dataclass(frozen=True)
class CanonicalView:
    """What a checkpoint holds, whatever its layout.

    Attributes
    ----------
    dialect, scheme
        As in the audit's vocabulary: ``"modelopt"``, …; ``"W4A4"``, ``"W4A16"``, ``"MXFP4"``, ``"UNQUANTISED"``, …
    complete
        The experts are read in full; where False only `dialect` and `scheme` mean something.
    dialects
        By layer; None where a layer's experts are not quantised.
    moe_layers, draft_layers
        Layer numbers with experts; draft (MTP) layers are numbered after the model's own, as vLLM does.
    experts
        Routed experts per layer: the configuration's number, or the largest found.
    experts_in
        The same per layer (a layer may be pruned).
    projections
        ``("gate", "up", "down")``, without the gate where no expert has one, ``("gate_up", "down")`` where the layout
        stores both in one tensor; of all layers together, without plain draft layers.
    projections_in
        The same per layer: a draft layer may be of another layout.
    activation_blocks
        Kinds of blocks (``"NVFP4"``, ``"MXFP4"``) of which some expert stores an activation scale.
    table
        All tensors of the checkpoint.
    other_blocks
        Blocks of other towers, which are left out.
    """

    dialect: str
    scheme: str
    complete: bool
    dialects: dict[int, Dialect | None]
    group_size: int
    architecture: str | None
    layers: int | None
    moe_layers: tuple[int, ...]
    draft_layers: tuple[int, ...]
    experts: int
    experts_in: dict[int, int]
    projections: tuple[str, ...]
    projections_in: dict[int, tuple[str, ...]]
    top_k: int | None
    blocks: dict[int, str]
    modules: dict[tuple[int, int, str], Module]
    activation_blocks: frozenset[str]
    table: TensorTable
    _disk_names: dict[str, str]
    _projection_major: bool
    other_blocks: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that a quantised projection of the first layer needs."""
        return self.roles_in(self.moe_layers[0]) if self.moe_layers else ROLES

    @property
    def family(self) -> str:
        """How the names of its layers begin, as in ``talker.model.layers.0``; where by nothing, its first block."""
        block = next(iter(self.blocks.values()), "")
        return ".".join(layer_number(block, None)[2].split(".")[:-2]) or block

    @property
    def divisors(self) -> bool:
        """Second-level scales are stored as divisors (in every layer that has them)."""
        return any(dialect.divisors for dialect in self.dialects.values() if dialect)

    def divisors_in(self, layer: int) -> bool:
        """The same for one layer."""
        dialect = self.dialects.get(layer)
        return dialect is not None and dialect.divisors

    def roles_in(self, layer: int) -> tuple[str, ...]:
        """Roles that a quantised projection of a layer needs."""
        dialect = self.dialects.get(layer)
        if dialect is None:
            return ()
        activations = dialect.block in self.activation_blocks
        return tuple(
            role
            for role in ROLES
            if role in dialect.certain
            and (role != "input_scale" or activations)
            and (role != "weight_scale_2" or dialect.block == "NVFP4")
        )

    def module(self, layer: int, expert: int, projection: str) -> Module:
        """The projection's tensors; ``state`` is ``"absent"`` where it has none."""
        found = self.modules.get((layer, expert, projection))
        return found or Module(self._module_name(layer, expert, projection), "absent")

    def slot(self, layer: int, expert: int, projection: str, role: str) -> Slot:
        """One slot, whether the checkpoint has its tensor or not."""
        module = self.module(layer, expert, projection)
        entry = module.tensors.get(role)
        if entry is None:
            dialect = self.dialects.get(layer)
            name = dialect.name(module.name, role) if dialect else f"{module.name}.{role}"
            return Slot(layer, expert, projection, role, name, None)
        index = expert if module.whole and entry.shape and not is_one_number(entry) else None
        return Slot(layer, expert, projection, role, entry.name, entry, index)

    def slots(
        self,
        layer: int | None = None,
        expert: int | None = None,
        projection: str | None = None,
        role: str | None = None,
    ) -> Iterator[Slot]:
        """Slots that the scheme needs, in order; arguments narrow the choice.  Unquantised experts need none."""
        for at in self.moe_layers if layer is None else (layer,):
            roles = self.roles_in(at) if role is None else (role,)
            for number in range(self.experts_in[at]) if expert is None else (expert,):
                for name in self.projections_in[at] if projection is None else (projection,):
                    if self.module(at, number, name).state not in ("unquantised", "other"):
                        for kind in roles:
                            yield self.slot(at, number, name, kind)

    def locate(self, name: str) -> Slot | None:
        """The slot that a tensor's name means, or None; of a tensor that holds all experts, the first one's."""
        parsed = parse_expert_name(name) or parse_whole(name)
        layer = None if parsed is None else self._layer_of.get(parsed.block)
        if parsed is None or layer is None:
            return None
        dialect = self.dialects.get(layer)
        role = dialect.role_of(parsed.suffix) if dialect else parsed.suffix if parsed.suffix in ROLES else None
        if role is None:
            return None
        return self.slot(layer, parsed.expert or 0, PROJECTIONS[parsed.projection], role)

    @cached_property
    def _layer_of(self) -> dict[str, int]:
        return {block: layer for layer, block in self.blocks.items()}

    def is_draft(self, layer: int) -> bool:
        """Is this the number of a draft (MTP) layer, with experts or without?"""
        return layer in self.draft_layers or layer >= (UNCOUNTED if self.layers is None else self.layers)

    def is_whole(self, layer: int) -> bool:
        """Do a layer's tensors hold all its experts?"""
        dialect = self.dialects.get(layer)
        return dialect is not None and dialect.arrangement != "expert"

    def _module_name(self, layer: int, expert: int, projection: str) -> str:
        names, projection_major = self._own_names.get(layer, (self._disk_names, self._projection_major))
        disk = names.get(projection) or _as_its_sisters(names, projection) or self._disk_names.get(projection)
        disk = disk or f"{projection}_proj"
        if self.is_whole(layer):
            return f"{self.blocks[layer]}.{disk}"
        tail = f"{disk}.{expert}" if projection_major else f"{expert}.{disk}"
        return f"{self.blocks[layer]}.{tail}"

    @cached_property
    def _own_names(self) -> dict[int, tuple[dict[str, str], bool]]:
        """By layer: what its projections are called on disk, and whether they stand before the expert's number."""
        firsts: dict[tuple[int, str], str] = {}
        for (layer, _, projection), module in self.modules.items():
            firsts.setdefault((layer, projection), module.name)
        found: dict[int, tuple[dict[str, str], bool]] = {}
        for (layer, projection), name in firsts.items():
            parsed = parse_module(name)
            names, major = found.get(layer, ({}, False))
            names[projection] = name.rpartition(".")[2] if parsed is None else parsed.projection
            found[layer] = names, major or (parsed is not None and parsed.projection_major)
        return found


# The projections' names that go together.
_NAMINGS = (
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "gate_up": "gate_up_proj"},
    {"gate": "w1", "up": "w3", "down": "w2", "gate_up": "w13"},
    {"down": "w2_weight", "gate_up": "w13_weight"},
)


def _as_its_sisters(names: Mapping[str, str], projection: str) -> str | None:
    """A projection's name beside others of its layer.

    >>> _as_its_sisters({"up": "w3", "down": "w2"}, "gate")
    'w1'
    """
    return next((naming.get(projection) for naming in _NAMINGS if names.items() <= naming.items()), None)


class _HasTensors(Protocol):
    """What `canonical` needs of a checkpoint; ``unreadable`` and ``blind_files`` too, where it has them."""

    config: dict[str, Any] | None

    @property
    def quant_config(self) -> QuantConfig: ...

    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...


def canonical(checkpoint: _HasTensors) -> CanonicalView:
    """The canonical view of an opened checkpoint."""
    lost, unlisted = getattr(checkpoint, "unreadable", ()), getattr(checkpoint, "blind_files", ())
    return canonical_of(
        checkpoint.tensors, checkpoint.config, checkpoint.quant_config, unreadable=lost, whole=not unlisted
    )


def canonical_of(
    tensors: Mapping[str, TensorEntry],
    config: Mapping[str, Any] | None = None,
    quant_config: QuantConfig | None = None,
    *,
    unreadable: Iterable[str] = (),
    whole: bool = True,
    only: Collection[str] | None = None,
) -> CanonicalView:
    """The canonical view of a table of tensors.

    Parameters
    ----------
    unreadable
        Names that are known and cannot be read: a layer of which nothing else is left is a layer all the same.
    whole
        There are no files whose names nobody knows.
    only
        Blocks to look at, such as those of another tower; all where None.
    """
    config, quant_config = config or {}, quant_config or QuantConfig()
    table = tensors if isinstance(tensors, TensorTable) else table_of(tensors.values())
    found = collect(table)
    promised: dict[tuple[str, int | None, str], set[str]] = {}
    if found.parts:
        for lost in unreadable:
            parsed = parse_expert_name(lost) or parse_whole(lost)
            if parsed is not None:
                found.blocks.setdefault(parsed.block, None)
                promised.setdefault(parsed[:3], set()).add(parsed.suffix)
    if only is not None:
        found.blocks = {block: None for block in found.blocks if block in only}
        found.parts = [part for part in found.parts if part.block in only]
    blocks, drafts, left_out = layers_of_blocks(found.blocks, config_number(config, ("num_hidden_layers",)))
    # Of a draft layer that cannot be read nobody says in which format it is.
    readable = {part.block for part in found.parts}
    drafts = {layer: block for layer, block in drafts.items() if block in readable}
    used = quant_config.used
    # The older file is ModelOpt's own and names no method.
    method = None if used is None else used.method or ("modelopt" if used.file == HF_QUANT_CONFIG else None)
    layer_of = {block: layer for layer, block in (blocks | drafts).items()}
    promises = {
        (layer_of[block], expert, projection): suffixes
        for (block, expert, projection), suffixes in promised.items()
        if block in layer_of
    }
    algorithms = {quant_config.algo_of(block) for block in blocks.values()} if promises else set[str | None]()
    read = ModuleReader(
        table, found.parts, layer_of, method, lambda layer: config_experts(config, layer), promises,
        whole=whole, drafts=drafts, label=algorithms.pop() if len(algorithms) == 1 else None,
    )  # fmt: skip
    due = _with_first(projections_due(read.stored, read.dialects, drafts), blocks | drafts, read.dialects, table)
    most = max((read.experts_in[layer] for layer in blocks), default=0)
    for layer in blocks:
        # What the configuration does not say, the other layers do.
        if config_experts(config, layer) is None:
            read.experts_in[layer] = most
    quantised = [layer for layer in (*blocks, *drafts) if read.dialects[layer] is not None]
    kinds = {(d.id, d.block) for layer in quantised if (d := read.dialects[layer])}
    labels = [quant_config.algo_of(blocks[at], *_names_in(read, at)) or "" for at in blocks if read.dialects[at]]
    name, scheme = _summary(kinds, read, quant_config, labels, table)
    claimed = config_number(config, EXPERT_KEYS)
    group = quant_config.group_size
    return CanonicalView(
        dialect=name,
        scheme=scheme,
        complete=bool(kinds) or name == "unquantised",
        dialects=read.dialects,
        group_size=group if group and scheme != "MXFP4" else (32 if scheme == "MXFP4" else 16),
        architecture=_architecture(config),
        layers=config_number(config, ("num_hidden_layers",)),
        moe_layers=tuple(sorted(blocks)),
        draft_layers=tuple(sorted(drafts)),
        experts=max([claimed or 0, *(read.experts_in[layer] for layer in blocks)]),
        experts_in=read.experts_in,
        projections=tuple(kind for kind in PROJECTION_ORDER if any(kind in due[at] for at in (*blocks, *quantised))),
        projections_in=due,
        top_k=config_number(config, TOP_K_KEYS),
        blocks=blocks | drafts,
        modules=read.modules,
        activation_blocks=frozenset(read.activation_blocks),
        table=table,
        _disk_names=found.disk_names,
        _projection_major=found.projection_major,
        other_blocks=left_out,
    )


# What stands below a block of experts beside their second projection.
_NO_FIRST = re.compile(r"down_proj|(?:^|\.)w2(?:_|\.|$)|router|(?:^|\.)gate\.|share|bias|per_expert_scale")


def _with_first(
    due: dict[int, tuple[str, ...]],
    blocks: Mapping[int, str],
    dialects: Mapping[int, Dialect | None],
    table: TensorTable,
) -> dict[int, tuple[str, ...]]:
    """Experts of which the second projection alone is stored have lost the first, unless it has another name here."""
    half = [layer for layer, kinds in due.items() if kinds == ("down",)]
    starts = tuple(f"{blocks[layer]}{end}" for layer in half for end in "._")
    if not half or any(name.startswith(starts) and not _NO_FIRST.search(name) for name in table.names):
        return due
    whole = {at for at, dialect in dialects.items() if dialect is not None and dialect.arrangement != "expert"}
    return due | {layer: ("gate_up" if layer in whole else "up", "down") for layer in half}


def _names_in(read: ModuleReader, layer: int) -> list[str]:
    """Names of the first expert's modules, by which a configuration may speak of its layer."""
    return [found.name for kind in PROJECTION_ORDER if (found := read.modules.get((layer, 0, kind))) is not None]


def _summary(
    kinds: set[tuple[str, str]],
    read: ModuleReader,
    quant_config: QuantConfig,
    labels: Collection[str],
    tensors: TensorTable,
) -> tuple[str, str]:
    """Dialect and scheme of the whole checkpoint; ``labels`` are what the configuration calls each layer's experts."""
    if len(kinds) > 1:
        return "mixed", "MIXED"
    if kinds:
        [(name, block)] = kinds
        if block == "MXFP4":
            return name, "MXFP4"
        if quant_config.algo and quant_config.algo.startswith("W4A8"):
            return name, "W4A8"
        if labels and all(label.startswith("W4A16") for label in labels):
            # Servers go by it, and read no activation scale that is stored all the same.
            return name, "W4A16"
        if any(label.startswith("W4A16") for label in labels) and block in read.activation_blocks:
            return name, "MIXED"
        # By what is stored: one activation scale anywhere means that the experts are meant to have them.  Where nobody
        # knows what theirs would be called, by the name of the algorithm.
        unknown = not any(dialect.names_activations for dialect in read.dialects.values() if dialect)
        with_activations = block in read.activation_blocks or (unknown and any(labels))
        return name, "W4A4" if with_activations else "W4A16"
    if _is_quantised_elsewhere(tensors):
        return _dense(tensors)
    plain = all(dtype in FLOATS or dtype in ("I64", "I32", "BOOL") for dtype, _ in tensors.kinds)
    return ("unquantised", "UNQUANTISED") if plain else ("unknown", "UNQUANTISED")


def _is_quantised_elsewhere(tensors: TensorTable) -> bool:
    return any(name.endswith((".weight_scale_2", ".weight_global_scale", ".weight_packed")) for name in tensors)


def _dense(tensors: TensorTable) -> tuple[str, str]:
    """A model without experts, or whose experts are not the quantised part."""
    modelopt = any(name.endswith(".weight_scale_2") for name in tensors)
    with_input = any(name.endswith((".input_scale", ".input_global_scale")) for name in tensors)
    return "modelopt" if modelopt else "compressed-tensors", "W4A4" if with_input else "W4A16"


def config_number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """First of ``keys`` that is a sensible whole number, in the configuration or its text part."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in keys:
            value = holder.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 100_000:
                return value
    return None


def config_experts(config: Mapping[str, Any], layer: int) -> int | None:
    """How many experts the configuration gives a layer, None where it does not say.

    Layers that were searched one by one (Puzzle) have a number each, in ``block_configs`` or below its ``ffn.moe``;
    HunYuan's may be a list, of a number for each layer.
    """
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        searched = holder.get("block_configs")
        if isinstance(searched, list) and layer < len(searched) and isinstance(searched[layer], dict):
            at: Any = searched[layer]
            for part in ("ffn", "moe", None):
                own = config_number(at, EXPERT_KEYS)
                if own is not None:
                    return own
                at = at.get(part)
                if not isinstance(at, dict):
                    break
        count = config_number(holder, ("num_hidden_layers",))
        for key in EXPERT_KEYS:
            listed = holder.get(key)
            # ERNIE's list is by modality.
            if isinstance(listed, list) and len(listed) == count and layer < count and key != "moe_num_experts":
                own = config_number({key: listed[layer]}, (key,))
                if own is not None:
                    return own
    return config_number(config, EXPERT_KEYS)


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return str(names[0])[:200] if isinstance(names, list) and names else None
