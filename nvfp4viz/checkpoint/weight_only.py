"""What makes an NVFP4 checkpoint weight-only: other labels, and no activation scales.  Nothing is guessed."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

from nvfp4viz.checkpoint.module_rules import quark_algo
from nvfp4viz.checkpoint.problems import printable
from nvfp4viz.errors import InputError

LABEL = "W4A16_NVFP4"
# An activation scale's suffix and that of the second-level weight scale beside it, which only NVFP4 modules have.
_BESIDE = (
    ("input_scale", "weight_scale_2"),
    ("input_scale", "scale2"),
    ("input_scale_2", "weight_scale_2"),
    ("input_global_scale", "weight_global_scale"),
)


def activation_scales(names: Collection[str]) -> tuple[str, ...]:
    """Names of the activation scales of NVFP4 modules; those of FP8 modules stay.

    >>> activation_scales({"a.input_scale": 0, "a.weight_scale_2": 0, "fp8.input_scale": 0})
    ('a.input_scale',)
    """
    return tuple(name for name in names if is_activation_scale(name, names))


def is_activation_scale(name: str, names: Collection[str]) -> bool:
    """Is ``name``, there or missing, the activation scale of an NVFP4 module of ``names``?"""
    return any(name.endswith(own) and name.removesuffix(own) + other in names for own, other in _BESIDE)


def relabelled(content: dict[str, Any] | None) -> dict[str, Any] | None:
    """A copy of ``config.json`` or ``hf_quant_config.json`` that calls NVFP4 modules weight-only.

    Raises
    ------
    InputError
        ``repair.algorithm`` for a relative of NVFP4 of which servers know no weight-only form.
    """
    out = copy.deepcopy(content)
    for section in _sections(out) if out else ():
        _relabel(section)
        _refuse_quark(section)
        layers = section.get("quantized_layers")
        for layer in layers.values() if isinstance(layers, dict) else ():
            if isinstance(layer, dict):
                _relabel(layer)
        groups = section.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            if isinstance(group, dict) and _is_four_bit(group.get("weights")):
                group.pop("input_activations", None)
    return out


def _sections(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every object that may carry an algorithm: the file itself, and the sections in it."""
    text = content.get("text_config")
    for holder in (content, text if isinstance(text, dict) else {}):
        yield holder
        for key in ("quantization_config", "compression_config", "quantization"):
            section = holder.get(key)
            if isinstance(section, dict):
                yield section
                if isinstance(section.get("quantization"), dict):
                    yield section["quantization"]


def _relabel(section: dict[str, Any]) -> None:
    for key in ("quant_algo", "moe_quant_algo"):
        algo = section.get(key)
        if not isinstance(algo, str):
            continue
        if algo.upper() == "NVFP4":
            section[key] = LABEL
        elif algo.upper().startswith(("NVFP4", "W4A8", "W4A4")):
            raise InputError("repair.algorithm", algo=printable(algo, 40))


def _refuse_quark(section: dict[str, Any]) -> None:
    """Quark's NVFP4 is one only with inputs in NVFP4 too (vLLM's ``quark.py: _is_nvfp4``)."""
    if section.get("quant_method") != "quark":
        return
    layers = section.get("layer_quant_config")
    entries = [section.get("global_quant_config"), *(layers.values() if isinstance(layers, dict) else ())]
    if any(quark_algo(entry) == "NVFP4" for entry in entries):
        raise InputError("repair.algorithm", algo="Quark NVFP4")


def _is_four_bit(weights: Any) -> bool:
    return isinstance(weights, dict) and weights.get("num_bits") == 4
