// What a local edit needs: code ↔ value for small formats.  Values come from the library's tables; the two rounding rules
// written here (nearest with ties to the even code; up to the next power of two) are held against the library over all codes,
// midpoints and their neighbours by tests/e2e/test_arithmetic.py.
//
// A format is { id, name, width, fields: [[role, bits], …], bias, signed, rounding: "even" | "up", maxCode, nanCode,
// values: [number | "nan" | "inf" | "-inf" | "-0"] | null }.  values is null for BF16 alone: its code is the upper half of a
// float32, which the browser knows.

const F32 = new Float32Array(1);
const U32 = new Uint32Array(F32.buffer);

function toNumber(entry) {
  if (entry === "nan") return NaN;
  if (entry === "inf") return Infinity;
  if (entry === "-inf") return -Infinity;
  if (entry === "-0") return -0;
  return entry;
}

function decode(format, code) {
  if (format.values) return toNumber(format.values[code]);
  U32[0] = (code << 16) >>> 0;
  return F32[0];
}

// The magnitudes a format can round to, in ascending order: index = code without sign.
function magnitudes(format) {
  if (!format.magnitudes) {
    format.magnitudes = [];
    for (let code = 0; code <= format.maxCode; code += 1) format.magnitudes.push(decode(format, code));
  }
  return format.magnitudes;
}

function encodeBf16(x) {
  F32[0] = x;
  const bits = U32[0];
  if (Number.isNaN(x)) return (bits >>> 16) | 0x40;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

// The magnitude a size is rounded to; beyond the last one it saturates.
function encodeMagnitude(format, size) {
  const values = magnitudes(format);
  let low = 0;
  let high = values.length - 1;
  if (size >= values[high]) return high;
  if (size <= values[0]) return 0;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= size) low = middle;
    else high = middle;
  }
  if (format.rounding === "up") return size === values[low] ? low : high;
  const halfway = (values[low] + values[high]) / 2; // exact: both have few bits
  if (size === halfway) return low % 2 === 0 ? low : high;
  return size < halfway ? low : high;
}

function encode(format, number) {
  const x = Math.fround(number); // the library takes float32
  if (!format.values) return encodeBf16(x);
  if (Number.isNaN(x)) return format.nanCode;
  const negative = x < 0 || Object.is(x, -0);
  if (!format.signed) return negative && x !== 0 ? format.nanCode : encodeMagnitude(format, x);
  const code = encodeMagnitude(format, Math.abs(x));
  return negative ? code + (1 << (format.width - 1)) : code;
}

// Fields of a code from the left: [{ role, width, value, shift }].
function fieldsOf(format, code) {
  let shift = format.width;
  return format.fields.map(([role, width]) => {
    shift -= width;
    return { role, width, shift, value: (code >>> shift) & ((1 << width) - 1) };
  });
}

// The interval of numbers that round to a magnitude: ends, and whether an end itself belongs to it.
function binOf(format, magnitude) {
  if (!format.values) return bf16Bin(format, magnitude);
  const values = magnitudes(format);
  if (format.rounding === "up") {
    const first = magnitude === 0;
    const saturates = magnitude === values.length - 1;
    const high = saturates ? Infinity : values[magnitude];
    return { value: values[magnitude], even: true, low: first ? 0 : values[magnitude - 1], lowClosed: first, high, highClosed: true };
  }
  const owns = magnitude % 2 === 0;
  const last = values.length - 1;
  return {
    value: values[magnitude],
    even: owns,
    low: magnitude === 0 ? values[0] : (values[magnitude - 1] + values[magnitude]) / 2,
    lowClosed: magnitude === 0 ? true : owns,
    high: magnitude === last ? Infinity : (values[magnitude] + values[magnitude + 1]) / 2,
    highClosed: magnitude === last ? true : owns,
  };
}

function bf16Bin(format, magnitude) {
  const value = (index) => Math.abs(decode(format, Math.max(index, 0)));
  const even = magnitude % 2 === 0;
  const low = magnitude === 0 ? 0 : (value(magnitude - 1) + value(magnitude)) / 2;
  return { value: value(magnitude), even, low, lowClosed: even, high: (value(magnitude) + value(magnitude + 1)) / 2, highClosed: even };
}

// What happened to a number on its way into the format.
function roundingOf(format, number) {
  const x = Math.fround(number);
  const code = encode(format, x);
  const value = decode(format, code);
  const size = Math.abs(x);
  if (Number.isNaN(x)) return { kind: "nan", code, value };
  if (!format.signed && (x < 0 || Object.is(x, -0))) return { kind: "unsigned", code, value };
  if (size === Math.abs(value)) return { kind: Object.is(x, -0) ? "negzero" : "exact", code, value };
  const signBit = format.signed ? 1 << (format.width - 1) : 0;
  const magnitude = code & ~signBit & ((1 << format.width) - 1);
  const at = (index) => Math.abs(decode(format, index));
  const last = format.values ? format.maxCode : 0x7f7f; // the largest finite BF16
  if (size > at(last)) return { kind: Number.isFinite(value) ? "saturated" : "overflow", code, value, largest: at(last) };
  if (size < at(0)) return { kind: "below", code, value };
  const other = at(magnitude) < size ? magnitude + 1 : magnitude - 1;
  const tie = (at(magnitude) + at(other)) / 2 === size;
  const sign = x < 0 ? -1 : 1;
  return {
    kind: format.rounding === "up" ? "up" : tie ? "tie" : value === 0 ? "tozero" : "nearest",
    code,
    value,
    lower: Math.min(sign * at(magnitude), sign * at(other)),
    upper: Math.max(sign * at(magnitude), sign * at(other)),
  };
}

// Text typed by a person → number, or null when it is none.
function parseNumber(text) {
  const plain = text.trim().replace(/−/g, "-").replace(/，/g, ".").toLowerCase();
  if (plain === "nan") return NaN;
  if (/^[+]?(inf|infinity|∞)$/.test(plain)) return Infinity;
  if (/^-(inf|infinity|∞)$/.test(plain)) return -Infinity;
  if (!/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/.test(plain)) return null;
  return Number(plain);
}

// Exact where that stays short; never a different number that merely looks like it without an ≈.
function showNumber(value) {
  if (Number.isNaN(value)) return "NaN";
  if (value === Infinity) return "∞";
  if (value === -Infinity) return "−∞";
  if (value === 0) return Object.is(value, -0) ? "−0" : "0";
  const size = Math.abs(value);
  const text = String(value);
  if (text.length <= 14 && size >= 1e-7 && size < 1e15) return text.replace("-", "−");
  const [mantissa, exponent] = value.toExponential(3).split("e");
  const raised = [...String(Number(exponent))].map((sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]).join("");
  return `${mantissa}×10${raised}`.replace("-", "−");
}
