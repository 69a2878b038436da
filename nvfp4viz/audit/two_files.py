"""``config.json`` and ``hf_quant_config.json`` that say different things, and who goes by which.

vLLM reads `quantization_config` of ``config.json`` and asks the older file only where there is none; so does SGLang,
and transformers knows no other.  TensorRT-LLM goes by the older file and warns where ``config.json`` differs, except
where the older one names no algorithm (``tensorrt_llm/_torch/model_config.py``, 008e0af: "the file is authoritative").
So one wrong label of two is wrong on some servers and harmless on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from nvfp4viz.audit.facts import CLAIMS
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.labels import CONFLICTS, NAMED, expert_conflicts, expert_labels
from nvfp4viz.audit.linears import Linear
from nvfp4viz.audit.module_names import is_built_by_list
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.texts import words
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, QuantConfig, SourceConfig, printable
from nvfp4viz.checkpoint.source import CONFIG

OF_CONFIG, OF_SIDECAR = ("vllm", "sglang", "transformers"), ("tensorrt-llm",)
"""Engines by the file that they read first; ``engines`` of a finding are those that read the wrong one."""


def of_each_file(quant: QuantConfig, look: Callable[[QuantConfig], Iterable[Finding]]) -> Iterator[Finding]:
    """What a check of exclude lists finds by each file's list, for those who go by that file.

    Parameters
    ----------
    look
        The check; is given the sections whose lists count.  ``engines`` in a finding's fill are those that it is about,
        all where there is none.

    Yields
    ------
    Finding
        As found where both files give it; else about the readers of one file, and no error any more: ``backend``.
    """
    if len(quant.sections) != 2:
        yield from look(quant)
        return
    first, second = quant.sections
    if not second.explicit:
        # Without an algorithm the older file sends its reader to the other, list and all.
        yield from look(QuantConfig((first,)))
        return
    if _leave_out_alike(first, second):
        yield from look(quant)
        return
    found = [list(look(QuantConfig((section,)))) for section in (first, second)]
    keys = [{_key(item) for item in items} for items in found]
    for item in found[0]:
        if _key(item) in keys[1]:
            yield item
        else:
            yield from _of_readers(item, first, second)
    for item in found[1]:
        if _key(item) not in keys[0]:
            yield from _of_readers(item, second, first)


def _leave_out_alike(first: SourceConfig, second: SourceConfig) -> bool:
    """The same patterns, whatever their order, and no allow-list in one file alone."""
    lists = [set(section.exclude or ()) for section in (first, second)]
    return lists[0] == lists[1] and first.quantized_layers == second.quantized_layers


def _key(item: Finding) -> tuple[Any, ...]:
    return item.text, item.severity, item.layer, item.projection, item.experts, item.tensors, item.count


def _of_readers(item: Finding, file: SourceConfig, other: SourceConfig) -> Iterator[Finding]:
    """A finding by one file's list; none where those that it is about go by the other."""
    engines = tuple(engine for engine in readers_of(file.file) if engine in item.params.get("engines", _NAMES))
    if not engines:
        return
    params = {**item.params, **one_file(file.file, other.file), "engines": engines}
    message, advice = words(item.text, params)
    severity = "backend" if item.severity == "error" else item.severity
    yield msgspec.structs.replace(item, severity=severity, params=params, message=message, advice=advice)


def readers_of(file: str) -> tuple[str, ...]:
    """Engines that go by ``config.json`` or by ``hf_quant_config.json`` where there are both."""
    return OF_CONFIG if file == CONFIG else OF_SIDECAR


def one_file(file: str, other: str) -> dict[str, Any]:
    """Fill of a finding about one of two files: its readers, and that its words end with them (`texts.words`)."""
    engines = readers_of(file)
    readers = ", ".join(_NAMES[engine] for engine in engines)
    return {"file": file, "other": other, "readers": readers, "engines": engines, "one_file": True}


def files_findings(
    checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear], labels: Sequence[Finding]
) -> Iterator[Finding]:
    """The labels' findings, of the engines that they are about, and ``config.conflict`` between the two files.

    Parameters
    ----------
    labels
        What `label_findings` says of both files together, and of each one's exclude list.
    """
    first, second = checkpoint.quant_config.sections
    wrong = [bool(expert_conflicts(checkpoint, view, section)) for section in (first, second)]
    told = False
    for item in labels:
        if item.severity in ("error", "backend") and item.text in CONFLICTS:
            told = True
            # Without an algorithm of its own the older file sends TensorRT-LLM to the other.
            if item.severity == "error" and wrong[0] != wrong[1] and second.explicit and item.text in NAMED:
                item = _of_one_file(item, first, second) if wrong[0] else _of_one_file(item, second, first)
        yield item
    if not told:
        yield from _algorithms(checkpoint, view, first, second, certain=wrong[1])
    yield from _group_sizes(view, first, second)
    yield from _exclude_lists(linears, first, second)
    yield from _fields(first, second)


def _of_one_file(item: Finding, wrong: SourceConfig, right: SourceConfig) -> Finding:
    """A label's finding that concerns the readers of one file alone."""
    # Its own words name the readers.
    params = {**item.params, **one_file(wrong.file, right.file), "one_file": False}
    text = f"{item.text}.one-file"
    message, advice = words(text, params)
    return msgspec.structs.replace(item, severity="backend", text=text, params=params, message=message, advice=advice)


_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers", "tensorrt-llm": "TensorRT-LLM"}


def _algorithms(
    checkpoint: Checkpoint, view: CanonicalView, first: SourceConfig, second: SourceConfig, *, certain: bool
) -> Iterator[Finding]:
    """Another algorithm in the file that TensorRT-LLM reads, while the others' fits the tensors."""
    # An algorithm derived from the method is no claim: DeepSeek's FP8 base stands beside NVFP4 experts.
    differ = first.explicit and second.explicit and first.algo != second.algo
    if differ or certain:
        labels = expert_labels(checkpoint, view)
        # It asks for activation scales, and there is none: the same KeyError as with this file alone.
        asks = bool(second.algo and second.algo.startswith(CLAIMS))
        certain = certain or (asks and not view.activation_blocks and not checkpoint.unreadable and _lacks_inputs(view))
        said = first.algo if first.explicit else next((label for label in labels if label), first.algo)
        yield _conflict("quant_algo", said, second.algo, certain=certain)


def _group_sizes(view: CanonicalView, first: SourceConfig, second: SourceConfig) -> Iterator[Finding]:
    sizes = {dialect.group for layer in view.moe_layers if (dialect := view.dialects[layer]) is not None}
    differ = first.group_size != second.group_size and None not in (first.group_size, second.group_size)
    # That the first one is wrong is said where the tensors are looked at.
    if differ and (len(sizes) != 1 or first.group_size in sizes):
        yield _conflict("group_size", first.group_size, second.group_size, certain=False)


def _conflict(key: str, first: Any, second: Any, *, certain: bool) -> Finding:
    fill = {
        "key": key, "first": printable(str(first), 60), "second": printable(str(second), 60), "engines": OF_SIDECAR,
        "certain": certain,
    }  # fmt: skip
    return make("config.conflict", "backend", text="config.conflict.files", count=1, fill=fill)


def _lacks_inputs(view: CanonicalView) -> bool:
    """NVFP4 experts in a layout whose activation scales would be known by name."""
    dialects = (view.dialects[layer] for layer in view.moe_layers)
    return any(own is not None and own.block == "NVFP4" and own.names_activations for own in dialects)


def _exclude_lists(linears: Sequence[Linear], first: SourceConfig, second: SourceConfig) -> Iterator[Finding]:
    """Modules that one list leaves out and the other does not, where no tensor tells which of them is wrong.

    Lists may spell the same modules in two ways, and name modules that are not there.
    """
    if first.exclude is None or second.exclude is None or _leave_out_alike(first, second):
        return
    # Of packed modules, and of those that a server builds so, the checks against the tensors speak.
    names = [linear.name for linear in linears if linear.format == "plain" and not is_built_by_list(linear.name)]
    differing = [name for name in names if first.lists(name) != second.lists(name)]
    if differing:
        fill = {"module": printable(differing[0]), "differing": len(differing)}
        yield make("config.conflict", "warn", text="config.conflict.exclude", count=len(differing), fill=fill)


def _fields(first: SourceConfig, second: SourceConfig) -> Iterator[Finding]:
    """The older file without its object ``quantization``, which TensorRT-LLM looks up; what lacks in it is null there.

    ModelOpt's own mixed exports lack fields.  An absent list excludes nothing, which is held against the tensors.
    """
    if second.layout != "nested":
        fill = {**one_file(second.file, first.file), "one_file": False}
        yield make("config.incomplete", "backend", text="config.incomplete.flat", count=1, fill=fill)
