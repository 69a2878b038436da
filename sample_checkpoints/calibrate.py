"""Recompute the calibration statistics from the BF16 model: ``python -m sample_checkpoints.calibrate`` (minutes).

The committed files are what every export is made from; a slow test recomputes them and demands the same holes.
"""

from __future__ import annotations

import sys

from nvfp4viz import serving
from nvfp4viz.model import corpus
from nvfp4viz.model.calibrate import DOCUMENTS, CalibrationStats, calibrate
from sample_checkpoints import CALIBRATION, HERE

DOMAINS = {"news": (corpus.CALIBRATION_DOMAIN,), "all": corpus.DOMAINS}


def run(which: str, documents: int | None = None) -> CalibrationStats:
    """Calibrate on ``"news"`` alone or on ``"all"`` domains, as the committed statistics were made."""
    served = serving.load(HERE / "tiny-moe-bf16", backend="bf16")
    return calibrate(served.model, served.recording(), DOMAINS[which], documents or DOCUMENTS[which])


def main() -> None:
    CALIBRATION.mkdir(exist_ok=True)
    for which in DOMAINS:
        stats = run(which)
        (CALIBRATION / f"{which}.json").write_text(stats.to_json(), encoding="utf-8")
        print(f"{which}: {stats.documents} documents, {stats.tokens} tokens, {int(stats.holes.sum())} holes "
              f"{stats.holes.sum(1).tolist()}, fewest tokens {int(stats.counts.min())}", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
