"""Scales of ordinary modules that lie far from those of the modules of the same name in other layers.

Of an expert its peers in the layer tell (`scales`); an ordinary module stands alone there.  Layers do differ: in
weights by little, so that their scales are held to the rule for experts; in activations by up to some thousand times
(*massive activations*), so that only what lies beyond all others by far more is told of.  Which number is right no file
says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvfp4viz.audit.facts import Facts
from nvfp4viz.audit.fills import FINGERPRINTS, FP8_FLOAT_MAX
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.module_names import layer_of, layers_of, without_numbers
from nvfp4viz.audit.report import Finding, json_value
from nvfp4viz.audit.scales import OUTLIER_FLOOR, body, json_number, outliers
from nvfp4viz.audit.siblings import FAR, times
from nvfp4viz.checkpoint import CanonicalView, Checkpoint
from nvfp4viz.checkpoint.numbers import classify

if TYPE_CHECKING:
    from nvfp4viz.audit.linears import Scalar

Logs = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_FILLED = np.float32([*(value for value, _ in FINGERPRINTS), FP8_FLOAT_MAX])


def namesake_findings(
    checkpoint: Checkpoint,
    view: CanonicalView,
    values: Iterable[Scalar],
    siblings: Iterable[tuple[str, ...]],
    *,
    weight_only: bool,
) -> Iterator[Finding]:
    """``scale.outlier`` of single modules, one finding a role and format.

    Not of numbers that have a finding of their own: unusable ones, those that were filled in, and those of modules that
    differ from what a server fuses them with.

    Parameters
    ----------
    values
        Of `linears`: every scalar.
    weight_only
        Nobody reads the activation scales of four-bit modules.
    """
    found = _judged(list(values), weight_only=weight_only)
    # AWQ moves part of an input's size elsewhere.
    scaled = {linear.name for linear, *_ in found if f"{linear.name}.pre_quant_scale" in checkpoint.tensors}
    groups: dict[tuple[str, str, bool], list[Scalar]] = defaultdict(list)
    for each in found:
        groups[each[1], each[0].format, _divides(each)].append(each)
    beside = {(linear.name, role): float(value) for linear, role, _, _, value in found}
    families = {last: family for family in siblings for last in family}
    for (role, form, _), members in sorted(groups.items(), key=lambda group: group[0]):
        logs = np.log2(np.array([value for *_, value in members], np.float64))
        if role == "weight_scale_2" and np.median(logs) > 0:
            # Most of them are stored the other way up (`linears`).
            continue
        odd: dict[int, float] = {}
        rules = [(_last_two, far_beyond)] if role == "input_scale" else [(_last_two, far_beyond), (_family, _outlying)]
        for kind, rule in rules:
            for peers in _by_kind(members, kind, scaled):
                far = rule(logs[peers])
                odd |= dict.fromkeys(peers[far].tolist(), float(np.median(logs[peers[~far]]))) if far.any() else {}
        odd = {at: usual for at, usual in odd.items() if not _is_told(members[at], beside, families, scaled)}
        if odd:
            yield _finding([(members[at], odd[at]) for at in sorted(odd)], role, form, view)


def unset_findings(facts: Facts, values: Iterable[Scalar], siblings: Iterable[tuple[str, ...]]) -> Iterator[Finding]:
    """``scale.identity`` of second-level weight scales that are 1.0 as stored, in a file with others that are not.

    Not of those that a server fuses with one of another value, which is another finding.
    """
    found = {
        linear.name: (name, stored) for linear, role, name, stored, value in values
        if role == "weight_scale_2" and linear.format == "NVFP4" and classify(np.array([value]))[0] == 0
    }  # fmt: skip
    families = {last: family for family in siblings for last in family}
    ones = []
    for module, (name, stored) in found.items():
        parent, _, last = module.rpartition(".")
        fused = [found[other][1] for each in families.get(last, ()) if (other := f"{parent}.{each}") in found]
        if stored == 1 and all(number == 1 for number in fused):
            ones.append(name)
    if ones and (any(stored != 1 for _, stored in found.values()) or facts.has_set_weights()):
        view = facts.view
        yield make(
            "scale.identity", "info", text="scale.identity.linear.weight", role="weight_scale_2",
            layer=layer_of(ones, view), tensors=ones, value=np.float32(1), fill={"numbers": layers_of(ones, view)},
        )  # fmt: skip


def _judged(values: list[Scalar], *, weight_only: bool) -> list[Scalar]:
    """Usable numbers that somebody set, and somebody reads."""
    numbers = np.array([value for *_, value in values], np.float32)
    known = np.zeros(len(values), np.bool_)
    for each in _FILLED:
        # To the last bit, or to those of BF16.
        known |= np.abs(numbers - each) <= each * 2.0**-8
    usable = classify(numbers) == 0
    return [
        scalar for scalar, good, filled in zip(values, usable.tolist(), known.tolist(), strict=True)
        if good and scalar[3] != 1
        and not (scalar[1] == "input_scale" and (filled or (weight_only and scalar[0].format == "NVFP4")))
    ]  # fmt: skip


def _divides(scalar: Scalar) -> bool:
    dialect = scalar[0].dialect
    return dialect is not None and dialect.divisors


def _by_kind(members: list[Scalar], kind: Callable[[str], str], scaled: set[str]) -> Iterable[npt.NDArray[np.intp]]:
    out: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for at, (linear, *_) in enumerate(members):
        out[kind(linear.name), linear.name in scaled].append(at)
    return [np.array(each) for each in out.values()]


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


# Of one tower: another's weights may well be 64 times larger.
_family = without_numbers


def far_beyond(logs: Logs) -> Mask:
    """Which of some logarithms (N,) lie 2^14 beyond all others, but for a few that do so too; of three at least.

    >>> far_beyond(np.log2([1e-3, 2.0, 5e-2, 1e5])).tolist(), far_beyond(np.log2([1e-3, 1e5])).tolist()
    ([False, False, False, True], [False, False])
    """
    out: Mask = np.zeros(logs.shape, np.bool_)
    if len(logs) < 3 or logs.max() - logs.min() <= FAR:
        return out
    for at, own in enumerate(logs):
        low, high = body(np.delete(logs, at), FAR)
        out[at] = own < low - FAR or own > high + FAR
    return out


def _outlying(logs: Logs) -> Mask:
    """Weights: the rule for experts, of four at least."""
    if len(logs) < 4:
        return np.zeros(logs.shape, np.bool_)
    return outliers(np.exp2(logs).astype(np.float32), np.ones(logs.shape, np.bool_))


def _is_told(
    scalar: Scalar,
    beside: Mapping[tuple[str, str], float],
    families: Mapping[str, tuple[str, ...]],
    scaled: set[str],
) -> bool:
    """Does it lie far from a module that it is fused with?  That is another finding, but for FP8's weights and AWQ."""
    linear, role, _, _, value = scalar
    if role == "weight_scale" or (role == "input_scale" and linear.name in scaled):
        return False
    parent, _, last = linear.name.rpartition(".")
    others = (beside.get((f"{parent}.{other}", role)) for other in families.get(last, ()) if other != last)
    return any(other is not None and abs(np.log2(float(value) / other)) > OUTLIER_FLOOR for other in others)


def _finding(odd: list[tuple[Scalar, float]], role: str, form: str, view: CanonicalView) -> Finding:
    """One for all that are odd, each with what its namesakes have in the middle, in powers of two."""
    names = [name for (_, _, name, _, _), _ in odd]
    ratios = [float(value) / 2.0**usual for (*_, value), usual in odd]
    worst = max(range(len(odd)), key=lambda at: abs(np.log2(ratios[at])))
    (_, _, name, stored, _), usual = odd[worst]
    divisor = _divides(odd[worst][0])
    alike = len({float(number) for (_, _, _, number, _), _ in odd}) == 1
    fill = {
        "tensor": name, "stored": json_value(stored), "usual": json_number(2.0 ** (-usual if divisor else usual)),
        "ratio": times(max(ratios[worst], 1 / ratios[worst])), "numbers": layers_of(names, view), "fp8": form == "FP8",
        "ratios": sorted({json_number(min(ratios)), json_number(max(ratios))}),
    }  # fmt: skip
    return make(
        "scale.outlier", "warn", text=f"scale.outlier.linear{'' if role == 'input_scale' else '.weight'}", role=role,
        layer=layer_of(names, view), tensors=names, value=stored if alike else None, fill=fill,
    )  # fmt: skip
