// Two pictures of the same cells, one beside the other.  Pointing at a cell of one shows its place in the other; what the arrow keys do,
// and what is said, is the component's own: it has ``size(side)`` → {lines, columns, wide, tall} and ``point``, ``key``, ``show``, ``draw``.
const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function hatching(id) {
  const pattern = node("pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(node("rect", { width: 5, height: 5, fill: "var(--page)" }), node("line", { x1: 0, y1: 0, x2: 0, y2: 5, stroke: "var(--muted)", "stroke-width": 1.5 }));
  return pattern;
}

class TwoPictures {
  constructor(root, sides) {
    this.root = root;
    this.sides = sides;
    this.version = -1;
    this.width = Object.fromEntries(sides.map((side) => [side, 0]));
    for (const side of sides) {
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

  // An empty picture of a side's size; nothing while it has no width.
  blank(side) {
    const svg = this.find(`.${side} svg`);
    const { lines, tall } = this.size(side);
    if (!this.width[side]) return null;
    svg.setAttribute("viewBox", `0 0 ${this.width[side]} ${lines * tall}`);
    svg.setAttribute("height", lines * tall);
    return svg;
  }

  mark(side, line, column) {
    const { wide, tall } = this.size(side);
    if (!this.width[side]) return;
    for (const name of [".halo", ".outline"]) {
      const mark = this.find(`.${side} ${name}`);
      mark.setAttribute("x", column * wide);
      mark.setAttribute("y", line * tall);
      mark.setAttribute("width", wide);
      mark.setAttribute("height", tall);
    }
  }

  say(words) {
    const status = this.find(".status");
    if (status.textContent !== words) status.textContent = words;
    for (const side of this.sides) this.find(`.${side} svg`).setAttribute("aria-label", words);
  }

  // Told a moment after the last of several moves.
  tell(name, value) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.send(name, value), 200);
  }

  // Line and column of a picture under the pointer.
  under(side, event) {
    const box = this.find(`.${side} svg`).getBoundingClientRect();
    const { lines, columns } = this.size(side);
    const inside = (value, count) => Math.min(Math.max(Math.floor(value * count), 0), count - 1);
    return [inside((event.clientY - box.top) / box.height, lines), inside((event.clientX - box.left) / box.width, columns)];
  }
}
