from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving import load
from sample_checkpoints import ensure

prompt = DEMO_PROMPTS[$prompt]
suspect = load(open_checkpoint(ensure("tiny-moe-nvfp4-holes")), $allocator, $seed, device="cpu")

# the same bytes through a path that shares nothing with the suspect's
for served in (suspect, suspect.on("vllm-marlin", device="cpu")):
    print(f"{served.backend.id}: {served.generate(prompt, 16).text!r}")
