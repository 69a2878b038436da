"""The shipped samples as a page offers them: ids that never change, titles in the reader's language."""

from __future__ import annotations

from nvfp4viz.ui.i18n import t
from sample_checkpoints import SAMPLES

SAMPLE_IDS: tuple[str, ...] = tuple(sample.id for sample in SAMPLES)


def sample_title(sample_id: str) -> str:
    """What a sample is, and its defect, in a few words."""
    return t(f"samples.{sample_id}")
