// The number line of the bit editor: rounding bins as bars, the format's values below, the reader's number as a marker.
// Codes on the line, ascending by value: all of E2M1, else the neighbourhood of the current one.
function windowCodes(editor) {
  const { format, code } = editor;
  const signBit = format.signed ? 1 << (format.width - 1) : 0;
  const negative = (code & signBit) !== 0;
  const magnitude = code & ~signBit;
  const last = format.values ? format.maxCode : 0x7f7f;
  if (format.width === 4 && editor.width >= 480) {
    const positive = magnitudes(format).map((_, index) => index);
    return [...positive.map((index) => index + signBit).reverse(), ...positive];
  }
  const reach = format.width === 4 ? 8 : format.signed ? 4 : 2;
  const centre = Math.min(Math.max(magnitude, 0), last);
  const codes = [];
  for (let index = Math.max(0, centre - reach); index <= Math.min(last, centre + reach); index += 1) codes.push(index);
  return negative ? codes.map((index) => index + signBit).reverse() : codes;
}

function drawLine(editor) {
  const svg = editor.find(".line svg");
  const { format, text, width } = editor;
  if (!width) return;
  const height = 168;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const codes = editor.dragging ? editor.codes : windowCodes(editor);
  editor.codes = codes;
  const values = codes.map((code) => decode(format, code));
  const first = values[0];
  const last = values.at(-1);
  const reach = format.width === 4 ? 1 : (last - first) / (values.length - 1 || 1) / 2;
  const from = format.width === 4 && first === 0 ? first - 0.4 : first - reach;
  const to = format.width === 4 && last === 0 ? last + 0.4 : last + reach;
  const margin = 20;
  const at = (value) => margin + ((Math.min(Math.max(value, from), to) - from) / (to - from)) * (width - 2 * margin);
  editor.scale = { from, to, back: (px) => from + ((px - margin) / (width - 2 * margin)) * (to - from) };
  const axis = 104;
  const rows = [52, 72]; // even codes above, odd below: each even bin reaches over the ends of its neighbours
  const nodes = [make("svg:line", { class: "axis", x1: 4, x2: width - 4, y1: axis, y2: axis })];
  const signBit = format.signed ? 1 << (format.width - 1) : 0;
  let lastLabel = -100;
  codes.forEach((code, index) => {
    const negative = signBit && code & signBit;
    const bin = binOf(format, code & ~signBit);
    const active = code === editor.code;
    const y = bin.even ? rows[0] : rows[1];
    const ends = [
      { value: bin.low, closed: bin.lowClosed, open: false },
      { value: bin.high, closed: bin.highClosed },
    ].map((end) => ({ ...end, value: negative ? -end.value : end.value }));
    if (negative) ends.reverse();
    const [left, right] = ends.map((end) => at(end.value));
    const mark = active ? " active" : "";
    nodes.push(make("svg:line", { class: `bin${mark}`, x1: left, x2: right, y1: y, y2: y }));
    ends.forEach((end, side) => {
      const px = side ? right : left;
      if (Number.isFinite(end.value) && end.value >= from && end.value <= to) {
        if (!(end.value === 0)) nodes.push(make("svg:circle", { class: `end${mark}${end.closed ? " closed" : ""}`, cx: px, cy: y, r: 4 }));
      } else {
        const tip = side ? 8 : -8;
        nodes.push(make("svg:path", { class: `bin${mark}`, fill: "none", d: `M${px - tip} ${y - 5} L${px} ${y} L${px - tip} ${y + 5}` }));
      }
    });
    const px = at(values[index]);
    nodes.push(make("svg:circle", { class: `point${mark}`, cx: px, cy: axis, r: active ? 6 : 4 }));
    const label = showNumber(values[index]);
    const clear = label.length * 7.4 + 4;
    const zero = values[index] === 0 && signBit && codes.length > 9 && negative; // one label for both zeros
    if ((px - lastLabel > clear || active) && !zero) {
      nodes.push(make("svg:text", { x: px, y: axis + 22, "text-anchor": "middle", "font-weight": active ? 700 : 400 }, label));
      lastLabel = px;
    }
  });
  const legend = format.rounding === "up" ? [text.upRow] : [text.evenRow, text.oddRow];
  legend.forEach((words, row) => nodes.push(make("svg:text", { class: "side", x: 4, y: axis + 44 + 17 * row }, words)));
  nodes.push(...needle(editor, at, axis, from, to));
  const focused = editor.root.activeElement?.classList.contains("handle"); // redrawing must not lose the keyboard's place
  svg.replaceChildren(...nodes);
  if (focused) editor.find(".handle")?.focus({ preventScroll: true });
}

function needle(editor, at, axis, from, to) {
  const { x, rounding } = editor;
  if (Number.isNaN(x)) return [];
  const px = at(x);
  const target = at(rounding.value);
  const handle = make("svg:g", {
    class: "handle",
    role: "slider",
    tabindex: 0,
    "aria-label": editor.text.handle,
    "aria-valuemin": from,
    "aria-valuemax": to,
    "aria-valuenow": Math.min(Math.max(x, from), to),
    "aria-valuetext": fill(editor.text.valueText, { x: showNumber(x), value: showNumber(rounding.value) }),
  });
  const label = showNumber(x).slice(0, 10);
  const labelAt = Math.min(Math.max(px, label.length * 4), editor.width - label.length * 4);
  handle.append(
    make("svg:rect", { class: "hit", x: px - 22, y: 0, width: 44, height: 44 }),
    make("svg:path", { d: `M${px - 8} 20 h16 v10 l-8 8 l-8 -8 z` }),
    make("svg:text", { x: labelAt, y: 14, "text-anchor": "middle" }, label),
  );
  const nodes = [make("svg:line", { class: "needle", x1: px, x2: px, y1: 38, y2: axis })];
  if (Math.abs(px - target) > 3 && Number.isFinite(rounding.value)) {
    const tip = target > px ? -6 : 6;
    nodes.push(make("svg:path", { class: "jump", d: `M${px} 92 H${target} M${target + tip} 88 L${target} 92 L${target + tip} 96` }));
  }
  return [...nodes, handle];
}
