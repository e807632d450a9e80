"""DeviceBackend and UnifiedDeviceManager on the CPU, and on a device that is not here."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from anytorch_compat.backend import DeviceBackend, UnifiedDeviceManager, get_device_manager, get_unified_backend
from anytorch_compat.system import get_accelerator_type, get_best_device

from anytorch.errors import DeviceIndexError, DeviceUnavailable, UnknownDevice


@pytest.fixture(autouse=True)
def only_a_cpu() -> None:
    if get_best_device() != "cpu":
        pytest.skip("these answers are those of a machine without an accelerator")


@pytest.fixture(params=["cpu", torch.device("cpu"), None, "auto"], ids=str)
def cpu(request: pytest.FixtureRequest) -> DeviceBackend:
    return DeviceBackend(request.param)


def test_what_it_is(cpu: DeviceBackend) -> None:
    assert cpu.device == torch.device("cpu") and cpu.device_type == "cpu"
    assert cpu.is_available() is True and cpu.device_count() == 1
    assert cpu.get_device_name() == cpu.get_device_name(0) == cpu.get_device_name(index=0)
    properties = cpu.get_device_properties(index=0)
    assert properties["name"] == cpu.get_device_name() and properties["type"] == "cpu"
    assert properties["total_memory"] > 0 and "float32" in properties["capabilities"]["dtypes"]


def test_its_memory_in_bytes(cpu: DeviceBackend) -> None:
    for figure in (cpu.memory_allocated, cpu.memory_reserved, cpu.max_memory_allocated):
        assert type(figure()) is int and figure(index=0) > 0
    before = cpu.memory_allocated()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert cpu.memory_allocated() - before > 32 << 20, "64 MiB were touched"
    del block
    cpu.empty_cache()
    cpu.synchronize()
    summary = cpu.get_memory_summary()
    assert summary["device"] == "cpu"
    assert summary["allocated_gb"] == pytest.approx(summary["allocated"] / 2**30, abs=1e-8)


def test_index_out_of_range(cpu: DeviceBackend) -> None:
    for ask in (cpu.memory_allocated, cpu.get_device_name, cpu.get_device_properties, cpu.synchronize):
        for index in (1, -1):
            with pytest.raises(DeviceIndexError):
                ask(index)


def test_to_device_moves_what_can_be_moved(cpu: DeviceBackend) -> None:
    Pair = namedtuple("Pair", "left right")
    tensor, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert cpu.to_device(tensor) is tensor and cpu.to_device(module) is module
    for other in ("words", None, 3, torch.Tensor):
        assert cpu.to_device(other) is other
    given: dict[str, Any] = {
        "list": [tensor, 1],
        "tuple": (tensor, (tensor,)),
        "pair": Pair(tensor, "x"),
        "ordered": OrderedDict(a=tensor),
        "default": defaultdict(list, a=tensor),
        "set": {1, 2},
    }
    moved = cpu.to_device(given)
    assert moved == given and moved is not given and moved["list"] is not given["list"]
    assert {key: type(value) for key, value in moved.items()} == {key: type(value) for key, value in given.items()}
    assert moved["default"].default_factory is list


def test_to_device_moves_nested_tensors_for_real() -> None:
    """Seen with "meta", which every torch has: the containers' walk does not depend on the device."""
    from anytorch_compat.backend import _moved

    given = {"x": [torch.ones(2), (torch.zeros(1), "text")], "n": 3}
    moved = _moved(given, torch.device("meta"))
    assert moved["x"][0].is_meta and moved["x"][1][0].is_meta and moved["x"][1][1] == "text" and moved["n"] == 3
    assert not given["x"][0].is_meta  # type: ignore[index]


@pytest.fixture(params=["npu:0", "cuda:1", "xpu", "mps"])
def missing(request: pytest.FixtureRequest) -> DeviceBackend:
    return DeviceBackend(request.param)


def test_one_that_is_not_here(missing: DeviceBackend, recwarn: pytest.WarningsRecorder) -> None:
    assert missing.is_available() is False and missing.device_count() == 0
    assert str(missing.device).startswith(missing.device_type)
    assert "not available" in missing.get_device_name()
    assert missing.get_device_properties()["reason"]
    assert missing.memory_allocated() == missing.memory_reserved() == missing.max_memory_allocated(0) == 0
    missing.empty_cache()
    missing.synchronize()
    summary = missing.get_memory_summary()
    assert summary["available"] is False and summary["total_gb"] is None
    with pytest.raises(DeviceUnavailable, match="cannot be used"):
        missing.to_device(torch.ones(1))
    assert not recwarn.list


def test_torch_itself_knows_no_npu() -> None:
    """So `DeviceBackend(torch.device("npu:0"))` cannot even reach us without the plug-in; the text can."""
    with pytest.raises(RuntimeError, match="npu"):
        torch.device("npu:0")
    assert DeviceBackend("npu:0").device == "npu:0"


@pytest.mark.parametrize("name", ["nonsense", "cuda:x", torch.device("meta")])
def test_takes_no_nonsense(name: Any) -> None:
    with pytest.raises(UnknownDevice):
        DeviceBackend(name)


def test_unified_backend() -> None:
    assert get_unified_backend().device_type == get_accelerator_type() == "cpu"
    assert repr(get_unified_backend("npu:0")) == "DeviceBackend('npu:0')"


def test_the_manager() -> None:
    manager = get_device_manager()
    assert manager is get_device_manager() and isinstance(manager, UnifiedDeviceManager)
    assert manager.get_all_devices() == [torch.device("cpu")]
    assert manager.get_best_device() == manager.get_best_device(prefer_npu=True) == torch.device("cpu")
    assert manager.get_backend(torch.device("cpu")).is_available()
    summary = manager.get_device_summary()
    assert (summary["total_devices"], summary["cuda_devices"], summary["npu_devices"]) == (1, 0, 0)
    assert summary["devices"]["cpu"]["device_name"] == manager.get_backend("cpu").get_device_name()
    manager.cleanup_all()
