"""Build the samples: ``python -m sample_checkpoints.build`` (``make samples``) rebuilds all of them, also the committed
export, byte for byte.  Everything follows from the BF16 model and the calibration statistics, which are committed.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

from nvfp4viz.checkpoint import Tensor, open_checkpoint, write_checkpoint
from nvfp4viz.model import export
from nvfp4viz.model.calibrate import CalibrationStats
from nvfp4viz.model.config import TinyMoeConfig
from sample_checkpoints import CALIBRATION, HERE, SAMPLES, ensure

BF16 = "tiny-moe-bf16"
# Small enough that every sample of the model comes in shards with an index, as real checkpoints do.
MAX_SHARD_BYTES = 2_000_000


@cache
def recipe_digest() -> str:
    """Changes with anything that a built sample is made from, so that an old build is never taken for a new one."""
    digest = hashlib.sha256()
    code = [Path(export.__file__), Path(__file__)]
    for path in [*sorted((HERE / BF16).iterdir()), *sorted(CALIBRATION.glob("*.json")), *code]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _bf16() -> tuple[TinyMoeConfig, dict[str, Tensor]]:
    checkpoint = open_checkpoint(HERE / BF16)
    return TinyMoeConfig.from_json(checkpoint.config or {}), checkpoint.read_tensors()


def build(sample_id: str, folder: Path) -> None:
    """Write one sample into ``folder``, which must not exist."""
    config, tensors = _bf16()
    news = CalibrationStats.read(CALIBRATION / "news.json")
    everything = CalibrationStats.read(CALIBRATION / "all.json")
    whole, sidecar = export.modelopt_configs(config)
    common = {"max_shard_bytes": MAX_SHARD_BYTES, "metadata": {"format": "pt"}}
    if sample_id == "tiny-moe-nvfp4-holes":
        made = export.modelopt_tensors(config, tensors, news)
        write_checkpoint(folder, made, config=whole, hf_quant_config=sidecar, **common)
    elif sample_id == "tiny-moe-nvfp4-full":
        made = export.modelopt_tensors(config, tensors, everything)
        write_checkpoint(folder, made, config=whole, hf_quant_config=sidecar, **common)
    elif sample_id == "tiny-moe-mislabelled":
        made = export.modelopt_tensors(config, tensors, None)
        write_checkpoint(folder, made, config=config.to_json(), hf_quant_config=sidecar, **common)
    elif sample_id == "tiny-moe-compressed-tensors":
        made = export.compressed_tensors_twin(config, tensors, everything)
        write_checkpoint(folder, made, config=export.compressed_tensors_config(config), **common)
    elif sample_id == "tiny-moe-mxfp4":
        write_checkpoint(folder, export.mxfp4_twin(config, tensors), config=export.mxfp4_config(config), **common)
    elif sample_id == "gemma4-skeleton":
        made, claim, side = export.gemma4_skeleton()
        write_checkpoint(folder, made, config=claim, hf_quant_config=side, **common)
    else:
        raise ValueError(f"{sample_id} is not built but trained")


def rebuild_committed(sample_id: str, folder: Path) -> None:
    """Put a freshly built committed sample in place of the old one."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        build(sample_id, Path(scratch) / sample_id)
        shutil.rmtree(folder, ignore_errors=True)
        (Path(scratch) / sample_id).rename(folder)


def main() -> None:
    for sample in SAMPLES:
        if sample.id == BF16:
            continue
        print(f"building {sample.id} …", file=sys.stderr, flush=True)
        if sample.committed:
            rebuild_committed(sample.id, HERE / sample.id)
        else:
            print(
                ensure(sample.id).relative_to(HERE.parent)
                if ensure(sample.id).is_relative_to(HERE.parent)
                else "in the cache"
            )


if __name__ == "__main__":
    main()
