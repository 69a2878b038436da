"""Which quantisation a server reads out of a checkpoint's config files, and the weight-only promotion rule.

A ModelOpt checkpoint says its algorithm in ``config.json`` (``quantization_config``) or, where that is absent, in
``hf_quant_config.json``.  A file without activation scales that still says ``NVFP4`` would be served as W4A4, with an
uninitialised scale for every expert; vLLM therefore rewrites the algorithm to ``W4A16_NVFP4`` under one rule (source:
`serving-vllm.md` 4.1, ``_from_config``):

    the algorithm is exactly ``NVFP4``, and the **top-level** ``config_groups`` is a non-empty object, and every group
    is an object whose ``input_activations`` is null **or absent**.

So ``"input_activations": {}`` does not promote, a file without ``config_groups`` cannot be promoted, and groups inside
``"quantization"`` are not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvfp4viz.errors import ServingError

VLLM = "0.33.0"
"""The version that every fact about vLLM was read from, here and in the tables of `selection` and `all_to_all`."""
MODELOPT_ALGOS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "MXFP8",
    "MIXED_PRECISION",
)
"""What vLLM 0.33.0 accepts as ``quant_algo``."""
NESTED_FIELDS = ("group_size", "kv_cache_quant_algo", "exclude_modules")
"""Required beside ``quant_algo`` in the nested shape, of every algorithm but MIXED_PRECISION (`MIXED_FIELDS`)."""
MIXED_FIELDS = ("quantized_layers",)
"""What MIXED_PRECISION needs, and may not be empty (``ModelOptMixedPrecisionConfig._from_config``)."""
SCHEMES = {"NVFP4": "W4A4", "W4A16_NVFP4": "W4A16", "MIXED_PRECISION": "MIXED", "FP8": "W8A8"}


@dataclass(frozen=True, slots=True)
class RuleStep:
    """One question that the server asks of the config.

    Attributes
    ----------
    id
        ``"file"``, ``"shape"``, ``"algo"``, ``"fields"``, ``"algo-exactly-nvfp4"``, ``"groups-present"``,
        ``"groups-are-objects"``, ``"no-input-activations"``.
    holds
        Whether the rule may go on; None for a step that only reads something.
    json
        What was found, as JSON.
    """

    id: str
    holds: bool | None
    json: str

    @property
    def found(self) -> str:
        """The JSON, cut where it is longer than a line."""
        return _cut(self.json)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the server believes the checkpoint to be.

    Attributes
    ----------
    algo
        After promotion; None for an unquantised model.
    declared_algo
        As the file says it (upper case).
    scheme
        ``"W4A4"``, ``"W4A16"``, ``"MIXED"``, ``"W8A8"``, ``"OTHER"`` or ``"UNQUANTISED"``.
    method
        ``"modelopt"``, ``"compressed-tensors"``, …; None for an unquantised model.
    promoted
        The weight-only rule fired.
    group_size
        16 where the file does not say.
    exclude
        Patterns of modules left unquantised.
    source
        ``"config.json"``, ``"hf_quant_config.json"`` or None.
    steps
        The rule, traced: the last step with ``holds=False`` is why it did not fire.
    """

    algo: str | None
    declared_algo: str | None
    scheme: str
    method: str | None
    promoted: bool
    group_size: int
    exclude: tuple[str, ...]
    source: str | None
    steps: tuple[RuleStep, ...]


def _lacking(declared: str, body: Mapping[str, Any]) -> list[str]:
    """Required fields of the nested shape that are not there."""
    if declared == "MIXED_PRECISION":
        return [name for name in MIXED_FIELDS if not body.get(name)]
    return [name for name in NESTED_FIELDS if name not in body]


def resolve_quantization(config: Mapping[str, Any] | None, hf_quant_config: Mapping[str, Any] | None) -> Resolved:
    """Read the two config files as vLLM does.

    Parameters
    ----------
    config
        Content of ``config.json``, or None.
    hf_quant_config
        Content of ``hf_quant_config.json``, or None; only read where ``config.json`` has no ``quantization_config``.

    Raises
    ------
    ServingError
        ``serving.quant-shape`` (not an object), ``serving.quant-algo`` (unknown algorithm), ``serving.quant-fields``
        (a required field of the nested shape is absent, or a mixed one lists no layer).  vLLM raises
        ValueError in these cases.

    >>> groups = {"group_0": {"weights": {"num_bits": 4}}}
    >>> flat = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups}}
    >>> resolved = resolve_quantization(flat, None)
    >>> resolved.algo, resolved.scheme, resolved.promoted
    ('W4A16_NVFP4', 'W4A16', True)
    >>> resolve_quantization({}, None).scheme
    'UNQUANTISED'
    """
    raw, source = _find(config, hf_quant_config)
    if raw is None:
        return Resolved(None, None, "UNQUANTISED", None, False, 16, (), None, (RuleStep("file", None, "null"),))
    if not isinstance(raw, Mapping):
        raise ServingError("serving.quant-shape", file=source, found=_short(raw))
    steps = [RuleStep("file", None, _json(source))]
    method = raw.get("quant_method")
    if isinstance(method, str) and not method.startswith("modelopt"):
        return _other_method(method, raw, source, steps)

    nested = raw.get("quantization")
    body: Mapping[str, Any] = nested if isinstance(nested, Mapping) else raw
    is_nested = isinstance(nested, Mapping)
    steps.append(RuleStep("shape", None, _json("nested" if is_nested else "flat")))
    declared = str(body.get("quant_algo") or "").upper()
    steps.append(RuleStep("algo", declared in MODELOPT_ALGOS, _json(body.get("quant_algo"))))
    if declared not in MODELOPT_ALGOS:
        raise ServingError(
            "serving.quant-algo", file=source, algo=_short(body.get("quant_algo")), known=", ".join(MODELOPT_ALGOS)
        )
    missing = _lacking(declared, body) if is_nested else []
    if is_nested:
        steps.append(RuleStep("fields", not missing, _json(missing)))
    if missing:
        raise ServingError("serving.quant-fields", file=source, fields=", ".join(missing))

    rule = _promotion_steps(declared, raw)
    promoted = all(step.holds for step in rule)
    algo = "W4A16_NVFP4" if promoted else declared
    size = body.get("group_size")
    exclude = body.get("exclude_modules", body.get("ignore"))
    return Resolved(
        algo=algo,
        declared_algo=declared,
        scheme=SCHEMES.get(algo, "OTHER"),
        method="modelopt",
        promoted=promoted,
        group_size=size if isinstance(size, int) and not isinstance(size, bool) else 16,
        exclude=tuple(str(item) for item in exclude) if isinstance(exclude, list) else (),
        source=source,
        steps=(*steps, *rule),
    )


def _find(config: Mapping[str, Any] | None, sidecar: Mapping[str, Any] | None) -> tuple[Any, str]:
    inside = (config or {}).get("quantization_config")
    if inside is not None:
        return inside, "config.json"
    return sidecar, "hf_quant_config.json"


def _promotion_steps(declared: str, raw: Mapping[str, Any]) -> list[RuleStep]:
    """The rule up to and including the first question that is answered with no."""
    steps = [RuleStep("algo-exactly-nvfp4", declared == "NVFP4", _json(declared))]
    if not steps[-1].holds:
        return steps
    groups = raw.get("config_groups")
    steps.append(RuleStep("groups-present", isinstance(groups, Mapping) and bool(groups), _json(groups)))
    if not isinstance(groups, Mapping) or not groups:
        return steps
    odd = [name for name, group in groups.items() if not isinstance(group, Mapping)]
    steps.append(RuleStep("groups-are-objects", not odd, _json(odd)))
    if odd:
        return steps
    none = all(group.get("input_activations") is None for group in groups.values())
    found = {name: group.get("input_activations", "absent") for name, group in groups.items()}
    steps.append(RuleStep("no-input-activations", none, _json(found)))
    return steps


def _other_method(method: str, raw: Mapping[str, Any], source: str, steps: list[RuleStep]) -> Resolved:
    """compressed-tensors and others name their scheme by groups; the promotion rule is ModelOpt's alone."""
    groups = raw.get("config_groups")
    found = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    four = [g for g in found if isinstance(g.get("weights"), Mapping) and g["weights"].get("num_bits") == 4]
    scheme, algo = "OTHER", None
    if method == "compressed-tensors" and four:
        both = any(group.get("input_activations") is not None for group in four)
        scheme, algo = ("W4A4", "NVFP4") if both else ("W4A16", "W4A16_NVFP4")
    ignore = raw.get("ignore")
    exclude = tuple(str(item) for item in ignore) if isinstance(ignore, list) else ()
    return Resolved(algo, algo, scheme, method, False, 16, exclude, source, tuple(steps))


def _short(value: Any) -> str:
    return _cut(_json(value))


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    # Half of a surrogate pair is valid JSON, but no text that can be sent to a browser or written into a report.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _cut(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "…"
