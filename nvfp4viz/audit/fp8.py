"""Scales of FP8 weights: attention, shared experts and dense layers around four-bit experts, and FP8 experts.

A server allocates the scales by the configuration: `weight_block_size` of DeepSeek's method, `strategy` of
compressed-tensors, or what an allow-list calls the module.  Where none of them speaks of it, any shape that some FP8
scheme has is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import numpy as np

from nvfp4viz.audit.facts import Facts, pruned_layers
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.fp8_numbers import SCALES, fp8_scales, is_read
from nvfp4viz.audit.linears import FP8, Linear, fp8_scale, missing_finding
from nvfp4viz.audit.module_names import is_of_attention, is_quantised_by_all, layer_of, without_numbers
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.schemes import absent_or_gap
from nvfp4viz.audit.unread import may_lie_unread
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, QuantConfig, TensorEntry
from nvfp4viz.checkpoint.dialects import PROJECTIONS, parse_expert_name
from nvfp4viz.checkpoint.module_rules import Grain, Groups, groups_of

# Rows × values that share a scale, where nothing says which: MXFP8's, and DeepSeek's with its relatives.
_BLOCKS = ((1, 16), (1, 32), (1, 64), (1, 128), (16, 16), (32, 32), (64, 64), (128, 128), (256, 256))
# Several modules in one, each of which may have begun a block of its own.
_FUSED = ("qkv", "gate_up", "w13", "in_proj", "kv_a", "wqa", "fused")


class _Misfit(NamedTuple):
    """What is stored, and what is due; ``kind`` ends the text's key."""

    weight: str
    shape: str
    kind: str
    block: str
    expected: str


def fp8_findings(checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear]) -> Iterator[Finding]:
    """Scales of FP8 modules: ``block-scale.group`` of a shape that their blocks do not have, and ``scale.missing``.

    One finding a cause for ordinary modules, one a layer, projection and cause for routed experts.
    """
    said = said_of(checkpoint, view)
    linears = tuple(linears)
    groups: dict[_Misfit, list[str]] = {}
    for linear in linears:
        weight, scale = linear.tensors.get("weight"), fp8_scale(linear)
        if linear.format == "FP8" and weight is not None and scale is not None and len(weight.shape) == 2:
            wrong = misfit(said, weight, scale, linear.name)
            if wrong is not None:
                groups.setdefault(wrong, []).append(scale.name)
    for wrong, names in groups.items():
        yield make(
            "block-scale.group", "error", text=f"block-scale.group.fp8{wrong.kind}", role="weight_scale",
            layer=layer_of(names, view), tensors=names, fill=wrong._asdict(),
        )  # fmt: skip
    yield from _missing(checkpoint, view, said, [linear for linear in linears if linear.format == "FP8"])
    yield from _of_experts(checkpoint, view, said)
    # Beside four-bit experts the FP8 ones are counted with them.
    if not view.complete:
        yield from _absent(checkpoint, view)


def _missing(checkpoint: Checkpoint, view: CanonicalView, said: Said, linears: Iterable[Linear]) -> Iterator[Finding]:
    """FP8 modules without the scale that the configuration promises, or their namesakes in other layers have.

    FP8 without scales is a format too (values cast as they are), so that nothing else tells.
    """
    if checkpoint.blind_files:
        return
    kinds: dict[str, str] = {}
    bare: list[Linear] = []
    for linear in linears:
        scale = fp8_scale(linear)
        if scale is not None:
            kinds.setdefault(without_numbers(linear.name), scale.name.rpartition(".")[2])
        elif "weight" in linear.tensors:
            bare.append(linear)
    lost = []
    for linear in bare:
        if may_lie_unread(checkpoint, linear.name, "weight_scale"):
            continue
        kind = kinds.get(without_numbers(linear.name))
        if kind is not None or said.promises(linear.name):
            lost.append(f"{linear.name}.{kind or next(iter(kinds.values()), said.suffix)}")
    if lost:
        yield missing_finding("weight_scale", lost, view)


def _of_experts(checkpoint: Checkpoint, view: CanonicalView, said: Said) -> Iterator[Finding]:
    """The same for the experts of layers that are FP8 throughout; one among others has a finding of its own."""
    layers = {layer for layer, dialect in view.dialects.items() if dialect is None}
    if not layers:
        return
    found: dict[tuple[int, str, _Misfit], dict[str, int | None]] = {}
    known: dict[tuple[int, str, str, tuple[int, ...], tuple[int, ...]], _Misfit | None] = {}
    bare: dict[tuple[int, str], dict[int, str]] = {}
    kinds: dict[str, str] = {}
    for (layer, expert, projection), module in view.modules.items():
        if layer not in layers or module.state != "other":
            continue
        tensors = {**module.tensors, **module.extras}
        weight = tensors.get("weight", tensors.get(""))
        suffix = next((suffix for suffix in SCALES if suffix in tensors), None)
        if weight is None or weight.dtype not in FP8 or len(weight.shape) < 2:
            continue
        if suffix is None:
            bare.setdefault((layer, projection), {})[expert] = f"{module.name}{'_' if '' in tensors else '.'}"
            continue
        kinds.setdefault(projection, suffix)
        scale = tensors[suffix]
        # Lists speak of layers and of kinds of projections, hardly of single experts.
        key = (layer, projection, weight.dtype, weight.shape, scale.shape)
        if key not in known:
            known[key] = misfit(said, weight, scale, view.blocks[layer], module.name)
        wrong = known[key]
        if wrong is not None:
            found.setdefault((layer, projection, wrong), {})[scale.name] = None if module.whole else expert
    for (layer, projection, wrong), at in found.items():
        ids = sorted(expert for expert in at.values() if expert is not None)
        yield make(
            "block-scale.group", "error", text=f"block-scale.group.fp8{wrong.kind}.experts", role="weight_scale",
            layer=layer, projection=projection, experts=tuple(ids) or None, tensors=at, fill=wrong._asdict(),
        )  # fmt: skip
    # FP8 without scales is a format too (values cast as they are): others tell, or the configuration.
    for (layer, projection), starts in bare.items() if not checkpoint.blind_files else ():
        suffix = kinds.get(projection) or next(iter(kinds.values()), None)
        if projection not in kinds:
            module = view.module(layer, next(iter(starts)), projection).name
            if not said.grains(view.blocks[layer], module):
                continue
        lost = {
            expert: f"{start}{suffix or said.suffix}"
            for expert, start in starts.items()
            if not may_lie_unread(checkpoint, start[:-1], "weight_scale")
        }
        if lost:
            whole = view.module(layer, next(iter(lost)), projection).whole
            yield make(
                "scale.missing", "error", text=f"scale.missing.weight{'.shared' * whole}", role="weight_scale",
                layer=layer, projection=projection, experts=None if whole else tuple(sorted(lost)),
                tensors=dict.fromkeys(lost[expert] for expert in sorted(lost)),
            )  # fmt: skip


def _absent(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """``expert.gap`` and ``expert.absent`` of FP8 experts, each in tensors of its own."""
    if checkpoint.blind_files:
        return
    facts = Facts(checkpoint, view, pruned=pruned_layers(checkpoint, view))
    layer_of_block = {block: layer for layer, block in view.blocks.items()}
    stored: dict[tuple[int, str], set[int]] = {}
    others: set[int] = set()
    for (layer, expert, kind), module in view.modules.items():
        stored.setdefault((layer, kind), set()).add(expert)
        weight = module.tensors.get("weight")
        if module.whole or weight is None or weight.dtype not in FP8:
            others.add(layer)
    for name in checkpoint.unreadable:
        parsed = parse_expert_name(name)
        if parsed is not None and parsed.block in layer_of_block and parsed.expert is not None:
            key = (layer_of_block[parsed.block], PROJECTIONS[parsed.projection])
            stored.setdefault(key, set()).add(parsed.expert)
    for layer in view.moe_layers:
        if layer in others:
            continue
        size = view.experts_in[layer]
        kinds = view.projections_in[layer]
        present = {kind: np.isin(np.arange(size), list(stored.get((layer, kind), ()))) for kind in kinds}
        whole = np.logical_or.reduce(list(present.values()))
        yield from absent_or_gap(facts, layer, None, ~whole)
        for kind, mask in present.items():
            yield from absent_or_gap(facts, layer, kind, whole & ~mask)


def partial_text(checkpoint: Checkpoint, view: CanonicalView) -> str | None:
    """The text of ``audit.partial`` where routed experts are in no four-bit format, as far as they can be read.

    In FP8: with scales whose shape is checked, or bare.
    """
    unread = bool(checkpoint.unreadable or checkpoint.blind_files)
    scales = [
        (fp8_scales(module), view.experts_in[layer])
        for (layer, _, _), module in view.modules.items()
        if (weight := module.tensors.get("weight", module.extras.get(""))) is not None and weight.dtype in FP8
    ]
    if not any("weight_scale" in found for found, _ in scales):
        if unread:
            return "audit.partial.fp8" if scales else "audit.partial.format"
        return "audit.partial.fp8.bare" if scales else None
    every = all(is_read(entry, experts) for found, experts in scales for entry in found.values())
    return "audit.partial.fp8.deep" if every else "audit.partial.fp8"


def misfit(said: Said, weight: TensorEntry, scale: TensorEntry, *modules: str) -> _Misfit | None:
    """What is wrong with a module's scales (given at several depths, its own name last), or None."""
    shape = weight.shape
    if 0 in shape:
        return None
    grains, scales = said.grains(*modules), flat(scale.shape)
    fused = any(part in modules[-1].rpartition(".")[2] for part in _FUSED)
    if any(_fits(shape, scales, grain, fused) for grain in grains or _ANY):
        return None
    # A number for each part of a fused module, under whatever name.
    if (fused or not grains) and len(scale.shape) == 1 and scale.shape[0] <= 3 and (None, None) in (grains or _ANY):
        return None
    stored = (str(list(shape)), str(list(scale.shape)))
    if not grains:
        return _Misfit(*stored, ".any", "", "")
    rows, columns = grains[0]
    if columns is None:
        kind, due = (".tensor", [1]) if rows is None else (".channel", [*shape[:-1], 1])
        return _Misfit(*stored, kind, "", str(due))
    due = [*shape[:-2], -(-shape[-2] // (rows or shape[-2])), -(-shape[-1] // columns)]
    return _Misfit(*stored, "", f"{rows} × {columns}", str(due))


def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """ModelOpt leaves the axes inside a block: (out blocks, 1, in blocks, 1).

    >>> flat((2, 1, 3, 1)), flat((2, 3))
    ((2, 3), (2, 3))
    """
    return shape[0::2] if len(shape) == 4 and shape[1::2] == (1, 1) else shape


# Where nothing says which: one number, one a row, or one a block of some scheme.
_ANY: tuple[Grain, ...] = ((None, None), (1, None), *_BLOCKS)


# ModelOpt's algorithms, as vLLM builds them (``modelopt.py``).
_NAMED: dict[str, tuple[Grain, ...]] = {
    "FP8": ((None, None),), "MXFP8": ((1, 32),), "FP8_PB_WO": ((128, 128),), "FP8_PER_CHANNEL_PER_TOKEN": ((1, None),),
}  # fmt: skip


class Said(NamedTuple):
    """What the configuration says of FP8 modules.

    Attributes
    ----------
    four_bit
        Some experts are in four bits: then a file-wide FP8 algorithm is a wrong label, which has a finding of its own.
    groups
        ``config_groups``, which ModelOpt writes beside the algorithms that it names.
    """

    quant: QuantConfig
    four_bit: bool
    groups: Groups

    @property
    def block(self) -> Grain | None:
        """`weight_block_size`."""
        return next((section.weight_block for section in self.quant.sections if section.weight_block), None)

    @property
    def suffix(self) -> str:
        """What a scale is called where none is there to tell: DeepSeek's method has a name of its own for it."""
        method = self.quant.used.method if self.quant.used is not None else None
        return "weight_scale_inv" if method == "fp8" and self.block is not None else "weight_scale"

    def promises(self, module: str) -> bool:
        """Does the configuration say that an ordinary module has a scale?

        By name, or by a group that means it.  What is said of the whole file holds for the layers that every server
        quantises: towers, heads and what a method does not speak of are FP8 for reasons of their own.
        """
        quant = self.quant
        listed = quant.listed_algo(module)
        if listed is not None:
            return listed in _NAMED
        if quant.used is None or quant.lists(module):
            return False
        if quant.eight_bit(module):
            return True
        # DeepSeek's method, whose blocks every FP8 module of attention has, has names of its own for them.
        due = is_quantised_by_all(module) or (self.block is not None and is_of_attention(module))
        return due and bool(self.grains(module))

    def inputs(self, *modules: str) -> str:
        """What it says of a module's activations (given at several depths).

        ``"stored"``: scales of theirs are in the file, which ModelOpt's plain FP8 means too; ``"label"``: it means
        so, and a group says the opposite; ``"none"``: there are none; ``""``: it says nothing.
        """
        quant = self.quant
        listed = quant.listed_algo(*modules)
        if listed is not None:
            return "none" if listed in _NAMED and listed != "FP8" else self._plain(listed, modules)
        if quant.used is None or quant.lists(*modules):
            return ""
        said = {each.static for each in quant.eight_bit(*modules)}
        if said:
            return {True: "stored", False: "none"}.get(said.pop(), "") if len(said) == 1 else ""
        # What is said of the whole file, of the layers that every server quantises.
        if "experts" not in modules[-1].split(".") and not is_quantised_by_all(modules[-1]):
            return ""
        if quant.used.method == "fp8":
            static = quant.used.activation_scheme == "static" and self.block is None
            return "stored" if static else "none"
        if not self.four_bit and quant.used.explicit and quant.algo in _NAMED:
            return self._plain(quant.algo, modules) or "none"
        return ""

    def _plain(self, algo: str, modules: Iterable[str]) -> str:
        """Plain FP8, of ModelOpt's and not of DeepSeek's method, which quantises activations as they come."""
        if algo != "FP8" or self.block is not None:
            return ""
        return "label" if any(each.static is False for each in self.groups.eight_bit(modules)) else "stored"

    def grains(self, *modules: str) -> tuple[Grain, ...]:
        """The blocks that the configuration gives a module (given at several depths); none where it says none."""
        quant = self.quant
        listed = quant.listed_algo(*modules)
        if listed is not None:
            # Plain FP8 is one number a tensor to ModelOpt, and whatever it has to DeepSeek's method.
            return _NAMED.get(listed, ()) if listed != "FP8" or self.block is None else ()
        # What a list leaves alone may be FP8 of another origin.
        if quant.used is None or quant.lists(*modules):
            return ()
        if self.block is not None:
            return (self.block,)
        if not self.four_bit and quant.used.explicit and quant.algo in _NAMED:
            return _NAMED[quant.algo]
        grains = tuple(each.grain for each in quant.eight_bit(*modules))
        # Of several groups that mean it any may be asked, also one that cuts it in a way that is not known here.
        return tuple(grain for grain in grains if grain is not None) if None not in grains else ()


def said_of(checkpoint: Checkpoint, view: CanonicalView) -> Said:
    """What a checkpoint's configuration says of FP8 modules."""
    quant = checkpoint.quant_config
    groups = groups_of(quant.used.config_groups if quant.used is not None else None)
    return Said(quant, any(view.dialects.values()), groups)


def _fits(weight: tuple[int, ...], scale: tuple[int, ...], grain: Grain, fused: bool) -> bool:
    """Has a weight of this shape scales of that one?  Experts along a first axis have scales of their own each."""
    *experts, rows, columns = weight
    tall, wide = grain
    if wide is None:
        if tall is None:
            return prod(scale) in (1, prod(experts))
        shapes = [(*experts, rows), (*experts, rows, 1)]
        # Fused experts are stored transposed now and then; a row is a column then.
        shapes += [(*experts, columns), (*experts, 1, columns)] if experts else []
        return scale in shapes
    tall = tall or rows
    if prod(scale) == prod(experts) and rows <= tall and columns <= wide:
        return True
    cuts = [(tall, wide), (wide, tall)] if experts else [(tall, wide)]
    return any(_is_grid(weight, scale, cut, fused) for cut in cuts)


def _is_grid(weight: tuple[int, ...], scale: tuple[int, ...], cut: tuple[int, int], fused: bool) -> bool:
    """One scale a block, the last ones of a row and of a column for what is left."""
    if len(scale) != len(weight) or scale[:-2] != weight[:-2] or scale[-1] != -(-weight[-1] // cut[1]):
        return False
    least = -(-weight[-2] // cut[0])
    # Each of up to six parts may end inside a block.
    return least <= scale[-2] <= least + 6 * fused
