from nvfp4viz import formats
from nvfp4viz.figures.mega_kernel import sample_layer
from nvfp4viz.figures.mega_stations import stations

# what the kernel only moves, and where numbers change
layer = sample_layer($data)
for place in stations(layer):
    print(f"{place.id} ({place.kind}): {place.changed:,} of {place.numbers:,} change")

# 128 codes of a weight as they are stored, and as TMA lays them into shared memory
packed = layer.w13[0, 0, :64]
codes, padded = formats.unpack_nibbles(packed), formats.pad_align16b(packed)
print(f"{len(codes)} codes: {len(packed)} bytes, then {padded.size} with {padded.size - len(packed)} in gaps")
k = $k
byte, nibble = formats.padded_place(k)
value, half = formats.decode_e2m1(codes)[k], "high" if nibble else "low"
print(f"code {k} is 0x{codes[k]:X}, {value:g}: the {half} nibble of byte {k // 2} (0x{packed[k // 2]:02X})")
print(f"in shared memory at byte {byte} (0x{byte:02X}), atom {byte // 16}")

# the E4M3 byte that the tensor core takes for each of the 16 codes
widened = formats.widen_e2m1(range(16))
changed = formats.decode_e4m3(widened) != formats.decode_e2m1(range(16))
print(widened.tobytes().hex(" "), "of another value:", sum(changed))

# does TMA take this tensor?
for rule in formats.check_tensor_map(formats.TensorMap(*$map)):
    print(rule.id, rule.given, "holds" if rule.holds else f"is refused (limit {rule.limit})")
