"""Layouts with one level of scales: E8M0 bytes for 32 values, stored as F8_E8M0 or U8.

gpt-oss
    ``experts.gate_up_proj_blocks`` U8 ``[E, 2I, H/32, 16]`` and ``_scales`` U8 ``[E, 2I, H/32]``; weight-only, but for
    Quark's w-mxfp4-a-fp8 under the same names, which adds ``_input_scale``.
DeepSeek V4
    ``ffn.experts.E.w1.weight`` I8 ``[I, H/2]`` and ``.scale`` F8_E8M0 ``[I, H/32]``.  Shared experts and attention use
    the same suffix for 128×128 blocks of FP8, so type and shape decide, not the name.
Quark
    ``weight`` U8 and ``weight_scale`` U8; some exports say ``weight_quantizer.scale`` and ``input_quantizer.scale``.
    An ``input_scale`` there is FP8's, and does not make it NVFP4.  Quark's own NVFP4 has ModelOpt's tensors, but for
    ``input_scale_2`` (vLLM's ``quark/schemes/quark_nvfp4.py``).

Source: ``checkpoints.md`` 2.5 to 2.7 of the project's specification.
"""

from nvfp4viz.checkpoint.dialects.per_expert import Dialect

GPT_OSS = Dialect(
    id="gpt-oss",
    suffixes={"weight": "blocks", "weight_scale": "scales", "input_scale": "input_scale"},
    block="MXFP4",
    arrangement="fused",
    methods=("mxfp4", "quark"),
)
DEEPSEEK_V4 = Dialect(
    id="deepseek-v4",
    suffixes={"weight": "weight", "weight_scale": "scale"},
    block="MXFP4",
    methods=("fp8", "mxfp4", "deepseek"),
)
_PLAIN = {"weight": "weight", "weight_scale": "weight_scale", "input_scale": "input_scale"}
_QUANTIZER = {
    "weight": "weight",
    "weight_scale": "weight_quantizer.scale",
    "input_scale": "input_quantizer.scale",
}
_METHODS = ("quark", "mxfp4")
QUARK = Dialect(
    id="quark",
    suffixes=_PLAIN,
    block="MXFP4",
    aliases={suffix: role for role, suffix in _QUANTIZER.items()},
    methods=_METHODS,
)
QUARK_QUANTIZER = Dialect(
    id="quark",
    suffixes=_QUANTIZER,
    block="MXFP4",
    aliases={suffix: role for role, suffix in _PLAIN.items()},
    methods=_METHODS,
)
QUARK_NVFP4 = Dialect(
    id="quark",
    suffixes={
        "weight": "weight", "weight_scale": "weight_scale", "weight_scale_2": "weight_scale_2",
        "input_scale": "input_scale_2",
    },
    aliases={"input_scale": "input_scale"},
    methods=("quark",),
)  # fmt: skip
