// The chosen row in numbers: what the step hands on for it, in both runs, bit by bit.
class Inspector {
  constructor(section) {
    this.section = section;
    this.block = 0;
  }

  draw({ text, picture, runs, step, route: number }) {
    Object.assign(this, { text, picture, runs, step, route: number });
    const route = picture.routes[number];
    const expert = picture.experts[route.expert];
    const head = box("p", "head", called(number, picture, text));
    const blocks = this.blocks();
    const sides = picture.covered ? ["healthy"] : ["healthy", "faulty"];
    const table = document.createElement("table");
    const names = table.createTHead().insertRow();
    for (const side of sides) {
      const cell = box("th", "", text[side]);
      cell.scope = "col";
      names.append(cell);
    }
    for (const [name, made] of this.quantities(route, expert)) {
      const body = table.createTBody();
      const title = box("th", "", name);
      title.scope = "rowgroup";
      title.colSpan = sides.length;
      body.insertRow().append(title);
      const cells = sides.map((side) => made(side));
      cells.forEach((cell, at) => {
        cell.dataset.label = text[sides[at]];
        [...cell.children].forEach((part, index) => part.classList.toggle("other", at === 1 && part.textContent !== cells[0].children[index].textContent));
      });
      body.insertRow().append(...cells);
    }
    // What the reader has the keyboard on is made anew, and keeps it.
    const focused = this.section.getRootNode().activeElement;
    const again = !this.section.contains(focused) ? null : focused.dataset.route ? `.row[data-route="${focused.dataset.route}"]` : ".block";
    this.section.replaceChildren(head, this.kin(route), ...blocks, table);
    if (again) this.section.querySelector(again)?.focus({ preventScroll: true });
  }

  // Other rows of the token, other rows of the expert.
  kin(route) {
    const { text, picture } = this;
    const line = box("div", "kin-line");
    const rows = (label, wanted, name) => {
      const part = box("span", "kin-part");
      part.append(box("span", "label", label));
      picture.routes.forEach((other, at) => {
        if (!wanted(other)) return;
        const made = button(`row${at === this.route ? " chosen" : ""}`, name(other));
        made.dataset.route = at;
        part.append(made);
      });
      return part;
    };
    line.append(
      rows(text.siblings, (other) => other.token === route.token, (other) => `E${picture.experts[other.expert].id}`),
      rows(text.group, (other) => other.expert === route.expert, (other) => picture.tokens[other.token].text + picture.tokens[other.token].sub),
    );
    return line;
  }

  blocks() {
    const { text } = this;
    const length = { 2: "x", 3: "x", 4: "c1", 5: "c2", 6: "c2", 7: "c3", 8: "c3", 9: "out" }[this.step];
    if (!length) return [];
    const all = this.runs.row("healthy", length, 0).words.length / 16;
    this.shown = Math.min(this.block, all - 1);
    const label = box("label", "block-line", text.block);
    const select = box("select", "block");
    for (let n = 0; n < all; n++) {
      const option = box("option", "", fill(text.block_of, { n: n + 1, all, first: n * 16, last: n * 16 + 15 }));
      option.value = n;
      select.append(option);
    }
    select.value = this.shown;
    select.addEventListener("change", () => {
      this.block = Number(select.value);
      this.draw(this);
    });
    label.append(select);
    return [label];
  }

  quantities(route, expert) {
    const { picture } = this;
    const names = Object.fromEntries(
      Object.entries(this.text.names).map(([name, text]) => [name, fill(text, { row: route.row, route: this.route, id: expert.id })]),
    );
    const said = (name, of) => [names[name], (side) => this.said(of(side))];
    const floats = (name, tensor, start = this.shown * 16) => [names[name], (side) => this.floats(this.runs.row(side, tensor, tensor === "out" ? route.token : route.row), start)];
    const constant = (name) => said(name, (side) => expert[side][name]);
    const experts = picture.routes.filter((other) => other.token === route.token).map((other) => picture.experts[other.expert].id);
    const half = this.runs.row("healthy", "c1", 0).words.length / 2;
    const quantized = (which) => [
      [names.scales, (side) => this.scales(this.runs.row(side, `scales${which}`, route.row).words)],
      [names.codes, (side) => this.codes(this.runs.row(side, `packed${which}`, route.row).words)],
    ];
    switch (this.step) {
      case 1:
        return [said("experts", () => experts.join(" · ")), said("weight", () => route.weight)];
      case 2:
        return [
          said("a_map", () => route.token),
          said("c_map", () => route.row),
          said("offsets", () => `${expert.offset}, ${expert.end}`),
          said("scale_offset", () => expert.scaleOffset),
          said("sizes1", () => expert.sizes1),
          said("sizes2", () => expert.sizes2),
          floats("x", "x"),
        ];
      case 3:
        return [constant("a1_gscale"), ...quantized(1)];
      case 4:
        return [said("sizes1", () => expert.sizes1), constant("g1_alphas"), floats("acc", "acc1"), floats("c1", "c1")];
      case 5:
        return [floats("gate", "c1"), floats("up", "c1", half + this.shown * 16), floats("c2", "c2")];
      case 6:
        return [constant("a2_gscale"), ...quantized(2)];
      case 7:
        return [said("sizes2", () => expert.sizes2), constant("g2_alphas"), floats("acc", "acc2"), floats("c3", "c3")];
      case 8:
        return [said("c_map", () => route.row), floats("c3", "c3")];
      default:
        return [said("rounded", () => route.rounded), floats("c3", "c3"), floats("out", "out")];
    }
  }

  said(text) {
    const cell = box("td", "said");
    cell.append(box("span", "one", text));
    return cell;
  }

  floats({ kind, words: bits }, start) {
    const cell = box("td", kind === "f32" ? "strip wide" : "strip");
    for (const word of bits.subarray(start, start + 16)) {
      const value = floatOf(word, kind);
      const part = box("span", `cell${Number.isNaN(value) ? " nan" : ""}`);
      part.append(box("span", "number", four(value)), box("span", "hex", hex(word, kind === "bf16" ? 4 : 8)));
      cell.append(part);
    }
    return cell;
  }

  scales(bytes) {
    const cell = box("td", "strip");
    bytes.forEach((byte, index) => {
      const part = box("span", `cell scale${(byte & 127) === 127 ? " nan" : ""}${index === this.shown ? " shown" : ""}`);
      part.append(box("span", "number", this.picture.values.e4m3[byte]), box("span", "hex", hex(byte, 2)), this.bits(byte, [1, 4, 3]));
      cell.append(part);
    });
    return cell;
  }

  codes(packed) {
    const cell = box("td", "strip");
    for (const code of codesOf(packed, this.shown * 16, 16)) {
      const part = box("span", "cell");
      part.append(box("span", "number", this.picture.values.e2m1[code]), box("span", "hex", hex(code, 1)), this.bits(code, [1, 2, 1]));
      cell.append(part);
    }
    return cell;
  }

  // Sign, exponent, mantissa.
  bits(word, widths) {
    const text = word.toString(2).padStart(widths.reduce((sum, width) => sum + width), "0");
    const made = box("span", "bits");
    let at = 0;
    ["sign", "exponent", "mantissa"].forEach((role, index) => {
      made.append(box("span", role, text.slice(at, at + widths[index])));
      at += widths[index];
    });
    return made;
  }
}
