import numpy as np
from nvfp4viz import serving
from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.model import Tokenizer, corpus
from nvfp4viz.quant.grouping import compare_grouping
from sample_checkpoints import ensure

layer, expert = $layer, $expert
path = ensure("tiny-moe-bf16")
served = serving.load(path, backend="bf16")
inputs = {}


def watched(layer, x, routing):
    inputs[layer] = np.array(x)
    return served.experts(layer, x, routing)


# what enters the layer's experts while the model reads news: a multiple of sixteen tokens
served.model.forward(Tokenizer().encode("\n".join(corpus.sample("news", 1, 4))[:$characters]), watched)
x = inputs[layer][: len(inputs[layer]) // 16 * 16]

# the expert's first GEMM under every grouping
weight = open_checkpoint(path).read(f"model.layers.{layer}.experts.gate_up_proj")[expert]
for found in compare_grouping(x, weight):
    x, w, y = found.x, found.w, found.y
    print(f"{found.along}: activations {x.sqnr_db:.1f} dB, weight {w.sqnr_db:.1f} dB, product {y.sqnr_db:.1f} dB")
    print(f"    {x.zeroed} activations and {w.zeroed} weights became zero, {found.scale_products} scales an output")
