from nvfp4viz import quant
from nvfp4viz.figures.tensor_core import sample_product

a, b = ([int(digit, 16) for digit in codes] for codes in ($a, $b))
a_scales, b_scales = (list(bytes.fromhex(scales)) for scales in ($a_scales, $b_scales))
seen = quant.tensor_core_explain(a, b, a_scales, b_scales, c=$c, kind=$kind)
for term in seen.trace.terms:
    print(f"{float(term.significand)} * 2^{term.exponent}, shifted by {term.shift}, cut off: {float(term.lost):g}")
print(f"tensor core {seen.result} = 0x{seen.trace.result_bits:08X}")
print(f"float32 after decoding {seen.dequantized}")

# a whole GEMM, against float32 arithmetic or the exact product
gemm, against = sample_product($k, $spread, $signs), $against
off = {"float32": gemm.against_float32(), "exact": gemm.against_exact(gemm.tensor_core)}[against]
print(f"{(off < 0).sum()} outputs nearer zero than {against}, {(off == 0).sum()} equal, {(off > 0).sum()} farther from zero")
print(f"{gemm.split_differs} have other bits when K is split in two")
