from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.model import corpus
from nvfp4viz.serving.remedies import REMEDIES, judge, run_remedy
from sample_checkpoints import ensure

prompts = [corpus.DEMO_PROMPTS[domain] for domain in corpus.DOMAINS]
texts = {domain: corpus.held_out_documents(domain, $documents) for domain in corpus.DOMAINS}
broken, whole = (open_checkpoint(ensure(name)) for name in ($broken, $whole))

# each remedy loads, answers and is measured; slots that stay open read as zeros
results = {
    name: run_remedy(name, prompts, broken=broken, calibrated=whole, texts=texts, allocator="zeros", n=$tokens)
    for name in REMEDIES
}
# "wrong" is what looks healthy while its losses say that it is not
reference = results[$reference]
for name, result in results.items():
    print(f"{name}: {judge(result, reference)}, {result.tokens} tokens, {result.bytes:,} bytes")
    for domain, loss in result.losses.items():
        print(f"    {domain}: {loss:.4f} nats per character")
