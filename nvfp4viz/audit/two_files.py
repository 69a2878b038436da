"""``config.json`` and ``hf_quant_config.json`` that say different things, and who goes by which.

vLLM reads `quantization_config` of ``config.json`` and asks the older file only where there is none; so does SGLang,
and transformers knows no other.  TensorRT-LLM goes by the older file and warns where ``config.json`` differs, except
where the older one names no algorithm (``tensorrt_llm/_torch/model_config.py``, 008e0af: "the file is authoritative").
So one wrong label of two is wrong on some servers and harmless on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.labels import CONFLICTS, NAMED, expert_conflicts, expert_labels
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.texts import words
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, SourceConfig, printable
from nvfp4viz.checkpoint.source import CONFIG

OF_CONFIG, OF_SIDECAR = ("vllm", "sglang", "transformers"), ("tensorrt-llm",)
"""Engines by the file that they read first; ``engines`` of a finding are those that read the wrong one."""


def files_findings(checkpoint: Checkpoint, view: CanonicalView, labels: Sequence[Finding]) -> Iterator[Finding]:
    """The labels' findings, of the engines that they are about, and ``config.conflict`` between the two files.

    Parameters
    ----------
    labels
        What `label_findings` says of both files together.
    """
    first, second = checkpoint.quant_config.sections
    wrong = [bool(expert_conflicts(checkpoint, view, section)) for section in (first, second)]
    told = False
    for item in labels:
        if item.severity == "error" and item.text in CONFLICTS:
            told = True
            # Without an algorithm of its own the older file sends TensorRT-LLM to the other.
            if wrong[0] != wrong[1] and second.explicit and item.text in NAMED:
                item = _of_one_file(item, first, second) if wrong[0] else _of_one_file(item, second, first)
        yield item
    if not told:
        yield from _algorithms(checkpoint, view, first, second, certain=wrong[1])
    yield from _group_sizes(view, first, second)
    yield from _exclude_lists(first, second)


def _of_one_file(item: Finding, wrong: SourceConfig, right: SourceConfig) -> Finding:
    """A label's finding that concerns the readers of one file alone."""
    engines = OF_CONFIG if wrong.file == CONFIG else OF_SIDECAR
    params = {
        **item.params, "engines": engines, "file": wrong.file, "other": right.file,
        "readers": ", ".join(_NAMES[engine] for engine in engines),
    }  # fmt: skip
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


def _exclude_lists(first: SourceConfig, second: SourceConfig) -> Iterator[Finding]:
    if first.exclude is not None and second.exclude is not None:
        differing = sorted(set(first.exclude) ^ set(second.exclude))
        if differing:
            fill = {"pattern": printable(differing[0]), "differing": len(differing)}
            yield make("config.conflict", "warn", text="config.conflict.exclude", count=len(differing), fill=fill)
