"""The Kernel lab's self-test: on a GPU every instruction against software, without one the part that a CPU can do."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import streamlit as st

from nvfp4viz.device import cpu_checks, describe_device, records
from nvfp4viz.ui.errors import escape
from nvfp4viz.ui.i18n import listed
from nvfp4viz.ui.numbers import four

if TYPE_CHECKING:
    from nvfp4viz.device.cpu_checks import Check
    from nvfp4viz.ui.lesson import Lesson

BLACKWELL = 10  # compute capability's major number
_CPU, _GPU = "kernel_lab.checked", "kernel_lab.selftest"


def selftest_part(page: Lesson) -> None:
    """What it does, the button, the counts of differing bits, and a report to keep."""
    stage, side = page.stage()
    with side:
        page.prose("selftest.does")
        if not records.tried_on(BLACKWELL):
            page.prose("selftest.blackwell")
    with stage:
        if describe_device().computes_on == "cuda":
            _on_gpu(page)
        _on_cpu(page)
        _recorded(page)


def _on_cpu(page: Lesson) -> None:
    """The checks that need no GPU, one after the other, and their counts."""
    page.heading("selftest.cpu")
    page.prose("selftest.cpu_text")
    if _asked(page, "run_cpu"):
        bar = st.progress(0.0, page.t("selftest.busy"))
        found = []
        for count, check in enumerate(cpu_checks.run_checks(), start=1):
            found.append(check)
            bar.progress(count / len(cpu_checks.CHECKS), page.t("selftest.busy"))
        bar.empty()
        st.session_state[_CPU] = tuple(found)
    checks: tuple[Check, ...] = st.session_state.get(_CPU, ())
    if not checks:
        return
    page.finding(
        "selftest.equal" if not sum(check.differing_bits for check in checks) else "selftest.unequal",
        bits=f"{sum(check.bits for check in checks):,}",
        differing=f"{sum(check.differing_bits for check in checks):,}",
        checks=len(checks),
    )
    page.table(
        ("check", ">inputs", ">bits", ">differing", ">time"),
        [
            (
                page.t(f"selftest.check.{check.id}"),
                f"{check.inputs:,}",
                f"{check.bits:,}",
                f"**{check.differing_bits:,}**",
                f"{four(check.seconds)}\u00a0s",
            )
            for check in checks
        ],
    )
    st.download_button(
        page.t("selftest.download"),
        data=lambda: cpu_report(checks),
        file_name="selftest-cpu.json",
        mime="application/json",
        key="kernel_lab.cpu_report",
        on_click="ignore",
        icon=":material/download:",
    )


def _asked(page: Lesson, name: str) -> bool:
    """A button, and whether it was pressed; kept by its callback for a cold link's second run."""

    def press() -> None:
        st.session_state[f"_kernel_lab_{name}"] = True

    icon = ":material/play_arrow:"
    st.button(page.t(f"selftest.{name}"), key=f"kernel_lab.{name}", icon=icon, type="primary", on_click=press)
    return bool(st.session_state.pop(f"_kernel_lab_{name}", False))


def cpu_report(checks: tuple[Check, ...]) -> str:
    """The CPU's report as JSON: machine, date, and every check."""
    report = describe_device()
    return json.dumps(
        {
            "cpu": report.cpu,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "checks": [asdict(check) for check in checks],
            "passed": not any(check.differing_bits for check in checks),
        },
        indent=1,
    )


def _on_gpu(page: Lesson) -> None:
    """The whole self-test on this machine's GPU."""
    from nvfp4viz.device import selftest

    page.heading("selftest.gpu")
    if _asked(page, "run_gpu"):
        with st.status(page.t("selftest.busy"), expanded=True) as status:
            done = selftest.run(lambda check: st.write(f"{check.what}: {_differing(page, check.differing)}"))
            status.update(expanded=False, state="complete")
        st.session_state[_GPU] = (selftest.to_markdown(done), selftest.to_json(done))
    if _GPU in st.session_state:
        text, data = st.session_state[_GPU]
        page_report = json.loads(data)
        _report(page, records.SelfTestRecord(page_report))
        with st.container(horizontal=True):
            st.download_button("selftest.md", text, "selftest.md", key="kernel_lab.gpu_md", on_click="ignore")
            st.download_button("selftest.json", data, "selftest.json", key="kernel_lab.gpu_json", on_click="ignore")


def _recorded(page: Lesson) -> None:
    """Reports that are kept in the repository."""
    page.heading("selftest.recorded")
    found = records.selftest_records()
    if not found:
        page.prose("selftest.no_record")
        return
    for newer, record in enumerate(found):  # there may be several of one GPU
        name = f"{record.gpu}, {record.report['date']}"
        with st.expander(name, key=f"kernel_lab.record.{len(found) - newer}.{record.gpu}"):
            _report(page, record)


def older_note(page: Lesson, record: records.SelfTestRecord) -> None:
    """Say which kernels have changed since a report was made."""
    if record.changed_since:
        page.prose("selftest.older", files=listed(f"`{escape(name)}`" for name in record.changed_since))


def _differing(page: Lesson, differing: int | None, marks: str = "") -> str:
    """How many values differ, or that this GPU has no such instruction."""
    return page.t("selftest.not_here") if differing is None else f"{marks}{differing:,}{marks}"


def _report(page: Lesson, record: records.SelfTestRecord) -> None:
    """One report of a GPU, as it was written."""
    report: Any = record.report
    page.finding(
        "selftest.gpu_seen",
        gpu=escape(record.gpu),
        target=report["target"],
        date=report["date"],
        compared=f"{record.compared:,}",
        differing=f"{record.differing:,}",
        driver=report["driver"],
        nvrtc=report["nvrtc"],
    )
    older_note(page, record)
    page.table(
        ("check", ">compared_values", ">differing", "example"),
        [
            (
                escape(check["what"]),
                f"{check['compared']:,}" if check["compared"] else "–",
                _differing(page, check["differing"], "**"),
                escape(check["example"]) or "–",
            )
            for check in report["checks"]
        ],
    )
