"""Live: the packages run now, on data that no file records, and give our bytes.

Needs the environments that ``make golden`` creates; without them these tests skip and say so.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.golden import answers, make_golden
from tests.golden import golden_sets as sets
from tests.quant.golden_checks import PATHS, Answer, expect_same

pytestmark = pytest.mark.peers
FRESH = ("fresh:20261129", "fresh:424242")
RECIPES = [
    ("modelopt", "nvfp4/modelopt"),
    ("torchao", "nvfp4/torchao"),
    ("compressed-tensors", "nvfp4/compressed-tensors"),
    ("modelopt-mxfp4", "mxfp4/modelopt"),
    ("ocp-floor", "mxfp4/torchao-floor"),
    ("deepgemm-ceil", "mxfp4/flashinfer-deepgemm"),
]
ENVIRONMENTS = {
    "peers": (make_golden.PEERS, "requirements-peers.txt", "run_peers.py"),
    "vllm": (make_golden.VLLM, "requirements-vllm.txt", "run_vllm.py"),
}


def run_live(which: str, folder: Path, *names: str) -> dict[str, np.ndarray]:
    env, requirements, script = ENVIRONMENTS[which]
    if not make_golden.is_ready(env, requirements):
        pytest.skip(f"{env.name} is not there: `make golden` installs the packages to compare with")
    return make_golden.run_script(make_golden.interpreter(env), script, folder / f"{which}.npz", *names)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return run_live("peers", tmp_path_factory.mktemp("peers"), *FRESH)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return run_live("vllm", tmp_path_factory.mktemp("vllm"), *FRESH)


def tensor(name: str, dtype: str) -> np.ndarray:
    x = sets.make(name, dtype)
    return x.view(ml_dtypes.bfloat16) if dtype == "bf16" else x


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("recipe", "key"), RECIPES)
def test_packages_give_our_bytes_now(peers: dict[str, np.ndarray], recipe: str, key: str, path: str) -> None:
    for name in FRESH:
        for dtype in sets.DTYPES:
            said = {what: peers.get(f"{key}/{name}/{dtype}/{what}") for what in ("packed", "scales", "global")}
            stored = None if said["global"] is None else said["global"][0]
            expect_same(tensor(name, dtype), recipe, Answer(said["packed"], said["scales"], stored), path)


@pytest.mark.parametrize("path", PATHS)
def test_vllm_gives_our_bytes_now(vllm: dict[str, np.ndarray], path: str) -> None:
    for name in FRESH:
        for dtype in sets.DTYPES:
            key = f"nvfp4/vllm-emulation/{name}/{dtype}"
            answer = Answer(vllm[f"{key}/packed"], vllm[f"{key}/scales"], vllm[f"{key}/encode"][0])
            expect_same(tensor(name, dtype), "vllm-emulation", answer, path)


@pytest.mark.slow
@pytest.mark.parametrize("which", ENVIRONMENTS)
def test_recorded_answers_are_what_the_packages_say_today(which: str, tmp_path: Path) -> None:
    """All finite sets, byte for byte: the files were not edited, and the packages do not depend on this CPU.

    The exceptional sets are left out, because the NaNs in them do depend on it.
    """
    live = run_live(which, tmp_path)
    compared = 0
    for key, array in live.items():
        family, _, rest = key.partition("/")
        name = rest.split("/")[1] if family in ("nvfp4", "mxfp4") else ""
        if family not in ("nvfp4", "mxfp4") or name in ("nan", "inf", "allzero"):
            continue
        if key.endswith(("packed", "scales")):
            assert np.array_equal(array, answers.arrays(family)[rest]), key
            compared += 1
    assert compared >= 80
