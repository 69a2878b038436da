from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.model.calibrate import CalibrationStats
from nvfp4viz.serving import load
from nvfp4viz.serving.stages import expert_life, flags_of
from sample_checkpoints import CALIBRATION, ensure

# one projection of one expert, from training to the product
bf16, holes = (open_checkpoint(ensure(f"tiny-moe-{name}")) for name in ("bf16", "nvfp4-holes"))
served = load(holes, $allocator, backend=$backend, device="cpu")
life = expert_life(bf16, CalibrationStats.read(CALIBRATION / "news.json"), served, $layer, $expert, $projection)
print("BF16: largest weight", life.weight_amax)
print(f"PTQ: {life.tokens:,} tokens, largest input", life.input_amax)
print("export: weight_scale_2", life.weight_scale_2, life.key, "no such key" if life.stored is None else life.stored)
print("load: slot", life.slot)
print("backend: reads", life.read, "encode scale", life.encode, "alpha", life.alpha)

# which flags act where: listed once the question is answered
for stage in $stages:
    print(f"flags of {stage}: {', '.join(flags_of(stage))}")
