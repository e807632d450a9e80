"""The back end of Triton without a GPU: which device a launch goes to, what compile threads see, what is read from disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anytorch
from anytorch import settings
from anytorch.graph.back import triton as back
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.triton_schedules import schedules
from anytorch.graph.ir import Builder
from anytorch.graph.loops import Kernel
from anytorch.graph.partition import partition


@pytest.fixture
def kernel() -> Kernel:
    b = Builder()
    cut = partition(b.graph([b.add("matmul", b.input((4, 64), "float32"), b.input((64, 32), "float32"))]), {})
    return cut.kernel(cut.groups[0])


class Cards:
    """Two cards, as `torch.cuda` shows them; the first is the current one."""

    def __init__(self) -> None:
        self.current, self.changes = 0, 0

    def current_device(self) -> int:
        return self.current

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        self.changes += 1
        try:
            yield
        finally:
            self.current = before


class Function:
    """A kernel as Triton's: launched and compiled for the current device. It keeps what it was called with."""

    def __init__(self, cards: Cards) -> None:
        self.cards, self.launched, self.compiled = cards, [], []  # type: ignore[var-annotated]
        self.gives: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.launched.append((self.cards.current, grid, args))
            return self.gives

        return launch

    def warmup(self, *args: Any, **options: Any) -> None:
        self.compiled.append(self.cards.current)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    made = Cards()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


@pytest.fixture
def function(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> Function:
    made = Function(cards)
    monkeypatch.setattr(back, "_module", lambda text, cache: SimpleNamespace(kernel=made))
    return made


def _on(index: int, kernel: Kernel, address: int = 0) -> list[Any]:
    """Stand-ins for tensors on a card that this machine does not have."""
    return [SimpleNamespace(device=torch.device("cuda", index), data_ptr=lambda: address) for _ in kernel.buffers]


@pytest.mark.parametrize("index", [0, 1])
def test_a_launch_goes_to_the_device_of_its_tensors(
    kernel: Kernel, cards: Cards, function: Function, index: int
) -> None:
    launch = back.prepare(kernel, schedules(kernel, {})[0])
    launch(_on(index, kernel), {})
    ((where, _, args),) = function.launched
    assert where == index and len(args) == len(kernel.buffers)
    assert cards.current == 0 and cards.changes == index  # what is current already is not changed: that takes time


class Compiled:
    """What Triton gives back of a launch: the compiled kernel, which can be launched itself."""

    packed_metadata = ()

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launched.append((grid, args))


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_a_kernel_that_was_launched_is_launched_directly(
    kernel: Kernel, function: Function, monkeypatch: pytest.MonkeyPatch, cuda: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    function.gives = compiled = Compiled()
    launch = back.prepare(kernel, schedules(kernel, {})[0])
    for address in (0, 512, 8, 8):
        launch(_on(0, kernel, address), {})
    (_, (programs,), args), *others = function.launched
    if cuda is None:  # ROCm, XPU, the interpreter
        assert len(others) == 3 and not compiled.launched
        return
    # Tensors that are aligned in another way need code of their own: Triton sees them first.
    assert len(others) == 1
    assert [(grid, len(args)) for grid, args in compiled.launched] == [((programs, 1, 1), len(args))] * 2


def test_counters_that_are_aligned_in_another_way_need_other_code(
    kernel: Kernel, function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = iter([0, 4, 64])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "empty", lambda count, dtype, device: SimpleNamespace(data_ptr=lambda: 0))
    monkeypatch.setattr(
        back.tickets, "take", lambda device, count: SimpleNamespace(data_ptr=partial(int, next(addresses)))
    )
    function.gives = compiled = Compiled()
    blocks = {**schedules(kernel, {})[0].blocks, "r0": 16}
    launch = back.prepare(kernel, replace(schedules(kernel, {})[0], blocks=blocks, parts=2))
    for _ in range(3):
        launch(_on(0, kernel), {})
    assert len(function.launched) == 2 and len(compiled.launched) == 1


def test_the_counters_of_a_launch_are_on_that_device_too(
    kernel: Kernel, function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def memory(device: torch.device, count: int, dtype: Any = None) -> Any:
        asked.append((device, count))
        return SimpleNamespace(data_ptr=lambda: 0)

    monkeypatch.setattr(back.tickets, "take", memory)
    monkeypatch.setattr(torch, "empty", lambda count, dtype, device: memory(device, count))
    blocks = {**schedules(kernel, {})[0].blocks, "r0": 16}
    shared = replace(schedules(kernel, {})[0], blocks=blocks, parts=2)
    back.prepare(kernel, shared)(_on(1, kernel), {})
    ((where, (programs,), args),) = function.launched
    assert where == 1 and len(args) == len(kernel.buffers) + 2
    slot = back.emit.slot(kernel, shared)
    assert asked == [(torch.device("cuda", 1), programs * slot), (torch.device("cuda", 1), programs // 2)]


@pytest.mark.parametrize("index", [0, 1])
def test_kernels_are_compiled_for_the_device_of_their_tensors(
    kernel: Kernel, cards: Cards, function: Function, index: int
) -> None:
    back.compile_ahead(kernel, schedules(kernel, {})[:1], _on(index, kernel), {})
    assert function.compiled == [index] and cards.current == 0


def test_threads_that_compile_see_the_settings_of_who_asked(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[Path, str, int]] = []

    def module(text: str, cache: Path) -> Any:
        seen.append((cache, settings.get("save_kernels"), threading.get_ident()))
        return SimpleNamespace(kernel=SimpleNamespace(warmup=lambda *args, **options: None))

    monkeypatch.setattr(back, "_module", module)
    tensors = [torch.ones(1) for _ in kernel.buffers]
    some: list[Schedule] = schedules(kernel, {})[:3]
    with anytorch.use(cache_dir=str(tmp_path), save_kernels="here"):
        back.compile_ahead(kernel, some, tensors, {})
    assert len(seen) == len(some) and {one[:2] for one in seen} == {(tmp_path, "here")}
    assert threading.get_ident() not in {one[2] for one in seen}


def test_what_cannot_be_compiled_is_said_and_the_rest_is(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    said: list[str] = []
    monkeypatch.setattr(back.log, "info", lambda text, *args: said.append(text % args))

    def warmup(*args: Any, num_warps: int, **options: Any) -> None:
        if not done:
            done.append("failed")
            raise RuntimeError("out of shared memory\nand more")
        done.append("compiled")

    monkeypatch.setattr(back, "_module", lambda text, cache: SimpleNamespace(kernel=SimpleNamespace(warmup=warmup)))
    monkeypatch.setattr(back.os, "cpu_count", lambda: 1)
    back.compile_ahead(kernel, schedules(kernel, {})[:3], [torch.ones(1) for _ in kernel.buffers], {})
    assert done == ["failed", "compiled", "compiled"] and "does not compile: ['out of shared memory']" in said[0]


def test_a_damaged_module_is_written_again_before_it_is_run(tmp_path: Path) -> None:
    text = "kernel = 'ours'\n"
    assert back._module.__wrapped__(text, tmp_path).kernel == "ours"
    (path,) = (tmp_path / "graph" / "triton").glob("*.py")
    path.write_text("kernel = 'theirs'\n")
    assert back._module.__wrapped__(text, tmp_path).kernel == "ours" and path.read_text() == text
