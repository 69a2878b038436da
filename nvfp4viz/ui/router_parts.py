"""The part of the routing page about routers: the same logits through all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import streamlit as st

from nvfp4viz.errors import InputError, NvError
from nvfp4viz.figures import routers as figures
from nvfp4viz.moe.router_comparison import ROUTERS, Picked, compare_routers
from nvfp4viz.moe.routers import FUSED_MOST, IMAGE_SENTINELS, is_image
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.ui import errors, predict
from nvfp4viz.ui.export import about
from nvfp4viz.ui.i18n import lang, listed
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.theme import theme
from nvfp4viz.ui.values import parse_values

PAGE = "routing"
EXPERTS, TOP, GROUPS, TOP_GROUPS, VOCABULARY = 8, 3, 4, 2, 16
LOGITS = (2.0, -1.0, 0.5, 1.5, -0.5, 1.0, 0.0, -2.0)
IMAGE_LO = VOCABULARY - IMAGE_SENTINELS
"""The last ids of the made-up vocabulary stand for places of an image."""
MOST_BIAS = float(np.finfo(np.float32).max)
BIAS = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.75, 0.0)
PRESETS = {
    "spread": LOGITS,
    "ties": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "nan": (2.0, -1.0, 0.5, 1.5, math.nan, 1.0, 0.0, -2.0),
    "inf": (2.0, -1.0, 0.5, 1.5, math.inf, 1.0, 0.0, -2.0),
}
TABLE = np.stack([np.random.default_rng(at).permutation(EXPERTS)[:TOP] for at in range(VOCABULARY)])
"""A hash router's table, made up: three experts for each of a few token ids."""


def logits_of(page: Lesson) -> tuple[float, ...]:
    """The page's logits as routers take them: float32, so that what is beyond its range is infinite."""
    with np.errstate(over="ignore"):
        return tuple(np.asarray(page.view["logits"], np.float32).tolist())


def rows_of(page: Lesson) -> list[dict[str, object]]:
    """Every router's choice as rows, with the token and the factor; the bias is a column as the logits are one."""
    view = page.view
    of = {"token": view["token"], "scaling": view["scaling"]}
    rows = figures.router_rows(picked_of(page), logits_of(page))
    return about(of, [row | {"bias": view["bias"][row["expert"]]} for row in rows])


def picked_of(page: Lesson) -> dict[str, Picked]:
    """The page's logits through every router."""
    view = page.view
    return compare_routers(
        logits_of(page),
        TOP,
        bias=view["bias"],
        token=view["token"],
        table=TABLE,
        groups=GROUPS,
        top_groups=TOP_GROUPS,
        scaling=view["scaling"],
        image_sentinel_lo=IMAGE_LO,
    )


def routers_part(page: Lesson) -> None:
    """The same logits through all of them; a NaN is asked about first."""
    view = page.view
    stage, side = page.stage()
    names = {name: page.t(f"router.{name}") for name in ROUTERS}
    with side:
        # What a link or the reader's own numbers brought may be none of the samples.
        st.session_state[f"{PAGE}.preset"] = _preset_of(view["logits"])
        st.selectbox(
            page.t("routers.preset"),
            tuple(PRESETS),
            index=None,
            placeholder=page.t("routers.own"),
            format_func=lambda name: page.t(f"preset.{name}"),
            key=f"{PAGE}.preset",
            on_change=_take_preset,
            args=(page,),
        )
        with st.expander(page.t("routers.own"), key=f"{PAGE}.open.own"):
            for name in ("logits", "bias"):
                st.text_input(page.t(f"routers.{name}"), key=f"{PAGE}.own_{name}", placeholder=_written(view[name]))
            st.button(page.t("routers.apply"), on_click=_take_own, args=(page,), key=f"{PAGE}.apply")
            if (problem := st.session_state.get(f"{PAGE}.problem")) is not None:
                errors.show(problem)
        left, right = st.columns(2)
        left.number_input(page.t("routers.token"), 0, VOCABULARY - 1, **view.widget("token"))
        right.number_input(page.t("routers.scaling"), 0.125, 16.0, step=0.125, **view.widget("scaling"))
        picked = picked_of(page)
        fallen = [names[name] for name, one in picked.items() if one.lost]
        page.finding(
            "routers.fallen" if fallen else "routers.seen",
            who=listed(fallen),
            choices=len({frozenset(one.ids) for one in picked.values()}),
            routers=len(picked),
        )
        page.glossary("router", "tie", "correction_bias")
    with stage:
        page.figure(
            figures.routers_figure(picked, names, logits_of(page), view["bias"], GROUPS, theme=theme(), lang=lang()),
            alt=page.t("routers.alt"),
            finding=figures.describe_routers(picked, names, lang()),
            rows=lambda: figures.router_rows(picked, logits_of(page)),
        )
    each = (
        page.t("routers.each", router=names[name], ids=_ids(one.ids), weights=_weights(one), why=_why(page, one))
        for name, one in picked.items()
    )
    st.markdown("\n".join(f"- {line}" for line in each))
    if _ask_nan(page):
        page.prose(
            "routers.text",
            version=VLLM,
            top=TOP,
            kept=TOP_GROUPS,
            groups=GROUPS,
            most=FUSED_MOST,
            image=IMAGE_LO,
            last=VOCABULARY - 1,
            places=IMAGE_SENTINELS,
        )


def _ask_nan(page: Lesson) -> bool:
    # About the sample, whatever the reader has set.
    made = compare_routers(PRESETS["nan"], TOP, bias=BIAS, token=0, table=TABLE, groups=GROUPS, top_groups=TOP_GROUPS)
    bad = next(at for at, value in enumerate(PRESETS["nan"]) if math.isnan(value))
    poisoned = tuple(name for name, one in made.items() if any(math.isnan(weight) for weight in one.weights))
    answers = {(): "none", ("gemma4",): "gemma4", ("grouped_torch", "gemma4"): "both", ROUTERS: "every"}
    return predict.ask(
        f"{PAGE}.predict.nan",
        ("none", "softmax", "gemma4", "both", "every"),
        answer=answers[poisoned],
        bad=bad,
        first=_ids(made["softmax"].ids),
        gemma=_ids(made["gemma4"].ids),
        torch=_ids(made["grouped_torch"].ids),
        fused=_ids(made["grouped"].ids),
    )


def _why(page: Lesson, one: Picked) -> str:
    image = one.router == "hash" and is_image(page.view["token"], IMAGE_LO)
    rule = "image" if image else "grouped_rule" if one.lost == "groups" else one.router
    said = page.t(f"why.{rule}", groups=_ids(one.groups), token=page.view["token"])
    if one.last_in >= 0:
        decided = page.t(
            "why.tied" if one.tied else "why.decided",
            last=one.last_in,
            at=figures.short(float(one.compared[one.last_in])),
            out=one.first_out,
            under=figures.short(float(one.compared[one.first_out])),
        )
        said = page.t("why.both", said=said, decided=decided)
    if one.lost:
        lost = page.t(f"why.lost.{one.lost}", whole=len(one.groups), groups=GROUPS, kept=TOP_GROUPS)
        said = page.t("why.both", said=said, decided=lost)
    return said


def _ids(ids: Sequence[int]) -> str:
    return listed(map(str, ids))


def _weights(one: Picked) -> str:
    return listed(figures.short(weight) for weight in one.weights)


def _written(values: Sequence[float]) -> str:
    return listed(f"{value:g}" for value in values)


def _preset_of(logits: Sequence[float]) -> str | None:
    """The sample that these logits are; NaN equals NaN here.

    >>> _preset_of((2, -1, 0.5, 1.5, math.nan, 1, 0, -2)), _preset_of((0,) * EXPERTS)
    ('nan', None)
    """
    return next((name for name, values in PRESETS.items() if np.array_equal(values, logits, equal_nan=True)), None)


def _take_preset(page: Lesson) -> None:
    name = st.session_state[f"{PAGE}.preset"]
    if name is not None:
        page.view.put(logits=PRESETS[name])


def _refuse_infinite(bias: Sequence[float]) -> None:
    for expert, value in enumerate(bias):
        if not abs(value) <= MOST_BIAS:
            raise InputError("experts.not-finite", position=expert)


def _take_own(page: Lesson) -> None:
    """What cannot be used is said and changes nothing."""
    made = {}
    for name in ("logits", "bias"):
        text = st.session_state.get(f"{PAGE}.own_{name}", "").strip()
        if text:
            try:
                made[name] = parse_values(text, EXPERTS, of="experts")
                if name == "bias":
                    _refuse_infinite(made[name])
            except NvError as problem:
                st.session_state[f"{PAGE}.problem"] = problem
                return
    st.session_state[f"{PAGE}.problem"] = None
    page.view.put(**made)
