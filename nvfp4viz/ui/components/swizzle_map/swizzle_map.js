// One tile of block scales twice: as rows and columns of the tensor, and as the bytes that a kernel reads.  Pointing at a cell of one
// shows its place in the other; arrow keys walk through the tensor.
const MAPS = new WeakMap();
const SIDES = ["logical", "physical"];
const LINE = 16; // bytes in a line of the physical picture
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);

class SwizzleMap extends TwoPictures {
  take({ data, setStateValue }) {
    this.send = setStateValue;
    this.text = data.text;
    this.data = data;
    this.tiles = new Tiles(data.tile);
    if (data.version !== this.version) {
      this.version = data.version;
      this.chosen = { row: data.row, column: data.column };
    }
    this.draw();
  }

  get tileRows() {
    return this.tiles.rows;
  }

  // The first row and column of the tile that is drawn.
  get origin() {
    return { row: Math.floor(this.chosen.row / this.tileRows) * this.tileRows, column: (this.chosen.column >> 2) * 4 };
  }

  draw() {
    const { text, data } = this;
    const { row, column } = this.origin;
    const start = this.tiles.offset(row, column, data.columns);
    this.drawn = { row, column, start };
    const rows = this.tileRows;
    this.find(".panels").setAttribute("aria-label", text.keys);
    this.find(".legend").textContent = rows === 128 ? text.legend : text.legend_small;
    this.find(".logical figcaption").textContent = fill(text.logical, { first: row, last: row + rows - 1, left: column, right: column + 3 });
    this.find(".physical figcaption").textContent = fill(text.physical, { first: start, last: start + this.tiles.bytes - 1 });
    for (const side of SIDES) this.drawSide(side);
    this.show(this.chosen);
  }

  size(side) {
    const rows = this.tileRows;
    const lines = side === "logical" ? rows : Math.ceil((rows * 4) / LINE);
    const columns = side === "logical" ? 4 : LINE;
    const height = rows === 128 ? 416 : 96;
    return { lines, columns, wide: this.width[side] / columns, tall: height / lines };
  }

  drawSide(side) {
    const svg = this.blank(side);
    if (!svg) return;
    const { lines, columns, wide, tall } = this.size(side);
    const [width, height] = [this.width[side], lines * tall];
    const parts = [hatching("padding")];
    for (let line = 0; line < lines; line += 1) {
      for (let place = 0; place < columns; place += 1) {
        const at = this.scaleIn(side, line, place);
        const inside = at.row < this.data.rows && at.column < this.data.columns;
        const band = this.tileRows === 128 ? ((at.row - this.drawn.row) >> 5) & 3 : 0;
        parts.push(node("rect", { class: `cell ${inside ? `band${band}` : "padding"}`, x: place * wide, y: line * tall, width: wide, height: tall }));
      }
    }
    parts.push(node("rect", { class: "border", x: 0, y: 0, width, height }));
    // The four bands of 32 rows lie below one another in the tensor and side by side in memory.
    for (let band = 1; this.tileRows === 128 && band < 4; band += 1) {
      const line = side === "logical" ? { x1: 0, x2: width, y1: (band * height) / 4, y2: (band * height) / 4 } : { x1: (band * width) / 4, x2: (band * width) / 4, y1: 0, y2: height };
      parts.push(node("line", { ...line, stroke: "var(--ink)" }));
    }
    parts.push(node("rect", { class: "halo" }), node("rect", { class: "outline" }));
    svg.replaceChildren(...parts);
  }

  // Row and column of the tensor at a place of a picture.
  scaleIn(side, line, place) {
    if (side === "logical") return { row: this.drawn.row + line, column: this.drawn.column + place };
    return this.tiles.at(this.drawn.start + line * LINE + place, this.data.columns);
  }

  show(at) {
    const { data, text } = this;
    const offset = this.tiles.offset(at.row, at.column, data.columns);
    const { bytes } = this.tiles;
    const inTile = offset % bytes;
    const places = { logical: [at.row - this.drawn.row, at.column - this.drawn.column], physical: [Math.floor(inTile / LINE), inTile % LINE] };
    for (const side of SIDES) this.mark(side, ...places[side]);
    const inside = at.row < data.rows && at.column < data.columns;
    const values = {
      row: at.row,
      column: at.column,
      first: at.column * 16,
      last: at.column * 16 + 15,
      linear: at.row * data.columns + at.column,
      offset,
      hex: `0x${offset.toString(16).toUpperCase()}`,
      tile: Math.floor(offset / bytes),
      inTile,
    };
    this.say(fill(inside ? text.place : text.padding, values));
  }

  choose(at) {
    this.chosen = at;
    const { row, column } = this.origin;
    if (row !== this.drawn.row || column !== this.drawn.column) this.draw();
    else this.show(at);
    this.tell("edit", at);
  }

  point(side, event, choose) {
    const at = this.scaleIn(side, ...this.under(side, event));
    // Padding can be looked at; only a scale of the tensor can be chosen.
    if (choose && at.row < this.data.rows && at.column < this.data.columns) this.choose(at);
    else this.show(at);
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-32, 0], PageDown: [32, 0] };
    const move = moves[event.key];
    if (!move) return;
    const clamp = (value, count) => Math.min(Math.max(value, 0), count - 1);
    this.choose({ row: clamp(this.chosen.row + move[0], this.data.rows), column: clamp(this.chosen.column + move[1], this.data.columns) });
    event.preventDefault();
  }
}

export default function (component) {
  const root = component.parentElement;
  if (!MAPS.has(root)) MAPS.set(root, new SwizzleMap(root, SIDES));
  MAPS.get(root).take(component);
}
