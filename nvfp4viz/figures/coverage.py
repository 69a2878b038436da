"""Which (layer, expert) slots a checkpoint fills, and where one prompt's tokens were routed over them.

:class:`CoverageGrid` and :class:`RouteOverlay` are plain records; :func:`pack` and :func:`pack_cells` make of them the
JSON of the in-browser coverage map, :func:`coverage_figure` a Plotly figure for reports, and ``describe_*`` sentences.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4viz.figures.palette import MARKS, MONO, SANS, Theme, role, surface
from nvfp4viz.figures.words import catalogue, words

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from numpy.typing import NDArray

# The order is the byte in ``CoverageGrid.status``.
STATUSES = (
    "present",
    "missing",
    "zero",
    "nan",
    "inf",
    "neginf",
    "negative",
    "subnormal",
    "outlier",
    "filled",
    "identity",
    "unreadable",
    "absent",
)
# A token routed into one of these meets a slot without a usable number.
HOLES = ("missing", "zero", "nan", "inf", "neginf", "negative", "unreadable")
SLOT_MARKS = {name: mark for name, mark in MARKS.items() if name in STATUSES} | {
    "subnormal": "s",
    "identity": "1",
    "unreadable": "?",
}


@dataclass(frozen=True, slots=True)
class CoverageGrid:
    """One status per slot.

    Attributes
    ----------
    name
        What the grid was read from, such as a sample's id.
    layers
        Numbers of the MoE layers as the checkpoint names them.
    roles
        Row families, for example ``("w13", "w2")``.
    status
        ``(roles, layers, experts)`` uint8, indices into :data:`STATUSES`.
    values
        Stored values, float32, same shape; where nothing is stored the number is meaningless. None if there are none.
    counts
        Calibration tokens per expert, ``(layers, experts)`` int32, or None if unknown.
    scale
        Which scale the values are.
    drafts
        Those of the layers that are draft (MTP) layers, numbered after the model's own.
    divisor
        What the checkpoint calls the scale where it stores divisors; the values are one over them.  Empty elsewhere.
    """

    name: str
    layers: tuple[int, ...]
    roles: tuple[str, ...]
    status: NDArray[np.uint8]
    values: NDArray[np.float32] | None = None
    counts: NDArray[np.int32] | None = None
    scale: str = "input_scale"
    drafts: frozenset[int] = frozenset()
    divisor: str = ""

    def label(self, layer: int) -> str:
        """A layer at an axis: ``L3``, or ``D61`` for a draft layer."""
        return f"{'D' if layer in self.drafts else 'L'}{layer}"

    @property
    def experts(self) -> int:
        """Experts per layer."""
        return int(self.status.shape[2])

    def holes(self, role_name: str) -> NDArray[np.bool_]:
        """``(layers, experts)``: slots of one role without a usable number."""
        bad = [STATUSES.index(name) for name in HOLES]
        return np.isin(self.status[self.roles.index(role_name)], bad)


@dataclass(frozen=True, slots=True)
class RouteOverlay:
    """The experts that each token of one run was sent to.

    Attributes
    ----------
    tokens
        The tokens' texts, prompt first.
    prompt
        How many of them are the prompt.
    ids
        ``(tokens, layers, k)`` int16 expert ids as the router chose them.
    blind
        ``(tokens, layers + 1)``: the router's input held NaN, so its choice means nothing; the last column is the state
        after the last layer.
    """

    tokens: tuple[str, ...]
    prompt: int
    ids: NDArray[np.int16]
    blind: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RoutedHoles:
    """How a run meets the holes: see :func:`meet`."""

    routes: int
    into_holes: int
    holes_hit: int
    tokens_hit: int
    first: tuple[int, int, int] | None
    per_token: tuple[int, ...]


def meet(grid: CoverageGrid, overlay: RouteOverlay, role_name: str) -> RoutedHoles:
    """Count the routes that lead into holes; routes chosen from NaN are left out.

    Returns
    -------
    RoutedHoles
        ``first`` is (token, layer index, expert) of the first one in order of computing: the whole prompt goes through
        a layer before the next, and all of it before the answer's tokens.
    """
    holes = grid.holes(role_name)
    seen = ~overlay.blind[:, : len(grid.layers), None] & np.ones(overlay.ids.shape, bool)
    layer = np.arange(len(grid.layers))[None, :, None]
    bad = holes[layer, overlay.ids] & seen
    where = np.argwhere(bad)
    first = _first(bad, overlay)
    hit = {(int(row), int(overlay.ids[token, row, slot])) for token, row, slot in where}
    per_token = bad.sum((1, 2))
    return RoutedHoles(
        int(seen.sum()), int(bad.sum()), len(hit), int((per_token > 0).sum()), first, tuple(map(int, per_token))
    )


def _first(bad: NDArray[np.bool_], overlay: RouteOverlay) -> tuple[int, int, int] | None:
    prompt = np.argwhere(bad[: overlay.prompt].swapaxes(0, 1))
    if len(prompt):
        row, token, slot = (int(n) for n in prompt[0])
    elif bad.any():
        token, row, slot = (int(n) for n in np.argwhere(bad)[0])
    else:
        return None
    return token, row, int(overlay.ids[token, row, slot])


def describe_coverage(grid: CoverageGrid, role_name: str, lang: str) -> str:
    """One sentence: how many slots of a role have no usable number, and in how many layers."""
    holes = grid.holes(role_name)
    slots = int((grid.status[grid.roles.index(role_name)] != STATUSES.index("absent")).sum())
    if not holes.any():
        return words(lang, "coverage.finding.full", role=role_name, slots=slots)
    per_layer = holes.sum(1)
    return words(
        lang,
        "coverage.finding.holes",
        role=role_name,
        holes=int(holes.sum()),
        slots=slots,
        percent=f"{100 * holes.sum() / slots:.3g}",
        layers=int((per_layer > 0).sum()),
        of_layers=len(grid.layers),
    )


def describe_routes(grid: CoverageGrid, overlay: RouteOverlay, role_name: str, lang: str) -> str:
    """One sentence: how many of the prompt's routes lead into holes, and which is the first."""
    met = meet(grid, overlay, role_name)
    if met.first is None:
        return words(lang, "coverage.finding.clean", routes=met.routes)
    token, row, expert = met.first
    said = words(
        lang,
        "coverage.finding.bad",
        routes=met.routes,
        into=met.into_holes,
        token=shown(overlay.tokens[token]),
        position=token,
        layer=grid.layers[row],
        expert=expert,
    )
    unseen = overlay.ids[:, : len(grid.layers)].size - met.routes
    if unseen:
        why = words(lang, "coverage.finding.blind", all=met.routes + unseen, unseen=unseen)
        said += f" {why}" if lang == "en" else why
    return said


def shown(token: str) -> str:
    """A token as it is written in a sentence: white space becomes visible.

    >>> shown("\\n"), shown("a")
    ('⏎', 'a')
    """
    return {"\n": "⏎", " ": "␣", "`": "ˋ"}.get(token, token)


def status_key(status: str, divisor: object = "") -> str:
    """The text that names a status; of a stored divisor what it amounts to is not what is stored.

    >>> status_key("zero"), status_key("zero", "input_global_scale")
    ('coverage.status.zero', 'coverage.status_divisor.zero')
    """
    other = bool(divisor) and status in ("zero", "inf", "neginf", "subnormal")
    return f"coverage.status{'_divisor' * other}.{status}"


def pack(
    grid: CoverageGrid,
    *,
    lang: str,
    role_name: str,
    overlay: RouteOverlay | None = None,
    selected: tuple[int, int] | None = None,
    tall: bool = False,
) -> dict[str, Any]:
    """What the in-browser map shows of the record, words in the reader's language; the cells are `pack_cells`.

    ``selected`` is (layer index, expert); ``tall`` draws bigger, for a projector.
    """
    arrays = [grid.status.tobytes()]
    packed: dict[str, Any] = {
        "cells": cells_id(grid),
        "name": grid.name,
        "layers": list(grid.layers),
        "drafts": [layer in grid.drafts for layer in grid.layers],
        "experts": grid.experts,
        "roles": list(grid.roles),
        "role": grid.roles.index(role_name),
        "statuses": list(STATUSES),
        "holes": list(HOLES),
        "marks": SLOT_MARKS,
        "names": {name: words(lang, status_key(name, grid.divisor)) for name in STATUSES},
        "scale": f"1/{grid.divisor}" if grid.divisor else grid.scale,
        "words": {name: catalogue(lang)[f"coverage.map.{name}"] for name in _WORDS},
        "selected": None if selected is None else {"layer": selected[0], "expert": selected[1]},
        "tall": tall,
        "routes": None,
    }
    if overlay is not None:
        met = meet(grid, overlay, role_name)
        first = met.first
        packed["routes"] = {
            "tokens": list(overlay.tokens),
            "prompt": overlay.prompt,
            "k": int(overlay.ids.shape[2]),
            "ids": _base64(overlay.ids.astype(np.int16)),
            "blind": _base64(overlay.blind[:, :-1].astype(np.uint8)),
            "blindEnd": [bool(state) for state in overlay.blind[:, -1]],
            "first": None if first is None else {"token": first[0], "layer": first[1], "expert": first[2]},
            "focus": overlay.prompt - 1 if first is None else first[0],
        }
        arrays += [overlay.ids.tobytes(), overlay.blind.tobytes()]
    # A new identity makes the map start afresh: cursor, token, and the short drawing motion.
    packed["id"] = hashlib.sha256(b"".join([grid.name.encode(), *arrays])).hexdigest()[:16]
    return packed


_WORDS = (
    "roles",
    "tokens",
    "token",
    "field",
    "zoom",
    "zoom_in",
    "zoom_out",
    "zoom_fit",
    "cell",
    "cell_draft",
    "counted",
    "visited",
    "first",
    "route",
)


def cells_id(grid: CoverageGrid) -> str:
    """Changes with what any cell holds."""
    digest = hashlib.sha256(repr(grid.status.shape).encode())
    for array in (grid.status, grid.values, grid.counts):
        digest.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def pack_cells(grid: CoverageGrid) -> dict[str, Any]:
    """The cells as JSON, arrays as base64: most of what a map is, and the same at every pick."""
    return {
        "id": cells_id(grid),
        "status": _base64(grid.status.astype(np.uint8)),
        "values": None if grid.values is None else _base64(grid.values.astype(np.float32)),
        "counts": None if grid.counts is None else _base64(grid.counts.astype(np.int32)),
    }


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def coverage_rows(grid: CoverageGrid, overlay: RouteOverlay | None = None) -> list[dict[str, Any]]:
    """One row a slot: layer, expert, role, status, value, calibration tokens, visits by the prompt."""
    visits = np.zeros(grid.status.shape[1:], np.int64)
    if overlay is not None:
        seen = ~overlay.blind[:, : len(grid.layers)]
        for row in range(len(grid.layers)):
            np.add.at(visits[row], overlay.ids[seen[:, row], row].ravel(), 1)
    rows = []
    for r, name in enumerate(grid.roles):
        for row, layer in enumerate(grid.layers):
            for expert in range(grid.experts):
                status = STATUSES[grid.status[r, row, expert]]
                stored = grid.values is not None and status not in ("missing", "absent")
                entry: dict[str, Any] = {"layer": layer, "expert": expert, "role": name, "status": status}
                entry["value"] = float(grid.values[r, row, expert]) if stored and grid.values is not None else None
                if grid.counts is not None:
                    entry["calibration_tokens"] = int(grid.counts[row, expert])
                if overlay is not None:
                    entry["prompt_routes"] = int(visits[row, expert])
                rows.append(entry)
    return rows


def coverage_figure(
    grid: CoverageGrid, *, role_name: str, theme: Theme, lang: str, overlay: RouteOverlay | None = None
) -> go.Figure:
    """The map as a Plotly figure, for a report or a notebook.

    Holes are gaps with their mark, never a colour of a scale; visits of the prompt are squares in the route's colour.
    """
    import plotly.graph_objects as go

    here = surface(theme)
    # A mark may not be wider than its cell in a figure of usual width.
    size = max(3, min(13, 700 // grid.experts + 1))
    codes = grid.status[grid.roles.index(role_name)]
    healthy = np.isin(codes, [STATUSES.index(name) for name in ("present", "identity", "filled", "outlier")])
    figure = go.Figure()
    figure.add_heatmap(
        z=np.where(healthy, 1, np.nan).astype(np.float32),
        x=np.arange(grid.experts, dtype=np.int16),
        y=[grid.label(layer) for layer in grid.layers],
        colorscale=[[0, here.line], [1, here.line]],
        zmin=0,
        zmax=1,
        showscale=False,
        xgap=1 if grid.experts <= 128 else 0,
        ygap=2 if len(grid.layers) <= 32 else 0,
        hovertemplate=f"%{{y}} · {words(lang, 'coverage.expert')} %{{x}}<extra></extra>",
    )
    if overlay is not None:
        seen = ~overlay.blind[:, : len(grid.layers)]
        visited = sorted(
            {(row, int(expert)) for row in range(len(grid.layers)) for expert in overlay.ids[seen[:, row], row].ravel()}
        )
        figure.add_scatter(
            x=[expert for _, expert in visited],
            y=[grid.label(grid.layers[row]) for row, _ in visited],
            mode="markers",
            marker={"symbol": "square-open", "size": size, "color": role("route", theme).text, "line": {"width": 1.5}},
            name=words(lang, "coverage.map.route"),
        )
    for name in STATUSES[1:-1]:
        rows, experts = np.nonzero(codes == STATUSES.index(name))
        if len(rows):
            figure.add_scatter(
                x=experts.astype(np.int16),
                y=[grid.label(grid.layers[row]) for row in rows],
                mode="text",
                text=[SLOT_MARKS.get(name, "?")] * len(rows),
                textfont={"color": here.ink, "family": MONO, "size": size},
                name=words(lang, status_key(name, grid.divisor)),
                hovertemplate=f"%{{y}} · {words(lang, 'coverage.expert')} %{{x}}<extra></extra>",
            )
    figure.layout = {
        "template": "none",
        "paper_bgcolor": here.page,
        "plot_bgcolor": here.page,
        "font": {"family": SANS, "color": here.ink, "size": 13},
        "height": min(900, 110 + max(14, min(40, 900 // len(grid.layers))) * len(grid.layers)),
        "margin": {"l": 56, "r": 16, "t": 16, "b": 48},
        "xaxis": {"title": words(lang, "coverage.expert"), "showgrid": False, "zeroline": False, "color": here.muted},
        "yaxis": {"autorange": "reversed", "showgrid": False, "ticks": "", "color": here.muted},
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }
    return figure
