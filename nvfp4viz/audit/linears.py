"""Ordinary linear layers: attention, dense and shared experts, heads.  What routed experts have, once a module.

A module's format follows from types and suffixes, as for experts; the configuration decides only whether activation
scales are due.  Findings are grouped over layers: one a code, role and cause.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nvfp4viz.audit.facts import CLAIMS, Facts, is_scalar, median_of
from nvfp4viz.audit.fills import divisor_of, fills_of_modules
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.fineness import is_coarse
from nvfp4viz.audit.module_names import MATRICES, layer_of, layers_of
from nvfp4viz.audit.namesakes import namesake_findings, unset_findings
from nvfp4viz.audit.report import Finding, json_value
from nvfp4viz.audit.scales import block_fault, block_width, half_findings, json_number, severity_of
from nvfp4viz.audit.siblings import apart_in_linears, times
from nvfp4viz.audit.texts import in_full
from nvfp4viz.audit.unread import may_lie_unread
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, TensorEntry
from nvfp4viz.checkpoint.dialects import COMPRESSED_TENSORS, MODELOPT, PACKED, PROJECTIONS, QUARK_NVFP4, Dialect
from nvfp4viz.checkpoint.dialects.per_expert import E8M0, ROLES
from nvfp4viz.checkpoint.dtypes import SCALE_BYTES
from nvfp4viz.checkpoint.modules import FLOATS
from nvfp4viz.checkpoint.numbers import CLASSES, FLT_MIN, classify, close

# Modules that servers fuse into one, with one second-level scale: the default of `run_audit`'s ``siblings``.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"), ("to_q", "to_k", "to_v"), ("gate_proj", "up_proj"), ("w1", "w3"),
)  # fmt: skip
SUFFIXES = frozenset({
    "weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "input_scale",
    "input_scale_2", "input_global_scale", "scale", "weight_scale_inv",
})  # fmt: skip
FP8 = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class Linear:
    """One ordinary module.

    Attributes
    ----------
    format
        ``"NVFP4"``, ``"MXFP4"``, ``"FP8"``, ``"plain"`` (a BF16, F16 or F32 matrix) or ``"other"``.
    dialect
        How its NVFP4 tensors are named; None for other formats.
    tensors
        By suffix.
    """

    name: str
    format: str
    dialect: Dialect | None
    tensors: dict[str, TensorEntry]

    def tensor(self, role: str) -> TensorEntry | None:
        """Its tensor of a role (of an FP8 module, its activation scale)."""
        return self.tensors.get((self.dialect or MODELOPT).suffixes[role])


def collect_linears(checkpoint: Checkpoint, view: CanonicalView) -> tuple[Linear, ...]:
    """Every module outside the routed experts that holds a weight or a scale."""
    whole = {module.name for module in view.modules.values() if module.whole}
    found: dict[str, dict[str, TensorEntry]] = {}
    tensors = checkpoint.tensors
    # Of drafts alone the model's own experts may lie in a file that was not given.
    experts = bool(view.moe_layers or (view.blocks and (checkpoint.blind_files or checkpoint.unreadable)))
    for name in tensors:
        if experts and ".experts." in name:
            continue
        module, _, suffix = name.rpartition(".")
        if suffix in SUFFIXES and module not in whole:
            found.setdefault(module, {})[suffix] = tensors[name]
    used = checkpoint.quant_config.used
    quark = used is not None and used.method == "quark"
    return tuple(_linear(name, parts, quark) for name, parts in found.items())


def _linear(name: str, tensors: dict[str, TensorEntry], quark: bool) -> Linear:
    weight, scale = tensors.get("weight"), tensors.get("weight_scale")
    dtype = weight.dtype if weight else ""
    kind = scale.dtype if scale else ""
    if "weight_global_scale" in tensors or ("weight_packed" in tensors and kind == "F8_E4M3"):
        return Linear(name, "NVFP4", COMPRESSED_TENSORS, tensors)
    if "weight_scale_2" in tensors or (dtype in PACKED and kind == "F8_E4M3"):
        return Linear(name, "NVFP4", QUARK_NVFP4 if quark or "input_scale_2" in tensors else MODELOPT, tensors)
    if dtype in FP8:
        return Linear(name, "FP8", None, tensors)
    block = tensors.get("scale", scale)
    if dtype in PACKED and block is not None and block.dtype in E8M0:
        return Linear(name, "MXFP4", None, tensors)
    if weight is not None and dtype in FLOATS and len(weight.shape) == 2:
        return Linear(name, "plain", None, tensors)
    return Linear(name, "other", None, tensors)


def linear_findings(
    checkpoint: Checkpoint,
    facts: Facts,
    linears: Iterable[Linear],
    siblings: Sequence[tuple[str, ...]] = SIBLINGS,
    *,
    weight_only: bool = False,
) -> Iterator[Finding]:
    """``scale.*`` and ``block-scale.group`` of ordinary modules; ``weight_only``: as `forecast_linears.of_linears`."""
    linears = tuple(linears)
    four_bit = [linear for linear in linears if linear.format == "NVFP4"]
    yield from _missing(checkpoint, facts, four_bit)
    yield from _shapes(facts.view, four_bit)
    eight = [
        (linear, "input_scale", entry) for linear in linears
        if linear.format == "FP8" and (entry := linear.tensors.get("input_scale")) is not None and not is_scalar(entry)
    ]  # fmt: skip
    yield from _no_numbers(eight, facts.view)
    values = _values(checkpoint, [linear for linear in linears if linear.format in ("NVFP4", "FP8")])
    yield from _classes(checkpoint, facts.view, values, siblings)
    yield from _convention(values)
    yield from _siblings(facts.view, four_bit, values, siblings)
    yield from _inputs_apart(checkpoint, facts.view, values, siblings, weight_only)
    yield from _filled(checkpoint, facts, values, siblings, weight_only)
    yield from unset_findings(facts, values, siblings)
    yield from namesake_findings(checkpoint, facts.view, values, siblings, weight_only=weight_only)


Scalar = tuple[Linear, str, str, np.float32, np.float32]


def _values(checkpoint: Checkpoint, linears: list[Linear]) -> list[Scalar]:
    """(module, role, tensor, stored, effective multiplier) of every scalar."""
    wanted: list[tuple[Linear, str, str]] = []
    for linear in linears:
        for role in ("input_scale", "weight_scale_2"):
            entry = linear.tensor(role)
            if entry is None or not is_scalar(entry):
                continue
            # Named weight-only, a module's activation scale is nobody's to read.
            label = checkpoint.quant_config.algo_of(linear.name) if role == "input_scale" else None
            if not (linear.format == "NVFP4" and (label or "").startswith("W4A16")):
                wanted.append((linear, role, entry.name))
        # Of FP8, one number a tensor is such a scalar too; one a row or a block is not read.
        entry = fp8_scale(linear) if linear.format == "FP8" else None
        if entry is not None and is_scalar(entry):
            wanted.append((linear, "weight_scale", entry.name))
    stored = checkpoint.read_scalars([name for _, _, name in wanted], partly=True)
    out: list[Scalar] = []
    with np.errstate(divide="ignore"):
        for linear, role, name in wanted:
            if name not in stored:
                continue
            divisor = linear.dialect is not None and linear.dialect.divisors
            value = np.float32(1) / stored[name] if divisor else stored[name]
            out.append((linear, role, name, stored[name], value))
    return out


# By role, and whether one is in FP8, whose kernel no flag of the experts' names.
_TEXTS = {
    ("input_scale", False): "scale.value.linear.input",
    ("input_scale", True): "scale.value.linear.input.fp8",
}  # fmt: skip


def _classes(
    checkpoint: Checkpoint, view: CanonicalView, values: list[Scalar], siblings: Iterable[tuple[str, ...]]
) -> Iterator[Finding]:
    """Values that no server should use; one finding a class and role, and for activation scales one a format.

    What the forecast asks further (`nvfp4viz.audit.forecast_linears`) is in ``params``: ``numbers`` of the layers,
    ``open`` for the projections (``""`` for none) of those that no fused sibling hides, and ``fp8`` for activation
    scales of FP8 modules.
    """
    if not values:
        return
    kinds = classify(np.array([value for *_, value in values], np.float32)).tolist()
    groups: dict[tuple[str, str, bool], list[Scalar]] = {}
    for scalar, kind in zip(values, kinds, strict=True):
        if kind:
            # Who reads an activation scale depends on the module's format.
            eight = scalar[1] == "input_scale" and scalar[0].format == "FP8"
            groups.setdefault((scalar[1], CLASSES[kind], eight), []).append(scalar)
    largest = _largest(values, kinds, siblings) | _beside_unread(checkpoint, groups.values(), siblings)
    for (role, kind_name, eight), found in sorted(groups.items()):
        names = [name for _, _, name, _, _ in found]
        # A NaN is not below anything.
        bare = [linear for linear, _, name, stored, _ in found if not stored <= largest.get(name, -np.inf)]
        yield make(
            f"scale.{kind_name}", severity_of(role), role=role, layer=layer_of(names, view),
            text=_TEXTS.get((role, eight), "scale.value.linear"),
            tensors=names, value=found[0][3],
            fill={
                "kind": kind_name, "numbers": layers_of(names, view),
                "open": sorted({PROJECTIONS.get(linear.name.rpartition(".")[2], "") for linear in bare}),
                "fp8": eight,
            },
        )  # fmt: skip


def _largest(values: list[Scalar], kinds: list[int], siblings: Iterable[tuple[str, ...]]) -> dict[str, float]:
    """By tensor: the largest usable stored number among the siblings that a server fuses its module with.

    Fused, they get one maximum of what is stored: of activation scales, and of NVFP4's second-level weight scales.
    An FP8 module's own weight scale is multiplied back first.
    """
    families = {last: number for number, family in enumerate(siblings) for last in family}
    fused: dict[tuple[str, str, int], list[tuple[str, np.float32, bool]]] = {}
    for (linear, role, name, stored, _), kind in zip(values, kinds, strict=True):
        parent, _, last = linear.name.rpartition(".")
        if last in families and role != "weight_scale":
            fused.setdefault((parent, role, families[last]), []).append((name, stored, kind == 0))
    out: dict[str, float] = {}
    for members in fused.values():
        usable = [float(stored) for _, stored, good in members if good]
        if usable:
            out |= {name: max(usable) for name, _, good in members if not good}
    return out


def _beside_unread(
    checkpoint: Checkpoint, groups: Iterable[Iterable[Scalar]], siblings: Iterable[tuple[str, ...]]
) -> dict[str, float]:
    """By tensor: the largest number there is, where a sibling's was not read and may hide any but an infinity."""
    families = {last: family for family in siblings for last in family}
    out: dict[str, float] = {}
    for linear, role, name, *_ in (scalar for found in groups for scalar in found):
        parent, _, last = linear.name.rpartition(".")
        beside = families.get(last, ()) if role != "weight_scale" else ()
        suffix = name[len(linear.name) + 1 :]
        others = (f"{parent}.{other}" for other in beside if other != last)
        unknown = (other for other in others if f"{other}.{suffix}" not in checkpoint.tensors)
        if any(may_lie_unread(checkpoint, other, role) for other in unknown):
            out[name] = float(np.finfo(np.float32).max)
    return out


def _missing(checkpoint: Checkpoint, facts: Facts, linears: list[Linear]) -> Iterator[Finding]:
    """Tensors that a four-bit module needs and does not have."""
    stored = any(linear.tensor("input_scale") is not None for linear in linears)
    # Without any activation scale in the file the scheme's own finding says so.
    due = stored or bool(facts.view.activation_blocks) or not facts.view.moe_layers
    groups: dict[tuple[str, str], list[str]] = {}
    for linear in linears:
        assert linear.dialect is not None
        for role in ROLES:
            name = linear.dialect.name(linear.name, role)
            if linear.tensor(role) is not None or may_lie_unread(checkpoint, linear.name, role):
                continue
            if role != "input_scale" or (due and _wants_activations(checkpoint, linear.name, stored)):
                # Of scales of blocks forecasts ask which.
                groups.setdefault((role, linear.dialect.block if role == "weight_scale" else ""), []).append(name)
    for (role, block), names in groups.items():
        yield missing_finding(role, names, facts.view, block)


def missing_finding(role: str, names: Sequence[str], view: CanonicalView, block: str = "") -> Finding:
    """``scale.missing`` of ordinary modules: tensors of one role, and format, under the names that they should have."""
    text = "scale.missing.linear" if role == "input_scale" else "scale.missing.linear.weight"
    return make(
        "scale.missing", severity_of(role), text=text, role=role, layer=layer_of(names, view), tensors=names,
        fill={"numbers": layers_of(names, view), **({"block": block} if block else {})},
    )  # fmt: skip


def stored_beginnings(checkpoint: Checkpoint, beginnings: Collection[str]) -> set[str]:
    """Of these, those with which some tensor's name begins, be it in a part of a file that cannot be read."""
    if not beginnings:
        return set()
    # Sorted, what begins with one of them stands where that would stand itself.
    names = [*sorted((*checkpoint.tensors, *checkpoint.unreadable)), ""]
    return {each for each in beginnings if names[bisect_left(names, each, hi=len(names) - 1)].startswith(each)}


def fp8_scale(linear: Linear) -> TensorEntry | None:
    """An FP8 module's weight scale, under whichever of its three names."""
    found = (linear.tensors.get(suffix) for suffix in ("weight_scale", "scale", "weight_scale_inv"))
    return next((entry for entry in found if entry is not None), None)


def is_weightless(linear: Linear) -> bool:
    """Are its scales stored without anything that they scale?"""
    return (
        linear.format == "other"
        and not {"weight", "weight_packed"} & linear.tensors.keys()
        and bool({"weight_scale", "weight_scale_inv", "scale", "input_scale"} & linear.tensors.keys())
    )


def _wants_activations(checkpoint: Checkpoint, module: str, stored: bool) -> bool:
    """The configuration's word for this module; without one, what its kind stores."""
    quant = checkpoint.quant_config
    label = quant.algo_of(module)
    if label is None:
        return stored and not quant.sections
    return label.startswith(CLAIMS)


def _shapes(view: CanonicalView, linears: list[Linear]) -> Iterator[Finding]:
    """Scalars that are none, and blocks of another width."""
    odd: list[tuple[Linear, str, TensorEntry]] = []
    halves: dict[str, list[str]] = {}
    widths: dict[tuple[str, str], list[str]] = {}
    for linear in linears:
        for role in ("weight_scale_2", "input_scale"):
            entry = linear.tensor(role)
            if entry is not None and not is_scalar(entry):
                odd.append((linear, role, entry))
            elif entry is not None and entry.dtype != "F32":
                halves.setdefault(entry.dtype, []).append(entry.name)
        weight, scale = linear.tensor("weight"), linear.tensor("weight_scale")
        if weight is None or scale is None or weight.dtype not in PACKED:
            continue
        width = block_width(weight, scale)
        if width != 16 or scale.dtype != "F8_E4M3":
            widths.setdefault((f"{scale.dtype}{list(scale.shape)}", *block_fault(weight, scale, 16)), []).append(
                scale.name
            )
    yield from _no_numbers(odd, view)
    yield from half_findings(halves)
    for (shape, text, number), names in widths.items():
        yield make(
            "block-scale.group", "error", text=f"{text}.linear", role="weight_scale", layer=layer_of(names, view),
            tensors=names, fill={"shape": shape, "width": number, "format": "NVFP4", "group": 16},
        )  # fmt: skip


# Modules that are one projection, and never several in one.
_ALONE = MATRICES - {"qkv_proj", "gate_up_proj", "kv_b_proj"}


def _no_numbers(odd: Iterable[tuple[Linear, str, TensorEntry]], view: CanonicalView) -> Iterator[Finding]:
    """``scale.shape`` of scales that are no single number; a fused module may keep one for each of its parts."""
    groups: dict[tuple[str, bool], list[TensorEntry]] = {}
    for linear, role, entry in odd:
        parts = entry.nbytes / SCALE_BYTES.get(entry.dtype, -1)
        several = parts in (2, 3) and linear.name.rpartition(".")[2] not in _ALONE
        groups.setdefault((role, several), []).append(entry)
    for (role, several), entries in groups.items():
        names = [entry.name for entry in entries]
        shapes = sorted({f"{entry.dtype}{list(entry.shape)}" for entry in entries})
        yield make(
            "scale.shape", "info" if several else "error",
            text="scale.shape.several" if several else "scale.shape.linear", role=role, layer=layer_of(names, view),
            tensors=names, fill={"shape": ", ".join(shapes[:3]), "numbers": layers_of(names, view)},
        )  # fmt: skip


def _convention(values: list[Scalar]) -> Iterator[Finding]:
    """Second-level weight scales stored the other way up, judged by the median over all ordinary modules."""
    found = [(linear, name, stored, value) for linear, role, name, stored, value in values if role == "weight_scale_2"]
    usable = [value for *_, value in found if np.isfinite(value) and value > 0]
    if len(usable) < 3 or median_of(usable) <= 1:
        return
    divisors = any(linear.dialect is not None and linear.dialect.divisors for linear, *_ in found)
    text = "scale.convention.linear.divisor" if divisors else "scale.convention.linear"
    shown = json_number(float(median_of([stored for _, _, stored, _ in found])))
    yield make(
        "scale.convention", "error", text=text, role="weight_scale_2", tensors=[name for _, name, *_ in found],
        fill={"median": shown},
    )  # fmt: skip


def _siblings(
    view: CanonicalView, linears: list[Linear], values: list[Scalar], siblings: Iterable[tuple[str, ...]]
) -> Iterator[Finding]:
    """Modules that a server fuses and gives one second-level weight scale."""
    by_parent: dict[str, dict[str, tuple[str, float]]] = {}
    for linear, role, name, stored, value in values:
        if role == "weight_scale_2" and linear.format == "NVFP4" and np.isfinite(value) and value >= FLT_MIN:
            parent, _, last = linear.name.rpartition(".")
            by_parent.setdefault(parent, {})[last] = (name, float(stored))
    for family in siblings:
        names: list[str] = []
        parents = 0
        worst = 1.0
        for members in by_parent.values():
            there = [members[last] for last in family if last in members]
            if len(there) < 2:
                continue
            numbers = np.array([number for _, number in there])
            if close(numbers[:-1], numbers[1:]).all() and close(numbers[:1], numbers[-1:]).all():
                continue
            parents += 1
            worst = max(worst, float(numbers.max() / numbers.min()))
            names += [name for name, _ in there]
        if names:
            fill = {
                "family": "/".join(family), "ratio": in_full(worst), "modules": parents,
                "numbers": layers_of(names, view),
            }  # fmt: skip
            yield make(
                "scale.pair-mismatch", "warn", text="scale.pair-mismatch.linear", role="weight_scale_2",
                layer=layer_of(names, view), tensors=names, count=parents, value=json_number(worst), fill=fill,
            )  # fmt: skip


def _inputs_apart(
    checkpoint: Checkpoint, view: CanonicalView, values: list[Scalar], siblings: Iterable[tuple[str, ...]],
    weight_only: bool,
) -> Iterator[Finding]:  # fmt: skip
    """``scale.outlier`` of modules that a server fuses, which read one input; in one format each."""
    for kind in ("FP8",) if weight_only else ("NVFP4", "FP8"):
        found = {
            linear.name: (name, float(stored), float(value)) for linear, role, name, stored, value in values
            if role == "input_scale" and linear.format == kind
            and f"{linear.name}.pre_quant_scale" not in checkpoint.tensors
            # A 1.0 of four-bit activations was never set, and has its own note (`_filled`).
            and (stored != 1 or _has_eight_bit_inputs(checkpoint, view, linear.format, linear.name))
        }  # fmt: skip
        divided = {linear.name for linear, *_ in values if linear.dialect is not None and linear.dialect.divisors}
        apart = apart_in_linears({module: value for module, (*_, value) in found.items()}, siblings)
        for family, groups in apart.items():
            names = [found[module][0] for modules, _ in groups for module in modules]
            modules, worst = max(groups, key=lambda group: group[1])
            fill = {
                "family": "/".join(family), "ratio": times(worst), "modules": len(groups), "larger": modules[0],
                "high": json_number(found[modules[0]][1]), "low": json_number(found[modules[-1]][1]),
                "numbers": layers_of(names, view), "fp8": kind == "FP8",
            }  # fmt: skip
            yield make(
                "scale.outlier", "warn", role="input_scale", layer=layer_of(names, view),
                text=f"scale.outlier.sibling.linear{'.divisor' if modules[0] in divided else ''}",
                tensors=names, count=len(groups), fill=fill,
            )  # fmt: skip


def _set_apart(modules: Collection[str], others: Collection[str], siblings: Iterable[tuple[str, ...]]) -> str:
    """The first family of fused modules of which only some are among ``modules``; empty where there is none."""
    for family in siblings:
        for module in modules:
            parent, _, last = module.rpartition(".")
            fused = {f"{parent}.{other}" for other in family} & {*others}
            if last in family and fused - {*modules}:
                return "/".join(family)
    return ""


def _has_eight_bit_inputs(checkpoint: Checkpoint, view: CanonicalView, kind: str, module: str) -> bool:
    label = checkpoint.quant_config.algo_of(module) or ""
    return kind == "FP8" or view.scheme == "W4A8" or label.startswith("W4A8")


def _filled(
    checkpoint: Checkpoint, facts: Facts, values: list[Scalar], siblings: Iterable[tuple[str, ...]], weight_only: bool
) -> Iterator[Finding]:  # fmt: skip
    """``scale.filled`` and ``scale.identity`` of activation scales, as of the routed experts' (`fills`).

    ``info`` for the number that is known to be written for routed experts alone.
    """
    usable = {
        (linear.format, linear.name): (name, stored, value) for linear, role, name, stored, value in values
        if role == "input_scale" and value >= FLT_MIN and np.isfinite(value)
    }  # fmt: skip
    # By what the scales divide amax by; a server that reads only weights reads no four-bit module's.
    by_divisor: dict[int, dict[str, tuple[str, np.float32, np.float32]]] = {2688: {}, 448: {}}
    kinds = {}
    for (kind, module), numbers in usable.items():
        eight = _has_eight_bit_inputs(checkpoint, facts.view, kind, module)
        if kind == "FP8" or (kind == "NVFP4" and not weight_only):
            by_divisor[448 if eight else 2688][module] = numbers
            kinds[module] = kind
    read = [table for table in facts.scalars("input_scale") if table.good().any()]
    coarse = not read or any(is_coarse(table, divisor_of(facts, table.layer)) for table in read)
    found: list[tuple[str, list[str], int]] = []
    for over, numbers_of in by_divisor.items():
        scales = {module: value for module, (_, _, value) in numbers_of.items()}
        for origin, modules in fills_of_modules(scales, siblings, coarse=coarse, over=over).items():
            # They hurt other servers.
            for kind in ("NVFP4", "FP8"):
                found.append((f"filled.linear.{origin}", [one for one in modules if kinds[one] == kind], over))
    ones = [module for module, (_, stored, _) in by_divisor[2688].items() if stored == 1]
    if len(ones) < len(by_divisor[2688]):
        found.append(("identity.linear", ones, 2688))
    for text, modules, over in found:
        if not modules:
            continue
        names, stored = zip(*(by_divisor[over][module][:2] for module in modules), strict=True)
        known = text.startswith("filled") and not text.endswith("default-amax")
        fill = {
            "stored": ", ".join(dict.fromkeys(str(json_value(number)) for number in stored[:4])),
            "over": over, "numbers": layers_of(names, facts.view), "fp8": kinds[modules[0]] == "FP8",
            "family": _set_apart(modules, by_divisor[over], siblings),
        }  # fmt: skip
        yield make(
            f"scale.{text.partition('.')[0]}", "warn" if known else "info", text=f"scale.{text}", role="input_scale",
            layer=layer_of(names, facts.view), tensors=names, value=stored[0] if len(set(stored)) == 1 else None,
            fill=fill,
        )  # fmt: skip


def by_format(linears: Iterable[Linear]) -> Mapping[str, list[Linear]]:
    """Modules by format."""
    out: dict[str, list[Linear]] = {}
    for linear in linears:
        out.setdefault(linear.format, []).append(linear)
    return out
