from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.quant.online import WAYS, compare_ways, first_lost
from sample_checkpoints import ensure

layer, weight = $layer, $weight
weights = open_checkpoint(ensure("tiny-moe-bf16")).read(f"model.layers.{layer}.experts.{weight}")

# three ways to pack a layer's experts at load, against the direct one
ways = compare_ways(weights)
for one in ways:
    codes = f"{one.codes_differ:,} of {one.codes:,} codes ({100 * one.codes_differ / one.codes:.3g} %)"
    scales = f"{one.scales_differ:,} of {one.blocks:,} block scales ({100 * one.scales_differ / one.blocks:.3g} %)"
    print(f"{one.way}: {codes} and {scales} differ, {one.summary.sqnr_db:.4f} dB")

# one element whose code the cast changed
lost = first_lost(weights, ways, $n)
print(f"expert {lost.expert}, row {lost.row}, column {lost.column}: weight {lost.weight}, encode scale {lost.encode}")
at = lost.column % 16
for way, value, trace in zip(WAYS, (lost.weight, lost.folded, lost.cast), lost.traces):
    print(f"{way}: {value} enters, block scale 0x{trace.scale_byte:02X}, scaled {trace.products[at]}, code {trace.codes[at]:04b}")
