"""One view of every layout: layer × expert × projection × role → slot.

Names and types decide; the configuration is a second opinion (the audit compares the two).  Only headers are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nvfp4viz.checkpoint.dialects import (
    MODELOPT,
    PER_EXPERT,
    PROJECTIONS,
    PerExpertDialect,
    parse_expert_name,
    recognise_other,
)
from nvfp4viz.checkpoint.dialects.per_expert import PROJECTION_ORDER, ROLES
from nvfp4viz.checkpoint.header import TensorEntry
from nvfp4viz.checkpoint.quantconfig import QuantConfig

# Names that hold the number of routed experts, as the model families spell it.
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "num_experts_per_token", "top_k")
FLOATS = frozenset({"BF16", "F16", "F32"})


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one tensor.

    Attributes
    ----------
    name
        The tensor's name, or the name it would have.
    entry
        Where it lies; None where the checkpoint does not have it.
    """

    layer: int
    expert: int
    projection: str
    role: str
    name: str
    entry: TensorEntry | None


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
    """

    name: str
    state: str
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    extras: dict[str, TensorEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CanonicalView:
    """What a checkpoint holds, whatever its layout.

    Attributes
    ----------
    dialect, scheme
        As in the audit's vocabulary: ``"modelopt"``, …; ``"W4A4"``, ``"W4A16"``, ``"MXFP4"``, ``"UNQUANTISED"``, …
    complete
        The layout is read in full; where False only `dialect` and `scheme` mean something.
    divisors
        Second-level scales are stored as divisors.
    moe_layers, draft_layers
        Layer numbers with experts; draft (MTP) layers are numbered after the model's own, as vLLM does.
    experts
        Routed experts per layer: the configuration's number, or the largest found.
    experts_in
        The same per layer (a layer may be pruned).
    projections
        ``("gate", "up", "down")``, or without the gate where no expert has one.
    """

    dialect: str
    scheme: str
    complete: bool
    divisors: bool
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
    suffixes: dict[str, str]
    _disk_names: dict[str, str]
    _projection_major: bool
    other_blocks: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that a quantised projection needs under `scheme`."""
        return ROLES if self.scheme == "W4A4" else ROLES[:3]

    def module(self, layer: int, expert: int, projection: str) -> Module:
        """The projection's tensors; ``state`` is ``"absent"`` where it has none."""
        found = self.modules.get((layer, expert, projection))
        return found or Module(self._module_name(layer, expert, projection), "absent")

    def slot(self, layer: int, expert: int, projection: str, role: str) -> Slot:
        """One slot, whether the checkpoint has its tensor or not."""
        module = self.module(layer, expert, projection)
        entry = module.tensors.get(role)
        name = entry.name if entry else f"{module.name}.{self.suffixes[role]}"
        return Slot(layer, expert, projection, role, name, entry)

    def slots(
        self,
        layer: int | None = None,
        expert: int | None = None,
        projection: str | None = None,
        role: str | None = None,
    ) -> Iterator[Slot]:
        """Slots that the scheme needs, in order; arguments narrow the choice.  Unquantised experts need none."""
        for at in self.moe_layers if layer is None else (layer,):
            for number in range(self.experts_in[at]) if expert is None else (expert,):
                for name in self.projections if projection is None else (projection,):
                    if self.module(at, number, name).state not in ("unquantised", "other"):
                        for kind in self.roles if role is None else (role,):
                            yield self.slot(at, number, name, kind)

    def _module_name(self, layer: int, expert: int, projection: str) -> str:
        disk = self._disk_names.get(projection, f"{projection}_proj")
        tail = f"{disk}.{expert}" if self._projection_major else f"{expert}.{disk}"
        return f"{self.blocks[layer]}.{tail}"


class _HasTensors(Protocol):
    """What `canonical` needs of a checkpoint."""

    tensors: dict[str, TensorEntry]
    config: dict[str, Any] | None
    quant_config: QuantConfig


def canonical(checkpoint: _HasTensors) -> CanonicalView:
    """The canonical view of an opened checkpoint."""
    return canonical_of(checkpoint.tensors, checkpoint.config, checkpoint.quant_config)


def canonical_of(
    tensors: Mapping[str, TensorEntry], config: Mapping[str, Any] | None = None, quant_config: QuantConfig | None = None
) -> CanonicalView:
    """The canonical view of a table of tensors."""
    found = _Found()
    found.collect(tensors)
    quant_config = quant_config or QuantConfig()
    dialects = [dialect for dialect in PER_EXPERT if dialect.recognises(found.census)]
    other = recognise_other(found.census, tensors) if not dialects else None
    dialect = dialects[0] if dialects else MODELOPT
    config = config or {}
    blocks, drafts, left_out = _numbered_blocks(found.blocks, config_number(config, ("num_hidden_layers",)))
    layer_of = {block: layer for layer, block in (blocks | drafts).items()}
    modules: dict[tuple[int, int, str], Module] = {}
    for (block, expert, projection, name), suffixes in found.modules.items():
        if block in layer_of:
            key = (layer_of[block], expert, PROJECTIONS[projection])
            modules[key] = _module(dialect, name, suffixes)
    counts: dict[int, int] = {}
    for layer, expert, _ in modules:
        counts[layer] = max(counts.get(layer, 0), expert + 1)
    claimed = config_number(config, EXPERT_KEYS)
    experts_in = {layer: max(count, claimed or 0) for layer, count in counts.items()}
    used = {projection for _, _, projection in modules}
    if len(dialects) > 1:
        name, scheme = "mixed", "MIXED"
    elif dialects:
        name, scheme = dialect.id, _scheme(modules, quant_config)
    elif other:
        name, scheme = other
    elif _is_quantised_elsewhere(tensors):
        name, scheme = _dense(tensors)
    else:
        plain = all(entry.dtype in FLOATS or entry.dtype in ("I64", "I32", "BOOL") for entry in tensors.values())
        name, scheme = ("unquantised", "UNQUANTISED") if plain else ("unknown", "UNQUANTISED")
    return CanonicalView(
        dialect=name,
        scheme=scheme,
        complete=len(dialects) == 1 or name == "unquantised",
        divisors=dialect.divisors,
        group_size=quant_config.group_size or (32 if scheme == "MXFP4" else 16),
        architecture=_architecture(config),
        layers=config_number(config, ("num_hidden_layers",)),
        moe_layers=tuple(sorted(blocks)),
        draft_layers=tuple(sorted(drafts)),
        experts=max([claimed or 0, *(experts_in[layer] for layer in blocks if layer in experts_in)]),
        experts_in=experts_in,
        projections=tuple(kind for kind in PROJECTION_ORDER if kind in used),
        top_k=config_number(config, TOP_K_KEYS),
        blocks=blocks | drafts,
        modules=modules,
        suffixes=dialect.suffixes,
        _disk_names=found.disk_names,
        _projection_major=found.projection_major,
        other_blocks=left_out,
    )


class _Found:
    """Per-expert tensors, collected by module."""

    def __init__(self) -> None:
        self.modules: dict[tuple[str, int, str, str], dict[str, TensorEntry]] = {}
        self.blocks: dict[str, int] = {}
        self.census: set[tuple[str, str]] = set()
        self.disk_names: dict[str, str] = {}
        self.projection_major = False

    def collect(self, tensors: Mapping[str, TensorEntry]) -> None:
        """Sort every per-expert tensor into its module."""
        by_module: dict[str, dict[str, TensorEntry] | None] = {}
        for name, entry in tensors.items():
            module, _, suffix = name.rpartition(".")
            # The four tensors of a projection share everything before the last dot: parse it once.
            suffixes = by_module.get(module, _UNSEEN)
            if suffixes is _UNSEEN:
                suffixes = by_module[module] = self._open(name, module)
            if suffixes is not None:
                suffixes[suffix] = entry
                self.census.add((suffix, entry.dtype))

    def _open(self, name: str, module: str) -> dict[str, TensorEntry] | None:
        """A place for a module's tensors; None where it is no routed expert's."""
        parsed = parse_expert_name(name)
        if parsed is None:
            return None
        suffixes = self.modules[parsed.block, parsed.expert, parsed.projection, module] = {}
        self.blocks[parsed.block] = self.blocks.get(parsed.block, 0) + 1
        self.disk_names[PROJECTIONS[parsed.projection]] = parsed.projection
        self.projection_major |= parsed.projection_major
        return suffixes


_UNSEEN: dict[str, TensorEntry] = {}


def _module(dialect: PerExpertDialect, name: str, suffixes: dict[str, TensorEntry]) -> Module:
    tensors = {role: suffixes[suffix] for role, suffix in dialect.suffixes.items() if suffix in suffixes}
    extras = {}
    if len(tensors) < len(suffixes):
        known = set(dialect.suffixes.values())
        extras = {suffix: entry for suffix, entry in suffixes.items() if suffix not in known}
    plain = suffixes.get("weight")
    packed = tensors.get("weight")
    if packed is not None and packed.dtype in dialect.packed:
        state = "quantised"
    elif plain is not None and plain.dtype in FLOATS:
        state = "unquantised"
    elif plain is not None:
        state = "other"
    else:
        # Scales without codes: the codes are what is missing.
        state = "quantised" if tensors else "other"
    return Module(name, state, tensors, extras)


_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d{1,6})(?=\.)")


def _numbered_blocks(
    found: Mapping[str, int], layers: int | None
) -> tuple[dict[int, str], dict[int, str], tuple[str, ...]]:
    """Blocks by layer number: the model's own, its draft layers, and blocks of other towers.

    Draft (MTP, nextn) layers lie outside the model: named ``mtp``, or numbered past its last layer.
    """
    families: dict[str, dict[int, str]] = {}
    drafts: dict[int, str] = {}
    for block in found:
        match = _LAYER.search(f"{block}.")
        number = int(match[1]) if match else 0
        parts = block.split(".")
        if "mtp" in parts or "nextn" in parts or "mtp_layers" in parts:
            drafts[(layers or 100_000) + number] = block
        elif layers is not None and number >= layers:
            drafts[number] = block
        else:
            family = block[: match.start()] if match else block
            families.setdefault(family, {})[number] = block
    main = max(families.values(), key=len, default={})
    left_out = tuple(block for family in families.values() if family is not main for block in family.values())
    return main, drafts, left_out


def _scheme(modules: Mapping[tuple[int, int, str], Module], quant_config: QuantConfig) -> str:
    """By what is stored: one activation scale anywhere means that the experts are meant to have them."""
    quantised = [module for module in modules.values() if module.state == "quantised"]
    if not quantised:
        return "UNQUANTISED"
    if quant_config.algo and quant_config.algo.startswith("W4A8"):
        return "W4A8"
    return "W4A4" if any("input_scale" in module.tensors for module in quantised) else "W4A16"


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
