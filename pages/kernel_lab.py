"""Kernel lab: the kernels' source beside the machine code it becomes, run here, timed here, tested here."""

from nvfp4viz.device import paths
from nvfp4viz.ui import kernel_lab, kernel_lab_run, kernel_lab_selftest, lesson, state
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
kernel_lab.style()
page = lesson.open_page(
    "kernel_lab",
    part=state.choice(kernel_lab.PARTS, default=kernel_lab.PARTS[0]),
    kernel=state.choice(kernel_lab.kernel_names(), default=kernel_lab.default_kernel()),
    feature=state.choice(kernel_lab.FEATURES, default="to_e2m1"),
    target=state.choice(kernel_lab.TARGETS, default="sm_120a"),
    recipe=state.choice(kernel_lab_run.RECIPES, default="vllm-cuda"),
    values=state.choice(paths.KINDS, default="grid"),
    rows=state.integer(1, kernel_lab_run.MOST_ROWS, default=kernel_lab_run.DEFAULTS["rows"]),
    blocks=state.integer(1, kernel_lab_run.MOST_BLOCKS, default=kernel_lab_run.DEFAULTS["blocks"]),
    torch=state.flag(),
    seed=state.integer(0, kernel_lab_run.MOST_SEED, default=kernel_lab_run.DEFAULTS["seed"]),
)
kernel_lab.device_line(page)

part = page.parts("part", kernel_lab.PARTS)
if part == "code":
    kernel_lab.code_part(page)
elif part == "matrix":
    kernel_lab.matrix_part(page)
elif part == "run":
    kernel_lab_run.run_part(page)
elif part == "speed":
    kernel_lab_run.speed_part(page)
elif part == "selftest":
    kernel_lab_selftest.selftest_part(page)

page.foot(
    code=kernel_lab_run.code_values(page),
    data={
        "kernel_builds": kernel_lab.all_rows,
        "paths": lambda: kernel_lab_run.run_rows(page),
        "bandwidth_here": lambda: kernel_lab_run.bandwidth_rows(page),
    },
)
