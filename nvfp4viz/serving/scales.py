"""``process_weights_after_loading``: what each backend makes of the loaded scales.  Source: `serving-vllm.md` 4.4.

Everything here is plain f32 arithmetic without a check, because the servers have none: ``1 / 0`` is Inf, a NaN slot
goes through a maximum as ``torch.max`` lets it, and the alphas are multiplied in place.  Every intermediate is kept.

=====================================  ==========================================  ==============  =================
backend                                input scale of the first GEMM (a13)         of the second   alpha
=====================================  ==========================================  ==============  =================
``vllm-cutlass``                       per expert, max of gate and up              per expert      ``scale_2 * a``
``vllm-flashinfer-cutlass``            one maximum over experts and both shards    one maximum     ``scale_2 * a``
``vllm-flashinfer-trtllm``             as above                                    as above        ``scale_2 * a``
``vllm-flashinfer-cutedsl``            as above                                    as above        ``scale_2 * a``
``vllm-flashinfer-cutedsl-batched``    as above                                    as above        ``scale_2 * a``
``vllm-flashinfer-b12x``               as above                                    encodes by 1.0  open
``vllm-emulation``                     as above, kept as one number                as above        ``scale_2``
``vllm-marlin``                        not read                                    not read        ``scale_2``
``vllm-humming``                       not read                                    not read        open
``vllm-flashinfer-moe-ep-cutedsl``     not read, it quantises dynamically          not read        open
``vllm-b12x`` with A16 forced          ones                                        ones            ``scale_2``
``vllm-b12x`` otherwise                open                                        open            open
=====================================  ==========================================  ==============  =================

"Open" is what the facts that were read do not say; nothing is put in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import ServingError
from nvfp4viz.serving.loader import LayerParameters
from nvfp4viz.serving.selection import MOE

F32 = npt.NDArray[np.float32]

ONE_MAXIMUM = tuple(row.id for row in MOE if row.reach == "layer" and not row.open)
MULTIPLIED = (
    "vllm-cutlass", "vllm-flashinfer-cutlass", "vllm-flashinfer-trtllm", "vllm-flashinfer-cutedsl",
    "vllm-flashinfer-cutedsl-batched",
)  # fmt: skip
"""Their expert classes multiply the input scales into the alphas (4.4, step 5)."""
SCALE_2_ALONE = ("vllm-emulation", "vllm-marlin", "vllm-b12x")
"""Alpha is ``weight_scale_2``: the emulation's activations are decoded again, the others' stay in BF16."""


@dataclass(frozen=True, slots=True)
class ConvertedScales:
    """A layer's second-level scales, from the loaded slots to what the kernels multiply by.

    Attributes
    ----------
    layer, backend
    w13_input_scale, w2_input_scale : (E, 2), (E,) float32
        As loaded (after the per-token override).
    a13, a2 : (E,) float32 or None
        After the backend's maximum; None where the backend does not read them.
    a1_gscale, a2_gscale : (E,) float32 or None
        ``1 / a13`` and ``1 / a2``, the encode scales.
    w13_weight_scale_2, w2_weight_scale_2 : (E,) float32
        What is used for w13 is the gate's column alone.
    g1_alphas, g2_alphas : (E,) float32 or None
        ``weight_scale_2 * a``; where activations are not quantised, `weight_scale_2` itself; None where it is open.
    g1_scale_c : (E,) float32 or None
        ``g1_alphas * a2_gscale``: FlashInfer's TRTLLM takes the first product straight into the second's codes (its
        gated classes; not SiTU).
    mismatched : tuple of int
        Experts whose gate and up `weight_scale_2` differ beyond ``torch.allclose``; up is then mis-scaled by gate/up.
    warnings
        Ids of what the server logs: ``"scale-2-mismatch"`` (once, with no ids), ``"input-scale-not-unique"``.
    """

    layer: int
    backend: str
    w13_input_scale: F32
    w2_input_scale: F32
    a13: F32 | None
    a2: F32 | None
    a1_gscale: F32 | None
    a2_gscale: F32 | None
    w13_weight_scale_2: F32
    w2_weight_scale_2: F32
    g1_alphas: F32 | None
    g2_alphas: F32 | None
    g1_scale_c: F32 | None
    mismatched: tuple[int, ...]
    warnings: tuple[str, ...]


def process_weights_after_loading(
    parameters: LayerParameters, backend: str, *, per_token: bool = False, a16: bool = False
) -> ConvertedScales:
    """Convert a layer's loaded scales for one backend.

    Parameters
    ----------
    parameters
        As `nvfp4viz.serving.loader.load_parameters` left them.
    backend
        An id of `nvfp4viz.serving.selection.MOE`.
    per_token
        ``moe.activation="nvfp4_per_token"``: both input scales are filled with 1.0 first.
    a16
        ``VLLM_B12X_MOE_FP4_FORCE_A16``, which ``vllm-b12x`` alone obeys: ones stand for the input scales.

    Raises
    ------
    ServingError
        ``serving.conversion-unread``: what the backend makes of the scales is not among the facts that were read.
    """
    if backend == "vllm-b12x" and not a16:
        raise ServingError("serving.conversion-unread", backend=backend)
    w13_input, w2_input = parameters.w13_input_scale, parameters.w2_input_scale
    if per_token:
        w13_input, w2_input = np.ones_like(w13_input), np.ones_like(w2_input)
    gate, up = parameters.w13_weight_scale_2[:, 0], parameters.w13_weight_scale_2[:, 1]
    mismatched = tuple(np.flatnonzero(~close(gate, up)).tolist())
    warnings = ["scale-2-mismatch"] if mismatched else []

    a13, a2 = _backend_scales(w13_input, w2_input, backend)
    if backend == "vllm-emulation" and not (_is_unique(w13_input) and _is_unique(w2_input)):
        warnings.append("input-scale-not-unique")
    w2_scale_2 = parameters.w2_weight_scale_2
    with np.errstate(all="ignore"):
        a1_gscale = None if a13 is None else np.float32(1) / a13
        a2_gscale = None if a2 is None else np.float32(1) / a2
        g1_alphas = _alphas(gate, a13, backend)
        g2_alphas = _alphas(w2_scale_2, a2, backend)
        g1_scale_c = None
        if backend == "vllm-flashinfer-trtllm" and g1_alphas is not None and a2_gscale is not None:
            g1_scale_c = g1_alphas * a2_gscale
    if backend == "vllm-flashinfer-b12x":
        # Folded into the block scales, E4M3(sf * scale_2); then scale_2 is 1, and down's input scale is left out.
        gate, w2_scale_2, a2 = np.ones_like(gate), np.ones_like(w2_scale_2), None
        a2_gscale = np.ones_like(w2_scale_2)
    return ConvertedScales(
        parameters.layer, backend, w13_input, w2_input, a13, a2, a1_gscale, a2_gscale,
        gate, w2_scale_2, g1_alphas, g2_alphas, g1_scale_c, mismatched, tuple(warnings),
    )  # fmt: skip


def _backend_scales(w13: F32, w2: F32, backend: str) -> tuple[F32 | None, F32 | None]:
    if backend == "vllm-cutlass":
        # np.max propagates a NaN, as torch.max does.
        return w13.max(axis=1), w2
    if backend in ONE_MAXIMUM:
        return np.full(len(w2), w13.max(), np.float32), np.full(len(w2), w2.max(), np.float32)
    if backend == "vllm-b12x":
        return np.ones(len(w13), np.float32), np.ones_like(w2)
    return None, None


def _alphas(scale_2: F32, a: F32 | None, backend: str) -> F32 | None:
    if backend in MULTIPLIED and a is not None:
        return scale_2 * a
    return scale_2 if backend in SCALE_2_ALONE else None


def close(a: Any, b: Any) -> npt.NDArray[np.bool_]:
    """``torch.isclose`` with its defaults (rtol 1e-5, atol 1e-8): a NaN is close to nothing.

    The absolute term is as large as many a scale's last digits: 1e-8 and 2e-8 count as equal.

    >>> close(np.float32([1e-4, 1e-4, 1e-8, np.nan]), np.float32([1.00001e-4, 1.1e-4, 2e-8, np.nan])).tolist()
    [True, False, True, False]
    """
    return np.isclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-5, atol=1e-8)


def _is_unique(values: F32) -> bool:
    return bool((values == values.flat[0]).all())


# ------------------------------------------------------------------ one expert at a time


def process_weights_after_loading_reference(
    parameters: LayerParameters, backend: str, *, per_token: bool = False, a16: bool = False
) -> ConvertedScales:
    """`process_weights_after_loading`, scale by scale; equal bits."""
    if backend == "vllm-b12x" and not a16:
        raise ServingError("serving.conversion-unread", backend=backend)
    one = np.float32(1)
    w13 = [[one if per_token else np.float32(v) for v in row] for row in parameters.w13_input_scale]
    w2 = [one if per_token else np.float32(v) for v in parameters.w2_input_scale]
    layer13, layer2 = torch_max([v for row in w13 for v in row]), torch_max(w2)
    made: dict[str, list[np.float32 | None]] = {name: [] for name in _BY_EXPERT}
    mismatched = []
    with np.errstate(all="ignore"):
        for expert, (gate, up) in enumerate(parameters.w13_weight_scale_2):
            down, a13, a2 = np.float32(parameters.w2_weight_scale_2[expert]), None, None
            if backend == "vllm-cutlass":
                a13, a2 = torch_max(w13[expert]), w2[expert]
            elif backend in ONE_MAXIMUM:
                a13, a2 = layer13, layer2
            elif backend == "vllm-b12x":
                a13, a2 = one, one
            g1, g2, c = None, None, None
            if backend in SCALE_2_ALONE:
                g1, g2 = gate, down
            elif backend in MULTIPLIED and a13 is not None and a2 is not None:
                g1, g2 = np.float32(gate * a13), np.float32(down * a2)
            e1, e2 = None if a13 is None else one / a13, None if a2 is None else one / a2
            if backend == "vllm-flashinfer-trtllm" and g1 is not None and e2 is not None:
                c = np.float32(g1 * e2)
            if not close_scalar(gate, up):
                mismatched.append(expert)
            if backend == "vllm-flashinfer-b12x":
                gate, down, a2, e2 = one, one, None, one
            for name, value in zip(_BY_EXPERT, (a13, a2, e1, e2, gate, down, g1, g2, c), strict=True):
                made[name].append(value)
    warnings = ["scale-2-mismatch"] if mismatched else []
    if backend == "vllm-emulation" and any(v != w13[0][0] for row in w13 for v in row) | any(v != w2[0] for v in w2):
        warnings.append("input-scale-not-unique")
    arrays = {name: None if None in values else np.array(values, np.float32) for name, values in made.items()}
    return ConvertedScales(
        parameters.layer, backend, np.array(w13, np.float32), np.array(w2, np.float32), **arrays,
        mismatched=tuple(mismatched), warnings=tuple(warnings),
    )  # fmt: skip


_BY_EXPERT = (
    "a13", "a2", "a1_gscale", "a2_gscale", "w13_weight_scale_2", "w2_weight_scale_2", "g1_alphas", "g2_alphas",
    "g1_scale_c",
)  # fmt: skip


def torch_max(values: list[np.float32]) -> np.float32:
    """The largest; a NaN wins.

    >>> float(torch_max([np.float32(1), np.float32(3)])), float(torch_max([np.float32(1), np.float32(np.nan)]))
    (3.0, nan)
    """
    top = values[0]
    for value in values[1:]:
        if np.isnan(value) or value > top:
            top = value
    return top


def close_scalar(a: np.float32, b: np.float32) -> bool:
    """`close` of two numbers: infinities are close to themselves alone."""
    x, y = float(a), float(b)
    return abs(x - y) <= 1e-8 + 1e-5 * abs(y) if np.isfinite(x) and np.isfinite(y) else x == y
