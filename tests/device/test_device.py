"""Looking for a GPU never fails: it ends in a device or in a reason."""

import os
import shutil
import subprocess
import sys

import pytest

from nvfp4viz import device
from nvfp4viz.device import build, probe
from nvfp4viz.errors import DeviceError


def test_this_machine_has_a_cpu():
    report = device.describe_device()
    assert report.cpu
    assert 1 <= report.threads <= device.KERNEL_THREADS
    assert (report.computes_on == "cuda") == (report.reason is None)
    assert report.gpus or report.computes_on == "cpu"


def test_a_missing_driver_is_a_reason():
    assert device._find_gpus("libthere-is-no-such-driver.so") == ((), None, "no-driver")


@pytest.mark.parametrize(
    ("body", "reason"),
    [("int cuInit(unsigned f){return 100;} int cuDeviceGetCount(int*n){return 3;}"
      "int cuDriverGetVersion(int*v){*v=13000;return 0;}", "none-found"),
     ("int cuInit(unsigned f){return 999;} int cuDeviceGetCount(int*n){return 3;}"
      "int cuDriverGetVersion(int*v){*v=13000;return 0;}", "driver-failed"),
     ("int something_else(void){return 0;}", "driver-failed"),
     ("int cuInit(unsigned f){return 0;} int cuDeviceGetCount(int*n){*n=0;return 0;}"
      "int cuDriverGetVersion(int*v){*v=12020;return 0;}", "none-found")],
    ids=["every GPU is hidden", "does not start", "not a driver", "no device"],
)  # fmt: skip
@pytest.mark.host
def test_a_broken_driver_is_a_reason(tmp_path, gxx, body, reason):
    (tmp_path / "driver.c").write_text(body)
    compiler = shutil.which("gcc") or gxx
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "driver.c", "-o", "driver.so"], cwd=tmp_path, check=True)
    assert device._find_gpus(str(tmp_path / "driver.so"))[0::2] == ((), reason)


def test_a_device_is_named(tmp_path, gxx):
    source = """
    int cuInit(unsigned f){return 0;} int cuDeviceGetCount(int*n){*n=1;return 0;}
    int cuDeviceGet(int*d,int i){*d=i;return 0;} int cuDeviceGetName(char*s,int n,int d){s[0]='G';s[1]=0;return 0;}
    int cuDeviceGetAttribute(int*v,int a,int d){*v = a==75 ? 9 : 0;return 0;}
    int cuDriverGetVersion(int*v){*v=12080;return 0;}
    """
    (tmp_path / "driver.c").write_text(source)
    subprocess.run([shutil.which("gcc") or gxx, "-shared", "-fPIC", "-x", "c", "driver.c", "-o", "driver.so"],
                   cwd=tmp_path, check=True)  # fmt: skip
    assert device._find_gpus(str(tmp_path / "driver.so")) == ((device.Gpu("G", (9, 0)),), (12, 8), None)


def test_asking_imports_neither_cupy_nor_torch():
    code = "import sys, nvfp4viz.device as d; d.describe_device(); print({'cupy','torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


H200, VOLTA = device.Gpu("H200", (9, 0)), device.Gpu("V100", (7, 0))


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (((), None, "no-driver", None, None), "device.no-driver"),
        (((), None, "driver-failed", None, None), "device.driver-failed"),
        (((), (13, 0), "none-found", None, None), "device.none-found"),
        (((VOLTA,), (13, 0), None, (13, 0), 13), "device.old-gpu"),
        (((H200,), (13, 0), None, None, 13), "device.no-torch"),
        (((H200,), (13, 0), None, "cpu", 13), "device.torch-cpu"),
        (((H200,), (13, 0), None, (13, 0), None), "device.no-cupy"),
        (((H200,), (12, 8), None, (13, 0), 12), "device.old-driver"),
        (((H200,), (12, 8), None, (12, 9), 13), "device.old-driver"),
        (((H200,), (12, 2), None, (12, 9), 12), None),  # minor versions are compatible within a major
        (((H200,), (13, 0), None, (12, 6), 12), None),
        (((H200,), (13, 0), None, (13, 0), 12), None),  # two majors in one process
        (((H200,), (13, 0), None, (13, 0), 0), None),  # CuPy built on this machine
    ],
)
def test_each_obstacle_has_its_sentence(monkeypatch, found, code):
    monkeypatch.delenv("NVFP4VIZ_DEVICE", raising=False)
    reason = device._obstacle(*found)
    assert (reason.code if reason else None) == code
    if reason:
        assert all("{" not in part for language in ("en", "zh") for part in reason.text(language).values())


def test_the_gpu_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("NVFP4VIZ_DEVICE", "cpu")
    assert device._obstacle((H200,), (13, 0), None, (13, 0), 13).code == "device.switched-off"


@pytest.mark.parametrize("value", ["", "auto", "AUTO ", "bogus", "cuda", "cuda:1"])
def test_the_variable_knows_two_names(monkeypatch, value):
    """Anything else is refused with a reason, not taken for one of them."""
    monkeypatch.setenv("NVFP4VIZ_DEVICE", value)
    reason = device._obstacle((H200,), (13, 0), None, (13, 0), 13)
    if value.strip().lower() in ("", "auto"):
        assert reason is None
    else:
        assert (reason.code, reason.params) == ("device.variable", {"value": value})


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_variable_is_explained_to_readers(readme):
    text = (build.KERNELS.parent / readme).read_text(encoding="utf-8")
    assert f"{device.VARIABLE}=cpu" in text
    assert "`auto`" in text


def test_a_failed_probe_counts_from_then_on(monkeypatch):
    found = device.DeviceReport("cuda", "cpu", 2, (H200,), (13, 0), None)
    monkeypatch.setattr(device, "_found", lambda: found)
    assert device.describe_device() is found
    assert device.why_cpu() is None
    failure = DeviceError("device.compile", file="probe.cu", target="sm_90", log="probe.cu(3): error: no")
    monkeypatch.setattr(device.outcome, "failure", failure)
    report = device.describe_device()
    assert (report.computes_on, report.reason, report.gpus) == ("cpu", failure, (H200,))
    assert device.why_cpu("en").endswith("The compiler said: probe.cu(3): error: no")
    assert device.why_cpu("zh").startswith("内核文件 probe.cu")


def test_the_installed_torch_is_read_from_its_version_file():
    """The cheap look and torch itself agree about the CUDA version it was built for."""
    torch = pytest.importorskip("torch")
    built = torch.version.cuda
    assert device._torch_cuda() == (tuple(map(int, built.split(".")[:2])) if built else "cpu")


def test_without_a_gpu_the_probe_says_why():
    if device.describe_device().gpus:
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceError) as raised:
        probe.require_cuda()
    assert raised.value.code == device.describe_device().reason.code


def test_gpu_tests_that_are_asked_for_say_what_to_do_without_one():
    """As ``make test-gpu`` asks for them."""
    asked = os.environ | {"NVFP4VIZ_REQUIRE_GPU": "1", "NVFP4VIZ_DEVICE": "cpu"}
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_launch.py", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=build.KERNELS.parent, env=asked, capture_output=True, text=True)
    assert done.returncode == 1
    error = DeviceError("device.switched-off")
    assert f"{error.what} {error.why} {error.next_step} All other tests run without one" in done.stdout


def test_the_drivers_release_comes_from_nvml(tmp_path):
    source = tmp_path / "nvml.c"
    source.write_text(
        "#include <string.h>\n"
        "int nvmlInit_v2(void) { return 0; }\n"
        'int nvmlSystemGetDriverVersion(char *text, unsigned n) { strncpy(text, "580.1.2", n); return 0; }\n'
    )
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for a stand-in of NVML")
    library = tmp_path / "libnvml.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert device.driver_release(str(library)) == "580.1.2"
    assert device.driver_release(str(tmp_path / "absent.so")) == ""
    assert device.driver_release("libm.so.6") == ""
