"""The stand-in as a whole: it puts everything back, nests, holds for threads, and changes nothing where CUDA is."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import anytorch
from anytorch.devices.choose import resolve
from anytorch.run import stand_in as module

OWNERS = (
    *(torch, torch.Tensor, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs),
    *(torch.cuda.nvtx, torch.cuda.profiler, torch.nn.Module, torch.nn.DataParallel, torch.utils.data.DataLoader),
    *(torch.nn.parallel.DistributedDataParallel, torch.amp.autocast_mode, torch.amp.autocast_mode.autocast, torch.amp),
    *(torch.amp.grad_scaler.GradScaler, torch.distributed, torch.distributed.distributed_c10d, torch.fft),
    *(torch.UntypedStorage, torch.TypedStorage, torch.backends.cuda),
)


def state() -> list[Any]:
    registered = list(torch.serialization._package_registry)
    return [{n: id(v) for n, v in vars(owner).items()} for owner in OWNERS] + [registered, list(sys.meta_path)]


def test_everything_is_put_back(device: str, cpu_wheel: None) -> None:
    torch.cuda.memory, torch.jit._builtins._get_builtin_table()  # loaded by anybody who asks
    before = state()
    with anytorch.stand_in(device):
        assert state() != before and torch.cuda.is_available()
    assert state() == before and not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(2).cuda()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.empty(2, device="cuda:0")


def test_after_an_error_too(cpu_wheel: None) -> None:
    before = state()
    with pytest.raises(KeyError), anytorch.stand_in("cpu"):
        raise KeyError("of the program")
    assert state() == before


def test_nested(device: str, cpu_wheel: None) -> None:
    with anytorch.stand_in("cpu") as outer:
        assert module.in_force() is outer
        with anytorch.stand_in(device) as inner:
            assert module.in_force() is inner
            assert torch._C.TensorBase.device.__get__(torch.ones(2).cuda()).type == device
        assert module.in_force() is outer and torch.cuda.is_available()
        assert torch._C.TensorBase.device.__get__(torch.ones(2).cuda()).type == "cpu"
    assert module.in_force() is None and not torch.cuda.is_available()


def test_ended_in_another_order(cpu_wheel: None) -> None:
    before = state()
    first, second = anytorch.stand_in("cpu").start(), anytorch.stand_in("cpu").start()
    first.stop()
    assert torch.cuda.is_available() and module.in_force() is second
    second.stop()
    second.stop()
    assert state() == before


def test_threads(cpu_wheel: None) -> None:
    """It holds for the process: a thread sees it, and threads that begin and end blocks leave nothing behind."""
    before = state()
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                with anytorch.stand_in("cpu"):
                    assert torch.zeros(2, device="cuda").sum().item() == 0
        except BaseException as exc:  # noqa: BLE001  (told below)
            wrong.append(exc)

    with anytorch.stand_in("cpu"):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and state() == before


def test_cuda_itself_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve("cpu")
    real = replace(found, chosen=replace(found.chosen, torch_type="cuda", backend="cuda"))
    monkeypatch.setattr(module, "resolve", lambda device: real)
    before = state()
    with anytorch.stand_in("cuda") as standing:
        assert state() == before and standing.place is None


def test_torch_itself_sees_the_truth(cuda: Any, device: str) -> None:
    x = cuda.ones(2, device="cuda")
    assert f"device='{device}" in repr(x) or device == "cpu"
    assert type(cuda.utils.data.default_collate([x, x])) is cuda.Tensor


def test_compiled_functions(cuda: Any, device: str) -> None:
    if device != "cpu":
        pytest.skip("the device's own compiler has tests of its own, in tests/webgpu")

    def f(x: Any) -> Any:
        mask = cuda.zeros(x.shape, device=x.device) + cuda.ones(3) + cuda.full((3,), 2.0, device="cuda")
        return x.relu() + mask

    compiled = cuda.compile(f, backend="eager", fullgraph=True)
    assert compiled(cuda.ones(3, device="cuda")).tolist() == [4.0, 4.0, 4.0]
    cuda._dynamo.reset()
