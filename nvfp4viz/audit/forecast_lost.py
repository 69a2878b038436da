"""What shards that are missing do on backends that load without them: what lay in them decides, where an index tells.

vLLM and SGLang were seen to load without a shard (vllm#34859, sglang#32279).  Its slots stay as the memory was, as if
each of its tensors were missing by itself: experts' activation scales are forecast with the others that are missing
(`Facts.never_written`), a kernel that reads none of them does without, and lost weights leave garbage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nvfp4viz.audit.backends import Family
from nvfp4viz.audit.facts import Facts
from nvfp4viz.audit.forecast_scales import Effect
from nvfp4viz.audit.module_names import layers_of
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.unread import NAMES
from nvfp4viz.checkpoint import printable
from nvfp4viz.checkpoint.dialects import parse_expert_name, parse_whole

SILENT = ("vllm", "sglang")
# Of numbers that nobody wrote, one may be as it should be; of whole weights none is.
_NUMBERS, _WEIGHTS = ("degraded", "nan", "safe", "zero"), ("degraded", "nan", "zero")
# By these an ordinary module's activation scale is known for NVFP4's.
_FOUR_BIT = ("weight_scale_2", "weight_global_scale")


@dataclass(slots=True)
class LostShard:
    """What lay in one: layers and slots by kind.

    Attributes
    ----------
    layers
        By ``"weights"`` (whatever is no activation scale), ``"experts"`` (their activation scales), ``"linear"`` and
        ``"linear.fp8"`` (those of ordinary modules); empty where nothing tells.
    slots
        How many tensors, by the same.
    """

    layers: dict[str, set[int]] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)


def lost_shards(facts: Facts, findings: Iterable[Finding]) -> dict[str, LostShard]:
    """Every shard that is reported missing, by its name in the finding."""
    lost = {str(item.params["file"]): LostShard() for item in findings if item.code == "container.missing-shard"}
    if not lost:
        return lost
    shown = {file: printable(file) for file in set(facts.checkpoint.unreadable.values())}
    layer_of = {block: (part, layer) for part in (facts, *facts.towers) for layer, block in part.view.blocks.items()}
    ordinary: dict[tuple[str, str], list[str]] = {}
    for name, file in facts.checkpoint.unreadable.items():
        shard = lost.get(shown[file])
        if shard is None:
            continue
        parsed = parse_expert_name(name) or parse_whole(name)
        part, layer = (None, None) if parsed is None else layer_of.get(parsed.block, (None, None))
        dialect = None if part is None or layer is None else part.view.dialects.get(layer)
        if parsed is None or part is None or layer is None or dialect is None:
            ordinary.setdefault((shown[file], _kind(facts, name)), []).append(name)
        else:
            kind = "experts" if dialect.role_of(parsed.suffix) == "input_scale" else "weights"
            shard.layers.setdefault(kind, set()).update(() if part.tower else (layer,))
            shard.slots[kind] = shard.slots.get(kind, 0) + 1
    for (file, kind), names in ordinary.items():
        lost[file].layers.setdefault(kind, set()).update(layers_of(names, facts.view))
        lost[file].slots[kind] = lost[file].slots.get(kind, 0) + len(names)
    return lost


def _kind(facts: Facts, name: str) -> str:
    """Of a tensor that is no known expert's."""
    module, _, suffix = name.rpartition(".")
    if suffix not in NAMES["input_scale"]:
        return "weights"
    known = (facts.checkpoint.tensors, facts.checkpoint.unreadable)
    four_bit = any(f"{module}.{end}" in names for end in _FOUR_BIT for names in known)
    return f"linear{'' if four_bit else '.fp8'}"


def of_lost(
    family: Family, findings: Iterable[Finding], lost: dict[str, LostShard], *, weight_only: bool
) -> Iterator[Effect]:
    """What the lack of a shard does; of experts' activation scales alone `forecast_scales.of_activations` says it.

    Parameters
    ----------
    weight_only
        The server takes the checkpoint for weight-only and reads no activation scale of a four-bit layer.
    """
    ignores = weight_only or family.reach == "none"
    for item in findings:
        if item.code != "container.missing-shard":
            continue
        file = str(item.params["file"])
        shard = lost[file]
        fill = {"file": file, "slots": sum(shard.slots.values())}
        everywhere = set().union(*shard.layers.values())
        if family.engine not in SILENT:
            yield Effect("load-error", (), "model", set(), "why.file", fill)
        elif "weights" in shard.slots:
            yield Effect("undefined", _WEIGHTS, "model", everywhere, "why.missing-shard.silent", fill)
        elif not shard.slots:
            # It may have held anything.
            possible = tuple(sorted((*_NUMBERS, *(("ignored",) if ignores else ()))))
            yield Effect("undefined", possible, "model", set(), "why.missing-shard.unknown", fill)
        else:
            # Every token passes an ordinary layer; which kernel it gets is another matter than the experts'.
            read = [kind for kind in ("linear", "linear.fp8") if kind in shard.slots]
            read = [kind for kind in read if not (weight_only and kind == "linear")]
            if read:
                layers = set().union(*(shard.layers[kind] for kind in read))
                perhaps = family.reach == "none" or "linear.fp8" in read
                possible = tuple(sorted((*_NUMBERS, *(("ignored",) if perhaps else ()))))
                scope = "layer" if layers else "model"
                yield Effect("undefined", possible, scope, layers, "why.missing-shard.inputs", fill)
            else:
                yield Effect("ignored", (), "none", everywhere, "why.missing-shard.ignored", fill)
