"""Findings about packed codes and scales, out of a `deep_scan`.

Experts of one layer and projection with the same fault are one finding; ordinary modules with the same fault are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from nvfp4viz.audit.backends import LARGE
from nvfp4viz.audit.bytescan import Scan
from nvfp4viz.audit.containers import container_findings
from nvfp4viz.audit.deep import DeepScan, Elsewhere, Progress, Unit, deep_scan
from nvfp4viz.audit.facts import Facts
from nvfp4viz.audit.fills import least_copies
from nvfp4viz.audit.findings import make, ordered, with_drafts_named
from nvfp4viz.audit.linears import collect_linears
from nvfp4viz.audit.report import Coverage, Finding, Report, worst
from nvfp4viz.audit.run import Audit, backend_forecasts
from nvfp4viz.audit.scales import severity_of
from nvfp4viz.audit.texts import id_list
from nvfp4viz.checkpoint import printable

Pairs = list[tuple[Unit, Scan]]

# Part of the codes that may be ±6 before they count as clipped.  A block's largest value is 6 by construction;
# bell-shaped weights have a tenth of their codes there, uniform ones a sixth, MXFP4's power-of-two scales a fifth.
SATURATED = 0.3
# Fewer codes than this prove nothing about their distribution.
ENOUGH = 1024
_CAST = "block-scale.exponent-cast"


def deepen(
    done: Audit,
    *,
    progress: Progress | None = None,
    resume: bool = False,
    state: Path | None = None,
    elsewhere: Elsewhere | None = None,
) -> Audit:
    """The same audit with every packed code and block scale read as well.

    Parameters
    ----------
    progress, resume, state, elsewhere
        As for `deep_scan`.

    Raises
    ------
    InputError, CheckpointError
        As `deep_scan`.
    """
    checkpoint = done.checkpoint
    before, known, lost = checkpoint.bytes_read, len(checkpoint.problems), set(checkpoint.lost)
    linears = collect_linears(checkpoint, done.view)
    scan = deep_scan(checkpoint, done.view, linears, progress=progress, resume=resume, state=state, elsewhere=elsewhere)
    report = done.report
    kept = _without_copies(report.findings, done.facts, scan)
    found = [*container_findings(checkpoint, since=known), *kept, *deep_findings(scan)]
    now = [file for file in checkpoint.lost if file not in lost]
    if now:
        fill = {"file": printable(now[0], 200)}
        found.append(make("audit.partial", "info", text="audit.partial.unread.codes", count=len(now), fill=fill))
    findings = ordered(with_drafts_named(map(_now_read, found), done.view))
    read = report.container.bytes_read + checkpoint.bytes_read - before + scan.elsewhere
    return replace(
        done,
        report=msgspec.structs.replace(
            report,
            findings=findings,
            verdict=worst([item.severity for item in findings]),
            backends=backend_forecasts(done.facts, findings, done.ep),
            coverage=_recounted(report, kept),
            container=msgspec.structs.replace(report.container, bytes_read=read),
        ),
    )


def _now_read(item: Finding) -> Finding:
    """What was said not to be read of FP8 experts is said anew."""
    return (
        make(item.code, item.severity, text=f"{item.text}.deep", count=1) if item.text == "audit.partial.fp8" else item
    )


def _without_copies(findings: Sequence[Finding], facts: Facts, scan: DeepScan) -> list[Finding]:
    """The same findings without maxima that are shared only because one expert was written twice, scales and all."""
    first = {
        (layer, kind, expert): ids[0]
        for (layer, kind), groups in scan.twins.items()
        for ids in groups
        for expert in ids
    }

    def is_explained(item: Finding) -> bool:
        layer = item.layer
        if not item.text.startswith("scale.filled.copied-maximum") or layer is None or not item.experts:
            return False
        if item.tower is not None:
            return False
        kinds = facts.view.projections_in[layer]
        experts = {tuple(first.get((layer, kind, e), e) for kind in kinds) for e in item.experts}
        # One expert alone has no twin among those that share all maxima.
        return len(experts) < min(least_copies(facts, layer), len(item.experts))

    return [item for item in findings if not is_explained(item)]


def _recounted(report: Report, kept: Sequence[Finding]) -> dict[str, Coverage]:
    """The report's coverage, of which only what was filled in can have changed."""
    gone = sum(item.count for item in report.findings if item not in kept)
    own = report.coverage["input_scale"]
    return {**report.coverage, "input_scale": msgspec.structs.replace(own, filled=own.filled - gone)}


def deep_findings(scan: DeepScan) -> Iterator[Finding]:
    """All findings of codes ``block-scale.nan``, ``.negative``, ``.exponent-cast``; ``weight.all-zero``,
    ``.saturated``, ``.duplicate-expert``; and of FP8 ``scale.zero``, ``.nan``, ``.inf``, ``.negative``, ``.subnormal``.
    """
    groups: dict[tuple[int | None, str | None], Pairs] = {}
    for unit, seen in zip(scan.units, scan.scans, strict=True):
        place = (None, None) if unit.projection is None else (unit.layer, unit.projection)
        groups.setdefault(place, []).append((unit, seen))
    for (layer, projection), pairs in groups.items():
        yield from _numbers(layer, projection, [pair for pair in pairs if pair[1].wrong])
        scales = [pair for pair in pairs if pair[0].role == "weight_scale" and not pair[1].numbers]
        weights = [pair for pair in pairs if pair[0].role == "weight"]
        zero = [pair for pair in weights if not pair[1].nonzero and pair[1].nbytes]
        empty = {(unit.expert, unit.name.rpartition(".")[0]) for unit, _ in zero}
        nans = [pair for pair in scales if pair[1].nans]
        cast = [
            (unit, seen)
            for unit, seen in scales
            # All scales 2^-127 are right for a weight of zeros.
            if seen.cast and (unit.expert, unit.name.rpartition(".")[0]) not in empty
        ]
        yield from _bytes(layer, projection, nans, "nan", lambda seen: (seen.nans, seen.nan_at))
        negative = [pair for pair in scales if pair[1].negatives]
        yield from _bytes(layer, projection, negative, "negative", lambda seen: (seen.negatives, seen.negative_at))
        for way in ("integers", "exponents"):
            alike = [pair for pair in cast if pair[1].cast == way]
            yield from _plain(layer, projection, alike, _CAST, _CAST if way == "integers" else LARGE)
        yield from _plain(layer, projection, zero, "weight.all-zero")
        # Zero codes explain zero scales, and a sign bit has its finding.
        lost = [
            (unit, seen)
            for unit, seen in scales
            if not seen.nonzero
            and seen.nbytes
            and not seen.negatives
            and (unit.expert, unit.name.rpartition(".")[0]) not in empty
        ]
        yield from _plain(layer, projection, lost, "weight.all-zero", "weight.all-zero.scales")
        full = [
            (unit, seen)
            for unit, seen in weights
            if seen.nbytes * 2 >= ENOUGH and seen.sixes > SATURATED * seen.nbytes * 2
        ]
        share = max((seen.sixes / (2 * seen.nbytes) for _, seen in full), default=0.0)
        yield from _plain(layer, projection, full, "weight.saturated", share=f"{share:.0%}")
    yield from _twins(scan)


def _bytes(
    layer: int | None,
    projection: str | None,
    pairs: Pairs,
    kind: str,
    of: Callable[[Scan], tuple[int, tuple[int, ...]]],
) -> Iterator[Finding]:
    """Wrong bytes of block scales, with their number and the (row, block) of the first ones."""
    if pairs:
        count = sum(of(seen)[0] for _, seen in pairs)
        fill = {"positions": _positions(pairs, of)}
        yield _make(layer, projection, pairs, f"block-scale.{kind}", "error", count, fill)


def _positions(pairs: Pairs, of: Callable[[Scan], tuple[int, tuple[int, ...]]]) -> str:
    places = []
    for unit, seen in pairs[:3]:
        at = ", ".join("({}, {})".format(*unit.place(byte)) for byte in of(seen)[1])
        places.append(at if unit.expert is None or len(pairs) == 1 else f"{unit.expert}: {at}")
    return "; ".join(places) + ("; …" if len(pairs) > 3 else "")


def _numbers(layer: int | None, projection: str | None, pairs: Pairs) -> Iterator[Finding]:
    """Unusable numbers among the scales of FP8: one finding a role and class.

    Zeros among others may be right, of rows or blocks of zeros; a tensor of nothing else is not.
    """
    groups: dict[tuple[str, str, bool], Pairs] = {}
    for unit, seen in pairs:
        for kind, (count, _) in seen.wrong.items():
            # A subnormal scale is a zero in all but name.
            some = kind in ("zero", "subnormal") and count < seen.numbers
            groups.setdefault((unit.role, kind, some), []).append((unit, seen))
    for (role, kind, some), found in sorted(groups.items(), key=lambda group: group[0]):
        of = _of_class(kind)
        severity = "warn" if some else severity_of(role)
        fill = {"positions": _positions(found, of), "kind": kind}
        text = f"scale.value.fp8{'.some' if some else ''}"
        yield _make(
            layer, projection, found, f"scale.{kind}", severity, sum(of(seen)[0] for _, seen in found), fill, text
        )


def _of_class(kind: str) -> Callable[[Scan], tuple[int, tuple[int, ...]]]:
    return lambda seen: seen.wrong[kind]


def _plain(
    layer: int | None, projection: str | None, pairs: Pairs, code: str, text: str | None = None, **fill: object
) -> Iterator[Finding]:
    if pairs:
        yield _make(layer, projection, pairs, code, "warn", len(pairs), fill, text)


def _make(
    layer: int | None,
    projection: str | None,
    pairs: Pairs,
    code: str,
    severity: str,
    count: int,
    fill: dict[str, object],
    text: str | None = None,
) -> Finding:
    names = tuple(dict.fromkeys(unit.name for unit, _ in pairs))
    experts = tuple(sorted({unit.expert for unit, _ in pairs if unit.expert is not None}))
    text = text or code
    if projection is None:
        # As of ordinary modules' scalars: one layer, or the numbers of all.
        found = {unit.layer for unit, _ in pairs}
        layer = found.pop() if len(found) == 1 else None
        text, fill = f"{text}.linear", {**fill, "numbers": sorted({u.layer for u, _ in pairs if u.layer is not None})}
    return make(
        code, severity, text=text, role=pairs[0][0].role, layer=layer, projection=projection,
        experts=experts or None, tensors=names, count=count, fill=fill,
    )  # fmt: skip


def _twins(scan: DeepScan) -> Iterator[Finding]:
    """Equal in every projection is one finding; equal in some only is one a projection."""
    kinds: dict[int, set[str]] = {}
    names: dict[tuple[int, str, int], str] = {}
    for unit in scan.units:
        if unit.role == "weight" and unit.layer is not None and unit.projection is not None and unit.expert is not None:
            kinds.setdefault(unit.layer, set()).add(unit.projection)
            names[unit.layer, unit.projection, unit.expert] = unit.name
    layers = dict.fromkeys(layer for layer, _ in scan.twins)
    for layer in layers:
        found = {kind: set(scan.twins.get((layer, kind), ())) for kind in kinds[layer]}
        everywhere = set.intersection(*found.values())
        groups = [(None, everywhere), *((kind, ids - everywhere) for kind, ids in sorted(found.items()))]
        for projection, sets in groups:
            if sets:
                experts = tuple(sorted(expert for ids in sets for expert in ids))
                shown = [kind for kind in sorted(kinds[layer]) if projection in (None, kind)]
                words = "; ".join(id_list(ids, 8) for ids in sorted(sets)[:4]) + ("; …" if len(sets) > 4 else "")
                yield make(
                    "weight.duplicate-expert", "warn",
                    text="weight.duplicate-expert" if projection is None else "weight.duplicate-expert.projection",
                    role="weight", layer=layer, projection=projection, experts=experts, count=len(experts),
                    tensors=tuple(dict.fromkeys(names[layer, kind, e] for e in experts for kind in shown)),
                    fill={"groups": words},
                )  # fmt: skip
