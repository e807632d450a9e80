"""Tiers and their training where anything fails at any moment: our error, no weight lost, nothing left, and on it goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faulty_disk import Counter, each, failing, failing_allocations, failing_threads, left_since

import anytorch
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import AnytorchError, ModelError, NoThread
from anytorch.memory import TieredOptimizer, resume_training, save_training
from anytorch.memory.reader import File, Reader
from anytorch.memory.spill import Spill
from anytorch.memory.types import Speeds

WIDTH, LAYERS = 32, 2
ON_DEVICE = 2 * 4096 + 64  # bytes: one layer at a time, in whole pages
Fault = Callable[[int], AbstractContextManager[Counter]]
FAULTS: dict[str, Callable[[Path], Fault]] = {
    "a full disk": lambda folder: partial(failing, within=folder),
    "a disk that does not read": lambda folder: partial(failing, within=folder, reads=True),
    "one thread refused": lambda _: failing_threads,
    "no more threads": lambda _: partial(failing_threads, on=True),
    "no memory": lambda _: failing_allocations,
}


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def fit(model: torch.nn.Module, folder: Path) -> None:
    anytorch.memory.fit(model, "cpu", device_budget=ON_DEVICE, disk=str(folder), speeds=Speeds(10.0, 2.0))


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("kind", FAULTS)
def test_a_pass_from_disk(kind: str, tmp_path: Path) -> None:
    """Fitting, two passes and bringing the weights back."""
    disk, x, plain = tmp_path / "disk", torch.ones(2, WIDTH), made()
    with torch.no_grad():
        expected = plain(x)
    told = 0
    for attempt in each(FAULTS[kind](disk)):
        model, before, doing = made(), set(threading.enumerate()), "fit"
        with attempt, torch.no_grad():
            try:
                fit(model, disk)
                doing = "pass"
                assert torch.equal(model(x), expected) and torch.equal(model(x), expected), str(attempt)
                doing = "unfit"
                anytorch.memory.unfit(model)
                doing = ""
            except Exception as exc:  # noqa: BLE001
                # What the model itself computes is torch's; its error is the one that `with_rescue` knows.
                assert isinstance(exc, AnytorchError) or (doing == "pass" and is_out_of_memory(exc)), (
                    f"{attempt}: {exc!r}"
                )
                told += 1
        with torch.no_grad():
            assert torch.equal(model(x), expected), f"{attempt}: not the model it was"
        if doing in ("pass", "unfit"):
            anytorch.memory.unfit(model)
        assert same(weights(model), weights(plain)), f"{attempt}: other weights"
        assert not left_since(before), f"{attempt} left a thread"
        if doing:
            assert not left_in(disk), f"{attempt} left files"
        elif left_in(disk):  # what could not be removed
            assert attempt.counter.name in ("unlink", "rmdir", "open")
            Spill(disk).close()
            assert not left_in(disk), f"{attempt}: the next start does not remove it"
    # What is read ahead and fails is read again, so of reads fewer are told.
    assert told > (0 if "thread" in kind else 3 if "read" in kind else 10)


@pytest.mark.parametrize("kind", list(FAULTS)[1:])
def test_loading_from_files(kind: str, tmp_path: Path) -> None:
    """A model that runs from its checkpoint: the checkpoint is only read, and the next load is right."""
    from safetensors.torch import save_file

    plain, x, told = made(), torch.ones(2, WIDTH), 0
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    stored = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        expected = plain(x)
    for attempt in each(FAULTS[kind](tmp_path)):
        before, doing = set(threading.enumerate()), "load"
        model: torch.nn.Module | None = None
        try:
            with attempt, torch.no_grad():
                model = anytorch.memory.load(
                    made, "cpu", weights=tmp_path, device_budget=ON_DEVICE, speeds=Speeds(10.0, 2.0)
                )
                doing = "pass"
                assert torch.equal(model(x), expected)
        except Exception as exc:  # noqa: BLE001
            assert isinstance(exc, AnytorchError) or (doing == "pass" and is_out_of_memory(exc)), f"{attempt}: {exc!r}"
            told += 1
        if model is not None:
            with torch.no_grad():
                assert torch.equal(model(x), expected), str(attempt)
            anytorch.memory.fitted(model).close()
        assert not left_since(before), f"{attempt} left a thread"
    assert told > (0 if "thread" in kind else 3) and (tmp_path / "model.safetensors").read_bytes() == stored


def test_a_long_read_by_fewer_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of several parts is read by several threads, or by those that there are; nothing of a failed read follows."""
    asked, start, read = threading.Event(), Reader.start, File.read

    def started(self: Reader, *given: Any) -> Any:
        asked.clear()  # a thread that is done with its part would read the next one's, too
        try:
            return start(self, *given)
        finally:
            asked.set()

    def waited(self: File, *given: Any) -> None:
        assert asked.wait(120)
        read(self, *given)

    monkeypatch.setattr(Reader, "start", started)
    monkeypatch.setattr(File, "read", waited)
    tensor = torch.arange(3 * 2**20, dtype=torch.int32)
    spill = Spill(tmp_path)
    stored = spill.write({"a": tensor})
    for on in (False, True):
        for attempt in each(partial(failing_threads, on=on)):
            reader = Reader()
            with attempt:
                try:
                    assert torch.equal(reader.read_tensors(stored.values())["a"], tensor), str(attempt)
                except NoThread:
                    assert attempt.at == 1
            assert torch.equal(reader.read_tensors(stored.values())["a"], tensor), str(attempt)
            reader.close()
        assert attempt.at > 2
    spill.close()


# --- training ----------------------------------------------------------------------------------------------------------


# A step from disk needs no new thread, since its readers' are there; one in host memory needs no disk.
JOBS = [("disk", kind) for kind in FAULTS if "thread" not in kind] + [("host", kind) for kind in list(FAULTS)[2:]]


class Training:
    """Two layers whose weights, gradients and states rest on disk, or in host memory and are updated by a thread."""

    def __init__(self, folder: Path, home: str) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
        layer = (WIDTH * WIDTH + WIDTH) * 4
        budgets: dict[str, Any] = {
            "disk": {"device_budget": 7 * layer, "reserve": 5 * layer},
            "host": {"device_budget": ON_DEVICE, "host_budget": 60 * layer, "host_reserve": 8 * layer},
        }[home]
        anytorch.memory.fit(self.model, "cpu", disk=str(folder), speeds=Speeds(10.0, 2.0), **budgets)
        assert set(anytorch.memory.fitted(self.model).plan.homes.values()) == {home}
        overlap: Any = "forward" if home == "host" else None
        self.optimizer = TieredOptimizer(self.model, torch.optim.AdamW, lr=1e-2, overlap=overlap)

    def step(self, number: int) -> None:
        self.model(torch.full((2, WIDTH), float(number))).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.wait()

    def state(self) -> dict[str, torch.Tensor]:
        states = self.optimizer.state_dict()["state"]
        moments = {f"{index} {key}": value for index, one in states.items() for key, value in one.items()}
        return {**weights(self.model), **moments}


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("home", "kind"), JOBS)
def test_a_step_of_training(home: str, kind: str, every: int, tmp_path: Path) -> None:
    """A step that fails is told, not taken again nor saved, and training goes on from its checkpoint to the same end."""
    disk, run, before = tmp_path / "disk", tmp_path / "run", set(threading.enumerate())
    training = Training(disk, home)
    training.step(1)
    save_training(run, training.optimizer, step=1)
    first = training.state()
    training.step(2)
    second, told = training.state(), 0
    for attempt in each(FAULTS[kind](disk), step=every):
        found = resume_training(run, training.optimizer)
        assert found is not None and found["step"] == 1 and same(training.state(), first), str(attempt)
        failure: Exception | None = None
        with attempt:
            try:
                training.step(2)
            except Exception as exc:  # noqa: BLE001
                failure = exc
        if failure is None:
            assert same(training.state(), second), f"{attempt}: nothing was said, and the weights are others"
            continue
        told += 1
        assert isinstance(failure, AnytorchError) or is_out_of_memory(failure), f"{attempt}: {failure!r}"
        if same(weights(training.model), {name: first[name] for name in weights(training.model)}):
            continue
        assert isinstance(failure, ModelError) and "others are not" in failure.message, f"{attempt}: {failure!r}"
        for again in (training.optimizer.step, partial(save_training, run, training.optimizer, step=2)):
            with pytest.raises(ModelError, match="others are not"):
                again()
    assert same(training.state(), second)
    assert told
    training.optimizer.close()
    anytorch.memory.unfit(training.model)
    assert not left_in(disk) and not left_since(before)


def test_resuming_that_fails_is_neither_gone_on_with_nor_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(tmp_path / "disk", "disk")
    training.step(1)
    save_training(run, training.optimizer, step=1)
    first, told = training.state(), 0
    for attempt in each(partial(failing, within=tmp_path / "disk"), step=7):
        training.step(2)
        with attempt:
            try:
                resume_training(run, training.optimizer)
            except AnytorchError:
                told += 1
            else:
                assert same(training.state(), first), str(attempt)
                continue
        with pytest.raises(ModelError, match="resuming was interrupted"):
            training.step(2)
        with pytest.raises(ModelError, match="resuming was interrupted"):
            save_training(run, training.optimizer, step=2)
        resume_training(run, training.optimizer)
        assert same(training.state(), first), str(attempt)
    assert told > 1 and same(training.state(), first)
    anytorch.memory.unfit(training.model)
