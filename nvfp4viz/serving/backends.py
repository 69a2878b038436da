"""The backends that we run: what each reads, and how a layer is prepared for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nvfp4viz.errors import ServingError
from nvfp4viz.moe import (
    Bf16Experts,
    EmulationExperts,
    ExpertsResult,
    W4A4Experts,
    W4A16Experts,
    prepare_emulation,
    prepare_w4a16,
    run_bf16_experts,
    run_emulation_experts,
    run_w4a4_experts,
    run_w4a16_experts,
)
from nvfp4viz.serving.loader import LayerParameters
from nvfp4viz.serving.scales import ConvertedScales
from nvfp4viz.serving.selection import MOE

LayerExperts = W4A4Experts | W4A16Experts | EmulationExperts | Bf16Experts


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a backend does with activation scales.

    Attributes
    ----------
    id
        As in the audit's vocabulary.
    schemes
        Checkpoint schemes it serves.
    scope
        How far one slot's value reaches: ``"expert"``, ``"layer"`` (one maximum), or ``"none"`` (not read).
    per_token
        Offers ``nvfp4_per_token``.
    flag
        What a user passes to vLLM 0.33.0.
    """

    id: str
    schemes: tuple[str, ...]
    scope: str
    per_token: bool
    flag: str

    @property
    def reads_input_scale(self) -> bool:
        return self.scope != "none"


_RUNNABLE = ("vllm-cutlass", "vllm-flashinfer-cutlass", "vllm-flashinfer-trtllm", "vllm-marlin", "vllm-emulation")
_ROWS = {row.id: row for row in MOE}
BACKENDS: dict[str, BackendInfo] = {
    name: BackendInfo(name, row.serves, row.reach, row.per_token, f"--moe-backend {row.flag}")
    for name in _RUNNABLE
    for row in (_ROWS[name],)
} | {"bf16": BackendInfo("bf16", ("UNQUANTISED",), "none", False, "")}


def choose_backend(backend: str, scheme: str, per_token: bool) -> BackendInfo:
    """Accept an explicit choice or refuse it: no backend falls back to another.

    Raises
    ------
    ServingError
        ``serving.backend``, ``serving.backend-scheme``, ``serving.per-token``.
    """
    if backend not in BACKENDS:
        raise ServingError("serving.backend", backend=backend, known=", ".join(BACKENDS))
    info = BACKENDS[backend]
    if scheme not in info.schemes:
        able = ", ".join(other.id for other in BACKENDS.values() if scheme in other.schemes)
        raise ServingError("serving.backend-scheme", backend=backend, scheme=scheme, able=able or "–")
    if per_token and not info.per_token:
        able = ", ".join(other.id for other in BACKENDS.values() if other.per_token)
        raise ServingError("serving.per-token", backend=backend, able=able)
    return info


def prepare_layer(parameters: LayerParameters, scales: ConvertedScales, *, per_token: bool = False) -> LayerExperts:
    """A layer's experts in the form that its backend multiplies."""
    p = parameters
    packed = (p.w13_weight, p.w13_weight_scale, scales.w13_weight_scale_2, p.w2_weight, p.w2_weight_scale)
    if scales.backend == "vllm-marlin":
        return prepare_w4a16(*packed, scales.w2_weight_scale_2)
    assert scales.a1_gscale is not None
    assert scales.a2_gscale is not None
    if scales.backend == "vllm-emulation":
        first, second = scales.a1_gscale[0], scales.a2_gscale[0]
        return prepare_emulation(*packed, scales.w2_weight_scale_2, np.float32(first), np.float32(second))
    # FlashInfer wants [w3, w1] and shuffled rows; the products are the same, so the rows stay as they are.
    return W4A4Experts(
        p.w13_weight, p.w13_weight_scale, p.w2_weight, p.w2_weight_scale,
        scales.a1_gscale, scales.a2_gscale, scales.g1_alphas, scales.g2_alphas, per_token=per_token,
    )  # fmt: skip


RUNNERS: dict[type, Callable[..., ExpertsResult]] = {
    W4A4Experts: run_w4a4_experts,
    W4A16Experts: run_w4a16_experts,
    EmulationExperts: run_emulation_experts,
    Bf16Experts: run_bf16_experts,
}
