"""Exclude lists against the names under which servers build modules: fused ones, and parts of longer names.

A checkpoint stores ``gate_proj`` and ``up_proj``; a server builds ``gate_up_proj`` of them and asks the list about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.labels import TOGETHER
from nvfp4viz.audit.linears import Linear
from nvfp4viz.audit.report import Finding
from nvfp4viz.checkpoint import CanonicalView, QuantConfig, SourceConfig
from nvfp4viz.checkpoint.module_rules import bare
from nvfp4viz.checkpoint.problems import printable

# What vLLM calls modules that it builds as one.
_FUSED = {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "q_proj": "qkv_proj", "k_proj": "qkv_proj",
    "v_proj": "qkv_proj", "q_a_proj": "fused_qkv_a_proj", "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz", "in_proj_b": "in_proj_ba", "in_proj_a": "in_proj_ba",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fused:
    """Packed modules that one entry of a list excludes by the name of what servers build of them.

    Attributes
    ----------
    built
        The fused modules.
    engines
        Who reads the entry so.
    certain
        Whatever the model's code; else vLLM may rewrite the entry first (`apply_vllm_mapper`).
    """

    pattern: str
    modules: tuple[str, ...]
    built: tuple[str, ...]
    engines: tuple[str, ...]
    certain: bool


def part_of_a_name(
    quant: QuantConfig, view: CanonicalView, linears: Sequence[Linear], fused: Iterable[Fused]
) -> Iterator[Finding]:
    """``model.layers.1`` is a part of ``model.layers.10``, and vLLM takes every name that has it for excluded.

    So is ``mlp.gate`` of ``mlp.gate_up_proj``.  What our own reading of the list excludes has another finding, and so
    has what only a ``fused`` name contains.
    """
    plain = quant.used.plain_patterns() if quant.used else ()
    if not plain:
        return
    blocks = {view.blocks[layer]: layer for layer in view.moe_layers if view.dialects[layer] is not None}
    names = {block: block for block in blocks}
    names |= {name: _built(name) for name in _packed(linears)}
    told = {one.pattern: {*one.modules} for one in fused}
    for pattern in plain:
        short, other = bare(pattern), told.get(pattern, ())
        hit = [
            name for name, built in names.items()
            if (pattern in built or short in bare(built)) and name not in other and not quant.is_excluded(name)
        ]  # fmt: skip
        if hit:
            layers = sorted(blocks[name] for name in hit if name in blocks)
            fill = {"pattern": printable(pattern, 100), "numbers": layers, "engines": ("vllm",)}
            text = "config.excluded-but-quantised.part"
            yield make("config.excluded-but-quantised", "backend", text=text, tensors=hit, fill=fill)


def fused_exclusions(quant: QuantConfig, linears: Sequence[Linear]) -> list[Fused]:
    """Entries that mean a fused module, and not each of its parts by their own names.

    ModelOpt's are looked for anywhere in the fused name, or match it as a wildcard (vLLM 0.33.0,
    ``modelopt.py: is_layer_excluded``); compressed-tensors' and Quark's are the whole of it (``should_ignore_layer``).
    """
    used, parts = quant.used, dict[str, list[str]]()
    if used is None or not used.exclude:
        return []
    for name in _packed(linears):
        for built in _all_built(used, name):
            parts.setdefault(built, []).append(name)
    # Where every part is named, too, the list says so of ordinary modules.
    parts = {built: own for built, own in parts.items() if not all(map(quant.is_excluded, own))}
    found: list[Fused] = []
    for pattern in dict.fromkeys(used.exclude) if parts else ():
        hit = {built: own for built, own in parts.items() if _means(used, pattern, built, own)}
        if hit:
            modules = tuple(name for own in hit.values() for name in own)
            certain = all(_means(used, pattern, built, own, rewritten=True) for built, own in hit.items())
            engines = ("vllm", "sglang") if (used.method or "").startswith("compressed-tensors") else ("vllm",)
            found.append(Fused(pattern, modules, tuple(hit), engines, certain))
    return found


def fused_findings(found: Iterable[Fused]) -> Iterator[Finding]:
    """``config.excluded-but-quantised`` of each entry."""
    for one in found:
        fill = {
            "pattern": printable(one.pattern, 100), "built": printable(one.built[0], 200), "engines": one.engines,
            "certain": one.certain,
        }  # fmt: skip
        text = "config.excluded-but-quantised.fused"
        yield make("config.excluded-but-quantised", "backend", text=text, tensors=one.modules, fill=fill)


def _means(used: SourceConfig, pattern: str, built: str, parts: Iterable[str], *, rewritten: bool = False) -> bool:
    """Does an entry exclude a fused module by a name that none of its parts has?

    Parameters
    ----------
    rewritten
        As vLLM rewrites a last star for models whose modules it renames: ``path*`` is the module and what is below it.
    """
    if _by_parts(used):
        return not pattern.startswith("re:") and bare(pattern) == bare(built)
    if pattern.startswith("re:"):
        return False
    if pattern in used.plain_patterns():
        own = any(pattern in name or bare(pattern) in bare(name) for name in parts)
        return (pattern in built or bare(pattern) in bare(built)) and not own
    forms = [pattern]
    if rewritten and len(pattern) > 1 and pattern.endswith("*") and not pattern.endswith(".*"):
        forms = [pattern[:-1], f"{pattern[:-1]}.*"]
    return any(fnmatchcase(built, form) or fnmatchcase(bare(built), bare(form)) for form in forms)


def _by_parts(section: SourceConfig) -> bool:
    """Are expressions held against the parts, and the whole name alone against the fused module?"""
    return (section.method or "").startswith(("compressed-tensors", "quark"))


def _packed(linears: Iterable[Linear]) -> Iterator[str]:
    return (linear.name for linear in linears if linear.format in ("NVFP4", "MXFP4"))


def _built(name: str) -> str:
    parent, _, last = name.rpartition(".")
    return f"{parent}.{_FUSED.get(last, last)}"


def _all_built(section: SourceConfig, name: str) -> list[str]:
    """The fused modules that this one may be a part of, under the names that a section's readers give them."""
    parent, _, last = name.rpartition(".")
    if _by_parts(section):
        return [f"{parent}.{built}" for built in TOGETHER.get(last, ())]
    return [f"{parent}.{_FUSED[last]}"] if last in _FUSED else []


def excluded_as_built(quant: QuantConfig, name: str) -> bool:
    """Does a list name the module that servers build of this one and its neighbours, such as ``qkv_proj``?

    compressed-tensors' and Quark's readers hold expressions against the parts, and the whole name alone against the
    fused module (vLLM 0.33.0, ``should_ignore_layer``).
    """
    parent, _, last = name.rpartition(".")
    for section in quant.sections:
        whole = {bare(item) for item in section.exclude or ()}
        for built in TOGETHER.get(last, ()):
            fused = f"{parent}.{built}"
            if bare(fused) in whole if _by_parts(section) else section.lists(fused):
                return True
    return False
