// Small pieces of HTML, and texts with their values.
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);

function box(kind, className, text) {
  const made = document.createElement(kind);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(className, text, label) {
  const made = box("button", className, text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  return made;
}

// A row by its token, expert, rank and place.
function called(number, picture, text) {
  const route = picture.routes[number];
  return fill(text.chip, {
    text: picture.tokens[route.token].text,
    position: route.token,
    id: picture.experts[route.expert].id,
    rank: route.rank + 1,
    k: picture.topK,
    row: route.row,
  });
}
