"""What a checkpoint's own files claim about its quantisation.

Two files can carry it: ``config.json`` (key ``quantization_config``, read first by vLLM) and the older
``hf_quant_config.json``.  Both are kept as found; nothing here judges.  Fields after ModelOpt's
``convert_hf_config.py`` and vLLM's ``quantization/modelopt.py`` (0.33.0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Any

from nvfp4viz.checkpoint.module_rules import (
    EightBit,
    Rules,
    bare,
    compiled,
    group_algo,
    groups_of,
    quark_algo,
    quark_rules,
    quark_static_inputs,
)
from nvfp4viz.checkpoint.source import CONFIG, HF_QUANT_CONFIG

# What vLLM refuses to load without, in the nested shape of one algorithm (`ModelOptNvFp4Config`); in the flat one it
# is the algorithm alone, and of a mixed file the list of layers beside it, whose entries have their own group size.
REQUIRED_NESTED = ("quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules")


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """One file's quantisation section.

    Attributes
    ----------
    file
        ``config.json`` or ``hf_quant_config.json``.
    layout
        ``"nested"`` (fields inside ``quantization``) or ``"flat"``.
    method
        ``quant_method``: ``"modelopt"``, ``"compressed-tensors"``, ``"mxfp4"``, … or None.
    algo
        Upper-case algorithm, such as ``"NVFP4"`` or ``"W4A16_NVFP4"``; derived from the groups for
        compressed-tensors; None where nothing says.
    group_size
        Block width, or None.
    exclude
        Patterns of modules left alone, or None where the file has no such field.
    config_groups
        As found: any JSON value, or None where the key is absent.
    quantized_layers
        The allow-list of a ``MIXED_PRECISION`` file.
    expert_algo
        What is said of routed experts alone: DeepSeek's `expert_dtype`, NVIDIA's `moe_quant_algo`.
    explicit
        The algorithm is named, not derived from the method or the groups.
    missing
        Required fields that are not there.
    static_inputs
        Quark's section says that the experts' activations have stored FP8 scales.
    weight_block
        `weight_block_size`: rows and values of the blocks of FP8 weights.
    moe_algo
        What `moe_quant_algo` says.
    packing
        `format` of compressed-tensors: how codes are packed.
    activation_scheme
        Of the method ``fp8``: ``"static"`` or ``"dynamic"``.
    """

    file: str
    layout: str
    method: str | None
    algo: str | None
    group_size: int | None
    exclude: tuple[str, ...] | None
    config_groups: Any
    quantized_layers: dict[str, Any] = field(default_factory=dict)
    expert_algo: str | None = None
    explicit: bool = False
    missing: tuple[str, ...] = ()
    static_inputs: bool = False
    weight_block: tuple[int, int] | None = None
    moe_algo: str | None = None
    packing: str | None = None
    activation_scheme: str | None = None
    _allowed: _AllowList | None = None
    _rules: Rules | None = None

    def lists(self, module: str) -> bool:
        """Does the exclude list name this module, whatever an allow-list says?"""
        return bool(self.exclude) and _excluder(self.exclude or ()).hits(module)

    def plain_patterns(self) -> tuple[str, ...]:
        """Excluded names without a wildcard; vLLM's ModelOpt looks for them anywhere in a module's name."""
        if self.method is not None and not self.method.startswith("modelopt"):
            return ()
        return tuple(name for name in self.exclude or () if not name.startswith("re:") and not _is_wild(name))

    def named_experts(self) -> frozenset[int]:
        """Numbers of experts that the exclude list singles out."""
        tails = (item.partition("experts")[2] for item in self.exclude or ())
        return frozenset(int(number) for tail in tails for number in re.findall(r"\d{1,6}", tail))

    def leaves_unnamed(self, module: str) -> bool:
        """Does no allow-list name this module or a parent of it?"""
        return self._allowed is None or self._allowed.find(module) is None

    def lists_below(self, module: str) -> bool:
        """Does the allow-list name something inside this module?"""
        return bool(self._allowed and self._allowed.below(module))

    def listed_below(self, module: str) -> Mapping[str, Any]:
        """Entries of the allow-list inside a module, by the rest of their names; none where it names the module."""
        if self._allowed is None or self._allowed.find(module) is not None:
            return {}
        return self._allowed.below(module)


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """All sections found, the one that vLLM reads first."""

    sections: tuple[SourceConfig, ...] = ()

    @property
    def used(self) -> SourceConfig | None:
        return self.sections[0] if self.sections else None

    @property
    def algo(self) -> str | None:
        return self.used.algo if self.used else None

    @property
    def group_size(self) -> int | None:
        return self.used.group_size if self.used else None

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(section.file for section in self.sections)

    @property
    def sets_experts_apart(self) -> bool:
        """Something names routed experts, or modules one by one, beside a method that asks for it."""
        method = self.used.method if self.used else None
        asks = method is None or method.startswith(_ASKS_FOR_EXPERTS)
        return asks and any(section.expert_algo or section.quantized_layers for section in self.sections)

    def leaves_out(self, *modules: str) -> bool:
        """Does no group of a compressed-tensors section mean this module (given at several depths)?"""
        used = self.used
        return used is not None and used._rules is not None and used._rules.find(modules) is None

    def eight_bit(self, *modules: str) -> tuple[EightBit, ...]:
        """What entries of compressed-tensors or Quark for FP8 say of a module (given at several depths)."""
        rules = self.used._rules if self.used is not None else None
        return rules.eight_bit(modules) if rules is not None else ()

    def is_excluded(self, module: str) -> bool:
        """Does any section leave this module unquantised?

        A ``MIXED_PRECISION`` file is an allow-list: what it does not name is left alone.
        """
        return any(_section_excludes(section, module) for section in self.sections)

    def lists(self, *modules: str) -> bool:
        """Does some section's exclude list name one of these modules, whatever an allow-list says?"""
        return any(section.lists(module) for section in self.sections for module in modules)

    def lists_below(self, module: str) -> bool:
        """Does some section's allow-list name something inside this module?"""
        return any(section.lists_below(module) for section in self.sections)

    def listed_algo(self, *modules: str) -> str | None:
        """What an allow-list calls a module (given at several depths) or a parent of it; None where none does."""
        for section in self.sections:
            for module in modules:
                entry = section._allowed.find(module) if section._allowed else None
                if isinstance(entry, dict) and isinstance(entry.get("quant_algo"), str):
                    return str(entry["quant_algo"]).upper()
        return None

    def algo_of(self, *modules: str) -> str | None:
        """Algorithm of one module, where ``quantized_layers`` names it or a parent of it; else the file's own.

        Parameters
        ----------
        modules
            The same thing at several depths, such as a layer's experts and one of them.
        """
        listed = self.listed_algo(*modules)
        if listed is not None:
            return listed
        for section in self.sections:
            if section.expert_algo and any("experts" in module.split(".") for module in modules):
                return section.expert_algo
        if self.used is not None and self.used._rules is not None:
            return self.used._rules.find(modules) or None
        return None if self.algo == "MIXED_PRECISION" else self.algo


def read_quant_config(config: Mapping[str, Any] | None, sidecar: Mapping[str, Any] | None) -> QuantConfig:
    """Collect the sections of ``config.json`` and ``hf_quant_config.json``.

    >>> read_quant_config(None, {"quantization": {"quant_algo": "nvfp4", "group_size": 16}}).algo
    'NVFP4'
    """
    sections = []
    raw = _section_of(config or {})
    if raw is not None:
        sections.append(_read(CONFIG, raw, config or {}))
    if sidecar is not None:
        sections.append(_read(HF_QUANT_CONFIG, sidecar))
    return QuantConfig(tuple(sections))


def _section_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """``quantization_config`` of the model or of its text part."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = holder.get(key)
            if isinstance(found, dict) and found:
                return found
    return None


def _read(file: str, raw: Mapping[str, Any], around: Mapping[str, Any] | None = None) -> SourceConfig:
    nested = raw.get("quantization")
    body: Mapping[str, Any] = nested if isinstance(nested, dict) else raw
    layout = "nested" if isinstance(nested, dict) else "flat"
    groups = raw.get("config_groups")
    lists = (body.get(key) for key in ("exclude_modules", "ignore", "modules_to_not_convert", "exclude"))
    exclude = next((found for found in lists if found is not None), None)
    method = raw.get("quant_method")
    algo = body.get("quant_algo")
    layers = body.get("quantized_layers")
    if not isinstance(layers, dict) or (isinstance(algo, str) and algo.upper() != "MIXED_PRECISION"):
        # vLLM reads the list of MIXED_PRECISION alone: beside one name for everything it says nothing.
        layers = {}
    # A named algorithm goes before what groups say (ModelOpt writes both).
    rules = None if isinstance(algo, str) else _rules(method, raw, groups)
    return SourceConfig(
        file=file,
        layout=layout,
        method=str(method) if isinstance(method, str) else None,
        algo=algo.upper() if isinstance(algo, str) else _derived_algo(method, raw, groups),
        group_size=_group_size(body, groups),
        exclude=tuple(str(item) for item in exclude) if isinstance(exclude, list) else None,
        config_groups=groups,
        quantized_layers=layers,
        expert_algo=_expert_algo(around or {}, raw, body),
        explicit=isinstance(algo, str),
        missing=_missing(body, layout, "modelopt" if file == HF_QUANT_CONFIG else method),
        static_inputs=method == "quark" and quark_static_inputs(raw),
        weight_block=_weight_block(raw),
        moe_algo=_moe_algo(around or {}, raw, body),
        packing=str(raw["format"]) if method == "compressed-tensors" and isinstance(raw.get("format"), str) else None,
        activation_scheme=str(raw["activation_scheme"]) if isinstance(raw.get("activation_scheme"), str) else None,
        _allowed=_AllowList(layers) if layers else None,
        _rules=rules,
    )


# Methods under which `expert_dtype`, `moe_quant_algo` or an allow-list may speak of the experts.
_ASKS_FOR_EXPERTS = ("modelopt", "fp8", "deepseek", "mxfp4", "quark")


def _rules(method: Any, raw: Mapping[str, Any], groups: Any) -> Rules | None:
    """How a section without a named algorithm speaks of modules."""
    if method == "quark":
        return quark_rules(raw)
    return groups_of(groups) if method == "compressed-tensors" else None


def _missing(body: Mapping[str, Any], layout: str, method: Any) -> tuple[str, ...]:
    """Fields without which vLLM refuses a ModelOpt section (`REQUIRED_NESTED`), and the method of any."""
    algo = body.get("quant_algo")
    mixed = isinstance(algo, str) and algo.upper() == "MIXED_PRECISION"
    # `ModelOptMixedPrecisionConfig` raises an error at an empty list.
    listed = ("quantized_layers",) if mixed and not body.get("quantized_layers") else ()
    no_method = () if isinstance(method, str) else ("quant_method",)
    if layout == "nested":
        # Null is no list, and `from_config` raises an error at whatever is none.
        lists = isinstance(body.get("exclude_modules"), list)
        if mixed:
            return (*no_method, *listed, *(("exclude_modules",) if "exclude_modules" in body and not lists else ()))
        empty = {"quant_algo": not algo, "exclude_modules": not lists}
        return (*no_method, *(name for name in REQUIRED_NESTED if name not in body or empty.get(name)))
    if no_method:
        # Without an algorithm it may be anybody's; with one, ModelOpt's.
        return (*no_method, *listed)
    named = isinstance(method, str) and method.startswith("modelopt")
    no_list = named and "ignore" in body and not isinstance(body["ignore"], list)
    return (*(("quant_algo",) if named and not algo else listed), *(("ignore",) if no_list else ()))


def _expert_algo(*holders: Mapping[str, Any]) -> str | None:
    """What is said of routed experts alone.  `expert_dtype` is asked by DeepSeek's own method, not by ModelOpt's."""
    named = _moe_algo(*holders)
    if named is not None:
        return named
    method = next((holder["quant_method"] for holder in holders if isinstance(holder.get("quant_method"), str)), "")
    for holder in holders:
        kind = holder.get("expert_dtype")
        if isinstance(kind, str) and kind and not method.startswith("modelopt"):
            return "MXFP4" if kind == "fp4" else kind.upper()
    return None


def _moe_algo(*holders: Mapping[str, Any]) -> str | None:
    found = (holder.get("moe_quant_algo") for holder in reversed(holders))
    return next((name.upper() for name in found if isinstance(name, str)), None)


def _weight_block(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    sizes = raw.get("weight_block_size")
    if not isinstance(sizes, list) or len(sizes) != 2:
        return None
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        return None
    return sizes[0], sizes[1]


def _group_size(body: Mapping[str, Any], groups: Any) -> int | None:
    # Of several groups, four-bit floats are the ones that this project is about.
    weights = sorted(map(_weights, _groups(groups)), key=lambda found: not _is_four_bit_float(found))
    sizes = [body.get("group_size"), *(found.get("group_size") for found in weights)]
    return next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool)), None)


def _groups(groups: Any) -> list[dict[str, Any]]:
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _weights(group: Mapping[str, Any]) -> dict[str, Any]:
    weights = group.get("weights")
    return weights if isinstance(weights, dict) else {}


def _is_four_bit_float(weights: Mapping[str, Any]) -> bool:
    return weights.get("num_bits") == 4 and weights.get("type") == "float"


def _derived_algo(method: Any, raw: Mapping[str, Any], groups: Any) -> str | None:
    """Where no algorithm is named: of the method, of Quark's global section, of compressed-tensors' groups."""
    if method == "quark":
        return quark_algo(raw.get("global_quant_config")) or None
    if isinstance(method, str) and method.startswith(("auto-round", "auto_round")) and not raw.get("extra_config"):
        kind, bits = str(raw.get("data_type")), raw.get("bits")
        return f"INT{bits}" if kind.startswith("int") else f"FP{bits}" if kind.startswith("fp") else None
    return _algo_from_groups(method, groups)


def _algo_from_groups(method: Any, groups: Any) -> str | None:
    """compressed-tensors names no algorithm: four-bit floats in groups of 16 or 32, with or without activations."""
    if method == "mxfp4":
        return "MXFP4"
    if method == "fp8":
        return "FP8"
    algos = [group_algo(group) for group in _groups(groups)]
    # Of several formats the first of these stands for the file.
    return next((algo for algo in ("NVFP4", "W4A16_NVFP4", "MXFP4") if algo in algos), None)


def _section_excludes(section: SourceConfig, module: str) -> bool:
    if section.algo == "MIXED_PRECISION" and section._allowed:
        return section.leaves_unnamed(module)
    return section.lists(module)


class _AllowList:
    """Named modules: one means itself and everything below it, or, with a wildcard, what it matches."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._exact = {bare(name): entry for name, entry in entries.items() if "*" not in name}
        self._wild = [(bare(name), entry) for name, entry in entries.items() if "*" in name]
        self._below: dict[str, dict[str, Any]] | None = None

    def below(self, module: str) -> Mapping[str, Any]:
        """Entries inside a block of experts, or any other module, by the rest of their names."""
        if self._below is None:
            self._below = {}
            for name, entry in self._exact.items():
                head, middle, tail = name.partition(".experts.")
                if middle:
                    self._below.setdefault(f"{head}.experts", {})[tail] = entry
        name = bare(module)
        if name.endswith(".experts"):
            return self._below.get(name, {})
        start = f"{name}."
        return {other.removeprefix(start): entry for other, entry in self._exact.items() if other.startswith(start)}

    def find(self, module: str) -> Any:
        """The entry that names a module or a parent of it, or None."""
        name = bare(module)
        while name:
            if name in self._exact:
                return self._exact[name] if self._exact[name] is not None else {}
            name = name.rpartition(".")[0]
        name = bare(module)
        for pattern, entry in self._wild:
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*"):
                return entry if entry is not None else {}
        return None


def _is_wild(pattern: str) -> bool:
    return any(mark in pattern for mark in "*?[")


class _Excluder:
    """A list of patterns, sorted by what they cost: vLLM's exact, part of the name, wildcard, and ``re:``."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        plain = [pattern for pattern in patterns if not pattern.startswith("re:")]
        wild = [pattern for pattern in plain if _is_wild(pattern)]
        exact = {bare(pattern) for pattern in plain if pattern not in wild}
        # A name with a layer's number is the module or a parent of it; a short one may stand anywhere.
        self._anchored = {name for name in exact if any(part.isdigit() for part in name.split("."))}
        self._loose = tuple(f".{name}." for name in exact - self._anchored)
        forms = [form for name in map(bare, wild) for form in (name, name.removesuffix("*") + ".*")]
        self._wild = re.compile("|".join(map(translate, forms))) if forms else None
        known = (compiled(pattern[3:]) for pattern in patterns if pattern.startswith("re:"))
        self._expressions = tuple(found for found in known if found is not None)

    def hits(self, module: str) -> bool:
        name = bare(module)
        padded = f".{name}."
        if any(part in padded for part in self._loose):
            return True
        if self._wild is not None and (self._wild.match(name) or self._wild.match(module)):
            return True
        if any(expression.match(form) for expression in self._expressions for form in (module, name)):
            return True
        while name:
            if name in self._anchored:
                return True
            name = name.rpartition(".")[0]
        return False


@lru_cache(maxsize=8)
def _excluder(patterns: tuple[str, ...]) -> _Excluder:
    return _Excluder(patterns)
