"""Who offers vLLM an all-to-all, what it hands to the experts, and which NVFP4 backends take it.

Sources: `serving-vllm.md` 5.1 (vLLM 0.33.0) for which backend refuses which; vLLM's ``vllm/config/parallel.py`` (values
of ``--all2all-backend``), ``fused_moe/all2all_utils.py`` and ``docs/design/moe_kernel_features.md`` for formats and
what travels, read at the commits named in `READ`.
"""

from __future__ import annotations

from dataclasses import dataclass

READ = {
    "vllm/config/parallel.py": "00193b82b0e2",
    "vllm/model_executor/layers/fused_moe/all2all_utils.py": "02bd2a494f5c",
    "docs/design/moe_kernel_features.md": "02b112143c22",
}


@dataclass(frozen=True, slots=True)
class Offer:
    """One value of ``--all2all-backend``.

    Attributes
    ----------
    flag, library
    shape : "standard" or "batched"
        What the experts receive: rows one after the other, or a block of rows for each local expert.
    travels : tuple of str
        In what an NVFP4 layer's activations may cross: ``"nvfp4"``, ``"bf16"``, ``"fp8"``.  ``"fp8"`` beside ``"bf16"``
        where the layer's quantisation decides.
    refused_by
        Backends of the NVFP4 table that do not go with it.
    """

    flag: str
    library: str
    shape: str
    travels: tuple[str, ...]
    refused_by: tuple[str, ...] = ()


OFFERS = (
    Offer("allgather_reducescatter", "NCCL", "standard", ("nvfp4", "bf16")),
    Offer("deepep_high_throughput", "DeepEP", "standard", ("bf16",), ("VLLM_CUTLASS",)),
    Offer("deepep_low_latency", "DeepEP", "batched", ("bf16", "nvfp4")),
    Offer("flashinfer_nvlink_one_sided", "FlashInfer", "standard", ("nvfp4", "bf16"), ("VLLM_CUTLASS",)),
    Offer("flashinfer_nvlink_two_sided", "FlashInfer", "standard", ("nvfp4",), ("VLLM_CUTLASS", "MARLIN")),
    Offer("mori_high_throughput", "MORI", "standard", ("fp8", "bf16")),
    Offer("mori_low_latency", "MORI", "standard", ("fp8", "bf16")),
    Offer("nixl_ep", "NIXL", "batched", ("bf16",)),
)
"""The default first.  ``VLLM_DEEPEPLL_NVFP4_DISPATCH`` chooses NVFP4 for DeepEP's low-latency kernels."""
DEEPEP_BLOCK = 128
"""Values that share a scale in the one FP8 scheme which DeepEP's high-throughput kernels carry."""
NEVER = ("FLASHINFER_B12X",)
"""NVFP4 backends that refuse expert parallelism altogether."""
