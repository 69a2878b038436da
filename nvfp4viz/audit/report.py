"""The report: the audit's answer as records in the shape of its JSON interface (``nvfp4viz.audit/1``).

Field names and codes are an interface for other people's scripts: adding is allowed, renaming is not.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint.problems import SEVERITIES

SCHEMA = "nvfp4viz.audit/1"
VERDICTS = ("ok", *SEVERITIES)

# A JSON number, or "nan", "inf", "-inf"; None where a finding has no single value.
Value = float | str | None


class FormatInfo(msgspec.Struct, frozen=True):
    """How the checkpoint stores its experts; ``config_sources`` in the order in which vLLM reads them."""

    dialect: str
    scheme: str
    config_sources: tuple[str, ...]
    group_size: int


class ModelInfo(msgspec.Struct, frozen=True):
    """What is known of the model's shape; ``draft_layers`` have experts too and come after the model's own."""

    architecture: str | None
    layers: int | None
    moe_layers: tuple[int, ...]
    experts: int
    projections: tuple[str, ...]
    top_k: int | None
    draft_layers: tuple[int, ...] = ()


class ContainerInfo(msgspec.Struct, frozen=True):
    """The files; ``bytes_read`` is what was really fetched from shards, ``side_bytes`` of index and side files."""

    files: int
    tensors: int
    bytes: int
    header_bytes: int
    bytes_read: int
    side_bytes: int


class Coverage(msgspec.Struct, frozen=True):
    """Slots of one role.

    Attributes
    ----------
    expected
        Slots that the scheme needs: layers × experts × projections, less those of unquantised experts.
    present, missing, unreadable
        Add up to ``expected``; unreadable ones are in files that are absent or damaged.
    invalid
        Of those present: zero, NaN, infinite, negative, subnormal, or no scalar.
    filled
        Of those present: with the fingerprint of a back-fill.
    """

    expected: int
    present: int
    missing: int
    invalid: int
    filled: int
    unreadable: int


class Finding(msgspec.Struct, frozen=True):
    """One thing to know, for one cause.

    Attributes
    ----------
    code, severity
        Of the audit vocabulary.
    role, layer, projection, experts, value
        Where it applies; None where it does not.
    tensors
        The first few full names.
    count
        Slots, tensors or files concerned.
    draft
        It is about draft (MTP) layers alone, whose numbers come after the model's own.
    tower
        It is about experts of another tower, whose layers are numbered from zero again: how their names begin.
    message, advice
        In English; `nvfp4viz.audit.describe` gives them in another language, from ``text`` and ``params``.
    """

    code: str
    severity: str
    role: str | None
    layer: int | None
    projection: str | None
    experts: tuple[int, ...] | None
    tensors: tuple[str, ...]
    count: int
    value: Value
    message: str
    advice: str
    text: str
    params: dict[str, Any]
    draft: bool = False
    tower: str | None = None


class BackendForecast(msgspec.Struct, frozen=True):
    """What one backend will make of the checkpoint.

    Attributes
    ----------
    outcome
        ``"safe"``, ``"degraded"``, ``"undefined"``, ``"nan"``, ``"zero"``, ``"load-error"``, ``"ignored"`` (it does not
        read what is wrong) or ``"unsupported"``.
    possible
        What may come of it where the outcome is not certain: an uninitialised slot or the prompt decides.
    scope
        How far it reaches: ``"none"``, ``"experts"``, ``"layer"`` or ``"model"``.
    layers
        Where.
    why
        In English; ``text`` and ``params`` as in `Finding`.
    """

    name: str
    outcome: str
    possible: tuple[str, ...]
    scope: str
    layers: tuple[int, ...]
    why: str
    text: str
    params: dict[str, Any]


class Report(msgspec.Struct, frozen=True):
    """The whole answer.

    Attributes
    ----------
    verdict
        The worst finding's severity, or ``"ok"``.
    fingerprint
        ``sha256:`` over the sorted (name, dtype, shape) of all readable tensors; see `fingerprint`.
    auto
        With a GPU named: the backend that vLLM picks there by itself, or None where it has none.
    gpu
        That GPU, such as ``"sm_100"``.
    """

    schema: str
    source: str
    fingerprint: str
    verdict: str
    format: FormatInfo
    model: ModelInfo
    container: ContainerInfo
    coverage: dict[str, Coverage]
    findings: tuple[Finding, ...]
    backends: tuple[BackendForecast, ...]
    auto: str | msgspec.UnsetType | None = msgspec.UNSET
    gpu: str | msgspec.UnsetType = msgspec.UNSET


def to_json(report: Report) -> str:
    """The report as indented JSON with a final newline.

    >>> import json
    >>> from nvfp4viz.audit import audit
    >>> from nvfp4viz.checkpoint import MemorySource, file_bytes
    >>> json.loads(to_json(audit(MemorySource({"model.safetensors": file_bytes({})}))))["schema"]
    'nvfp4viz.audit/1'
    """
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"


def json_value(value: Any) -> Value:
    """A float as JSON can hold it; float32 with its own shortest digits.

    >>> json_value(np.float32(2e-3)), json_value(np.nan), json_value(-np.inf)
    (0.002, 'nan', '-inf')
    """
    number = float(value)
    if math.isnan(number):
        return "nan"
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    return float(str(value)) if isinstance(value, np.float32) else number


def json_values(values: npt.NDArray[np.float32]) -> list[Value]:
    """`json_value` of each of a vector, at a fraction of the time.

    >>> json_values(np.array([2e-3, np.nan, -np.inf], np.float32))
    [0.002, 'nan', '-inf']
    """
    finite = np.isfinite(values)
    # NumPy writes float32 with its own shortest digits.
    numbers: list[Value] = [float(text) for text in values.astype(str)]
    for at in np.flatnonzero(~finite).tolist():
        numbers[at] = json_value(values[at])
    return numbers


def worst(severities: list[str]) -> str:
    """The verdict over findings' severities."""
    return max(severities, key=VERDICTS.index, default="ok")
