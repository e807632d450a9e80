"""Run the tests marked `device` here, some at once, and keep what came of it: `make test-device`.

    make test-device                                  the virtual environment's Python
    make test-device DEVICE_PYTHON=python3            a machine whose own Python has torch; nothing is installed
    ANYTORCH_TEST_DEVICE=cpu make test-device         the CPU stands in, and nothing is kept
    ANYTORCH_COMMIT=… OUTPUT=… make test-device …     a copy without .git, and another place for the result

Needed besides torch and NumPy: pytest, and for all of it transformers, pandas, rich, tomli-w and wgpu. What a machine lacks
is taken from `.carry/`, which tools/device-carry.sh fills elsewhere: a folder for each Python package under `.carry/python`,
and the Vulkan loader's libraries in `.carry/vulkan`, for a headless NVIDIA driver.

Every group of tests has a process of its own: kernels compile on as many cores as there are. The summary names what failed
and what was skipped, and goes to bench/results/device-tests-<device>.json with the commit and the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / ".carry"
LIMIT_S = 280
GROUPS: dict[str, list[str]] = {
    "triton: texts": ["tests/device/test_triton.py", "-k", "texts or norm"],
    "triton: packed weights": ["tests/device/test_triton.py", "-k", "packed"],
    "triton: forecasts": ["tests/device/test_triton.py", "-k", "of_a_forecast"],
    "kernel graphs": ["tests/device/test_graph.py"],
    "recorded graphs": ["tests/device/test_recorded.py"],
    "decoding in one launch": ["tests/device/test_persistent.py", "-k", "not packed and not several"],
    "decoding several texts, packed weights": ["tests/device/test_persistent.py", "-k", "packed or several"],
    "tiers": ["tests/device/test_tiers.py"],
    "forecast steps": ["tests/device/test_forecast.py", "-k", "of_the_cpu and not kernels"],
    "forecast kernels": ["tests/device/test_forecast.py", "-k", "kernel"],
    "fine-tuning": ["tests/device/test_forecast.py", "-k", "fine_tuning"],
    "embeddings, float32": ["tests/device/test_embeddings.py", "-k", "float32 or packed_weights or engine"],
    "embeddings, float16": ["tests/device/test_embeddings.py", "-k", "float16 and not bfloat16"],
    "embeddings, bfloat16": ["tests/device/test_embeddings.py", "-k", "bfloat16"],
    "webgpu": ["tests/device/test_webgpu.py"],
    "packed layers, float32": ["tests/quant/test_devices.py", "-k", "accelerator and dtype0"],
    "packed layers, bfloat16": ["tests/quant/test_devices.py", "-k", "accelerator and dtype1"],
    "several processes on one card": ["tests/device/test_several.py"],
    "discovery": ["tests/native/test_tripwire.py"],
}
AFTERWARDS = {"nodes of ComfyUI": ["tests/comfy/test_accelerator.py"]}  # takes all of the device's memory


def environment(scratch: Path) -> dict[str, str]:
    """The variables of a test process: our sources, carried packages that are not installed, and a Vulkan driver."""
    paths = [ROOT / "src", ROOT / "compat" / "src", ROOT]
    for folder in sorted((CARRIED / "python").glob("*")):
        names = {
            part.name.split(".")[0] for part in folder.iterdir() if not part.name.endswith((".dist-info", ".libs"))
        }
        if any(find_spec(name) is None for name in names - {"bin", "share", "__pycache__"} if name.isidentifier()):
            paths.append(folder)
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])}
    found.setdefault("ANYTORCH_TEST_REQUIRE", "accelerator" if not stand_in() else "")
    found.setdefault("XDG_RUNTIME_DIR", str(scratch))
    found.setdefault("OMP_NUM_THREADS", "1" if stand_in() else "2")  # many processes share the cores
    software = ROOT / ".cache" / "mesa" / "lvp.json"
    if "VK_ICD_FILENAMES" in found or "VK_DRIVER_FILES" in found:
        return found
    if stand_in():
        return {**found, "VK_ICD_FILENAMES": str(software)} if software.exists() else found
    driver = next((one for root in DRIVER_FOLDERS for one in root.glob("libEGL_nvidia.so.0")), None)
    if driver is not None:  # the driver's own file names libGLX_nvidia, which needs an X server
        manifest = scratch / "nvidia.json"
        library = {"library_path": str(driver), "api_version": "1.4.312"}
        manifest.write_text(json.dumps({"file_format_version": "1.0.1", "ICD": library}))
        found["VK_ICD_FILENAMES"] = found["VK_DRIVER_FILES"] = str(manifest)
        folders = [str(CARRIED / "vulkan"), str(driver.parent), found.get("LD_LIBRARY_PATH", "")]
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return found


DRIVER_FOLDERS = [
    *map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))),
    *map(Path, ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64")),
]


def stand_in() -> bool:
    return os.environ.get("ANYTORCH_TEST_DEVICE") == "cpu"


def run_group(name: str, arguments: list[str], variables: dict[str, str], scratch: Path, end: float) -> dict[str, Any]:
    """One pytest: what passed, what failed and why, what was skipped and why."""
    report = scratch / f"{name.replace(' ', '-').replace(':', '')}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "device", f"--junitxml={report}"]
    command += ["-o", "filterwarnings=default"]  # another machine's versions warn of other things
    began = time.monotonic()
    log = scratch / f"{report.stem}.log"
    try:
        with log.open("w") as output:
            done = subprocess.run(
                [*command, *arguments], cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT,
                timeout=max(1.0, end - time.monotonic()), check=False,
            )  # fmt: skip
        ended = "" if done.returncode in (0, 1) else f"pytest ended with status {done.returncode}"
    except subprocess.TimeoutExpired:
        ended = f"not finished within {LIMIT_S} s"
    group: dict[str, Any] = {"passed": 0, "failed": [], "skipped": [], "seconds": round(time.monotonic() - began, 1)}
    if ended:
        group["failed"].append(f"{ended}: {' | '.join(log.read_text().splitlines()[-6:])}")
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        bad, left = next((part for part in case if part.tag in ("failure", "error")), None), case.find("skipped")
        if bad is not None:
            group["failed"].append(f"{case.get('name')}: {(bad.get('message') or '').splitlines()[0][:300]}")
        elif left is not None:
            group["skipped"].append(f"{case.get('name')}: {left.get('message')}")
        else:
            group["passed"] += 1
    return group


def described(variables: dict[str, str]) -> dict[str, Any]:
    """Device and versions, asked for in a process of its own."""
    code = (
        "import json, platform, torch\n"
        "name = torch.get_device_module().get_device_name() if torch.accelerator.is_available() else 'cpu'\n"
        "print(json.dumps({'device': name, 'torch': torch.__version__, 'python': platform.python_version()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    return dict(told)


def write(output: Path, found: dict[str, Any], variables: dict[str, str]) -> None:
    """By bench/provenance.py, in a process in which our sources are on the path."""
    code = (
        f"import json, sys, pathlib; sys.path.insert(0, {str(ROOT / 'bench')!r}); sys.argv = [{str(Path(__file__))!r}]\n"
        "from provenance import provenance, write_results\n"
        f"write_results(pathlib.Path({str(output)!r}), {{**provenance(), **json.load(sys.stdin)}})"
    )
    subprocess.run([sys.executable, "-c", code], env=variables, input=json.dumps(found), text=True, check=True)


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(Path(folder))
        asked = [sys.executable, "-c", "import pytest, torch, numpy"]
        lacking = subprocess.run(asked, env=variables, capture_output=True, text=True, check=False)
        if lacking.returncode:
            print(f"{sys.executable}: {lacking.stderr.splitlines()[-1]}")
            print("Fill .carry/ with tools/device-carry.sh where packages can be installed, and bring it along.")
            return 2
        about = described(variables)
        jobs = int(os.environ.get("JOBS") or min(len(GROUPS), os.cpu_count() or 1))
        end = time.monotonic() + (LIMIT_S if not stand_in() else 10 * LIMIT_S)
        given = (variables, Path(folder), end)
        with ThreadPoolExecutor(jobs) as pool:
            made = {name: pool.submit(run_group, name, arguments, *given) for name, arguments in GROUPS.items()}
            groups = {name: one.result() for name, one in made.items()}
        groups |= {name: run_group(name, arguments, *given) for name, arguments in AFTERWARDS.items()}
    totals = {what: sum(len(group[what]) for group in groups.values()) for what in ("failed", "skipped")}
    passed, seconds = sum(group["passed"] for group in groups.values()), round(time.monotonic() - began, 1)
    for name, group in groups.items():
        counts = f"{group['passed']:4} passed {len(group['failed']):3} failed {len(group['skipped']):3} skipped"
        print(f"{name:26}{counts} {group['seconds']:7.1f} s")
        for line in group["failed"]:
            print(f"    FAILED  {line}")
        for line in sorted({one.partition(": ")[2] for one in group["skipped"]}):
            print(f"    skipped {line}")
    print(f"{about['device']}: {passed} passed, {totals['failed']} failed, {totals['skipped']} skipped in {seconds} s")
    if not stand_in():
        short = "-".join(about["device"].lower().replace("nvidia", "").split()) or "device"
        output = Path(os.environ.get("OUTPUT") or ROOT / "bench" / "results" / f"device-tests-{short}.json")
        whole = {**about, "passed": passed, **totals, "seconds": seconds, "groups": groups}
        write(output, whole, variables)
        print(f"written to {output}")
    return 1 if totals["failed"] or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
