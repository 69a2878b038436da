"""NVFP4 and MXFP4 quantisation by named recipe, and the products that consume it."""

from nvfp4viz.quant.api import dequantize, quantize
from nvfp4viz.quant.compare import (
    compare_recipes,
    compare_scaling,
    granularity_ladder,
    range_facts,
    sweep_headroom,
)
from nvfp4viz.quant.gemm import gemm_dequantized, gemm_w4a4, gemm_w4a16_marlin
from nvfp4viz.quant.rcp import rcp_approx_ftz
from nvfp4viz.quant.recipes import MXFP4_RECIPES, NVFP4_RECIPES, RECIPES, Recipe
from nvfp4viz.quant.scales import amax, global_scale
from nvfp4viz.quant.tensor_core import mma_grouped, mma_matmul
from nvfp4viz.quant.tensor_core_explain import tensor_core_explain
from nvfp4viz.quant.tensor_core_k32 import mma_k32
from nvfp4viz.quant.tensor_core_k32_step import mma_step_k32_reference
from nvfp4viz.quant.tensor_core_step import mma_step_reference
from nvfp4viz.quant.trace import trace_block
from nvfp4viz.quant.types import BlockTrace, QuantizedTensor, Step

__all__ = [
    "MXFP4_RECIPES",
    "NVFP4_RECIPES",
    "RECIPES",
    "BlockTrace",
    "QuantizedTensor",
    "Recipe",
    "Step",
    "amax",
    "compare_recipes",
    "compare_scaling",
    "dequantize",
    "gemm_dequantized",
    "gemm_w4a4",
    "gemm_w4a16_marlin",
    "global_scale",
    "granularity_ladder",
    "mma_grouped",
    "mma_k32",
    "mma_matmul",
    "mma_step_k32_reference",
    "mma_step_reference",
    "quantize",
    "range_facts",
    "rcp_approx_ftz",
    "sweep_headroom",
    "tensor_core_explain",
    "trace_block",
]
