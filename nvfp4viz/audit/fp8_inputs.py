"""Activation scales that FP8 modules and experts should have and do not: static FP8.

vLLM gives a layer room for one where the configuration says that activations are quantised with stored scales, and
fills that room before it loads: with the most negative float32 for an ordinary layer (``modelopt.py``, commit 00155cd:
``ModelOptFp8LinearMethod``; fused siblings take their largest), with 1.0 for an expert (``ModelOptFp8MoEMethod``; all
experts of a layer take their largest).  Nothing tells whether the file has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.fp8 import Said, said_of
from nvfp4viz.audit.fp8_numbers import INPUTS
from nvfp4viz.audit.linears import FP8, Linear
from nvfp4viz.audit.module_names import layer_of, layers_of, without_numbers
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.unread import may_lie_unread
from nvfp4viz.checkpoint import CanonicalView, Checkpoint

ROLE = "input_scale"


def fp8_input_findings(
    checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear], siblings: Sequence[tuple[str, ...]]
) -> Iterator[Finding]:
    """``scale.missing`` of ``input_scale`` in FP8.

    ``backend`` where the configuration promises stored scales, as ModelOpt's plain FP8 does; ``info`` where one of its
    groups contradicts that label and no module has one, and where only a namesake in another layer speaks for it.
    """
    if checkpoint.blind_files:
        return
    said = said_of(checkpoint, view)
    yield from _of_linears(checkpoint, view, said, [linear for linear in linears if linear.format == "FP8"], siblings)
    yield from _of_experts(checkpoint, view, said)


def _of_linears(
    checkpoint: Checkpoint,
    view: CanonicalView,
    said: Said,
    linears: Sequence[Linear],
    siblings: Sequence[tuple[str, ...]],
) -> Iterator[Finding]:
    having = {linear.name for linear in linears if _has(checkpoint, linear)}
    kinds = set(map(without_numbers, having))
    lost: dict[str, list[str]] = {}
    for linear in linears:
        if linear.name in having or "weight" not in linear.tensors:
            continue
        sure = _is_sure(said.inputs(linear.name), bool(having), without_numbers(linear.name) in kinds)
        if sure is not None and not may_lie_unread(checkpoint, linear.name, ROLE):
            lost.setdefault(sure, []).append(linear.name)
    for sure, modules in lost.items():
        names = [f"{module}.{ROLE}" for module in modules]
        bare = [module for module in modules if not _sisters(module, siblings) & having]
        yield make(
            "scale.missing", "backend" if sure == "stored" else "info", text=f"scale.missing.linear.fp8{_ENDS[sure]}",
            role=ROLE, layer=layer_of(names, view), tensors=names,
            fill={"numbers": layers_of(names, view), "open": sorted(bare[:1])},
        )  # fmt: skip


# Why one is due, and how the text's key ends.
_ENDS = {"stored": "", "label": ".label", "namesake": ".namesake"}


def _is_sure(word: str, some: bool, namesake: bool) -> str | None:
    """What speaks for a stored scale (a key of `_ENDS`), or None: the word of the configuration and of the others."""
    if word in ("stored", "none"):
        return "stored" if word == "stored" else None
    if word == "label":
        return "stored" if some else "label"
    return "namesake" if namesake else None


def _has(checkpoint: Checkpoint, linear: Linear) -> bool:
    return ROLE in linear.tensors or any(f"{linear.name}.{name}" in checkpoint.tensors for name in INPUTS[1:])


def _sisters(module: str, siblings: Sequence[tuple[str, ...]]) -> set[str]:
    """Modules that a server fuses with this one."""
    parent, _, last = module.rpartition(".")
    return {f"{parent}.{other}" for family in siblings if last in family for other in family if other != last}


def _of_experts(checkpoint: Checkpoint, view: CanonicalView, said: Said) -> Iterator[Finding]:
    """The same for the experts of layers that are FP8 throughout: one finding a layer and projection."""
    layers = {layer for layer, dialect in view.dialects.items() if dialect is None}
    having: set[str] = set()
    bare: dict[tuple[int, str], dict[int, str]] = {}
    for (layer, expert, projection), module in view.modules.items():
        if layer not in layers or module.state != "other":
            continue
        tensors = {**module.tensors, **module.extras}
        weight = tensors.get("weight", tensors.get(""))
        if weight is None or weight.dtype not in FP8 or len(weight.shape) < 2:
            continue
        if any(name in tensors for name in INPUTS):
            having.add(projection)
        else:
            name = f"{module.name}{'_' if '' in tensors else '.'}{ROLE}"
            bare.setdefault((layer, projection), {})[expert] = name
    for (layer, projection), names in bare.items():
        module = view.module(layer, next(iter(names)), projection)
        sure = _is_sure(said.inputs(view.blocks[layer], module.name), bool(having), projection in having)
        lost = {
            expert: name for expert, name in names.items()
            if not may_lie_unread(checkpoint, name[: -len(ROLE) - 1], ROLE)
        }  # fmt: skip
        if sure is not None and lost:
            yield make(
                "scale.missing", "backend" if sure == "stored" else "info",
                text=f"scale.missing.experts.fp8{_ENDS[sure]}", role=ROLE, layer=layer, projection=projection,
                experts=None if module.whole else tuple(sorted(lost)),
                tensors=dict.fromkeys(lost[expert] for expert in sorted(lost)),
            )  # fmt: skip
