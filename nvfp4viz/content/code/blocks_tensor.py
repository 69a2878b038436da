from nvfp4viz.checkpoint import canonical, open_checkpoint
from nvfp4viz.serving.matrix import choose_part, compare_part, find_matrix
from sample_checkpoints import ensure

opened = open_checkpoint(ensure($checkpoint))
view = canonical(opened)
found = find_matrix(opened, view, $tensor, $index)
part = choose_part(found, $take, $row, $column)
errors = compare_part(found, part)

print(found.name, found.stored, found.shape, "rows", part.bands, "columns", (part.left, part.right))
for one in errors:
    print(f"{one.along}: {one.error.sqnr_db:.1f} dB, {one.error.zeroed} values became zero")
