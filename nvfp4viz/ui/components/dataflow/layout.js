// Where each row lies: in the lane of its token, or in the group of its expert.  Places in pixels; no numbers of the model.
const CHIP = { width: 30, height: 28, gap: 3 };
const LANE = { least: 34, most: 46, label: 44 };
// How far a row's mark stands out on its right.
const MARK = 6;
const GROUP = { pad: 4, head: 20, gap: 6 };

// Lanes fill the height that the groups need, so that little moves up or down from step to step.
function lanePlaces(picture, width, height) {
  const tall = Math.min(Math.max(height / picture.tokens.length, LANE.least), LANE.most);
  const inset = (tall - CHIP.height) / 2;
  const slot = Math.min((width - LANE.label - MARK) / picture.topK, 46);
  const chip = Math.min(slot - CHIP.gap, 38);
  return {
    chips: picture.routes.map((route) => ({ x: LANE.label + route.rank * slot, y: route.token * tall + inset })),
    // At the weighted sum the rows of a token meet in one place, the last of its lane.
    sums: picture.routes.map((route) => ({ x: Math.min(LANE.label + picture.topK * slot + 8, width - MARK - chip), y: route.token * tall + inset })),
    lanes: picture.tokens.map((_, token) => ({ x: 0, y: token * tall, height: tall })),
    height: picture.tokens.length * tall,
    chip,
  };
}

function groupPlaces(picture, whole) {
  const width = whole - MARK + GROUP.pad;
  const chips = [];
  const groups = [];
  const line = GROUP.head + CHIP.height + 2 * GROUP.pad;
  let x = 0;
  let y = 0;
  let tall = line;
  picture.experts.forEach((expert, index) => {
    const rows = expert.end - expert.offset;
    const most = Math.max(1, Math.floor((width - 2 * GROUP.pad + CHIP.gap) / (CHIP.width + CHIP.gap)));
    const across = Math.min(rows, most);
    const down = Math.ceil(rows / across);
    const wide = Math.max(across * (CHIP.width + CHIP.gap) - CHIP.gap + 2 * GROUP.pad, 44);
    const high = line + (down - 1) * (CHIP.height + CHIP.gap);
    if (x > 0 && x + wide > width) {
      x = 0;
      y += tall + GROUP.gap;
      tall = line;
    }
    tall = Math.max(tall, high);
    groups.push({ x, y, width: wide, height: high });
    picture.routes.forEach((route, number) => {
      if (route.expert !== index) return;
      const at = route.row - expert.offset;
      chips[number] = {
        x: x + GROUP.pad + (at % across) * (CHIP.width + CHIP.gap),
        y: y + GROUP.head + GROUP.pad + Math.floor(at / across) * (CHIP.height + CHIP.gap),
      };
    });
    x += wide + GROUP.gap;
  });
  return { chips, groups, height: y + tall };
}

// From the right of a row in its lane to the left of the same row in its group, on another board; `fields` are the corners of both.
function lineBetween(from, to, chip, fields) {
  const middle = (at, field) => field.y + at.y + CHIP.height / 2;
  const [x, end] = [fields[0].x + from.x + chip, fields[1].x + to.x];
  const [y, low] = [middle(from, fields[0]), middle(to, fields[1])];
  const bend = (x + end) / 2;
  return `M${x} ${y}C${bend} ${y} ${bend} ${low} ${end} ${low}`;
}
