"""One expert from BF16 to the backend: every stage's number follows from the one before it."""

import numpy as np
import pytest

from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.model.calibrate import CalibrationStats
from nvfp4viz.serving import load
from nvfp4viz.serving.stages import FLAGS, STAGES, expert_life, flags_of
from sample_checkpoints import CALIBRATION, ensure


@pytest.fixture(scope="module")
def parts():
    bf16 = open_checkpoint(ensure("tiny-moe-bf16"))
    return bf16, CalibrationStats.read(CALIBRATION / "news.json"), ensure("tiny-moe-nvfp4-holes")


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_a_calibrated_expert_has_a_number_in_every_stage(parts, projection):
    bf16, stats, export = parts
    life = expert_life(bf16, stats, load(export, device="cpu"), 0, 0, projection)
    assert life.tokens > 0
    # ModelOpt stores amax/2688 for weights and activations alike.
    assert life.weight_scale_2 == np.float32(life.weight_amax) / np.float32(2688)
    assert life.stored == np.float32(life.input_amax) / np.float32(2688)
    assert life.slot == life.read == life.stored
    assert life.encode == np.float32(1) / life.read
    assert life.alpha == life.read * life.weight_scale_2


@pytest.mark.parametrize(("allocator", "slot"), [("zeros", 0.0), ("ones", 1.0), ("nan", np.nan)])
def test_an_expert_that_saw_nothing_has_a_hole_from_ptq_on(parts, allocator, slot):
    bf16, stats, export = parts
    life = expert_life(bf16, stats, load(export, allocator, device="cpu"), 0, 9, "down")
    assert (life.tokens, life.input_amax, life.stored) == (0, None, None)
    assert np.array_equal(life.slot, np.float32(slot), equal_nan=True)
    assert np.array_equal(life.read, np.float32(slot), equal_nan=True)


def test_marlin_reads_no_slot(parts):
    bf16, stats, export = parts
    life = expert_life(bf16, stats, load(export, "nan", backend="vllm-marlin", device="cpu"), 0, 9, "down")
    assert life.read is None
    assert life.alpha == life.weight_scale_2


def test_every_flag_has_one_stage_and_every_stage_a_flag():
    assert set(FLAGS.values()) == set(STAGES)
    assert sorted(name for stage in STAGES for name in flags_of(stage)) == sorted(FLAGS)
