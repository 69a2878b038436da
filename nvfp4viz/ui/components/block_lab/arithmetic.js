// A dragged or typed value becomes a BF16 number before anything else happens to it, as in the kernel's input.  This is the one
// calculation of this component; tests/e2e/test_arithmetic.py holds it against the library.
const WORD_F32 = new Float32Array(1);
const WORD_U32 = new Uint32Array(WORD_F32.buffer);

function toBf16(number) {
  WORD_F32[0] = number;
  const bits = WORD_U32[0];
  if (Number.isNaN(WORD_F32[0])) return NaN;
  WORD_U32[0] = (((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) << 16) >>> 0;
  return WORD_F32[0];
}
