from nvfp4viz.quant.tensor_core_k32_step import mma_step_k32_trace

# 32 E4M3 bytes, 32 E2M1 codes, a UE8M0 scale a side, the accumulator
a, b = list(bytes.fromhex($a)), [int(digit, 16) for digit in $b]
step = mma_step_k32_trace(a, b, $a_scale, $b_scale, $c)
print(f"result 0x{step.result_bits:08X} = {step.result}")

# what the alignment cut off, and one term: a product, or the accumulator at 32
slot = $slot
if step.special is None:
    print(f"exact sum {float(step.exact)}, {sum(bool(term.lost) for term in step.terms)} of {len(step.terms)} terms cut")
    term = step.terms[slot]
    print(f"term {slot}: {term.significand} * 2**{term.exponent}, shifted by {term.shift}, kept {term.aligned}, lost {float(term.lost)}")
