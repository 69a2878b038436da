// One tile of block scales twice: as rows and columns of the tensor, and as the bytes that a kernel reads.  Pointing at a cell of one
// shows its place in the other; arrow keys walk through the tensor.
const MAPS = new WeakMap();
const SVG = "http://www.w3.org/2000/svg";
const LINE = 16; // bytes in a line of the physical picture
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

class SwizzleMap {
  constructor(root) {
    this.root = root;
    this.version = -1;
    this.width = { logical: 0, physical: 0 };
    for (const side of ["logical", "physical"]) {
      new ResizeObserver(([entry]) => {
        this.width[side] = entry.contentRect.width;
        if (this.data) this.draw();
      }).observe(root.querySelector(`.${side}`));
      const svg = root.querySelector(`.${side} svg`);
      svg.addEventListener("pointermove", (event) => this.point(side, event, false));
      svg.addEventListener("pointerdown", (event) => this.point(side, event, true));
      svg.addEventListener("pointerleave", () => this.show(this.chosen));
    }
    root.querySelector(".panels").addEventListener("keydown", (event) => this.key(event));
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  take({ data, setStateValue }) {
    this.send = setStateValue;
    this.text = data.text;
    this.data = data;
    if (data.version !== this.version) {
      this.version = data.version;
      this.chosen = { row: data.row, column: data.column };
    }
    this.draw();
  }

  get tileRows() {
    return LAYOUTS[this.data.layout].rows;
  }

  // The first row and column of the tile that is drawn.
  get origin() {
    return { row: Math.floor(this.chosen.row / this.tileRows) * this.tileRows, column: (this.chosen.column >> 2) * 4 };
  }

  draw() {
    this.drawn = this.origin;
    const { row, column } = this.drawn;
    const { text, data } = this;
    const rows = this.tileRows;
    this.find(".panels").setAttribute("aria-label", text.keys);
    this.find(".legend").textContent = rows === 128 ? text.legend : text.legend_small;
    this.find(".logical figcaption").textContent = fill(text.logical, { first: row, last: row + rows - 1, left: column, right: column + 3 });
    const start = LAYOUTS[data.layout].offset(row, column, data.columns);
    this.find(".physical figcaption").textContent = fill(text.physical, { first: start, last: start + rows * 4 - 1 });
    for (const side of ["logical", "physical"]) this.drawSide(side);
    this.show(this.chosen);
  }

  size(side) {
    const rows = this.tileRows;
    const lines = side === "logical" ? rows : Math.ceil((rows * 4) / LINE);
    const across = side === "logical" ? 4 : LINE;
    const width = this.width[side];
    const tall = this.tileRows === 128 ? 416 : 96;
    return { lines, across, cellWidth: width / across, cellHeight: tall / lines, width, tall };
  }

  drawSide(side) {
    const svg = this.find(`.${side} svg`);
    const { lines, across, cellWidth, cellHeight, width, tall } = this.size(side);
    if (!width) return;
    svg.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    svg.setAttribute("height", tall);
    const pattern = node("pattern", { id: "padding", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    pattern.append(node("rect", { width: 5, height: 5, fill: "var(--page)" }), node("line", { x1: 0, y1: 0, x2: 0, y2: 5, stroke: "var(--muted)", "stroke-width": 1.5 }));
    const parts = [pattern];
    for (let line = 0; line < lines; line += 1) {
      for (let place = 0; place < across; place += 1) {
        const at = this.scaleIn(side, line, place);
        const inside = at.row < this.data.rows && at.column < this.data.columns;
        const band = this.tileRows === 128 ? ((at.row - this.drawn.row) >> 5) & 3 : 0;
        parts.push(node("rect", { class: `cell ${inside ? `band${band}` : "padding"}`, x: place * cellWidth, y: line * cellHeight, width: cellWidth, height: cellHeight }));
      }
    }
    parts.push(node("rect", { class: "border", x: 0, y: 0, width, height: tall }));
    // The four bands of 32 rows lie below one another in the tensor and side by side in memory.
    for (let band = 1; this.tileRows === 128 && band < 4; band += 1) {
      const line = side === "logical" ? { x1: 0, x2: width, y1: (band * tall) / 4, y2: (band * tall) / 4 } : { x1: (band * width) / 4, x2: (band * width) / 4, y1: 0, y2: tall };
      parts.push(node("line", { ...line, stroke: "var(--ink)" }));
    }
    parts.push(node("rect", { class: "halo" }), node("rect", { class: "outline" }));
    svg.replaceChildren(...parts);
  }

  // Row and column of the tensor at a place of a picture.
  scaleIn(side, line, place) {
    if (side === "logical") return { row: this.drawn.row + line, column: this.drawn.column + place };
    const at = LAYOUTS[this.data.layout].inTile(line * LINE + place);
    return { row: this.drawn.row + at.row, column: this.drawn.column + at.column };
  }

  show(at) {
    const { data, text } = this;
    const offset = LAYOUTS[data.layout].offset(at.row, at.column, data.columns);
    const bytes = this.tileRows * 4;
    const inTile = offset % bytes;
    const places = { logical: [at.row - this.drawn.row, at.column - this.drawn.column], physical: [Math.floor(inTile / LINE), inTile % LINE] };
    for (const side of ["logical", "physical"]) {
      const { cellWidth, cellHeight, width } = this.size(side);
      if (!width) continue;
      for (const name of [".halo", ".outline"]) {
        const mark = this.find(`.${side} ${name}`);
        mark.setAttribute("x", places[side][1] * cellWidth);
        mark.setAttribute("y", places[side][0] * cellHeight);
        mark.setAttribute("width", cellWidth);
        mark.setAttribute("height", cellHeight);
      }
    }
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
    const said = fill(inside ? text.place : text.padding, values);
    const status = this.find(".status");
    if (status.textContent !== said) status.textContent = said;
    for (const side of ["logical", "physical"]) this.find(`.${side} svg`).setAttribute("aria-label", said);
  }

  choose(at) {
    this.chosen = at;
    const { row, column } = this.origin;
    if (row !== this.drawn.row || column !== this.drawn.column) this.draw();
    else this.show(at);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.send("edit", at), 200);
  }

  point(side, event, choose) {
    const box = this.find(`.${side} svg`).getBoundingClientRect();
    const { lines, across } = this.size(side);
    const inside = (value, count) => Math.min(Math.max(Math.floor(value * count), 0), count - 1);
    const at = this.scaleIn(side, inside((event.clientY - box.top) / box.height, lines), inside((event.clientX - box.left) / box.width, across));
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
  if (!MAPS.has(root)) MAPS.set(root, new SwizzleMap(root));
  MAPS.get(root).take(component);
}
