// Packing, as the library does it (tests/e2e/test_arithmetic.py): element 2j in the low nibble of byte j, and byte 0 in the low
// eight bits of the word.
const packBytes = (codes) => [0, 1, 2, 3].map((j) => codes[2 * j] | (codes[2 * j + 1] << 4));
const packWord = (codes) => codes.reduce((word, code, i) => word + code * 16 ** i, 0);
const unpackBytes = (bytes) => bytes.flatMap((byte) => [byte & 15, byte >> 4]);
const unpackWord = (word) => Array.from({ length: 8 }, (_, i) => Math.floor(word / 16 ** i) % 16);
