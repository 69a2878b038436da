"""Dialect × fault, in ordinary modules: attention that a server fuses, and attention that the configuration forgets.

The third part of `tests.audit.fault_matrix`, as `tests.audit.config_faults` is the second.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nvfp4viz.checkpoint import tensor
from tests.audit.config_faults import Built, Case, Expected, excluding, section_of, shared, with_section
from tests.audit.layouts import CT, EXPERTS, HIDDEN, MODELOPT, Layout, bf16

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _attention(layout: Layout) -> str:
    return layout.prefix.partition("layers.0")[0] + "layers.0.self_attn"


def fused_apart(layout: Layout) -> Built:
    """Quantised attention, where k's second-level scale is half of q's and v's."""
    at = _attention(layout)
    tensors = layout.tensors()
    for last in ATTENTION:
        tensors |= shared(layout, f"{at}.{last}", HIDDEN, HIDDEN)
    name = f"{at}.k_proj.{(CT if layout.divisors else MODELOPT)['weight_scale_2']}"
    if name not in tensors:
        return "its ordinary modules have no second-level scale"
    tensors[name] = tensor((tensors[name].array() * (2 if layout.divisors else 0.5)).astype(np.float32))
    section = section_of(layout)
    if "quantized_layers" in section:
        section["quantized_layers"] = {**section["quantized_layers"], at: {"quant_algo": "NVFP4", "group_size": 16}}
    expected: list[Expected] = [("scale.pair-mismatch", "warn", "weight_scale_2", 0, None, None)]
    return Case(tensors, expected, with_section(layout, section))


def plain_unlisted(layout: Layout) -> Built:
    """Attention in BF16 that nothing leaves out."""
    section = section_of(layout)
    if "quantized_layers" in section:
        return "an allow-list leaves out what it does not name"
    if section.get("quant_method") in ("mxfp4", "fp8"):
        return "its method means the experts, or FP8 around them"
    plain = {f"{_attention(layout)}.{last}.weight": bf16(HIDDEN, HIDDEN) for last in ATTENTION}
    expected: list[Expected] = [("config.unquantised-not-excluded", "warn", None, None, None, None)]
    return Case({**layout.tensors(), **plain}, expected)


def excluded_module(layout: Layout) -> Built:
    """A projection of attention that is quantised, and in the exclude list alone."""
    name = f"{_attention(layout)}.o_proj"
    own = shared(layout, name, HIDDEN, HIDDEN)
    if not any(item.dtype == "U8" for item in own.values()):
        return "its ordinary modules are not in four bits"
    tensors = {**layout.tensors(), **own}
    expected: list[Expected] = [("config.excluded-but-quantised", "warn", None, None, None, None)]
    return Case(tensors, expected, excluding(layout, "*gate", name))


def router_bias(layout: Layout) -> Built:
    """A bias that is shorter than its weight has rows."""
    tensors = layout.tensors()
    routers = [name for name in tensors if name.endswith((".gate.weight", ".router.weight"))]
    if not routers:
        return "no router is stored"
    tensors[f"{routers[0].removesuffix('weight')}bias"] = bf16(EXPERTS - 1)
    return Case(tensors, [("weight.shape", "error", "bias", 0, None, None)])


def experts_bias(layout: Layout) -> Built:
    """The same of all experts in one tensor."""
    tensors = layout.tensors()
    biases = [name for name in tensors if name.endswith("down_proj_bias")]
    if not biases:
        return "no such tensor"
    tensors[biases[0]] = bf16(EXPERTS, HIDDEN // 2)
    return Case(tensors, [("weight.shape", "error", "bias", 0, None, None)])


LINEAR_FAULTS: dict[str, Callable[[Layout], Built]] = {
    "fused attention's weight_scale_2 differ": fused_apart,
    "attention in BF16, not excluded": plain_unlisted,
    "attention excluded, and quantised": excluded_module,
    "a router's bias of another length": router_bias,
    "experts' biases of another shape": experts_bias,
}
