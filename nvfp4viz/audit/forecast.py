"""What each backend will make of a checkpoint, from the rules of the servers' loaders.

A backend is described by how far one activation scale reaches (`nvfp4viz.audit.backends.FAMILIES`): one expert, the
whole layer through a maximum, or nowhere.  What a bad scale then does follows from the two divisions and two products
that vLLM performs without a check (`outcome_of_scales`).  A slot that no tensor fills holds what the memory held
before; for it several fates are tried and all possible outcomes are listed.  `tests/audit/test_forecast.py` compares
the forecasts with running the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nvfp4viz.audit.backends import DEEP_CODES, FAMILIES, FATES, Family, outcome_of_bytes, outcome_of_scales
from nvfp4viz.audit.facts import CLASSES, MISSING, OK, Facts, median_of
from nvfp4viz.audit.labels import CONFLICTS
from nvfp4viz.audit.report import BackendForecast, Finding
from nvfp4viz.audit.scales import has_wrong_convention, mismatched_pairs, outliers
from nvfp4viz.audit.texts import id_list, words
from nvfp4viz.checkpoint import printable

# Worst first.  "ignored" is worse than "safe" only in that something is wrong that the backend does not read.
OUTCOMES = ("load-error", "unsupported", "nan", "undefined", "zero", "degraded", "ignored", "safe")
SCOPES = ("none", "experts", "layer", "model")


@dataclass(slots=True)
class _Effect:
    outcome: str
    possible: tuple[str, ...]
    scope: str
    layers: set[int]
    text: str
    fill: dict[str, Any] = field(default_factory=dict)


def forecast(
    facts: Facts, findings: Iterable[Finding], *, promoted: bool, weight_only: bool, refused: str | None = None
) -> tuple[BackendForecast, ...]:
    """One forecast per backend, in the order of the vocabulary.

    Parameters
    ----------
    findings
        What the audit has found: files and configuration decide before any scale does.
    promoted
        vLLM rewrites the algorithm to W4A16.
    weight_only
        It is labelled W4A16, so that every server reads it so.
    refused
        The algorithm's name, where vLLM raises an error at it.
    """
    found = list(findings)
    # What is wrong is the same for all thirteen backends; only what they make of it differs.
    scales = [each for each in (_LayerScales(facts, layer) for layer in facts.layers) if each.wrong]
    only_mxfp4 = all(facts.block(layer) != "NVFP4" for layer in facts.view.moe_layers)
    weights = [each for each in (_LayerWeights(facts, layer) for layer in facts.layers) if each.wrong]

    def of_backend(name: str, family: Family) -> BackendForecast:
        as_w4a16 = weight_only or (promoted and family.engine == "vllm")
        effects = [
            *_files(family, found),
            *_structure(family, found),
            *_alignment(name, found),
            *_bytes(name, family, found),
        ]
        if refused is not None and family.engine == "vllm":
            fill = {"algo": printable(refused, 60)}
            effects.append(_Effect("unsupported", (), "model", set(facts.layers), "why.unsupported.algo", fill))
        if only_mxfp4:
            if not family.mxfp4:
                effects.append(_Effect("unsupported", (), "model", set(facts.layers), "why.unsupported.mxfp4"))
        elif as_w4a16 and "W4A16" not in family.schemes:
            effects.append(_Effect("unsupported", (), "model", set(facts.layers), "why.unsupported"))
        elif not as_w4a16:
            effects += [effect for layer in scales for effect in _activations(family, layer)]
        effects += [effect for layer in weights for effect in _weights(family, layer)]
        return _forecast(
            name,
            _merged(effects, "why.safe.mxfp4" if only_mxfp4 else "why.safe.weight-only" if as_w4a16 else "why.safe"),
        )

    return tuple(of_backend(name, family) for name, family in FAMILIES.items())


def _merged(effects: list[_Effect], safe: str) -> _Effect:
    """The worst effect speaks for all; equal ones in other layers add their slots."""
    if not effects:
        return _Effect("safe", (), "none", set(), safe)
    effects.sort(key=lambda effect: (OUTCOMES.index(effect.outcome), -SCOPES.index(effect.scope)))
    first = effects[0]
    same = [effect for effect in effects if effect.text == first.text and effect.outcome == first.outcome]
    return _Effect(
        first.outcome,
        tuple(sorted({outcome for effect in same for outcome in effect.possible})),
        first.scope,
        {layer for effect in effects if effect.outcome not in ("ignored", "safe") for layer in effect.layers},
        first.text,
        {**first.fill, "slots": sum(effect.fill.get("slots", 0) for effect in same)},
    )


def _forecast(name: str, effect: _Effect) -> BackendForecast:
    fill = {"backend": name, "layers": id_list(tuple(sorted(effect.layers))), **effect.fill}
    why, _ = words(effect.text, fill)
    scope = "none" if effect.outcome in ("safe", "ignored") else effect.scope
    layers = () if scope == "none" else tuple(sorted(effect.layers))
    return BackendForecast(name, effect.outcome, effect.possible, scope, layers, why, effect.text, fill)


def _files(family: Family, findings: list[Finding]) -> Iterable[_Effect]:
    """Files and configuration that stop a load, or that servers skip silently."""
    for item in findings:
        if item.code in ("container.missing-shard", "container.stale-index") and item.severity == "error":
            # vLLM and SGLang were seen to load without the shard (vllm#34859, sglang#32279).
            silent = family.engine in ("vllm", "sglang") and item.code == "container.missing-shard"
            text = "why.missing-shard.silent" if silent else "why.file"
            outcome = "undefined" if silent else "load-error"
            possible = ("nan", "zero") if silent else ()
            yield _Effect(outcome, possible, "model", set(), text, {"file": _file(item)})
        elif item.code.startswith("container.") and item.severity == "error":
            yield _Effect("load-error", (), "model", set(), "why.file", {"file": _file(item)})
        elif item.code == "config.invalid" and item.severity == "error":
            yield _Effect("load-error", (), "model", set(), "why.config", {"file": _file(item)})
        elif item.text == "config.conflict.size":
            layers = set(item.params["numbers"])
            yield _Effect("load-error", (), "model", layers, "why.config-size", dict(item.params))
        elif item.text == "config.conflict.size.linear":
            yield _Effect("load-error", (), "model", set(), "why.config-size.linear", dict(item.params))
        elif item.text == "config.conflict.experts":
            yield _Effect("load-error", (), "model", set(), "why.experts-wide", dict(item.params))
        elif item.text == "config.conflict.experts.unused" and family.engine in ("vllm", "sglang"):
            # Some of their models' loaders skip a name that they do not know, others look it up and stop.
            yield _Effect("load-error", ("load-error", "safe"), "model", set(), "why.experts-unused", dict(item.params))
        elif item.text == "weight.unquantised.left-alone" and family.engine == "vllm":
            fill = {"tensor": item.tensors[0]}
            yield _Effect("load-error", ("load-error", "safe"), "model", {item.layer or 0}, "why.left-alone", fill)
        elif item.code == "config.excluded-but-quantised" and family.engine == "vllm":
            if item.text.endswith(".part"):
                layers, fill = set(item.params["numbers"]), dict(item.params)
                yield _Effect("load-error", (), "model", layers, "why.excluded-part", fill)
            elif item.params.get("numbers"):
                yield _Effect("load-error", (), "model", set(item.params["numbers"]), "why.excluded")
        elif item.text in CONFLICTS:
            yield _Effect("load-error", (), "model", set(), "why.config-method")
        elif item.code == "config.absent" and item.severity == "error":
            yield _Effect("load-error", (), "model", set(), "why.config-absent")
        elif item.code == "config.incomplete" and family.engine == "vllm":
            yield _Effect("load-error", (), "model", set(), "why.config", {"file": _file(item)})


def _file(item: Finding) -> str:
    return str(item.params.get("file", ""))


# A tensor of another type or shape than the parameter it is copied into stops a load.
_REFUSED_LAYOUTS = (
    "weight.unquantised", "weight.shape", "scheme.mixed-layer", "block-scale.group", "scheme.pre-quant-scale",
    "scale.shape",
)  # fmt: skip


def _structure(family: Family, findings: list[Finding]) -> Iterable[_Effect]:
    """Whole experts that are absent, unquantised or of another format, and tensors of the weights that are missing."""
    for item in findings:
        layers = set(item.params.get("numbers", ())) if item.layer is None else {item.layer}
        lost = (item.code in ("expert.absent", "expert.gap") and item.severity == "error") or (
            item.code == "scale.missing" and item.role != "input_scale"
        )
        refuses = family.engine == "tensorrt-llm"
        unread = item.role == "weight_scale_2" and item.projection == "up" and family.gate_rules
        if lost and unread and not refuses:
            fill = {"tensor": item.tensors[0], "slots": item.count}
            yield _Effect("degraded", MILD, "experts", layers, "why.up-unread", fill)
        elif lost:
            yield _Effect(
                "load-error" if refuses else "undefined",
                () if refuses else ("degraded", "nan", "zero"),
                "model" if refuses else "layer" if item.experts is None else "experts",
                layers,
                "why.key-error" if refuses else "why.weights-missing",
                {"tensor": item.tensors[0] if item.tensors else "", "slots": item.count},
            )
        elif item.code in _REFUSED_LAYOUTS and item.severity == "error":
            fill = {"tensor": "".join(item.tensors[:1])}
            yield _Effect("load-error", (), "model", layers, "why.layout", fill)
        elif item.code == "scale.convention":
            yield _Effect("degraded", (), "layer", layers, "why.convention")


def _alignment(name: str, findings: list[Finding]) -> Iterable[_Effect]:
    """What one kernel does with shapes that are none of its own."""
    if name == "vllm-cutlass":
        for item in findings:
            if item.text == "parallel.alignment.refused":
                yield _Effect("unsupported", (), "model", set(), "why.alignment", dict(item.params))
            elif item.text == "parallel.alignment.hidden":
                yield _Effect(
                    "degraded", ("degraded", "nan"), "model", set(), "why.alignment.hidden", dict(item.params)
                )


def _bytes(name: str, family: Family, findings: list[Finding]) -> Iterable[_Effect]:
    """What ``--deep`` has found in packed codes and block scales, which every backend multiplies with."""
    for item in findings:
        if item.code not in DEEP_CODES:
            continue
        outcome, possible = outcome_of_bytes(name, item.code, item.projection)
        text, fill = f"why.{item.code}", {**item.params, "layer": item.layer, "slots": item.count}
        if item.text.endswith(".linear"):
            # Every token passes an ordinary layer; its NaN bytes are the one thing that vLLM looks for on loading.
            stops = item.code == "block-scale.nan" and family.engine == "vllm"
            text = f"{text}.refused" if stops else f"{text}.linear"
            yield _Effect("load-error" if stops else outcome, () if stops else possible, "model", set(), text, fill)
        else:
            scope = "layer" if item.experts is None else "experts"
            yield _Effect(outcome, possible, scope, {item.layer} if item.layer is not None else set(), text, fill)


def _activations(family: Family, scales: _LayerScales) -> Iterable[_Effect]:
    """What one layer's activation scales do."""
    layer = scales.layer
    if family.engine == "tensorrt-llm" and scales.missing:
        fill = {"tensor": scales.first_missing(), "slots": scales.missing}
        yield _Effect("load-error", (), "model", {layer}, "why.key-error", fill)
    elif family.reach == "none":
        yield _Effect("ignored", (), "none", {layer}, "why.ignored", {"slots": scales.wrong})
    elif family.reach == "expert":
        yield from _per_expert(scales, layer)
    else:
        yield _one_maximum(scales, layer, family)


class _LayerScales:
    """One layer's activation scales, as the loaders' ``(E, S)`` and ``(E,)`` parameters: NaN stands for no value."""

    def __init__(self, facts: Facts, layer: int) -> None:
        kinds = facts.view.projections
        self._facts, self.layer = facts, layer
        tables = {kind: facts.tables["input_scale", layer, kind] for kind in kinds}
        self.first = [kind for kind in kinds if kind != "down"]
        self.absent = {kind: table.state == MISSING for kind, table in tables.items()}
        self.values = {kind: table.values.astype(np.float64) for kind, table in tables.items()}
        good = {kind: (table.state == OK) & (table.classes() == 0) for kind, table in tables.items()}
        far = {kind: outliers(table.values, good[kind]) & good[kind] for kind, table in tables.items()}
        stored = {kind: table.state == OK for kind, table in tables.items()}
        dialect = facts.view.dialects.get(layer)
        fused = dialect is not None and dialect.arrangement == "fused"
        self.shared = fused or any(table.shared for table in tables.values())
        self.used = np.logical_or.reduce([self.absent[kind] | stored[kind] for kind in kinds])
        self.bad = {kind: self.absent[kind] | (stored[kind] & ~good[kind]) | far[kind] for kind in kinds}
        self.missing = int(sum(mask.sum() for mask in self.absent.values()))
        self.wrong = int(sum(mask.sum() for mask in self.bad.values()))
        self.healthy = (
            _typical([self.values[kind][good[kind] & ~far[kind]] for kind in self.first]),
            _typical([self.values["down"][good["down"] & ~far["down"]]] if "down" in kinds else []),
        )
        self.classes = sorted(
            {CLASSES[k] for kind in kinds for k in tables[kind].classes()[stored[kind]].tolist() if k}
        )

    def first_missing(self) -> str:
        for kind, mask in self.absent.items():
            for expert in np.flatnonzero(mask).tolist():
                return self._facts.view.slot(self.layer, expert, kind, "input_scale").name
        return ""

    def experts(self) -> tuple[int, ...]:
        """Experts with something wrong."""
        return tuple(np.flatnonzero(np.logical_or.reduce(list(self.bad.values()))).tolist())

    def pair(self, expert: int, fate: float) -> tuple[float, float]:
        """What CUTLASS makes of one expert's slots when the missing ones hold ``fate``."""
        values = [fate if self.absent[kind][expert] else self.values[kind][expert] for kind in self.first]
        down = self.values.get("down")
        second = self.healthy[1] if down is None else fate if self.absent["down"][expert] else down[expert]
        return _torch_max(values), float(second)

    def expected(self, expert: int) -> tuple[float, float]:
        """What the expert's own scales are, or its peers' where they are bad."""
        own = [self.values[kind][expert] for kind in self.first if not self.bad[kind][expert]]
        down = "down" in self.bad and not self.bad["down"][expert]
        return (max(own) if own else self.healthy[0]), float(self.values["down"][expert] if down else self.healthy[1])


def _typical(values: list[Any]) -> float:
    found = np.concatenate(values) if values else np.zeros(0)
    return float(median_of(found)) if found.size else 1e-3


def _torch_max(values: Iterable[float]) -> float:
    """NaN propagates, as in ``torch.max``."""
    return float(np.max(np.array(list(values), np.float64)))


def _per_expert(scales: _LayerScales, layer: int) -> Iterable[_Effect]:
    """Each expert lives by its own scales, or all by the one that the file has for them."""
    missing, stored = [], []
    scope = "layer" if scales.shared else "experts"
    for expert in scales.experts():
        absent = any(mask[expert] for mask in scales.absent.values())
        fates = FATES if absent else (0.0,)
        outcomes: set[str] = set()
        for fate in fates:
            outcome, possible = outcome_of_scales(*scales.pair(expert, fate), scales.expected(expert))
            outcomes |= {outcome, *possible}
        if absent:
            missing.append((expert, outcomes))
        elif outcomes != {"safe"}:
            outcome, possible = outcome_of_scales(*scales.pair(expert, 0.0), scales.expected(expert))
            stored.append((expert, outcome, possible))
    if missing:
        possible = tuple(sorted(set().union(*(outcomes for _, outcomes in missing))))
        ids = tuple(expert for expert, _ in missing)
        fill = {"experts": id_list(ids), "layer": layer, "slots": scales.missing}
        yield _Effect("undefined", possible, scope, {layer}, "why.expert-missing", fill)
    for outcome in ("nan", "zero", "degraded"):
        ids = tuple(expert for expert, kind, _ in stored if kind == outcome)
        if ids:
            possible = tuple(sorted({one for _, kind, some in stored if kind == outcome for one in some}))
            fill = {"experts": id_list(ids), "layer": layer, "slots": len(ids), "classes": ", ".join(scales.classes)}
            yield _Effect(outcome, possible, scope, {layer}, f"why.expert-{outcome}", fill)
    if not missing and not stored:
        yield _Effect("safe", (), "none", {layer}, "why.masked", {"slots": scales.wrong})


def _one_maximum(scales: _LayerScales, layer: int, family: Family) -> _Effect:
    """All experts of a layer live by one maximum a GEMM."""
    kinds = [*scales.first, "down"] if family.reads_down and "down" in scales.values else scales.first
    missing = bool(any(scales.absent[kind].any() for kind in kinds))
    outcomes: set[str] = set()
    outcome = "safe"
    for fate in FATES if missing else (0.0,):
        pair = []
        for group, good in ((scales.first, scales.healthy[0]), (["down"], scales.healthy[1])):
            if not set(group) <= set(kinds):
                pair.append(good)
                continue
            values = [np.where(scales.absent[kind], fate, scales.values[kind])[scales.used] for kind in group]
            pair.append(_torch_max(np.concatenate(values)))
        outcome, possible = outcome_of_scales(pair[0], pair[1], _layer_maxima(scales, kinds))
        outcomes |= {outcome, *possible}
    fill = {"layer": layer, "slots": scales.wrong, "classes": ", ".join(scales.classes)}
    # A stored NaN wins every maximum: then it does not matter what the open slots hold.
    if missing and len(outcomes) > 1:
        return _Effect("undefined", tuple(sorted(outcomes)), "layer", {layer}, "why.layer-missing", fill)
    if outcome == "safe":
        read = any(scales.bad[kind].any() for kind in kinds)
        text = "why.masked" if read else "why.ignored"
        return _Effect("safe" if read else "ignored", (), "none", {layer}, text, fill)
    return _Effect(
        outcome, tuple(sorted(outcomes - {outcome} and outcomes)), "layer", {layer}, f"why.layer-{outcome}", fill
    )


def _layer_maxima(scales: _LayerScales, kinds: list[str]) -> tuple[float, float]:
    """The maxima that a layer would have without its bad values."""
    out = []
    for group, typical in ((scales.first, scales.healthy[0]), (["down"], scales.healthy[1])):
        values = [scales.values[kind][~scales.bad[kind] & scales.used] for kind in group if kind in kinds]
        found = np.concatenate(values) if values else np.zeros(0)
        found = found[np.isfinite(found)]
        out.append(float(found.max()) if found.size else typical)
    return out[0], out[1]


# Which of two scales is the right one, a file does not say; and a scale that is far off may be meant.  Where the
# difference is large the products may also overflow or vanish.
MILD, WILD, HARSH = ("degraded", "safe"), ("degraded", "nan", "safe", "zero"), 7.0


class _LayerWeights:
    """One layer's second-level weight scales: their classes, and which pairs differ."""

    def __init__(self, facts: Facts, layer: int) -> None:
        self.layer = layer
        tables = {kind: facts.tables["weight_scale_2", layer, kind] for kind in facts.view.projections}
        self.classes = {kind: table.classes() for kind, table in tables.items()}
        self.mismatched, self.ratios = mismatched_pairs(facts, layer)
        # Values far from their peers; where the whole layer is the other way up, that is said already.
        upright = not any(has_wrong_convention(table) for table in tables.values())
        self.far = {
            kind: outliers(table.values, table.good()) if upright else np.zeros(len(table.values), np.bool_)
            for kind, table in tables.items()
        }
        masks = [self.mismatched, *self.far.values(), *self.classes.values()]
        self.wrong = any(bool(mask.any()) for mask in masks)


def _weights(family: Family, weights: _LayerWeights) -> Iterable[_Effect]:
    """What second-level weight scales do: on every backend, for gate and down; for up where it has its own."""
    layer = weights.layer
    effects: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for kind, found in weights.classes.items():
        follows_gate = kind == "up" and family.gate_rules and "gate" in weights.classes
        for expert in np.flatnonzero(found).tolist():
            name = CLASSES[int(found[expert])]
            effect = ("degraded", MILD) if follows_gate else _weight_outcome(family, kind, name)
            effects.setdefault(effect, []).append(expert)
    for (outcome, possible), experts in effects.items():
        fill = {"experts": id_list(tuple(sorted(set(experts)))), "layer": layer, "slots": len(experts)}
        yield _Effect(outcome, possible, "experts", {layer}, f"why.weight-{outcome}", fill)
    if family.gate_rules and weights.mismatched.any():
        ids = tuple(np.flatnonzero(weights.mismatched).tolist())
        fill = {"experts": id_list(ids), "layer": layer, "slots": len(ids)}
        text = "why.pair.maximum" if family.engine == "tensorrt-llm" else "why.pair"
        off = np.abs(np.log2(weights.ratios[list(ids)])).max()
        yield _Effect("degraded", MILD if off < HARSH else WILD, "experts", {layer}, text, fill)
    for kind, far in weights.far.items():
        told = weights.mismatched if family.gate_rules and kind in ("gate", "up") and weights.mismatched.size else False
        ids = tuple(np.flatnonzero(far & ~np.asarray(told)).tolist())
        if ids:
            fill = {"experts": id_list(ids), "layer": layer, "projection": kind, "slots": len(ids)}
            yield _Effect("degraded", WILD, "experts", {layer}, "why.weight-outlier", fill)


def _weight_outcome(family: Family, kind: str, name: str) -> tuple[str, tuple[str, ...]]:
    """What a bad second-level weight scale does where it is read."""
    if name in ("zero", "subnormal"):
        return "zero", ()
    if name == "negative":
        return "degraded", ()
    # Infinite products of the first GEMM are quantised again for the second: blocks saturate, codes end at ±6, and
    # finite garbage may come out.
    saturates = name == "inf" and kind != "down" and family.reach != "none"
    return "nan", ("degraded", "nan") if saturates else ()
