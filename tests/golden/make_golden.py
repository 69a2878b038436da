"""Rebuild the golden vectors by running the real packages: ``make golden``.

Creates ``.venv-peers`` and ``.venv-peers-vllm`` from the pinned lists beside this file when they are absent (network
needed, minutes), runs ``run_peers.py`` and ``run_vllm.py`` there, and writes ``data/``: three compressed files of
bytes, and ``manifest.json`` with the versions, the SHA-256 of every input, every stored global scale and the SHA-256 of
every dequantised tensor.  The same machine and versions give the same files, byte for byte.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DATA = HERE / "data"
PEERS = ROOT / ".venv-peers"
VLLM = ROOT / ".venv-peers-vllm"
LARGE = ("packed", "scales")


def interpreter(env: Path) -> Path:
    return env / "bin" / "python"


def ensure_environment(env: Path, requirements: str) -> Path:
    """The interpreter of ``env``, creating and filling the environment if it is not there or was left half done."""
    python = interpreter(env)
    if not is_ready(env, requirements):
        print(f"installing {requirements} into {env.name} (once, minutes)", flush=True)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
        # torch first and alone: the packages after it would otherwise be free to pull another one
        lines = (HERE / requirements).read_text(encoding="utf-8").split()
        torch_pin = next(line for line in lines if line.startswith("torch=="))
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, torch_pin], check=True)
        # the lists are complete; what else these packages name (CUDA libraries, servers) is never imported here
        subprocess.run([*pip, "--no-deps", "-r", str(HERE / requirements)], check=True)
        (env / f".{requirements}").write_text((HERE / requirements).read_text(encoding="utf-8"), encoding="utf-8")
    return python


def ensure_peers() -> Path:
    return ensure_environment(PEERS, "requirements-peers.txt")


def ensure_vllm() -> Path:
    return ensure_environment(VLLM, "requirements-vllm.txt")


def is_ready(env: Path, requirements: str) -> bool:
    """Whether ``ensure_environment`` finished there with the pins of today; nothing is installed by asking."""
    stamp = env / f".{requirements}"
    return stamp.exists() and stamp.read_text(encoding="utf-8") == (HERE / requirements).read_text(encoding="utf-8")


def run_script(python: Path, script: str, out: Path, *names: str) -> dict[str, np.ndarray]:
    """Run ``script`` with another interpreter (on the named sets, or all) and load the arrays that it saved."""
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    command = [str(python), str(HERE / script), str(out), *names]
    done = subprocess.run(command, env=quiet, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} failed in {python.parent.parent.name}:\n{done.stderr[-2000:]}")
    with np.load(out) as saved:
        return {key: saved[key] for key in saved.files}


def collect(scratch: Path) -> dict[str, np.ndarray]:
    """Every answer of every package, one flat dict; the two ``versions`` records are merged."""
    peers = run_script(ensure_peers(), "run_peers.py", scratch / "peers.npz")
    vllm = run_script(ensure_vllm(), "run_vllm.py", scratch / "vllm.npz")
    versions = {**json.loads(str(vllm.pop("versions"))), **json.loads(str(peers.pop("versions")))}
    return {**peers, **vllm, "versions": np.array(json.dumps(versions))}


def as_json(array: np.ndarray) -> object:
    """A small answer as JSON: f32 as its bits in hex, so that no digit is lost; digests and counts as they are."""
    if array.dtype == np.float32:
        return f"0x{int(array.reshape(-1).view(np.uint32)[0]):08x}"
    return array.tolist()


def write(answers: dict[str, np.ndarray]) -> None:
    from tests.golden import golden_sets as sets

    DATA.mkdir(exist_ok=True)
    files: dict[str, dict[str, np.ndarray]] = {"nvfp4": {}, "mxfp4": {}, "elements": {}}
    results: dict[str, dict[str, object]] = {}
    for key, array in sorted(answers.items()):
        family, _, rest = key.partition("/")
        what = key.rpartition("/")[2]
        if family in ("nvfp4", "mxfp4"):
            if what in LARGE:
                files[family][rest] = array
            else:
                results.setdefault(key.rpartition("/")[0], {})[what] = as_json(array)
        elif family != "versions":
            files["elements"][key] = array
    inputs = {f"{n}/{d}": sets.sha256(sets.make(n, d)) for n in sets.NAMES for d in sets.DTYPES}
    inputs["cast_inputs"] = sets.sha256(sets.cast_inputs())
    for name, arrays in files.items():
        np.savez_compressed(DATA / f"{name}.npz", **arrays)
    versions = json.loads(str(answers["versions"]))
    manifest = {"versions": versions, "inputs": inputs, "results": results}
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (DATA / "manifest.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        write(collect(Path(scratch)))
    total = sum(path.stat().st_size for path in DATA.iterdir())
    print(f"wrote {DATA.relative_to(ROOT)}: {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
