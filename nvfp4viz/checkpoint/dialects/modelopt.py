"""NVIDIA ModelOpt's unified export: the commonest NVFP4 layout, and its two ways to store all experts in one tensor.

=================  ========  =======================  ==========================
suffix             dtype     shape                    meaning
=================  ========  =======================  ==========================
``weight``         U8        ``[out, in/2]``          two E2M1 codes a byte
``weight_scale``   F8_E4M3   ``[out, in/16]``         one a block, not swizzled
``weight_scale_2`` F32       ``[]``                   amax/2688, a multiplier
``input_scale``    F32       ``[]``                   amax/2688; W4A4 only
=================  ========  =======================  ==========================

Stacked (Step-3.5, Inkling): the same with a leading axis of experts, scalars ``[E]``.  Fused (Llama 4, gpt-oss NVFP4):
suffixes with underscores on a 3-D parameter, and one scalar for all experts of the layer.

Source: ModelOpt ``moe_utils.py`` and ``nvfp4_tensor.py``; ``checkpoints.md`` 2.1 and 2.3 of the project's
specification.
"""

from nvfp4viz.checkpoint.dialects.per_expert import ROLES, Dialect

_SUFFIXES = {role: role for role in ROLES}
MODELOPT = Dialect(id="modelopt", suffixes=_SUFFIXES, methods=("modelopt",))
# ModelOpt's own MXFP4: E8M0 block scales under the same names, no second level.
MODELOPT_MXFP4 = Dialect(id="modelopt", suffixes=_SUFFIXES, block="MXFP4", methods=("modelopt",))
MODELOPT_STACKED = Dialect(id="modelopt-stacked", suffixes=_SUFFIXES, arrangement="stacked", methods=("modelopt",))
# Of Inkling only the second-level scale's name is public.
INKLING = Dialect(
    id="modelopt-stacked",
    suffixes={"weight": "", "weight_scale": "scale", "weight_scale_2": "scale2", "input_scale": "input_scale"},
    arrangement="stacked",
    methods=("modelopt",),
    certain=("weight_scale_2",),
    projections={"gate_up": "w13_weight", "down": "w2_weight"},
)
MODELOPT_FUSED = Dialect(
    id="modelopt-fused", suffixes={**_SUFFIXES, "weight": ""}, arrangement="fused", methods=("modelopt",)
)
