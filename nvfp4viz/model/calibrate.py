"""Calibration with natural routing: what each expert sees while text goes through a model with BF16 activations.

An expert that no token is routed to has no maximum, and the exporter then has nothing to write: that is the whole
defect this project is about.  The statistics are a small JSON file; float32 maxima are written as doubles that read
back exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.model import corpus
from nvfp4viz.model.inference import TinyMoe
from nvfp4viz.model.tokenizer import EOS, Tokenizer
from nvfp4viz.moe.experts import ExpertsResult
from nvfp4viz.moe.routing import Routing

Array = npt.NDArray[Any]
SEED = 2
"""Of the calibration documents; training draws its own with seed 1."""
DOCUMENTS = {"news": 512, "all": 256}
"""Documents a domain: 512 is ModelOpt's default calibration size."""


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationStats:
    """What a calibration run saw.

    Attributes
    ----------
    domains
        Kinds of text.
    documents, tokens
        How many in all.
    counts : (layers, experts) int64
        Routed tokens.
    input_amax : (layers, experts, 2) float32
        Largest magnitude at the input of the first product (gate and up share it) and of the second; 0 where an expert
        saw nothing.
    """

    domains: tuple[str, ...]
    documents: int
    tokens: int
    counts: npt.NDArray[np.int64]
    input_amax: npt.NDArray[np.float32] = field(repr=False)

    @property
    def holes(self) -> npt.NDArray[np.bool_]:
        """(layers, experts): experts without a single token."""
        return self.counts == 0

    def merged(self, other: CalibrationStats) -> CalibrationStats:
        """Both runs together: counts add up, maxima are the larger ones."""
        return CalibrationStats(
            tuple(dict.fromkeys(self.domains + other.domains)),
            self.documents + other.documents,
            self.tokens + other.tokens,
            self.counts + other.counts,
            np.maximum(self.input_amax, other.input_amax),
        )

    def to_json(self) -> str:
        """As a file that can be read and compared."""
        head = {"domains": list(self.domains), "documents": self.documents, "tokens": self.tokens}
        rows = {
            "counts": self.counts.tolist(),
            "input_amax": [[[float(v) for v in pair] for pair in layer] for layer in self.input_amax],
        }
        body = ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in (head | rows).items())
        return "{\n" + body.replace("]], [[", "]],\n  [[") + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> CalibrationStats:
        """Read what `to_json` wrote."""
        data: Mapping[str, Any] = json.loads(text)
        return cls(
            tuple(data["domains"]),
            int(data["documents"]),
            int(data["tokens"]),
            np.array(data["counts"], np.int64),
            np.array(data["input_amax"], np.float32),
        )

    @classmethod
    def read(cls, path: Path) -> CalibrationStats:
        return cls.from_json(path.read_text(encoding="utf-8"))


RecordingExperts = Callable[[int, Array, Routing], ExpertsResult]


@dataclass(slots=True)
class _Watch:
    """Experts that note what each of them sees."""

    experts: RecordingExperts
    counts: npt.NDArray[np.int64]
    input_amax: npt.NDArray[np.float32]

    def __call__(self, layer: int, x: Array, routing: Routing) -> ExpertsResult:
        result = self.experts(layer, x, routing)
        trace = result.trace
        assert trace is not None, "calibration needs experts that record"
        ends = trace.dispatch.expert_offsets
        for expert in np.unique(routing.ids).tolist():
            rows = slice(int(ends[expert]), int(ends[expert + 1]))
            self.counts[layer, expert] += rows.stop - rows.start
            for which, values in enumerate((trace.input.values[rows], trace.intermediate.values[rows])):
                top = np.abs(values.astype(np.float32)).max(initial=0.0)
                self.input_amax[layer, expert, which] = max(self.input_amax[layer, expert, which], top)
        return result


def calibrate(
    model: TinyMoe, experts: RecordingExperts, domains: Sequence[str], documents: int, seed: int = SEED
) -> CalibrationStats:
    """Send ``documents`` of each domain through the model and note what each expert sees.

    Parameters
    ----------
    model
        The dense part.
    experts
        Experts with BF16 activations that record (``ServedModel.recording()``).
    """
    c = model.config
    watch = _Watch(
        experts,
        np.zeros((c.num_hidden_layers, c.num_experts), np.int64),
        np.zeros((c.num_hidden_layers, c.num_experts, 2), np.float32),
    )
    tokens = 0
    for ids in _encoded(domains, documents, seed):
        model.forward(ids, watch)
        tokens += len(ids)
    return CalibrationStats(tuple(domains), documents * len(domains), tokens, watch.counts, watch.input_amax)


def _encoded(domains: Sequence[str], documents: int, seed: int) -> Iterable[list[int]]:
    tokenizer = Tokenizer()
    for domain in domains:
        for text in corpus.sample(domain, seed, documents):
            yield [*tokenizer.encode(text), EOS]
