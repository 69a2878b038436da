// Two pictures of the same cells: where they are, and where they go.  Pointing at a cell of one shows its place in the other; arrow keys
// walk through the first.  Which cell goes where, and every sentence, comes from the library.
const MAPS = new WeakMap();
const SVG = "http://www.w3.org/2000/svg";
const SIDES = ["from", "to"];

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

class PlaceMap {
  constructor(root) {
    this.root = root;
    this.version = -1;
    this.width = { from: 0, to: 0 };
    for (const side of SIDES) {
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
    this.data = data;
    this.back = new Map(data.places.map((place, index) => [place, index]));
    if (data.version !== this.version) {
      this.version = data.version;
      this.chosen = data.chosen;
    }
    this.draw();
  }

  draw() {
    const { data } = this;
    this.find(".panels").setAttribute("aria-label", data.keys);
    this.find(".panels").style.gridTemplateColumns = data.shares.map((share) => `minmax(0, ${share}fr)`).join(" ");
    this.find(".legend").textContent = data.legend;
    for (const side of SIDES) {
      this.find(`.${side} figcaption`).textContent = data[side].title;
      this.drawSide(side);
    }
    this.show(this.chosen);
  }

  size(side) {
    const { columns, count, tall } = this.data[side];
    return { columns, lines: Math.ceil(count / columns), wide: this.width[side] / columns, tall };
  }

  drawSide(side) {
    const svg = this.find(`.${side} svg`);
    const { columns, lines, wide, tall } = this.size(side);
    if (!this.width[side]) return;
    svg.setAttribute("viewBox", `0 0 ${this.width[side]} ${lines * tall}`);
    svg.setAttribute("height", lines * tall);
    const pattern = node("pattern", { id: "gap", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    pattern.append(node("rect", { width: 5, height: 5, fill: "var(--page)" }), node("line", { x1: 0, y1: 0, x2: 0, y2: 5, stroke: "var(--muted)", "stroke-width": 1.5 }));
    const parts = [pattern];
    const longest = Math.max(...this.data.labels.map((label) => label.length));
    const written = wide >= 6.6 * longest + 1 && tall >= 13; // all labels or none
    for (let cell = 0; cell < this.data[side].count; cell += 1) {
      const x = (cell % columns) * wide;
      const y = Math.floor(cell / columns) * tall;
      const index = side === "from" ? cell : this.back.get(cell);
      const kind = index === undefined ? "gap" : this.data.kinds[index];
      parts.push(node("rect", { class: `cell ${kind}`, x, y, width: wide, height: tall }));
      const label = index === undefined ? "" : this.data.labels[index];
      if (label && written) parts.push(node("text", { x: x + wide / 2, y: y + tall / 2 + 4 }, label));
    }
    // Heavier lines around what belongs together, such as a byte.
    const { unit } = this.data[side];
    for (let column = 0; unit && column <= columns; column += unit) parts.push(node("line", { class: "unit", x1: column * wide, x2: column * wide, y1: 0, y2: lines * tall }));
    parts.push(node("rect", { class: "halo" }), node("rect", { class: "outline" }));
    svg.replaceChildren(...parts);
  }

  show(index) {
    const cells = { from: index, to: this.data.places[index] };
    for (const side of SIDES) this.mark(side, cells[side]);
    this.say(this.data.said[index]);
  }

  mark(side, cell) {
    const { columns, wide, tall } = this.size(side);
    if (!this.width[side]) return;
    for (const name of [".halo", ".outline"]) {
      const mark = this.find(`.${side} ${name}`);
      mark.setAttribute("x", (cell % columns) * wide);
      mark.setAttribute("y", Math.floor(cell / columns) * tall);
      mark.setAttribute("width", wide);
      mark.setAttribute("height", tall);
    }
  }

  say(words) {
    const status = this.find(".status");
    if (status.textContent !== words) status.textContent = words;
    for (const side of SIDES) this.find(`.${side} svg`).setAttribute("aria-label", words);
  }

  choose(index) {
    this.chosen = index;
    this.show(index);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.send("chosen", index), 200);
  }

  point(side, event, choose) {
    const box = this.find(`.${side} svg`).getBoundingClientRect();
    const { columns, lines } = this.size(side);
    const inside = (value, count) => Math.min(Math.max(Math.floor(value * count), 0), count - 1);
    const cell = inside((event.clientY - box.top) / box.height, lines) * columns + inside((event.clientX - box.left) / box.width, columns);
    const index = side === "from" ? cell : this.back.get(cell);
    if (index === undefined) {
      this.mark("to", cell);
      this.say(this.data.gap);
    } else if (choose) this.choose(index);
    else this.show(index);
  }

  key(event) {
    const { columns, count } = this.data.from;
    const moves = { ArrowUp: -columns, ArrowDown: columns, ArrowLeft: -1, ArrowRight: 1, Home: -count, End: count };
    const move = moves[event.key];
    if (move === undefined) return;
    const far = event.key === "Home" || event.key === "End";
    const next = this.chosen + move;
    if (far) this.choose(move < 0 ? 0 : count - 1);
    else if (next >= 0 && next < count) this.choose(next);
    event.preventDefault();
  }
}

export default function (component) {
  const root = component.parentElement;
  if (!MAPS.has(root)) MAPS.set(root, new PlaceMap(root));
  MAPS.get(root).take(component);
}
