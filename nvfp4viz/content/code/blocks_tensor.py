from nvfp4viz.checkpoint import canonical, open_checkpoint
from nvfp4viz.quant.grouping import compare_tensor
from nvfp4viz.serving.matrix import read_expert, read_matrix
from sample_checkpoints import ensure

opened = open_checkpoint(ensure($checkpoint))
if $of == "expert":
    found = read_expert(opened, canonical(opened), $layer, $expert, $projection)
else:
    found = read_matrix(opened, $tensor)

print(found.name, found.stored, "of", found.shape, "read", found.values.shape)
for one in compare_tensor(found.values):
    print(f"{one.along}: {one.error.sqnr_db:.1f} dB, {one.error.zeroed} values became zero")
