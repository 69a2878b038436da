from nvfp4viz.figures.blocks import inner_pair, outlier_pair
from nvfp4viz.quant.grouping import compare_grouping, partial_sums, place_of, quantize_along, storage

# one output: every scale as far outside the sum as it goes
x, w = (quantize_along(operand, $along) for operand in inner_pair())
runs = partial_sums(x, w, $m, $n)
for run in runs[:4]:
    print(f"k {run.start}-{run.stop - 1}: {float(run.dot)} * {float(run.scale)} = {float(run.term)}")
print(f"{len(runs)} scales in the sum of 64 products, output {float(sum(run.term for run in runs)):.9g}")

# the same GEMM under every grouping
for found in compare_grouping(*outlier_pair($size)):
    x, w, y = found.x, found.w, found.y
    print(f"{found.along}: activations {x.sqnr_db:.1f} dB, weight {w.sqnr_db:.1f} dB, product {y.sqnr_db:.1f} dB")
    print(f"    {x.zeroed} activations and {w.zeroed} weights became zero, {found.scale_products} scales an output")

# what is stored
print(storage($w_rows, $k))
print(place_of($e_row, $e_k, $k))
