"""Small builders of hardware facts and candidates for the tests of the device layer."""

from __future__ import annotations

from typing import Any

from anytorch.devices.types import Candidate, State
from anytorch.probe.facts import Cpu, Gpu, Hardware, Machine, Memory, TorchWheel

GIB = 2**30


def hardware(*gpus: Gpu, wheel: str | None = "2.13.0+cpu", **more: Any) -> Hardware:
    kinds: dict[str, dict[str, str]] = {
        "cu": {"cuda": "13.0"},
        "ro": {"hip": "7.0.0"},
        "xp": {"xpu": "20250301"},
    }
    torch = None
    if wheel is not None:
        torch = TorchWheel(version=wheel, path="/nowhere/torch", **kinds.get(wheel.partition("+")[2][:2], {}))
    return Hardware(
        machine=Machine("Linux", "6.1.0", "x86_64", "3.11.7", executable="/usr/bin/python3"),
        cpu=Cpu("AMD EPYC 7B13", "AuthenticAMD", 8, 4, 8, None, features=frozenset({"avx2"})),
        memory=Memory(32 * GIB, 16 * GIB, None, None),
        gpus=gpus,
        torch=torch,
        **more,
    )


def candidate(name: str = "cuda:0", state: State = State.USABLE, **more: Any) -> Candidate:
    backend, _, index = name.partition(":")
    priority = {"cuda": 700, "rocm": 700, "npu": 600, "xpu": 500, "mps": 400, "webgpu": 300, "cpu": 100}[backend]
    torch_type = "cuda" if backend == "rocm" else backend
    return Candidate(
        backend, torch_type, int(index or 0), more.pop("title", name), state, more.pop("priority", priority), **more
    )
