from nvfp4viz.checkpoint import canonical, open_checkpoint
from nvfp4viz.errors import ServingError
from nvfp4viz.serving import load
from nvfp4viz.serving.fates import measures
from sample_checkpoints import ensure

# how many of the slots that the file does not fill each measure finds, by what memory held
broken = open_checkpoint(ensure("tiny-moe-nvfp4-holes"))
for found in measures(broken, canonical(broken), seed=$seed):
    if found.allocator in $allocators:
        print(f"{found.allocator}, {found.measure}: {found.found} / {found.expected}")

# a load with the guard on: listed once the question is answered
for name in $files:
    try:
        load(open_checkpoint(ensure(name)), backend=$backend, guard=True, device="cpu")
        print(f"{name} passes")
    except ServingError as error:
        print(error)
