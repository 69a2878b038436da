from nvfp4viz.figures.mega_kernel import sample_layer

# a layer through the kernel, and beside float64: what each step does to the output
error = sample_layer($data).error
for name in [*error.effects, "total"]:
    print(f"{name}: {100 * error.relative(name):.3g} % of the output")

# how much of its bound an error uses at most
for stage in error.stages:
    print(f"{stage.id}: error {abs(stage.error).max():.4g}, bound {stage.bound.max():.4g}, used {100 * stage.worst:.3g} % at most")
