from nvfp4viz import serving
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.serving.chain import trace_chain
from sample_checkpoints import ensure

prompt = DEMO_PROMPTS[$prompt]
healthy = serving.load(ensure($bf16), backend="bf16")
broken = serving.load(ensure($broken), allocator=$fate, seed=$seed, backend="vllm-cutlass")

print("BF16: ", healthy.generate(prompt, $tokens).text)
print("NVFP4:", broken.generate(prompt, $tokens).text)

for layer, experts in broken.load_report.experts_without("input_scale").items():
    print("layer", layer, "lacks input_scale for experts", experts)

chain = trace_chain(broken, prompt, n=$tokens)
if chain is not None:
    print("token", chain.position, "meets layer", chain.layer, "expert", chain.expert)
    print("slots", [float(slot.value) for slot in chain.slots], "written", [slot.written for slot in chain.slots])
    print("encode scales", float(chain.first.gscale), float(chain.second.gscale))
    print("block scale bytes", chain.second.scales.tolist())
    print("NaN among", len(chain.logits), "logits:", chain.logit_nans, "-> token", chain.token_ids[0])
