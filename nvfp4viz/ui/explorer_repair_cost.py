"""What a repair costs, measured where it can be: on the sample that has both its holes and its full calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.errors import NvError
from nvfp4viz.ui import caches, errors
from nvfp4viz.ui.i18n import listed
from nvfp4viz.ui.kernels import wait_for_kernels
from nvfp4viz.ui.numbers import four
from nvfp4viz.ui.samples import sample_title

if TYPE_CHECKING:
    from nvfp4viz.ui.caches import Texts
    from nvfp4viz.ui.lesson import Lesson

# Held-out texts a domain: few, so that a policy is measured in about a second.
TEXTS = 3
BROKEN, CALIBRATED = caches.Build("tiny-moe-nvfp4-holes"), caches.Build("tiny-moe-nvfp4-full")


def texts() -> Texts:
    """Held-out texts of every domain of tiny-moe's corpus."""
    from nvfp4viz.model.corpus import DOMAINS, held_out_documents

    return tuple((domain, tuple(held_out_documents(domain, TEXTS))) for domain in DOMAINS)


def cost(page: Lesson, policy: str, value: float | None) -> None:
    """The loss that is left after the policy, beside the loss of the checkpoint that was calibrated in full."""
    box = page.expander("repair.cost.title")
    if not box.open:
        return
    # What computes is for those who ask: the page itself opens without it.
    from nvfp4viz.serving.remedies import MARGIN

    with box:
        wait_for_kernels()
        asked = texts()
        try:
            with st.spinner(page.t("repair.cost.running")):
                mended = caches.repair_losses(policy, value, asked)
                broken, calibrated = caches.losses(BROKEN, asked), caches.losses(CALIBRATED, asked)
        except NvError as error:
            errors.show(error)
            return
        more = {domain: mended[domain] - calibrated[domain] for domain in mended}
        # NaN is above every bound.
        over = [domain for domain, loss in more.items() if not loss <= MARGIN]
        worst = max(more, key=lambda domain: float("inf") if more[domain] != more[domain] else more[domain])
        page.finding(
            "repair.cost.over" if over else "repair.cost.within",
            policy=policy,
            worst=page.t(f"repair.cost.domains.{worst}"),
            more=_signed(more[worst]),
            over=listed(page.t(f"repair.cost.domains.{domain}") for domain in over),
            margin=four(MARGIN),
        )
        page.table(
            ("domain", ">unrepaired", ">mended", ">calibrated", ">more"),
            [
                (
                    page.t(f"repair.cost.domains.{domain}"),
                    *(_loss(losses[domain]) for losses in (broken, mended, calibrated)),
                    _signed(more[domain]),
                )
                for domain in mended
            ],
        )
        page.prose("repair.cost.how", count=TEXTS, sample=sample_title(BROKEN.sample))


def _loss(value: float) -> str:
    return "NaN" if value != value else f"{value:.4f}"


def _signed(value: float) -> str:
    return "NaN" if value != value else f"{round(value, 4) + 0.0:+.4f}".replace("-", "−")
