from nvfp4viz.errors import NvError
from nvfp4viz.serving.config_lines import read_configs

# both files as they stand on the page; an empty text is a file that does not exist
config = $config
sidecar = $sidecar

# the weight-only rule step by step, and the line that decided
try:
    found = read_configs(config, sidecar)
    for number, step in enumerate(found.resolved.steps, start=1):
        print(f"{number} {step.id}: {step.found[:44]}, {step.holds}")
    fires = "fires" if found.resolved.promoted else "does not fire"
    print(f"served as {found.resolved.scheme} ({found.resolved.algo}), the rule {fires}")
    if found.line:
        print(f"{found.file}, line {found.line}{', a key absent there' if found.absent else ''}: {found.text}")
except NvError as error:
    print(error)
