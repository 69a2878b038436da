"""How far one slot's value reaches: the same layer converted for every backend, before and after."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from nvfp4viz.serving.backends import BACKENDS
from nvfp4viz.serving.loader import SHARDS, LayerParameters
from nvfp4viz.serving.scales import ConvertedScales, process_weights_after_loading

F32 = npt.NDArray[np.float32]
BOOL = npt.NDArray[np.bool_]
W4A4_BACKENDS = tuple(info.id for info in BACKENDS.values() if "W4A4" in info.schemes)


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """One backend's scales of the product that the slot belongs to; E experts.

    Attributes
    ----------
    backend
    product
        ``"w13"`` or ``"w2"``.
    before, after : (E,) float32 or None
        The input scale as the backend reads it; None where it reads none.
    gscale : (E,) float32 or None
        Encode scale ``1 / after``.
    alpha : (E,) float32
        What the product is multiplied by.
    changed : (E,) bool
        Experts for which a bit of input scale or alpha differs from before.
    """

    backend: str
    product: str
    before: F32 | None = field(repr=False)
    after: F32 | None = field(repr=False)
    gscale: F32 | None = field(repr=False)
    alpha: F32 = field(repr=False)
    changed: BOOL = field(repr=False)

    @property
    def reached(self) -> int:
        """How many experts compute with another scale than before."""
        return int(self.changed.sum())


def spread_value(parameters: LayerParameters, projection: str, expert: int, value: float) -> tuple[Spread, ...]:
    """Put one value into one input-scale slot and convert the layer for every backend that serves NVFP4.

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
    found = []
    for backend in W4A4_BACKENDS:
        before = _of(process_weights_after_loading(parameters, backend), name)
        after = _of(process_weights_after_loading(changed, backend), name)
        differs = _differs(before[2], after[2])
        if before[0] is not None and after[0] is not None:
            differs |= _differs(before[0], after[0])
        found.append(Spread(backend, name, before[0], after[0], after[1], after[2], differs))
    return tuple(found)


def _of(scales: ConvertedScales, product: str) -> tuple[F32 | None, F32 | None, F32]:
    if product == "w13":
        return scales.a13, scales.a1_gscale, scales.g1_alphas
    return scales.a2, scales.a2_gscale, scales.g2_alphas


def _differs(a: F32, b: F32) -> BOOL:
    return np.ascontiguousarray(a).view(np.uint32) != np.ascontiguousarray(b).view(np.uint32)
