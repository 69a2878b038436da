"""The routers of today's mixture-of-experts models, from logits to experts and weights.

Source: `serving-vllm.md` section 9 (vLLM 0.33.0).  They differ where it matters: what is compared, what is weighed, and
what a NaN does.

==================  =====================  =========================  ==================================================
router              compares               weighs                     a NaN logit
==================  =====================  =========================  ==================================================
``softmax``         softmax (+ bias)       softmax over all experts   experts 0 … k−1, every weight 0
``sigmoid``         sigmoid + bias         sigmoid                    that score counts as 0
``grouped``         sigmoid + bias, in     sigmoid                    that expert is out; too few groups left:
                    the best groups                                   experts 0 … k−1, every weight 1/k
— in torch          the same               the same                   its group and it come first, every weight NaN
``sqrtsoftplus``    √softplus + bias       the sum, less the bias     that score counts as 0
— in Triton         the same               √softplus                  compared as −1e30; NaN if it is chosen even so
``hash``            nothing: a table       √softplus                  that score counts as 0
``gemma4``          the logits             softmax over the chosen    chosen first, every weight NaN
==================  =====================  =========================  ==================================================

All take logits ``(T, E)`` float32 and give a `Scored`: int32 ids and float32 weights ``(T, k)``.  Ties go to the lower
id in all of them.  A correction bias is ``(E,)`` float32 and holds finite numbers; otherwise `InputError`
``router.bias``.  All refuse other logits (``router.logits``), a k that is not from 1 to E (``router.top``) and an array
that has not one number an expert (``router.per-expert``).  Every function has two paths, ``"reference"``, which goes
through one token's experts one by one, and ``"numpy"``; their bits are equal.

Exponentials, logarithms and tangents are taken in float64 and rounded, and sums over experts run in f32 by rising id,
or by rank where they run over the chosen: a definition that every machine repeats.  A GPU's ``expf`` and the order in
which a warp adds may differ from it by units in the last place.
"""

from nvfp4viz.moe.routers.choice import Scored
from nvfp4viz.moe.routers.sigmoid import FUSED_MOST, route_grouped, route_sigmoid, sigmoid, sigmoid_tanh
from nvfp4viz.moe.routers.softmax import route_gemma4_logits, route_softmax
from nvfp4viz.moe.routers.softplus import IMAGE_SENTINELS, is_image, route_hash, route_sqrt_softplus, sqrt_softplus

__all__ = [
    "FUSED_MOST",
    "IMAGE_SENTINELS",
    "Scored",
    "is_image",
    "route_gemma4_logits",
    "route_grouped",
    "route_hash",
    "route_sigmoid",
    "route_softmax",
    "route_sqrt_softplus",
    "sigmoid",
    "sigmoid_tanh",
    "sqrt_softplus",
]
