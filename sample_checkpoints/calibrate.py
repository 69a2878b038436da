"""Recompute the calibration statistics from the BF16 model: ``python -m sample_checkpoints.calibrate`` (minutes).

Each text is read twice, by the model as trained and by the one with quantised weights: a router that sits on the fence
decides differently in the two, and an export should be calibrated on both sides.  The committed files are what every
export is made from; a slow test recomputes them and demands the same.
"""

from __future__ import annotations

import sys
from functools import cache

from nvfp4viz import serving
from nvfp4viz.checkpoint import memory_checkpoint, open_checkpoint
from nvfp4viz.model import corpus, export
from nvfp4viz.model.calibrate import DOCUMENTS, CalibrationStats, calibrate
from nvfp4viz.model.config import TinyMoeConfig
from sample_checkpoints import CALIBRATION, HERE

DOMAINS = {"news": (corpus.CALIBRATION_DOMAIN,), "all": corpus.DOMAINS}


@cache
def served_twice() -> tuple[serving.ServedModel, serving.ServedModel]:
    """The model as trained, and the same behind quantised weights."""
    trained = open_checkpoint(HERE / "tiny-moe-bf16")
    config = TinyMoeConfig.from_json(trained.config or {})
    weights = export.modelopt_tensors(config, trained.read_tensors(), None)
    label = {"quantization_config": export.weight_only_label(config)}
    quantised = serving.load(memory_checkpoint(weights, config=config.to_json() | label), backend="vllm-marlin")
    return serving.load(trained, backend="bf16"), quantised


def run(which: str, documents: int | None = None) -> CalibrationStats:
    """Calibrate on ``"news"`` alone or on ``"all"`` domains, as the committed statistics were made."""
    passes = [
        calibrate(served.model, served.recording(), DOMAINS[which], documents or DOCUMENTS[which])
        for served in served_twice()
    ]
    return passes[0].merged(passes[1])


def main() -> None:
    CALIBRATION.mkdir(exist_ok=True)
    for which in DOMAINS:
        stats = run(which)
        (CALIBRATION / f"{which}.json").write_text(stats.to_json(), encoding="utf-8")
        print(f"{which}: {stats.documents} documents, {stats.tokens} tokens, {int(stats.holes.sum())} holes "
              f"{stats.holes.sum(1).tolist()}, fewest tokens {int(stats.counts.min())}", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
