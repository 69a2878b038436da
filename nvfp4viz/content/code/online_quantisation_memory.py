from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.errors import NvError
from nvfp4viz.quant.online import WAYS, peak_buffers
from nvfp4viz.quant.online_memory import measure_peaks
from sample_checkpoints import ensure

# what each way holds at its peak, counted from the shape of a layer's first weight
shape = $shape
for way in WAYS:
    held = sum(peak_buffers(shape, way).values())
    print(f"{way}: {held / 2**10:,.1f} KiB = {held / 2**20:g} MiB by count")

# and measured, if this is the shape whose weights lie here; to ten KiB, for Python's own objects come and go
weights = open_checkpoint(ensure("tiny-moe-bf16")).read("model.layers.$layer.experts.gate_up_proj")
if list(weights.shape) == shape:
    try:
        for way, held in measure_peaks(weights).items():
            print(f"{way}: about {round(held / 2**10, -1):.0f} KiB measured")
    except NvError as error:
        print(error)
