// A layer in nine steps: rows move between the lanes of their tokens and the groups of their experts, in a healthy run and a faulty one.
// While the faulty one is covered, the healthy rows stand in both arrangements, and lines lead from one to the other.
// All bits come from the library at once; this script places rows, looks numbers up, and keeps step and route in the address.  It never
// asks the server for anything.
const FLOWS = new WeakMap();
const DWELL = 1500;
const QUANTIZED = new Set([3, 6]);
const LANES = new Set([1, 8, 9]);
const SVG = "http://www.w3.org/2000/svg";

class Flow {
  constructor(root) {
    this.root = root;
    this.inspector = new Inspector(this.find(".inspector"));
    this.given = {};
    this.width = 0;
    this.path = window.location.pathname;
    this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(([entry]) => {
      if (Math.abs(entry.contentRect.width - this.width) < 1) return;
      this.width = entry.contentRect.width;
      if (this.picture) this.place();
    }).observe(this.find(".boards"));
    root.addEventListener("click", (event) => this.click(event));
    root.addEventListener("keydown", (event) => this.key(event));
    root.addEventListener("keyup", (event) => {
      // Firefox would click a button at the end of a Space that has played already.
      if (this.plays(event)) event.preventDefault();
    });
    this.find(".scrub").addEventListener("input", (event) => this.choose({ step: Number(event.target.value) }));
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  get flow() {
    return this.find(".flow");
  }

  take({ data }) {
    const fresh = JSON.stringify([data.picture, data.text]) !== this.drawn;
    this.text = data.text;
    if (fresh) {
      this.drawn = JSON.stringify([data.picture, data.text]);
      this.picture = data.picture;
      this.runs = new Runs(data.picture);
      this.build();
    }
    this.settle(data);
    this.draw();
    // A run of the server writes an address of its own, without the step that it has never heard of.
    if (this.own) for (const wait of [300, 2000]) setTimeout(() => this.write(), wait);
  }

  // A link says where to begin, and a reader's own step outlives new data.  The server's word counts where it is new: after the browser's
  // Back, or when the page is started over.
  settle(data) {
    const first = this.epoch === undefined;
    const over = data.epoch !== this.epoch;
    const asked = new URLSearchParams(first ? window.location.search : "");
    for (const [name, low, high] of [["step", 1, this.picture.steps.length], ["route", 0, this.picture.routes.length - 1]]) {
      const usual = data.defaults[name];
      // What nobody chose gives way to what the new runs suggest; the first difference, once it is uncovered.
      const unchosen = data[name] == null && this[name] === this.defaults?.[name];
      const mine = over || unchosen || data[name] !== this.given[name] ? (data[name] ?? usual) : this[name];
      this[name] = this.within(asked.get(name), low, high) ?? (mine <= high ? mine : usual);
      this.given[name] = data[name];
    }
    this.own &&= !over;
    this.epoch = data.epoch;
    this.defaults = data.defaults;
    this.opening = data.opening;
  }

  within(text, low, high) {
    return /^\d+$/.test(text ?? "") && Number(text) >= low && Number(text) <= high ? Number(text) : null;
  }

  // ---- what is there once
  build() {
    const { text, picture } = this;
    const transport = this.find(".transport");
    transport.setAttribute("aria-label", text.scrub);
    transport.replaceChildren(...[["first", "⇤"], ["back", "←"], ["play", ""], ["forward", "→"]].map(([name, sign]) => button(name, sign, text[name])));
    const scrub = this.find(".scrub");
    scrub.max = picture.steps.length;
    scrub.setAttribute("aria-label", text.scrub);
    const steps = this.find(".steps");
    steps.setAttribute("aria-label", text.steps);
    steps.replaceChildren(
      ...picture.steps.map((step, index) => {
        const tab = button("step", "", "");
        tab.role = "tab";
        tab.dataset.step = index + 1;
        tab.append(box("b", "", index + 1), box("span", "label", step.name));
        const notes = [];
        if (step.scale) notes.push([step.scale, { "÷": text.divides, "×": text.multiplies }[step.scale]]);
        if (picture.first === index + 1) notes.push(["≠", text.first_difference]);
        if (picture.firstNan === index + 1) notes.push(["N", text.first_nan]);
        for (const [sign, note] of notes) {
          const mark = box("span", `note ${{ N: "nan", "÷": "scales", "×": "scales" }[sign] ?? ""}`, sign);
          mark.title = note;
          tab.append(mark);
        }
        tab.setAttribute("aria-label", [`${index + 1} ${step.name}`, ...notes.map(([, note]) => note)].join(text.comma));
        return tab;
      }),
    );
    const boards = picture.covered
      ? [this.board("healthy", text.by_token, "lanes"), this.board("healthy", text.by_expert, "groups")]
      : [this.board("healthy", text.healthy), this.board("faulty", text.faulty)];
    this.find(".boards").replaceChildren(...boards, ...(picture.covered ? [this.lines()] : []));
    this.legend();
    this.find(".inspector").setAttribute("aria-label", text.inspector);
    this.place();
  }

  // `only` is the one arrangement that a board of the covered picture shows; otherwise the step decides.
  board(side, caption, only) {
    const { text, picture } = this;
    const figure = box("figure", `board ${side}`);
    if (only) figure.dataset.only = only;
    const field = box("div", "field");
    figure.append(box("figcaption", "", caption), field);
    field.setAttribute("role", "group");
    if (side === "faulty") field.setAttribute("aria-hidden", "true");
    if (only !== "groups") picture.tokens.forEach((token, index) => {
      const lane = button("lane", "", fill(text.token, { text: token.text, position: index }));
      lane.dataset.token = index;
      lane.append(this.name(token));
      field.append(lane);
    });
    if (only !== "lanes") picture.experts.forEach((expert, index) => {
      const label = fill(text.expert_rows, { id: expert.id, first: expert.offset, last: expert.end - 1 });
      const group = button(`group${side === "faulty" && expert.missing ? " missing" : ""}`, "", expert.missing ? label + text.comma + text.expert_missing : label);
      group.dataset.expert = index;
      group.append(box("span", "head", `E${expert.id}${side === "faulty" && expert.missing ? " ∅" : ""}`));
      field.append(group);
    });
    picture.routes.forEach((route, number) => {
      const chip = button(`chip hue${route.token % 8}`, "");
      chip.dataset.route = number;
      chip.append(box("span", "name"), box("span", "mark"));
      field.append(chip);
    });
    for (const chip of field.querySelectorAll(".chip")) chip.tabIndex = -1;
    // The same rows stand in the healthy board; there each says what the faulty run makes of it.
    if (side === "faulty") for (const part of field.querySelectorAll("button")) part.tabIndex = -1;
    return figure;
  }

  // Where the rows of the chosen token go.
  lines() {
    const made = document.createElementNS(SVG, "svg");
    made.setAttribute("class", "lines");
    made.setAttribute("aria-hidden", "true");
    for (let rank = 0; rank < this.picture.topK; rank++) made.append(document.createElementNS(SVG, "path"));
    return made;
  }

  name(token) {
    return box("span", "token", token.text.length > 1 ? token.text : token.text + token.sub);
  }

  legend() {
    const { text, picture } = this;
    const marks = [["", text.legend_same], ["≠ differs", text.legend_differs], ["0 zero", text.legend_zero], ["N nan", text.legend_nan], ["∅ missing", text.legend_missing]];
    const parts = [["÷ scales", text.divides], ["× scales", text.multiplies], ...(picture.covered ? [] : marks)];
    this.find(".legend").replaceChildren(
      ...parts.map(([kind, words]) => {
        const [sign, name = ""] = kind.split(" ");
        const item = box("span", "item");
        item.append(box("span", `key ${name}`, sign), words);
        return item;
      }),
      box("span", "keys", text.keys),
    );
  }

  // ---- where everything lies
  place() {
    const field = this.find(".field");
    const width = field.clientWidth;
    if (!width) return;
    this.groups = groupPlaces(this.picture, width);
    this.lanes = lanePlaces(this.picture, width, this.groups.height);
    this.flow.style.setProperty("--lane-chip", `${this.lanes.chip}px`);
    const height = Math.max(this.lanes.height, this.groups.height);
    for (const part of this.root.querySelectorAll(".field")) part.style.height = `${height}px`;
    for (const part of this.root.querySelectorAll(".lane")) this.put(part, this.lanes.lanes[part.dataset.token]);
    for (const part of this.root.querySelectorAll(".group")) this.put(part, this.groups.groups[part.dataset.expert]);
    const [first, second] = this.root.querySelectorAll(".field");
    this.fields = [first, second].map((part) => ({ x: part.offsetLeft, y: part.offsetTop }));
    // A new width is no step of the reader's, and nothing glides.
    this.flow.classList.add("at-once");
    this.move();
    requestAnimationFrame(() => this.flow.classList.remove("at-once"));
  }

  put(part, at) {
    const place = `translate(${at.x}px, ${at.y}px)`;
    if (part.place !== place) part.style.transform = part.place = place;
    if (at.width) part.style.width = `${at.width}px`;
    if (at.height) part.style.height = `${at.height}px`;
  }

  move() {
    if (!this.lanes || !this.step) return;
    for (const board of this.root.querySelectorAll(".board")) {
      const at = this.places(this.arrangement(board));
      for (const chip of board.querySelectorAll(".chip")) this.put(chip, at[chip.dataset.route]);
    }
    this.drawLines();
  }

  // Lanes, groups, or the sums at the end of the lanes.
  arrangement(board) {
    const now = board.dataset.only ?? (LANES.has(this.step) ? "lanes" : "groups");
    return now === "lanes" && this.step === this.picture.steps.length ? "sum" : now;
  }

  places(arrangement) {
    return { lanes: this.lanes.chips, groups: this.groups.chips, sum: this.lanes.sums }[arrangement];
  }

  drawLines() {
    const paths = this.root.querySelectorAll(".lines path");
    if (!paths.length) return;
    const { routes } = this.picture;
    const from = this.places(this.arrangement(this.find(".board")));
    const rows = routes.map((_, number) => number).filter((number) => routes[number].token === routes[this.route].token);
    rows.forEach((number, rank) => {
      paths[rank].setAttribute("d", lineBetween(from[number], this.groups.chips[number], this.lanes.chip, this.fields));
      paths[rank].classList.toggle("chosen", number === this.route);
    });
  }

  // ---- what a step shows
  choose(change) {
    Object.assign(this, change);
    this.own = true;
    this.draw();
    clearTimeout(this.pending);
    this.pending = setTimeout(() => this.write(), 150);
  }

  // The address is where a reader's step is kept, for a copied link.  Without an entry in the browser's history: Back leads to the page before, not through every step that was played.
  write() {
    clearTimeout(this.pending);
    this.pending = 0;
    if (!this.root.isConnected || window.location.pathname !== this.path) return;
    const address = new URL(window.location.href);
    // Whoever opens the link has guessed nothing yet and would begin where the covered picture does.
    const usual = { ...this.defaults, step: this.opening };
    for (const name of ["step", "route"]) {
      if (this[name] === usual[name]) address.searchParams.delete(name);
      else address.searchParams.set(name, this[name]);
    }
    if (address.href !== window.location.href) window.history.replaceState(window.history.state, "", address);
  }

  draw() {
    const { text, picture } = this;
    const step = picture.steps[this.step - 1];
    // First, and only the two that change: a new tabindex on the button that has just been pressed makes Chromium work out every style that
    // is out of date, and after the classes below those are all.
    for (const tab of this.find(".steps").children) {
      const chosen = Number(tab.dataset.step) === this.step;
      if (tab.getAttribute("aria-selected") === String(chosen)) continue;
      tab.setAttribute("aria-selected", chosen);
      tab.tabIndex = chosen ? 0 : -1;
    }
    for (const board of this.root.querySelectorAll(".board")) {
      const lanes = this.arrangement(board) !== "groups";
      const here = lanes === LANES.has(this.step);
      board.classList.toggle("in-lanes", lanes);
      board.classList.toggle("away", !here);
      board.classList.toggle("quantized", here && QUANTIZED.has(this.step));
    }
    const scrub = this.find(".scrub");
    scrub.value = this.step;
    scrub.setAttribute("aria-valuetext", fill(text.step_of, { n: this.step, all: picture.steps.length, name: step.name }));
    const play = this.find(".play");
    play.textContent = this.timer ? "❚❚" : "▶";
    play.setAttribute("aria-label", this.timer ? text.pause : text.play);
    this.find(".words").textContent = step.words;
    this.find(".shape").textContent = step.shape;
    this.drawRows();
    this.move();
    const status = this.find(".status");
    const said = fill(text.status, { n: this.step, all: picture.steps.length, name: step.name, said: step.said });
    if (status.textContent !== said) status.textContent = said;
    // The picture at once; its numbers once a frame, however fast the reader scrubs.
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.inspector.draw(this);
    });
  }

  // A row is named by its expert in its token's lane, by its token in its expert's group.
  nameOf(route, mode) {
    const { tokens, experts } = this.picture;
    return { lanes: `E${experts[route.expert].id}`, groups: tokens[route.token].text + (tokens[route.token].text.length > 1 ? "" : tokens[route.token].sub), sum: "Σ" }[mode];
  }

  // Only what another step or row changes: the browser has ten milliseconds.
  drawRows() {
    const { text, picture } = this;
    const marks = picture.marks?.[this.step - 1];
    for (const figure of this.root.querySelectorAll(".board")) {
      const faulty = figure.classList.contains("faulty");
      const mode = this.arrangement(figure);
      // One board has the keyboard: the healthy one, or the one where the rows are.
      const lead = !faulty && !figure.classList.contains("away");
      figure.querySelector(".field").setAttribute("aria-label", fill(text.board, { twin: text[faulty ? "faulty" : "healthy"], step: picture.steps[this.step - 1].name }));
      for (const chip of figure.querySelectorAll(".chip")) {
        const number = Number(chip.dataset.route);
        const mark = marks?.[number] ?? ".";
        if (chip.dataset.mark !== mark) this.mark(chip, mark, faulty);
        const name = this.nameOf(picture.routes[number], mode);
        if (chip.firstChild.textContent !== name) chip.firstChild.textContent = name;
        const chosen = number === this.route;
        if (chip.classList.contains("chosen") !== chosen) chip.classList.toggle("chosen", chosen);
        const tab = lead && chosen ? 0 : -1;
        if (chip.tabIndex !== tab) chip.tabIndex = tab;
        if (!faulty && chip.getAttribute("aria-pressed") !== String(chosen)) chip.setAttribute("aria-pressed", chosen);
      }
    }
  }

  mark(chip, mark, faulty) {
    const { text } = this;
    chip.dataset.mark = mark;
    if (faulty) {
      chip.querySelector(".mark").textContent = mark === "." ? "" : mark;
      return;
    }
    const state = { "≠": text.state_differs, 0: text.state_zero, N: text.state_nan }[mark] ?? text.state_same;
    chip.setAttribute("aria-label", called(Number(chip.dataset.route), this.picture, text) + (this.picture.covered ? "" : `; ${text.faulty}: ${state}`));
  }

  // ---- playing and choosing
  play() {
    if (this.timer) return this.pause();
    if (this.step === this.picture.steps.length) this.choose({ step: 1 });
    this.timer = setInterval(() => this.tick(), this.still.matches ? 2 * DWELL : DWELL);
    this.draw();
  }

  tick() {
    if (!this.root.isConnected || document.hidden || this.step >= this.picture.steps.length) return this.pause();
    this.choose({ step: this.step + 1 });
    if (this.step === this.picture.steps.length) this.pause();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = 0;
    if (this.root.isConnected) this.draw();
  }

  go(step) {
    if (this.timer) this.pause();
    this.choose({ step: Math.min(Math.max(step, 1), this.picture.steps.length) });
  }

  click(event) {
    const hit = event.target.closest?.("button");
    if (!hit) return;
    const { step, route, token, expert } = hit.dataset;
    const first = (wanted) => this.picture.routes.findIndex(wanted);
    if (step) this.go(Number(step));
    else if (route) this.choose({ route: Number(route) });
    else if (token) this.choose({ route: first((other) => other.token === Number(token)) });
    else if (expert) this.choose({ route: this.picture.routes.findIndex((other) => other.row === this.picture.experts[expert].offset) });
    else if (hit.classList.contains("play")) this.play();
    else if (hit.classList.contains("first")) this.go(1);
    else if (hit.classList.contains("back")) this.go(this.step - 1);
    else if (hit.classList.contains("forward")) this.go(this.step + 1);
  }

  // Space plays, but presses a button that has something else to do.
  plays(event) {
    return event.key === " " && !event.target.closest?.("select, button:not(.step, .chip)");
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("select")) return;
    const to = { ArrowLeft: this.step - 1, ArrowRight: this.step + 1, Home: 1, End: this.picture.steps.length }[event.key];
    const along = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (this.plays(event)) this.play();
    else if (to !== undefined) {
      this.go(to);
      if (event.target.closest?.(".step")) this.find(`.step[data-step="${this.step}"]`).focus();
    } else if (along && event.target.closest?.(".chip, .scrub")) {
      // Through the rows as they lie at this step; also from the slider, which would take the keys for steps.
      const order = this.picture.routes.map((_, number) => number);
      if (!LANES.has(this.step)) order.sort((a, b) => this.picture.routes[a].row - this.picture.routes[b].row);
      const at = order.indexOf(this.route);
      this.choose({ route: order[(at + along + order.length) % order.length] });
      const chip = this.find(`.healthy:not(.away) .chip[data-route="${this.route}"]`);
      if (!event.target.closest(".scrub")) chip.focus({ preventScroll: true });
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

export default function (component) {
  const root = component.parentElement;
  if (!FLOWS.has(root)) FLOWS.set(root, new Flow(root));
  FLOWS.get(root).take(component);
}
