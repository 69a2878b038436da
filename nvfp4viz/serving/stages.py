"""The five stages between a trained model and a product on the GPU, with what one expert is in each of them.

BF16 → PTQ → export → load → backend.  A flag belongs to exactly one stage and cannot make good what an earlier one
left out: that is why it matters to know which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nvfp4viz.checkpoint import Checkpoint
from nvfp4viz.model.calibrate import CalibrationStats
from nvfp4viz.quant import amax
from nvfp4viz.serving.served import ServedModel

Stage = Literal["bf16", "ptq", "export", "load", "backend"]
STAGES: tuple[Stage, ...] = ("bf16", "ptq", "export", "load", "backend")
FLAGS: dict[str, Stage] = {
    "torch_dtype": "bf16",
    "--qformat nvfp4": "ptq",
    "--calib_size": "ptq",
    "quant_algo": "export",
    "config_groups": "export",
    "exclude_modules": "export",
    "--quantization modelopt": "load",
    "--load-format": "load",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "load",
    "--moe-backend": "backend",
    'moe.activation="nvfp4_per_token"': "backend",
    "VLLM_BATCH_INVARIANT": "backend",
}
"""Flags, config keys and environment variables by the stage that they belong to.

Sources: `serving-vllm.md` 4.1, 4.2 and 5.1 (vLLM 0.33.0); PTQ's are the flags of NVIDIA's quantisation scripts."""


@dataclass(frozen=True, slots=True)
class ExpertLife:
    """One projection of one expert through all stages.

    Attributes
    ----------
    weight_amax : float32
        BF16: its largest magnitude; for gate and up the larger of both, which share a scale.
    tokens : int
        PTQ: how many tokens calibration routed to the expert.
    input_amax : float32 or None
        PTQ: the largest input it saw; None without a token.
    weight_scale_2 : float32
        Export: what the file holds.
    key
        Export: name of the input scale's tensor.
    stored : float32 or None
        Export: its value; None where the key was left out.
    slot : float32
        Load: what the slot holds.
    read : float32 or None
        Backend: the input scale after its maximum; None where it reads none.
    encode : float32 or None
        Backend: ``1 / read``.
    alpha : float32
        Backend: what the product is multiplied by.
    """

    weight_amax: np.float32
    tokens: int
    input_amax: np.float32 | None
    weight_scale_2: np.float32
    key: str
    stored: np.float32 | None
    slot: np.float32
    read: np.float32 | None
    encode: np.float32 | None
    alpha: np.float32


def expert_life(
    bf16: Checkpoint, stats: CalibrationStats, served: ServedModel, layer: int, expert: int, projection: str
) -> ExpertLife:
    """Follow one projection of one expert of tiny-moe.

    Parameters
    ----------
    bf16
        The unquantised checkpoint, with experts fused as Gemma 4 stores them.
    stats
        Of the calibration run that the export was made with.
    served
        The export, loaded on a W4A4 backend.
    """
    tail = "down_proj" if projection == "down" else "gate_up_proj"
    weight = np.asarray(bf16.read(f"model.layers.{layer}.experts.{tail}")[expert])
    product = int(projection == "down")
    tokens = int(stats.counts[layer, expert])
    parameters, scales = served.parameters_of(layer), served.scales_of(layer)
    slot = np.float32(parameters.values("input_scale", projection)[expert])
    written = bool(parameters.written["input_scale", projection][expert])
    read, encode, alphas = (
        (scales.a2, scales.a2_gscale, scales.g2_alphas) if product else (scales.a13, scales.a1_gscale, scales.g1_alphas)
    )
    assert alphas is not None, "every backend that serves here has alphas"
    return ExpertLife(
        weight_amax=np.float32(amax(weight)),
        tokens=tokens,
        input_amax=np.float32(stats.input_amax[layer, expert, product]) if tokens else None,
        weight_scale_2=np.float32(parameters.values("weight_scale_2", projection)[expert]),
        key=served.view.slot(layer, expert, projection, "input_scale").name,
        stored=slot if written else None,
        slot=slot,
        read=None if read is None else np.float32(read[expert]),
        encode=None if encode is None else np.float32(encode[expert]),
        alpha=np.float32(alphas[expert]),
    )


def flags_of(stage: Stage) -> tuple[str, ...]:
    """What belongs to a stage, in the table's order.

    >>> flags_of("load")[0]
    '--quantization modelopt'
    """
    return tuple(name for name, at in FLAGS.items() if at == stage)
