from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving import load
from nvfp4viz.serving.fault_lab import FaultSpot, break_checkpoint, compare
from sample_checkpoints import ensure

# a prompt of one's own stands here as its bytes
prompt = DEMO_PROMPTS.get($prompt) or bytes($own).decode()
spot = FaultSpot($fault, $layer, $expert, $projection, $role, $value, $seed)
checkpoint = open_checkpoint(ensure($sample))
broken = break_checkpoint(checkpoint, spot)  # a copy in memory; the file stays as it is
healthy, faulty = (load(source, backend=$backend) for source in (checkpoint, broken))
effect = compare(healthy, faulty, spot, prompt, $tokens)

print("healthy:", effect.healthy.text)
print("faulty: ", effect.faulty.text)
print("tokens that visit the expert:", effect.visits, "of", len(effect.read))
print("first layer that differs:", effect.first_broken)
for layer, (error, nan) in enumerate(zip(effect.layer_error, effect.layer_nan)):
    print(f"after layer {layer}: relative error {error:.4g}, NaN at {nan:.0%} of positions")
print(f"loss {effect.healthy_loss:.4g} -> {effect.faulty_loss:.4g}")
print("the audit finds:", [finding.code for finding in audit(broken).findings])
