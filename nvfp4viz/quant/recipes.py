"""The recipes by name.  There is no single "bit-exact NVFP4": implementations differ on ties, floors and zero blocks.

NVFP4, for a block with maximum ``m``, in float32 unless said otherwise; ``G`` is the encode scale, ``g`` the decode
scale:

====================  ===============================  ====================  ===========================  ============
recipe                block scale before E4M3          floor, zero           element before E2M1          stores
====================  ===============================  ====================  ===========================  ============
``ieee``              ``G · (m / 6)``                  none                  ``x · (G / s)``, 0 if s = 0  ``G``
``vllm-cuda``         ``G · (m · rcp(6))``             none                  ``x · rcp(s · rcp(G))``      ``G``
``vllm-emulation``    ``G · (m · f32(1/6))``           none, clamp ±448      ``x · R(s · R(G))``          ``G``
``modelopt``          ``m / (6 · g)``                  0 → 1; [2^-9, 448]    ``x / (s · g)``              ``g``
``torchao``           ``(m / 6) / g``                  [2^-6, 448]           ``x · ((1 / g) / s)``        ``g``
``compressed-…``      ``G · (m / 6)``, /6 in x.dtype   0 → 0.125 afterwards  ``x / (s / G)``              ``G``
====================  ===============================  ====================  ===========================  ============

``rcp`` is ``rcp.approx.ftz.f32`` as an H200 computes it; ``R(0) = 1e-8``, else ``1/x``.  Sources: vLLM 0.33.0
``csrc/quantization/fp4/nvfp4_utils.cuh`` and ``nvfp4_emulation_utils.py``, and the packages named in
``tests/golden/README.md``.  MXFP4: `nvfp4viz.quant.mxfp4`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nvfp4viz.errors import FormatError

Scheme = Literal["nvfp4", "mxfp4"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One implementation's way to quantise.

    ``stores`` says which global scale it keeps.  ``standing`` says what our bits were compared with: ``package`` (the
    real package on a CPU), ``restatement`` (an independent C++ program from the same source facts; no CPU package runs
    this code), or ``definition`` (ours).
    """

    name: str
    scheme: Scheme
    block_size: int
    stores: Literal["encode", "decode", "none"]
    standing: Literal["package", "restatement", "definition"]


_ALL = (
    Recipe("ieee", "nvfp4", 16, "encode", "definition"),
    Recipe("vllm-cuda", "nvfp4", 16, "encode", "restatement"),
    Recipe("vllm-emulation", "nvfp4", 16, "encode", "package"),
    Recipe("modelopt", "nvfp4", 16, "decode", "package"),
    Recipe("torchao", "nvfp4", 16, "decode", "package"),
    Recipe("compressed-tensors", "nvfp4", 16, "encode", "package"),
    Recipe("ocp-floor", "mxfp4", 32, "none", "package"),
    Recipe("vllm-even", "mxfp4", 32, "none", "restatement"),
    Recipe("flashinfer-ceil", "mxfp4", 32, "none", "restatement"),
    Recipe("deepgemm-ceil", "mxfp4", 32, "none", "restatement"),
    Recipe("modelopt-mxfp4", "mxfp4", 32, "none", "package"),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
NVFP4_RECIPES: tuple[str, ...] = tuple(r.name for r in _ALL if r.scheme == "nvfp4")
MXFP4_RECIPES: tuple[str, ...] = tuple(r.name for r in _ALL if r.scheme == "mxfp4")


def find_recipe(name: str) -> Recipe:
    """Look a recipe up.

    Raises
    ------
    FormatError
        ``recipe.unknown``
    """
    if name not in RECIPES:
        raise FormatError("recipe.unknown", name=name, known=", ".join(RECIPES))
    return RECIPES[name]
