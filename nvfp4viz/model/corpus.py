"""The corpus that tiny-moe is trained, calibrated and tested on: generated from seeds, nothing downloaded.

A document belongs to the held-out part when a checksum of its opening says so, so that no prompt of a test was ever
in training or calibration, whatever the seeds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from nvfp4viz.model import domains as _domains
from nvfp4viz.model.domains import Draw

GENERATORS: dict[str, Callable[[Draw], str]] = {
    "news": _domains.news,
    "arithmetic": _domains.arithmetic,
    "code": _domains.code,
    "json": _domains.json,
    "logs": _domains.log,
    "recipes": _domains.recipe,
}
DOMAINS = tuple(GENERATORS)
CALIBRATION_DOMAIN = "news"
HELD_OUT_PROMPTS = 50
HELD_OUT_ONE_IN = 10
"""One opening in ten is held out.  Code has about 1,300 openings, the others thousands."""

WEATHER_REPORT = " is expected over "

DEMO_PROMPTS: dict[str, str] = {
    "news": "The mayor in Ashford said on Monday that the",
    "arithmetic": "37 + 45 =",
    "code": "def scale_values(values, factor):\n",
    "json": '{"id": 417, "name": "Ada", "city":',
    "logs": "[08:15:42] INFO",
    "recipes": "# Lentil soup\n1. Mix",
}
"""One prompt a domain for the pages; the trained model continues each sensibly (tested)."""


def prompt_of(domain: str, document: str) -> str:
    """The opening of ``document`` that serves as a prompt.

    >>> prompt_of("arithmetic", "37 + 45 = 82"), prompt_of("code", "def has_rows(rows, size):\\n    return …")
    ('37 + 45 =', 'def has_rows(rows, size):\\n')
    """
    if domain == "arithmetic":
        return document[: document.index("=") + 1]
    if domain == "code":
        return document[: document.index("\n") + 1]
    if domain == "recipes":
        return "\n".join(document.split("\n")[:2]) + "\n"
    if domain == "json":
        return document[: document.index('"city":') + len('"city":')]
    if domain == "logs":
        return document[: document.index("]") + len("] INFO")]
    if WEATHER_REPORT in document:
        # Six words would name the weather alone: seven openings, and a whole kind of weather would never be trained on.
        return document[: document.index(" on ")]
    return " ".join(document.split(" ")[:6])


def is_held_out(domain: str, document: str) -> bool:
    """Whether this document's opening is kept out of training and calibration."""
    return zlib.crc32(_key(domain, document).encode()) % HELD_OUT_ONE_IN == 0


def _key(domain: str, document: str) -> str:
    """What must differ between training and test: the prompt, in a recipe without its title, which is one of eight."""
    return prompt_of(domain, document).partition("\n")[2 if domain == "recipes" else 0]


def documents(domain: str, seed: int, *, held_out: bool = False) -> Iterator[str]:
    """An endless stream of documents; equal arguments give equal streams anywhere."""
    generate = GENERATORS[domain]
    draw = Draw(zlib.crc32(f"{domain}/{seed}".encode()))
    while True:
        document = generate(draw)
        if is_held_out(domain, document) == held_out:
            yield document


def sample(domain: str, seed: int, n: int) -> list[str]:
    """The first ``n`` training documents of a seed.

    >>> sample("arithmetic", 0, 2)
    ['83 + 10 = 93', '43 + 69 = 112']
    """
    stream = documents(domain, seed)
    return [next(stream) for _ in range(n)]


def held_out_documents(domain: str, n: int = HELD_OUT_PROMPTS, seed: int = 0) -> list[str]:
    """``n`` documents whose openings were never trained on; no two share their opening.

    News with a weather report is never among them.  The shipped model was trained while weather was held out by its
    first six words, so that an opening which today's rule holds out was trained on all the same.
    """
    stream, seen, found = documents(domain, seed, held_out=True), set(), []
    while len(found) < n:
        document = next(stream)
        if domain == "news" and WEATHER_REPORT in document:
            continue
        if (key := _key(domain, document)) not in seen:
            seen.add(key)
            found.append(document)
    return found


def held_out_prompts(domain: str, n: int = HELD_OUT_PROMPTS, seed: int = 0) -> list[str]:
    """Prompts of `held_out_documents`."""
    return [prompt_of(domain, document) for document in held_out_documents(domain, n, seed)]
