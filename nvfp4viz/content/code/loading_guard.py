import numpy as np
from nvfp4viz.serving import LoadGuard, check_slots

# at allocation: a sentinel in every scale, and a guard that knows the model's sizes
guard = LoadGuard(layers=[0], experts=4)
w13 = guard.arm(np.empty((4, 2), np.float32))
w2 = guard.arm(np.empty(4, np.float32))

# in the loader: fill the slots that the checkpoint has keys for; it has none for expert $expert
for expert in range(4):
    if expert != $expert:
        w13[expert], w2[expert] = 2e-3, 5e-3

# after the load: one look, as findings ...
for finding in check_slots({(0, "gate"): w13[:, 0], (0, "up"): w13[:, 1], (0, "down"): w2}):
    print(finding)

# ... or as a refusal
for projection, values in (("gate", w13[:, 0]), ("up", w13[:, 1]), ("down", w2)):
    guard.inspect(0, projection, "input_scale", values)
try:
    guard.check()
except Exception as error:
    print(error)
