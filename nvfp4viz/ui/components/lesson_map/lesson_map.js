// Two lines of stations with the lessons that sit at them.  Which lesson is where, and every word, comes from the library's table; here
// are only the lines, and the threads from where an input_scale is made to where it is read.
const MAPS = new WeakMap();
const SVG = "http://www.w3.org/2000/svg";

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawn(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

class LessonMap {
  constructor(root) {
    this.root = root;
    this.lines = root.querySelector(".lines");
    new ResizeObserver(() => this.threads()).observe(this.lines);
  }

  take({ data, setTriggerValue }) {
    this.go = (index) => setTriggerValue("go", index);
    const now = JSON.stringify(data);
    if (now === this.before) return;
    this.before = now;
    this.words = data.words;
    this.lines.replaceChildren(...data.bands.map((band) => this.band(band)), drawn("svg", { "aria-hidden": "true" }));
    const everywhere = this.root.querySelector(".everywhere");
    everywhere.replaceChildren(data.words.everywhere, this.lessons(data.everywhere));
    everywhere.hidden = !data.everywhere.length;
    this.root.querySelector(".legend").textContent = data.words.legend;
    this.threads();
  }

  band({ id, title, text, whole, stations }) {
    const section = element("section", id);
    const heading = element("h2", "", title);
    section.append(heading, element("p", "about", text));
    if (whole.length) {
      const line = element("div", "whole about", this.words.whole);
      line.append(this.lessons(whole));
      section.append(line);
    }
    const list = element("ol");
    list.setAttribute("aria-label", title);
    stations.forEach((station, place) => list.append(this.station(station, stations[place - 1])));
    section.append(list);
    return section;
  }

  station({ name, text, carries, scale, lessons }, before) {
    const item = element("li", `station ${carries}${scale ? ` scaled ${scale}` : ""}`);
    const heading = element("div", "name", name);
    if (scale) heading.append(element("span", "scale", this.words[scale]));
    item.append(element("span", "dot"), heading, element("p", "text", text));
    item.append(this.lessons(lessons));
    if (carries !== "none" && carries !== before?.carries) item.append(element("p", "leaves", this.words[carries]));
    return item;
  }

  lessons(found) {
    const row = element("span", "lessons");
    for (const { index, label, href, step } of found) {
      const link = element("a", step ? "step" : "");
      link.href = href;
      if (step) {
        link.append(element("span", "number", String(step)));
        link.setAttribute("aria-label", this.words.step.replace("{step}", step).replace("{title}", label));
      }
      link.append(label);
      link.addEventListener("click", (event) => {
        if (event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return; // a new tab or window
        event.preventDefault();
        this.go(index);
      });
      row.append(link);
    }
    return row;
  }

  threads() {
    const picture = this.lines.querySelector("svg");
    const from = this.lines.querySelector(".made .dot");
    if (!picture || !from) return;
    const at = this.lines.getBoundingClientRect();
    const start = from.getBoundingClientRect();
    const [x1, y1] = [start.left - at.left - 5, start.top - at.top + start.height / 2];
    // Down the gutter between the lines and into the row of a station's name, where no text stands.
    const gutter = x1 - 24;
    const parts = [...this.lines.querySelectorAll(".read .scale")].flatMap((mark) => {
      const end = mark.getBoundingClientRect();
      const [x2, y2] = [end.right - at.left + 8, end.top - at.top + end.height / 2];
      const turn = 8 * Math.sign(y2 - y1);
      const path = `M${x1} ${y1} H${gutter + 8} q-8 0 -8 ${turn} V${y2 - turn} q0 ${turn} -8 ${turn} H${x2}`;
      return [drawn("path", { class: "thread", d: path }), drawn("path", { class: "thread-end", d: `M${x2 - 6} ${y2} l9 -5 v10 z` })];
    });
    picture.replaceChildren(...parts);
  }
}

export default function (component) {
  const root = component.parentElement;
  if (!MAPS.has(root)) MAPS.set(root, new LessonMap(root));
  MAPS.get(root).take(component);
}
