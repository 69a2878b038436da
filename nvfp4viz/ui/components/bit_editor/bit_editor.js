// The bit editor: bits ⇄ hex ⇄ decimal ⇄ place on the number line, all editable, redrawn here in well under 10 ms.
// Python hears of an edit once it settles, and answers with words and links; what the reader sees never waits for it.

const EDITORS = new WeakMap();
const SVG = "http://www.w3.org/2000/svg";
const SETTLE_MS = 140;
const EXAMPLE = "-2.5e3";

const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
const hexOf = (format, code) => code.toString(16).toUpperCase().padStart(Math.ceil(format.width / 4), "0");
const bitsOf = (format, code) => code.toString(2).padStart(format.width, "0");

function make(tag, attributes = {}, text) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function colouredBits(format, code) {
  const holder = make("span", { class: "b" });
  for (const field of fieldsOf(format, code)) {
    const text = field.value.toString(2).padStart(field.width, "0");
    holder.append(make("span", { class: field.role }, text), " ");
  }
  return holder;
}

// Why a typed text is no number, and what to write instead.
function notNumber(text, typed) {
  if (!typed.trim()) return fill(text.noNumberYet, { example: EXAMPLE });
  const comma = /^\s*([+−-]?\d*),(\d+(?:e[+−-]?\d+)?)\s*$/i.exec(typed);
  if (comma) return fill(text.decimalComma, { text: typed.trim(), point: `${comma[1]}.${comma[2]}` });
  return fill(text.notNumber, { text: typed, example: EXAMPLE });
}

class Editor {
  constructor(root) {
    this.root = root;
    this.find = (selector) => root.querySelector(selector);
    this.listen();
    // The width is remembered: asking for it on every edit would force a layout each time.
    this.width = this.find(".line").clientWidth;
    new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      if (this.format) drawLine(this);
    }).observe(this.find(".line"));
  }

  // ---- data from Python
  take({ data, setStateValue }) {
    this.send = setStateValue;
    this.text = data.text;
    this.formats = data.formats;
    this.byId = Object.fromEntries(data.formats.map((format) => [format.id, format]));
    if (data.version !== this.version) {
      this.version = data.version;
      this.set(data.edit.format, data.edit.code === null ? { x: toNumber(data.edit.x) } : { code: data.edit.code }, false);
    } else {
      this.format = this.byId[this.format.id]; // new words, same state
    }
    this.label();
    this.draw();
  }

  // ---- state: a format, and either a typed number or a code
  set(formatId, { x, code, written = "" }, tell = true) {
    this.format = this.byId[formatId];
    if (code !== undefined) {
      this.code = code;
      this.x = decode(this.format, code);
      this.typed = false;
    } else {
      this.x = x;
      this.written = written;
      this.code = encode(this.format, x);
      this.typed = true;
    }
    if (tell) {
      this.draw();
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.report(), SETTLE_MS);
    }
  }

  report() {
    const x = Number.isFinite(this.x) ? (Object.is(this.x, -0) ? "-0" : this.x) : String(this.x).replace("Infinity", "inf").toLowerCase();
    this.send("edit", { format: this.format.id, x: this.typed ? x : null, code: this.typed ? null : this.code });
  }

  // ---- words that change only with the language
  label() {
    const { text } = this;
    this.find(".typed .name").textContent = text.typed;
    this.find(".code .name").textContent = text.code;
    this.find(".stored .name").textContent = text.stored;
    this.find(".bits").setAttribute("aria-label", text.bits);
    this.find(".codes").setAttribute("aria-label", text.codes);
    this.find(".formats").setAttribute("aria-label", text.formats);
    this.find(".line svg").setAttribute("aria-label", text.line);
    this.find(".line figcaption").textContent = text.lineCaption;
  }

  // ---- drawing
  draw() {
    const { format, code, x } = this;
    const rounding = this.typed ? roundingOf(format, x) : { kind: "code", code, value: decode(format, code) };
    this.rounding = rounding;
    this.drawBits();
    const active = this.root.activeElement;
    const typedBox = this.find(".x");
    const hexBox = this.find(".hex");
    if (active !== typedBox) {
      typedBox.value = showNumber(x).includes("×") ? String(x) : showNumber(x);
      typedBox.setAttribute("aria-invalid", "false");
    }
    if (active !== hexBox) {
      hexBox.value = `0x${hexOf(format, code)}`;
      hexBox.setAttribute("aria-invalid", "false");
    }
    this.find(".value").textContent = showNumber(rounding.value);
    this.drawFormula();
    this.say();
    drawLine(this);
    this.drawCodes();
    this.drawFormats();
  }

  drawBits() {
    const { format, code, text } = this;
    const holder = this.find(".bits");
    holder.className = `bits ${format.width > 8 ? "wider" : format.width > 4 ? "wide" : ""}`;
    if (holder.dataset.format !== format.id + text.bits) {
      holder.dataset.format = format.id + text.bits;
      holder.replaceChildren(
        ...fieldsOf(format, code).map((field) => {
          const box = make("div", { class: `field ${field.role}` });
          const row = make("div", { class: "row" });
          for (let i = field.width - 1; i >= 0; i -= 1) {
            row.append(make("button", { type: "button", class: "bit", "data-bit": field.shift + i, "data-role": field.role, "data-at": i }));
          }
          box.append(row, make("div", { class: "under" }));
          return box;
        }),
      );
      this.bitButtons = [...holder.querySelectorAll(".bit")];
      this.bitButtons.forEach((button, index) => (button.tabIndex = index === 0 ? 0 : -1));
    }
    for (const button of this.bitButtons) {
      const on = (code >>> Number(button.dataset.bit)) & 1;
      button.textContent = on;
      button.setAttribute("aria-pressed", on ? "true" : "false");
      button.setAttribute("aria-label", fill(text.bit, { role: text.roles[button.dataset.role], at: button.dataset.at, on }));
    }
    const unders = holder.querySelectorAll(".under");
    fieldsOf(format, code).forEach((field, index) => {
      const words = text.roles[field.role];
      unders[index].replaceChildren(make("b", {}, field.role), field.width > 1 || format.width <= 8 ? ` ${words}` : "");
    });
  }

  drawFormula() {
    const { format, code, rounding } = this;
    const part = Object.fromEntries(fieldsOf(format, code).map((field) => [field.role, field]));
    const box = this.find(".formula");
    const span = (role, text) => make("span", { class: role }, text);
    if (!Number.isFinite(rounding.value)) {
      box.replaceChildren(fill(this.text.noNumber, { value: showNumber(rounding.value) }));
      return;
    }
    const pieces = [];
    if (part.S) pieces.push("(−1)^", span("S", part.S.value), " × ");
    if (!part.M) {
      pieces.push("2^(", span("E", part.E.value), ` − ${format.bias})`);
    } else {
      const scale = 2 ** part.M.width;
      const subnormal = part.E.value === 0;
      pieces.push("2^(", subnormal ? "1" : span("E", part.E.value), ` − ${format.bias}) × (`, subnormal ? "0" : "1", " + ");
      pieces.push(span("M", part.M.value), `/${scale})`);
    }
    pieces.push(` = ${showNumber(rounding.value)}`);
    box.replaceChildren(...pieces);
  }

  say() {
    const { rounding, format, x } = this;
    const values = {
      x: showNumber(x),
      value: showNumber(rounding.value),
      code: `0x${hexOf(format, rounding.code)}`,
      bits: bitsOf(format, rounding.code),
      lower: rounding.lower === undefined ? "" : showNumber(rounding.lower),
      upper: rounding.upper === undefined ? "" : showNumber(rounding.upper),
      largest: rounding.largest === undefined ? "" : showNumber(rounding.largest),
      format: format.name,
    };
    const words = this.first(values) + (this.vanishes() ? "" : fill(this.text.said[rounding.kind], values));
    const box = this.find(".said");
    if (box.textContent !== words) box.textContent = words;
  }

  // What float32, which every format is converted from, already makes of a typed number: only where the sentence after it
  // would claim something exact about a number that is another one.
  first(values) {
    if (!this.typed) return "";
    if (this.vanishes()) return fill(this.text.said.vanishes, { ...values, x: this.written || values.x, zero: showNumber(Math.fround(this.x)) });
    const exact = ["exact", "tie"].includes(this.rounding.kind);
    if (!exact || !Number.isFinite(this.x) || Math.fround(this.x) === this.x) return "";
    const near = showNumber(Math.fround(this.x));
    const said = fill(this.text.said.float32, { x: this.written || String(this.x), near });
    values.x = near;
    return said;
  }

  // Not zero when it was written, and zero as a float32.
  vanishes() {
    return this.typed && Math.fround(this.x) === 0 && (this.x !== 0 || /^[^e]*[1-9]/i.test(this.written));
  }

  drawCodes() {
    const { format, text } = this;
    const holder = this.find(".codes");
    if (format.width !== 4) {
      holder.replaceChildren();
      delete holder.dataset.made;
      return;
    }
    if (holder.dataset.made !== text.codes) {
      holder.dataset.made = text.codes;
      holder.replaceChildren(
        ...Array.from({ length: 16 }, (_, code) => {
          const chip = make("button", { type: "button", class: "chip", "data-code": code, tabindex: -1 });
          chip.append(make("span", { class: "v" }, showNumber(decode(format, code))), colouredBits(format, code), make("span", { class: "h" }, `0x${hexOf(format, code)}`));
          chip.setAttribute("aria-label", fill(text.chip, { code: `0x${hexOf(format, code)}`, value: showNumber(decode(format, code)) }));
          return chip;
        }),
      );
    }
    for (const chip of holder.children) {
      const mine = Number(chip.dataset.code) === this.code;
      chip.setAttribute("aria-pressed", mine ? "true" : "false");
      chip.tabIndex = mine ? 0 : -1;
    }
  }

  drawFormats() {
    const { text, x } = this;
    const holder = this.find(".formats");
    if (holder.dataset.made !== text.formats) {
      holder.dataset.made = text.formats;
      holder.replaceChildren(
        make("div", { class: "title", "aria-hidden": "true" }),
        ...this.formats.map((format) => {
          const row = make("button", { type: "button", class: "row-format", role: "radio", "data-format": format.id });
          row.append(make("span", { class: "n" }, format.name), make("span", { class: "b" }), make("span", { class: "v" }), make("span", { class: "off" }));
          return row;
        }),
      );
    }
    holder.querySelector(".title").textContent = fill(text.formatsTitle, { x: showNumber(x) });
    for (const row of holder.querySelectorAll(".row-format")) {
      const format = this.byId[row.dataset.format];
      const mine = format === this.format;
      const code = mine ? this.code : encode(format, x);
      const value = decode(format, code);
      row.querySelector(".b").replaceWith(colouredBits(format, code));
      row.querySelector(".v").textContent = showNumber(value);
      row.querySelector(".off").textContent = this.errorWords(format, value);
      row.setAttribute("aria-checked", mine ? "true" : "false");
      row.tabIndex = mine ? 0 : -1;
    }
  }

  errorWords(format, value) {
    const x = Math.fround(this.x);
    if (this.vanishes()) return "";
    if (!format.signed && (x < 0 || Object.is(x, -0))) return this.text.noSign;
    if (Number.isNaN(x) || Number.isNaN(value)) return "";
    if (x === value) return this.text.exact;
    if (!Number.isFinite(x)) return this.text.saturates;
    const off = (Math.abs(value) / Math.abs(x) - 1) * 100; // larger or smaller, whatever the sign
    return fill(this.text.off, { percent: `${off > 0 ? "+" : "−"}${Math.abs(off) >= 100 ? Math.round(Math.abs(off)) : Number(Math.abs(off).toPrecision(3))}` });
  }

  // ---- editing
  listen() {
    this.root.addEventListener("click", (event) => {
      const bit = event.target.closest(".bit");
      if (bit) return this.set(this.format.id, { code: (this.code ^ (1 << Number(bit.dataset.bit))) >>> 0 });
      const chip = event.target.closest(".chip");
      if (chip) return this.set(this.format.id, { code: Number(chip.dataset.code) });
      const row = event.target.closest(".row-format");
      if (row) return this.choose(row.dataset.format);
      return undefined;
    });
    this.root.addEventListener("keydown", (event) => this.key(event));
    const typed = this.find(".x");
    typed.addEventListener("input", () => {
      const number = parseNumber(typed.value);
      typed.setAttribute("aria-invalid", number === null ? "true" : "false");
      if (number === null) this.find(".said").textContent = notNumber(this.text, typed.value);
      else this.set(this.format.id, { x: number, written: typed.value.trim() });
    });
    typed.addEventListener("blur", () => this.draw());
    const hex = this.find(".hex");
    hex.addEventListener("input", () => {
      const plain = hex.value.trim().replace(/^0x/i, "");
      const good = /^[0-9a-f]+$/i.test(plain) && parseInt(plain, 16) < 2 ** this.format.width;
      hex.setAttribute("aria-invalid", good ? "false" : "true");
      if (good) this.set(this.format.id, { code: parseInt(plain, 16) });
      else {
        const last = hexOf(this.format, 2 ** this.format.width - 1);
        const words = plain ? this.text.notCode : this.text.noCode;
        this.find(".said").textContent = fill(words, { text: hex.value, bits: this.format.width, first: `0x${"0".repeat(last.length)}`, last: `0x${last}` });
      }
    });
    hex.addEventListener("blur", () => this.draw());
    const svg = this.find(".line svg");
    const move = (event) => {
      const px = event.clientX - svg.getBoundingClientRect().left;
      const step = (this.scale.to - this.scale.from) / 512;
      const grain = 2 ** Math.round(Math.log2(step)); // a power of two, so that midpoints can be hit exactly
      this.set(this.format.id, { x: Math.round(this.scale.back(px) / grain) * grain });
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      this.dragging = true;
      svg.setPointerCapture(event.pointerId);
      move(event);
      this.find(".handle")?.focus({ preventScroll: true });
    });
    svg.addEventListener("pointermove", (event) => this.dragging && move(event));
    const end = () => {
      if (!this.dragging) return;
      this.dragging = false;
      drawLine(this);
    };
    svg.addEventListener("pointerup", end);
    svg.addEventListener("pointercancel", end);
  }

  choose(formatId) {
    // The number stays, the format changes: that is the comparison.
    this.set(formatId, { x: this.x, written: this.written });
  }

  key(event) {
    const arrows = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 };
    const step = arrows[event.key];
    const target = event.target;
    if (target.classList.contains("bit") && step) {
      const index = this.bitButtons.indexOf(target) + (event.key === "ArrowLeft" || event.key === "ArrowUp" ? -1 : 1);
      const next = this.bitButtons[(index + this.bitButtons.length) % this.bitButtons.length];
      this.bitButtons.forEach((button) => (button.tabIndex = button === next ? 0 : -1));
      next.focus();
    } else if (target.classList.contains("chip") && step) {
      const code = (this.code + step + 16) % 16;
      this.set(this.format.id, { code });
      this.find(`.chip[data-code="${code}"]`).focus();
    } else if (target.classList.contains("row-format") && step) {
      const index = (this.formats.indexOf(this.format) + (step > 0 ? 1 : -1) + this.formats.length) % this.formats.length;
      this.choose(this.formats[index].id);
      this.find(`.row-format[data-format="${this.format.id}"]`).focus();
    } else if (target.classList.contains("handle")) {
      const x = this.stepped(event, step);
      if (x === null) return;
      this.set(this.format.id, { x });
    } else {
      return;
    }
    event.preventDefault();
  }

  // Arrow: a fine step; Page Up and Page Down: the next tie; Home and End: the ends of the line.
  stepped(event, step) {
    const { from, to } = this.scale;
    const grain = 2 ** Math.round(Math.log2((to - from) / 256));
    if (step) return (Math.round(this.x / grain) + step) * grain;
    if (event.key === "Home") return from;
    if (event.key === "End") return to;
    if (event.key !== "PageUp" && event.key !== "PageDown") return null;
    const values = this.codes.map((code) => decode(this.format, code));
    const ties = values.slice(1).map((value, index) => (value + values[index]) / 2).filter((tie) => tie !== 0);
    const beyond = event.key === "PageUp" ? ties.filter((tie) => tie > this.x) : ties.filter((tie) => tie < this.x).reverse();
    return beyond.length ? beyond[0] : null;
  }
}

export default function (component) {
  const root = component.parentElement;
  if (!EDITORS.has(root)) EDITORS.set(root, new Editor(root));
  EDITORS.get(root).take(component);
}
