"""What splitting the experts over ranks does to their shapes: ``parallel.*``.

Tensor parallelism cuts every expert's intermediate axis.  Blocks of 16 (or 32) values lie along it in the down
projection, so a boundary inside a block leaves half a block without a scale; and kernels want rows in multiples of 64
or 128 (vllm#42516: 2·80 rows a rank).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from nvfp4viz.audit.facts import MISSING, NOT_A_SCALAR, OK, Facts
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.module_names import layers_of
from nvfp4viz.audit.notes import layout_note
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.texts import layer_list
from nvfp4viz.checkpoint.canonical_view import config_number
from nvfp4viz.checkpoint.dialects import GPT_OSS

if TYPE_CHECKING:
    from nvfp4viz.audit.linears import Linear

EXPERT_PARALLEL = "expert-parallel"
SIZES = (1, 2, 4, 8, 16, 32, 64)
ALIGNMENTS = (64, 128)
# vLLM 0.33.0's CUTLASS path for W4A4 experts steps over block scales as if rows were a multiple of this; of a gated
# first GEMM it refuses others (``NotImplementedError``), of the second it does not look (vllm#35497, closed unmerged).
CUTLASS = 128


def parallel_findings(facts: Facts, tp: int | None, ep: int | None) -> Iterator[Finding]:
    """``parallel.group-split``, ``parallel.alignment``, and the ``loader.note`` on expert parallelism.

    Parameters
    ----------
    tp, ep
        Ranks; None where nobody asked.  Without ``tp`` only a width that misses every alignment is mentioned.
    """
    width = expert_width(facts)
    group = block_size(facts)
    if width is not None and group is not None:
        yield from _widths(facts, width, group, tp)
        if tp is not None and tp > 1 and width % (tp * group) == 0:
            yield from _other_blocks(facts, width, group, tp)
    hidden = config_number(facts.checkpoint.config or {}, ("hidden_size",))
    # A small one is a toy's, here and below.
    if hidden is not None and hidden >= 1024 and hidden % CUTLASS and _with_activations(facts):
        fill = {"hidden": hidden, "multiple": CUTLASS}
        yield make("parallel.alignment", "backend", text="parallel.alignment.hidden", count=1, fill=fill)
    experts = facts.view.experts
    if ep is not None and ep > 1 and "NVFP4" in facts.view.activation_blocks:
        layers = [layer for layer in facts.layers if "input_scale" in facts.needs[layer]]
        yield from layout_note(facts, EXPERT_PARALLEL, layers, "input_scale")
    if ep is not None and ep > 1 and experts % ep:
        works = [size for size in SIZES if experts % size == 0]
        fill = {"experts": experts, "ranks": ep, "works": ", ".join(map(str, works))}
        yield make("parallel.alignment", "info", text="parallel.alignment.experts", count=1, fill=fill)


# The last parts of names of matrices that ranks cut along the input.
_DOWN = ("down_proj", "w2")
_BLOCKS = {"NVFP4": 16, "MXFP4": 32}


def split_linears(facts: Facts, linears: Iterable[Linear], tp: int | None) -> Iterator[Finding]:
    """``parallel.group-split`` of shared experts and dense MLPs, whose down projection ranks cut as experts'.

    Attention is cut by heads, whose width is a number of blocks.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for linear in linears if tp is not None else ():
        group = _BLOCKS.get(linear.format)
        weight = linear.tensors.get("weight", linear.tensors.get("weight_packed"))
        if group is None or weight is None or len(weight.shape) != 2 or linear.name.rpartition(".")[2] not in _DOWN:
            continue
        width = weight.shape[1] * (1 if weight.dtype == "F4" else 2)
        # Blocks that do not fill the width are a finding by themselves; the experts' own width is told of.
        if width % group == 0 and width % (tp * group) and (width, group) != (expert_width(facts), block_size(facts)):
            found.setdefault((width, group), []).append(weight.name)
    for (width, group), names in found.items():
        layers = layers_of(names, facts.view)
        fill = {
            "width": width, "ranks": tp, "rank": _shown(Fraction(width, tp)), "group": group,
            "works": ", ".join(str(size) for size in SIZES if width % (size * group) == 0),
            "drafts": bool(layers) and all(map(facts.view.is_draft, layers)),
        }  # fmt: skip
        yield make("parallel.group-split", "backend", text="parallel.group-split.linear", tensors=names, fill=fill)


def _shown(number: Fraction) -> str:
    return f"{float(number):.2f}".rstrip("0").rstrip(".")


def is_about_ranks(item: Finding) -> bool:
    """One of `parallel_findings`."""
    return item.code.startswith("parallel.") or item.text == f"loader.note.{EXPERT_PARALLEL}"


class WidthRank(msgspec.Struct, frozen=True):
    """What one tensor-parallel rank gets of every expert.

    Attributes
    ----------
    begin, end
        Its part of the intermediate axis, in values; fractions where the width does not divide.
    rows
        Of gate and up together, as the fused GEMM sees them (of up alone where there is no gate).
    cut
        Blocks of the down projection that lie on one of its borders, so that half of one is another rank's.
    missed
        Of `ALIGNMENTS`, those that ``rows`` is no multiple of, as ``parallel.alignment`` minds it (`_minded`).
    filled
        Those that it is a multiple of.
    """

    rank: int
    begin: float
    end: float
    rows: float
    cut: int
    missed: tuple[int, ...]
    filled: tuple[int, ...]


class ExpertRank(msgspec.Struct, frozen=True):
    """The experts of one expert-parallel rank, of every layer.

    Attributes
    ----------
    begin, end
        Experts ``begin`` to ``end - 1``; none where they are equal.
    unusable
        Activation scales of theirs that are missing or hold no usable number, over all audited layers.
    """

    rank: int
    begin: int
    end: int
    unusable: int


def width_ranks(facts: Facts, tp: int | None) -> tuple[WidthRank, ...]:
    """The intermediate axis over ``tp`` ranks: in equal parts, or gpt-oss's in whole blocks, the last ranks fewer.

    One rank where nobody asked (None).  Empty where the width or the block is not known.
    """
    width, group = expert_width(facts), block_size(facts)
    if width is None or group is None:
        return ()
    halves = 2 if is_gated(facts) else 1
    ranks = tp or 1
    refused = _refused_by_cutlass(facts, width, ranks)
    share = Fraction(width, ranks)
    if _by_whole_blocks(facts, width):
        share = Fraction(-(-width // (ranks * group)) * group)
    out = []
    for rank in range(ranks):
        borders = min(rank * share, Fraction(width)), min((rank + 1) * share, Fraction(width))
        rows = halves * (borders[1] - borders[0])
        cut = sum(border % group != 0 for border in borders)
        filled = tuple(size for size in ALIGNMENTS if rows % size == 0)
        missed = _minded(rows, halves, asked=tp is not None or refused)
        out.append(WidthRank(rank, float(borders[0]), float(borders[1]), float(rows), cut, missed, filled))
    return tuple(out)


def _minded(rows: int | Fraction, halves: int, *, asked: bool) -> tuple[int, ...]:
    """Of `ALIGNMENTS`, those that a rank's rows miss, where that is worth a word.

    Where nobody asked (``asked`` has every width that a kernel is known to refuse), one below a tile is a toy's, and
    one that misses 128 alone is padded.

    >>> _minded(32, 2, asked=False), _minded(160, 2, asked=False), _minded(192, 2, asked=False)
    ((), (64, 128), ())
    >>> _minded(32, 2, asked=True), _minded(192, 2, asked=True)
    ((64, 128), (128,))
    """
    missed = tuple(size for size in ALIGNMENTS if rows % size)
    return missed if asked or (rows >= halves * ALIGNMENTS[0] and ALIGNMENTS[0] in missed) else ()


def expert_ranks(facts: Facts, ep: int) -> tuple[ExpertRank, ...]:
    """The experts over ``ep`` ranks as vLLM places them by default: in order, the first with one more.

    Source: vLLM, ``determine_expert_map`` with the placement strategy ``linear``.
    """
    share, more = divmod(facts.view.experts, ep)
    bad = np.zeros(facts.view.experts, np.int64)
    for table in facts.scalars("input_scale"):
        due = np.isin(table.state, (MISSING, NOT_A_SCALAR)) | ((table.state == OK) & (table.classes() > 0))
        bad[: len(due)] += due
    out, begin = [], 0
    for rank in range(ep):
        end = begin + share + (rank < more)
        out.append(ExpertRank(rank, begin, end, int(bad[begin:end].sum())))
        begin = end
    return tuple(out)


def block_size(facts: Facts) -> int | None:
    """Values that share a block scale: of the first layer whose experts have a scheme."""
    dialects = [facts.view.dialects[layer] for layer in facts.view.moe_layers]
    return next((dialect.group for dialect in dialects if dialect), None)


def is_gated(facts: Facts) -> bool:
    """Do the model's own experts have a gate, so that two matrices make up the first GEMM?"""
    kinds = {kind for layer in facts.view.moe_layers for kind in facts.view.projections_in[layer]}
    return kinds != {"up", "down"}


def _with_activations(facts: Facts) -> bool:
    """NVFP4 experts whose activations are quantised too."""
    return "NVFP4" in facts.view.activation_blocks and any("input_scale" in facts.needs[at] for at in facts.layers)


def _widths(facts: Facts, width: int, group: int, tp: int | None) -> Iterator[Finding]:
    ranks = tp or 1
    works = [size for size in SIZES if width % (size * group) == 0]
    fill: dict[str, object] = {
        "width": width,
        "ranks": ranks,
        "group": group,
        "works": ", ".join(map(str, works)),
    }
    if width % (ranks * group):
        rank = _shown(Fraction(width, ranks))
        if _by_whole_blocks(facts, width):
            fill |= {"blocks": width // group, "share": -(-width // (ranks * group))}
            yield make("parallel.alignment", "info", text="parallel.alignment.blocks", count=1, fill=fill)
        elif tp is not None:
            yield _split(facts, works, {**fill, "rank": rank})
        return
    halves = 2 if is_gated(facts) else 1
    rank_width = width // ranks
    rows = halves * rank_width
    refused = _refused_by_cutlass(facts, width, ranks)
    missed = _minded(rows, halves, asked=tp is not None or refused)
    if missed:
        works = [size for size in works if halves * width // size % 128 == 0]
        fill |= {
            "rows": rows, "rank": rank_width, "missed": ", ".join(map(str, missed)),
            "works": ", ".join(map(str, works)),
        }  # fmt: skip
        text = "parallel.alignment.refused" if refused else f"parallel.alignment{'' if halves == 2 else '.up'}"
        # Where the width is no multiple, no part of it is.
        text += "" if works else ".none"
        # Without ranks asked for nobody has said that it will be served like this.
        severity = "backend" if refused and tp is not None else "info"
        yield make("parallel.alignment", severity, text=text, count=1, fill=fill)


def _other_blocks(facts: Facts, width: int, group: int, tp: int) -> Iterator[Finding]:
    """``parallel.group-split`` of layers with wider blocks than the first one's, such as MXFP4 drafts beside NVFP4."""
    groups = {layer: own.group for layer in facts.layers if (own := facts.view.dialects[layer]) is not None}
    for other in sorted({own for own in groups.values() if own != group and width % (tp * own)}):
        layers = [layer for layer, own in groups.items() if own == other]
        works = ", ".join(str(size) for size in SIZES if width % (size * other) == 0)
        fill = {
            "width": width, "ranks": tp, "rank": width // tp, "group": other, "works": works, **layer_list(layers),
            "drafts": all(map(facts.view.is_draft, layers)),
        }  # fmt: skip
        text = f"parallel.group-split.layers{'' if works else '.none'}"
        yield make("parallel.group-split", "backend", text=text, count=1, fill=fill)


def _by_whole_blocks(facts: Facts, width: int) -> bool:
    """Does no rank cut a block, because the loader gives out whole ones, the last ranks fewer or none?

    Source: vLLM, ``model_executor/models/gpt_oss.py``: ``cdiv(intermediate_size // 32, tp_size)`` blocks a rank.  Its
    width of 2880 is 90 blocks, which four or eight ranks, a usual deployment, do not divide.
    """
    own = next((found for at in facts.view.moe_layers if (found := facts.view.dialects[at])), None)
    return own is not None and own.id == GPT_OSS.id and width % own.group == 0


def _split(facts: Facts, works: list[int], fill: Mapping[str, Any]) -> Finding:
    """A border inside a block; of the sizes that cut none, some are not for every kernel."""
    for_all = [size for size in works if not _refused_by_cutlass(facts, fill["width"], size)]
    more = [size for size in works if size not in for_all]
    ending = "" if for_all and not more else ".more" if for_all else ".elsewhere" if more else ".none"
    found = {**fill, "works": ", ".join(map(str, for_all)), "more": ", ".join(map(str, more))}
    return make("parallel.group-split", "backend", text=f"parallel.group-split{ending}", count=1, fill=found)


def _refused_by_cutlass(facts: Facts, width: int, ranks: int) -> bool:
    """Does vLLM's CUTLASS kernel refuse a rank's fused gate and up?"""
    return not is_narrow(2 * width) and 2 * width // ranks % CUTLASS != 0 and minds_rows(facts)


def is_narrow(rows: int) -> bool:
    """Have all of gate's and up's rows room in one tile?  Such experts are toys, which nobody has tried there."""
    return rows <= CUTLASS


def minds_rows(facts: Facts) -> bool:
    """Does vLLM's CUTLASS kernel look at how many rows gate and up have together?"""
    return is_gated(facts) and _with_activations(facts)


def odd_rows(facts: Facts) -> int | None:
    """All rows of gate and up, where that kernel takes no such number, nor any share of it that ranks get."""
    width = expert_width(facts)
    return 2 * width if width is not None and 2 * width % CUTLASS and minds_rows(facts) else None


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
