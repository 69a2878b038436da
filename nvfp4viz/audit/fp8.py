"""Scales of FP8 weights: attention, shared experts and dense layers around four-bit experts, and FP8 experts.

A server allocates the scales by the configuration: `weight_block_size` of DeepSeek's method, `strategy` of
compressed-tensors, or what an allow-list calls the module.  Where none of them speaks of it, any shape that some FP8
scheme has is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.linears import FP8, Linear, fp8_scale, layer_of
from nvfp4viz.audit.report import Finding
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, QuantConfig, TensorEntry
from nvfp4viz.checkpoint.module_rules import Grain

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
    """``block-scale.group`` of FP8 modules: scales in a shape that their blocks do not have.

    One finding a cause for ordinary modules, one a layer, projection and cause for routed experts; of those also
    ``scale.missing``, where others have one.
    """
    said = _Said(checkpoint.quant_config, four_bit=any(view.dialects.values()))
    groups: dict[_Misfit, list[str]] = {}
    for linear in linears:
        weight, scale = linear.tensors.get("weight"), fp8_scale(linear)
        if linear.format == "FP8" and weight is not None and scale is not None and len(weight.shape) == 2:
            misfit = _misfit(said, weight, scale, linear.name)
            if misfit is not None:
                groups.setdefault(misfit, []).append(scale.name)
    for misfit, names in groups.items():
        yield make(
            "block-scale.group", "error", text=f"block-scale.group.fp8{misfit.kind}", role="weight_scale",
            layer=layer_of(names, view), tensors=names, fill=misfit._asdict(),
        )  # fmt: skip
    yield from _of_experts(checkpoint, view, said)


def _of_experts(checkpoint: Checkpoint, view: CanonicalView, said: _Said) -> Iterator[Finding]:
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
        suffix = next((suffix for suffix in _SCALES if suffix in tensors), None)
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
            known[key] = _misfit(said, weight, scale, view.blocks[layer], module.name)
        misfit = known[key]
        if misfit is not None:
            found.setdefault((layer, projection, misfit), {})[scale.name] = None if module.whole else expert
    for (layer, projection, misfit), at in found.items():
        ids = sorted(expert for expert in at.values() if expert is not None)
        yield make(
            "block-scale.group", "error", text=f"block-scale.group.fp8{misfit.kind}.experts", role="weight_scale",
            layer=layer, projection=projection, experts=tuple(ids) or None, tensors=at, fill=misfit._asdict(),
        )  # fmt: skip
    # FP8 without scales is a format too (values cast as they are), so only other experts tell.
    for (layer, projection), starts in bare.items() if not checkpoint.blind_files else ():
        names = {expert: f"{start}{kinds.get(projection)}" for expert, start in starts.items()}
        lost = {expert: name for expert, name in names.items() if name not in checkpoint.unreadable}
        if projection in kinds and lost:
            yield make(
                "scale.missing", "error", text="scale.missing.weight", role="weight_scale", layer=layer,
                projection=projection, experts=tuple(sorted(lost)), tensors=[lost[expert] for expert in sorted(lost)],
            )  # fmt: skip


def has_fp8_experts(view: CanonicalView) -> bool:
    """Is any routed expert's weight in FP8?"""
    weights = (module.tensors.get("weight", module.extras.get("")) for module in view.modules.values())
    return any(entry is not None and entry.dtype in FP8 for entry in weights)


# What an FP8 expert's scale is called; fused ones lose what stands before the parameter's name.
_SCALES = ("weight_scale", "scale", "weight_scale_inv", "scale_inv", "weight_quantizer.scale")


def _misfit(said: _Said, weight: TensorEntry, scale: TensorEntry, *modules: str) -> _Misfit | None:
    """What is wrong with a module's scales (given at several depths, its own name last), or None."""
    shape = weight.shape
    if 0 in shape:
        return None
    grains, scales = said.grains(*modules), _flat(scale.shape)
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


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """ModelOpt leaves the axes inside a block: (out blocks, 1, in blocks, 1).

    >>> _flat((2, 1, 3, 1)), _flat((2, 3))
    ((2, 3), (2, 3))
    """
    return shape[0::2] if len(shape) == 4 and shape[1::2] == (1, 1) else shape


# Where nothing says which: one number, one a row, or one a block of some scheme.
_ANY: tuple[Grain, ...] = ((None, None), (1, None), *_BLOCKS)


# ModelOpt's algorithms, as vLLM builds them (``modelopt.py``); plain FP8 is also what others call theirs.
_NAMED: dict[str, tuple[Grain, ...]] = {
    "MXFP8": ((1, 32),), "FP8_PB_WO": ((128, 128),), "FP8_PER_CHANNEL_PER_TOKEN": ((1, None),),
}  # fmt: skip


class _Said(NamedTuple):
    """What the configuration says of FP8 modules.

    Attributes
    ----------
    four_bit
        Some experts are in four bits: then a file-wide FP8 algorithm is a wrong label, which has a finding of its own.
    """

    quant: QuantConfig
    four_bit: bool

    def grains(self, *modules: str) -> tuple[Grain, ...]:
        """The blocks that the configuration gives a module (given at several depths); none where it says none."""
        quant = self.quant
        listed = quant.listed_algo(*modules)
        if listed is not None:
            return _NAMED.get(listed, ())
        # What a list leaves alone may be FP8 of another origin.
        if quant.used is None or quant.lists(*modules):
            return ()
        block = next((section.weight_block for section in quant.sections if section.weight_block), None)
        if block is not None:
            return (block,)
        if not self.four_bit and quant.algo in _NAMED:
            return _NAMED[quant.algo]
        grains = quant.eight_bit_grains(*modules)
        # Of several groups that mean it any may be asked, also one that cuts it in a way that is not known here.
        return tuple(grain for grain in grains if grain is not None) if None not in grains else ()


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
