from nvfp4viz import formats, quant
from nvfp4viz.figures.mega_kernel import between_of, sample_layer
from nvfp4viz.formats import TensorMap

# does TMA take this tensor?
for rule in formats.check_tensor_map(TensorMap(*$map)):
    print(rule.id, rule.given, "holds" if rule.holds else f"is refused (limit {rule.limit})")

# a layer through the kernel, and beside float64
layer = sample_layer($data)
for name, effect in layer.error.effects.items():
    print(f"{name}: {layer.error.relative(name):.3g} of the output")
for stage in layer.error.stages:
    print(f"{stage.id}: an error uses at most {stage.worst:.3g} of its bound")

# 32 values between the products
seen = between_of(layer.run, $route, $group, $limit)
print(f"largest {seen.amax:.6g}, scale byte 0x{seen.scale:02X}, {seen.clamped.sum()} clamped")

# one step of the tensor core
a, b = list(bytes.fromhex($a)), [int(digit, 16) for digit in $b]
print(f"0x{quant.mma_step_k32_reference(a, b, $a_scale, $b_scale, $c).view('uint32'):08X}")
