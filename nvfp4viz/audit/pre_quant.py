"""AWQ's ``pre_quant_scale``: a vector that the input is multiplied by before the quantised matrix (NVFP4_AWQ).

On some experts of a projection only, of another length than the input, with numbers that nobody can multiply by, or all
ones (Model-Optimizer#1142, #1354).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

import numpy as np
import numpy.typing as npt

from nvfp4viz.audit.facts import NOT_NEEDED, Facts
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.linears import Linear
from nvfp4viz.audit.module_names import layer_of, layers_of
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.scales import block_width
from nvfp4viz.audit.shapes import matrix_size
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, LocalSource, MemorySource, TensorEntry
from nvfp4viz.checkpoint.dtypes import DTYPES
from nvfp4viz.checkpoint.modules import FLOATS

NAME = "pre_quant_scale"
# In a large model these vectors are gigabytes.  Up to this size all are fetched; beyond it the first numbers of each,
# from files that are here, and the whole of those that begin with ones.
LIMIT = 4 * 1024 * 1024
_PROBE = 16


def pre_quant_findings(facts: Facts) -> Iterator[Finding]:
    """``scheme.pre-quant-scale`` of routed experts, and ``audit.partial`` where not every number was looked at."""
    experts = _of_experts(facts)
    yield from _lacking(facts, experts)
    odd, fitting = _by_shape(facts, experts)
    yield from odd
    found = _Numbers(facts.checkpoint, {e.name: e for have in fitting.values() for e in have.values()})
    yield from found.unread()
    for (layer, projection), have in sorted(fitting.items()):
        groups: dict[str, list[int]] = {}
        for expert, entry in have.items():
            groups.setdefault(found.kind(entry.name), []).append(expert)
        for kind, ids in sorted(groups.items()):
            if kind:
                text, severity = ("ones", "warn") if kind == "ones" else ("values", "error")
                yield _finding(facts, layer, projection, ids, have, text, severity, classes=kind)


def pre_quant_of_linears(checkpoint: Checkpoint, view: CanonicalView, linears: Iterable[Linear]) -> Iterator[Finding]:
    """The same of ordinary modules, which have no peers that could prove one to be missing."""
    fitting: dict[str, TensorEntry] = {}
    groups: dict[tuple[str, str, int], list[str]] = {}
    for linear in linears:
        entry = checkpoint.tensors.get(f"{linear.name}.{NAME}") if linear.format in ("NVFP4", "MXFP4") else None
        if entry is None:
            continue
        weight = linear.tensors.get("weight", linear.tensors.get("weight_packed"))
        width = _width(weight, linear.tensors.get("weight_scale", linear.tensors.get("scale")))
        if _fits(entry, width):
            fitting[entry.name] = entry
        else:
            groups.setdefault(("shape", _shape(entry), width or 0), []).append(entry.name)
    found = _Numbers(checkpoint, fitting)
    yield from found.unread()
    for name in fitting:
        if found.kind(name) not in ("", "ones"):
            groups.setdefault(("values", found.kind(name), 0), []).append(name)
    for (text, what, width), names in groups.items():
        fill = {"shape": what, "classes": what, "width": width, "numbers": layers_of(names, view)}
        yield make(
            "scheme.pre-quant-scale", "error", text=f"scheme.pre-quant-scale.{text}.linear",
            layer=layer_of(names, view), tensors=names, fill=fill,
        )  # fmt: skip


Vectors = dict[tuple[int, str], dict[int, TensorEntry]]


def _of_experts(facts: Facts) -> Vectors:
    """By layer and projection, then by expert."""
    vectors: Vectors = {}
    for (layer, expert, projection), module in facts.view.modules.items():
        entry = module.extras.get(NAME) if module.extras else None
        if entry is not None and layer in facts.needs and module.state == "quantised":
            vectors.setdefault((layer, projection), {})[expert] = entry
    return vectors


def _lacking(facts: Facts, vectors: Vectors) -> Iterator[Finding]:
    """Experts without a vector that the others of their layer and projection have."""
    view = facts.view
    for (layer, projection), have in sorted(vectors.items()):
        states = facts.states["weight", layer, projection]
        ids = [e for e in range(len(states)) if states[e] != NOT_NEEDED]
        lost = {e: f"{view.module(layer, e, projection).name}.{NAME}" for e in ids if e not in have}
        lack = tuple(e for e in lost if lost[e] not in facts.checkpoint.unreadable)
        if lack and not facts.checkpoint.blind_files:
            names = [lost[e] for e in lack]
            yield make(
                "scheme.pre-quant-scale", "error", layer=layer, projection=projection, experts=lack, tensors=names
            )


def _by_shape(facts: Facts, vectors: Vectors) -> tuple[list[Finding], Vectors]:
    """Vectors of another length than the input, and the others."""
    odd, fitting = [], {}
    widths: dict[tuple[int, str, int], int | None] = {}
    for (layer, projection), have in vectors.items():
        for expert in have:
            tensors = facts.view.module(layer, expert, projection).tensors
            widths[layer, projection, expert] = _width(tensors.get("weight"), tensors.get("weight_scale"))
    # A vector that fits a projection's other weights stands beside a weight of another shape, which is said already.
    usual: dict[str, set[int]] = {}
    for (_, projection, _), width in widths.items():
        usual.setdefault(projection, set()).update([] if width is None else [width])
    for (layer, projection), have in sorted(vectors.items()):
        groups: dict[tuple[str, int], list[int]] = {}
        for expert, entry in have.items():
            width = widths[layer, projection, expert]
            if _fits(entry, width) or any(_fits(entry, other) for other in usual[projection]):
                fitting.setdefault((layer, projection), {})[expert] = entry
            else:
                groups.setdefault((_shape(entry), width or 0), []).append(expert)
        for (shape, width), ids in groups.items():
            odd.append(_finding(facts, layer, projection, ids, have, "shape", "error", shape=shape, width=width))
    return odd, fitting


def _finding(
    facts: Facts, layer: int, projection: str, ids: Iterable[int], have: Mapping[int, TensorEntry], text: str,
    severity: str, **fill: object,
) -> Finding:  # fmt: skip
    experts = tuple(sorted(ids))
    names = tuple(dict.fromkeys(have[expert].name for expert in experts))
    shared = len(names) == 1 and len(experts) > 1
    return make(
        "scheme.pre-quant-scale", severity, text=f"scheme.pre-quant-scale.{text}", layer=layer, projection=projection,
        experts=None if shared else experts, tensors=names, fill=fill,
    )  # fmt: skip


def _width(weight: TensorEntry | None, scale: TensorEntry | None) -> int | None:
    """Values of a module's input; None where another finding says that its blocks are wrong."""
    if weight is None or scale is None or block_width(weight, scale) not in (16, 32):
        return None
    return matrix_size(weight, scale)[1]


def _fits(entry: TensorEntry, width: int | None) -> bool:
    """Is it one floating-point number a value of the input, or a row of them for each expert?"""
    if entry.dtype not in FLOATS or not entry.shape or not prod(entry.shape):
        return False
    return width is None or entry.shape[-1] == width


def _shape(entry: TensorEntry) -> str:
    return f"{entry.dtype}{list(entry.shape)}"


class _Numbers:
    """What vectors hold, as far as they were read."""

    def __init__(self, checkpoint: Checkpoint, entries: Mapping[str, TensorEntry]) -> None:
        self._kinds: dict[str, str] = {}
        self._unread = list(entries)
        probe = sum(entry.nbytes for entry in entries.values()) > LIMIT
        if probe and not isinstance(checkpoint.source, LocalSource | MemorySource):
            return
        self._unread = []
        for name, entry in entries.items():
            data = checkpoint.try_first(name, _PROBE if probe else None)
            if probe and data is not None and _kind(data, entry) == "ones":
                data = checkpoint.try_first(name)
            if data is not None:
                self._kinds[name] = kind = _kind(data, entry)
                if len(data) < entry.nbytes and not kind:
                    self._unread.append(name)

    def kind(self, name: str) -> str:
        """Classes of what a vector holds, ``"ones"`` if it is nothing else, and empty where there is nothing to say."""
        return self._kinds.get(name, "")

    def unread(self) -> Iterator[Finding]:
        """A note on those that were not read to the end."""
        if self._unread:
            yield make("audit.partial", "info", text="audit.partial.pre-quant", tensors=self._unread)


def _kind(data: bytes, entry: TensorEntry) -> str:
    numbers = np.frombuffer(data, DTYPES[entry.dtype].view).astype(np.float32)
    return "ones" if (numbers == 1).all() else _classes(numbers)


def _classes(numbers: npt.NDArray[np.float32]) -> str:
    """What no input can be multiplied by; a negative number has its counterpart in the weights.

    >>> _classes(np.float32([0.5, 0, np.nan])), _classes(np.float32([0.5, -2]))
    ('nan, zero', '')
    """
    found = {"inf": np.isinf(numbers).any(), "nan": np.isnan(numbers).any(), "zero": (numbers == 0).any()}
    return ", ".join(name for name, there in found.items() if there)
