// Every term in both languages, searched while one types.  The terms, their pages and all words come from the library.
const LISTS = new WeakMap();

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

// The texts' own marks: `code`, **bold** and *emphasis*.
function marked(text) {
  return text.split(/(`[^`]*`|\*\*[^*]+\*\*|\*[^*]+\*)/).map((part) => {
    if (/^`.*`$/.test(part)) return element("code", "", part.slice(1, -1));
    if (/^\*\*.*\*\*$/.test(part)) return element("b", "", part.slice(2, -2));
    if (/^\*.*\*$/.test(part)) return element("em", "", part.slice(1, -1));
    return part;
  });
}

// Characters with several readings, put as one with the reading that they have in our terms: 重排 is chóngpái, 校准 is jiàozhǔn.
const READINGS = { 重: "虫", 校: "叫" };
const LATIN = /^[A-Za-z]/;

// By alphabet, or by pinyin behind the names that begin with Latin letters; in the reader's own language, which stands first.
function inOrder(terms) {
  const own = terms[0]?.sides[0].lang === "zh" ? "zh-u-co-pinyin" : "en";
  const { compare } = new Intl.Collator(own, { numeric: true });
  const key = ({ sides }) => sides[0].term.replaceAll("`", "").replace(/[重校]/g, (character) => READINGS[character]);
  return terms
    .map((term) => [key(term), term])
    .sort(([a], [b]) => LATIN.test(b) - LATIN.test(a) || compare(a, b))
    .map(([, term]) => term);
}

class TermList {
  constructor(root) {
    this.root = root;
    this.input = root.querySelector("input");
    this.version = -1;
    this.input.addEventListener("input", () => {
      this.filter();
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.send("q", this.input.value), 400);
    });
  }

  take({ data, setStateValue, setTriggerValue }) {
    this.send = setStateValue;
    this.go = (term, place) => setTriggerValue("go", [term, place]);
    this.data = data;
    this.root.querySelector(".label").textContent = data.words.search;
    const now = JSON.stringify(data.terms);
    if (now !== this.before) {
      this.before = now;
      this.root.querySelector("dl").replaceChildren(...inOrder(data.terms).map((term) => this.entry(term)));
      this.mark(this.term, false);
    }
    if (data.version !== this.version) {
      this.version = data.version;
      this.input.value = data.q;
      this.mark(data.term, true);
    }
    this.filter();
  }

  entry({ id, href, sides, pages }) {
    const made = element("div", "entry");
    made.dataset.term = id;
    const both = element("div", "sides");
    for (const { lang, term, text } of sides) {
      const side = element("div", "side");
      side.lang = lang;
      const name = element("a");
      name.href = href;
      name.append(...marked(term));
      this.plain(name, () => {
        this.mark(id, false);
        this.send("term", id);
      });
      const head = element("dt");
      head.append(name);
      const body = element("dd");
      body.append(...marked(text));
      side.append(head, body);
      both.append(side);
    }
    made.append(both);
    if (pages.length) {
      const line = element("div", "pages", this.data.words.pages);
      pages.forEach(({ label, href: address, explained }, place) => {
        const link = element("a", explained ? "explained" : "", label);
        link.href = address;
        this.plain(link, () => this.go(id, place));
        line.append(link);
      });
      made.append(line);
    }
    made.sought = sides.map(({ term, text }) => `${term} ${text}`).join(" ").replaceAll("`", "").toLowerCase();
    return made;
  }

  // A plain click stays in this session; any other opens a tab or a window, as with every link.
  plain(link, then) {
    link.addEventListener("click", (event) => {
      if (event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
      event.preventDefault();
      then();
    });
  }

  filter() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const entry of this.root.querySelectorAll(".entry")) {
      entry.hidden = !words.every((word) => entry.sought.includes(word));
      shown += !entry.hidden;
    }
    const text = shown ? this.data.words.count : this.data.words.none;
    this.root.querySelector(".count").textContent = text.replace("{shown}", shown).replace("{all}", this.data.terms.length);
  }

  mark(term, scroll) {
    this.term = term;
    for (const entry of this.root.querySelectorAll(".entry")) {
      const here = entry.dataset.term === term;
      entry.classList.toggle("here", here);
      if (here) entry.setAttribute("aria-current", "true");
      else entry.removeAttribute("aria-current");
      if (here && scroll) setTimeout(() => entry.scrollIntoView({ block: "center" }), 50);
    }
  }
}

export default function (component) {
  const root = component.parentElement;
  if (!LISTS.has(root)) LISTS.set(root, new TermList(root));
  LISTS.get(root).take(component);
}
