from nvfp4viz.checkpoint import canonical, open_checkpoint
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving import load_parameters
from nvfp4viz.serving.fates import complete_with, run_fates
from nvfp4viz.serving.spread import spread_value
from sample_checkpoints import ensure

broken, full = (open_checkpoint(ensure(f"tiny-moe-nvfp4-{name}")) for name in ("holes", "full"))

# one file, several fates
for fate in run_fates(broken, complete_with(broken, full), DEMO_PROMPTS[$prompt], backend=$backend, seed=$seed):
    print(f"{fate.allocator}: {fate.text[:24]!r}, NaN {fate.nan_share:.1%}, first broken layer {fate.first_broken}")

# one value in one slot, as each backend reads it
layers, _ = load_parameters(full, canonical(full))
for spread in spread_value(layers[$layer], $projection, $expert, $value):
    reached = "not among the facts read" if spread.reached is None else f"{spread.reached} experts reached"
    print(f"{spread.reading.name}: {spread.reading.rule}, {reached}")
