from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving.fates import complete_with, run_fates
from sample_checkpoints import ensure

broken, full = (open_checkpoint(ensure(f"tiny-moe-nvfp4-{name}")) for name in ("holes", "full"))
twin, prompt = complete_with(broken, full), DEMO_PROMPTS[$prompt]

# one file, loaded where memory held something else each time
fates = run_fates(broken, twin, prompt, backend=$backend, seed=$seed, allocators=$allocators)
print(f"{len(fates[0].unwritten)} slots have no tensor; the complete twin writes {fates[0].effect.healthy.text!r}")
for fate in fates:
    print(f"{fate.allocator}: {fate.text!r}, as the twin: {fate.same_text}")
    print(f"  first slot {fate.unwritten[0].value!s}, NaN {fate.nan_share:.2%}, first broken layer {fate.first_broken}")
