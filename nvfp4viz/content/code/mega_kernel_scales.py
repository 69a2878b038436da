from nvfp4viz.figures.mega_kernel import sample_layer
from nvfp4viz.formats import interleave_gate_up, offset_128x4, pack_ue8m0, utccp_row

# a tile of 128 rows of gate and up, four UE8M0 scales a row, each for 32 elements
scales = interleave_gate_up(sample_layer($data).w13_scales[0])[:128, :4]
words = pack_ue8m0(scales)[:, 0]

# one row: its word, and where UTCCP wants it
row = $w
place = utccp_row(row)
print(f"row {row}: word 0x{words[row]:08X}, place {place}: lane {place // 4}, word {place % 4}")
print(f"its first byte lies at byte {offset_128x4(row, 0, 4)} of the tile")
for group, byte in enumerate(scales[row].tolist()):
    print(f"group {group}: 0x{byte:02X} = 2**{byte - 127}, bits {8 * group} to {8 * group + 7}")
