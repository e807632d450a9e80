"""The documented names on a torch with two NPUs: a compiled PrivateUse1 device with a real allocator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest


@pytest.fixture(scope="module")
def npu_machine(npu_extension: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plugin: Path = npu_extension.plugin(tmp_path_factory.mktemp("npu"))
    return plugin


@pytest.fixture
def ask(
    npu_machine: Path, run_script: Callable[..., dict[str, Any]], shared_cache: Callable[[str], Path]
) -> Callable[[str], dict[str, Any]]:
    cached = {"ANYTORCH_CACHE_DIR": str(shared_cache("compat-npu"))}
    # In a process that has torch already: what the end of its `import torch` does is done again.
    start = "import torch; torch._import_device_backends()\n"
    return lambda code: run_script(start + dedent(code), cached, path=[npu_machine], warm=True)


def test_choice_and_facts(ask: Callable[[str], dict[str, Any]]) -> None:
    told = ask(
        """
        import anytorch
        from anytorch_compat.backend import get_device_manager
        from anytorch_compat.selection import get_available_backends, get_backend, set_backend
        from anytorch_compat.system import *
        info = get_device_info()
        answer(
            best=get_best_device(), device=str(get_device()),
            cpu=str(get_device(force_cpu=True)),
            kind=get_accelerator_type(), npu=is_npu_available(), cuda=is_cuda_available(),
            backends=[b.value for b in get_available_backends()], in_force=get_backend().value,
            after=set_backend("cpu").value, then=str(get_device()),
            preferred=str(get_device(prefer_npu=True)),
            type=info["device_type"], count=info["device_count"], listed=info["devices"],
            all=[str(d) for d in get_device_manager().get_all_devices()],
        )
        """
    )
    assert told["best"] == told["kind"] == told["type"] == told["in_force"] == "npu"
    assert told["device"] == told["preferred"] == "npu:0" and told["cpu"] == "cpu"
    assert told["npu"] is True and told["cuda"] is False
    assert told["backends"] == ["npu", "cpu"]
    assert told["after"] == told["then"] == "cpu"  # the choice steers what names no device
    assert told["count"] == 2 and told["listed"] == ["npu:0", "npu:1", "cpu"]
    assert told["all"] == ["npu:0", "npu:1", "cpu"]


def test_new_tensors_are_made_on_the_back_end_that_was_set(ask: Callable[[str], dict[str, Any]]) -> None:
    told = ask(
        """
        import torch
        from anytorch_compat.selection import set_backend
        made = lambda: [str(t.device) for t in (torch.ones(2), torch.nn.Linear(2, 2).weight, torch.tensor([1]))]
        before = torch.ones(2)
        answer(first=made(), npu=(set_backend("npu"), made())[1], other=(set_backend("npu:1"), made())[1],
               cpu=(set_backend("cpu"), made())[1], auto=(set_backend("auto"), made())[1], kept=str(before.device))
        """
    )
    assert told == {
        "first": ["cpu"] * 3, "npu": ["npu:0"] * 3, "other": ["npu:1"] * 3, "cpu": ["cpu"] * 3, "auto": ["npu:0"] * 3,
        "kept": "cpu",
    }  # fmt: skip


def test_memory_is_the_allocators_own(ask: Callable[[str], dict[str, Any]]) -> None:
    told = ask(
        """
        import torch, anytorch
        from anytorch_compat.backend import DeviceBackend
        from anytorch_compat.system import get_memory_info
        before = DeviceBackend("npu:1").memory_allocated()
        block = torch.empty(8 << 20, dtype=torch.uint8, device="npu:1")
        backend = DeviceBackend(torch.device("npu:1"))
        values = dict(
            allocated=backend.memory_allocated() - before, other=backend.memory_allocated(index=0),
            info=get_memory_info()["npu_memory"], one=get_memory_info("npu:1"),
            summary=backend.get_memory_summary(), count=backend.device_count(), name=backend.get_device_name(),
        )
        del block
        backend.empty_cache(); backend.synchronize()
        answer(**values, freed=backend.memory_allocated(), peak=backend.max_memory_allocated())
        """
    )
    assert told["allocated"] >= 8 << 20 and told["freed"] == 0 and told["peak"] >= 8 << 20
    assert told["other"] < 8 << 20
    assert told["info"].keys() == {"npu_0", "npu_1"}
    assert {"allocated_gb", "reserved_gb", "max_allocated_gb"} <= told["info"]["npu_1"].keys()
    assert told["info"]["npu_1"]["allocated_gb"] >= 8 / 1024
    assert told["one"]["available"] is True and told["one"]["device"] == "npu:1"
    assert told["summary"]["device"] == "npu:1" and told["summary"]["allocated"] >= 8 << 20
    assert told["count"] == 2 and told["name"]


def test_moving_and_bad_indices(ask: Callable[[str], dict[str, Any]]) -> None:
    told = ask(
        """
        import torch, anytorch
        from anytorch_compat.backend import DeviceBackend
        from anytorch_compat.selection import set_backend
        from anytorch_compat.system import get_memory_info
        backend = DeviceBackend("npu:1")
        moved = backend.to_device({"x": [torch.ones(3)], "m": torch.nn.Linear(3, 1)})
        errors = []
        for ask in (lambda: backend.memory_allocated(2), lambda: get_memory_info("npu:2"),
                    lambda: set_backend("npu:2")):
            try:
                ask()
            except anytorch.AnytorchError as exc:
                errors.append(type(exc).__name__)
        y = moved["m"](moved["x"][0]).sum()
        y.backward()
        answer(x=str(moved["x"][0].device), w=str(moved["m"].weight.device), grad=moved["m"].weight.grad.cpu().tolist(),
               errors=errors, beyond=DeviceBackend("npu:7").is_available())
        """
    )
    assert told["x"] == told["w"] == "npu:1" and told["grad"] == [[1.0, 1.0, 1.0]]
    assert told["errors"] == ["DeviceIndexError"] * 3
    assert told["beyond"] is False
