from nvfp4viz.checkpoint import canonical, open_checkpoint
from nvfp4viz.serving.matrix import choose_part, compare_part, find_expert, find_matrix
from sample_checkpoints import ensure

opened = open_checkpoint(ensure($checkpoint))
view = canonical(opened)
if $of == "expert":
    found = find_expert(opened, view, $layer, $expert, $projection)
else:
    found = find_matrix(opened, view, $tensor, $stack)
part = choose_part(found, $take, $row, $column)

print(found.name, found.stored, found.shape, "rows", part.bands, "columns", (part.left, part.right))
for one in compare_part(found, part):
    print(f"{one.along}: {one.error.sqnr_db:.1f} dB, {one.error.zeroed} values became zero")
