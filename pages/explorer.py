"""Explorer: open a checkpoint, see which experts lack a usable scale, which backend breaks, and what mends it."""

import streamlit as st

from nvfp4viz.audit.repair import POLICIES
from nvfp4viz.checkpoint.problems import SEVERITIES
from nvfp4viz.errors import NvError
from nvfp4viz.figures.slots import SCALE_ROLES
from nvfp4viz.ui import (
    errors,
    explorer,
    explorer_code,
    explorer_diff,
    explorer_map,
    explorer_open,
    explorer_ranks,
    explorer_repair,
    explorer_report,
    explorer_source,
    lesson,
    own_mark,
    state,
)
from nvfp4viz.ui.samples import SAMPLE_IDS
from nvfp4viz.ui.shell import ensure_shell

TABS = ("findings", "anatomy", "backends", "files", "ranks", "compare", "repair")

ensure_shell()
page = lesson.open_page(
    "explorer",
    checkpoint=state.choice(SAMPLE_IDS, default="tiny-moe-nvfp4-holes"),
    other=state.choice(SAMPLE_IDS, default="tiny-moe-nvfp4-full"),
    origin=own_mark.setting(),
    other_origin=own_mark.setting(),
    role=state.choice(SCALE_ROLES, default="input_scale"),
    gpu=state.choice(("any", *explorer.GPUS), default="any"),
    tp=state.integer(1, explorer_ranks.MOST_RANKS),
    ep=state.integer(1, explorer_ranks.MOST_RANKS),
    policy=state.choice(POLICIES, default="peer-max"),
    value=state.number(-1e38, 1e38, default=1.0),
    suspects=state.flag(),
    tab=state.choice(TABS, default=TABS[0]),
    hidden=state.choices(SEVERITIES),
)

opened = None
try:
    opened = explorer_source.choose(page)
except NvError as error:
    errors.show(error)
with st.container(horizontal=True, gap="medium", vertical_alignment="bottom", key="explorer_serving"):
    st.selectbox(
        page.t("backends.gpu"),
        ("any", *explorer.GPUS),
        format_func=lambda name: page.t("backends.any") if name == "any" else name,
        width=190,
        **page.view.widget("gpu"),
    )
    for name in ("tp", "ep"):
        st.number_input(
            page.t(f"ranks.{name}"),
            1,
            explorer_ranks.MOST_RANKS,
            value=None,
            placeholder=page.t("ranks.any"),
            help=page.t(f"ranks.{name}_help"),
            width=150,
            **page.view.widget(name),
        )

explorer_open.remember(opened)
if opened is not None:
    gpu = None if page.view["gpu"] == "any" else page.view["gpu"]
    opened = explorer_open.asked(opened, gpu, page.view["tp"], page.view["ep"])
    explorer.summary(page, opened)
    explorer_map.map_and_slot(page, opened)
    drawers = (
        explorer.findings,
        explorer.anatomy,
        explorer.backends,
        explorer.files,
        explorer_ranks.ranks,
        explorer_diff.compare,
        explorer_repair.repair,
    )
    for tab, draw in zip(page.tabs(*(f"tabs.{name}" for name in TABS)), drawers, strict=True):
        if tab.open:
            with tab:
                draw(page, opened)
    explorer_report.report_buttons(page, opened)

page.foot(
    **explorer_code.shown(opened, page.view),
    data={} if opened is None else {"slots": lambda: explorer.slot_rows(opened)},
    left_out=explorer_source.left_out_of_links(page),
)
