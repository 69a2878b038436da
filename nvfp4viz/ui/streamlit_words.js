// Streamlit 1.67 speaks English alone (streamlit#1353).  Its own words inside widgets of ours are replaced by the reader's language here;
// WORDS comes from the texts under "ui.streamlit".  Only the value of a text node changes, so that React finds its nodes again.
(() => {
  const PLACES = [
    // A place stands in one line alone: a second one would take its words back.
    ["[data-testid=stNumberInput] [role=alert], [data-testid=stFileUploader] [role=alert], [role=tooltip] p", [
      [/^(?:(?:Error)?: )?Number is outside the allowed range\. Please enter a value between (.+) and (.+)\.$/, "between"],
      [/^(?:(?:Error)?: )?Number is below the allowed range\. Please enter a value greater than or equal to (.+)\.$/, "atLeast"],
      [/^(?:(?:Error)?: )?Number is above the allowed range\. Please enter a value less than or equal to (.+)\.$/, "atMost"],
      [/^(?:(?:Error)?: )?Number is (?:below|above) the allowed range\.$/, "outside"],
      [/^(?:(?:Error)?: )?File must be (.+) or smaller\.$/, "tooLarge"],
    ]],
    ["[data-testid=stSelectboxVirtualDropdown] [role=option] span", [[/^No results$/, "noResults"]]],
    ["[role=tooltip] strong", [[/^Error$/, "error"]]],
    ["[data-testid=stFileUploaderDropzoneInstructions] span", [[/^(.+) per file$/, "perFile"]]],
    ["[data-testid=stFileUploaderDropzone] button p", [[/^Upload$/, "upload"]]],
    ["[data-testid=InputInstructions], [data-testid=InputInstructions] *", [
      [/^Press Enter to apply$/, "enter"],
      [/^Press (.+) to apply$/, "keys"],
    ]],
  ];
  // All places stand in one of these: where the page has none, one look is enough, at every change of the page.
  const ROOTS = "[role=alert], [role=tooltip], [data-testid=stFileUploader], [data-testid=InputInstructions], [data-testid=stSelectboxVirtualDropdown]";
  const LABELS = [[/^file upload$/, "upload"], [/^Add files$/, "add"], [/^Remove (.+)$/, "remove"]];
  // Kept over a change of language: what Streamlit said of each element.
  const seen = (window.nvfp4vizSaid ??= new WeakMap());

  function translated(text, rules) {
    for (const [pattern, name] of rules) {
      const found = pattern.exec(text);
      if (found) return WORDS[name]?.replace(/\{([ab])\}/g, (_, at) => found[at === "a" ? 1 : 2]);
    }
    return undefined;
  }

  function speak(element, rules) {
    const nodes = [...element.childNodes];
    const texts = nodes.filter((node) => node.nodeType === Node.TEXT_NODE);
    // One sentence may come in several text nodes; beside other elements each text stands alone.
    for (const group of texts.length === nodes.length ? [texts] : texts.map((node) => [node])) if (group.length) say(group, rules);
  }

  function say(nodes, rules) {
    let kept = seen.get(nodes[0]);
    if (!kept || kept.length !== nodes.length) kept = nodes.map((node) => ({ said: node.nodeValue, shown: node.nodeValue }));
    nodes.forEach((node, at) => {
      if (node.nodeValue !== kept[at].shown) kept[at] = { said: node.nodeValue, shown: node.nodeValue };
    });
    const words = translated(kept.map(({ said }) => said).join(""), rules);
    if (words === undefined && !seen.has(nodes[0])) return;
    nodes.forEach((node, at) => {
      const text = words === undefined ? kept[at].said : at ? "" : words;
      if (node.nodeValue !== text) node.nodeValue = text;
      kept[at].shown = text;
    });
    seen.set(nodes[0], kept);
  }

  function label(element) {
    const kept = seen.get(element) ?? { said: element.getAttribute("aria-label"), shown: element.getAttribute("aria-label") };
    if (element.getAttribute("aria-label") !== kept.shown) kept.said = element.getAttribute("aria-label");
    kept.shown = translated(kept.said, LABELS) ?? kept.said;
    if (element.getAttribute("aria-label") !== kept.shown) element.setAttribute("aria-label", kept.shown);
    seen.set(element, kept);
  }

  // A flag would break behind its two hyphens, a reply behind the blank that it begins with; no style sheet can tell them
  // from longer names, which have to break on a phone.
  function keepFlags() {
    for (const code of document.querySelectorAll(":is(p, li) > code")) {
      const space = /^(--| )/.test(code.textContent) ? "nowrap" : "";
      if (code.style.whiteSpace !== space) code.style.whiteSpace = space;
    }
  }

  function all() {
    keepFlags();
    if (!document.querySelector(ROOTS)) return;
    for (const [selector, rules] of PLACES) for (const element of document.querySelectorAll(selector)) speak(element, rules);
    for (const element of document.querySelectorAll("[data-testid=stFileUploader] [aria-label]")) label(element);
  }

  window.nvfp4vizSpeak?.disconnect();
  let waiting = false;
  window.nvfp4vizSpeak = new MutationObserver((records) => {
    if (waiting || records.every(({ target }) => target instanceof SVGElement)) return; // a figure that is being drawn
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      all();
    });
  });
  window.nvfp4vizSpeak.observe(document.body, { subtree: true, childList: true, characterData: true });
  all();
})();
