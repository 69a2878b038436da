// Layer × expert coverage on a canvas, with one prompt's routes drawn over it.  Takes the record that figures/coverage.py packs, and
// the cells that coverage_cells.js holds; looks things up, computes nothing.  Scales from 4×64 (rows apart, routes as curves) to 61×384 (dense cells, routes as marks).
const GUTTER = 44; // layer labels
const AXIS = 22; // expert numbers
const MOTION_MS = 350;
const ECHO_MS = 5000;
const maps = new WeakMap();

export default function ({ data, parentElement, setStateValue }) {
  let map = maps.get(parentElement);
  if (!map) {
    map = new CoverageMap(parentElement);
    maps.set(parentElement, map);
  }
  map.show(data, setStateValue);
  return () => {
    map.close();
    maps.delete(parentElement);
  };
}

const decode = (text, Type) => new Type(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const fill = (template, values) => template.replace(/\{(\w+)\}/g, (_, name) => values[name]);
// As the page writes numbers: JavaScript says Infinity.
const written = (x) => (Number.isNaN(x) ? "NaN" : String(Number(x.toPrecision(5))).replace("Infinity", "∞").replace(/^-/, "−"));
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

class CoverageMap {
  constructor(root) {
    this.root = root;
    this.$ = (query) => root.querySelector(query);
    this.canvas = this.$(".field canvas");
    this.field = this.$(".field");
    this.tip = this.$(".tip");
    this.zoom = 1;
    this.pan = { x: 0, y: 0 };
    this.cursor = { layer: 0, expert: 0 };
    this.echoes = {};
    this.progress = 1;
    this.listen();
    this.resized = new ResizeObserver(() => this.layout());
    this.resized.observe(this.field);
    // A change of theme changes no data, but every colour on the canvas.
    this.themed = new MutationObserver(() => requestAnimationFrame(() => this.recolour()));
    for (const node of [document.documentElement, document.body, document.querySelector(".stApp")]) {
      if (node) this.themed.observe(node, { attributes: true, attributeFilter: ["class", "style", "data-theme"] });
    }
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.schemed = () => this.recolour();
    this.scheme.addEventListener("change", this.schemed);
    this.heard = ({ detail }) => this.waiting?.[0].of === detail && this.show(...this.waiting);
    document.addEventListener("nvfp4viz-cells", this.heard);
  }

  close() {
    this.resized.disconnect();
    this.themed.disconnect();
    this.scheme.removeEventListener("change", this.schemed);
    document.removeEventListener("nvfp4viz-cells", this.heard);
    cancelAnimationFrame(this.frame);
  }

  // ---- data ------------------------------------------------------------------------------------------------------------
  show(data, setStateValue) {
    const cells = globalThis.nvfp4vizCells?.get(data.of);
    // They are an element of their own, which may come after this one; until then the map goes on showing what it has.
    this.waiting = cells?.id === data.cells ? null : [data, setStateValue];
    if (this.waiting) return;
    const fresh = this.data?.id !== data.id;
    this.data = data;
    this.words = data.words;
    this.pick = setStateValue;
    ({ status: this.status, values: this.values, counts: this.counts } = cells);
    this.bits = this.values ? new Uint32Array(this.values.buffer) : null;
    const r = data.routes;
    this.routes = r ? { ...r, ids: decode(r.ids, Int16Array), blind: decode(r.blind, Uint8Array) } : null;
    if (fresh || this.token === undefined || (r && this.token >= r.tokens.length)) this.token = r ? r.focus : null;
    if (this.fromOutside("role", data.role) || this.role === undefined) this.role = data.role;
    const chosen = data.selected && `${data.selected.layer},${data.selected.expert}`;
    if (this.fromOutside("selected", chosen)) {
      this.selected = data.selected;
      if (data.selected) this.cursor = { layer: data.selected.layer, expert: data.selected.expert };
    }
    if (fresh && !data.selected) this.cursor = r && r.first ? { layer: r.first.layer, expert: r.first.expert } : { layer: 0, expert: 0 };
    this.visits = r ? this.countVisits() : null;
    if (fresh) this.progress = r && !matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 1;
    this.controls();
    this.recolour();
    this.speak();
    this.repoint();
    if (this.progress < 1) this.animate();
  }

  // Whether a value that came with new data is news: not what it was before, nor the echo of what this map reported while the
  // reader went on.
  fromOutside(name, value) {
    const seen = (this.echoes[name] ??= { last: undefined, sent: [] });
    // A report that nothing came back for, because it changed nothing, is forgotten.
    seen.sent = seen.sent.filter(({ at }) => performance.now() - at < ECHO_MS);
    const echo = seen.sent.findIndex(({ echo }) => echo === value);
    if (echo >= 0) seen.sent.splice(0, echo + 1);
    const news = echo < 0 && value !== seen.last && seen.sent.length === 0;
    seen.last = value;
    return news;
  }

  report(name, value, echo) {
    (this.echoes[name] ??= { last: undefined, sent: [] }).sent.push({ echo, at: performance.now() });
    // The time makes each choice a new value: the page was moved elsewhere by other means, and nobody tells this map's state.
    this.pick(name, { ...value, at: Date.now() });
  }

  at(layer, expert) {
    return (this.role * this.data.layers.length + layer) * this.data.experts + expert;
  }

  kind(layer, expert) {
    return this.data.statuses[this.status[this.at(layer, expert)]];
  }

  isHole(layer, expert) {
    return this.data.holes.includes(this.kind(layer, expert));
  }

  routed(token, layer) {
    const { ids, k } = this.routes;
    const start = (token * this.data.layers.length + layer) * k;
    return ids.subarray(start, start + k);
  }

  isBlind(token, layer) {
    return this.routes.blind[token * this.data.layers.length + layer] === 1;
  }

  countVisits() {
    const visits = new Map();
    this.routes.tokens.forEach((_, token) =>
      this.data.layers.forEach((_, layer) => {
        if (this.isBlind(token, layer)) return;
        for (const expert of this.routed(token, layer)) {
          const cell = layer * this.data.experts + expert;
          visits.set(cell, (visits.get(cell) ?? 0) + 1);
        }
      }),
    );
    return visits;
  }

  holesOf(token) {
    let holes = 0;
    this.data.layers.forEach((_, layer) => {
      if (!this.isBlind(token, layer)) for (const expert of this.routed(token, layer)) holes += this.isHole(layer, expert);
    });
    return holes;
  }

  // ---- controls --------------------------------------------------------------------------------------------------------
  controls() {
    const { words, data } = this;
    const roles = this.$(".roles");
    roles.setAttribute("aria-label", words.roles);
    this.buttons(roles, data.roles.length > 1 ? data.roles : [], (button, name, index) => {
      button.textContent = name;
      button.setAttribute("role", "radio");
      button.setAttribute("aria-checked", index === this.role);
      button.tabIndex = index === this.role ? 0 : -1;
      button.onclick = () => this.setRole(index);
      button.onkeydown = (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        event.stopPropagation();
        this.setRole((index + step + data.roles.length) % data.roles.length);
        roles.children[this.role].focus();
      };
    });
    const tokens = this.$(".tokens");
    tokens.setAttribute("aria-label", words.tokens);
    this.buttons(tokens, this.routes ? this.routes.tokens : [], (button, text, index) => {
      const holes = this.holesOf(index);
      button.textContent = text === "\n" ? "⏎" : text === " " ? "␣" : text;
      button.className = index >= this.routes.prompt ? "answer" : "";
      if (holes) button.dataset.holes = holes;
      else delete button.dataset.holes;
      button.setAttribute("aria-pressed", index === this.token);
      button.setAttribute("aria-label", fill(words.token, { token: text, position: index, holes }));
      button.tabIndex = index === this.token ? 0 : -1;
      button.onclick = () => this.setToken(index);
      button.onkeydown = (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        event.stopPropagation();
        this.setToken(clamp(index + step, 0, this.routes.tokens.length - 1));
        tokens.children[this.token].focus();
      };
    });
    this.$(".zoom").setAttribute("aria-label", words.zoom);
    this.$(".in").setAttribute("aria-label", words.zoom_in);
    this.$(".out").setAttribute("aria-label", words.zoom_out);
    this.$(".fit").textContent = words.zoom_fit;
    this.field.setAttribute("aria-label", words.field);
  }

  buttons(box, items, dress) {
    while (box.children.length > items.length) box.lastChild.remove();
    while (box.children.length < items.length) {
      const button = document.createElement("button");
      button.type = "button";
      box.append(button);
    }
    items.forEach((item, index) => dress(box.children[index], item, index));
  }

  setRole(index) {
    this.role = index;
    this.controls();
    this.legend();
    this.draw();
    this.speak();
    this.repoint();
    this.report("role", { name: this.data.roles[index] }, index);
  }

  setToken(index) {
    this.token = index;
    this.controls();
    this.progress = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1 : 0;
    this.animate();
    const first = this.data.layers.findIndex((_, l) => !this.isBlind(index, l) && [...this.routed(index, l)].some((e) => this.isHole(l, e)));
    if (first >= 0) {
      this.cursor = { layer: first, expert: [...this.routed(index, first)].find((e) => this.isHole(first, e)) };
    }
    this.speak();
  }

  animate() {
    cancelAnimationFrame(this.frame);
    const start = performance.now();
    const step = (now) => {
      this.progress = clamp((now - start) / MOTION_MS, 0, 1);
      this.draw();
      if (this.progress < 1) this.frame = requestAnimationFrame(step);
    };
    if (this.progress < 1) this.frame = requestAnimationFrame(step);
    else this.draw();
  }

  // ---- geometry --------------------------------------------------------------------------------------------------------
  layout() {
    if (!this.data) return;
    const width = this.field.clientWidth;
    if (!width) return;
    const layers = this.data.layers.length;
    // Few layers: rows stand apart so that routes can be followed.  Many: dense rows, like a spectrogram.
    this.airy = layers <= 12;
    const tall = this.data.tall ? 1.25 : 1;
    this.pitch = this.airy ? Math.round((this.routes ? 76 : 40) * tall) : clamp(Math.floor((520 * tall) / layers), 6, 20) * this.zoom;
    this.cellHeight = this.airy ? Math.round(26 * tall) : Math.max(this.pitch - 1, this.pitch * 0.86);
    this.top = this.airy && this.routes ? 40 : 4;
    const natural = this.top + this.pitch * layers + AXIS;
    const height = this.airy ? natural : Math.min(natural, Math.round(560 * tall));
    this.plot = { x: GUTTER, y: this.top, width: width - GUTTER - 4, height: height - this.top - AXIS };
    this.cellWidth = (this.plot.width / this.data.experts) * this.zoom;
    this.pan.x = clamp(this.pan.x, 0, Math.max(0, this.cellWidth * this.data.experts - this.plot.width));
    this.pan.y = clamp(this.pan.y, 0, Math.max(0, this.pitch * layers - this.plot.height));
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.ratio = ratio;
    this.size = { width, height };
    this.$(".out").disabled = this.zoom <= 1;
    this.$(".fit").disabled = this.zoom <= 1;
    this.draw();
  }

  x(expert) {
    return this.plot.x + expert * this.cellWidth - this.pan.x;
  }

  y(layer) {
    return this.plot.y + layer * this.pitch - this.pan.y;
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const expert = Math.floor((event.clientX - box.left - this.plot.x + this.pan.x) / this.cellWidth);
    const offset = event.clientY - box.top - this.plot.y + this.pan.y;
    const layer = Math.floor(offset / this.pitch);
    const inRow = offset - layer * this.pitch <= this.cellHeight + 4;
    const inside = expert >= 0 && expert < this.data.experts && layer >= 0 && layer < this.data.layers.length && inRow;
    return inside ? { layer, expert } : null;
  }

  setZoom(zoom, around) {
    const focus = around ?? this.cursor;
    const before = this.x(focus.expert);
    this.zoom = clamp(zoom, 1, 32);
    this.layout();
    this.pan.x += this.x(focus.expert) - before;
    this.layout();
    this.reveal();
  }

  reveal() {
    const { cursor, plot } = this;
    const x = this.x(cursor.expert);
    if (x < plot.x) this.pan.x -= plot.x - x;
    if (x + this.cellWidth > plot.x + plot.width) this.pan.x += x + this.cellWidth - plot.x - plot.width;
    const y = this.y(cursor.layer);
    if (y < plot.y) this.pan.y -= plot.y - y;
    if (y + this.pitch > plot.y + plot.height) this.pan.y += y + this.pitch - plot.y - plot.height;
    this.layout();
  }

  // ---- drawing ---------------------------------------------------------------------------------------------------------
  recolour() {
    const probe = this.$(".probe") ?? this.$(".map").appendChild(Object.assign(document.createElement("i"), { className: "probe" }));
    const read = (name) => {
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color;
    };
    const names = ["page", "panel", "ink", "muted", "line", "accent", "route", "route-text"];
    this.colour = Object.fromEntries(names.map((name) => [name, read(name)]));
    this.mono = getComputedStyle(this.root.host ?? this.root).getPropertyValue("--mono") || "monospace";
    this.layout();
    this.legend();
  }

  draw() {
    if (!this.size || !this.colour) return;
    const g = this.canvas.getContext("2d");
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, this.canvas.width, this.canvas.height);
    g.drawImage(this.ground(), 0, 0);
    g.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    if (this.routes) {
      g.save();
      this.clip(g);
      (this.airy ? this.curves(g) : this.marks(g));
      g.restore();
    }
    // A frame stands around its cell, at the first expert too.
    g.save();
    g.beginPath();
    g.rect(this.plot.x - 4, 0, this.plot.width + 8, this.plot.y + this.plot.height + 4);
    g.clip();
    this.frameCursor(g);
    g.restore();
  }

  clip(g) {
    g.beginPath();
    g.rect(this.plot.x - 1, 0, this.plot.width + 3, this.plot.y + this.plot.height + 1);
    g.clip();
  }

  // Axes and cells, drawn once for one look of the map: pointing, picking and the cursor change none of them, and a large map has
  // tens of thousands.
  ground() {
    const { data, canvas, pan } = this;
    const look = [data.id, data.cells, this.role, this.zoom, pan.x, pan.y, canvas.width, canvas.height, this.ratio, ...Object.values(this.colour)].join();
    if (this.look === look) return this.drawn;
    this.look = look;
    this.drawn ??= document.createElement("canvas");
    this.drawn.width = canvas.width;
    this.drawn.height = canvas.height;
    const g = this.drawn.getContext("2d");
    g.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.axes(g);
    this.clip(g);
    this.cells(g);
    return this.drawn;
  }

  axes(g) {
    const { data, plot } = this;
    g.fillStyle = this.colour.muted;
    g.font = `12px ${this.mono}`;
    g.textBaseline = "middle";
    g.textAlign = "right";
    const rows = Math.ceil(14 / this.pitch);
    data.layers.forEach((name, layer) => {
      const y = this.y(layer) + this.cellHeight / 2;
      if (layer % rows === 0 && y > plot.y - 4 && y < plot.y + plot.height) g.fillText(`${data.drafts[layer] ? "D" : "L"}${name}`, plot.x - 8, y);
    });
    g.textAlign = "center";
    const step = [1, 2, 4, 8, 16, 32, 64, 128].find((n) => n * this.cellWidth >= 34) ?? 256;
    for (let expert = 0; expert < data.experts; expert += step) {
      const x = this.x(expert) + this.cellWidth / 2;
      if (x >= plot.x && x <= plot.x + plot.width) g.fillText(expert, x, this.size.height - AXIS / 2 + 2);
    }
  }

  cells(g) {
    const { data, plot } = this;
    const wide = this.cellWidth >= 6;
    const gap = wide ? Math.min(2, this.cellWidth * 0.15) : this.cellWidth >= 3 ? 0.5 : 0;
    const from = clamp(Math.floor(this.pan.x / this.cellWidth), 0, data.experts - 1);
    const to = clamp(Math.ceil((this.pan.x + plot.width) / this.cellWidth), 0, data.experts);
    data.layers.forEach((_, layer) => {
      const y = this.y(layer);
      if (y + this.pitch < 0 || y > plot.y + plot.height) return;
      for (let expert = from; expert < to; expert++) {
        this.cell(g, this.kind(layer, expert), this.x(expert) + gap / 2, y, this.cellWidth - gap, this.cellHeight);
      }
      // Above all cells of its row, because a sign may be wider than its cell: 128 experts on a laptop.
      for (let expert = from; expert < to; expert++) {
        this.sign(g, this.kind(layer, expert), this.x(expert) + gap / 2, y, this.cellWidth - gap, this.cellHeight);
      }
    });
  }

  cell(g, kind, x, y, width, height) {
    const mark = this.data.marks[kind];
    const { ink } = this.colour;
    if (kind === "absent") return;
    if (!mark) {
      g.globalAlpha = 0.26;
      g.fillStyle = ink;
      g.fillRect(x, y, width, height);
      g.globalAlpha = 1;
      return;
    }
    const small = width < 6 || height < 9;
    if (kind === "missing") {
      if (small) {
        // Too small for a dashed line: the gap itself with a dot of ink in it.
        const dot = Math.max(1, Math.min(2, width * 0.5));
        g.fillStyle = ink;
        g.fillRect(x + (width - dot) / 2, y + (height - dot * 2) / 2, dot, dot * 2);
        return;
      }
      g.strokeStyle = ink;
      g.lineWidth = 1;
      g.setLineDash([2, 2]);
      g.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
      g.setLineDash([]);
    } else {
      g.fillStyle = ink;
      g.globalAlpha = small && this.hasRoom(width, height) ? 0.26 : 0.9;
      if (small) g.fillRect(x, y, width, height);
      else {
        g.strokeStyle = ink;
        g.lineWidth = 1;
        g.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
        g.save();
        g.beginPath();
        g.rect(x, y, width, height);
        g.clip();
        g.globalAlpha = 0.45;
        g.beginPath();
        for (let d = -height; d < width; d += 4) {
          g.moveTo(x + d, y + height);
          g.lineTo(x + d + height, y);
        }
        g.stroke();
        g.restore();
      }
      g.globalAlpha = 1;
    }
  }

  hasRoom(width, height) {
    return width >= 3 && height >= 12;
  }

  sign(g, kind, x, y, width, height) {
    const mark = this.data.marks[kind];
    const wide = width >= 9;
    // A dashed gap is told from the rest without its sign.
    if (!mark || kind === "absent" || !this.hasRoom(width, height) || (kind === "missing" && !wide)) return;
    const { ink, page, muted } = this.colour;
    g.font = wide ? `${Math.min(13, width + 1)}px ${this.mono}` : `bold 11px ${this.mono}`;
    g.textAlign = "center";
    g.textBaseline = "middle";
    if (kind !== "missing") {
      g.lineWidth = 3;
      g.strokeStyle = page;
      g.strokeText(mark, x + width / 2, y + height / 2 + 1);
    }
    g.fillStyle = kind === "missing" ? muted : ink;
    g.fillText(mark, x + width / 2, y + height / 2 + 1);
  }

  // Airy rows: from the residual stream (a node above each layer) to the token's experts and back into the stream.
  curves(g) {
    const last = this.data.layers.length - 1;
    const faint = clamp(1.2 / this.routes.tokens.length, 0.05, 0.3);
    this.routes.tokens.forEach((_, token) => {
      if (token !== this.token) this.path(g, token, { alpha: faint, width: 1, until: last + 1, quiet: true });
    });
    if (this.token !== null) this.path(g, this.token, { alpha: 1, width: 2.25, until: (last + 1) * this.progress });
    this.rings(g);
    const first = this.routes.first;
    if (first) this.flag(g, this.x(first.expert) + this.cellWidth / 2, this.y(first.layer) + this.cellHeight, this.words.first);
  }

  stream(layer) {
    return { x: this.plot.x + (this.cellWidth * this.data.experts) / 2 - this.pan.x, y: this.y(layer) - (this.pitch - this.cellHeight) / 2 };
  }

  path(g, token, { alpha, width, until, quiet }) {
    for (let layer = 0; layer < this.data.layers.length && layer < until; layer++) {
      const above = this.stream(layer);
      const below = this.stream(layer + 1);
      const blind = this.isBlind(token, layer);
      g.globalAlpha = alpha;
      g.strokeStyle = blind ? this.colour.muted : this.colour.route;
      g.lineWidth = blind ? 1 : width;
      g.setLineDash(blind ? [3, 4] : []);
      for (const expert of blind ? [] : this.routed(token, layer)) {
        const x = this.x(expert) + this.cellWidth / 2;
        const top = this.y(layer);
        const bottom = top + this.cellHeight;
        const hole = this.isHole(layer, expert);
        g.beginPath();
        g.moveTo(above.x, above.y);
        g.bezierCurveTo(above.x, above.y + (top - above.y) * 0.9, x, above.y, x, top);
        g.lineTo(x, hole ? top + this.cellHeight / 2 : bottom);
        g.stroke();
        g.setLineDash(hole ? [3, 4] : []);
        g.beginPath();
        g.moveTo(x, bottom);
        g.bezierCurveTo(x, below.y, below.x, bottom + (below.y - bottom) * 0.1, below.x, below.y);
        g.stroke();
        g.setLineDash([]);
      }
      if (blind) {
        g.beginPath();
        g.moveTo(above.x, above.y);
        g.lineTo(below.x, below.y);
        g.stroke();
        g.setLineDash([]);
      }
      g.globalAlpha = 1;
      if (!quiet) this.node(g, above, blind);
    }
    g.setLineDash([]);
    g.globalAlpha = 1;
    if (!quiet && until > this.data.layers.length - 0.01) {
      this.node(g, this.stream(this.data.layers.length), this.routes.blindEnd[token]);
    }
  }

  node(g, { x, y }, blind) {
    g.fillStyle = this.colour.page;
    g.strokeStyle = blind ? this.colour.ink : this.colour["route-text"];
    g.lineWidth = 1.5;
    g.beginPath();
    g.arc(x, y, blind ? 9 : 5, 0, 7);
    g.fill();
    g.stroke();
    if (blind) {
      g.fillStyle = this.colour.ink;
      g.font = `bold 11px ${this.mono}`;
      g.textAlign = "center";
      g.textBaseline = "middle";
      g.fillText("N", x, y + 0.5);
    }
  }

  rings(g) {
    const strong = new Set();
    if (this.token !== null) {
      this.data.layers.forEach((_, layer) => {
        if (!this.isBlind(this.token, layer)) for (const e of this.routed(this.token, layer)) strong.add(layer * this.data.experts + e);
      });
    }
    for (const [cell] of this.visits) {
      const layer = Math.floor(cell / this.data.experts);
      const expert = cell % this.data.experts;
      const hole = this.isHole(layer, expert);
      const own = strong.has(cell);
      if (!hole && !own) continue;
      g.strokeStyle = own ? (hole ? this.colour.ink : this.colour["route-text"]) : this.colour["route-text"];
      g.lineWidth = own ? 2 : 1;
      g.strokeRect(this.x(expert) - 1, this.y(layer) - 2, this.cellWidth + 1, this.cellHeight + 4);
    }
  }

  // Dense rows: the cells that the prompt visits get a stroke of route colour, holes among them a frame of ink.
  marks(g) {
    for (const [cell] of this.visits) {
      const layer = Math.floor(cell / this.data.experts);
      const expert = cell % this.data.experts;
      const x = this.x(expert);
      const y = this.y(layer);
      if (this.isHole(layer, expert)) {
        g.strokeStyle = this.colour.ink;
        g.lineWidth = 1.5;
        g.strokeRect(x - 1.5, y - 1.5, this.cellWidth + 3, this.cellHeight + 3);
      }
      g.fillStyle = this.colour.route;
      g.fillRect(x, y + this.cellHeight / 4, Math.max(this.cellWidth, 2), this.cellHeight / 2);
    }
    if (this.token !== null) {
      g.strokeStyle = this.colour["route-text"];
      g.lineWidth = 1.5;
      g.beginPath();
      const until = Math.ceil(this.data.layers.length * this.progress);
      for (let layer = 0; layer < until && !this.isBlind(this.token, layer); layer++) {
        const x = this.x(this.routed(this.token, layer)[0]) + this.cellWidth / 2;
        g[layer ? "lineTo" : "moveTo"](x, this.y(layer) + this.cellHeight / 2);
      }
      g.stroke();
    }
    const first = this.routes.first;
    if (first) this.flag(g, this.x(first.expert) + this.cellWidth / 2, this.y(first.layer) + this.cellHeight, this.words.first);
  }

  flag(g, x, y, text) {
    g.font = `600 12px ${getComputedStyle(this.field).fontFamily}`;
    const width = g.measureText(text).width + 16;
    const left = clamp(x - width / 2, this.plot.x, this.plot.x + this.plot.width - width);
    g.fillStyle = this.colour.ink;
    g.beginPath();
    g.moveTo(x - 5, y + 9);
    g.lineTo(x, y + 3);
    g.lineTo(x + 5, y + 9);
    g.fill();
    g.beginPath();
    g.roundRect(left, y + 8, width, 20, 4);
    g.fill();
    g.fillStyle = this.colour.page;
    g.textAlign = "left";
    g.textBaseline = "middle";
    g.fillText(text, left + 8, y + 18.5);
  }

  frameCursor(g) {
    const focused = this.root.activeElement === this.field;
    const spots = [[this.hover, 1], [focused || this.selected ? this.cursor : null, 2.5]];
    for (const [spot, width] of spots) {
      if (!spot) continue;
      g.strokeStyle = this.colour.accent;
      g.lineWidth = width;
      const pad = width / 2 + 2;
      g.strokeRect(this.x(spot.expert) - pad + 1, this.y(spot.layer) - pad, this.cellWidth + pad * 2 - 2, this.cellHeight + pad * 2);
    }
  }

  legend() {
    const { data } = this;
    const kinds = data.statuses.filter((name) => name !== "absent" && this.has(name));
    const box = this.$(".legend");
    const entries = kinds.map((kind) => [kind, data.names[kind]]);
    if (this.routes) entries.push(["route", this.words.route]);
    box.replaceChildren(
      ...entries.map(([kind, label]) => {
        const item = document.createElement("span");
        const canvas = document.createElement("canvas");
        canvas.width = canvas.height = 18 * (this.ratio || 1);
        const g = canvas.getContext("2d");
        g.scale(this.ratio || 1, this.ratio || 1);
        if (kind === "route") {
          g.strokeStyle = this.colour.route;
          g.lineWidth = 2.5;
          g.beginPath();
          g.moveTo(1, 15);
          g.bezierCurveTo(2, 4, 16, 14, 17, 3);
          g.stroke();
        } else {
          this.cell(g, kind, 2, 1, 13, 16);
          this.sign(g, kind, 2, 1, 13, 16);
        }
        item.append(canvas, label);
        return item;
      }),
    );
  }

  has(name) {
    const code = this.data.statuses.indexOf(name);
    const size = this.data.layers.length * this.data.experts;
    return this.status.subarray(this.role * size, (this.role + 1) * size).includes(code);
  }

  // ---- hover, keys, speech -----------------------------------------------------------------------------------------------
  describe({ layer, expert }) {
    const { words, data } = this;
    const index = this.at(layer, expert);
    const cell = data.drafts[layer] ? words.cell_draft : words.cell;
    const parts = [fill(cell, { layer: data.layers[layer], expert, role: data.roles[this.role] })];
    parts.push(data.names[this.kind(layer, expert)]);
    if (this.values && !["missing", "absent", "unreadable"].includes(this.kind(layer, expert))) {
      const bits = `0x${this.bits[index].toString(16).toUpperCase().padStart(8, "0")}`;
      parts.push(`${data.scale} ${written(this.values[index])} (${bits})`);
    }
    if (this.counts) parts.push(fill(words.counted, { n: this.counts[layer * data.experts + expert] }));
    if (this.visits) parts.push(fill(words.visited, { n: this.visits.get(layer * data.experts + expert) ?? 0 }));
    return parts;
  }

  speak() {
    this.$(".readout").textContent = this.describe(this.cursor).join(" · ");
  }

  showTip(cell) {
    this.hover = cell;
    this.tip.hidden = !cell;
    if (cell) {
      this.tip.textContent = this.describe(cell).join("\n");
      const x = this.x(cell.expert) + this.cellWidth / 2;
      const width = this.tip.offsetWidth;
      const y = this.y(cell.layer);
      this.tip.style.left = `${clamp(x - width / 2, 0, this.size.width - width)}px`;
      const below = y - this.tip.offsetHeight - 8 < 0;
      this.tip.style.top = `${below ? y + this.cellHeight + 10 : y - this.tip.offsetHeight - 8}px`;
    }
    this.draw();
  }

  // What lies under the pointer may be another cell by now, or none.
  repoint() {
    if (!this.hover) return;
    const { layer, expert } = this.hover;
    this.showTip(layer < this.data.layers.length && expert < this.data.experts ? this.hover : null);
  }

  choose(cell) {
    this.cursor = cell;
    this.selected = { ...cell };
    this.speak();
    this.draw();
    const value = { role: this.data.roles[this.role], layer: this.data.layers[cell.layer], expert: cell.expert };
    this.report("selected", value, `${cell.layer},${cell.expert}`);
  }

  listen() {
    const { field } = this;
    let drag = null;
    field.addEventListener("pointermove", (event) => {
      if (drag && this.zoom > 1) {
        this.pan.x = drag.x - (event.clientX - drag.fromX);
        this.pan.y = drag.y - (event.clientY - drag.fromY);
        drag.moved ||= Math.abs(event.clientX - drag.fromX) > 4;
        this.showTip(null);
        this.layout();
        return;
      }
      this.showTip(this.cellAt(event));
    });
    field.addEventListener("pointerleave", () => this.showTip(null));
    field.addEventListener("pointerdown", (event) => {
      drag = { fromX: event.clientX, fromY: event.clientY, x: this.pan.x, y: this.pan.y, moved: false };
    });
    field.addEventListener("pointerup", (event) => {
      const cell = this.cellAt(event);
      if (drag && !drag.moved && cell) this.choose(cell);
      drag = null;
    });
    field.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // plain wheel scrolls the page
      event.preventDefault();
      this.setZoom(this.zoom * (event.deltaY < 0 ? 1.25 : 0.8), this.cellAt(event));
      this.showTip(this.cellAt(event));
    }, { passive: false });
    field.addEventListener("keydown", (event) => {
      const { layers, experts } = this.data;
      const moves = {
        ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
        PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -experts], End: [0, experts],
      };
      if (moves[event.key]) {
        const [dl, de] = moves[event.key];
        this.cursor = { layer: clamp(this.cursor.layer + dl, 0, layers.length - 1), expert: clamp(this.cursor.expert + de, 0, experts - 1) };
        this.reveal();
        this.speak();
      } else if (event.key === "Enter" || event.key === " ") this.choose(this.cursor);
      else if (event.key === "+" || event.key === "=") this.setZoom(this.zoom * 1.5);
      else if (event.key === "-") this.setZoom(this.zoom / 1.5);
      else if (event.key === "0") this.setZoom(1);
      else if (event.key === "n" || event.key === "N") this.nextHole(event.key === "N" ? -1 : 1);
      else return;
      // The keyboard leads now, and the readout says where it stands: a tip would go on speaking of the pointer's cell, and hide others.
      this.showTip(null);
      event.preventDefault();
      event.stopPropagation();
    });
    field.addEventListener("focus", () => this.draw());
    field.addEventListener("blur", () => this.draw());
    this.$(".in").onclick = () => this.setZoom(this.zoom * 1.5);
    this.$(".out").onclick = () => this.setZoom(this.zoom / 1.5);
    this.$(".fit").onclick = () => this.setZoom(1);
  }

  nextHole(step) {
    const { layers, experts } = this.data;
    const size = layers.length * experts;
    let cell = this.cursor.layer * experts + this.cursor.expert;
    for (let tried = 0; tried < size; tried++) {
      cell = (cell + step + size) % size;
      const spot = { layer: Math.floor(cell / experts), expert: cell % experts };
      if (this.isHole(spot.layer, spot.expert)) {
        this.cursor = spot;
        break;
      }
    }
    this.reveal();
    this.speak();
  }
}
