from nvfp4viz.checkpoint import open_checkpoint
from nvfp4viz.quant.online import compare_ranks
from sample_checkpoints import ensure

layer, weight = $layer, $weight
weights = open_checkpoint(ensure("tiny-moe-bf16")).read(f"model.layers.{layer}.experts.{weight}")

# the maximum shared by tensor-parallel ranks, or each rank's own, against one rank that holds everything
results = compare_ranks(weights, $ranks, weight.removesuffix("_proj"))
for one in results:
    differ = f"{one.codes_differ:,} of {one.codes:,} codes and {one.scales_differ:,} of {one.blocks:,} block scales differ"
    print(f"{'shared' if one.shared else 'local'}: {differ}, {one.summary.sqnr_db:.4f} dB")

# weight_scale_2 of each expert, over the ranks with a maximum of their own
own = results[1].scales_2
factor = (own.max(axis=0) / own.min(axis=0)).max()
print(f"{(own != own[0]).any(axis=0).sum()} of {own.shape[1]} experts have another one, by up to a factor of {factor:.4g}")
