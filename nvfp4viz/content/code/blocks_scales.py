from nvfp4viz.formats import offset_8x4, offset_128x4, offset_linear, scale_at, swizzled_size

rows, columns, layout = $rows, $columns, $layout
row, column = $row, $column

# the scales of the map's tensor, and what whole tiles add
size = swizzled_size(rows, columns, layout)
print(f"{rows * columns:,} scales take {size:,} bytes, {size - rows * columns:,} of them padding")

# one scale, there and back
offset = {"128x4": offset_128x4, "8x4": offset_8x4}[layout](row, column, columns)
print(f"scale ({row}, {column}): byte {offset_linear(row, column, columns):,} in rows, byte {offset:,} in {layout}")
print(scale_at(offset, rows, columns, layout))
