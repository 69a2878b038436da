"""What the story runs: its prompts, its builds of the model, and the replies.  No arithmetic, no drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvfp4viz.errors import ModelError
from nvfp4viz.figures.coverage import STATUSES, CoverageGrid, RouteOverlay
from nvfp4viz.model.config import TinyMoeConfig
from nvfp4viz.model.corpus import DEMO_PROMPTS, held_out_documents
from nvfp4viz.model.tokenizer import Tokenizer
from nvfp4viz.ui import caches
from nvfp4viz.ui.caches import Ask, Build, Timed
from nvfp4viz.ui.story_cards import Reply

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nvfp4viz.model import Generation
    from nvfp4viz.serving.remedies import RemedyReply

PROMPT_IDS = ("news", "arithmetic", "code")
MOST_CHARACTERS = 120
"""Of a prompt of one's own; the trained context is 256."""
TOKENS = 48
"""Asked for in a run: room for a whole line of code, under a second on two idle cores."""
REMEDY_TOKENS = 20
"""Asked for in each remedy's run: there are nine, with three prompts each."""
LOSS_TEXTS = 3
"""Held-out texts a domain for the loss of a remedy: few, so that a remedy takes about a second."""
ANSWER_TOKENS = 4
"""Of an answer, on the coverage map: enough to see whether it goes on like the prompt."""

BF16 = Build("tiny-moe-bf16", backend="bf16")
LAYERS, EXPERTS = TinyMoeConfig().num_hidden_layers, TinyMoeConfig().num_experts
HOLED = "tiny-moe-nvfp4-holes"
CALIBRATED_ON = "news"
FULL = Build("tiny-moe-nvfp4-full")


def holed(fate: str, seed: int = 0) -> Build:
    """The broken export on the CUTLASS path, with what memory held in the slots it leaves open.

    The seed only matters where the leftovers are random: other fates share one cache entry.
    """
    return Build(HOLED, allocator=fate, seed=seed if fate == "random" else 0)


def ask() -> Ask:
    """What every remedy is measured on: the story's prompts, and held-out text of their domains."""
    texts = tuple((domain, tuple(held_out_documents(domain, LOSS_TEXTS))) for domain in PROMPT_IDS)
    return Ask(tuple(prompt(name) for name in PROMPT_IDS), texts, REMEDY_TOKENS)


def prompt(prompt_id: str) -> str:
    """The text of one of the story's prompts."""
    return DEMO_PROMPTS[prompt_id]


def run(build: Build, prompt_id: str, text: str | None = None) -> tuple[Reply, Timed]:
    """One prompt through one build, from the cache where it has been run.

    Raises
    ------
    ModelError
        If the model cannot read the prompt.
    """
    asked = prompt(prompt_id) if text is None else text
    timed = caches.generation(build, asked, TOKENS, guessing=False)  # the story says how long it took
    return reply_of(prompt_id, asked, timed.generation, TOKENS), timed


def reply_of(prompt_id: str, asked: str, generation: Generation, limit: int) -> Reply:
    """A generation as a page shows it."""
    vocabulary = Tokenizer().vocabulary
    ids = tuple(int(token) for token in generation.token_ids)
    texts = tuple(vocabulary[token] for token in ids)
    return Reply(prompt_id, asked, len(generation.prompt_ids), texts, ids, limit)


def checked(text: str) -> str:
    """A prompt of the reader's own, refused with its reason where it cannot be used.

    Raises
    ------
    ModelError
        ``prompt.empty``, ``prompt.too-long`` or ``prompt.unknown-characters``.
    """
    if not text.strip():
        raise ModelError("prompt.empty")
    if len(text) > MOST_CHARACTERS:
        raise ModelError("prompt.too-long", characters=len(text), limit=MOST_CHARACTERS)
    Tokenizer().encode(text)
    return text


def model_config() -> TinyMoeConfig:
    """Sizes of the model."""
    return caches.served(BF16).model.config


def coverage(build: Build) -> CoverageGrid:
    """Which input scales the load wrote, with their values and the calibration counts."""
    served = caches.served(build)
    missing, present = STATUSES.index("missing"), STATUSES.index("present")
    status, values = [], []
    for projections in (("gate", "up"), ("down",)):
        rows, stored = [], []
        for parameters in served.parameters:
            written = [parameters.written["input_scale", projection] for projection in projections]
            rows.append(np.where(np.logical_and.reduce(written), present, missing))
            stored.append(np.max([parameters.values("input_scale", projection) for projection in projections], axis=0))
        status.append(rows)
        values.append(stored)
    return CoverageGrid(
        build.sample,
        tuple(parameters.layer for parameters in served.parameters),
        ("w13", "w2"),
        np.array(status, np.uint8),
        np.array(values, np.float32),
        caches.calibration_counts(CALIBRATED_ON),
    )


def overlay(generation: Generation) -> RouteOverlay:
    """The routes of a prompt and of the first tokens of its answer, for the coverage map."""
    vocabulary = Tokenizer().vocabulary
    trace = generation.trace
    steps = min(trace.routes.shape[0], len(generation.prompt_ids) + ANSWER_TOKENS)
    ids = [*generation.prompt_ids, *generation.token_ids][:steps]
    # A router that sees NaN, its own residual's or one that attention brought, gives NaN weights.
    unseeing = np.isnan(trace.weights[:steps]).any(axis=2)
    blind = np.concatenate([unseeing, trace.nan_fraction[:steps, -1:] > 0], axis=1)
    return RouteOverlay(
        tuple(vocabulary[token] for token in ids), len(generation.prompt_ids), trace.routes[:steps], blind
    )


def nan_of(generation: Generation) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """The tokens of the coverage map, and the share of NaN after each layer, ``(tokens, layers)``."""
    seen = overlay(generation)
    return seen.tokens, generation.trace.nan_fraction[: len(seen.tokens)]


def slot_value(build: Build, layer: int, expert: int) -> np.float32:
    """What the gate slot of an expert's ``input_scale`` holds after the load."""
    return np.float32(caches.served(build).parameters_of(layer).values("input_scale", "gate")[expert])


def text_of(token: int) -> str:
    """A token's text."""
    return Tokenizer().vocabulary[token]


def reply_to(prompt_id: str, reply: RemedyReply) -> Reply:
    """A remedy's reply as a page shows it."""
    ids = tuple(int(token) for token in reply.token_ids)
    return Reply(prompt_id, reply.prompt, 0, tuple(text_of(token) for token in ids), ids, REMEDY_TOKENS)
