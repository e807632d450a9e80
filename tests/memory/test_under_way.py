"""A step that is still under way, fails or is broken off: nothing is written over, and nobody waits for ever."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anytorch
from anytorch.errors import ModelError, NoThread
from anytorch.memory.training import TieredOptimizer

WIDTH = 64
LAYERS = 6
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
INPUTS = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(k)) for k in range(3)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + torch.tanh(self.inner(x))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, *, without: int | None = None) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == without else layer(x)
        return x


def fit(folder: Path, factory: Any = torch.optim.SGD, **options: Any) -> tuple[Model, Model, TieredOptimizer]:
    """The plain model, and one with the same weights of which most rest in host memory."""
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    anytorch.memory.fit(
        model, "cpu", device_budget=3 * LAYER, host_budget=60 * LAYER, host_reserve=8 * LAYER, disk=folder / "disk"
    )
    optimizer = TieredOptimizer(model, factory, lr=0.1, **options)
    assert len(optimizer.fitted.block_homes.host) >= 3
    return plain, model, optimizer


def slow_down(optimizer: TieredOptimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = optimizer._update_at_home

    def slowly(*given: Any) -> None:
        time.sleep(0.03)
        real(*given)

    monkeypatch.setattr(optimizer, "_update_at_home", slowly)


def loss_of(model: nn.Module, number: int = 0, **options: Any) -> torch.Tensor:
    return (model(INPUTS[number], **options) ** 2).mean()


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def within(seconds: float, do: Callable[[], Any]) -> bool:
    """Does it come to an end, with or without an error? The thread of one that does not is left behind."""

    def attempt() -> None:
        try:
            do()
        except ModelError:
            pass

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


# --- new weights while a step is under way -----------------------------------------------------------------------------


def test_loaded_weights_stay_after_a_step_that_was_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, optimizer = fit(tmp_path, overlap="forward")
    slow_down(optimizer, monkeypatch)
    loss_of(model).backward()
    optimizer.step()
    model.load_state_dict(plain.state_dict())
    optimizer.wait()
    assert_same(model, plain.state_dict())


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_resuming_while_a_step_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: Any) -> None:
    _, model, optimizer = fit(tmp_path, torch.optim.AdamW, overlap=overlap)
    anytorch.memory.activations(model, "checkpoint")
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    anytorch.memory.save_training(tmp_path / "run", optimizer, step=1)
    weights, states = copied(model), optimizer.state_dict()["state"]
    slow_down(optimizer, monkeypatch)
    loss_of(model, 1).backward()
    optimizer.step()
    assert anytorch.memory.resume_training(tmp_path / "run", optimizer) == {"step": 1, "extra": None}
    optimizer.wait()
    assert_same(model, weights)
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, states[index][key]) for key, value in state.items())


def test_resuming_after_a_step_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, optimizer = fit(tmp_path, overlap="forward")
    anytorch.memory.save_training(tmp_path / "run", optimizer, step=0)

    def fail(*_: Any) -> None:
        raise MemoryError("no room for a step")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_update_at_home", fail)
        loss_of(model).backward()
        optimizer.step()
        assert anytorch.memory.resume_training(tmp_path / "run", optimizer) == {"step": 0, "extra": None}
    assert_same(model, plain.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for network, updated in ((plain, reference), (model, optimizer)):  # without what the failed step had gathered
        loss_of(network, 1).backward()
        updated.step()
    assert_same(model, plain.state_dict())


def test_a_block_has_one_writer_at_a_time(tmp_path: Path) -> None:
    _, _, optimizer = fit(tmp_path)
    mover = optimizer.fitted.mover
    name = next(iter(optimizer.fitted.block_homes.host))
    mover.begin_change(name)
    second = threading.Event()
    thread = threading.Thread(target=lambda: (mover.begin_change(name), second.set()), daemon=True)
    thread.start()
    assert not second.wait(0.1)
    mover.end_change(name)
    assert second.wait(120)
    assert not within(0.1, lambda: mover.wait_unchanged(name))  # it is the second one's now
    mover.end_change(name)
    assert within(120, lambda: mover.wait_unchanged(name))


# --- the optimizer's thread --------------------------------------------------------------------------------------------


def test_a_device_that_fails_while_gradients_come_from_it(tmp_path: Path) -> None:
    _, model, optimizer = fit(tmp_path, overlap="forward")

    class Event:
        def query(self) -> bool:
            raise RuntimeError("the device has an error")

    loss_of(model).backward()
    optimizer.gradients.copied = dict.fromkeys(optimizer.gradients.copied, Event())
    optimizer.step()
    assert within(120, lambda: loss_of(model))  # nobody waits for ever, whatever they ask for
    assert within(120, lambda: optimizer.fitted.running.resting(next(iter(optimizer.fitted.block_homes.host))))
    with pytest.raises(ModelError, match="others are not: the device has an error"):
        optimizer.wait()
    optimizer.close()


def test_a_system_without_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, optimizer = fit(tmp_path, overlap="forward")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loss_of(model).backward()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(NoThread, match="can't start new thread"):
            optimizer.step()
    assert within(120, optimizer.wait)
    assert within(120, lambda: loss_of(model))
    assert_same(model, plain.state_dict())
    optimizer.step()  # the gradients are still there
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss_of(plain).backward()
    reference.step()
    assert_same(model, plain.state_dict())


PROGRAM = """
import sys, time, torch, anytorch
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64)) for _ in range(6)])
anytorch.memory.fit(model, "cpu", device_budget=50_000, host_budget=1_000_000, host_reserve=140_000, disk=sys.argv[1])
optimizer = anytorch.memory.TieredOptimizer(model, torch.optim.AdamW, overlap="forward", lr=0.1)
real = optimizer._update_at_home

def slowly(*given):
    time.sleep(0.05)
    real(*given)
    print("updated", flush=True)

optimizer._update_at_home = slowly
model(torch.ones(1, 64)).sum().backward()
optimizer.step()
print("blocks", len(optimizer.fitted.block_homes.host), flush=True)
"""


@pytest.mark.long
def test_a_program_that_ends_after_its_last_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert sorted(lines) == [f"blocks {len(lines) - 1}", *["updated"] * (len(lines) - 1)] and len(lines) > 3


# --- asked for something while the thread works ------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["step", "zero_grad"])
def test_an_update_that_ends_while_the_next_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    """All updates end between the two looks, at what is queued and at what has gradients, whichever comes first."""
    plain, model, optimizer = fit(tmp_path, overlap="forward")
    go = threading.Event()
    real, blocks, names = optimizer._update_at_home, optimizer.gradients.blocks, optimizer._updates.names

    def at_the_gate(*given: Any) -> None:
        assert go.wait(120)
        real(*given)

    def then_end(look: Callable[[], Any]) -> Callable[[], Any]:
        def looked() -> Any:
            found = look()
            go.set()
            optimizer._updates.wait()
            return found

        return looked

    monkeypatch.setattr(optimizer, "_update_at_home", at_the_gate)
    loss_of(model).backward()
    optimizer.step()
    monkeypatch.setattr(optimizer.gradients, "blocks", then_end(blocks))
    monkeypatch.setattr(optimizer._updates, "names", then_end(names))
    getattr(optimizer, ask)()
    optimizer.wait()
    loss_of(plain).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(model, plain.state_dict())


def test_clipping_counts_no_gradients_of_a_step_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer takes no part in the second pass, so nobody waits for its update from the first."""
    plain, model, optimizer = fit(tmp_path, overlap="forward", clip_norm=0.01)
    block = next(
        name for name, found in optimizer._trained.blocks.items() if found[0][0].startswith(f"layers.{LAYERS - 1}.")
    )
    assert block in optimizer.fitted.block_homes.host
    go = threading.Event()
    add = optimizer._updates.add

    def last_one_waits(name: str, do: Callable[[], None], ready: Callable[[], bool]) -> None:
        add(name, do, go.is_set if name == block else ready)  # not a gate in `do`: the others would stand behind it

    monkeypatch.setattr(optimizer._updates, "add", last_one_waits)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 1, without=LAYERS - 1).backward()
    threading.Timer(0.2, go.set).start()
    optimizer.step()
    optimizer.wait()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number, without in ((0, None), (1, LAYERS - 1)):
        reference.zero_grad()
        loss_of(plain, number, without=without).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        reference.step()
    assert optimizer.last_norm == float(norm)
    assert_same(model, plain.state_dict())


# --- a backward that is broken off -------------------------------------------------------------------------------------


class Interrupted(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def break_off(module: nn.Module, make_loss: Callable[[], torch.Tensor]) -> None:
    """A backward that ends where it comes to this module."""
    handle = module.register_forward_hook(lambda _, given, result: Interrupted.apply(result))
    with pytest.raises(KeyboardInterrupt):
        make_loss().backward()
    handle.remove()


@pytest.mark.parametrize("way", ["resume_training", "load_state_dict"])
def test_going_back_after_a_backward_that_was_broken_off(tmp_path: Path, way: str) -> None:
    plain, model, optimizer = fit(tmp_path, torch.optim.AdamW, overlap="backward")
    anytorch.memory.activations(model, "checkpoint")
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)

    def both(number: int) -> None:
        for network, updated in ((plain, reference), (model, optimizer)):
            loss_of(network, number).backward()
            updated.step()
            updated.zero_grad()
        assert_same(model, plain.state_dict())

    both(0)
    anytorch.memory.save_training(tmp_path / "run", optimizer, step=1)
    break_off(model.layers[1], lambda: loss_of(model, 1))
    assert optimizer._early, "no block was updated before the backward was broken off"
    if way == "resume_training":
        anytorch.memory.resume_training(tmp_path / "run", optimizer)
    else:
        optimizer.zero_grad()
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(reference.state_dict())
    both(1)
    seen = []
    after = optimizer._after_backward
    optimizer.fitted.running.after_backward = lambda step: (seen.append(step), after(step))
    both(2)
    assert len(seen) == len(set(seen)) >= 3  # updated during backward again, each once


def test_a_step_after_a_backward_that_was_broken_off_leaves_nothing_of_it(tmp_path: Path) -> None:
    plain, model, optimizer = fit(tmp_path, overlap="backward")
    anytorch.memory.activations(model, "checkpoint")
    running = optimizer.fitted.running
    break_off(model.layers[1].inner, lambda: loss_of(model))
    assert running._again, "backward was not broken off within a layer that it computed again"
    optimizer.step()  # with the gradients there are
    optimizer.zero_grad()
    assert not running._again and not running.forwards
    model.load_state_dict(plain.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for network, updated in ((plain, reference), (model, optimizer)):
        loss_of(network, 1).backward()
        updated.step()
    assert_same(model, plain.state_dict())
