"""Biases that one layer lacks and all others have beside the same weights: ``scale.missing`` of the role ``bias``.

As for a projection of attention (`sisters`), nothing but the other layers says that they belong there.  And biases of
another shape than their weight: ``weight.shape`` of the same role.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import prod

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.module_names import is_draft, layer_of, layers_of, without_numbers
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.shapes import text_part
from nvfp4viz.audit.texts import layer_list
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, TensorEntry, printable

_BIAS = re.compile(r"^(.*?(?:^|\.)(?:layers|blocks|h))\.(\d{1,6})\.(.+[._]bias)$")
# How the weight is called that a bias belongs to, behind the bias's own name or that of the module that holds it.
_WEIGHTS = ("", ".weight", ".weight_packed", ".qweight", "_blocks")

_LAYER = re.compile(r"^(.*?(?:^|\.)(?:layers|blocks|h))\.\d{1,6}\.(.+)$")

Shape = tuple[int, ...]
Place = tuple[str, str]
"""The list of layers that a bias is in, and its name inside a layer."""


def bias_findings(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """One finding for all that are lost."""
    if checkpoint.blind_files or checkpoint.source.only is not None:
        return
    config = checkpoint.config or {}
    # Layers searched one by one need not be alike.
    if any(holder.get("block_configs") for holder in (config, text_part(config))):
        return
    names = _in_order(checkpoint, _lost(checkpoint, view))
    if names:
        yield make(
            "scale.missing", "error", text="scale.missing.bias", role="bias", layer=layer_of(names, view),
            tensors=names, fill={"numbers": layers_of(names, view)},
        )  # fmt: skip


def bias_shape_findings(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """One number for each row of the weight; of experts in one tensor also for each of them.

    For files whose weights have the right sizes: others lack the measure.
    """
    found: dict[bool, dict[str, TensorEntry]] = {False: {}, True: {}}
    for name in checkpoint.tensors:
        if not name.endswith("bias") or name[-5:-4] not in ("_", "."):
            continue
        stem, together = name[:-5], name[-5] == "_"
        ends = ("_blocks", "") if together else (".weight", ".weight_packed")
        weight = next((entry for end in ends if (entry := checkpoint.tensors.get(stem + end)) is not None), None)
        if weight is not None and not _fits(checkpoint.tensors[name].shape, weight, together):
            found[together][name] = weight
    for together, every in found.items():
        # Where it fits the weight of another layer, its own weight is the odd one, and has its finding.
        namesakes = _namesakes(checkpoint, every.values())
        weights = {
            name: weight for name, weight in every.items()
            if not any(
                _fits(checkpoint.tensors[name].shape, other, together)
                for other in namesakes[without_numbers(weight.name)]
            )
        }  # fmt: skip
        if weights:
            names = list(weights)
            first = weights[names[0]]
            fill = {
                "found": str(list(checkpoint.tensors[names[0]].shape)), "expected": str(list(first.shape)),
                "weight": printable(first.name), **layer_list(layers_of(names, view)),
            }  # fmt: skip
            text = f"weight.shape.bias{'.experts' * together}"
            layer = layer_of(names, view)
            yield make("weight.shape", "error", text=text, role="bias", layer=layer, tensors=names, fill=fill)


def _namesakes(checkpoint: Checkpoint, weights: Iterable[TensorEntry]) -> dict[str, list[TensorEntry]]:
    """The same tensors of all layers, by their name without numbers."""
    out: dict[str, list[TensorEntry]] = {without_numbers(weight.name): [] for weight in weights}
    for name in checkpoint.tensors if out else ():
        bare = without_numbers(name)
        if bare in out:
            out[bare].append(checkpoint.tensors[name])
    return out


def _fits(bias: Shape, weight: TensorEntry, together: bool) -> bool:
    """Has a bias the length of one of its weight's axes?  Some exporters turn matrices round, but not blocks.

    >>> blocks = TensorEntry("w", "U8", (8, 64, 3, 16), "f", 0, 24576)
    >>> [_fits((8, length), blocks, True) for length in (64, 96, 48)], _fits((7, 64), blocks, True)
    ([True, False, False], False)
    >>> [_fits((length,), TensorEntry("w", "U8", (64, 48), "f", 0, 3072), False) for length in (64, 96, 48)]
    [True, True, False]
    """
    first, *axes = weight.shape if together else (0, *weight.shape)
    if weight.dtype in ("U8", "I8") and len(axes) > 1:
        # Two values a byte; gpt-oss's blocks of 32 have an axis of their own.
        axes = [axes[0], 2 * axes[1]] if len(axes) == 2 else axes[:1]
    return (not together or bias[:1] == (first,)) and prod(bias[together:]) in axes


def _lost(checkpoint: Checkpoint, view: CanonicalView) -> dict[str, Place]:
    """Names that one layer lacks, where at least two have them and that one has the weight."""
    having: dict[Place, set[int]] = {}
    for name in (*checkpoint.tensors, *checkpoint.unreadable):
        match = _BIAS.match(name) if name.endswith("bias") else None
        if match is not None and not is_draft(name, view.layers):
            having.setdefault((match[1], match[3]), set()).add(int(match[2]))
    last: dict[str, int] = {}
    for (family, _), own in having.items():
        last[family] = max(last.get(family, view.layers or 0), *own)
    lost: dict[str, Place] = {}
    for (family, rest), own in having.items():
        bare = [
            number for number in range(last[family] + 1)
            if number not in own and not is_draft(f"{family}.{number}.{rest}", view.layers)
            and _has_weight(checkpoint, f"{family}.{number}.{rest}")
        ]  # fmt: skip
        # Without a configuration this may be a piece of a model, cut anywhere.
        whole = checkpoint.config is not None or min(own) < max(bare, default=0) < max(own)
        if len(bare) == 1 and len(own) >= 2 and whole:
            lost[f"{family}.{bare[0]}.{rest}"] = (family, rest)
    return lost


def _has_weight(checkpoint: Checkpoint, bias: str) -> bool:
    """Is there what this bias is added to?"""
    stems = dict.fromkeys((bias.removesuffix("bias")[:-1], bias.rpartition(".")[0]))
    names = (f"{stem}{end}" for stem in stems for end in _WEIGHTS)
    return any(name in held for name in names for held in (checkpoint.tensors, checkpoint.unreadable))


def _in_order(checkpoint: Checkpoint, lost: dict[str, Place]) -> list[str]:
    """Those whose module has nothing in its layer that it has in no other: DeepSeek V4's hash tables have no bias."""
    holders = {name.rpartition(".")[0]: place for name, place in lost.items()}
    if not holders:
        return []
    usual: dict[Place, set[str]] = {}
    own: dict[str, set[str]] = {}
    for name in (*checkpoint.tensors, *checkpoint.unreadable):
        holder, _, last = name.rpartition(".")
        match = _LAYER.match(holder)
        if holder in holders:
            own.setdefault(holder, set()).add(last)
        elif match is not None:
            usual.setdefault((match[1], match[2]), set()).add(last)
    out = []
    for name, (family, rest) in lost.items():
        holder = name.rpartition(".")[0]
        if own.get(holder, set()) <= usual.get((family, rest.rpartition(".")[0]), set()):
            out.append(name)
    return out
