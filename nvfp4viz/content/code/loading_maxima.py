import numpy as np
from nvfp4viz.checkpoint import canonical, open_checkpoint
from nvfp4viz.serving import load_parameters
from nvfp4viz.serving.spread import spread_value
from sample_checkpoints import ensure

full = open_checkpoint(ensure("tiny-moe-nvfp4-full"))
layers, _ = load_parameters(full, canonical(full))
layer, expert = layers[$layer], $expert
stored = layer.values("input_scale", $projection)[expert]

# one value in one slot, as each backend reads it: this expert's numbers, and how many experts they reach
value = np.float32($value)
print(f"the slot held {stored!s}; now it holds {value!s}")
for spread in spread_value(layer, $projection, expert, value):
    known = {"before": spread.before, "now": spread.after, "encode": spread.gscale, "alpha": spread.alpha}
    known["g1_scale_c"] = spread.scale_c
    numbers = [f"{name} {scale[expert]:.4g}" for name, scale in known.items() if scale is not None]
    reached = "not among the facts read" if spread.reached is None else f"reaches {spread.reached} experts"
    print(f"{spread.reading.name}: {spread.reading.rule}, {', '.join([*numbers, reached])}")
