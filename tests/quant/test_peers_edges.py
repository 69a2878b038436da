"""Live: edge blocks under garbage global scales, by the packages and by us, byte for byte.

Every special value alone, among numbers and filling a block; midpoints with their neighbours; blocks where scales die
and saturate; each under sixteen global scales from 0 and −0 over NaN to ±Inf, in float32 and BF16.  Two things are let
pass, and counted: the sign of a NaN scale byte, which depends on the vector lane that a block falls into, and
``ocp-floor``'s blocks with scale byte 0, which torchao divides by 2^-126.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from nvfp4viz import quant
from tests.golden import make_golden
from tests.quant import recipe_cases as cases

pytestmark = [pytest.mark.peers, pytest.mark.slow]
PEERS = ("modelopt", "torchao", "compressed-tensors", "modelopt-mxfp4", "ocp-floor", "deepgemm-ceil")
ENVIRONMENTS = {
    **dict.fromkeys(PEERS, (make_golden.PEERS, "requirements-peers.txt", PEERS)),
    "vllm-emulation": (make_golden.VLLM, "requirements-vllm.txt", ("vllm-emulation",)),
}
_answers: dict[Path, dict[str, np.ndarray]] = {}


def answers_of(recipe: str, folder: Path) -> dict[str, np.ndarray]:
    """What the recipe's package says, from one run of its environment a session."""
    env, requirements, recipes = ENVIRONMENTS[recipe]
    if not make_golden.is_ready(env, requirements):
        pytest.skip(f"{env.name} is not there: `make golden` installs the packages to compare with")
    if env not in _answers:
        edges = cases.edge_blocks()
        given, out = folder / "in.npz", folder / "out.npz"
        scales = {f"g/{name}": cases.scale_for("ieee", name) for name in cases.GLOBAL_SCALES}
        np.savez(given, f32=edges, bf16=cases.to_bf16(edges).view(np.int16), **scales)
        script = Path(__file__).with_name("run_edges.py")
        command = [str(make_golden.interpreter(env)), str(script), str(given), str(out), *recipes]
        subprocess.run(command, check=True, capture_output=True, text=True)
        with np.load(out) as saved:
            _answers[env] = {key: saved[key] for key in saved.files}
    return _answers[env]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("recipe", ENVIRONMENTS)
def test_packages_give_our_bytes(recipe: str, dtype: str, tmp_path: Path) -> None:
    edges = cases.edge_blocks()
    x = edges if dtype == "f32" else cases.to_bf16(edges)
    said = answers_of(recipe, tmp_path)
    names = ("one",) if quant.RECIPES[recipe].scheme == "mxfp4" else tuple(cases.GLOBAL_SCALES)
    other_sign = 0
    for name in names:
        q = quant.quantize(x, recipe=recipe, global_scale=cases.scale_for(recipe, name), path="numpy")
        scales, packed = said[f"{recipe}/{name}/{dtype}/scales"], said[f"{recipe}/{name}/{dtype}/packed"]
        sign = np.zeros(scales.shape, bool)
        if q.block_size == 16:
            sign = (q.scales != scales) & ((q.scales & 0x7F) == 0x7F) & ((scales & 0x7F) == 0x7F)
            other_sign += int(sign.sum())
        assert np.array_equal(q.scales[~sign], scales[~sign]), name
        blocks = (q.packed != packed).reshape(len(x), -1, q.block_size // 2).any(axis=-1)
        if recipe == "ocp-floor":
            assert (q.scales[blocks] == 0).all()
            assert blocks.any()
            blocks &= False
        assert not blocks.any(), f"{name}: {blocks.sum()} blocks differ, first {np.argwhere(blocks)[0]}"
    assert other_sign == 0 or recipe != "torchao"  # its maximum of magnitudes keeps a NaN positive
