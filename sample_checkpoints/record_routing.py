"""Record tiny-moe's real routing: ``python -m sample_checkpoints.record_routing`` (about five minutes).

``routing.npz`` holds, document by document, how many tokens each (layer, expert) slot received:

- ``calibration``: the news documents that the holed export was calibrated on, both passes of
  `sample_checkpoints.calibrate` added up, so that the totals are those of ``calibration/news.json``;
- one entry a domain: ``DOCUMENTS`` documents of seed ``SEED``, which neither training nor calibration drew, read by the
  model as trained.

A test recomputes a part and demands the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from nvfp4viz.model import corpus
from nvfp4viz.model.calibrate import DOCUMENTS as CALIBRATION_DOCUMENTS
from nvfp4viz.model.calibrate import SEED as CALIBRATION_SEED
from nvfp4viz.model.routing_log import RoutingLog, record_routing
from sample_checkpoints import ROUTING
from sample_checkpoints.calibrate import served_twice

SEED = 4
DOCUMENTS = 2048


def record(domain: str, start: int = 0, stop: int = DOCUMENTS) -> RoutingLog:
    """Documents ``start`` up to ``stop`` of a domain, read by the model as trained."""
    trained, _ = served_twice()
    return record_routing(trained.model, trained.experts, corpus.sample(domain, SEED, stop)[start:])


def record_calibration(start: int = 0, stop: int = CALIBRATION_DOCUMENTS["news"]) -> RoutingLog:
    """Documents of the news calibration, their tokens counted in both of its passes."""
    texts: Sequence[str] = corpus.sample(corpus.CALIBRATION_DOMAIN, CALIBRATION_SEED, stop)[start:]
    one, two = (record_routing(served.model, served.experts, texts) for served in served_twice())
    return RoutingLog(one.tokens, one.counts + two.counts)


def main() -> None:
    parts: dict[str, np.ndarray] = {}
    for name in ("calibration", *corpus.DOMAINS):
        log = record_calibration() if name == "calibration" else record(name)
        parts[f"{name}.tokens"] = log.tokens
        parts[f"{name}.counts"] = log.counts
        print(f"{name}: {log.documents} documents, {int(log.tokens.sum())} tokens, {int(log.holes_after()[-1])} slots "
              "without one", file=sys.stderr, flush=True)  # fmt: skip
    np.savez_compressed(ROUTING, **parts)


if __name__ == "__main__":
    main()
