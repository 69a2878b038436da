"""Looking for a GPU never fails: it ends in a device or in a reason."""

import shutil
import subprocess
import sys

import pytest

from nvfp4viz import device


def test_this_machine_has_a_cpu():
    report = device.describe_device()
    assert report.computes_on == "cpu"
    assert report.cpu
    assert 1 <= report.threads <= device.KERNEL_THREADS
    assert (report.no_gpu_reason is None) == bool(report.gpus)


def test_a_missing_driver_is_a_reason():
    assert device._find_gpus("libthere-is-no-such-driver.so") == ((), "no-driver")


@pytest.mark.parametrize(
    ("body", "reason"),
    [("int cuInit(unsigned f){return 100;} int cuDeviceGetCount(int*n){return 3;}", "driver-failed"),
     ("int cuInit(unsigned f){return 0;} int cuDeviceGetCount(int*n){*n=0;return 0;}", "none-found")],
    ids=["driver too old", "no device"],
)  # fmt: skip
@pytest.mark.host
def test_a_broken_driver_is_a_reason(tmp_path, gxx, body, reason):
    (tmp_path / "driver.c").write_text(body)
    compiler = shutil.which("gcc") or gxx
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "driver.c", "-o", "driver.so"], cwd=tmp_path, check=True)
    assert device._find_gpus(str(tmp_path / "driver.so")) == ((), reason)


def test_a_device_is_named(tmp_path, gxx):
    source = """
    int cuInit(unsigned f){return 0;} int cuDeviceGetCount(int*n){*n=1;return 0;}
    int cuDeviceGet(int*d,int i){*d=i;return 0;} int cuDeviceGetName(char*s,int n,int d){s[0]='G';s[1]=0;return 0;}
    int cuDeviceGetAttribute(int*v,int a,int d){*v = a==75 ? 9 : 0;return 0;}
    """
    (tmp_path / "driver.c").write_text(source)
    subprocess.run([shutil.which("gcc") or gxx, "-shared", "-fPIC", "-x", "c", "driver.c", "-o", "driver.so"],
                   cwd=tmp_path, check=True)  # fmt: skip
    assert device._find_gpus(str(tmp_path / "driver.so")) == ((device.Gpu("G", (9, 0)),), None)


def test_asking_imports_neither_cupy_nor_torch():
    code = "import sys, nvfp4viz.device as d; d.describe_device(); print({'cupy','torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
