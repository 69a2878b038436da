// Eight codes, four bytes, one uint32: edit any of them.
const PACKERS = new WeakMap();
const hex = (value, digits) => value.toString(16).toUpperCase().padStart(digits, "0");
// A nibble's four bits in the colours they have everywhere, on the line that tells low from high.
function nibble(code, place) {
  const bits = code.toString(2).padStart(4, "0");
  const parts = [["S", bits[0]], ["E", bits.slice(1, 3)], ["M", bits[3]]];
  return `<span class="nibble ${place}">${parts.map(([role, text]) => `<span class="${role}">${text}</span>`).join("")}</span>`;
}
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);

class Packer {
  constructor(root) {
    this.root = root;
    root.addEventListener("input", (event) => this.edit(event.target));
    root.addEventListener("focusout", () => this.draw());
  }

  take({ data, setStateValue }) {
    this.send = setStateValue;
    this.text = data.text;
    this.values = data.values;
    if (data.version !== this.version) {
      this.version = data.version;
      this.codes = [...data.codes];
    }
    if (this.made !== data.text.element) this.make();
    this.draw();
  }

  make() {
    this.made = this.text.element;
    const { text } = this;
    const find = (selector) => this.root.querySelector(selector);
    const options = this.values.map((value, code) => `<option value="${code}">${value}</option>`).join("");
    find(".elements").innerHTML = this.codes
      .map((_, i) => `<div class="element ${i % 2 ? "high" : "low"}"><label class="name">${fill(text.element, { i })}
        <select data-element="${i}">${options}</select></label><span class="bits"></span><span class="hex name"></span></div>`)
      .join("");
    find(".bytes").innerHTML = [0, 1, 2, 3]
      .map((j) => `<div class="byte"><label class="name">${fill(text.byte, { j })}<br><input data-byte="${j}" spellcheck="false" autocomplete="off"></label>
        <span class="split"></span></div>`)
      .join("");
    find(".word").innerHTML = `<div class="whole"><label class="name">${text.word}<br><input data-word spellcheck="false" autocomplete="off"></label>
        <span class="spread"></span></div>`;
  }

  draw() {
    const { codes, root } = this;
    const active = root.activeElement;
    const set = (input, value) => {
      if (input !== active) {
        input.value = value;
        input.setAttribute("aria-invalid", "false");
      }
    };
    root.querySelectorAll(".element").forEach((box, i) => {
      set(box.querySelector("select"), codes[i]);
      box.querySelector(".bits").innerHTML = nibble(codes[i], "");
      box.querySelector(".hex").textContent = `0x${hex(codes[i], 1)}`;
    });
    const bytes = packBytes(codes);
    root.querySelectorAll(".byte").forEach((box, j) => {
      set(box.querySelector("input"), `0x${hex(bytes[j], 2)}`);
      box.querySelector(".split").innerHTML = nibble(codes[2 * j + 1], "high") + nibble(codes[2 * j], "low");
    });
    const word = packWord(codes);
    set(root.querySelector("[data-word]"), `0x${hex(word, 8)}`);
    root.querySelector(".spread").innerHTML = [...codes]
      .map((code, i) => nibble(code, i % 2 ? "high" : "low"))
      .reverse()
      .join("");
    root.querySelector(".said").textContent = fill(this.text.said, {
      memory: bytes.map((byte) => hex(byte, 2)).join(" "),
      word: hex(word, 8),
    });
  }

  edit(target) {
    const parse = (digits) => {
      const plain = target.value.trim().replace(/^0x/i, "");
      const good = new RegExp(`^[0-9a-f]{1,${digits}}$`, "i").test(plain);
      target.setAttribute("aria-invalid", good ? "false" : "true");
      if (!good) {
        const example = `0x${"1234ABCD".slice(0, digits)}`;
        this.root.querySelector(".said").textContent = fill(this.text.notHex, { text: target.value, digits, example });
      }
      return good ? parseInt(plain, 16) : null;
    };
    if (target.dataset.element !== undefined) {
      this.codes[Number(target.dataset.element)] = Number(target.value);
    } else if (target.dataset.byte !== undefined) {
      const byte = parse(2);
      if (byte === null) return;
      const bytes = packBytes(this.codes);
      bytes[Number(target.dataset.byte)] = byte;
      this.codes = unpackBytes(bytes);
    } else if (target.dataset.word !== undefined) {
      const word = parse(8);
      if (word === null) return;
      this.codes = unpackWord(word);
    }
    this.draw();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.send("codes", this.codes), 200);
  }
}

export default function (component) {
  const root = component.parentElement;
  if (!PACKERS.has(root)) PACKERS.set(root, new Packer(root));
  PACKERS.get(root).take(component);
}
