from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.quant.online import compare_ranks, compare_ways, first_lost
from nvfp4viz.quant.online_memory import measure_peaks
from nvfp4viz.quant.per_token import VERSIONS, quantize_tokens, token_cases
from sample_checkpoints import ensure

layer, weight = $layer, $weight
weights = open_checkpoint(ensure("tiny-moe-bf16")).read(f"model.layers.{layer}.experts.{weight}")

# three ways to pack a layer's experts at load, and what each holds at its peak, counted and measured
ways, peaks = compare_ways(weights), measure_peaks(weights)
for one in ways:
    held = f"{one.peak / 1024:.0f} KiB by count, about {round(peaks[one.way] / 1024, -1):.0f} KiB measured"
    print(f"{one.way}: {one.codes_differ} codes differ, {one.summary.sqnr_db:.4f} dB, {held}")

# one element whose code the cast changed
lost = first_lost(weights, ways)
print(f"w {lost.weight}, w·G {lost.folded}, cast {lost.cast}: codes", [int(t.codes[lost.column % 16]) for t in lost.traces])

# the maximum shared by tensor-parallel ranks, or each rank's own
for one in compare_ranks(weights, $ranks, weight.removesuffix("_proj")):
    print("shared" if one.shared else "local", one.codes_differ, one.scales_differ)

# a scale a row: ordinary, with a tiny block, all zero
for version in VERSIONS:
    made = quantize_tokens(token_cases(), version)
    print(version, [f"0x{byte:02X}" for byte in made.scales[:, -1]], made.nan_rows)
