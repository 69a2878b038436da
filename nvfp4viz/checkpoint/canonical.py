"""One view of every layout: layer × expert × projection × role → slot.

Names and types decide; the configuration is a second opinion (the audit compares the two).  Only headers are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from nvfp4viz.checkpoint.dialects import PACKED, PROJECTIONS, Dialect, parse_expert_name, parse_whole, recognise
from nvfp4viz.checkpoint.dialects.collect import Parts, collect, layers_of_blocks
from nvfp4viz.checkpoint.dialects.per_expert import PROJECTION_ORDER, ROLES
from nvfp4viz.checkpoint.header import TensorEntry
from nvfp4viz.checkpoint.quantconfig import QuantConfig

# Names that hold the number of routed experts, as the model families spell it.
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "num_experts_per_token", "top_k")
FLOATS = frozenset({"BF16", "F16", "F32"})
# More experts than this in one tensor's leading axis are no experts.
MOST_EXPERTS = 4096


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


@dataclass(frozen=True, slots=True)
class Module:
    """One projection of one expert: the tensors that it has, by role.

    Attributes
    ----------
    state
        ``"quantised"`` (packed codes or a block scale), ``"unquantised"`` (a BF16, F16 or F32 weight),
        ``"other"`` (another format, such as FP8) or ``"absent"``.
    extras
        Tensors whose suffix plays no role here, such as ``pre_quant_scale``.
    whole
        Its tensors hold all experts of the layer; the layer's experts share this record.
    """

    name: str
    state: str
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    extras: dict[str, TensorEntry] = field(default_factory=dict)
    whole: bool = False


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
        stores both in one tensor.
    activation_blocks
        Kinds of blocks (``"NVFP4"``, ``"MXFP4"``) of which some expert stores an activation scale.
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
    top_k: int | None
    blocks: dict[int, str]
    modules: dict[tuple[int, int, str], Module]
    activation_blocks: frozenset[str]
    _disk_names: dict[str, str]
    _projection_major: bool
    other_blocks: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that a quantised projection of the first layer needs."""
        return self.roles_in(self.moe_layers[0]) if self.moe_layers else ROLES

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
                for name in self.projections if projection is None else (projection,):
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

    def is_whole(self, layer: int) -> bool:
        """Do a layer's tensors hold all its experts?"""
        dialect = self.dialects.get(layer)
        return dialect is not None and dialect.arrangement != "expert"

    def _module_name(self, layer: int, expert: int, projection: str) -> str:
        disk = self._disk_names.get(projection, f"{projection}_proj")
        if self.is_whole(layer):
            return f"{self.blocks[layer]}.{disk}"
        tail = f"{disk}.{expert}" if self._projection_major else f"{expert}.{disk}"
        return f"{self.blocks[layer]}.{tail}"


def is_one_number(entry: TensorEntry) -> bool:
    """One F32 number, whatever its shape."""
    return entry.dtype == "F32" and entry.nbytes == 4


class _HasTensors(Protocol):
    """What `canonical` needs of a checkpoint; ``unreadable`` too, where it has it."""

    config: dict[str, Any] | None
    quant_config: QuantConfig

    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...


def canonical(checkpoint: _HasTensors) -> CanonicalView:
    """The canonical view of an opened checkpoint."""
    lost = getattr(checkpoint, "unreadable", ())
    return canonical_of(checkpoint.tensors, checkpoint.config, checkpoint.quant_config, unreadable=lost)


def canonical_of(
    tensors: Mapping[str, TensorEntry],
    config: Mapping[str, Any] | None = None,
    quant_config: QuantConfig | None = None,
    *,
    unreadable: Iterable[str] = (),
) -> CanonicalView:
    """The canonical view of a table of tensors.

    Parameters
    ----------
    unreadable
        Names that are known and cannot be read: a layer of which nothing else is left is a layer all the same.
    """
    config, quant_config = config or {}, quant_config or QuantConfig()
    found = collect(tensors)
    if found.parts:
        for lost in unreadable:
            parsed = parse_expert_name(lost) or parse_whole(lost)
            if parsed is not None:
                found.blocks.setdefault(parsed.block, None)
    blocks, drafts, left_out = layers_of_blocks(found.blocks, config_number(config, ("num_hidden_layers",)))
    # Of a draft layer that cannot be read nobody says in which format it is.
    readable = {part.block for part in found.parts}
    drafts = {layer: block for layer, block in drafts.items() if block in readable}
    method = quant_config.used.method if quant_config.used else None
    layer_of = {block: layer for layer, block in (blocks | drafts).items()}
    read = _Modules(found.parts, layer_of, method, config_number(config, EXPERT_KEYS))
    quantised = [layer for layer in (*blocks, *drafts) if read.dialects[layer] is not None]
    kinds = {(d.id, d.block) for layer in quantised if (d := read.dialects[layer])}
    name, scheme = _summary(kinds, read, quant_config, tensors)
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
        projections=tuple(kind for kind in PROJECTION_ORDER if kind in read.projections),
        top_k=config_number(config, TOP_K_KEYS),
        blocks=blocks | drafts,
        modules=read.modules,
        activation_blocks=frozenset(read.activation_blocks),
        _disk_names=found.disk_names,
        _projection_major=found.projection_major,
        other_blocks=left_out,
    )


class _Modules:
    """Every projection read in its layer's dialect.

    A layer's dialect is that of most of its projections; one that clearly speaks another is in state ``"other"``.
    """

    def __init__(self, parts: list[Parts], layer_of: Mapping[str, int], method: str | None, claimed: int | None):
        self._method = method
        self._known: dict[Any, Dialect | None] = {}
        self._readings: dict[Any, tuple[list[tuple[str, str]], list[str], str]] = {}
        votes: dict[int, Counter[Dialect]] = {layer: Counter() for layer in layer_of.values()}
        kept = [(layer_of[part.block], part) for part in parts if part.block in layer_of]
        signatures = []
        by_id: dict[int, Dialect] = {}
        counts: dict[tuple[int, int], int] = {}
        for layer, part in kept:
            signature = (part.arrangement, tuple(part.tensors), tuple([e.dtype for e in part.tensors.values()]))
            signatures.append(signature)
            dialect = self._recognise(signature)
            if dialect is not None:
                by_id[id(dialect)] = dialect
                counts[layer, id(dialect)] = counts.get((layer, id(dialect)), 0) + 1
        best: dict[int, int] = {}
        self.dialects: dict[int, Dialect | None] = dict.fromkeys(votes)
        for (layer, key), count in counts.items():
            if count > best.get(layer, 0):
                best[layer], self.dialects[layer] = count, by_id[key]
        usual = Counter(id(dialect) for dialect in self.dialects.values() if dialect)
        seen = {layer for layer, _ in kept}
        for layer in self.dialects:
            if layer not in seen and usual:
                # Nothing of it can be read; the others speak for it.
                self.dialects[layer] = by_id[usual.most_common(1)[0][0]]
        self.modules: dict[tuple[int, int, str], Module] = {}
        self.experts_in: dict[int, int] = dict.fromkeys(votes, 0)
        self.projections: set[str] = set()
        self.activation_blocks: set[str] = set()
        wholes = []
        for (layer, part), signature in zip(kept, signatures, strict=True):
            kind = PROJECTIONS[part.projection]
            self.projections.add(kind)
            if part.expert is None:
                wholes.append((layer, kind, part, signature))
                continue
            self.modules[layer, part.expert, kind] = self._module(layer, part, signature)
            if part.expert >= self.experts_in[layer]:
                self.experts_in[layer] = part.expert + 1
        for layer, kind, part, signature in wholes:
            size = _leading(part.tensors)
            module = self._module(layer, part, signature)
            for expert in range(size if size is not None else claimed or 1):
                self.modules[layer, expert, kind] = module
            self.experts_in[layer] = max(self.experts_in[layer], size or 0)
        largest = max(self.experts_in.values(), default=0)
        for layer, size in self.experts_in.items():
            self.experts_in[layer] = max(size if layer in seen else largest, claimed or 0)

    def _recognise(self, signature: tuple[str, tuple[str, ...], tuple[str, ...]]) -> Dialect | None:
        if signature not in self._known:
            arrangement, suffixes, dtypes = signature
            types = dict(zip(suffixes, dtypes, strict=True))
            self._known[signature] = recognise(types, arrangement, self._method)
        return self._known[signature]

    def _module(self, layer: int, part: Parts, signature: Any) -> Module:
        dialect = self.dialects[layer]
        key = (id(dialect), signature)
        if key not in self._readings:
            self._readings[key] = self._reading(dialect, part.tensors, self._recognise(signature))
        roles, extras, state = self._readings[key]
        tensors = {role: part.tensors[suffix] for role, suffix in roles}
        if dialect and state == "quantised" and "input_scale" in tensors:
            self.activation_blocks.add(dialect.block)
        left = {suffix: part.tensors[suffix] for suffix in extras} if extras else {}
        return Module(part.name, state, tensors, left, part.expert is None)

    def _reading(
        self, dialect: Dialect | None, tensors: Mapping[str, TensorEntry], own: Dialect | None
    ) -> tuple[list[tuple[str, str]], list[str], str]:
        """Which suffix plays which role, which play none, and the module's state."""
        roles: dict[str, str] = {}
        extras = []
        for suffix in tensors:
            role = dialect.role_of(suffix) if dialect else suffix if suffix in ROLES else None
            if role is None or role in roles:
                extras.append(suffix)
            else:
                roles[role] = suffix
        plain = tensors.get("weight", tensors.get(""))
        packed = tensors.get(roles.get("weight", ""))
        if dialect and own and (own.id, own.block) != (dialect.id, dialect.block):
            state = "other"
        elif dialect and packed is not None and packed.dtype in PACKED:
            state = "quantised"
        elif plain is not None and plain.dtype in FLOATS:
            state = "unquantised"
        elif plain is not None or dialect is None:
            state = "other"
        else:
            # Scales without codes, or a bias alone: the codes are what is missing.
            state = "quantised"
        return list(roles.items()), extras, state


def _leading(tensors: Mapping[str, TensorEntry]) -> int | None:
    """Experts in tensors that hold all of them: the first axis of a matrix or vector of experts."""
    sizes = Counter(entry.shape[0] for entry in tensors.values() if entry.shape and not is_one_number(entry))
    return sizes.most_common(1)[0][0] if sizes else None


def _summary(
    kinds: set[tuple[str, str]], read: _Modules, quant_config: QuantConfig, tensors: Mapping[str, TensorEntry]
) -> tuple[str, str]:
    """Dialect and scheme of the whole checkpoint."""
    if len(kinds) > 1:
        return "mixed", "MIXED"
    if kinds:
        [(name, block)] = kinds
        if block == "MXFP4":
            return name, "MXFP4"
        if quant_config.algo and quant_config.algo.startswith("W4A8"):
            return name, "W4A8"
        # By what is stored: one activation scale anywhere means that the experts are meant to have them.
        return name, "W4A4" if block in read.activation_blocks else "W4A16"
    if _is_quantised_elsewhere(tensors):
        return _dense(tensors)
    plain = all(entry.dtype in FLOATS or entry.dtype in ("I64", "I32", "BOOL") for entry in tensors.values())
    return ("unquantised", "UNQUANTISED") if plain else ("unknown", "UNQUANTISED")


def _is_quantised_elsewhere(tensors: Mapping[str, TensorEntry]) -> bool:
    return any(name.endswith((".weight_scale_2", ".weight_global_scale", ".weight_packed")) for name in tensors)


def _dense(tensors: Mapping[str, TensorEntry]) -> tuple[str, str]:
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


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return str(names[0])[:200] if isinstance(names, list) and names else None
