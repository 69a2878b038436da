"""What the dataflow page says and tabulates about a layer run twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nvfp4viz.figures.coverage import shown
from nvfp4viz.figures.words import words
from nvfp4viz.model.tokenizer import Tokenizer
from nvfp4viz.moe.steps import STEPS

if TYPE_CHECKING:
    from nvfp4viz.serving.twins import LayerTwins


def token_names(twins: LayerTwins) -> list[str]:
    """The text of each token, white space made visible."""
    vocabulary = Tokenizer().vocabulary
    return [shown(vocabulary[token]) for token in twins.token_ids]


def first_bad_route(twins: LayerTwins) -> int:
    """The route to look at first: the first into an expert without a scale, else the first of all."""
    hits = np.flatnonzero(np.isin(twins.healthy.dispatch.ids.ravel(), twins.missing))
    return int(hits[0]) if len(hits) else 0


def counts(twins: LayerTwins) -> list[dict[str, int]]:
    """Of each step: rows (at the last step, tokens) in all, with other bits, with a NaN, and all zero."""
    found = twins.comparison
    top_k = twins.healthy.dispatch.ids.shape[1]
    last = len(STEPS) - 1
    return [
        {
            name: int(flags[step, :: top_k if step == last else 1].sum())
            for name, flags in (
                ("all", np.ones_like(found.nan)),
                ("differs", found.differs),
                ("nan", found.nan),
                ("zero", found.zero & found.differs),
            )
        }
        for step in range(len(STEPS))
    ]


def describe_twins(twins: LayerTwins, lang: str) -> str:
    """Where the two runs part, and what comes of it, in one or two sentences."""
    found, steps = twins.comparison, counts(twins)
    hits = int(np.isin(twins.healthy.dispatch.ids, twins.missing).sum())
    values: dict[str, object] = {"routes": steps[0]["all"], "tokens": len(twins.token_ids), "layer": twins.layer}
    values |= {"hits": hits, "others": steps[-1]["differs"]}
    if found.first_difference is None:
        return words(lang, "dataflow.seen.same", **values)
    at = found.first_difference
    values |= {
        "step": at,
        "name": words(lang, f"dataflow.steps.{STEPS[at - 1]}.name"),
        "rows": steps[at - 1]["differs"],
    }
    if found.first_nan is None:
        return words(lang, "dataflow.seen.finite", **values)
    nan = found.first_nan
    values |= {"nan": nan, "nan_name": _name(nan, lang)}
    return words(lang, "dataflow.seen.nan", broken=twins.tokens_broken, **values)


def _name(step: int, lang: str) -> str:
    return words(lang, f"dataflow.steps.{STEPS[step - 1]}.name")


def route_rows(twins: LayerTwins) -> list[dict[str, object]]:
    """Every route as a row: its place at each stage, and the first step (from 1) at which it differs or holds a NaN."""
    plan, found = twins.healthy.dispatch, twins.comparison
    tokens, top_k = plan.ids.shape
    names = token_names(twins)

    def first(flags: np.ndarray) -> int | None:
        return int(np.argmax(flags)) + 1 if flags.any() else None

    return [
        {
            "position": t,
            "token": names[t],
            "rank": j,
            "expert": int(plan.ids[t, j]),
            "weight": float(twins.healthy.weights[t, j]),
            "c_map": int(plan.c_map[t * top_k + j]),
            "first_difference": first(found.differs[:, t * top_k + j]),
            "first_nan": first(found.nan[:, t * top_k + j]),
        }
        for t in range(tokens)
        for j in range(top_k)
    ]


def expert_rows(twins: LayerTwins) -> list[dict[str, object]]:
    """Every expert as a row: problem sizes, offsets, encode scales and alphas of both loads."""
    plan = twins.healthy.dispatch
    rows = []
    for expert in range(twins.healthy_experts.count):
        row: dict[str, object] = {
            "expert": expert,
            "missing": expert in twins.missing,
            "expert_offset": int(plan.expert_offsets[expert]),
            "blockscale_offset": int(plan.blockscale_offsets[expert]),
            "problem_size1": " × ".join(map(str, plan.problem_sizes1[expert].tolist())),
            "problem_size2": " × ".join(map(str, plan.problem_sizes2[expert].tolist())),
        }
        for side, experts in (("healthy", twins.healthy_experts), ("faulty", twins.faulty_experts)):
            for name in ("a1_gscale", "g1_alphas", "a2_gscale", "g2_alphas"):
                row[f"{side}_{name}"] = float(getattr(experts, name)[expert])
        rows.append(row)
    return rows
