"""Discovery never wakes a CUDA driver in the caller's process (requirement: fork safety), checked with no GPU.

Two wires. In torch: the three functions that initialise CUDA are replaced by ones that record the call and raise, which
also makes the CPU wheel say that it was built with CUDA. Below torch: a libcuda.so.1 whose cuInit writes down the
process that called it. Each has a positive control, so that a cut wire is noticed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

WIRE = """
import os
import warnings
import torch

trips = []

def wire(name):
    def tripped(*arguments, **more):
        trips.append(name)
        raise RuntimeError(f"tripped: {name}")
    return tripped

torch._C._cuda_getDeviceCount = wire("_cuda_getDeviceCount")
torch._C._cuda_init = wire("_cuda_init")
torch.cuda._lazy_init = wire("_lazy_init")
torch.version.cuda = "13.0"

def tripped_by(call):
    before = len(trips)
    try:
        value = call()
    except RuntimeError as exc:
        assert str(exc).startswith("tripped"), exc
        value = None
    return [value, trips[before:]]
"""

DISCOVER = """
from anytorch.devices.choose import best_device, devices, explain, resolve
from anytorch.probe import snapshot

import anytorch

found = snapshot()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", anytorch.DeviceFallbackWarning)
    listed = devices(refresh=True)
    chosen = [str(best_device()), resolve("auto").name, resolve("cuda").name]
    explained = explain()
anytorch.seed(1)
anytorch.cleanup()
remaining = anytorch.memory("cuda:0")
answer(
    pid=os.getpid(),
    trips=trips,
    initialized=torch.cuda.is_initialized(),
    wheel=found.torch.kind,
    cards=[gpu.name for gpu in found.gpus if gpu.vendor == "nvidia" and gpu.uuid],
    listed=[candidate.backend for candidate in listed],
    chosen=chosen,
    explained=explained,
    total=remaining.total,
)
"""


@pytest.mark.usefixtures("cpu_wheel")
def test_the_wire_works(nvml_stub: Any, run_script: Any) -> None:
    """The control: what torch does by default trips it, and what is known to be safe does not."""
    answers = run_script(
        WIRE
        + """
plain = tripped_by(torch.cuda.is_available)
moved = tripped_by(lambda: torch.ones(1).to("cuda"))
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
by_nvml = tripped_by(torch.cuda.is_available)
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["MIG_SLICE"]
mig = tripped_by(torch.cuda.is_available)
answer(plain=plain, moved=moved, by_nvml=by_nvml, mig=mig)
""",
        {**nvml_stub.env(), "MIG_SLICE": nvml_stub.mig_slice},
    )
    assert answers["plain"] == [None, ["_cuda_getDeviceCount"]]
    assert answers["moved"] == [None, ["_lazy_init"]]
    assert answers["by_nvml"] == [True, []]
    assert answers["mig"] == [None, ["_cuda_getDeviceCount"]]


def pose_as_cuda_wheel(folder: Path) -> str:
    """Code that shows the probe a CUDA wheel's version.py; the folder has no __init__.py, so imports pass it by."""
    (folder / "torch").mkdir(parents=True)
    real = find_spec("torch")
    assert real is not None and real.origin is not None
    text = Path(real.origin).with_name("version.py").read_text()
    # As the cu130 wheel of the same release writes it.
    posing = text.replace("+cpu'", "+cu130'").replace("cuda: Optional[str] = None", "cuda: Optional[str] = '13.0'")
    assert posing != text
    (folder / "torch" / "version.py").write_text(posing)
    return f"import sys; sys.path.insert(0, {str(folder)!r})\n"


@pytest.mark.long
@pytest.mark.usefixtures("cpu_wheel")
@pytest.mark.parametrize(
    ("wheel", "mask"),
    [
        ("cpu", None),
        ("cuda", None),
        ("cuda", "MIG"),
        # What a mask leaves is in test_nvml_torch.py, for many of them at once.
        *(pytest.param("cuda", mask, marks=pytest.mark.slow) for mask in ("", "1")),
    ],
)
def test_discovery_does_not_wake_cuda(
    nvml_stub: Any, libcuda_stub: Any, run_script: Any, tmp_path: Path, wheel: str, mask: str | None
) -> None:
    record = tmp_path / "cuinit-callers"
    stubs = nvml_stub.env(mask=nvml_stub.mig_slice if mask == "MIG" else mask)
    posing = pose_as_cuda_wheel(tmp_path / "posing") if wheel == "cuda" else ""
    answers = run_script(WIRE + posing + DISCOVER, libcuda_stub.env(record, beside=stubs), timeout_s=300)
    assert answers["trips"] == []
    assert not answers["initialized"]
    callers = libcuda_stub.callers(record)
    assert callers, "the child asks the driver itself; if nobody does, this wire is cut"
    assert answers["pid"] not in callers
    # It did find what there is to find: the stub's cards; and in truth this torch can only use the CPU.
    assert answers["wheel"] == wheel
    assert answers["cards"] == ["NVIDIA H200", "NVIDIA H200"]
    assert "cpu" in answers["listed"]
    assert answers["chosen"][-1] == "cpu"


@pytest.mark.long
@pytest.mark.usefixtures("cpu_wheel")
def test_discovery_survives_a_driver_that_does_not_start(
    nvml_stub: Any, libcuda_stub: Any, run_script: Any, tmp_path: Path
) -> None:
    record = tmp_path / "cuinit-callers"
    answers = run_script(
        WIRE + DISCOVER, libcuda_stub.env(record, code=803, beside=nvml_stub.env(init=18)), timeout_s=300
    )
    assert answers["trips"] == []
    assert answers["pid"] not in libcuda_stub.callers(record)
    assert answers["chosen"][-1] == "cpu"


@pytest.mark.device
def test_a_process_can_fork_after_discovery_on_a_real_card(run_script: Any, missing: Any) -> None:
    """torch's own verdict, which only a CUDA build can give: `_is_in_bad_fork` in a forked child."""
    from anytorch.probe import snapshot

    wheel = snapshot().torch
    if wheel is None or wheel.kind != "cuda":
        missing("cuda", "this torch is not built for CUDA")
    answers = run_script(
        """
        import os, torch

        def bad_after_fork():
            reader, writer = os.pipe()
            if os.fork() == 0:
                os.write(writer, b"1" if torch.cuda._is_in_bad_fork() else b"0")
                os._exit(0)
            os.wait()
            return os.read(reader, 1) == b"1"

        from anytorch.devices.choose import best_device, devices
        chosen, listed = str(best_device()), [c.id for c in devices()]
        discovered = bad_after_fork()
        torch.cuda.is_available()
        answer(chosen=chosen, listed=listed, discovered=discovered, control=bad_after_fork())
        """,
        timeout_s=300,
    )
    assert answers["chosen"].startswith("cuda")
    assert not answers["discovered"]
    assert answers["control"], "is_available() did not poison fork: the control no longer holds"
