// Where a block scale lies in the two layouts of kernels: the library's `formats.offset_128x4` and `offset_8x4`, which a test holds
// these against, and the way back.
const LAYOUTS = {
  "128x4": {
    rows: 128,
    offset: (row, column, columns) => ((row >> 7) * Math.ceil(columns / 4) + (column >> 2)) * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (column & 3),
    inTile: (byte) => ({ row: (byte >> 4) + ((byte >> 2) & 3) * 32, column: byte & 3 }),
  },
  "8x4": {
    rows: 8,
    offset: (row, column, columns) => ((row >> 3) * Math.ceil(columns / 4) + (column >> 2)) * 32 + (row & 7) * 4 + (column & 3),
    inTile: (byte) => ({ row: byte >> 2, column: byte & 3 }),
  },
};

// The scale that a byte holds; it may be padding, outside the tensor.
function scaleAt(layout, byte, columns) {
  const { rows, inTile } = LAYOUTS[layout];
  const across = Math.ceil(columns / 4);
  const tile = Math.floor(byte / (rows * 4));
  const place = inTile(byte % (rows * 4));
  return { row: Math.floor(tile / across) * rows + place.row, column: (tile % across) * 4 + place.column };
}
