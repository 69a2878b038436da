"""What decides a forecast besides scales: files, configuration, layout, kernels and stored bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nvfp4viz.audit.backends import DEEP_CODES, LARGE, Family, activation_of, is_clamped, outcome_of_bytes
from nvfp4viz.audit.facts import Facts
from nvfp4viz.audit.forecast_scales import MILD, WILD, Effect
from nvfp4viz.audit.labels import CONFLICTS, TWO_LABELS
from nvfp4viz.audit.parallel import is_narrow, minds_rows, odd_rows
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.texts import id_list
from nvfp4viz.audit.two_files import readers_of
from nvfp4viz.serving.selection import ACTIVATIONS


def of_files(family: Family, findings: list[Finding]) -> Iterable[Effect]:
    """Files and configuration that stop a load, or that servers skip silently."""
    for item in findings:
        # Of shards that are missing `nvfp4viz.audit.forecast_lost` speaks.
        if item.code.startswith("container.") and item.severity == "error" and item.code != "container.missing-shard":
            yield Effect("load-error", (), "model", set(), "why.file", {"file": _file(item)})
        elif item.params.get("aside"):
            yield from _of_aside(family, _file(item))
        elif item.code == "config.invalid" and _stops(item, family):
            yield Effect("load-error", (), "model", set(), "why.config", {"file": _file(item)})
        elif item.text == "config.conflict.size":
            layers = set(item.params["numbers"])
            yield Effect("load-error", (), "model", layers, "why.config-size", dict(item.params))
        elif item.text == "config.conflict.size.padded":
            layers = set(item.params["numbers"])
            possible = ("load-error", "safe")
            yield Effect("load-error", possible, "model", layers, "why.config-size.padded", dict(item.params))
        elif item.text == "config.conflict.size.linear":
            yield Effect("load-error", (), "model", set(), "why.config-size.linear", dict(item.params))
        elif item.text == "config.conflict.experts":
            yield Effect("load-error", (), "model", set(), "why.experts-wide", dict(item.params))
        elif item.text == "config.conflict.experts.unused" and family.engine in ("vllm", "sglang"):
            # Some of their models' loaders skip a name that they do not know, others look it up and stop.
            yield Effect("load-error", ("load-error", "safe"), "model", set(), "why.experts-unused", dict(item.params))
        elif item.text == "weight.unquantised.left-alone" and family.engine == "vllm":
            yield Effect("load-error", (), "model", {item.layer or 0}, "why.left-alone", {"tensor": item.tensors[0]})
        elif item.text == "weight.unquantised.unlisted" and family.engine == "vllm":
            yield Effect("load-error", (), "model", {item.layer or 0}, "why.unlisted", {"tensor": item.tensors[0]})
        elif item.text == "config.excluded-but-quantised.fused" and family.engine not in item.params["engines"]:
            # What others call the fused module was not read.
            file = item.params["file"] if item.params.get("one_file") else None
            if file is None or family.engine in readers_of(file):
                fill = {"tensor": item.tensors[0], "slots": item.count}
                yield Effect("safe", ("load-error", "safe"), "none", set(), "why.lists-disagree", fill)
        elif item.code == "config.excluded-but-quantised" and family.engine in item.params.get("engines", ()):
            layers = set(item.params.get("numbers", ()))
            if item.text.endswith(".part"):
                yield Effect("load-error", (), "model", layers, "why.excluded-part", dict(item.params))
            elif item.text.endswith(".fused"):
                possible, end = ((), "") if item.params["certain"] else (("load-error", "safe"), ".perhaps")
                yield Effect("load-error", possible, "model", set(), f"why.excluded-fused{end}", dict(item.params))
            elif layers and family.engine == "vllm":
                yield Effect("load-error", (), "model", layers, "why.excluded")
            elif layers:
                # It knows no prefix but its own, and ``experts.*`` is no name of the experts as a whole.
                yield Effect("load-error", ("load-error", "safe"), "model", layers, "why.excluded.perhaps")
        elif _is_of_ordinary_lists(item) and family.engine in item.params.get("engines", (family.engine,)):
            fill = {"tensor": item.tensors[0], "slots": item.count}
            if family.engine == "vllm" and item.code == "config.unquantised-not-excluded":
                # Read of vLLM: it builds all that is not excluded as quantised, where a model's code asks for that.
                yield Effect("load-error", ("load-error", "safe"), "model", set(), "why.not-excluded", fill)
                continue
            # What a load does with them was not read, of other servers or the reverse: a forecast is no worse than its
            # finding, and no more certain.
            yield Effect("safe", ("load-error", "safe"), "none", set(), "why.lists-disagree", fill)
        elif item.text in CONFLICTS:
            if _stops(item, family):
                yield Effect("load-error", (), "model", set(), "why.config-method")
        elif item.text == "config.conflict.files" and family.engine in item.params["engines"]:
            certain = item.params["certain"]
            possible, text = ((), "why.sidecar") if certain else (("load-error", "safe"), "why.sidecar.perhaps")
            yield Effect("load-error", possible, "model", set(), text, dict(item.params))
        elif item.text == "config.conflict.group":
            # vLLM and SGLang allocate scales by it; whether the others ask for it was not read.
            asks = family.engine in ("vllm", "sglang")
            possible = () if asks else ("load-error", "safe")
            yield Effect("load-error", possible, "model", set(), "why.config-group", dict(item.params))
        elif item.text in TWO_LABELS and family.engine in item.params["engines"]:
            yield Effect("load-error", ("load-error", "safe"), "model", set(), "why.two-labels", dict(item.params))
        elif item.text.startswith("loader.note.mixed") and family.engine in item.params["engines"]:
            fill = {"algo": item.params["algo"], "slots": item.count, "tensor": item.tensors[0]}
            # Of whom it was not read nobody is accused: a forecast is no worse than its finding.
            yield Effect("safe", (), "none", set(), "why.mixed-algo", fill)
        elif item.code == "config.absent" and item.severity == "error":
            yield Effect("load-error", (), "model", set(), "why.config-absent")
        elif item.code == "config.incomplete" and family.engine in item.params.get("engines", ()):
            fields = {"fields": item.params["fields"]} if "fields" in item.params else {}
            text = "why.config-incomplete" if fields else "why.config"
            yield Effect("load-error", (), "model", set(), text, {"file": _file(item), **fields})


def _of_aside(family: Family, file: str) -> Iterable[Effect]:
    """A broken file that the index does not name; vLLM and SGLang leave it out (`filter_duplicate_safetensors_files`).

    Transformers looks for a ``model.safetensors`` before it looks for an index; TensorRT-LLM opens all files of the
    folder, and in later versions not those called consolidated.
    """
    if family.engine == "tensorrt-llm" and "consolidated" in file:
        yield Effect("load-error", ("load-error", "safe"), "model", set(), "why.file-aside.perhaps", {"file": file})
    elif family.engine == "tensorrt-llm" or (family.engine == "transformers" and file == "model.safetensors"):
        yield Effect("load-error", (), "model", set(), "why.file-aside", {"file": file})


def _is_of_ordinary_lists(item: Finding) -> bool:
    """Ordinary modules that the configuration quantises and the file does not, or the reverse.

    A draft layer may never be loaded, and experts that are named one by one are asked for as a layer.
    """
    if item.code == "config.unquantised-not-excluded":
        return not item.text.endswith(".draft")
    ordinary = item.code == "config.excluded-but-quantised" and item.severity == "warn"
    return ordinary and not item.text.endswith(".experts")


def _stops(item: Finding, family: Family) -> bool:
    """Is it wrong for everybody, or in the one of two files that this backend goes by?"""
    return item.severity == "error" or (item.severity == "backend" and family.engine in item.params.get("engines", ()))


def _file(item: Finding) -> str:
    return str(item.params.get("file", ""))


# A tensor of another type or shape than the parameter it is copied into stops a load.
_REFUSED_LAYOUTS = (
    "weight.unquantised", "weight.shape", "scheme.mixed-layer", "block-scale.group", "scheme.pre-quant-scale",
    "scale.shape",
)  # fmt: skip
# Of experts apart from their layer's others `of_files` speaks.
_SINGLED_OUT = ("weight.unquantised.left-alone", "weight.unquantised.unlisted")


def of_structure(family: Family, findings: list[Finding], facts: Facts) -> Iterable[Effect]:
    """Whole experts that are absent, unquantised or of another format, and tensors of the weights that are missing."""
    for item in findings:
        layers = set(item.params.get("numbers", ())) if item.layer is None else {item.layer}
        # Where another layer alone says that there are more, all may be there.
        perhaps = item.text == "expert.absent.other"
        lost = (item.code in ("expert.absent", "expert.gap") and (item.severity == "error" or perhaps)) or (
            item.code == "scale.missing" and item.role != "input_scale"
        )
        refuses = family.engine == "tensorrt-llm"
        unread = item.text == "scale.missing.weight.up" and family.gate_rules
        if item.text == "expert.gap.pruned":
            # A forecast is no worse than its finding.
            ends = () if refuses else ("degraded", "nan", "zero")
            fill = {"experts": id_list(item.experts or ()), "layer": item.layer}
            yield Effect("safe", tuple(sorted((*ends, "load-error", "safe"))), "none", layers, "why.numbers", fill)
        elif lost and unread and not refuses:
            fill = {"tensor": item.tensors[0], "slots": item.count}
            yield Effect("degraded", MILD, "experts", layers, "why.up-unread", fill)
        elif item.text == "scale.missing.mixer.perhaps":
            # They may do without on purpose: a forecast is no worse than its finding.
            ends = ("load-error", "safe") if refuses else ("degraded", "nan", "safe", "zero")
            yield Effect("safe", ends, "none", layers, "why.mixer-perhaps", dict(item.params))
        elif family.engine == "vllm" and item.params.get("block") == "NVFP4":
            # Of experts nothing is asked (11); of MXFP4 modules, and by other engines, nobody read it.
            yield Effect("load-error", (), "model", layers, "why.sentinel", {"tensor": item.tensors[0]})
        elif lost and item.code != "scale.missing" and _is_short(item, facts):
            # One tensor for all experts that holds fewer does not fit its parameter.
            fill = {"tensor": "".join(item.tensors[:1])}
            possible = ("load-error", "safe") if perhaps else ()
            yield Effect("load-error", possible, "model", layers, "why.layout", fill)
        elif item.text.startswith("expert.absent.all"):
            ends = ("load-error", (), "model") if refuses else ("undefined", ("degraded", "nan", "zero"), "layer")
            yield Effect(*ends, layers, f"why.no-experts{'.key-error' if refuses else ''}")
        elif lost:
            ends = ("load-error",) if refuses else ("degraded", "nan", "zero")
            yield Effect(
                "load-error" if refuses else "undefined",
                tuple(sorted((*ends, "safe"))) if perhaps else () if refuses else ends,
                "model" if refuses else _scope_of_loss(family, item, facts),
                layers,
                "why.key-error" if refuses else f"why.{'bias' if item.role == 'bias' else 'weights'}-missing",
                {"tensor": item.tensors[0] if item.tensors else "", "slots": item.count},
            )
        elif item.text.startswith("scheme.pre-quant-scale.values"):
            lost = item.params["classes"] == "zero"
            ends = ("degraded", ()) if lost else ("nan", ("degraded", "nan"))
            fill = {"tensor": "".join(item.tensors[:1]), "classes": item.params["classes"]}
            scope = "experts" if item.experts is not None else "layer" if layers else "model"
            yield Effect(*ends, scope, layers, "why.pre-quant", fill)
        elif item.code in _REFUSED_LAYOUTS and item.text not in _SINGLED_OUT and _stops(item, family):
            fill = {"tensor": "".join(item.tensors[:1])}
            # Loaders of experts in one tensor cut the bias for each rank, and may take a narrow one as it is.
            possible = ("degraded", "load-error") if item.text == "weight.shape.bias.experts" else ()
            yield Effect("load-error", possible, "model", layers, "why.layout", fill)
        elif item.code == "scale.convention" and item.severity == "error" and item.layer is None:
            # Every token passes an ordinary layer; of experts `of_weights` speaks.
            yield Effect("degraded", WILD, "model", set(), "why.convention.linear")


def _scope_of_loss(family: Family, item: Finding, facts: Facts) -> str:
    """The layer where all of its experts are lost, and where unwritten activation scales enter a maximum over them."""
    if item.layer is None or item.experts is None:
        return "layer"
    if item.tower:
        return "experts"
    if len(item.experts) >= facts.view.experts_in.get(item.layer, 0):
        return "layer"
    kinds = facts.view.projections_in[item.layer] if item.projection is None else (item.projection,)
    lost = any((item.layer, expert, kind) not in facts.view.modules for expert in item.experts for kind in kinds)
    written = "input_scale" not in facts.needs.get(item.layer, ())
    return "experts" if written or not lost or family.reach != "layer" else "layer"


def _is_short(item: Finding, facts: Facts) -> bool:
    """Are some experts absent from tensors that hold a layer's others?"""
    dialect = facts.view.dialects.get(item.layer) if item.layer is not None and not item.tower else None
    if dialect is None or dialect.arrangement == "expert" or item.experts is None or item.layer is None:
        return False
    kinds = facts.view.projections_in[item.layer] if item.projection is None else (item.projection,)
    return any((item.layer, 0, kind) in facts.view.modules for kind in kinds) and 0 not in item.experts


def of_functions(family: Family, config: Mapping[str, Any], facts: Facts, ep: int | None) -> Iterable[Effect]:
    """What the class refuses by what its kernel does for experts, whatever their scales are (5.1)."""
    layers = set(facts.layers)
    if not family.ranks and (ep or 1) > 1:
        yield Effect("unsupported", (), "model", layers, "why.unsupported.ep", {"ep": ep})
    if not family.biases and (bias := _bias(facts)):
        yield Effect("unsupported", (), "model", layers, "why.unsupported.bias", {"tensor": bias})
    activation = activation_of(config)
    # Of a name that is in nobody's list it was not read what vLLM takes it for.
    if family.activations is not None and activation in ACTIVATIONS and activation not in family.activations:
        yield Effect("unsupported", (), "model", layers, "why.unsupported.activation", {"activation": activation})
    elif not family.clamps and is_clamped(config):
        yield Effect("unsupported", (), "model", layers, "why.unsupported.clamp")


def _bias(facts: Facts) -> str | None:
    """The name of a bias of an expert's projection; one layer is as good as another."""
    for layer in facts.view.moe_layers[:1]:
        for kind in facts.view.projections_in[layer]:
            module = facts.view.modules.get((layer, 0, kind))
            names = [f"{module.name}{dot}bias" for dot in "._"] if module is not None else []
            for name in names:
                if name in facts.checkpoint.tensors:
                    return name
    return None


def of_alignment(name: str, findings: list[Finding], facts: Facts) -> Iterable[Effect]:
    """What kernels do with shapes that are none of their own."""
    for item in findings:
        # Ranks are a server's: Transformers has no kernel of its own that they would cut blocks for.
        if item.code == "parallel.group-split" and name != "transformers":
            # A draft may never be loaded.
            possible = ("degraded", "load-error", *(("safe",) if item.params.get("drafts") else ()))
            yield Effect("load-error", possible, "model", set(), "why.group-split", dict(item.params))
        elif name == "vllm-cutlass" and item.text == "parallel.alignment.hidden":
            yield Effect("degraded", ("degraded", "nan"), "model", set(), "why.alignment.hidden", dict(item.params))
        elif name == "vllm-cutlass" and item.text.removesuffix(".none") in _ROWS and minds_rows(facts):
            yield _of_rows(item.params["rows"], refused=item.text.startswith("parallel.alignment.refused"))


# Findings about rows of gate and up.
_ROWS = ("parallel.alignment", "parallel.alignment.refused")


def of_width(name: str, facts: Facts) -> Iterable[Effect]:
    """The same without a word about ranks, where no number of them makes the kernel's shapes."""
    rows = odd_rows(facts) if name == "vllm-cutlass" else None
    if rows is not None:
        yield _of_rows(rows, refused=not is_narrow(rows))


def _of_rows(rows: object, *, refused: bool) -> Effect:
    if refused:
        return Effect("unsupported", (), "model", set(), "why.alignment", {"rows": rows})
    # So narrow a width is a toy's, and was tried by nobody.
    return Effect("safe", ("safe", "unsupported"), "none", set(), "why.alignment.narrow", {"rows": rows})


def of_bytes(name: str, family: Family, findings: list[Finding]) -> Iterable[Effect]:
    """What ``--deep`` has found in packed codes and block scales, which every backend multiplies with."""
    for item in findings:
        if item.code not in DEEP_CODES:
            continue
        large = item.text.startswith(LARGE)
        outcome, possible = outcome_of_bytes(name, item.code, item.projection, large=large)
        text, fill = f"why.{LARGE if large else item.code}", {**item.params, "layer": item.layer, "slots": item.count}
        if item.text.endswith(".linear"):
            # Every token passes an ordinary layer; its NaN bytes are the one thing that vLLM looks for on loading.
            stops = item.code == "block-scale.nan" and family.engine == "vllm"
            text = f"{text}.refused" if stops else f"{text}.linear"
            yield Effect("load-error" if stops else outcome, () if stops else possible, "model", set(), text, fill)
        else:
            scope = "layer" if item.experts is None else "experts"
            yield Effect(outcome, possible, scope, {item.layer} if item.layer is not None else set(), text, fill)
