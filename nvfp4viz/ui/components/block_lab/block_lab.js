// The block lab: sixteen bars to drag, the seven operations of the kernel to step through, and the bits at each.  Numbers come from
// the library's trace; a drag moves its bar here at once and asks for a new trace.
const LABS = new WeakMap();
const SVG = "http://www.w3.org/2000/svg";
const ASK_MS = 60;
const GUTTER = 20; // for the numbers of the ruler, kept free in every view so that bars stay in place
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function numberOf(entry) {
  if (typeof entry === "number") return entry;
  return { nan: NaN, inf: Infinity, "-inf": -Infinity, "-0": -0 }[entry];
}

function plainOf(value) {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  return Object.is(value, -0) ? "-0" : value;
}

function short(value) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return Object.is(value, -0) ? "−0" : "0";
  const size = Math.abs(value);
  const text = size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(4))) : value.toExponential(2).replace(/e\+?/, "e");
  return text.replace(/-/g, "−");
}

// About how many pixels a label takes at 12 pixels.
const widthOf = (label) => label.length * (/[\u4e00-\u9fff]/.test(label) ? 13 : 6.6);

// A label in two lines of about the same length: between words, or between characters where there are no spaces.
function halves(label) {
  const cuts = label.includes(" ") ? [...label.matchAll(/ /g)].map((found) => found.index) : [Math.ceil(label.length / 2)];
  const cut = cuts.reduce((best, at) => (Math.abs(2 * at - label.length) < Math.abs(2 * best - label.length) ? at : best));
  return [label.slice(0, cut), label.slice(cut).trim()];
}

class Lab {
  constructor(root) {
    this.root = root;
    this.step = 0;
    this.chosen = 0;
    this.asked = 0;
    this.width = root.querySelector(".bars").clientWidth;
    new ResizeObserver(([entry]) => {
      // Remembered: asking for sizes on every edit would force a layout each time.
      this.width = entry.contentRect.width;
      this.height = entry.contentRect.height;
      if (this.trace) this.draw();
    }).observe(root.querySelector(".bars"));
    this.listen();
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  take({ data, setStateValue }) {
    this.send = setStateValue;
    this.text = data.text;
    this.trace = data.trace;
    if (data.version !== this.version) {
      this.version = data.version;
      this.x = data.trace.x.map(numberOf);
      this.step = data.step;
      this.asked = data.asked;
    } else if (data.asked === this.asked && !this.dragging) {
      this.x = data.trace.x.map(numberOf); // the answer to our last question: from here on the library's numbers
    }
    this.fresh = data.asked === this.asked;
    this.draw();
  }

  ask(now = false) {
    // Counted at the change, not at the sending: an answer to an older question must never undo a newer edit.
    this.asked += 1;
    const wait = Math.max(0, (this.lastAsk ?? 0) + ASK_MS - performance.now());
    clearTimeout(this.timer);
    this.timer = setTimeout(
      () => {
        this.lastAsk = performance.now();
        this.send("edit", { x: this.x.map(plainOf), asked: this.asked, step: this.step });
      },
      now ? 0 : wait,
    );
  }

  setValue(index, value) {
    this.x[index] = toBf16(value);
    this.chosen = index;
    this.fresh = false;
    // The rest of the picture changes with the answer, not with the drag.
    this.drawBars();
    this.drawCodes();
    this.drawElement();
    this.ask();
  }

  setStep(step) {
    this.step = Math.min(Math.max(step, 0), this.trace.steps.length - 1);
    this.animate = true;
    this.draw();
    this.animate = false;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(true), 250);
  }

  // ---- drawing
  draw() {
    this.drawSteps();
    this.drawEquation();
    this.drawBars();
    this.drawCodes();
    this.drawGauge();
    this.drawElement();
    this.find(".global").textContent = fill(this.text.global, this.trace);
    const shown = this.step >= this.trace.scaleFrom;
    this.find(".scale").textContent = shown ? fill(this.text.scale, this.trace) : this.text.scaleLater;
  }

  drawSteps() {
    const holder = this.find(".steps");
    const { steps } = this.trace;
    if (holder.dataset.made !== this.text.steps) {
      holder.dataset.made = this.text.steps;
      holder.setAttribute("aria-label", this.text.steps);
      holder.replaceChildren(
        ...steps.map((step, index) => {
          const button = document.createElement("button");
          button.type = "button";
          button.className = "step";
          button.role = "tab";
          button.dataset.step = index;
          const number = document.createElement("b");
          number.textContent = index + 1;
          const label = document.createElement("span");
          label.className = "label";
          label.textContent = step.name;
          button.setAttribute("aria-label", `${index + 1} ${step.name}`);
          button.append(number, label);
          return button;
        }),
      );
    }
    [...holder.children].forEach((button, index) => {
      button.setAttribute("aria-selected", index === this.step ? "true" : "false");
      button.tabIndex = index === this.step ? 0 : -1;
    });
  }

  drawEquation() {
    const step = this.trace.steps[this.step];
    const box = this.find(".formula");
    box.replaceChildren(
      ...step.formula.map(([role, text]) => {
        const span = document.createElement("span");
        span.className = role;
        span.textContent = text;
        return span;
      }),
    );
    this.find(".words").textContent = step.words;
  }

  // Steps up to the inverse show x; multiply shows y on the grid of E2M1; convert snaps y to it; read back shows what survives.
  view() {
    const { trace, step } = this;
    const kind = trace.steps[step].view;
    if (kind === "x") return { values: this.x, ghost: null, grid: null };
    if (kind === "y") return { values: trace.y.map(numberOf), ghost: null, grid: trace.grid };
    if (kind === "code") return { values: trace.decoded.map(numberOf), ghost: trace.y.map(numberOf), grid: trace.grid };
    return { values: trace.readback.map(numberOf), ghost: this.x, grid: null };
  }

  drawBars() {
    const svg = this.find(".bars");
    const { width } = this;
    if (!width) return;
    const height = this.height || 260;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", this.text.bars);
    const { values, ghost, grid } = this.view();
    const finite = (list) => list.filter(Number.isFinite).map(Math.abs);
    const limit = this.dragging ? this.limit : grid ? Math.max(6.6, ...finite(ghost ?? values).map((y) => Math.min(y, 12))) : Math.max(1e-30, ...finite(values), ...finite(ghost ?? [])) * 1.08;
    this.limit = limit;
    const middle = height / 2;
    const at = (value) => middle - (Math.min(Math.max(value, -limit), limit) / limit) * (middle - 12);
    const column = (width - GUTTER) / 16;
    const parts = [];
    for (const level of grid ?? []) {
      parts.push(node("line", { class: "grid", x1: GUTTER, x2: width, y1: at(level), y2: at(level) }));
      if (level % 2 === 0) parts.push(node("text", { x: 0, y: at(level) + 4 }, short(level)));
    }
    parts.push(node("line", { class: "zero", x1: 0, x2: width, y1: middle, y2: middle }));
    const group = node("g", { class: this.animate ? "animated" : "" });
    const focused = this.root.activeElement?.dataset?.bar;
    values.forEach((value, index) => group.append(this.bar(index, value, ghost?.[index], at, column, middle, height)));
    parts.push(group);
    if (this.animate) this.growFrom(group);
    svg.replaceChildren(...parts);
    if (focused !== undefined) svg.querySelector(`[data-bar="${focused}"]`)?.focus({ preventScroll: true });
  }

  growFrom(group) {
    // Start where the bars were, then let the transition carry them.
    const old = new Map([...this.root.querySelectorAll(".bar rect.value")].map((rect) => [rect.parentNode.dataset.bar, rect]));
    for (const bar of group.children) {
      const rect = bar.querySelector("rect.value");
      const before = old.get(bar.dataset.bar);
      if (!rect || !before) continue;
      const target = [rect.getAttribute("y"), rect.getAttribute("height")];
      rect.style.y = `${before.getAttribute("y")}px`;
      rect.style.height = `${before.getAttribute("height")}px`;
      requestAnimationFrame(() => {
        rect.style.y = `${target[0]}px`;
        rect.style.height = `${target[1]}px`;
      });
    }
  }

  bar(index, value, ghost, at, column, middle, height) {
    const x = GUTTER + index * column + column * 0.16;
    const w = column * 0.68;
    const mine = this.x[index];
    const classes = ["bar"];
    if (index === this.trace.maxIndex && this.fresh) classes.push("max");
    if (index === this.chosen) classes.push("chosen");
    const bar = node("g", {
      class: classes.join(" "),
      "data-bar": index,
      role: "slider",
      tabindex: index === this.chosen ? 0 : -1,
      "aria-label": fill(this.text.barName, { index }),
      "aria-orientation": "vertical",
      "aria-valuenow": Number.isFinite(mine) ? mine : 0,
      "aria-valuetext": fill(this.text.barValue, { x: short(mine), code: this.fresh ? this.trace.codeHex[index] : "…", value: this.fresh ? short(numberOf(this.trace.readback[index])) : "…" }),
    });
    if (ghost !== undefined && ghost !== null && Number.isFinite(ghost)) {
      bar.append(node("rect", { class: "ghost", x, width: w, y: Math.min(at(ghost), middle), height: Math.abs(at(ghost) - middle) }));
    }
    if (Number.isFinite(value)) {
      const top = Math.min(at(value), middle);
      bar.append(node("rect", { class: "value", x, width: w, y: top, height: Math.max(Math.abs(at(value) - middle), value === 0 ? 0 : 1) }));
      if (value === 0 && ghost) bar.append(node("text", { class: "lost", x: x + w / 2, y: middle - 6 }, "0"));
    } else {
      bar.append(node("text", { class: "lost", x: x + w / 2, y: middle - 8 }, Number.isNaN(value) ? "N" : value > 0 ? "∞" : "−∞"));
    }
    bar.append(node("rect", { class: "grip", x: GUTTER + index * column + 1, width: column - 2, y: 1, height: height - 2 }));
    return bar;
  }

  drawCodes() {
    const { trace } = this;
    const show = this.fresh && trace.steps[this.step].view !== "x" && trace.steps[this.step].view !== "y";
    this.find(".codes").replaceChildren(
      ...trace.bits.map((bits, index) => {
        const box = document.createElement("div");
        box.className = `code${show ? "" : " off"}`;
        const value = document.createElement("span");
        value.className = "v";
        value.textContent = short(numberOf(trace.decoded[index]));
        const digits = document.createElement("span");
        digits.className = "digits";
        [["S", bits[0]], ["E", bits.slice(1, 3)], ["M", bits[3]]].forEach(([role, text]) => {
          const span = document.createElement("span");
          span.className = role;
          span.textContent = text;
          digits.append(span);
        });
        box.append(value, digits);
        return box;
      }),
    );
  }

  drawElement() {
    const { trace, chosen } = this;
    const box = this.find(".element");
    const words = this.fresh ? trace.elements[chosen] : fill(this.text.waiting, { index: chosen, x: short(this.x[chosen]) });
    if (box.textContent !== words) box.textContent = words;
  }

  drawGauge() {
    const svg = this.find(".gauge svg");
    const { width, trace, text } = this;
    if (!width) return;
    svg.setAttribute("viewBox", `0 0 ${width} 84`);
    svg.setAttribute("aria-label", trace.gauge.alt);
    this.find(".gauge figcaption").textContent = text.gauge;
    const { from, to, zones, ticks, value } = trace.gauge; // powers of two
    const at = (power) => 8 + ((Math.min(Math.max(power, from), to) - from) / (to - from)) * (width - 16);
    const hatch = node("pattern", { id: "coarse", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    hatch.append(node("line", { x1: 0, y1: 0, x2: 0, y2: 6, stroke: "var(--block-scale)", "stroke-width": 3 }));
    const parts = [hatch];
    for (const zone of zones) {
      parts.push(node("rect", { class: `zone ${zone.id}`, x: at(zone.from), width: at(zone.to) - at(zone.from), y: 26, height: 28, rx: 2 }));
      const room = at(zone.to) - at(zone.from);
      const label = text.zones[zone.id];
      // Every zone is named: on two lines where one is too long.
      const lines = room > widthOf(label) ? [label] : halves(label);
      const middle = (at(zone.from) + at(zone.to)) / 2;
      lines.forEach((line, index) => {
        const place = lines.length === 1 ? { y: 44 } : { y: 38 + 12 * index, class: "small" };
        parts.push(node("text", { x: middle, ...place }, line));
      });
    }
    for (const tick of ticks) parts.push(node("text", { class: "tick", x: at(tick.power), y: 70 }, tick.label));
    if (value !== null) {
      const x = at(value);
      parts.push(node("path", { class: "needle", d: `M${x - 7} 8 h14 l-7 16 z` }));
    }
    svg.replaceChildren(...parts);
  }

  // ---- editing
  listen() {
    this.root.addEventListener("click", (event) => {
      const step = event.target.closest?.(".step");
      if (step) this.setStep(Number(step.dataset.step));
    });
    this.root.addEventListener("keydown", (event) => this.key(event));
    const svg = this.find(".bars");
    const valueAt = (event) => {
      const box = svg.getBoundingClientRect();
      const middle = box.height / 2;
      return ((middle - (event.clientY - box.top)) / (middle - 12)) * this.limit;
    };
    svg.addEventListener("pointerdown", (event) => {
      const bar = event.target.closest("[data-bar]");
      if (!bar || event.button) return;
      this.chosen = Number(bar.dataset.bar);
      this.draw();
      svg.querySelector(`[data-bar="${this.chosen}"]`).focus({ preventScroll: true });
      if (this.trace.steps[this.step].view === "y" || this.trace.steps[this.step].view === "code") return; // these bars are results
      this.dragging = true;
      this.startY = event.clientY;
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      if (!this.dragging || Math.abs(event.clientY - this.startY) < 2) return;
      this.startY = -1e9; // from now on every move counts
      this.setValue(this.chosen, valueAt(event));
    });
    const end = () => {
      if (!this.dragging) return;
      this.dragging = false;
      this.draw();
      this.ask(true);
    };
    svg.addEventListener("pointerup", end);
    svg.addEventListener("pointercancel", end);
  }

  key(event) {
    const bar = event.target.closest?.("[data-bar]");
    const step = event.target.closest?.(".step");
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && sideways) {
      this.setStep(this.step + sideways);
      this.find(`[data-step="${this.step}"]`).focus();
    } else if (bar && sideways) {
      this.chosen = (this.chosen + sideways + 16) % 16;
      this.draw();
      this.find(`[data-bar="${this.chosen}"]`).focus();
    } else if (bar) {
      const grain = this.limit / (event.shiftKey ? 8 : 64);
      const change = { ArrowUp: grain, ArrowDown: -grain, PageUp: grain * 8, PageDown: -grain * 8 }[event.key];
      if (event.key === "Home") this.setValue(this.chosen, 0);
      else if (change) this.setValue(this.chosen, (Number.isFinite(this.x[this.chosen]) ? this.x[this.chosen] : 0) + change);
      else return;
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
