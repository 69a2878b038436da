// One step of the tensor core: five terms, the seven rules to walk through, and every bit on the step's common grid.  All numbers and
// digits come from the library; this script places them, and keeps the chosen rule and term.
const LABS = new WeakMap();
const SVG = "http://www.w3.org/2000/svg";
const TOP = 22;
// From which rule on a card tells a term's value, the bits are drawn, and their sum is; a picture may say otherwise.
const REVEAL = { value: 5, chart: 6, sum: 7 };
const MANY = 8; // with more terms than this, cards and rows are small
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function box(kind, className, text) {
  const made = document.createElement(kind);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

class Lab {
  constructor(root) {
    this.root = root;
    this.version = -1;
    this.width = 0;
    new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      if (this.data) this.drawChart();
    }).observe(root.querySelector(".chart"));
    root.addEventListener("click", (event) => this.click(event));
    root.addEventListener("keydown", (event) => this.key(event));
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  take({ data, setStateValue }) {
    this.send = setStateValue;
    this.data = data.picture;
    this.text = data.text;
    this.reveal = { ...REVEAL, ...data.picture.reveal };
    this.count = data.picture.terms.length;
    this.row = this.count > MANY ? 17 : 22;
    if (data.version !== this.version) {
      this.version = data.version;
      this.step = data.step;
      this.slot = data.slot;
    }
    this.draw();
  }

  choose(change) {
    Object.assign(this, change);
    this.draw();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.send("edit", { step: this.step, slot: this.slot }), 200);
  }

  draw() {
    this.drawSteps();
    const step = this.data.steps[this.step - 1];
    this.find(".words").textContent = step.words;
    this.find(".formula").textContent = step.formulas[this.slot];
    this.drawTerms();
    this.drawChart();
    const status = this.find(".status");
    const said = this.data.terms[this.slot].sentence;
    if (status.textContent !== said) status.textContent = said;
  }

  drawSteps() {
    const holder = this.find(".steps");
    if (holder.dataset.made !== this.text.steps) {
      holder.dataset.made = this.text.steps;
      holder.setAttribute("aria-label", this.text.steps);
      holder.replaceChildren(
        ...this.data.steps.map((step, index) => {
          const button = box("button", "step");
          button.type = "button";
          button.role = "tab";
          button.dataset.step = index + 1;
          button.setAttribute("aria-label", `${index + 1} ${step.name}`);
          button.append(box("b", "", index + 1), box("span", "label", step.name));
          return button;
        }),
      );
    }
    [...holder.children].forEach((button, index) => {
      button.setAttribute("aria-selected", index + 1 === this.step ? "true" : "false");
      button.tabIndex = index + 1 === this.step ? 0 : -1;
    });
  }

  // `from` is the rule that brings a part into being, `at` the rules that look at it.
  when(element, from, ...at) {
    if (this.step < from) element.classList.add("later");
    if (at.includes(this.step)) element.classList.add("now");
    return element;
  }

  drawTerms() {
    const holder = this.find(".terms");
    holder.setAttribute("aria-label", this.text.terms);
    holder.classList.toggle("many", this.count > MANY);
    const focused = this.root.activeElement?.dataset?.slot;
    holder.replaceChildren(...this.data.terms.map((term, slot) => this.term(term, slot)));
    if (focused !== undefined) holder.children[focused].focus({ preventScroll: true });
  }

  term(term, slot) {
    const card = box("button", "term");
    card.type = "button";
    card.dataset.slot = slot;
    card.setAttribute("aria-pressed", slot === this.slot ? "true" : "false");
    card.setAttribute("aria-label", term.sentence);
    card.tabIndex = slot === this.slot ? 0 : -1;
    card.append(box("span", "title", term.title));
    if (term.products) {
      card.append(this.when(this.products(term.products), 3));
      card.append(this.when(box("span", "dot", term.dot), 3, 3));
      for (const scale of term.scales) card.append(this.scale(scale));
      if (term.value) card.append(this.when(box("span", "value", term.value), 4, 4));
    } else {
      // A long number breaks before its power of ten, or it would leave the card.
      const value = box("span", "", term.dot.replace("×", "\u200b×"));
      card.append(this.when(value, 1, ...(term.nan ? [1] : [])));
      card.append(box("span", "", term.hex));
      if (term.value) card.append(this.when(box("span", "value", term.value), this.reveal.value, this.reveal.value));
    }
    return card;
  }

  scale(scale) {
    const chip = box("span", `scale${scale.nan ? " nan" : ""}${scale.shared ? " shared" : ""}`);
    chip.append(box("span", "", `${scale.side} ${scale.byte}`));
    if (scale.nan) chip.append(box("span", "", "N"));
    else {
      const number = box("span", "");
      if (scale.negative) number.append(box("span", `sign${this.step >= 2 ? " ignored" : ""}`, "−"));
      number.append(scale.size);
      chip.append(number);
    }
    return this.when(chip, 1, 1, 2);
  }

  products(values) {
    const svg = node("svg", { viewBox: "0 0 160 40", preserveAspectRatio: "none", "aria-hidden": "true" });
    svg.append(node("line", { x1: 0, x2: 160, y1: 20, y2: 20 }));
    const most = Math.max(...values.map(Math.abs), 1e-9);
    values.forEach((value, index) => {
      const size = (Math.abs(value) / most) * 18;
      svg.append(node("rect", { x: index * 10 + 1.5, width: 7, y: value > 0 ? 20 - size : 20, height: size }));
    });
    return svg;
  }

  // ---- the bits
  drawChart() {
    const figure = this.find(".chart");
    const svg = this.find(".chart svg");
    const { chart } = this.data;
    figure.classList.toggle("later", this.step < this.reveal.chart);
    this.find(".chart figcaption").textContent = chart ? this.text.legend : this.data.verdict;
    svg.setAttribute("aria-label", this.data.verdict);
    if (!chart || !this.width) {
      svg.replaceChildren();
      svg.setAttribute("height", 0);
      return;
    }
    const narrow = this.width < 560;
    this.left = narrow ? 38 : 66;
    this.right = narrow ? 34 : 52;
    this.cell = (this.width - this.left - this.right) / (chart.first - chart.last + 1);
    const height = TOP + this.row * chart.rows.length + 16;
    svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    svg.setAttribute("height", height);
    const at = (power) => this.left + (chart.first - power) * this.cell;
    const end = at(chart.last - 1);
    const parts = [this.hatches()];
    const termsEnd = TOP + this.row * this.count;
    parts.push(node("rect", { class: "beyond", x: at(chart.cut - 1), width: Math.max(end - at(chart.cut - 1), 0), y: TOP - 2, height: termsEnd - TOP + 4 }));
    parts.push(node("text", { class: "tick", x: at(chart.exponent) + this.cell / 2, y: 12, "text-anchor": "middle" }, `E = ${chart.exponentLabel}`));
    parts.push(node("text", { class: "tick", x: Math.min(at(chart.cut - 1), end), y: 12, "text-anchor": "end" }, chart.cutLabel));
    parts.push(node("text", { class: "tick", x: this.width, y: 12, "text-anchor": "end" }, this.text.shift));
    chart.rows.forEach((row, index) => {
      const gap = index >= this.count ? 10 : 0;
      const group = node("g", {});
      this.drawRow(group, row, TOP + this.row * index + gap, index, at, end);
      if (this.step < this.reveal.sum && index >= this.count) group.setAttribute("opacity", 0);
      parts.push(group);
    });
    parts.push(node("line", { class: "rule", x1: 0, x2: this.width, y1: termsEnd + 5, y2: termsEnd + 5 }));
    parts.push(node("line", { class: "cut", x1: at(chart.cut - 1), x2: at(chart.cut - 1), y1: TOP - 4, y2: termsEnd + 2 }));
    svg.replaceChildren(...parts);
  }

  hatches() {
    const both = node("defs", {});
    for (const [id, width] of [["dropped-one", 2], ["dropped-zero", 0]]) {
      const pattern = node("pattern", { id, width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
      pattern.append(node("rect", { width: 4, height: 4, fill: "var(--page)" }), node("line", { x1: 0, y1: 0, x2: 0, y2: 4, stroke: "var(--sign)", "stroke-width": width }));
      both.append(pattern);
    }
    return both;
  }

  drawRow(group, row, y, index, at, end) {
    const { chart } = this.data;
    const middle = y + 13;
    if (index === this.slot) group.append(node("rect", { class: "chosen", x: 0, width: this.width, y: y - 1, height: this.row - 1, rx: 3 }));
    group.append(node("text", { x: 0, y: middle }, this.width < 560 ? row.short : row.label));
    if (row.sign) group.append(node("text", { class: "sign", x: this.left - 12, y: middle }, row.sign < 0 ? "−" : "+"));
    else group.append(node("text", { x: this.left - 12, y: middle }, "0"));
    if (row.exponent !== null && row.sign) {
      // From the step's exponent to the term's own: how far it was moved.
      const to = Math.min(at(row.exponent) + this.cell / 2, end);
      const from = at(chart.exponent) + this.cell / 2;
      if (to > from && this.count <= MANY) group.append(node("path", { class: "move", d: `M${from} ${y + 19.5} H${to} m-4 -2.5 l4 2.5 l-4 2.5` }));
      group.append(node("text", { class: "shift", x: this.width, y: middle, "text-anchor": "end" }, row.shift));
    }
    [...row.digits].forEach((digit, place) => {
      const power = row.high - place;
      if (power < chart.last) return;
      const kind = `${power >= row.cut ? "kept" : "dropped"} ${digit === "1" ? "one" : "zero"}`;
      group.append(node("rect", { class: kind, x: at(power) + 0.5, width: Math.max(this.cell - 1, 1), y: y + 2, height: 14, rx: 1.5 }));
      if (this.cell >= 8.5) group.append(node("text", { class: `digit ${kind}`, x: at(power) + this.cell / 2, y: y + 12.5 }, digit));
    });
    const hidden = row.digits.length - Math.max(0, row.high - chart.last + 1);
    if (row.sign && hidden > 0) group.append(node("text", { class: "tick", x: end + 2, y: middle }, "…"));
  }

  // ---- choosing
  click(event) {
    const step = event.target.closest?.(".step");
    const term = event.target.closest?.(".term");
    if (step) this.choose({ step: Number(step.dataset.step) });
    if (term) this.choose({ slot: Number(term.dataset.slot) });
  }

  key(event) {
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!sideways) return;
    const step = event.target.closest?.(".step");
    const term = event.target.closest?.(".term");
    if (step) {
      this.choose({ step: Math.min(Math.max(this.step + sideways, 1), this.data.steps.length) });
      this.find(`[data-step="${this.step}"]`).focus();
    } else if (term) {
      this.choose({ slot: (this.slot + sideways + this.data.terms.length) % this.data.terms.length });
      this.find(`[data-slot="${this.slot}"]`).focus();
    } else {
      return;
    }
    event.preventDefault();
  }
}

export default function (component) {
  const root = component.parentElement;
  if (!LABS.has(root)) LABS.set(root, new Lab(root));
  LABS.get(root).take(component);
}
