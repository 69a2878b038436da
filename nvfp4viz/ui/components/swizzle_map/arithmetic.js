// Places of block scales in a layout of tiles.  The order of a tile's bytes, row and column for each, comes from the library's
// `formats.scale_at`; tiles follow one another along the columns, then downwards.  A test holds both directions against the library.
class Tiles {
  constructor(order) {
    this.order = order;
    this.bytes = order.length;
    this.rows = order.length / 4;
    this.byteOf = new Array(order.length);
    order.forEach(([row, column], byte) => (this.byteOf[row * 4 + column] = byte));
  }

  offset(row, column, columns) {
    const tile = Math.floor(row / this.rows) * Math.ceil(columns / 4) + (column >> 2);
    return tile * this.bytes + this.byteOf[(row % this.rows) * 4 + (column & 3)];
  }

  // The scale that a byte stands for; it may be padding, outside the tensor.
  at(byte, columns) {
    const across = Math.ceil(columns / 4);
    const tile = Math.floor(byte / this.bytes);
    const [row, column] = this.order[byte % this.bytes];
    return { row: Math.floor(tile / across) * this.rows + row, column: (tile % across) * 4 + column };
  }
}
