"""The app asks NumPy's own OpenBLAS for one thread, whatever was set before."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CODE = """
import ctypes, sys
from pathlib import Path
import numpy as np
from nvfp4viz.ui.blas import use_one_thread
path = next((Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*"))
library = ctypes.CDLL(str(path))
library.scipy_openblas_set_num_threads64_(2)
print(library.scipy_openblas_get_num_threads64_())
print(use_one_thread())
print(library.scipy_openblas_get_num_threads64_())
"""


def test_one_thread_is_set_in_the_running_process():
    if not list((Path(np.__file__).parents[1] / "numpy.libs").glob("*scipy_openblas64*")):
        pytest.skip("this NumPy brings no scipy-openblas")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["True", "1"]
