from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.quant.per_token import VERSIONS, quantize_tokens, token_cases
from nvfp4viz.serving import load
from sample_checkpoints import ensure

prompt = DEMO_PROMPTS[$prompt]

# a file with missing scales, served with them and with a scale a row
for backend, by_token in (("vllm-cutlass", False), ("vllm-flashinfer-trtllm", True)):
    served = load(ensure("tiny-moe-nvfp4-holes"), backend=backend, per_token=by_token)
    scales = served.scales_of(0).w13_input_scale
    print(f"{backend}: {served.generate(prompt, $tokens).text!r}, input scales {scales.min():.4g} to {scales.max():.4g}")

# a row by version: ordinary, with a tiny block, or all zero
row = $row
for version in VERSIONS:
    made = quantize_tokens(token_cases(), version)
    codes, nan = [f"{code:X}" for code in made.codes[row, -4:]], any(made.decoded[row] != made.decoded[row])
    print(f"{version}: decode {made.decode[row]:.4g}, encode {made.encode[row]:.4g}, 0x{made.scales[row, -1]:02X}, {codes}, NaN {nan}")
