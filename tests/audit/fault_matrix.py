"""Dialect × fault: each fault as a change of a healthy layout, and exactly what the audit must say of it.

``python -m tests.audit.fault_matrix`` writes ``docs/audit-matrix.md`` from this table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4viz.audit import Report
from nvfp4viz.checkpoint import Tensor, tensor
from tests.audit.config_faults import CONFIG_FAULTS, Built, Case, Expected
from tests.audit.layouts import EXPERTS, HIDDEN, LAYOUTS, SIZES, Layout, bf16, typed
from tests.audit.linear_faults import LINEAR_FAULTS

BAD = 3
ALL = tuple(range(EXPERTS))

# A reason why a layout cannot have a fault.
ONE_NUMBER = "one number for all experts"
ONE_TENSOR = "one tensor for all experts"
NO_ROLE = "no such tensor"


def found(report: Report, layout: Layout) -> list[Expected]:
    """The report's findings, less the notes that the healthy layout has too."""
    return [
        (item.code, item.severity, item.role, item.layer, item.projection, item.experts)
        for item in report.findings
        if not (item.severity == "info" and item.code in layout.notes)
    ]


def severity(role: str) -> str:
    return "backend" if role == "input_scale" else "error"


def who(layout: Layout, *experts: int) -> tuple[int, ...] | None:
    """Whom a finding names: nobody where all experts share the tensor."""
    return None if layout.arrangement == "fused" else experts


def missing(role: str) -> Callable[[Layout], Built]:
    def build(layout: Layout) -> Built:
        if role not in layout.roles:
            return NO_ROLE
        if layout.id == "Inkling" and role != "weight_scale_2":
            return "its name is not public"
        tensors = layout.tensors()
        del tensors[layout.name(BAD, "down", role)]
        experts = who(layout, *(ALL if layout.arrangement == "stacked" else (BAD,)))
        return Case(tensors, [("scale.missing", severity(role), role, 0, "down", experts)])

    return build


def projection_hole(layout: Layout) -> Built:
    if not layout.with_input:
        return NO_ROLE
    names = layout.names("down", "input_scale")
    tensors = {name: item for name, item in layout.tensors().items() if name not in names}
    return Case(tensors, [("scale.missing", "backend", "input_scale", 0, "down", who(layout, *ALL))])


def rank_hole(layout: Layout) -> Built:
    if not layout.with_input:
        return NO_ROLE
    if layout.arrangement != "expert":
        return ONE_TENSOR
    lost = {layout.name(expert, kind, "input_scale") for expert in ALL[4:] for kind in layout.kinds}
    tensors = {name: item for name, item in layout.tensors().items() if name not in lost}
    return Case(tensors, [("expert.rank-hole", "backend", "input_scale", 0, None, ALL[4:])])


def mislabelled(layout: Layout) -> Built:
    if not layout.with_input or layout.block == "MXFP4":
        return NO_ROLE
    lost = set().union(*(layout.names(kind, "input_scale") for kind in layout.kinds))
    tensors = {name: item for name, item in layout.tensors().items() if name not in lost}
    return Case(tensors, [("scheme.mislabelled", "backend", "input_scale", None, None, None)])


CLASSES = {
    "zero": (0.0, np.inf), "nan": (np.nan, np.nan), "inf": (np.inf, 0.0), "negative": (-1e-3, -1e3),
    "subnormal": (4.4e-42, np.finfo(np.float32).max),
}  # fmt: skip


def stored(role: str, kind: str) -> Callable[[Layout], Built]:
    def build(layout: Layout) -> Built:
        if role not in layout.roles:
            return NO_ROLE
        tensors = layout.tensors()
        layout.put(tensors, BAD, "down", role, CLASSES[kind][layout.divisors])
        return Case(tensors, [(f"scale.{kind}", severity(role), role, 0, "down", who(layout, BAD))])

    return build


def beyond_float32(layout: Layout) -> Built:
    """A number in F64 that becomes infinite in the F32 parameter that a server copies it into."""
    if "weight_scale_2" not in layout.roles:
        return NO_ROLE
    tensors, name = layout.tensors(), layout.name(BAD, "down", "weight_scale_2")
    wide = tensors[name].array().astype(np.float64).copy()
    wide.reshape(-1)[BAD if layout.arrangement == "stacked" else 0] = 1e-300 if layout.divisors else 1e300
    tensors[name] = tensor(wide)
    expected: list[Expected] = [("scale.inf", "error", "weight_scale_2", 0, "down", who(layout, BAD))]
    return Case(tensors, [*expected, ("scale.shape", "info", None, None, None, None)])


def outlier(role: str) -> Callable[[Layout], Built]:
    def build(layout: Layout) -> Built:
        if role not in layout.roles:
            return NO_ROLE
        if layout.arrangement == "fused":
            return ONE_NUMBER
        tensors = layout.tensors()
        value = layout.get(tensors, BAD, "down", role)
        layout.put(tensors, BAD, "down", role, value / 1000 if layout.divisors else value * 1000)
        return Case(tensors, [("scale.outlier", "warn", role, 0, "down", (BAD,))])

    return build


def _stored_amax(layout: Layout, amax: float) -> np.float32:
    """An activation scale as the layout stores it; of FP8 amax is divided by E4M3's largest number alone."""
    over = 448 if layout.block == "MXFP4" or layout.scheme == "W4A8" else 2688
    return layout.stored(np.float32(amax) / np.float32(over))


def filled(layout: Layout) -> Built:
    if not layout.with_input:
        return NO_ROLE
    tensors = layout.tensors()
    layout.put(tensors, BAD, "down", "input_scale", _stored_amax(layout, 0.5))
    if layout.arrangement == "fused":
        # The other number of the layer proves how finely it was measured; 0.002 is 1/500, which BF16 holds.
        layout.put(tensors, BAD, "gate_up", "input_scale", np.float32(2.0137e-3))
    return Case(tensors, [("scale.filled", "warn", "input_scale", 0, "down", who(layout, BAD))])


def copied(layout: Layout) -> Built:
    """The layer's largest number in two more experts, of down alone; all others differ."""
    if not layout.with_input:
        return NO_ROLE
    if layout.arrangement == "fused":
        return ONE_NUMBER
    tensors = layout.tensors()
    for expert in ALL:
        amax = 7.3137 + 0.3719 * (expert if expert < 5 else 7)
        layout.put(tensors, expert, "down", "input_scale", _stored_amax(layout, amax))
    return Case(tensors, [("scale.filled", "warn", "input_scale", 0, "down", ALL[5:])])


def identity(layout: Layout) -> Built:
    if not layout.with_input:
        return NO_ROLE
    if layout.arrangement == "fused":
        return ONE_NUMBER
    tensors = layout.tensors()
    layout.put(tensors, BAD, "down", "input_scale", 1.0)
    return Case(tensors, [("scale.identity", "info", "input_scale", 0, "down", (BAD,))])


def convention(layout: Layout) -> Built:
    if "weight_scale_2" not in layout.roles:
        return NO_ROLE
    tensors = layout.tensors()
    for kind in layout.kinds:
        for expert in ALL if layout.arrangement != "fused" else (0,):
            value = layout.get(tensors, expert, kind, "weight_scale_2")
            layout.put(tensors, expert, kind, "weight_scale_2", np.float32(1) / value)
    return Case(tensors, [("scale.convention", "error", "weight_scale_2", 0, None, None)])


def pair_mismatch(layout: Layout) -> Built:
    if "weight_scale_2" not in layout.roles:
        return NO_ROLE
    if not {"gate", "up"} <= set(layout.kinds):
        return "no separate gate and up"
    tensors = layout.tensors()
    layout.put(tensors, BAD, "up", "weight_scale_2", layout.get(tensors, BAD, "up", "weight_scale_2") * 1.25)
    return Case(tensors, [("scale.pair-mismatch", "backend", "weight_scale_2", 0, None, (BAD,))])


def no_scalar(layout: Layout) -> Built:
    role = "weight_scale_2" if "weight_scale_2" in layout.roles else "input_scale"
    if role not in layout.roles:
        return NO_ROLE
    tensors = layout.tensors()
    tensors[layout.name(BAD, "down", role)] = tensor(np.full(EXPERTS - 1, 1e-4, np.float32))
    return Case(
        tensors, [("scale.shape", "error", role, 0, "down", (BAD,) if layout.arrangement == "expert" else None)]
    )


def block_width(layout: Layout) -> Built:
    return _other_blocks(layout, layout.scale_type, 48 - layout.group)


def block_type(layout: Layout) -> Built:
    if layout.block == "MXFP4":
        return "E4M3 bytes make it another layout"
    return _other_blocks(layout, "F8_E8M0", 16)


def _other_blocks(layout: Layout, dtype: str, width: int) -> Built:
    tensors = layout.tensors()
    kind = layout.kinds[0]
    rows = SIZES[kind][0]
    shape = (rows, HIDDEN // width) if layout.arrangement == "expert" else (EXPERTS, rows, HIDDEN // width)
    tensors[layout.name(BAD, kind, "weight_scale")] = typed(np.full(shape, 0x78, np.uint8), dtype)
    experts = who(layout, *(ALL if layout.arrangement == "stacked" else (BAD,)))
    return Case(tensors, [("block-scale.group", "error", "weight_scale", 0, kind, experts)])


def absent(layout: Layout) -> Built:
    tensors = layout.tensors()
    if layout.arrangement == "expert":
        lost = {layout.name(EXPERTS - 1, kind, role) for kind in layout.kinds for role in layout.roles}
        lost |= {name for name in tensors if f".{EXPERTS - 1}." in name and name.endswith("pre_quant_scale")}
        tensors = {name: item for name, item in tensors.items() if name not in lost}
    else:
        for name, item in list(tensors.items()):
            if name.startswith(layout.prefix) and item.shape and item.shape[0] == EXPERTS:
                data, shape = item.tobytes(), (EXPERTS - 1, *item.shape[1:])
                tensors[name] = Tensor(item.dtype, shape, data[: len(data) * (EXPERTS - 1) // EXPERTS])
    return Case(tensors, [("expert.absent", "error", None, 0, None, (EXPERTS - 1,))])


def gap(layout: Layout) -> Built:
    if layout.arrangement != "expert":
        return ONE_TENSOR
    lost = {layout.name(BAD, kind, role) for kind in layout.kinds for role in layout.roles}
    tensors = {
        name: item
        for name, item in layout.tensors().items()
        if name not in lost and not (f".{BAD}." in name and name.endswith("pre_quant_scale"))
    }
    return Case(tensors, [("expert.gap", "error", None, 0, None, (BAD,))])


def _replaced(layout: Layout, kinds: tuple[str, ...], make: Callable[[tuple[int, int]], Tensor]) -> dict[str, Tensor]:
    """Some projections of an expert in another format."""
    lost = {layout.name(BAD, kind, role) for kind in kinds for role in layout.roles}
    tensors = {name: item for name, item in layout.tensors().items() if name not in lost}
    for kind in kinds:
        module = layout.name(BAD, kind, "weight").removesuffix(f".{layout.suffixes['weight']}")
        tensors[f"{module}.weight"] = make(SIZES[kind])
    return tensors


def mixed_layer(layout: Layout) -> Built:
    if layout.arrangement != "expert":
        return ONE_TENSOR
    tensors = _replaced(layout, layout.kinds, lambda size: typed(np.full(size, 0x38, np.uint8), "F8_E4M3"))
    return Case(tensors, [("scheme.mixed-layer", "error", None, 0, None, (BAD,))])


def unquantised(layout: Layout) -> Built:
    if layout.arrangement == "expert":
        tensors, experts = _replaced(layout, ("down",), lambda size: bf16(*size)), (BAD,)
    else:
        lost = {layout.name(0, "down", role) for role in layout.roles}
        tensors = {name: item for name, item in layout.tensors().items() if name not in lost}
        experts = None
        suffix = ".weight" if layout.arrangement == "stacked" and layout.id != "Inkling" else ""
        tensors[f"{layout.prefix}.{layout.disk['down']}{suffix}"] = bf16(EXPERTS, *SIZES["down"])
    return Case(tensors, [("weight.unquantised", "error", "weight", 0, "down", experts)])


def pre_quant_scale(layout: Layout) -> Built:
    tensors = layout.tensors()
    names = [name for name in tensors if f".{BAD}." in name and name.endswith("pre_quant_scale")]
    if not names:
        return NO_ROLE
    for name in names:
        del tensors[name]
    code = "scheme.pre-quant-scale"
    return Case(tensors, [(code, "error", None, 0, kind, (BAD,)) for kind in layout.kinds])


def pre_quant_ones(layout: Layout) -> Built:
    tensors = layout.tensors()
    names = [name for name in tensors if f".{BAD}." in name and name.endswith("pre_quant_scale")]
    if not names:
        return NO_ROLE
    for name in names:
        tensors[name] = tensor(np.ones(tensors[name].shape, np.float32))
    code = "scheme.pre-quant-scale"
    return Case(tensors, [(code, "warn", None, 0, kind, (BAD,)) for kind in layout.kinds])


def _without_quant(layout: Layout) -> dict[str, Any]:
    return {
        key: value for key, value in (layout.config or {}).items() if key not in ("quantization_config", "expert_dtype")
    }


def config_absent(layout: Layout) -> Built:
    changes = {"config": _without_quant(layout), "quant": None}
    expected: list[Expected] = [("config.absent", "error", None, None, None, None)]
    if (layout.dialect == "quark" and layout.block == "MXFP4") or layout.id == "ModelOpt MXFP4":
        expected.append(("format.ambiguous", "info", "weight_scale", None, None, None))
    return Case(layout.tensors(), expected, changes)


def config_method(layout: Layout) -> Built:
    config = {**_without_quant(layout), "quantization_config": {"quant_method": "awq", "bits": 4}}
    expected: list[Expected] = [("config.conflict", "error", None, None, None, None)]
    if (layout.dialect == "quark" and layout.block == "MXFP4") or layout.id == "ModelOpt MXFP4":
        expected.append(("format.ambiguous", "info", "weight_scale", None, None, None))
    return Case(layout.tensors(), expected, {"config": config, "quant": None})


def excluded(layout: Layout) -> Built:
    if layout.id == "MIXED_PRECISION":
        return "an allow-list excludes nothing"
    config, quant = layout.config, layout.quant
    if quant is not None:
        quant = {"quantization": {**quant["quantization"], "exclude_modules": ["*gate", f"{layout.prefix}*"]}}
    else:
        assert config is not None
        section = {key: value for key, value in config["quantization_config"].items() if key != "exclude"}
        section |= {
            "modules_to_not_convert" if layout.dialect == "gpt-oss" else "ignore": [f"{layout.prefix}*", "*gate"]
        }
        config = {**config, "quantization_config": section}
    expected: list[Expected] = [("config.excluded-but-quantised", "backend", None, None, None, None)]
    return Case(layout.tensors(), expected, {"config": config, "quant": quant})


def draft(layout: Layout) -> Built:
    if layout.id == "DeepSeek V4, three formats":
        return "its draft layer is in MXFP4"
    tensors = layout.tensors()
    block = layout.prefix.replace("layers.0", "layers.1")
    for kind in layout.kinds:
        if layout.arrangement == "expert":
            for expert in ALL:
                at = f"{layout.disk[kind]}.{expert}" if layout.projection_major else f"{expert}.{layout.disk[kind]}"
                tensors[f"{block}.{at}.weight"] = bf16(*SIZES[kind])
        else:
            suffix = ".weight" if layout.id == "stacked" else ""
            tensors[f"{block}.{layout.disk[kind]}{suffix}"] = bf16(EXPERTS, *SIZES[kind])
    expected: list[Expected] = [("draft.unquantised", "info", None, None, None, None)]
    if layout.id != "MIXED_PRECISION":
        expected.insert(0, ("config.unquantised-not-excluded", "warn", None, None, None, None))
    return Case(tensors, expected)


def tower(prefix: str, severity: str) -> Callable[[Layout], Built]:
    """Plain experts of a tower beside the model's."""

    def build(layout: Layout) -> Built:
        tensors = layout.tensors()
        for expert in range(2):
            for kind in ("gate", "up", "down"):
                tensors[f"{prefix}.layers.0.mlp.experts.{expert}.{kind}_proj.weight"] = bf16(*SIZES[kind])
        # Beside the note that there is a second tower; one layout has a note of that code anyway.
        expected: list[Expected] = []
        if "audit.partial" not in layout.notes:
            expected.append(("audit.partial", "info", None, None, None, None))
        if layout.id != "MIXED_PRECISION":
            expected.append(("weight.unquantised", severity, "weight", None, None, None))
        return Case(tensors, expected)

    return build


def kv(value: float, code: str) -> Callable[[Layout], Built]:
    def build(layout: Layout) -> Built:
        name = layout.prefix.partition("layers.0")[0] + "layers.0.self_attn.k_proj.k_scale"
        severity = "info" if code == "kv.identity" else "error"
        expected: list[Expected] = [(code, severity, None, None, None, None)]
        return Case({**layout.tensors(), name: tensor(np.float32(value))}, expected)

    return build


FAULTS: dict[str, Callable[[Layout], Built]] = {
    **{f"{role} missing": missing(role) for role in ("input_scale", "weight_scale_2", "weight_scale", "weight")},
    "input_scale missing in a projection": projection_hole,
    "input_scale missing in a rank": rank_hole,
    "input_scale missing everywhere": mislabelled,
    **{f"{role} {kind}": stored(role, kind) for role in ("input_scale", "weight_scale_2") for kind in CLASSES},
    "weight_scale_2 in F64, beyond F32": beyond_float32,
    "input_scale 1000 × its peers": outlier("input_scale"),
    "weight_scale_2 1000 × its peers": outlier("weight_scale_2"),
    "input_scale filled in": filled,
    "down's largest input_scale in two more experts": copied,
    "input_scale exactly 1": identity,
    "weight_scale_2 the other way up": convention,
    "gate and up differ": pair_mismatch,
    "no scalar": no_scalar,
    "block scales of another width": block_width,
    "block scales of another type": block_type,
    "last expert absent": absent,
    "an expert between absent": gap,
    "an expert in FP8": mixed_layer,
    "a projection in BF16": unquantised,
    "a vision tower's experts in BF16": tower("vision_tower.encoder", "info"),
    "another tower's experts in BF16": tower("audio_tower", "error"),
    "pre_quant_scale on some": pre_quant_scale,
    "pre_quant_scale all ones": pre_quant_ones,
    "no quantisation config": config_absent,
    "another quant_method": config_method,
    "experts excluded": excluded,
    "draft layer in BF16, not excluded": draft,
    "KV scale zero": kv(0.0, "kv.zero"),
    "KV scale NaN": kv(float("nan"), "kv.invalid"),
    "KV scale 1": kv(1.0, "kv.identity"),
    **CONFIG_FAULTS,
    **LINEAR_FAULTS,
}  # fmt: skip


# Public reports of which a fault is the kind, by their numbers in the specification's list.
CASES = {
    "input_scale missing": "1, 2, 5", "input_scale missing in a projection": "7, 8, 10",
    "input_scale missing in a rank": "9", "input_scale missing everywhere": "3", "weight_scale_2 missing": "15, 24",
    "input_scale zero": "4, 13", "input_scale nan": "4, 13", "input_scale inf": "4, 13", "input_scale negative": "4",
    "input_scale subnormal": "4", "input_scale 1000 × its peers": "40", "input_scale exactly 1": "13",
    "weight_scale_2 the other way up": "16", "gate and up differ": "14", "no scalar": "47",
    "block scales of another width": "27", "block scales of another type": "26, 27", "a projection in BF16": "23",
    "pre_quant_scale on some": "6", "pre_quant_scale all ones": "6", "no quantisation config": "36",
    "another quant_method": "17, 36", "experts excluded": "35", "draft layer in BF16, not excluded": "34",
    "KV scale zero": "48", "KV scale NaN": "48", "KV scale 1": "48",
    "attention excluded, and quantised": "35",
    "fused attention's weight_scale_2 differ": "22", "attention in BF16, not excluded": "23",
}  # fmt: skip


def markdown() -> str:
    """The matrix as a page."""
    lines = [
        "# What the audit finds, in which layout",
        "",
        "Made by `python -m tests.audit.fault_matrix`. `tests/audit/test_matrix.py` holds every cell (build the file,",
        "audit it: exactly these findings), as many healthy files beside them, and this page to the code. A dash says",
        "that the layout cannot have the fault: it stores no such tensor, or one for all experts. Numbers of cases are",
        "those of the public reports in `tests/audit/test_cases*.py`. What needs weights is in `test_deep.py`, a lost",
        "or cut shard in each layout in `test_cases_files.py`, whole models of fifteen families in `test_families.py`.",
        "Where the configuration contradicts the tensors, `test_config_faults.py` and `test_lists.py` go further than",
        "a row: every spelling of a label, a target or a list, with the sound twin of each.",
        "",
        "| layout | dialect | scheme | a tensor |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for layout in LAYOUTS.values():
        name = layout.name(3, layout.kinds[-1], layout.roles[-1])
        lines.append(f"| {layout.id} | `{layout.dialect}` | {layout.scheme} | `{name}` |")
    lines.append("")
    for fault, build in FAULTS.items():
        codes: dict[str, list[str]] = {}
        for layout in LAYOUTS.values():
            case = build(layout)
            said = f"– ({case})"
            if isinstance(case, Case):
                said = ", ".join(dict.fromkeys(f"`{code}`" for code, *_ in case.expected))
            codes.setdefault(said, []).append(layout.id)
        title = f"## {fault}" + (f" (cases {CASES[fault]})" if fault in CASES else "")
        lines += [title, "", "| says | layouts |", "|---|---|"]
        ordered = sorted(codes.items(), key=lambda item: item[0].startswith("–"))
        lines += [f"| {said} | {'; '.join(names)} |" for said, names in ordered] + [""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "audit-matrix.md").write_text(markdown(), encoding="utf-8")
