from nvfp4viz.figures.mega_kernel import between_of, sample_layer

# 32 values between the products, on their way to FP8
seen = between_of(sample_layer($data).run, $route, $group, $limit)
print(f"routing weight {seen.weight:.4g}, largest {seen.amax:.4g}, over 448 {seen.amax / 448:.3g}")
print(f"scale byte 0x{seen.scale:02X} = 2**{seen.scale - 127}, {seen.clamped.sum()} of {len(seen.codes)} clamped")
for k, code in enumerate(seen.codes):
    halves = f"gate {seen.gate[k]:.9g}, up {seen.up[k]:.9g}, product {seen.product[k]:.4g}"
    print(f"{k}: {halves}, weighted {seen.weighted[k]:.4g}, 0x{code:02X} = {seen.decoded[k]:.9g}")
