"""Second-level weight scales on a backend that multiplies them into the block scales.

FlashInfer's B12X gets ``E4M3(block scale * weight_scale_2)`` and a second level of 1 (vLLM 0.33.0,
``prepare_fp4_layer_for_moe``; serving-vllm.md 4.4).  The block scales of a small second level fall below E4M3's normal
numbers there, and in the end to zero, in a file that is sound everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nvfp4viz import formats
from nvfp4viz.audit.facts import Facts
from nvfp4viz.audit.forecast_scales import Effect
from nvfp4viz.audit.texts import id_list

FOLDING = "vllm-flashinfer-b12x"
# E4M3's largest number, and its smallest with all four significant bits.
_LARGEST, _NORMAL = np.float32(448), np.float32(2.0**-6)


def of_folded(name: str, facts: Facts) -> Iterator[Effect]:
    """What is left of block scales, for experts of which not even the largest stays a normal number."""
    if name != FOLDING:
        return
    for layer in facts.layers:
        if facts.block(layer) != "NVFP4":
            continue
        zero, coarse = set[int](), set[int]()
        for kind in facts.view.projections_in[layer]:
            table = facts.tables.get(("weight_scale_2", layer, kind))
            # Gate's stands for up as well.
            if table is None or (kind == "up" and "gate" in facts.view.projections_in[layer]):
                continue
            good = table.good() & (table.values < 1)
            left = formats.decode_e4m3(formats.encode_e4m3(np.where(good, table.values, 1) * _LARGEST))
            zero |= set(table.where(good & (left == 0)))
            coarse |= set(table.where(good & (left < _NORMAL)))
        for ids, outcome, possible in ((zero, "zero", ()), (coarse - zero, "degraded", ("degraded", "zero"))):
            if ids:
                whole = len(ids) == facts.view.experts_in[layer]
                fill = {"layer": layer, "experts": id_list(tuple(sorted(ids))), "slots": len(ids)}
                scope = "layer" if whole else "experts"
                yield Effect(outcome, possible, scope, {layer}, f"why.folded.{outcome}", fill)
