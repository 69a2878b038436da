"""NVIDIA ModelOpt's unified export: the commonest NVFP4 layout.

=================  ========  =======================  ==========================
suffix             dtype     shape                    meaning
=================  ========  =======================  ==========================
``weight``         U8        ``[out, in/2]``          two E2M1 codes a byte
``weight_scale``   F8_E4M3   ``[out, in/16]``         one a block, not swizzled
``weight_scale_2`` F32       ``[]``                   amax/2688, a multiplier
``input_scale``    F32       ``[]``                   amax/2688; W4A4 only
=================  ========  =======================  ==========================

Source: ModelOpt ``moe_utils.py`` and ``nvfp4_tensor.py``; ``checkpoints.md`` 2.1 of the project's specification.
"""

from nvfp4viz.checkpoint.dialects.per_expert import PerExpertDialect

MODELOPT = PerExpertDialect(
    id="modelopt",
    suffixes={
        "weight": "weight",
        "weight_scale": "weight_scale",
        "weight_scale_2": "weight_scale_2",
        "input_scale": "input_scale",
    },
    divisors=False,
)
