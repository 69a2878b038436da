"""What splitting the experts over ranks does to their shapes: ``parallel.*``.

Tensor parallelism cuts every expert's intermediate axis.  Blocks of 16 (or 32) values lie along it in the down
projection, so a boundary inside a block leaves half a block without a scale; and kernels want rows in multiples of 64
or 128 (vllm#42516: 2·80 rows a rank).
"""

from __future__ import annotations

from collections.abc import Iterator

from nvfp4viz.audit.facts import Facts
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.checkpoint import CanonicalView
from nvfp4viz.checkpoint.canonical import config_number

SIZES = (1, 2, 4, 8, 16, 32, 64)
ALIGNMENTS = (64, 128)


def parallel_findings(facts: Facts, tp: int | None, ep: int | None) -> Iterator[Finding]:
    """``parallel.group-split`` and ``parallel.alignment``.

    Parameters
    ----------
    tp, ep
        Ranks; None where nobody asked.  Without ``tp`` only a width that misses every alignment is mentioned.
    """
    width = expert_width(facts)
    dialects = [facts.view.dialects[layer] for layer in facts.view.moe_layers]
    group = next((dialect.group for dialect in dialects if dialect), None)
    if width is not None and group is not None:
        yield from _widths(facts.view, width, group, tp)
    experts = facts.view.experts
    if ep is not None and ep > 1 and experts % ep:
        works = [size for size in SIZES if experts % size == 0]
        fill = {"experts": experts, "ranks": ep, "works": ", ".join(map(str, works))}
        yield make("parallel.alignment", "info", text="parallel.alignment.experts", count=1, fill=fill)


def _widths(view: CanonicalView, width: int, group: int, tp: int | None) -> Iterator[Finding]:
    ranks = tp or 1
    works = [size for size in SIZES if width % (size * group) == 0]
    fill: dict[str, object] = {
        "width": width,
        "ranks": ranks,
        "group": group,
        "works": ", ".join(map(str, works)) or "–",
    }
    if width % (ranks * group):
        rank = f"{width / ranks:g}"
        if tp is not None:
            yield make("parallel.group-split", "backend", count=1, fill={**fill, "rank": rank})
        return
    halves = 1 if view.projections == ("up", "down") else 2
    rank_width = width // ranks
    rows = halves * rank_width
    missed = [size for size in ALIGNMENTS if rows % size]
    # Without a word about ranks, a width below one tile is a toy's, and one that misses 128 alone is padded everywhere.
    if missed and (tp is not None or (rank_width >= 64 and 64 in missed)):
        works = [size for size in works if halves * width // size % 128 == 0]
        fill |= {
            "rows": rows, "rank": rank_width, "missed": ", ".join(map(str, missed)),
            "works": _listed(works),
        }  # fmt: skip
        yield make("parallel.alignment", "info", count=1, fill=fill)


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) or "–"


def expert_width(facts: Facts) -> int | None:
    """An expert's intermediate width: of a packed matrix of the file, else of the configuration."""
    view = facts.view
    for (_, _, projection), module in view.modules.items():
        weight = module.tensors.get("weight")
        if weight is None or module.state != "quantised" or (module.whole and len(weight.shape) != 3):
            continue
        if projection in ("gate", "up") and len(weight.shape) >= 2:
            return int(weight.shape[-2])
        if projection == "down" and not module.whole and len(weight.shape) == 2:
            return int(weight.shape[-1]) * (1 if weight.dtype == "F4" else 2)
    return config_number(
        facts.checkpoint.config or {}, ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
    )
