// The bits of a healthy and of a faulty run, row by row.
const KINDS = { x: "bf16", packed1: "u8", scales1: "u8", acc1: "f32", c1: "bf16", c2: "bf16", packed2: "u8", scales2: "u8", acc2: "f32", c3: "bf16", out: "bf16" };

class Runs {
  constructor(picture) {
    this.picture = picture;
    this.sides = { healthy: this.read(picture.healthy), faulty: picture.faulty && this.read(picture.faulty) };
  }

  read(run) {
    return Object.fromEntries(Object.entries(KINDS).map(([name, kind]) => [name, { kind, words: words(run[name], kind) }]));
  }

  // A permuted row's piece of a tensor.  Rows that the faulty run shares with the healthy one are only sent once.
  row(side, name, row) {
    const { picture } = this;
    let run = this.sides[side];
    let at = row;
    let rows = name === "out" ? picture.tokens.length : picture.routes.length;
    if (side === "faulty" && name !== "out") {
      at = picture.faulty.rows.indexOf(row);
      rows = picture.faulty.rows.length;
      if (at < 0) [run, at, rows] = [this.sides.healthy, row, picture.routes.length];
    }
    const { kind, words: all } = run[name];
    const size = all.length / rows;
    return { kind, words: all.subarray(at * size, (at + 1) * size) };
  }
}
