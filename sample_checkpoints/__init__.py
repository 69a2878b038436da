"""The shipped sample checkpoints by id, and where they lie.

Two are committed; the others are built from them in seconds, on first use or by ``make samples``.  See ``README.md``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nvfp4viz.errors import CheckpointError

HERE = Path(__file__).parent
MEASURED = HERE / "measured.json"
CALIBRATION = HERE / "calibration"
ROUTING = HERE / "routing.npz"


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample.  ``defect`` is the code of the finding that it must produce, None for a sound one."""

    id: str
    committed: bool
    runs: bool  # tiny-moe that can be served whole
    defect: str | None


SAMPLES = (
    Sample("tiny-moe-nvfp4-holes", committed=True, runs=True, defect="scale.missing"),
    Sample("tiny-moe-nvfp4-full", committed=False, runs=True, defect=None),
    Sample("tiny-moe-bf16", committed=True, runs=True, defect=None),
    Sample("tiny-moe-mislabelled", committed=False, runs=True, defect="scheme.mislabelled"),
    Sample("tiny-moe-compressed-tensors", committed=False, runs=False, defect=None),
    Sample("tiny-moe-mxfp4", committed=False, runs=False, defect=None),
    Sample("gemma4-skeleton", committed=False, runs=False, defect="scale.missing"),
)
BY_ID = {sample.id: sample for sample in SAMPLES}
Progress = Callable[[str], None]


def _sample(sample_id: str) -> Sample:
    if sample_id not in BY_ID:
        raise CheckpointError("sample.unknown", name=sample_id[:64], known=", ".join(BY_ID))
    return BY_ID[sample_id]


def _places() -> tuple[Path, Path]:
    """Where built samples may lie: in the tree, or in the user's cache where the tree cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return HERE / "built", cache / "nvfp4viz" / "samples"


def _existing(sample: Sample) -> Path | None:
    if sample.committed:
        return HERE / sample.id
    from sample_checkpoints.build import recipe_digest

    for place in _places():
        mark = place / sample.id / ".recipe"
        if mark.exists() and mark.read_text(encoding="utf-8") == recipe_digest():
            return place / sample.id
    return None


def is_ready(sample_id: str) -> bool:
    """Whether `ensure` will return at once.

    Raises
    ------
    CheckpointError
        ``sample.unknown``
    """
    return _existing(_sample(sample_id)) is not None


def ensure(sample_id: str, progress: Progress | None = None) -> Path:
    """The folder of a sample; one that is not shipped is built first.

    Several processes may ask at once: each builds beside the place and renames, and the first one wins.

    Raises
    ------
    CheckpointError
        ``sample.unknown``, ``sample.no-place`` where neither the tree nor the cache can be written.
    """
    sample = _sample(sample_id)
    found = _existing(sample)
    if found is not None:
        return found
    from sample_checkpoints.build import build, recipe_digest

    if progress is not None:
        progress(sample_id)
    for place in _places():
        try:
            place.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{sample_id}-", dir=place))
        except OSError:
            continue
        try:
            build(sample_id, scratch / sample_id)
            (scratch / sample_id / ".recipe").write_text(recipe_digest(), encoding="utf-8")
            target = place / sample_id
            if target.exists() and _existing(sample) is None:
                shutil.rmtree(target, ignore_errors=True)  # built from an older recipe
            try:
                (scratch / sample_id).rename(target)
            except OSError:
                if _existing(sample) is None:
                    raise
            return target
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    raise CheckpointError("sample.no-place", name=sample_id)
