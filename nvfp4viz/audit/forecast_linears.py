"""What the scales of ordinary layers and of the KV cache do on a backend: every token passes them.

As in `nvfp4viz.audit.forecast_scales`, with the outcome of each value (`outcome_of_scales`, `weight_outcome`); modules
that a server fuses share one maximum, which may pass a bad value by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from nvfp4viz.audit.backends import FATES, Family, outcome_of_scales
from nvfp4viz.audit.forecast_scales import HARSH, MILD, WILD, Effect
from nvfp4viz.audit.forecast_weights import weight_outcome
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.siblings import FAR

# One number of each class, where a healthy scale is 1e-3.
_OF_CLASS = {"zero": 0.0, "nan": math.nan, "inf": math.inf, "negative": -1e-3, "subnormal": 1e-40}
_HEALTHY = 1e-3
_Outcome = tuple[str, tuple[str, ...]]


def of_linears(family: Family, findings: Iterable[Finding], *, weight_only: bool) -> Iterable[Effect]:
    """What bad scales of ordinary layers do, and missing activation scales; `forecast` knows of missing weights.

    Parameters
    ----------
    weight_only
        The server takes the checkpoint for weight-only and reads no activation scale of a four-bit layer.
    """
    for item in findings:
        if item.text.startswith("scale.value.linear"):
            if item.role == "input_scale":
                yield _activation(family, item, weight_only)
            else:
                yield _effect(item, _weight(family, item), "weight")
        elif item.text.startswith("scale.outlier.sibling.linear"):
            # Transformers fuses nothing, and a weight-only kernel reads none of a four-bit module.
            if family.engine == "tensorrt-llm" and not item.params["fp8"] and not weight_only:
                yield _unequal(item)
            elif not _ignores(family, item, weight_only):
                fill = _fill(item) | {"larger": item.params["larger"], "family": item.params["family"]}
                possible = _perhaps("degraded", MILD, _may_ignore(family, item, weight_only))
                yield Effect("degraded", possible, _scope(item), _layers(item), "why.sibling.linear", fill)
        elif item.text == "scale.outlier.linear":
            yield _far(family, item, weight_only)
        elif item.text == "scale.outlier.linear.weight":
            possible = MILD if max(map(abs, np.log2(item.params["ratios"]))) < HARSH else WILD
            fill = _fill(item) | {"ratio": item.params["ratio"], "tensor": item.params["tensor"]}
            yield Effect("degraded", possible, _scope(item), _layers(item), "why.namesakes.weight", fill)
        elif item.text == "scale.pair-mismatch.linear":
            # Transformers fuses nothing; vLLM and SGLang multiply with the largest, weight-only or not.
            if family.engine == "tensorrt-llm":
                yield _unequal(item)
            elif family.engine != "transformers":
                possible = MILD if abs(np.log2(float(item.value))) < HARSH else WILD
                fill = _fill(item) | {"family": item.params["family"], "ratio": item.params["ratio"]}
                yield Effect("degraded", possible, _scope(item), _layers(item), "why.pair.linear", fill)
            elif abs(np.log2(float(item.value))) > FAR:
                # What no two weights differ by is wrong in one of them, fused or not.
                fill = _fill(item) | {"family": item.params["family"], "ratio": item.params["ratio"]}
                yield Effect("degraded", WILD, _scope(item), _layers(item), "why.pair.linear.alone", fill)
        elif item.text == "scale.filled.linear.float-max":
            yield _boundless(family, item, weight_only)
        elif item.text == "scale.identity.linear.weight":
            yield Effect("degraded", WILD, _scope(item), _layers(item), "why.weight-unset.linear", _fill(item))
        elif item.text == "scale.identity.linear":
            if family.engine == "tensorrt-llm" and item.params["family"] and not weight_only:
                yield _unequal(item)
            elif not _ignores(family, item, weight_only):
                # It may be meant.
                fill = _fill(item) | {"over": item.params["over"]}
                yield Effect("safe", MILD, "none", _layers(item), "why.never-set.linear", fill)
        elif item.text == "scale.missing.linear":
            yield _missing(family, item, weight_only)
        elif item.text in ("scale.missing.linear.fp8", "scale.missing.experts.fp8"):
            yield _missing_in_fp8(family, item)
        elif item.text.startswith("scale.value.fp8"):
            yield _number_of_fp8(family, item)
        elif item.code in ("kv.zero", "kv.invalid") and "kind" in item.params:
            yield _of_cache(item)
        elif item.code == "kv.invalid":
            # No number, and so of another shape than the parameter that it is copied into.
            yield Effect("load-error", (), "model", _layers(item), "why.layout", _fill(item))


def _unequal(item: Finding) -> Effect:
    """TensorRT-LLM asserts that modules in NVFP4 that it fuses share one scale (``modules/linear.py``, 00bbf71).

    Another version may take the largest, and a model's code may fuse nothing.
    """
    fill = _fill(item) | {"family": item.params["family"]}
    return Effect("load-error", ("degraded", "load-error", "safe"), "model", _layers(item), "why.unequal.linear", fill)


def _weight(family: Family, item: Finding) -> _Outcome:
    # Transformers fuses nothing.
    projections = item.params["open"] or ([""] if family.engine == "transformers" else [])
    # Only between gate, up and down is something quantised again; elsewhere an infinity goes on, as after down.
    found = [weight_outcome(family, projection or "down", item.params["kind"]) for projection in projections]
    if not found:
        # Fused siblings hide it everywhere: their scale is taken, and it may be the right one.
        return "degraded", MILD
    # A class has one outcome, of which some projections are less certain.
    return found[0][0], () if any(not possible for _, possible in found) else found[0][1]


def _activation(family: Family, item: Finding, weight_only: bool) -> Effect:
    if _ignores(family, item, weight_only):
        return _ignored(item)
    if not item.params["open"]:
        # Siblings have the same input, and so the same scale.
        return Effect("safe", (), "none", _layers(item), "why.linear-masked", _fill(item))
    outcome, possible = outcome_of_scales(_OF_CLASS[item.params["kind"]], _HEALTHY)
    if item.params["kind"] == "negative":
        # Where the hardware keeps a block scale's sign both turn (4.5).
        possible = tuple(sorted({*MILD, *possible}))
    return _input(family, item, (outcome, possible), weight_only)


def _boundless(family: Family, item: Finding, weight_only: bool) -> Effect:
    """A scale that an infinite maximum left: the largest of all, which no fused sibling hides."""
    if _ignores(family, item, weight_only):
        return _ignored(item)
    largest = float(np.finfo(np.float32).max) / item.params["over"]
    return _input(family, item, outcome_of_scales(largest, _HEALTHY), weight_only)


def _far(family: Family, item: Finding, weight_only: bool) -> Effect:
    """One that no module of its name comes near (`nvfp4viz.audit.namesakes`); it may be right."""
    if _ignores(family, item, weight_only):
        return _ignored(item)
    ends = set(MILD)
    for ratio in item.params["ratios"]:
        outcome, possible = outcome_of_scales(_HEALTHY * ratio, _HEALTHY)
        ends |= {outcome, *possible}
    apart = _may_ignore(family, item, weight_only)
    fill = _fill(item) | {"ratio": item.params["ratio"], "tensor": item.params["tensor"]}
    text = f"why.namesakes{'.apart' if apart else ''}"
    return Effect("degraded", _perhaps("degraded", tuple(sorted(ends)), apart), _scope(item), _layers(item), text, fill)


def _missing(family: Family, item: Finding, weight_only: bool) -> Effect:
    if _ignores(family, item, weight_only):
        return _ignored(item)
    if family.engine == "tensorrt-llm":
        return Effect("load-error", (), "model", _layers(item), "why.key-error", _fill(item))
    outcomes: set[str] = set()
    for fate in FATES:
        outcome, possible = outcome_of_scales(fate, _HEALTHY)
        outcomes |= {outcome, *possible}
    return _input(family, item, ("undefined", tuple(sorted(outcomes))), weight_only)


def _number_of_fp8(family: Family, item: Finding) -> Effect:
    """What unusable numbers among FP8's scales do (``--deep``): a row, a block or a whole expert of them."""
    kind, inputs = item.params["kind"], item.role == "input_scale"
    if inputs and family.engine == "transformers":
        return _ignored(item)
    outcome, possible = weight_outcome(family, item.projection or "down", kind)
    if kind not in ("nan", "inf") and (inputs or ".some" in item.text):
        # Of activations the largest of a layer is taken; of weights the others are as they should be.
        outcome, possible = "degraded", MILD
    if item.projection is None:
        # Every token passes an ordinary layer.
        return Effect(outcome, possible, "model", set(), "why.fp8-value", _fill(item))
    scope = "layer" if item.experts is None or inputs else "experts"
    return Effect(outcome, possible, scope, _layers(item), "why.fp8-value", _fill(item))


def _missing_in_fp8(family: Family, item: Finding) -> Effect:
    """What stands in for a stored activation scale of FP8 (`nvfp4viz.audit.fp8_inputs`): known of vLLM alone."""
    if family.engine == "transformers":
        return _ignored(item)
    if family.engine != "vllm":
        possible = ("degraded", "load-error", "safe", "zero")
        return Effect("undefined", possible, _scope(item), _layers(item), "why.fp8-input.unread", _fill(item))
    if item.text == "scale.missing.experts.fp8":
        return Effect("degraded", MILD, "layer", _layers(item), "why.fp8-input.experts", _fill(item))
    if not item.params["open"]:
        return Effect("safe", (), "none", _layers(item), "why.linear-masked", _fill(item))
    # Which kernel an FP8 layer gets is another matter than that of the experts; some are weight-only.
    return Effect("zero", ("ignored", "zero"), _scope(item), _layers(item), "why.fp8-input", _fill(item))


def _of_cache(item: Finding) -> Effect:
    """Keys or values are divided by the scale on the way into the cache and multiplied on the way out.

    vLLM refuses some of these values and takes the other scale, or 1, for others (``kv_cache.py``); a cache in BF16
    has none, and nothing asks for another where the configuration does not.
    """
    outcome, possible = outcome_of_scales(_OF_CLASS[item.params["kind"]], _HEALTHY)
    perhaps = {outcome, *possible, "degraded", "load-error", *(() if item.params["claimed"] else ("safe",))}
    return _effect(item, (outcome, tuple(sorted(perhaps))), "cache")


def _ignores(family: Family, item: Finding, weight_only: bool) -> bool:
    """Is it certain that nobody reads an activation scale?  A weight-only label is one of four-bit modules."""
    return family.engine == "transformers" or (weight_only and not _is_fp8(item))


def _may_ignore(family: Family, item: Finding, weight_only: bool) -> bool:
    """Which kernel an ordinary layer gets is another matter than that of the experts; some are weight-only.

    vLLM chooses among those for NVFP4 by an order of its own (section 5.2 of `serving-vllm.md`), whatever
    ``--moe-backend`` says; a four-bit one that no flag names reads activations wherever experts' do.  How SGLang
    chooses was not read: it is supposed where theirs for the experts is weight-only.
    """
    return family.reach == "none" or (_is_fp8(item) and (weight_only or family.engine == "vllm"))


def _is_fp8(item: Finding) -> bool:
    return bool(item.params.get("fp8")) or ".fp8" in item.text


def _ignored(item: Finding) -> Effect:
    text = f"why.linear-ignored{'.fp8' if _is_fp8(item) else ''}"
    return Effect("ignored", (), "none", _layers(item), text, _fill(item))


def _input(family: Family, item: Finding, result: _Outcome, weight_only: bool) -> Effect:
    """What an activation scale does that some kernel reads; where perhaps none does, the words say so."""
    outcome, possible = result
    apart = _may_ignore(family, item, weight_only)
    text = f"why.linear-{'missing' if outcome == 'undefined' else outcome}{'.apart' if apart else ''}"
    fill = _fill(item) | {"format": "FP8" if _is_fp8(item) else "NVFP4"}
    return Effect(outcome, _perhaps(outcome, possible, apart), _scope(item), _layers(item), text, fill)


def _perhaps(outcome: str, possible: tuple[str, ...], ignored: bool) -> tuple[str, ...]:
    """The outcomes that are possible, with that nobody reads what is wrong."""
    own = () if outcome == "undefined" else (outcome,)
    return tuple(sorted({*own, *possible, "ignored"})) if ignored else possible


def _effect(item: Finding, result: _Outcome, cause: str) -> Effect:
    outcome, possible = result
    text = f"why.linear-{cause if cause == 'cache' else outcome}"
    return Effect(outcome, possible, _scope(item), _layers(item), text, _fill(item))


def _scope(item: Finding) -> str:
    return "layer" if _layers(item) else "model"


def _layers(item: Finding) -> set[int]:
    return set(item.params.get("numbers", ())) if item.layer is None else {item.layer}


def _fill(item: Finding) -> dict[str, Any]:
    return {
        "tensor": "".join(item.tensors[:1]), "slots": item.count, "role": item.role or "",
        "kind": item.params.get("kind", item.params.get("stored", "")), "layer": item.layer,
    }  # fmt: skip
