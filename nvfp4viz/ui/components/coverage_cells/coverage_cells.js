// Holds a coverage map's cells for the map beside it, under the map's key.  Streamlit sends an element that has not changed as its
// name alone, and leaves its script alone: so a pick, which changes the map's own data, moves no cells, however many there are.
const CELLS = (globalThis.nvfp4vizCells ??= new Map());

const decode = (text, Type) => text && new Type(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);

export default function ({ data }) {
  const { of, id } = data;
  const held = {
    id,
    status: decode(data.status, Uint8Array),
    values: decode(data.values, Float32Array),
    counts: decode(data.counts, Int32Array),
  };
  CELLS.set(of, held);
  document.dispatchEvent(new CustomEvent("nvfp4viz-cells", { detail: of }));
  return () => {
    if (CELLS.get(of) === held) CELLS.delete(of);
  };
}
