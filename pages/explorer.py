"""Explorer: open a checkpoint, see which experts lack a usable scale, and which backend breaks."""

import streamlit as st

from nvfp4viz.errors import NvError
from nvfp4viz.ui import (
    errors,
    explorer,
    explorer_address,
    explorer_open,
    explorer_report,
    explorer_roots,
    lesson,
    state,
)
from nvfp4viz.ui.samples import SAMPLE_IDS, sample_title
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page(
    "explorer",
    checkpoint=state.choice(SAMPLE_IDS, default="tiny-moe-nvfp4-holes"),
    role=state.choice(explorer.SCALE_ROLES, default="input_scale"),
    gpu=state.choice(("any", *explorer.GPUS), default="any"),
)
ADDRESS = ["address"] if explorer_address.allowed() else []
SOURCES = ("sample", "upload", *ADDRESS, *(["server"] if explorer_roots.roots() else []))

source = st.segmented_control(
    page.t("source.from"),
    SOURCES,
    default="sample",
    required=True,
    format_func=lambda name: page.t(f"source.{name}"),
    label_visibility="collapsed",
    key="explorer.source",
)
with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
    if source == "sample":
        st.selectbox(
            page.t("source.label"), SAMPLE_IDS, format_func=sample_title, width=460, **page.view.widget("checkpoint")
        )
        with st.container(key="explorer_chosen"):
            st.caption(sample_title(page.view["checkpoint"]))
    st.selectbox(
        page.t("backends.gpu"),
        ("any", *explorer.GPUS),
        format_func=lambda name: page.t("backends.any") if name == "any" else name,
        width=200,
        **page.view.widget("gpu"),
    )
gpu = None if page.view["gpu"] == "any" else page.view["gpu"]
opened = None
try:
    if source == "upload":
        given = st.file_uploader(page.t("source.uploader"), accept_multiple_files=True, key="explorer.files")
        st.caption(page.t("source.upload_note"))
        if given:
            opened = explorer_open.open_upload(given, gpu)
        else:
            page.prose("source.waiting")
    elif source == "address":
        opened = explorer_address.address_source(page, gpu)
    elif source == "server":
        opened = explorer_roots.roots_source(page, gpu)
    else:
        opened = explorer_open.open_sample(page.view["checkpoint"], gpu)
except NvError as error:
    errors.show(error)

if opened is not None:
    explorer.summary(page, opened)
    explorer.map_and_slot(page, opened)
    drawers = {
        "tabs.findings": explorer.findings,
        "tabs.anatomy": explorer.anatomy,
        "tabs.backends": explorer.backends,
        "tabs.files": explorer.files,
    }
    for tab, draw in zip(page.tabs(*drawers), drawers.values(), strict=True):
        if tab.open:
            with tab:
                draw(page, opened)
    explorer_report.report_buttons(page, opened)

slots = (lambda: explorer.slot_rows(opened)) if opened is not None else list
page.foot(code={"sample": page.view["checkpoint"]}, data={"slots": slots})
