// Copies the address of the view.  Browsers refuse the clipboard on plain http from another machine (a workshop's LAN): there the
// link is shown selected, to be copied by hand.
//
// It also puts into the address what the page settled by itself, the language above all, without an entry in the browser's history:
// Streamlit can only add entries, and Back would lead to the same page again.
const WRITTEN = new WeakMap();

function settleAddress(query) {
  const parts = (text) => new URLSearchParams(text).toString();
  if (parts(window.location.search) !== parts(query)) {
    window.history.replaceState(window.history.state, "", `${window.location.pathname}${query ? `?${query}` : ""}${window.location.hash}`);
  }
}

export default function ({ data, parentElement }) {
  const button = parentElement.querySelector("button");
  const said = parentElement.querySelector(".said");
  const link = parentElement.querySelector(".link");
  const before = WRITTEN.get(parentElement);
  if (before?.query !== data.query) settleAddress(data.query);
  if (before?.query !== data.query || before.leftOut !== data.leftOut) {
    // What was copied is another view by now.
    said.textContent = data.leftOut;
    link.hidden = true;
  }
  WRITTEN.set(parentElement, data);
  button.textContent = data.label;
  link.setAttribute("aria-label", data.label);
  button.onclick = async () => {
    const address = window.location.href;
    try {
      await navigator.clipboard.writeText(address);
      link.hidden = true;
      said.textContent = data.copied;
    } catch {
      link.hidden = false;
      link.value = address;
      link.focus();
      link.select();
      said.textContent = data.byHand;
    }
  };
}
