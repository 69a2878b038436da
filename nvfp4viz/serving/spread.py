"""How far one slot's value reaches: the same layer converted for every backend, before and after."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.serving.loader import SHARDS, LayerParameters
from nvfp4viz.serving.scales import ONE_MAXIMUM, ConvertedScales, process_weights_after_loading

F32 = npt.NDArray[np.float32]
BOOL = npt.NDArray[np.bool_]
Rule = Literal["expert", "layer", "first", "unread", "token", "ones", "dynamic", "open"]


@dataclass(frozen=True, slots=True)
class Reading:
    """A backend with the option that changes what it reads, and its rule for input scales.

    Attributes
    ----------
    backend
        An id of `nvfp4viz.serving.selection.MOE`.
    rule
        ``"expert"``: each expert's own; ``"layer"``: one maximum for each product; ``"first"``: one maximum for the
        first product, the second encodes by 1.0; ``"unread"``: activations stay in BF16, or the backend has a way of
        its own; ``"token"`` and ``"ones"``: filled with 1.0; ``"dynamic"``: quantises dynamically; ``"open"``: it
        needs them, and how it merges them is not among the facts that were read.
    option
        ``""``, ``"per-token"`` (``nvfp4_per_token``) or ``"a16"`` (``VLLM_B12X_MOE_FP4_FORCE_A16``).
    """

    backend: str
    rule: Rule
    option: str = ""

    @property
    def name(self) -> str:
        return f"{self.backend} ({self.option})" if self.option else self.backend


def _layer_rule(backend: str) -> Rule:
    return "first" if backend == "vllm-flashinfer-b12x" else "layer"


READINGS: tuple[Reading, ...] = (
    Reading("vllm-cutlass", "expert"),
    *(Reading(name, _layer_rule(name)) for name in ONE_MAXIMUM),
    Reading("vllm-marlin", "unread"),
    Reading("vllm-humming", "unread"),
    Reading("vllm-flashinfer-moe-ep-cutedsl", "dynamic"),
    Reading("vllm-flashinfer-trtllm", "token", "per-token"),
    Reading("vllm-b12x", "ones", "a16"),
    Reading("vllm-b12x", "open"),
)
"""All backends of NVFP4 experts, and the two options that take the scales away from one."""


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """One reading's scales of the product that the slot belongs to; E experts.

    Attributes
    ----------
    reading
    product
        ``"w13"`` or ``"w2"``.
    before, after : (E,) float32 or None
        The input scale as the backend reads it; None where it reads none.
    gscale : (E,) float32 or None
        Encode scale ``1 / after``.
    alpha : (E,) float32 or None
        What the product is multiplied by; None where it is open.
    scale_c : (E,) float32 or None
        What takes the first product into the second's codes, on FlashInfer's TRTLLM; it has both input scales in it.
    changed : (E,) bool or None
        Experts for which a bit of input scale, alpha or `scale_c` differs from before; None where the rule is open.
    """

    reading: Reading
    product: str
    before: F32 | None = field(repr=False)
    after: F32 | None = field(repr=False)
    gscale: F32 | None = field(repr=False)
    alpha: F32 | None = field(repr=False)
    scale_c: F32 | None = field(repr=False)
    changed: BOOL | None = field(repr=False)

    @property
    def reached(self) -> int | None:
        """How many experts compute with another scale than before; None where the facts do not say."""
        return None if self.changed is None else int(self.changed.sum())


def spread_value(parameters: LayerParameters, projection: str, expert: int, value: float) -> tuple[Spread, ...]:
    """Put one value into one input-scale slot and convert the layer for every reading.

    Parameters
    ----------
    parameters
        A loaded layer; it is not changed.
    projection
        ``"gate"``, ``"up"`` or ``"down"``.
    expert
    value
        Any float32, NaN and infinities too.
    """
    name, shard = SHARDS[projection]
    full = f"{name}_input_scale"
    scales = getattr(parameters, full).copy()
    scales[(expert, shard) if scales.ndim == 2 else expert] = np.float32(value)
    changed = replace(parameters, **{full: scales})
    return tuple(_spread(reading, name, parameters, changed) for reading in READINGS)


def _spread(reading: Reading, product: str, before: LayerParameters, after: LayerParameters) -> Spread:
    if reading.rule == "open":  # `process_weights_after_loading` would refuse it
        return Spread(reading, product, None, None, None, None, None, None)
    options = {"per_token": reading.option == "per-token", "a16": reading.option == "a16"}
    old = _of(process_weights_after_loading(before, reading.backend, **options), product)
    new = _of(process_weights_after_loading(after, reading.backend, **options), product)
    differs = np.zeros(before.experts, np.bool_)
    for a, b in zip(old, new, strict=True):
        if a is not None and b is not None:
            differs |= a.view(np.uint32) != b.view(np.uint32)
    return Spread(reading, product, old[0], *new, differs)


def _of(scales: ConvertedScales, product: str) -> tuple[F32 | None, F32 | None, F32 | None, F32 | None]:
    """Input scale, encode scale, alpha and `scale_c`."""
    if product == "w13":
        found = scales.a13, scales.a1_gscale, scales.g1_alphas, scales.g1_scale_c
    else:
        found = scales.a2, scales.a2_gscale, scales.g2_alphas, scales.g1_scale_c
    # A column of (E, 2) is no array that can be looked at as bits.
    return tuple(None if each is None else np.ascontiguousarray(each) for each in found)
