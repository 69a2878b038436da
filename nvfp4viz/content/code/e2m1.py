import numpy as np
from nvfp4viz import formats

info = formats.FORMATS[$format]
to_code = {
    "e2m1": formats.e2m1_code_scalar,
    "e4m3": formats.e4m3_byte_scalar,
    "ue8m0": formats.ue8m0_byte_scalar,
    "bf16": formats.bf16_bits_scalar,
}
x = $x
stored = formats.explain(info, to_code[info.name](x))
print(f"{x} -> code 0x{stored.code:X} = {stored.bits}: {stored.formula}")

# every midpoint of E2M1: a tie goes to the even mantissa
values = formats.decode_e2m1(np.arange(8))
midpoints = (values[:-1] + values[1:]) / 2
for number, rounded in zip(midpoints, formats.decode_e2m1(formats.encode_e2m1(midpoints))):
    print(f"{number} -> {rounded}")

# packing: low nibble first
codes = np.array([int(digit, 16) for digit in $codes], np.uint8)
print("bytes:", formats.pack_nibbles(codes).tobytes().hex(" "))
print(f"word:  0x{formats.pack_u32(codes)[0]:08X}")
