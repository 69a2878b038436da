"""The shipped model, served in BF16 once for all tests."""

import pytest

from nvfp4viz import serving
from sample_checkpoints import ensure


@pytest.fixture(scope="session")
def bf16():
    return serving.load(ensure("tiny-moe-bf16"), backend="bf16")


@pytest.fixture(scope="session")
def full():
    return serving.load(ensure("tiny-moe-nvfp4-full"))


@pytest.fixture(scope="session")
def holed():
    return serving.load(ensure("tiny-moe-nvfp4-holes"))
