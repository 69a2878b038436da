from nvfp4viz.device import paths, sass
from nvfp4viz.figures import kernel_lab

# what one kernel becomes on each target, from the committed machine-code extracts
for source in sass.kernel_sources():
    if not sass.path_of(source).exists():
        continue
    builds = [one for one in sass.read_extract(source).kernels if one.name == $kernel]
    if builds:
        print(source, $kernel, "extract fits the sources:", sass.is_fresh(source))
    for build in builds:
        found = kernel_lab.found(kernel_lab.feature($feature), build)
        what = f"{sum(one.count for one in found)} x {found[0].opcode}" if found else "no such instruction"
        print(f"  {build.target:8} {build.instructions:5} instructions, {build.registers:3} registers, {what}")

# the same tensor through every path of this machine, byte by byte
x = paths.sample($values, $rows, $blocks, $recipe, $seed)
runs = paths.run_paths(x, $recipe, torch=$torch)
for run in runs:
    difference = paths.compare(run, runs[0])
    print(f"{run.path:9} {run.recipe:16} {difference.differing} of {difference.bytes} bytes differ", difference.first or "")
