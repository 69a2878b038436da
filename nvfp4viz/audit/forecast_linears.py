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
from nvfp4viz.audit.forecast_scales import HARSH, MILD, WILD, Effect, weight_outcome
from nvfp4viz.audit.report import Finding

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
            elif family.engine != "transformers" and (item.params["fp8"] or not _ignores(family, weight_only)):
                fill = _fill(item) | {"larger": item.params["larger"], "family": item.params["family"]}
                yield Effect("degraded", MILD, _scope(item), _layers(item), "why.sibling.linear", fill)
        elif item.text == "scale.pair-mismatch.linear":
            # Transformers fuses nothing; vLLM and SGLang multiply with the largest, weight-only or not.
            if family.engine == "tensorrt-llm":
                yield _unequal(item)
            elif family.engine != "transformers":
                possible = MILD if abs(np.log2(float(item.value))) < HARSH else WILD
                fill = _fill(item) | {"family": item.params["family"], "ratio": item.params["ratio"]}
                yield Effect("degraded", possible, _scope(item), _layers(item), "why.pair.linear", fill)
        elif item.text == "scale.filled.linear.float-max":
            yield _boundless(family, item, weight_only)
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
    fp8 = item.params["fp8"]
    if _ignores(family, weight_only) and not fp8:
        return _ignored(item)
    if fp8 and family.engine == "transformers":
        return _ignored(item)
    if not item.params["open"]:
        # Siblings have the same input, and so the same scale.
        return Effect("safe", (), "none", _layers(item), "why.linear-masked", _fill(item))
    outcome, possible = outcome_of_scales(_OF_CLASS[item.params["kind"]], _HEALTHY)
    if fp8 and _may_ignore_fp8(family, weight_only):
        possible = tuple(sorted({outcome, *possible, "ignored"}))
    return _effect(item, (outcome, possible), "input")


def _boundless(family: Family, item: Finding, weight_only: bool) -> Effect:
    """A scale that an infinite maximum left: the largest of all, which no fused sibling hides."""
    if family.engine == "transformers" or (_ignores(family, weight_only) and not item.params["fp8"]):
        return _ignored(item)
    outcome, possible = outcome_of_scales(float(np.finfo(np.float32).max) / item.params["over"], _HEALTHY)
    if item.params["fp8"] and _may_ignore_fp8(family, weight_only):
        possible = tuple(sorted({outcome, *possible, "ignored"}))
    return _effect(item, (outcome, possible), "input")


def _missing(family: Family, item: Finding, weight_only: bool) -> Effect:
    if _ignores(family, weight_only):
        return _ignored(item)
    if family.engine == "tensorrt-llm":
        return Effect("load-error", (), "model", _layers(item), "why.key-error", _fill(item))
    outcomes: set[str] = set()
    for fate in FATES:
        outcome, possible = outcome_of_scales(fate, _HEALTHY)
        outcomes |= {outcome, *possible}
    return _effect(item, ("undefined", tuple(sorted(outcomes))), "missing")


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


def _ignores(family: Family, weight_only: bool) -> bool:
    return weight_only or family.reach == "none"


def _may_ignore_fp8(family: Family, weight_only: bool) -> bool:
    """Which kernel an FP8 layer gets is another matter than that of the experts; some are weight-only.

    Read of vLLM; of the others it is supposed where theirs for the experts is.
    """
    return family.engine == "vllm" or _ignores(family, weight_only)


def _ignored(item: Finding) -> Effect:
    fp8 = item.params.get("fp8") or ".fp8" in item.text
    return Effect("ignored", (), "none", _layers(item), f"why.linear-ignored{'.fp8' if fp8 else ''}", _fill(item))


def _effect(item: Finding, result: _Outcome, cause: str) -> Effect:
    outcome, possible = result
    text = f"why.linear-{cause}" if cause in ("missing", "cache") else f"why.linear-{outcome}"
    # An FP8 layer's activation scale that perhaps nobody reads.
    text += ".fp8" if cause == "input" and "ignored" in possible else ""
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
