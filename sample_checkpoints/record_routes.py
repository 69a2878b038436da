"""Record tiny-moe's routes token by token: ``python -m sample_checkpoints.record_routes`` (half a minute).

``routes.npz`` holds the chosen experts of every token of held-out documents, read by the fully calibrated W4A4 export:
the traffic that the page on expert parallelism balances.  A test recomputes documents of every domain and demands the
same.  (`record_routing` counts many more documents, without their tokens' order.)
"""

from __future__ import annotations

import sys

from nvfp4viz import serving
from nvfp4viz.model import corpus
from nvfp4viz.serving.route_trace import STEPS, RouteTrace, record_routes
from sample_checkpoints import HERE, ensure

ROUTES = HERE / "routes.npz"
DOCUMENTS = 2 * STEPS


def record(domains: tuple[str, ...] = corpus.DOMAINS, documents: int = DOCUMENTS) -> RouteTrace:
    """The first documents of each domain."""
    served = serving.load(ensure("tiny-moe-nvfp4-full"), device="cpu")
    texts = [(domain, text) for domain in domains for text in corpus.held_out_documents(domain, documents)]
    return record_routes(served, texts)


def main() -> None:
    trace = record()
    trace.write(ROUTES)
    print(f"{len(trace.lengths)} documents, {len(trace.ids)} tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
