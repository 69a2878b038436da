// Nine links from a missing key to token 0.  Each opens to its real numbers beside those of the calibrated twin.  All texts and
// numbers are written by figures/story.py; which link is open survives new data, so that two fates can be compared.
const opened = new WeakMap();

export default function ({ data, parentElement, setStateValue }) {
  const $ = (query) => parentElement.querySelector(query);
  const list = $("ol");
  if (!opened.has(parentElement)) opened.set(parentElement, { given: data.open, id: data.open, sent: [] });
  const state = opened.get(parentElement);
  // What comes back may be the echo of an earlier click while the reader is already further on.
  state.sent = state.sent.filter(({ at }) => performance.now() - at < 5000);
  const echo = state.sent.findIndex(({ id }) => id === data.open);
  if (echo >= 0) state.sent.splice(0, echo + 1);
  else if (data.open !== state.given && state.sent.length === 0) state.id = data.open;
  state.given = data.open;
  $(".chain").classList.toggle("tall", data.tall);
  $(".heads .hole").textContent = data.hole;
  $(".heads .twin").textContent = data.twin;
  const focused = parentElement.activeElement?.dataset?.id;

  const text = (tag, className, content, label) => {
    const node = document.createElement(tag);
    node.className = className;
    node.textContent = content;
    if (label) node.dataset.label = label;
    return node;
  };

  const panel = (link) => {
    const box = text("div", "panel", "");
    box.id = `panel-${link.id}`;
    box.append(text("p", "", link.what));
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const name of [data.quantity, data.hole, data.twin]) {
      const cell = text("th", "", name);
      cell.scope = "col";
      head.append(cell);
    }
    const body = table.createTBody();
    for (const row of link.rows) {
      const line = body.insertRow();
      const name = text("th", "", row.name);
      name.scope = "row";
      line.append(name, text("td", "", row.hole, data.hole), text("td", "", row.twin, data.twin));
    }
    box.append(table);
    return box;
  };

  const draw = () => {
    list.replaceChildren(
      ...data.links.map((link, index) => {
        const item = text("li", link.state, "");
        const open = link.id === state.id;
        const node = text("span", "node", link.mark || index + 1);
        node.setAttribute("aria-hidden", "true");
        const button = text("button", "row", "");
        button.type = "button";
        button.dataset.id = link.id;
        button.setAttribute("aria-expanded", open);
        if (open) button.setAttribute("aria-controls", `panel-${link.id}`);
        button.append(text("span", "title", link.title), text("span", "value hole", link.hole, data.hole), text("span", "value twin", link.twinText, data.twin));
        button.onclick = () => {
          state.id = open ? "" : link.id;
          draw();
          parentElement.querySelector(`[data-id="${link.id}"]`).focus();
          state.sent.push({ id: state.id, at: performance.now() });
          setStateValue("link", state.id);
        };
        button.onkeydown = (event) => {
          const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
          if (!step) return;
          event.preventDefault();
          event.stopPropagation();
          const all = [...list.querySelectorAll("button.row")];
          all[(index + step + all.length) % all.length].focus();
        };
        item.append(node, button);
        if (open) item.append(panel(link));
        return item;
      }),
    );
  };
  draw();
  if (focused) parentElement.querySelector(`[data-id="${focused}"]`)?.focus();
}
