"""What the documented names say on machines this one is not. Only the list of devices is replaced.

The facts: an AMD GPU under ROCm has the torch type "cuda" and is told apart by its back end (research, section 1.2); a
Vulkan adapter of type CPU is called llvmpipe and ranks below the CPU (section 0, point 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from anytorch_compat.backend import DeviceBackend, get_device_manager
from anytorch_compat.selection import BackendType, get_available_backends, get_backend
from anytorch_compat.system import (
    get_accelerator_type,
    get_best_device,
    get_device,
    get_device_info,
    get_memory_info,
    is_cuda_available,
    is_npu_available,
    resolve_device,
)

from anytorch.devices import choose
from anytorch.devices.ranking import rank
from anytorch.devices.types import SOFTWARE_PRIORITY, Candidate, State
from anytorch.errors import TorchMissing

RADEON = Candidate("rocm", "cuda", 0, "AMD Radeon RX 7900 XTX", State.USABLE, 700)
ARC = Candidate("xpu", "xpu", 0, "Intel Arc A770", State.USABLE, 500)
LLVMPIPE = Candidate("webgpu", "webgpu", 0, "llvmpipe", State.USABLE, SOFTWARE_PRIORITY, software=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`machine(RADEON)`: this machine with these usable devices beside its CPU; `torch=False` takes torch away."""

    def put(*devices: Candidate, torch: bool = True) -> None:
        real = choose.survey("never")
        cpu = next(replace(c, state=State.USABLE) for c in real.devices if c.backend == "cpu")
        facts = real.facts if torch else replace(real.facts, hardware=replace(real.facts.hardware, torch=None))
        found = choose.Survey(facts, (), tuple(rank([*devices, cpu])))
        monkeypatch.setattr(choose, "survey", lambda *_, **__: found)

    return put


def test_an_amd_gpu_is_cuda_to_torch_and_rocm_to_us(machine: Callable[..., None]) -> None:
    machine(RADEON)
    assert get_best_device() == get_accelerator_type() == "cuda"
    assert is_cuda_available() is True
    assert get_available_backends() == [BackendType.ROCM, BackendType.CPU]
    assert get_backend() is BackendType.ROCM
    info = get_device_info()
    assert (info["cuda_available"], info["device_type"], info["backend"]) == (True, "cuda", "rocm")
    assert info["device_name"] == "AMD Radeon RX 7900 XTX" and info["device_count"] == 1
    assert str(resolve_device("cuda")) == "cuda:0"  # written for CUDA, runs on ROCm by design
    for name in ("cuda", "rocm", "cuda:0"):
        backend = DeviceBackend(name)
        assert backend.is_available() and backend.device_count() == 1 and backend.device_type == "cuda"
    summary = get_device_manager().get_device_summary()
    assert summary["cuda_devices"] == 1 and list(summary["devices"]) == ["cuda:0", "cpu"]
    assert get_memory_info()["vram"].keys() == {"cuda_0"}


def test_another_accelerator_is_named_by_its_own_type(machine: Callable[..., None]) -> None:
    machine(ARC)
    assert get_accelerator_type() == "xpu" and is_cuda_available() is False
    assert [str(device) for device in get_device_manager().get_all_devices()] == ["xpu:0", "cpu"]


def test_the_order_is_best_first(machine: Callable[..., None]) -> None:
    machine(ARC, RADEON)
    assert [backend.value for backend in get_available_backends()] == ["rocm", "xpu", "cpu"]
    assert get_best_device() == "cuda"


def test_a_software_adapter_is_for_who_asks_for_it(machine: Callable[..., None]) -> None:
    machine(LLVMPIPE)
    assert get_available_backends() == [BackendType.CPU]
    assert get_best_device() == "cpu"
    assert DeviceBackend("webgpu").is_available() and DeviceBackend("vulkan").device_count() == 1
    assert [str(device) for device in get_device_manager().get_all_devices()] == ["cpu"]
    assert get_memory_info()["vram"] == {}


def test_without_torch_questions_are_answered_and_requests_raise(machine: Callable[..., None]) -> None:
    machine(torch=False)
    assert get_available_backends() == []
    assert is_cuda_available() is False and is_npu_available() is False
    assert get_device_info()["device_count"] == 0 and get_device_info()["torch_version"] is None
    assert get_memory_info()["ram"]["total_gb"] > 0
    assert get_memory_info("cpu")["reason"] == "torch is not installed"
    assert DeviceBackend("cpu").is_available() is False
    for request in (get_device, get_backend, get_best_device):
        with pytest.raises(TorchMissing, match="torch is not installed"):
            request()
