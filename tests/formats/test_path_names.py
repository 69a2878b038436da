"""A name that is no path is refused everywhere: taken for the fast one, a test would compare that with itself."""

import ast
from pathlib import Path

import numpy as np
import pytest

from nvfp4viz import formats, quant
from nvfp4viz.errors import FormatError
from nvfp4viz.formats import paths
from nvfp4viz.formats.paths import by_numpy, by_reference
from nvfp4viz.moe import routers
from nvfp4viz.quant.per_token import quantize_tokens

ROOT = Path(__file__).parents[2] / "nvfp4viz"
KINDS = [name for name in vars(paths) if name.endswith("Path")]
ASKED = ("by_reference", "by_numpy", "check_path")
SCALES, ROWS = np.zeros((2, 4), np.uint8), np.ones((2, 16), np.float32)


def functions():
    for folder in ("formats", "quant", "moe", "serving"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    [*given] = [*node.args.args, *node.args.kwonlyargs]
                    kind = next((ast.unparse(a.annotation) for a in given if a.arg == "path" and a.annotation), "")
                    if kind in KINDS or kind.startswith("Literal["):
                        yield pytest.param(node, id=f"{file.relative_to(ROOT)}:{node.name}")


@pytest.mark.parametrize("function", list(functions()))
def test_every_function_of_several_paths_asks_or_hands_on(function):
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    asks = any(ast.unparse(call.func) in ASKED for call in calls)
    given = [*(a for call in calls for a in call.args), *(k.value for call in calls for k in call.keywords)]
    assert asks or any(isinstance(value, ast.Name) and value.id == "path" for value in given)


@pytest.mark.parametrize(
    "call",
    [
        lambda: by_reference("fast"),
        lambda: by_numpy("reference"),
        lambda: formats.swizzle_128x4(SCALES, path="referense"),
        lambda: formats.pack_ue8m0(SCALES, path="referense"),
        lambda: quant.quantize(ROWS, recipe="ieee", path="cuda"),
        lambda: quantize_tokens(ROWS, "megamoe", path="referense"),
        lambda: routers.route_softmax(ROWS, 2, path="referense"),
        lambda: routers.route_sqrt_softplus(ROWS, 2, path="referense"),
    ],
)
def test_an_unknown_path(call):
    with pytest.raises(FormatError) as stop:
        call()
    assert stop.value.code == "path.unknown"
