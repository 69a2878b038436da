"""The mixture-of-experts layer: routers, the route of tokens through grouped GEMMs, activations, expert backends."""

from nvfp4viz.moe.activation import gelu_tanh_and_mul, silu_and_mul
from nvfp4viz.moe.dataflow import Dispatch, combine_routes, plan_dispatch, round_bf16, shuffle_rows
from nvfp4viz.moe.dense import (
    Bf16Experts,
    EmulationExperts,
    W4A16Experts,
    decode_weights,
    prepare_emulation,
    prepare_w4a16,
    run_bf16_experts,
    run_emulation_experts,
    run_w4a16_experts,
)
from nvfp4viz.moe.experts import (
    ExpertsResult,
    ExpertsTrace,
    Operand,
    W4A4Experts,
    run_w4a4_experts,
)
from nvfp4viz.moe.experts_quant import per_token_scales, quantize_rows
from nvfp4viz.moe.mega_kernel import MegaExperts, MegaRun, prepare_mega_experts, run_mega_kernel
from nvfp4viz.moe.routing import Routing, route_gemma4

__all__ = [
    "Bf16Experts",
    "Dispatch",
    "EmulationExperts",
    "ExpertsResult",
    "ExpertsTrace",
    "MegaExperts",
    "MegaRun",
    "Operand",
    "Routing",
    "W4A4Experts",
    "W4A16Experts",
    "combine_routes",
    "decode_weights",
    "gelu_tanh_and_mul",
    "per_token_scales",
    "plan_dispatch",
    "prepare_emulation",
    "prepare_mega_experts",
    "prepare_w4a16",
    "quantize_rows",
    "round_bf16",
    "route_gemma4",
    "run_bf16_experts",
    "run_emulation_experts",
    "run_mega_kernel",
    "run_w4a4_experts",
    "run_w4a16_experts",
    "shuffle_rows",
    "silu_and_mul",
]
