"""What a checkpoint's own files claim about its quantisation.

Two files can carry it: ``config.json`` (key ``quantization_config``, read first by vLLM) and the older
``hf_quant_config.json``.  Both are kept as found; nothing here judges.  Fields after ModelOpt's
``convert_hf_config.py`` and vLLM's ``quantization/modelopt.py`` (0.33.0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from nvfp4viz.checkpoint.source import CONFIG, HF_QUANT_CONFIG

# What vLLM refuses to load without, in the nested shape only.
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
    missing
        Required fields that are not there.
    """

    file: str
    layout: str
    method: str | None
    algo: str | None
    group_size: int | None
    exclude: tuple[str, ...] | None
    config_groups: Any
    quantized_layers: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


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

    def is_excluded(self, module: str) -> bool:
        """Does any section leave this module unquantised?

        A ``MIXED_PRECISION`` file is an allow-list: what it does not name is left alone.
        """
        return any(_section_excludes(section, module) for section in self.sections)

    def algo_of(self, module: str) -> str | None:
        """Algorithm of one module, where ``quantized_layers`` names it or a parent of it; else the file's own."""
        for section in self.sections:
            for name, entry in section.quantized_layers.items():
                if _names(name, module) and isinstance(entry, dict) and isinstance(entry.get("quant_algo"), str):
                    return str(entry["quant_algo"]).upper()
        return None if self.algo == "MIXED_PRECISION" else self.algo


def read_quant_config(config: Mapping[str, Any] | None, sidecar: Mapping[str, Any] | None) -> QuantConfig:
    """Collect the sections of ``config.json`` and ``hf_quant_config.json``.

    >>> read_quant_config(None, {"quantization": {"quant_algo": "nvfp4", "group_size": 16}}).algo
    'NVFP4'
    """
    sections = []
    raw = _section_of(config or {})
    if raw is not None:
        sections.append(_read(CONFIG, raw))
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


def _read(file: str, raw: Mapping[str, Any]) -> SourceConfig:
    nested = raw.get("quantization")
    body: Mapping[str, Any] = nested if isinstance(nested, dict) else raw
    layout = "nested" if isinstance(nested, dict) else "flat"
    groups = raw.get("config_groups")
    exclude = body.get("exclude_modules", body.get("ignore", body.get("modules_to_not_convert")))
    method = raw.get("quant_method")
    algo = body.get("quant_algo")
    layers = body.get("quantized_layers")
    return SourceConfig(
        file=file,
        layout=layout,
        method=str(method) if isinstance(method, str) else None,
        algo=algo.upper() if isinstance(algo, str) else _algo_from_groups(method, groups),
        group_size=_group_size(body, groups),
        exclude=tuple(str(item) for item in exclude) if isinstance(exclude, list) else None,
        config_groups=groups,
        quantized_layers=layers if isinstance(layers, dict) else {},
        missing=tuple(name for name in REQUIRED_NESTED if name not in body) if layout == "nested" else (),
    )


def _group_size(body: Mapping[str, Any], groups: Any) -> int | None:
    sizes = [body.get("group_size"), *(_weights(group).get("group_size") for group in _groups(groups))]
    return next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool)), None)


def _groups(groups: Any) -> list[dict[str, Any]]:
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _weights(group: Mapping[str, Any]) -> dict[str, Any]:
    weights = group.get("weights")
    return weights if isinstance(weights, dict) else {}


def _algo_from_groups(method: Any, groups: Any) -> str | None:
    """compressed-tensors names no algorithm: four-bit floats in groups of 16, with or without activations."""
    if method == "mxfp4":
        return "MXFP4"
    if method == "fp8":
        return "FP8"
    four = [
        group
        for group in _groups(groups)
        if (weights := _weights(group)).get("num_bits") == 4
        and weights.get("type") == "float"
        and weights.get("group_size", 16) == 16
    ]
    if not four:
        return None
    return "NVFP4" if any(group.get("input_activations") is not None for group in four) else "W4A16_NVFP4"


def _section_excludes(section: SourceConfig, module: str) -> bool:
    if section.algo == "MIXED_PRECISION" and section.quantized_layers:
        return not any(_names(name, module) for name in section.quantized_layers)
    return any(_pattern_hits(pattern, module) for pattern in section.exclude or ())


def _names(name: str, module: str) -> bool:
    """Does a listed name mean this module: itself, a parent of it, or a wildcard over it?"""
    return module == name or module.startswith(f"{name}.") or (("*" in name) and fnmatchcase(module, name))


def _pattern_hits(pattern: str, module: str) -> bool:
    """vLLM's order: exact, part of the name, wildcard; compressed-tensors adds ``re:``."""
    if pattern.startswith("re:"):
        compiled = _compiled(pattern[3:])
        return compiled is not None and compiled.match(module) is not None
    if any(mark in pattern for mark in "*?["):
        shorter = module.replace("language_model.", "")
        return any(
            fnmatchcase(name, form)
            for name in (module, shorter)
            for form in (pattern, pattern.removesuffix("*") + ".*")
        )
    return pattern == module or f".{pattern}." in f".{module}."


@lru_cache(maxsize=512)
def _compiled(expression: str) -> re.Pattern[str] | None:
    try:
        return re.compile(expression)
    except re.error:
        return None
