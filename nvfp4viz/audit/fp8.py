"""Block scales of FP8 modules: attention, shared experts and dense layers around four-bit experts.

A server allocates the scales by the configuration: ``weight_block_size`` of DeepSeek's method, or what an allow-list
calls the module.  Where neither speaks of it, any shape that some FP8 scheme has is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.linears import Linear, fp8_scale, layer_of
from nvfp4viz.audit.report import Finding
from nvfp4viz.checkpoint import QuantConfig, TensorEntry

# Rows × values that share a scale, where nothing says which: MXFP8's, and DeepSeek's with its relatives.
_BLOCKS = ((1, 16), (1, 32), (1, 64), (1, 128), (16, 16), (32, 32), (64, 64), (128, 128), (256, 256))
# Several modules in one, each of which may have begun a block of its own.
_FUSED = ("qkv", "gate_up", "w13", "in_proj", "kv_a", "wqa", "fused")


def fp8_findings(quant: QuantConfig, linears: Iterable[Linear]) -> Iterator[Finding]:
    """``block-scale.group`` of FP8 modules: scales in a shape that their blocks do not have; one finding a cause."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for linear in linears:
        weight, scale = linear.tensors.get("weight"), fp8_scale(linear)
        if linear.format != "FP8" or weight is None or scale is None or len(weight.shape) != 2 or 0 in weight.shape:
            continue
        block = _said(quant, linear.name)
        if not _fits(weight, scale, block, linear.name):
            due = "" if block is None else str([-(-n // b) for n, b in zip(weight.shape, block, strict=True)])
            key = (str(list(weight.shape)), str(list(scale.shape)), f"{block[0]} × {block[1]}" if block else "", due)
            groups.setdefault(key, []).append(scale.name)
    for (shape, found, size, due), names in groups.items():
        yield make(
            "block-scale.group", "error", text="block-scale.group.fp8" if size else "block-scale.group.fp8.any",
            role="weight_scale", layer=layer_of(names), tensors=names,
            fill={"weight": shape, "shape": found, "block": size, "expected": due},
        )  # fmt: skip


def _said(quant: QuantConfig, module: str) -> tuple[int, int] | None:
    """The block that the configuration gives an FP8 module; None where it does not say one."""
    listed = quant.listed_algo(module)
    if listed is not None:
        return (1, 32) if listed == "MXFP8" else None
    # What a list leaves alone may be FP8 of another origin.
    if quant.used is None or any(section.lists(module) for section in quant.sections):
        return None
    return next((section.weight_block for section in quant.sections if section.weight_block), None)


def _fits(weight: TensorEntry, scale: TensorEntry, block: tuple[int, int] | None, name: str) -> bool:
    rows, columns = weight.shape
    numbers = prod(scale.shape)
    if block is not None:
        return _is_grid(scale, rows, columns, block, name) or (
            numbers == 1 and rows <= block[0] and columns <= block[1]
        )
    # One number, or one for each part of a fused module, or one a row.
    if numbers == 1 or (len(scale.shape) == 1 and numbers <= 3) or scale.shape in ((rows,), (rows, 1)):
        return True
    return any(_is_grid(scale, rows, columns, one, name) for one in _BLOCKS)


def _is_grid(scale: TensorEntry, rows: int, columns: int, block: tuple[int, int], name: str) -> bool:
    """One scale a block, the last ones of a row and of a column for what is left."""
    if len(scale.shape) != 2 or scale.shape[1] != -(-columns // block[1]):
        return False
    least = -(-rows // block[0])
    fused = any(part in name.rpartition(".")[2] for part in _FUSED)
    # Each of up to six parts may end inside a block.
    return least <= scale.shape[0] <= least + 6 * fused
