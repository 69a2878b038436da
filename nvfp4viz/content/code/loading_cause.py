from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving import load
from nvfp4viz.serving.bisect import bisect_experts
from nvfp4viz.serving.fates import complete_with, fate_of
from nvfp4viz.serving.fault_lab import baseline
from sample_checkpoints import ensure

prompt = DEMO_PROMPTS[$prompt]
broken, full = (open_checkpoint(ensure(f"tiny-moe-nvfp4-{name}")) for name in ("holes", "full"))
suspect, twin = (load(one, $allocator, $seed, device="cpu") for one in (broken, complete_with(broken, full)))

# the same bytes through a path that shares nothing with the suspect's
for served in (suspect, suspect.on("vllm-marlin", device="cpu")):
    print(f"{served.backend.id}: {served.generate(prompt, 16).text!r}")

# fresh pages, then a cached block of each start
healthy = baseline(twin, None, prompt, 16)
for allocator, seed in $loads:
    served = suspect.with_memory(allocator, seed, device="cpu")
    fate = fate_of(served, healthy, allocator, seed, served.backend.id)
    print(f"{allocator}, start {seed}: {fate.text!r}, NaN {fate.nan_share:.2%}")

# halve the layers, then the experts of the first bad one
found = bisect_experts(suspect, twin, prompt)
for number, step in enumerate(found.steps, start=1):
    print(f"{number} {step.over} {step.first}-{step.last}: logits differ {step.differs}, hold NaN {step.nan}")
print(f"layer {found.layer}, expert {found.expert}")
