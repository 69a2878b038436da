"""Measure the samples and write it down: ``python -m sample_checkpoints.measure`` (minutes).

Losses per domain in BF16 and fully calibrated W4A4, how many of 50 held-out prompts fall silent per domain and per fate
of the unwritten slots, and what the calibrated model answers to the pages' prompts.  Results go to ``measured.json``,
losses and silence also into the tables of both READMEs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from nvfp4viz import serving
from nvfp4viz.model import corpus
from sample_checkpoints import HERE, MEASURED, ensure

DOCUMENTS = 50
TOKENS = 12
ANSWERED = 64
MARKS = ("<!-- measured -->", "<!-- /measured -->")


def losses() -> dict[str, dict[str, float]]:
    """Nats per character on held-out documents, by domain: BF16 and fully calibrated W4A4 on the CUTLASS path."""
    models = {
        "bf16": serving.load(ensure("tiny-moe-bf16"), backend="bf16"),
        "w4a4": serving.load(ensure("tiny-moe-nvfp4-full")),
    }
    return {
        domain: {
            name: round(serving.evaluate(model, corpus.held_out_documents(domain, DOCUMENTS)), 4)
            for name, model in models.items()
        }
        for domain in corpus.DOMAINS
    }


def collapses() -> dict[str, dict[str, list[int]]]:
    """By fate and domain: prompts out of 50 answered with padding alone, and those that turn into padding later."""
    result: dict[str, dict[str, list[int]]] = {}
    for fate in serving.ALLOCATORS:
        served = serving.load(ensure("tiny-moe-nvfp4-holes"), allocator=fate)
        result[fate] = {}
        for domain in corpus.DOMAINS:
            found = serving.collapse(served, corpus.held_out_prompts(domain, DOCUMENTS), TOKENS)
            result[fate][domain] = [found.silent, found.broken]
        print(fate, result[fate], file=sys.stderr, flush=True)
    return result


def answers() -> dict[str, str]:
    """What the fully calibrated model answers to each domain's demo prompt, `corpus.DEMO_PROMPTS`."""
    served = serving.load(ensure("tiny-moe-nvfp4-full"), device="cpu")
    return {domain: served.generate(prompt, ANSWERED).text for domain, prompt in corpus.DEMO_PROMPTS.items()}


def tables(measured: dict[str, Any]) -> str:
    """The two tables in Markdown."""
    lines = ["| domain | BF16 | W4A4, calibrated on all | difference |", "|---|---|---|---|"]
    for domain, loss in measured["losses"].items():
        lines.append(f"| {domain} | {loss['bf16']:.4f} | {loss['w4a4']:.4f} | {loss['w4a4'] - loss['bf16']:+.4f} |")
    fates = list(measured["collapses"])
    lines += ["", "| domain | " + " | ".join(fates) + " |", "|---|" + "---|" * len(fates)]
    for domain in measured["losses"]:
        cells = (measured["collapses"][fate][domain] for fate in fates)
        lines.append(f"| {domain} | " + " | ".join(f"{silent} + {broken}" for silent, broken in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    measured = {
        "documents": DOCUMENTS,
        "tokens": TOKENS,
        "losses": losses(),
        "collapses": collapses(),
        "answers": answers(),
    }
    MEASURED.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    path = HERE / "README.md"
    before, rest = path.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    path.write_text(f"{before}{MARKS[0]}\n{tables(measured)}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
