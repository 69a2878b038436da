// Two pictures of the same cells: where they are, and where they go.  Pointing at a cell of one shows its place in the other; arrow keys
// walk through the first.  Which cell goes where, and every sentence, comes from the library.
const MAPS = new WeakMap();
const SIDES = ["from", "to"];

class PlaceMap extends TwoPictures {
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
    const svg = this.blank(side);
    if (!svg) return;
    const { columns, lines, wide, tall } = this.size(side);
    const parts = [hatching("gap")];
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
    for (const side of SIDES) this.markCell(side, cells[side]);
    this.say(this.data.said[index]);
  }

  markCell(side, cell) {
    const { columns } = this.data[side];
    this.mark(side, Math.floor(cell / columns), cell % columns);
  }

  choose(index) {
    this.chosen = index;
    this.show(index);
    this.tell("chosen", index);
  }

  point(side, event, choose) {
    const [line, column] = this.under(side, event);
    const cell = line * this.data[side].columns + column;
    const index = side === "from" ? cell : this.back.get(cell);
    if (index === undefined) {
      this.markCell("to", cell);
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
  if (!MAPS.has(root)) MAPS.set(root, new PlaceMap(root, SIDES));
  MAPS.get(root).take(component);
}
