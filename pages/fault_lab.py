"""Fault lab: break one slot of tiny-moe and see what becomes of the answer, layer by layer."""

import streamlit as st

from nvfp4viz.errors import NvError
from nvfp4viz.ui import errors, fault_lab, fault_lab_foot, lesson, state
from nvfp4viz.ui.shell import ensure_shell

TABS = ("logits", "audit", "sweep")

ensure_shell()
page = lesson.open_page(
    "fault_lab",
    fault=state.choice(fault_lab.FAULT_IDS, default="nan"),
    layer=state.integer(0, fault_lab.LAYERS - 1),
    expert=state.integer(0, fault_lab.EXPERTS - 1),
    projection=state.choice(fault_lab.PROJECTIONS),
    role=state.choice(fault_lab.ROLES),
    value=state.number(-1e38, 1e38),
    seed=state.integer(0, 999, default=0),
    prompt=state.choice(fault_lab.PROMPTS, default="arithmetic"),
    ask=state.text(),
    backend=state.choice(fault_lab.BACKENDS, default=fault_lab.BACKENDS[0]),
    tab=state.choice(TABS, default=TABS[0]),
)
fault_lab.settle(page)
done = None
try:
    prompt = fault_lab.what_controls(page)
    if prompt is not None:
        with st.container(key="fault_lab_stage"):
            stage, side = page.stage()
        with side:
            trial = fault_lab.controls(page, prompt)
        with stage:
            # A fault that does not fit is explained where its result would stand, beside the settings that mend it.
            try:
                with st.spinner(page.t("running")):
                    done = fault_lab.result(trial)
            except NvError as error:
                errors.show(error)
            else:
                fault_lab.answers(page, done)
                fault_lab.layers(page, done)
except NvError as error:
    errors.show(error)

if done is not None:
    drawers = (fault_lab.logits, fault_lab.audit_says, fault_lab.sweep_part)
    for tab, draw in zip(page.tabs(*(f"tabs.{name}" for name in TABS)), drawers, strict=True):
        if tab.open:
            with tab:
                draw(page, done)

page.foot(code=fault_lab_foot.code_values(page, done), data=fault_lab_foot.downloads(page, done))
