// What a reader waits for after an input: when the picture last changed, as the browser itself saw it.  Loaded before every page.
(() => {
  const IGNORED = "[data-testid=stHeader], [data-testid=stStatusWidget], [data-testid=stDecoration]";
  const watch = (window.watch = {});
  watch.arm = () => Object.assign(watch, { input: 0, changed: 0, painted: 0, local: 0, heard: 0, figure: 0 });
  watch.arm();
  // The server's answer is known by its messages: a short run's "running" and "not running" may come in one drawing.
  window.WebSocket = class extends WebSocket {
    constructor(...address) {
      super(...address);
      this.addEventListener("message", () => (watch.heard = performance.now()));
    }
  };
  // A figure's place is there before its drawing: on a page's first one the drawing code itself is still on its way.
  const drawn = () =>
    !document.querySelector("[data-testid=stSkeleton]") &&
    [...document.querySelectorAll("[data-testid=stPlotlyChart]")].every((chart) => chart.querySelector(".main-svg"));
  // Quiet for a quarter of a second, Streamlit at rest, and the last change on the screen.  `answered`: not before the server
  // has run at all; where it need not, a component's message may still come, and quiet has to last longer.
  watch.settled = (answered) =>
    watch.input > 0 &&
    (watch.heard > watch.input || !answered) &&
    drawn() &&
    document.querySelector("[data-testid=stApp]")?.dataset.testScriptState === "notRunning" &&
    watch.painted >= watch.changed &&
    performance.now() - Math.max(watch.changed, watch.heard, watch.input) > (answered ? 250 : 800);
  for (const kind of ["pointerdown", "pointermove", "pointerup", "click", "keydown"]) {
    window.addEventListener(
      kind,
      (event) => {
        if (kind === "pointermove" && !event.buttons) return;
        // From the last event of a gesture on: that is when the reader begins to wait for the server.
        watch.input = event.timeStamp;
      },
      true,
    );
  }
  const hosts = function* (element) {
    for (let at = element; at; at = at.getRootNode().host) yield at;
  };
  function seen(records) {
    const now = performance.now();
    let counts = false;
    // A figure is drawn in thousands of changes: looking stops with the first one that tells all.
    for (const { target } of records) {
      if (counts && watch.figure && (watch.local || target.getRootNode() === document)) continue;
      const element = target.nodeType === 1 ? target : target.parentElement;
      const chain = [...hosts(element)];
      if (chain.some((at) => at.closest?.(IGNORED))) continue;
      counts = true;
      if (chain.some((at) => at.closest?.("[data-testid=stMain]"))) watch.figure += 1;
      // A component may answer before the gesture ends, as at a press: what it took since the event that it answers.
      if (chain.length > 1 && watch.input && !watch.local) watch.local = now - watch.input;
    }
    if (!counts) return;
    watch.changed = now;
    requestAnimationFrame(() => setTimeout(() => (watch.painted = performance.now())));
  }
  const observe = (root) =>
    new MutationObserver(seen).observe(root, { subtree: true, childList: true, attributes: true, characterData: true });
  observe(document);
  const attach = Element.prototype.attachShadow;
  Element.prototype.attachShadow = function (options) {
    const root = attach.call(this, options);
    observe(root);
    return root;
  };
})();
