"""The backends: how far one scale reaches in each, what two scales do to an expert, and what vLLM picks by itself.

vLLM's rows come from `nvfp4viz.serving.selection`, which also says who is picked.

Sources: vLLM 0.33.0 ``oracle/nvfp4.py``, ``modelopt.py``, ``cutlass_moe.py``; SGLang ``modelopt_quant.py``;
TensorRT-LLM ``fused_moe/quantization.py`` (sections 4 and 5 of `serving-vllm.md`, section 3 of `checkpoints.md`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvfp4viz.serving.selection import GPUS, MOE, MoeRequest, capability_of, select_moe
from nvfp4viz.serving.selection_mxfp4 import MODELS, MXFP4, Mxfp4Request, select_mxfp4


@dataclass(frozen=True, slots=True)
class Family:
    """How one backend reads scales.

    Attributes
    ----------
    reach
        ``"expert"``, ``"layer"`` or ``"none"``: how far one input scale reaches.
    engine
        ``"vllm"``, ``"sglang"``, ``"tensorrt-llm"`` or ``"transformers"``.
    schemes
        Schemes that it serves, as vLLM's own checks have it.
    reads_down
        The second GEMM's input scale is read; FlashInfer's B12X replaces it by 1.0.
    gate_rules
        Gate's `weight_scale_2` is used for up as well.
    activations
        Activation functions that its class takes; None where it takes all, or no condition was read.
    clamps
        It applies ``swiglu_limit``.
    biases
        It adds biases of the experts' projections.
    ranks
        It takes experts that are split over expert-parallel ranks.
    keeps_sign
        It divides by an activation scale and multiplies with it in software, where the sign of both cancels.
    mxfp4
        It also has a path for MXFP4 experts (``oracle/mxfp4.py`` for vLLM; others as their model lists say).
    """

    reach: str
    engine: str
    schemes: tuple[str, ...] = ("W4A4",)
    reads_down: bool = True
    gate_rules: bool = True
    mxfp4: bool = True
    activations: tuple[str, ...] | None = None
    clamps: bool = True
    biases: bool = True
    ranks: bool = True
    keeps_sign: bool = False


BOTH = ("W4A4", "W4A16")
_MXFP4 = {row.id for row in MXFP4.values()}


def _of_vllm(name: str) -> Family:
    row = next(row for row in MOE if row.id == name)
    return Family(
        row.reach, "vllm", row.serves, row.reads_down, row.gate_rules, row.id in _MXFP4, row.activations, row.clamps,
        row.biases, "ep" not in row.without, keeps_sign=row.id == "vllm-emulation",
    )  # fmt: skip


_VLLM = (
    "vllm-cutlass", "vllm-flashinfer-trtllm", "vllm-flashinfer-cutlass", "vllm-flashinfer-cutedsl",
    "vllm-flashinfer-b12x", "vllm-marlin", "vllm-humming", "vllm-emulation",
)  # fmt: skip
FAMILIES: dict[str, Family] = {name: _of_vllm(name) for name in _VLLM} | {
    "sglang-flashinfer": Family("layer", "sglang"),
    "sglang-generic": Family("expert", "sglang"),
    "sglang-marlin": Family("none", "sglang", BOTH),
    "tensorrt-llm": Family("layer", "tensorrt-llm"),
    "transformers": Family("none", "transformers", BOTH, gate_rules=False),
}
"""In the order of the report's vocabulary."""

# Fates of an uninitialised slot that decide between outcomes: fresh memory, ones, a neighbour's plausible scale, NaN,
# infinity, garbage large and small.
FATES = (0.0, 1.0, 1e-3, math.nan, math.inf, 1e38, 1e-30)

# How far a scale may be off before its expert suffers, as a factor.  Too small clips: codes end at ±6 and block scales
# at 448.  Too large costs nothing while the block scales stay normal E4M3 numbers, which leaves 14 binades for the
# largest block; from 2^8 on ordinary blocks become subnormal, and from 2^20 on every block scale is zero.  Measured
# by running the kernel's arithmetic: `tests/serving/test_outcome_table.py`.
CLIPS_BELOW, LOSES_ABOVE, NOTHING_BELOW, NOTHING_ABOVE = 0.5, 2.0**8, 2.0**-24, 2.0**20
# From here on even the largest block's scale is no normal number, and may round to zero.
FADES_ABOVE = 2.0**14


def outcome_of_scales(
    a13: float, a2: float, healthy: tuple[float, float] = (1e-3, 1e-3)
) -> tuple[str, tuple[str, ...]]:
    """What two activation scales, as the kernel gets them, do to an expert on a W4A4 backend.

    Parameters
    ----------
    a13, a2
        After the backend's maximum.
    healthy
        What they should be.

    Returns
    -------
    outcome, possible
        ``possible`` where the prompt decides.

    Notes
    -----
    Section 4.5 of `serving-vllm.md`.  ``a = 0`` gives g = inf and alpha = 0: products are 0 unless a block of 16 is all
    zero, whose scale byte becomes NaN.  Both zero: the intermediate is all zero, so NaN is certain.  An infinite ``a``
    gives 0 · inf.  Infinite products count as NaN, because the next norm makes NaN of them.

    >>> outcome_of_scales(0.0, 0.0)[0], outcome_of_scales(0.0, 5e-3), outcome_of_scales(float("inf"), 5e-3)[0]
    ('nan', ('zero', ('nan', 'zero')), 'nan')
    """
    scales = np.array([a13, a2], np.float32)
    if not np.isfinite(scales).all():
        return "nan", ()
    with np.errstate(divide="ignore", over="ignore"):
        # 1/x overflows for zero and for the smaller half of the subnormals.
        endless = np.isinf(np.float32(1) / scales)
    if endless.all():
        return "nan", ()
    if endless.any():
        return "zero", ("nan", "zero")
    ratios = [abs(a) / good for a, good in zip((a13, a2), healthy, strict=True)]
    if max(ratios) > NOTHING_ABOVE or min(ratios) < NOTHING_BELOW:
        return "zero", ("degraded", "nan", "zero")
    # Both halves of a clipped first GEMM are small, and so their product is by the square: what the second GEMM's own
    # scale was measured for is no longer there.
    above = ratios[1] / min(1.0, ratios[0]) ** 2
    if ratios[0] < CLIPS_BELOW and above >= NOTHING_ABOVE:
        return "zero", ("degraded", "zero")
    if (scales < 0).any() or min(ratios) < CLIPS_BELOW:
        # One that is too small does not make up for another that is too large.
        vanishes = above > FADES_ABOVE or max(ratios) > LOSES_ABOVE
        return "degraded", ("degraded", "zero") if vanishes else ()
    # Whether too large a scale hurts depends on how much smaller than the largest block the others are.
    return ("degraded", ("degraded", "safe", "zero")) if max(ratios) > LOSES_ABOVE else ("safe", ())


DEEP_CODES = (
    "block-scale.nan", "block-scale.negative", "block-scale.exponent-cast", "weight.all-zero",
    "weight.duplicate-expert",
)  # fmt: skip
"""Findings of ``--deep`` that change what a backend computes."""

LARGE = "block-scale.exponent-cast.large"
"""Of an exponent cast: the text where scales became 2^6 and more, and not next to nothing."""


def outcome_of_bytes(
    backend: str, code: str, projection: str | None, *, large: bool = False
) -> tuple[str, tuple[str, ...]]:
    """What wrong bytes in a weight do, as `outcome_of_scales`.

    Parameters
    ----------
    code
        One of `DEEP_CODES`.
    projection
        An expert's; None for an ordinary layer.
    large
        The finding's text is `LARGE`.

    Notes
    -----
    A NaN in gate or up ends where the intermediate is quantised for the second GEMM: the conversion takes the element
    for +6, and the block's maximum leaves it out.  Marlin never sees one: it decodes block scales to S0E5M3, which has
    none, and 0x7F becomes a large number (``marlin/dequant.h``).  How Humming decodes was not read.  How much a few
    blocks matter, the file does not say.

    >>> outcome_of_bytes("vllm-cutlass", "block-scale.nan", "down")
    ('nan', ())
    """
    if code == "weight.all-zero":
        return "zero", ()
    if code == "block-scale.exponent-cast":
        # Some 2^14 too large: F16 has nothing above 2^16, and a square beyond F32 makes the next norm give zero.
        return ("degraded", ("degraded", "nan", "zero")) if large else ("zero", ("degraded", "zero"))
    if code == "block-scale.nan":
        inner = projection in ("gate", "up", "gate_up") and FAMILIES[backend].reach != "none"
        if not inner and not backend.endswith(("marlin", "humming")):
            return "nan", ()
        return "degraded", ("degraded", "nan", "safe") if not backend.endswith("marlin") else ("degraded", "safe")
    # Marlin takes what is below its smallest scale for zero, and so everything negative.
    lost = code == "block-scale.negative" and backend.endswith("marlin")
    return "degraded", ("degraded", "safe", "zero") if lost else ("degraded", "safe")


def activation_of(config: Mapping[str, Any]) -> str:
    """The experts' activation function in the vocabulary of `nvfp4viz.serving.selection`, as far as it has a word.

    >>> activation_of({"text_config": {"hidden_activation": "gelu_pytorch_tanh"}}), activation_of({})
    ('gelu_tanh', 'silu')
    """
    name = _setting(config, ("hidden_activation", "hidden_act", "mlp_hidden_act"), str) or "silu"
    return {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu", "relu2": "relu2_no_mul"}.get(name, name)


def is_clamped(config: Mapping[str, Any]) -> bool:
    """Do the experts clamp their gate (``swiglu_limit``)?"""
    return _setting(config, ("swiglu_limit",), (int, float)) is not None


def _setting(config: Mapping[str, Any], keys: tuple[str, ...], kind: Any) -> Any:
    """The first of these keys that has a value of the kind, in the configuration or its text part."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in keys:
            value = holder.get(key)
            if isinstance(value, kind) and not isinstance(value, bool):
                return value
    return None


def automatic_backend(
    gpu: str, activation: str, weight_only: bool, mxfp4: str | None = None, clamped: bool = False
) -> str | None:
    """What vLLM 0.33.0 picks by itself on one GPU, with FlashInfer installed, and with Humming where it comes first.

    Parameters
    ----------
    gpu
        ``"sm_120"``, ``"sm120"`` or ``"120"``.
    activation
        ``"silu"``, ``"gelu_tanh"``, ``"relu2_no_mul"``, …; some backends do not have all.
    weight_only
        The checkpoint is served as W4A16.
    mxfp4
        The dialect of MXFP4 experts; None for NVFP4.  Their order was read for gpt-oss and DeepSeek V4 alone (5.3), and
        what it picks may be outside the vocabulary (Triton): both are None here.
    clamped
        The experts clamp their gate.

    >>> automatic_backend("sm_120", "silu", False), automatic_backend("sm_90", "silu", False)
    ('vllm-flashinfer-cutlass', 'vllm-humming')
    """
    known = known_gpu(gpu)
    if known is None:
        return None
    if mxfp4 is not None:
        if mxfp4 not in MODELS:
            return None
        chosen = select_mxfp4(Mxfp4Request(known, mxfp4, humming=True))
    else:
        scheme = "W4A16" if weight_only else "W4A4"
        chosen = select_moe(MoeRequest(known, activation, scheme, humming=True, swiglu_limit=clamped))
    return getattr(chosen.winner, "id", None)


def known_gpu(gpu: str) -> str | None:
    """The GPU of the tables that stands for this one: of its family, the nearest that is not above it.

    >>> known_gpu("sm_101"), known_gpu("87"), known_gpu("sm_70"), known_gpu("sm_130")
    ('sm_100', 'sm_86', None, None)
    """
    digits = "".join(character for character in gpu if character.isdigit())
    capability = int(digits) if digits else 0
    family = {name: capability_of(name) or 0 for name in GPUS if (capability_of(name) or 0) // 10 == capability // 10}
    return max((name for name in family if family[name] <= capability), key=family.__getitem__, default=None)
