import ml_dtypes
import numpy as np
from nvfp4viz import quant
from nvfp4viz.quant.compare import compare_scaling
from nvfp4viz.figures.scaling import sample_tensor

x = np.array($x, ml_dtypes.bfloat16)
block = quant.trace_block(x, $scale, $recipe)
for step in block.steps:
    print(f"{step.symbol} = {step.formula} = {step.value:.6g}  {step.bits}")
print(f"scale byte 0x{block.scale_byte:02X}, codes {''.join(f'{code:X}' for code in block.codes)}")
print(f"largest error {np.abs(block.error).max():.4g}")

# a tensor without scales, with block scales alone, and with both levels
for level in compare_scaling(sample_tensor()):
    print(f"{level.level}: {level.summary.sqnr_db:.1f} dB, {level.dead} blocks lost")
