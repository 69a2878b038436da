"""What each backend will make of a checkpoint, from the rules of the servers' loaders.

A backend is described by how far one activation scale reaches (`nvfp4viz.audit.backends.FAMILIES`): one expert, the
whole layer through a maximum, or nowhere.  What a bad scale then does follows from the two divisions and two products
that vLLM performs without a check (`outcome_of_scales`).  A slot that no tensor fills holds what the memory held
before; for it several fates are tried and all possible outcomes are listed.  `tests/audit/test_forecast.py` compares
the forecasts with running the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from nvfp4viz.audit.backends import FADES_ABOVE, FAMILIES, Family
from nvfp4viz.audit.facts import Facts
from nvfp4viz.audit.findings import safe_words
from nvfp4viz.audit.forecast_files import of_alignment, of_bytes, of_files, of_functions, of_structure, of_width
from nvfp4viz.audit.forecast_linears import of_linears
from nvfp4viz.audit.forecast_lost import lost_shards, of_lost
from nvfp4viz.audit.forecast_scales import (
    MILD,
    OUTCOMES,
    STATIC_INPUT,
    WILD,
    Effect,
    LayerScales,
    of_activations,
    of_static_inputs,
)
from nvfp4viz.audit.forecast_weights import LayerWeights, of_folded, of_weights
from nvfp4viz.audit.report import BackendForecast, Finding
from nvfp4viz.audit.texts import id_list, words
from nvfp4viz.checkpoint import printable

SCOPES = ("none", "experts", "layer", "model")


def forecast(
    facts: Facts,
    findings: Iterable[Finding],
    *,
    promoted: bool,
    weight_only: bool,
    refused: str | None = None,
    block: str | None = None,
    ep: int | None = None,
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
    block
        ``"NVFP4"`` or ``"MXFP4"``, where no layer's experts are stored and only the configuration says what they are.
    ep
        Expert-parallel ranks; None where nobody asked.
    """
    found = list(findings)
    # What is wrong is the same for all thirteen backends; only what they make of it differs.
    parts = [(part, layer) for part in (facts, *facts.towers) for layer in part.layers]
    filled = {
        (item.tower or "", item.layer) for item in found if item.code == "scale.filled" and item.layer is not None
    }
    scales = [
        each for each in (LayerScales(part, at, filled=(part.tower, at) in filled) for part, at in parts)
        if each.wrong or each.filled
    ]  # fmt: skip
    # Layers that are weight-only beside others that are not; a draft layer is served apart.
    bare = set() if weight_only else weight_only_layers(facts)
    scales = [each for each in scales if each.tower or each.layer not in bare]
    by_block = {block: [each for each in scales if each.block == block] for block in ("NVFP4", "MXFP4")}
    blocks = {block} if block else {facts.block(layer) for layer in facts.view.moe_layers}
    only_mxfp4 = "NVFP4" not in blocks
    weights = [each for each in (LayerWeights(part, layer) for part, layer in parts) if each.wrong]

    causes: Causes = {}
    for item in found:
        # The one finding about all layers is that none has an activation scale.
        counts = item.severity != "info" or item.text in ("scale.identity", "scale.identity.weight")
        if counts and item.role and (item.layer is not None or item.code == "scheme.mislabelled"):
            causes.setdefault((item.tower or "", item.role, item.layer), []).append((_named(item), item.projection))
    lost = lost_shards(facts, found)
    for shard in lost.values():
        for layer in shard.layers.get("experts", ()):
            causes.setdefault(("", "input_scale", layer), []).append(("container.missing-shard", None))
    config = facts.checkpoint.config or {}

    def of_backend(name: str, family: Family) -> BackendForecast:
        as_w4a16 = weight_only or (promoted and family.engine == "vllm")
        effects = [
            *_each(found, lambda items: of_files(family, items)),
            *_each(found, lambda items: of_lost(family, items, lost, weight_only=as_w4a16)),
            *_each(found, lambda items: of_structure(family, items, facts)),
            *_each(found, lambda items: of_bytes(name, family, items)),
        ]
        if refused is not None and family.engine == "vllm":
            fill = {"algo": printable(refused, 60)}
            effects.append(Effect("unsupported", (), "model", set(facts.layers), "why.unsupported.algo", fill))
        if only_mxfp4:
            if not family.mxfp4:
                effects.append(Effect("unsupported", (), "model", set(facts.layers), "why.unsupported.mxfp4"))
        elif as_w4a16 and "W4A16" not in family.schemes:
            # The label is that of the file that the others read; what its own one does to it is said already.
            if not any(effect.fill.get("key") == "quant_algo" for effect in effects):
                text = "why.unsupported" if family.engine == "vllm" else "why.unsupported.elsewhere"
                effects.append(Effect("unsupported", (), "model", set(facts.layers), text))
        elif not as_w4a16:
            if bare and "W4A16" not in family.schemes:
                text = f"why.unsupported.layers{'' if family.engine == 'vllm' else '.elsewhere'}"
                effects.append(Effect("unsupported", (), "layer", bare, text))
            effects += _caused(
                family, causes, "input_scale", by_block["NVFP4"], lambda each: of_activations(family, each)
            )
            effects += _each(found, lambda items: _siblings(family, items))
        if not only_mxfp4:
            effects += of_functions(family, config, facts, ep)
        elif family.mxfp4:
            # Of static FP8 scales of activations.
            effects += _each(found, lambda items: _siblings(family, items))
        effects += _caused(
            family, causes, "input_scale", by_block["MXFP4"], lambda each: of_static_inputs(family, each)
        )
        effects += _caused(family, causes, "weight_scale_2", weights, lambda each: of_weights(family, each))
        effects += _each(found, lambda items: _groups_of_weights(family, items))
        effects += of_folded(name, facts)
        effects += _each(found, lambda items: of_linears(family, items, weight_only=as_w4a16))
        # What else is known of this file says more than that it is narrow.
        effects += [*_each(found, lambda items: of_alignment(name, items, facts)), *of_width(name, facts)]
        return _forecast(
            facts, name, _merged(effects, _why_safe(facts, only_mxfp4, as_w4a16), vllm=family.engine == "vllm")
        )

    return tuple(of_backend(name, family) for name, family in FAMILIES.items())


Layered = TypeVar("Layered", LayerScales, LayerWeights)
Causes = dict[tuple[str, str, int | None], list[tuple[str, str | None]]]
"""By tower, role and layer: findings by name, and the projection of each."""


def _caused(
    family: Family,
    causes: Causes,
    role: str,
    layers: Iterable[Layered],
    of: Callable[[Layered], Iterable[Effect]],
) -> Iterator[Effect]:
    """Effects of layers' scales, with the findings about these."""
    for each in layers:
        known = causes.get((each.tower, role, each.layer)) or causes.get((each.tower, role, None), [])
        read = [name for name, kind in known if _is_read(family, role, name, kind)]
        for effect in of(each):
            # A number that was never set is of no class, and does nothing beside one that is.
            plain = not effect.fill.get("classes")
            effect.causes = tuple(name for name in read if plain or not name.startswith("scale.identity"))
            yield _of_tower(effect, each.tower)


def _is_read(family: Family, role: str, name: str, projection: str | None) -> bool:
    """Does a backend suffer at all from what a finding is about?"""
    if role == "input_scale":
        return projection != "down" or family.reads_down
    return family.gate_rules or not name.startswith("scale.pair-mismatch")


def _of_tower(effect: Effect, tower: str | None) -> Effect:
    """An effect in another tower is in no layer of the model's."""
    if tower:
        effect.fill = {"layers": id_list(tuple(sorted(effect.layers))), **effect.fill, "tower": printable(tower, 200)}
        effect.layers = set()
    return effect


# What is said of activation scales of which whole layers or groups lie far from others.
_APART = {
    "scale.outlier.layer": "why.layer-apart", "scale.outlier.layer.far": "why.layer-far",
    "scale.outlier.layers": "why.layers-far", "scale.outlier.file": "why.file-far",
    "scale.outlier.groups": "why.groups",
}  # fmt: skip
# Notes, of which nobody says that something is wrong.
_NOTES = ("scale.identity.layer", "scale.identity.model", "scale.convention.inputs", "scale.convention.layers")


def _siblings(family: Family, findings: list[Finding]) -> Iterator[Effect]:
    """Gate and up that disagree about their common input, layers that stand apart or were not set: all may be right."""
    for item in findings:
        text = item.text.removesuffix(".divisor")
        if item.role != "input_scale" or text not in (*_APART, *_NOTES, "scale.outlier.sibling"):
            continue
        layers = set(item.params["numbers"]) if item.layer is None else {item.layer}
        if family.reach == "none" or (not family.reads_down and item.params.get("kinds") == "down"):
            if text not in _NOTES:
                yield Effect("ignored", (), "none", layers, "why.ignored", {"slots": item.count})
        elif text == "scale.outlier.sibling":
            fill = {"layer": item.layer, "larger": item.params["larger"], "slots": item.count}
            # Where they lie so far apart, the larger leaves nothing of what belongs to the smaller.
            possible = MILD if item.params["widest"] < FADES_ABOVE else ("degraded", "safe", "zero")
            yield Effect("degraded", possible, "layer", layers, "why.sibling", fill)
        elif text in _APART:
            # By one maximum the larger of two groups decides for all.
            scope = "experts" if text == "scale.outlier.groups" and family.reach == "expert" else "layer"
            fill = {"layer": item.layer, "ratio": item.params.get("ratio", ""), "slots": item.count}
            yield Effect("degraded", WILD, scope, layers, _APART[text], fill)
        elif item.code == "scale.convention":
            # Which of the two it is the file does not say.
            why = "why.inputs-large" if text == "scale.convention.inputs" else "why.inputs-mirrored"
            yield Effect("safe", ("degraded", "safe", "zero"), "none", layers, why, dict(item.params))
        else:
            why = f"why.never-set{'.model' if item.layer is None else ''}"
            yield Effect("safe", MILD, "none", layers, why, dict(item.params))


def _groups_of_weights(family: Family, findings: list[Finding]) -> Iterator[Effect]:
    """Second-level weight scales apart by groups or layers; up's alone is not read where gate's stands for both."""
    for item in findings:
        if item.text.startswith("scale.outlier.layers") and item.role == "weight_scale_2":
            layers = set(item.params["numbers"])
            fill = {"ratio": item.params["ratio"], "slots": item.count}
            yield Effect("degraded", WILD, "layer", layers, "why.layers-far.weight", fill)
        if item.text.startswith("scale.outlier.layer.weight") and (
            item.params["kinds"] != "up" or not family.gate_rules
        ):
            fill = {"layer": item.layer, "ratio": item.params["ratio"], "slots": item.count}
            yield Effect("degraded", WILD, "layer", {item.layer or 0}, "why.layer-far.weight", fill)
        if item.text != "scale.outlier.groups" or item.role != "weight_scale_2":
            continue
        if item.params["kinds"] != "up" or not family.gate_rules:
            fill = {"layer": item.layer, "ratio": item.params["ratio"], "slots": item.count}
            yield Effect("degraded", WILD, "experts", {item.layer or 0}, "why.groups.weight", fill)


def _each(findings: Iterable[Finding], of: Callable[[list[Finding]], Iterable[Effect]]) -> Iterator[Effect]:
    """Effects of one finding after the other, which is their cause."""
    for item in findings:
        for effect in of([item]):
            effect.causes = (_named(item),)
            yield _of_tower(effect, item.tower)


def _named(item: Finding) -> str:
    """A finding in two words: its code, and of a scale which."""
    return f"{item.code} ({item.role})" if item.code.startswith("scale.") and item.role else item.code


def weight_only_layers(facts: Facts) -> set[int]:
    """The model's own layers whose experts the configuration calls weight-only."""
    return {
        layer for layer in facts.view.moe_layers
        if facts.block(layer) == "NVFP4" and (facts.labels.get(layer) or "").startswith("W4A16")
    }  # fmt: skip


def _why_safe(facts: Facts, only_mxfp4: bool, as_w4a16: bool) -> str:
    """What there is to say where nothing is wrong."""
    if only_mxfp4:
        # Some have stored activation scales of FP8 too.
        static = any("input_scale" in facts.needs[layer] for layer in facts.layers)
        return "why.safe" if static else "why.safe.mxfp4"
    if as_w4a16:
        return "why.safe.weight-only"
    guessed = any((own := facts.view.dialects[at]) and not own.names_activations for at in facts.layers)
    return "why.safe.guessed" if guessed and not facts.view.activation_blocks else "why.safe"


# Loads that stop at a tensor; vLLM refuses a choice of backend while it builds the model.
_OF_WEIGHTS = ("why.layout", "why.key-error", "why.sentinel", "why.left-alone", "why.unlisted")


def _merged(effects: list[Effect], safe: str, *, vllm: bool) -> Effect:
    """The worst effect speaks for all; equal ones in other layers add their slots, and each what it may end in.

    What else is wrong is named by its findings.
    """
    if not effects:
        return Effect("safe", (), "none", set(), safe)
    refused = {effect.text for effect in effects if effect.outcome == "unsupported"}
    if refused:
        # Nobody gets as far as a load that may stop, nor with vLLM to the weights; rows are refused behind these.
        built = not vllm or refused == {"why.alignment"}
        effects = [
            effect for effect in effects
            if effect.outcome != "load-error" or not (effect.possible or (effect.text in _OF_WEIGHTS and not built))
        ]  # fmt: skip
    effects.sort(key=_rank)
    first = effects[0]
    tower = first.fill.get("tower")
    same = [
        effect for effect in effects
        if effect.text == first.text and effect.fill.get("tower") == tower
        and (effect.outcome == first.outcome or first.text == STATIC_INPUT)
    ]  # fmt: skip
    # That sentence says nothing of an outcome: it counts all layers' slots, and begins with the first of them.
    told = first if first.text != STATIC_INPUT else min(same, key=lambda effect: min(effect.layers))
    said = {cause for effect in same for cause in _told(effect)}
    others = [effect for effect in effects if effect.outcome not in ("ignored", "safe")]
    # Where it is not served at all nothing else matters.
    left = [] if first.outcome == "unsupported" else [cause for each in others for cause in each.causes]
    besides = [cause for cause in dict.fromkeys(left) if cause not in said]
    alike = len({effect.fill.get("layer") for effect in same}) - 1
    return Effect(
        first.outcome,
        _possible(first.outcome, effects),
        # As wide as all that is wrong, like the layers.
        max((effect.scope for effect in others), key=SCOPES.index, default=first.scope),
        {layer for effect in others for layer in effect.layers},
        first.text,
        {
            **told.fill,
            "slots": sum(effect.fill.get("slots", 0) for effect in same),
            **({"alike": alike} if alike else {}),
            **({"besides": besides} if besides else {}),
        },
    )


_ABSENT = ("scale.missing", "expert.rank-hole", "scheme.mislabelled", "container.missing-shard")
_ODD = ("scale.outlier", "scale.filled", "scale.identity")
# Which findings of a role's in a layer a sentence tells of; the others stand beside it.
_TELLS = {
    "why.expert-missing": _ABSENT, "why.key-error": _ABSENT, "why.weight-nan": ("scale.nan", "scale.inf"),
    "why.weight-zero": ("scale.zero", "scale.subnormal"), "why.weight-degraded": ("scale.negative",),
    "why.weight-outlier": _ODD, "why.undecided": _ODD, "why.convention": ("scale.convention",),
    "why.pair": ("scale.pair-mismatch",), "why.pair.maximum": ("scale.pair-mismatch",),
}  # fmt: skip


def _told(effect: Effect) -> set[str]:
    """Those of its causes of which an effect's own sentence tells: all, where it names none of them apart."""
    codes = {cause: cause.partition(" (")[0] for cause in effect.causes}
    known: tuple[str, ...] = _TELLS.get(effect.text, ())
    if not known and effect.text.startswith("why.expert-"):
        classes = str(effect.fill.get("classes", ""))
        known = tuple(f"scale.{name}" for name in classes.split(", ")) if classes else _ODD
    elif effect.text in ("why.layer-nan", "why.layer-zero", "why.layer-degraded", "why.layer-negative"):
        known = tuple(code for code in codes.values() if code not in _ABSENT)
    return {cause for cause, code in codes.items() if code in known} or set(codes)


def _rank(effect: Effect) -> tuple[object, ...]:
    """Worst first; of two alike the certain one, the wider one, and the model's own before another tower's.

    Of two that are safe the one that may not be has more to say.
    """
    worst, wide = OUTCOMES.index(effect.outcome), SCOPES.index(effect.scope)
    return worst, bool(effect.possible) == (effect.outcome != "safe"), -wide, "tower" in effect.fill


def _possible(outcome: str, effects: list[Effect]) -> tuple[str, ...]:
    """All that effects together may end in: one outcome of each, and the worst of those; none where it is certain."""
    ends = [
        set(effect.possible or (effect.outcome,)) for effect in effects if effect.outcome not in ("ignored", "safe")
    ]
    if not ends:
        # Safe, as far as anybody has read.
        return next((effect.possible for effect in effects if effect.outcome == "safe" and effect.possible), ())
    # Better than the best of any one effect it cannot become.
    best = min(max(map(OUTCOMES.index, each)) for each in ends)
    # What may be wrong beside it counts too; that a load may stop or be refused says nothing of what is computed.
    perhaps = {end for effect in effects if effect.outcome == "safe" for end in effect.possible}
    perhaps -= {"load-error", "unsupported"}
    found = {end for end in set().union(*ends, perhaps) if OUTCOMES.index(end) <= best}
    return () if found == {outcome} else tuple(sorted(found))


def _forecast(facts: Facts, name: str, effect: Effect) -> BackendForecast:
    fill = {"backend": name, "layers": id_list(tuple(sorted(effect.layers))), **safe_words(effect.fill)}
    if effect.layers and effect.layers <= set(facts.view.draft_layers):
        fill["draft"] = True
    why, _ = words(effect.text, fill)
    scope = "none" if effect.outcome in ("safe", "ignored") else effect.scope
    layers = () if scope == "none" else tuple(sorted(effect.layers))
    return BackendForecast(name, effect.outcome, effect.possible, scope, layers, why, effect.text, fill)
