"""What computes here, in one line under every page."""

from __future__ import annotations

from nvfp4viz import device
from nvfp4viz.ui.i18n import lang, t


def device_line() -> str:
    """The GPU that computes, or the CPU and why no GPU does."""
    report = device.describe_device()
    if report.reason is None:
        return t("ui.device.on_cuda", gpu=report.gpus[0].name, cpu=report.cpu)
    why = device.why_cpu(lang())
    return t("ui.device.on_cpu", cpu=report.cpu, threads=report.threads, why=why)


def name_of(computes_on: str) -> str:
    """``"CPU"`` or ``"GPU"`` in the reader's language."""
    return t(f"ui.device.{computes_on}")
