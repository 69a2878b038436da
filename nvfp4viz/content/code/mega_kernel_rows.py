from nvfp4viz.formats import interleaved_row

# gate rows, then up rows, as a checkpoint has them; the kernel wants eight of each in turn
rows, half = $rows, $rows // 2
names = [f"g{row}" for row in range(half)] + [f"u{row}" for row in range(half)]
places = [interleaved_row(row, rows, $mix) for row in range(rows)]
print("kernel:", *(name for _, name in sorted(zip(places, names))))

# one row and its partner
row = $r
print(f"{names[row]} is row {row} of the checkpoint's weight: the kernel's row {places[row]}, its partner in {places[(row + half) % rows]}")
