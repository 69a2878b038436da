"""Findings about single slots: tensors that are missing, and values that no server should use.

Experts of one layer, projection, role and code are one finding.  A stored value gets one class; ``scale.filled``,
``scale.identity`` and ``scale.outlier`` exclude each other in that order, and ``scale.pair-mismatch`` explains a
second-level weight scale that is far from its peers because it is far from its partner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from nvfp4viz.audit.backends import FAMILIES
from nvfp4viz.audit.facts import MISSING, NOT_A_SCALAR, OK, SCALARS, Facts, ScaleTable, is_scalar, median_of
from nvfp4viz.audit.fills import fills_of, never_set
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding, json_value
from nvfp4viz.audit.texts import id_list, in_full
from nvfp4viz.checkpoint import TensorEntry
from nvfp4viz.checkpoint.dialects.per_expert import ROLES
from nvfp4viz.checkpoint.dtypes import SCALE_BYTES
from nvfp4viz.checkpoint.numbers import CLASSES, close

Mask = npt.NDArray[np.bool_]

# How far, in powers of two, a value may lie from its peers' median before it is called far: 64 times, and more where
# the peers themselves are spread (8 robust standard deviations).  Measured input scales of experts differ by up to
# about 30 times and second-level weight scales by 10, so a narrower floor would cry wolf.
OUTLIER_FLOOR, OUTLIER_SPREAD = 6.0, 8 * 1.4826


def severity_of(role: str) -> str:
    """A bad activation scale hurts the backends that read it, a bad weight or weight scale hurts all."""
    return "backend" if role == "input_scale" else "error"


def scale_findings(
    facts: Facts, *, activations: bool, rank_holes: Mapping[int, tuple[tuple[int, int], ...]]
) -> Iterator[Finding]:
    """All ``scale.*`` findings of the experts.

    Parameters
    ----------
    activations
        The scheme needs activation scales; else neither their absence nor their values matter.
    rank_holes
        Of `schemes.rank_holes`: experts whose missing activation scales one finding of their layer explains.
    """
    for layer in facts.layers:
        ranks = rank_holes.get(layer, ())
        explained = {expert for first, last in ranks for expert in range(first, last + 1)}
        if ranks:
            place = facts.place(layer, facts.view.projections_in[layer], "input_scale", tuple(sorted(explained)))
            text = "expert.rank-hole" if len(ranks) == 1 else "expert.rank-hole.several"
            yield make(
                "expert.rank-hole", "backend", text=text, role="input_scale", layer=layer, **place,
                fill={"ranks": len(ranks), "size": len(explained) // len(ranks)},
            )  # fmt: skip
        for projection in facts.view.projections_in[layer]:
            for role in ROLES:
                if role != "input_scale":
                    yield from _missing(facts, layer, projection, role, frozenset())
                elif activations:
                    yield from _missing(facts, layer, projection, role, explained)
    fills = {layer: fills_of(facts, layer) for layer in facts.layers} if activations else {}
    for table in facts.tables.values():
        if table.role != "input_scale":
            explained, _ = mismatched_pairs(facts, table.layer)
            paired = table.projection in ("gate", "up") and explained.size
            yield from _values(facts, table, {}, explained if paired else np.zeros(len(table.values), np.bool_))
        elif activations and "input_scale" in facts.needs[table.layer]:
            here = fills.get(table.layer, {}).get(table.projection, {})
            yield from _values(facts, table, here, np.zeros(len(table.values), np.bool_))
    yield from _shapes(facts)


def _missing(facts: Facts, layer: int, projection: str, role: str, explained: AbstractSet[int]) -> Iterator[Finding]:
    lost = np.flatnonzero(facts.states[role, layer, projection] == MISSING).tolist()
    ids = tuple(expert for expert in lost if expert not in explained)
    if ids:
        place = facts.place(layer, (projection,), role, ids)
        text = "scale.missing" if role == "input_scale" else "scale.missing.weight"
        fill = {}
        if place["experts"] is None:
            text += ".shared"
        elif role == "weight_scale_2" and _follows_gate(facts, layer, projection):
            text, fill = "scale.missing.weight.up", {"own": _OWN}
        yield make(
            "scale.missing", severity_of(role), text=text, role=role, layer=layer, projection=projection, **place,
            fill=fill,
        )  # fmt: skip


# Backends that keep up's second-level weight scale apart from gate's.
_OWN = ", ".join(name for name, family in FAMILIES.items() if not family.gate_rules)


def _follows_gate(facts: Facts, layer: int, projection: str) -> bool:
    """Up beside a gate: nearly all servers use gate's second-level weight scale for both."""
    return projection == "up" and "gate" in facts.view.projections_in[layer]


def _values(facts: Facts, table: ScaleTable, fills: dict[str, Mask], explained: Mask) -> Iterator[Finding]:
    """Classes and oddities of one table's values; ``explained`` ones have their finding already."""
    classes = table.classes()
    # Calibration mends an activation scale, and not every backend reads it; a weight's scale is the exporter's.
    of_weight = ".weight" if table.role != "input_scale" else ""
    for number, name in enumerate(CLASSES[1:], start=1):
        inverted = facts.view.divisors_in(table.layer) and name in ("zero", "inf", "subnormal")
        text = f"scale.{name}{'.divisor' if inverted else ''}{of_weight}"
        # Which divisor is zero needs no words: the value that is stored stands there.
        up = bool(of_weight) and _follows_gate(facts, table.layer, table.projection)
        text = "scale.value.up" if up else text
        yield from _report(facts, table, classes == number, f"scale.{name}", severity_of(table.role), text, own=_OWN)
    good = table.good()
    if not good.any():
        return
    for origin, mask in fills.items():
        # The words speak of what is stored.
        text = f"scale.filled.{origin}{'.divisor' if facts.view.divisors_in(table.layer) else ''}"
        yield from _report(facts, table, mask, "scale.filled", "warn", text)
        explained = explained | mask
    one = never_set(table)
    yield from _report(facts, table, one & ~explained, "scale.identity", "info", f"scale.identity{of_weight}")
    if not has_wrong_convention(facts, table):
        # What was filled in, or never set, is no measure for what was measured.
        far = outliers(table.values, good & ~explained & ~one)
        # The number beside the stored one is a stored one too.
        divisors = facts.view.divisors_in(table.layer)
        usual = median(table.stored if divisors else table.values, good)
        text = f"scale.outlier{'.divisor' if divisors else ''}{of_weight}"
        yield from _report(facts, table, far, "scale.outlier", "warn", text, median=usual)


def _report(
    facts: Facts, table: ScaleTable, mask: Mask, code: str, severity: str, text: str | None = None, **fill: object
) -> Iterator[Finding]:
    ids = table.where(mask)
    if not ids:
        return
    stored = table.stored[list(ids)]
    alike = np.unique(stored.view(np.uint32)).size == 1
    place = facts.place(table.layer, (table.projection,), table.role, ids)
    shown = [str(json_value(value)) for value in stored[:4]]
    fill["values"] = ", ".join(dict.fromkeys(shown)) + (", …" if len(stored) > 4 and not alike else "")
    if place["experts"] is None:
        fill["of_all"] = True
    yield make(
        code, severity, text=text, role=table.role, layer=table.layer, projection=table.projection, **place,
        value=stored[0] if alike else None, fill=fill,
    )  # fmt: skip


def median(values: npt.NDArray[np.float32], good: Mask) -> float:
    """Median of the good values in log space."""
    return json_number(float(np.exp2(median_of(np.log2(values[good].astype(np.float64))))))


def json_number(value: float) -> float:
    """Four significant digits: enough for a sentence."""
    return float(f"{value:.4g}")


def outliers(values: npt.NDArray[np.float32], good: Mask, peers: Mask | None = None) -> Mask:
    """Values far from their peers in log space, by median and MAD of those of ``peers``, or of all.

    However far these are spread: what lies 64 times beyond all of them, but a few that do so too, is far.

    >>> outliers(np.float32([2e-3, 2.2e-3, 1.8e-3, 2.0]), np.ones(4, bool)).tolist()
    [False, False, False, True]
    >>> outliers(np.float32([2e-3] * 3 + [2.1e-3]), np.ones(4, bool)).any()
    np.False_
    >>> outliers(np.float32([1e-3, 5e-3, 2e-3, 1e-2, 4e-4, 3e-3, 3.0]), np.ones(7, bool)).tolist().index(True)
    6
    """
    out = np.zeros(values.shape, np.bool_)
    # Of two values neither is the odd one.
    if good.sum() < 3 or (peers is not None and peers.sum() < 3):
        return out
    logs = np.log2(values[good].astype(np.float64))
    if logs.max() - logs.min() <= OUTLIER_FLOOR:
        return out
    of = logs if peers is None else logs[peers[good]]
    distance = np.abs(logs - median_of(of))
    spread = float(median_of(distance if peers is None else distance[peers[good]]))
    low, high = body(of)
    far = distance > max(OUTLIER_FLOOR, OUTLIER_SPREAD * spread)
    out[good] = far | (logs < low - OUTLIER_FLOOR) | (logs > high + OUTLIER_FLOOR)
    return out


def body(logs: npt.NDArray[np.float64], floor: float = OUTLIER_FLOOR) -> tuple[float, float]:
    """The range of logarithms (N,) without those beyond a gap: one of four or more, or a fifth."""
    ordered, count = np.sort(logs), len(logs)
    while count >= 4 and len(ordered) > 1:
        steps = np.diff(ordered)
        at = int(np.argmax(steps)) + 1
        few = min(at, len(ordered) - at) + count - len(ordered)
        if steps[at - 1] <= floor:
            break
        if few > 1 and 5 * few > count:
            # Of two groups neither is the odd one: `spread` tells of them.
            return -np.inf, np.inf
        ordered = ordered[at:] if 2 * at < len(ordered) else ordered[:at]
    return float(ordered[0]), float(ordered[-1])


def robust_z(value: float, peers: npt.NDArray[np.float32]) -> float | None:
    """How far a scale lies from its peers, in robust standard deviations of their logarithms.

    z = (log2 v − m) / (1.4826 · MAD) with m the median of log2 of the peers and MAD the median of their distances from
    it; 1.4826 = 1/Φ⁻¹(3/4) makes it the z-score where logarithms are normal (Iglewicz and Hoaglin 1993, whose factor is
    0.6745).

    Parameters
    ----------
    value
        A finite positive number.
    peers : (N,) float32
        Finite positive numbers, without ``value``.

    Returns
    -------
    z
        0 for a value that is the median.  None where there is no peer, and where MAD is 0 (at least half of the peers
        are equal) and the value is another: any distance is then infinitely many of it.

    >>> round(robust_z(4.0, np.float32([0.5, 1, 2])), 4)
    1.349
    >>> robust_z(1.0, np.float32([1, 1, 1])), robust_z(2.0, np.float32([1, 1, 1])), robust_z(2.0, np.float32([]))
    (0.0, None, None)
    """
    if not len(peers):
        return None
    logs = np.log2(peers.astype(np.float64))
    middle = float(median_of(logs))
    spread = float(median_of(np.abs(logs - middle)))
    away = float(np.log2(float(value))) - middle
    return 0.0 if away == 0 else away / (1.4826 * spread) if spread else None


def has_wrong_convention(facts: Facts, table: ScaleTable) -> bool:
    """Multipliers are far below one, divisors far above: a median on the wrong side means an exporter's mix-up.

    One or two experts may just be wrong: the layer's other numbers must say the same, or those of the same projection
    in all layers; or all, where each of these are too few.
    """
    if table.role != "weight_scale_2":
        return False
    good = table.good()
    if not good.any() or median_of(table.values[good]) <= 1:
        return False
    if good.sum() >= 3:
        return True
    tables = list(facts.scalars(table.role))
    layer = [other for other in tables if other.layer == table.layer]
    alike = [other for other in tables if other.projection == table.projection]
    return any(map(_are_above_one, (layer, alike))) or (len(tables) < 3 and _are_above_one(tables))


def _are_above_one(tables: Iterable[ScaleTable]) -> bool:
    """Are most of three numbers or more above one?"""
    values = np.concatenate([table.values[table.good()] for table in tables])
    return len(values) >= 3 and 2 * int((values > 1).sum()) > len(values)


def convention_findings(facts: Facts) -> Iterator[Finding]:
    """``scale.convention``: whole layers whose second-level weight scales are stored the other way up."""
    for layer in facts.layers:
        tables = [facts.tables["weight_scale_2", layer, kind] for kind in facts.view.projections_in[layer]]
        wrong = [table for table in tables if has_wrong_convention(facts, table)]
        if wrong:
            names = dict.fromkeys(
                facts.view.slot(layer, e, table.projection, "weight_scale_2").name
                for table in wrong
                for e in table.where(table.state == OK)
            )
            text = "scale.convention.divisor" if facts.view.divisors_in(layer) else "scale.convention"
            shown = json_number(float(median_of(np.concatenate([table.stored[table.state == OK] for table in wrong]))))
            yield make(
                "scale.convention", "error", text=text, role="weight_scale_2", layer=layer, tensors=names,
                fill={"median": shown},
            )  # fmt: skip


def pair_findings(facts: Facts) -> Iterator[Finding]:
    """``scale.pair-mismatch``: gate and up of one expert, which servers fuse and give gate's second-level scale.

    Where one of the two is stored the other way up in the whole layer, ``scale.convention`` has told it.
    """
    for layer in facts.layers:
        mask, ratio = mismatched_pairs(facts, layer)
        ids = tuple(np.flatnonzero(mask).tolist())
        if not ids or _one_is_reversed(facts, layer):
            continue
        off = ratio[list(ids)]
        slight = is_slight(off)
        worst = float(off[np.argmax(np.abs(np.log2(off)))])
        place = facts.place(layer, ("gate", "up"), "weight_scale_2", ids)
        larger, smaller = ("gate", "up") if worst > 1 else ("up", "gate")
        fill = {
            "ratio": json_number(worst), "times": in_full(max(worst, 1 / worst)), "larger": larger,
            "smaller": smaller, "pairs": len(ids), "of": int((ratio > 0).sum()),
        }  # fmt: skip
        yield make(
            "scale.pair-mismatch", "info" if slight else "backend",
            text=f"scale.pair-mismatch{'.slight' if slight else ''}", role="weight_scale_2", layer=layer,
            experts=place["experts"], tensors=place["tensors"], count=len(ids), value=json_number(worst), fill=fill,
        )  # fmt: skip


def _one_is_reversed(facts: Facts, layer: int) -> bool:
    """Is one of gate and up the other way up in the whole layer, and the other not?"""
    both = (facts.tables["weight_scale_2", layer, kind] for kind in ("gate", "up"))
    return sum(has_wrong_convention(facts, table) for table in both) == 1


def is_slight(ratios: npt.NDArray[np.float64]) -> bool:
    """Do these ratios (N,) differ from one by less than 1 %?  The steps of E2M1 are 17 % and more."""
    return bool(np.abs(np.log2(ratios)).max(initial=0.0) < np.log2(1.01))


def mismatched_pairs(facts: Facts, layer: int) -> tuple[Mask, npt.NDArray[np.float64]]:
    """Which experts' gate and up differ by vLLM's own test, and the ratio gate/up (0 where it cannot be told).

    ``torch.allclose`` with its defaults: \\|a − b\\| ≤ 1e-8 + 1e-5 \\|b\\|, on the values as vLLM compares them.
    """
    gate = facts.tables.get(("weight_scale_2", layer, "gate"))
    up = facts.tables.get(("weight_scale_2", layer, "up"))
    if gate is None or up is None:
        return np.zeros(0, np.bool_), np.zeros(0)
    both = gate.good() & up.good()
    ratio = np.zeros(len(both))
    ratio[both] = gate.values[both].astype(np.float64) / up.values[both]
    return both & ~close(gate.stored, up.stored), ratio


def _shapes(facts: Facts) -> Iterator[Finding]:
    """Scalars that are none, and scalars of an unusual shape or type."""
    for (role, layer, projection), states in facts.states.items():
        wrong = tuple(np.flatnonzero(states == NOT_A_SCALAR).tolist()) if role in SCALARS else ()
        if wrong:
            entries = [facts.view.slot(layer, e, projection, role).entry for e in wrong]
            shapes = sorted({f"{entry.dtype}{list(entry.shape)}" for entry in entries if entry})
            whole = facts.view.is_whole(layer)
            yield make(
                "scale.shape", "error", role=role, layer=layer, projection=projection, experts=None if whole else wrong,
                tensors=dict.fromkeys(entry.name for entry in entries if entry),
                fill={"shape": ", ".join(shapes[:3]), "experts": "" if whole else id_list(wrong)},
            )  # fmt: skip
    unusual: dict[tuple[int, ...], list[str]] = {}
    halves: dict[str, dict[str, None]] = {}
    kinds = facts.view.table.kind.tolist()
    full = [SCALE_BYTES.get(dtype, 4) == 4 for dtype, _ in facts.view.table.kinds]
    usual = {layer: (1,) if facts.view.divisors_in(layer) else () for layer in facts.needs}
    # Kinds of tensors of which there is nothing to say: those of nearly all of 90,000 scalars.
    dull = {
        shape: [wide and own == shape for wide, (_, own) in zip(full, facts.view.table.kinds, strict=True)]
        for shape in ((), (1,))
    }
    for (layer, expert, projection), module in facts.view.modules.items():
        if layer not in usual:
            continue
        silent = full if module.whole else dull[usual[layer]]
        rows = module.tensors.rows
        for role in SCALARS:
            row = rows.get(role)
            if row is None or silent[kinds[row]]:
                continue
            entry = module.tensors[role]
            if not full[kinds[row]] and facts.states[role, layer, projection][expert] == OK:
                halves.setdefault(entry.dtype, {})[entry.name] = None
            if not module.whole and entry.shape != usual[layer] and is_scalar(entry):
                unusual.setdefault(entry.shape, []).append(entry.name)
    for shape, names in sorted(unusual.items()):
        yield make("scale.shape", "info", text="scale.shape.accepted", tensors=names, fill={"shape": list(shape)})
    yield from half_findings(halves)
    yield from _vectors(facts)


def _vectors(facts: Facts) -> Iterator[Finding]:
    """A number for each expert where the layout has one for all (the checkpoints that are called *fused*)."""
    for role in SCALARS:
        names = [
            facts.view.slot(layer, 0, kind, role).name
            for layer in facts.layers
            if (dialect := facts.view.dialects[layer]) and dialect.arrangement == "fused"
            for kind in facts.view.projections_in[layer]
            if facts.has_vector(layer, kind, role)
        ]
        if names:
            yield make("scale.shape", "info", text="scale.shape.vector", role=role, tensors=names)


def half_findings(names: Mapping[str, Iterable[str]]) -> Iterator[Finding]:
    """Numbers in BF16, F16 or F64, by type: servers copy them into F32 parameters, which rounds none but F64."""
    for dtype, tensors in sorted(names.items()):
        text = "scale.shape.double" if dtype == "F64" else "scale.shape.half"
        yield make("scale.shape", "info", text=text, tensors=tensors, fill={"dtype": dtype})


def block_findings(facts: Facts) -> Iterator[Finding]:
    """``block-scale.group``: the block width that the shapes imply is not the scheme's, or the type is another's."""
    groups: dict[tuple[int, str, str, str, str], list[int]] = {}
    fine: set[tuple[str, int, int]] = set()
    kinds = facts.view.table.kind.tolist()
    for (layer, expert, projection), module in facts.view.modules.items():
        rows = module.tensors.rows
        dialect = facts.view.dialects.get(layer)
        if dialect is None or module.state != "quantised" or "weight" not in rows or "weight_scale" not in rows:
            continue
        key = (dialect.block, kinds[rows["weight"]], kinds[rows["weight_scale"]])
        if key in fine or layer not in facts.needs:
            continue
        weight, scale = module.tensors["weight"], module.tensors["weight_scale"]
        width = block_width(weight, scale)
        if scale.dtype in dialect.scale_types and width == dialect.group:
            fine.add(key)
            continue
        shape = f"{scale.dtype}{list(scale.shape)}"
        text, number = block_fault(weight, scale, dialect.group)
        groups.setdefault((layer, projection, shape, text, number), []).append(expert)
    for (layer, projection, shape, text, block), experts in groups.items():
        ids = tuple(sorted(experts))
        dialect = facts.view.dialects[layer]
        if text == "block-scale.group" and dialect and dialect.block == "MXFP4":
            text = "block-scale.group.mxfp4"
        place = facts.place(layer, (projection,), "weight_scale", ids)
        yield make(
            "block-scale.group", "error", text=text, role="weight_scale", layer=layer, projection=projection, **place,
            fill={
                "shape": shape, "width": block, "experts": id_list(place["experts"] or ()),
                "format": dialect.block if dialect else "NVFP4", "group": dialect.group if dialect else 16,
            },
        )  # fmt: skip


def block_fault(weight: TensorEntry, scale: TensorEntry, group: int) -> tuple[str, str]:
    """Which sentence says what is wrong with a weight's blocks, and its number: K, the shape, or a block's width.

    A K that is no whole number of blocks is the fault itself, whatever scales stand beside it; so is an empty weight.
    """
    if 0 in weight.shape or 0 in scale.shape:
        return "block-scale.group.empty", "0"
    k = (weight.shape[-1] if weight.shape else 0) * (1 if weight.dtype == "F4" else 2)
    flat = len(weight.shape) == len(scale.shape) and weight.shape[:-1] == scale.shape[:-1]
    if flat and k % group:
        return "block-scale.group.ragged", str(k)
    width = block_width(weight, scale)
    if not width:
        return "block-scale.group.unrelated", str(list(weight.shape))
    return "block-scale.group", f"{width:g}"


def block_width(weight: TensorEntry, scale: TensorEntry) -> float | None:
    """Values along the input axis that share a block scale, or None where the shapes have nothing to do with another.

    Packed tensors hold two values a byte along one axis: the last, or the one before it where a fused weight is stored
    transposed (Llama 4).  gpt-oss keeps the bytes of a block on an axis of their own.

    >>> from nvfp4viz.checkpoint import TensorEntry
    >>> one = TensorEntry("w", "U8", (16, 16), "f", 0, 256)
    >>> block_width(one, TensorEntry("s", "F8_E4M3", (16, 2), "f", 0, 32))
    16.0
    """
    pair = 1 if weight.dtype == "F4" else 2
    packed, scales = weight.shape, scale.shape
    if len(packed) == len(scales) + 1 and packed[:-1] == scales:
        return float(packed[-1] * pair)
    if len(packed) < 2 or len(packed) != len(scales) or packed[:-2] != scales[:-2] or 0 in scales:
        return None
    if packed[-2] == scales[-2]:
        return packed[-1] * pair / scales[-1]
    if len(packed) > 2 and packed[-1] == scales[-1]:
        return packed[-2] * pair / scales[-2]
    if len(packed) > 2 and packed[-1] == scales[-2]:
        return packed[-2] * pair / scales[-1]
    return None
