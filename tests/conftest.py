"""Shared by all tests.  In CI a missing tool is a failure, on a laptop it is a skip with a reason."""

import os
import shutil

import pytest


def _missing(what: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is missing, and CI must have it")
    pytest.skip(f"{what} is not installed")


@pytest.fixture(scope="session")
def gxx() -> str:
    """Path of g++."""
    path = shutil.which("g++")
    if path is None:
        _missing("g++")
    return path


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium that Playwright can drive."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        _missing("Chromium")
    return path
