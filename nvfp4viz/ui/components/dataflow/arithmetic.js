// The bits of a recorded run as numbers, and numbers as the page writes them.  Held against the library in tests/e2e/test_arithmetic.py.
const WORDS = { bf16: Uint16Array, f32: Uint32Array, u8: Uint8Array };

function words(text, kind) {
  const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  return new WORDS[kind](bytes.buffer);
}

const SCRATCH = new DataView(new ArrayBuffer(4));

// A BF16 is the upper half of a float32.
function floatOf(bits, kind) {
  SCRATCH.setUint32(0, kind === "bf16" ? bits * 65536 : bits);
  return SCRATCH.getFloat32(0);
}

// Four significant digits; a number halfway between two goes to the even one, as in nvfp4viz/ui/numbers.py.
function four(value) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return Object.is(value, -0) ? "−0" : "0";
  let [digits, exponent] = value.toExponential(3).split("e");
  const five = value.toExponential(4);
  const [more] = five.split("e");
  if (more.endsWith("5") && Number(five) === value && Number(more.at(-2)) % 2 === 0) [digits, exponent] = [more.slice(0, -1), five.split("e")[1]];
  const size = Math.abs(value);
  const text = size >= 1e-4 && size < 1e7 ? plainly(`${digits}e${exponent}`) : `${trimmed(digits)}×10${raised(exponent)}`;
  return text.replaceAll("-", "−");
}

function plainly(text) {
  const [digits, exponent] = text.split("e");
  return trimmed(Number(text).toFixed(Math.max(0, 3 - Number(exponent))), digits);
}

function trimmed(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function raised(exponent) {
  return [...String(Number(exponent))].map((sign) => ({ "-": "⁻" })[sign] ?? "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign]).join("");
}

function hex(bits, digits) {
  return `0x${bits.toString(16).toUpperCase().padStart(digits, "0")}`;
}

// Two codes a byte, the even one in the low half.
function codesOf(packed, first, count) {
  return Array.from({ length: count }, (_, index) => {
    const byte = packed[(first + index) >> 1];
    return (first + index) % 2 ? byte >> 4 : byte & 15;
  });
}
