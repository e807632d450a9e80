"""Recorded training steps, at the seam: a device that can record is played by a module that counts."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anytorch.forecast.training import recorded
from anytorch.forecast.training.loop import Run
from anytorch.forecast.training.recorded import REHEARSALS, RecordedStep


class FakeDevice:
    """What torch.cuda and its like have of it: streams, and graphs that replay what was recorded."""

    __name__ = "fake"

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.recording, self.replaying = fails, False, False
        device = self

        class FakeGraph:
            def replay(self) -> None:
                device.replayed()

        self.FakeGraph = FakeGraph
        self.replayed: Any = None

    class Stream:
        def __init__(self, device: Any = None) -> None: ...

        def wait_stream(self, other: Any) -> None: ...

    def current_stream(self) -> Any:
        return FakeDevice.Stream()

    @contextmanager
    def stream(self, stream: Any) -> Any:
        yield

    @contextmanager
    def graph(self, graph: Any, stream: Any) -> Any:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.recording = True
        yield
        self.recording = False


def played_by(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's module is the fake one; torch itself asks for others, once the webgpu device is registered."""
    real = torch.get_device_module
    monkeypatch.setattr(
        recorded.torch, "get_device_module", lambda given: device if str(given) == "cpu" else real(given)
    )


def step_on(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, wrong: float = 0.0) -> tuple[RecordedStep, list[str]]:
    """A step that adds its windows to a weight; `wrong` is what the recording adds besides."""
    played_by(device, monkeypatch)
    log: list[str] = []
    loss, weight, count = torch.zeros(()), torch.zeros(()), torch.zeros(())

    def compute(values: Tensor, stamps: Tensor) -> None:
        loss.copy_(values.sum() + stamps.sum())
        weight.add_(loss)
        count.add_(1)

    def work(values: Tensor, stamps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        log.append("recorded" if device.recording else "plain")
        if not device.recording:  # a recording computes nothing
            compute(values, stamps)
        return loss.clone() if not device.recording else loss, {"weight": weight, "count": count}

    told = [lambda word=word: log.append(word) for word in ("forgotten", "seeded")]
    step = RecordedStep(work, torch.device("cpu"), *told, [weight], lambda: [count])

    def replayed() -> None:
        log.append("replayed")
        assert step.inputs is not None
        compute(*step.inputs)
        weight.add_(wrong)

    device.replayed = replayed
    return step, log


def take(step: RecordedStep, steps: int) -> None:
    """The losses and the weight are those of plain steps, however they were computed."""
    weight = 0.0
    for number in range(steps):
        loss, parts = step(torch.full((2, 3), float(number)), torch.ones(2))
        weight += 6 * number + 2
        assert float(loss) == 6 * number + 2 and float(parts["weight"]) == weight
        assert float(parts["count"]) == number + 1


def test_the_first_step_is_rehearsed_and_then_every_step_is_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run that goes on after a kill computes its steps as an undisturbed one does: none of them plainly."""
    step, log = step_on(FakeDevice(), monkeypatch)
    take(step, 3)
    rehearsed = ["plain", "forgotten"] * REHEARSALS + ["seeded", "forgotten", "recorded", "replayed", "seeded"]
    assert log == rehearsed + ["replayed"] * 3
    assert not step.failed


def test_what_cannot_be_recorded_runs_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    step, log = step_on(FakeDevice(fails=True), monkeypatch)
    take(step, 3)
    assert log.count("plain") == REHEARSALS + 3 and "replayed" not in log
    assert step.failed == "RuntimeError: operation not permitted when stream is capturing"


def test_a_recording_that_does_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    step, log = step_on(FakeDevice(), monkeypatch, wrong=0.5)
    take(step, 3)
    assert log.count("replayed") == 1 and "WrongAnswer: its step ends 0.25" in step.failed


def test_a_recording_whose_random_numbers_repeat_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on webgpu: what it drew while recording is part of the recording."""
    device = FakeDevice()
    played_by(device, monkeypatch)
    for repeats in (False, True):
        weight, drawn = torch.zeros(8), torch.zeros(8)

        def work(
            values: Tensor, stamps: Tensor, weight: Tensor = weight, drawn: Tensor = drawn, repeats: bool = repeats
        ) -> tuple[Tensor, dict[str, Tensor]]:
            if device.recording or not (repeats and device.replaying):
                drawn.copy_(torch.rand(8))
            if not device.recording:
                weight.add_(drawn * values)
            return weight.sum(), {}

        step = RecordedStep(work, torch.device("cpu"), lambda: None, lambda: torch.manual_seed(5), [weight], list)

        def replayed(step: RecordedStep = step) -> None:
            device.replaying = True
            step.work(*(step.inputs or ()))
            device.replaying = False

        device.replayed = replayed
        step(torch.ones(1), torch.ones(1))
        assert ("WrongAnswer" in step.failed) == repeats


def test_an_optimiser_that_had_no_state_begins_with_none_after_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW makes its state in its first step; that one is a rehearsal."""
    device = FakeDevice()
    played_by(device, monkeypatch)

    def trained(rehearsed: bool) -> list[Tensor]:
        weight = torch.nn.Parameter(torch.arange(3.0))
        optimiser = torch.optim.AdamW([weight], lr=0.1)

        def work(values: Tensor, stamps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            with torch.enable_grad():  # a device replays what it was told, gradients and all
                loss = (weight * values).square().sum()
                if not device.recording:
                    loss.backward()
                    optimiser.step()
                    optimiser.zero_grad()
            return loss.detach(), {}

        def state() -> list[Tensor]:
            return list(optimiser.state[weight].values())

        step = RecordedStep(work, torch.device("cpu"), lambda: None, lambda: None, [weight], state)
        device.replayed = lambda: work(*(step.inputs or ()))
        for number in range(3):
            (step if rehearsed else work)(torch.full((3,), number + 1.0), torch.ones(1))
        assert not step.failed
        return [weight.detach(), *state()]

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("records", [False, True])
def test_a_state_from_a_device_that_records_goes_on_elsewhere(records: bool) -> None:
    """The rate as a tensor and the step counters' place belong to the device, not to the run."""
    weight = torch.nn.Parameter(torch.ones(3))
    theirs = torch.optim.AdamW([weight], lr=torch.tensor(0.1), betas=(0.8, 0.9), capturable=False)
    weight.grad = torch.ones(3)
    theirs.step()
    state = theirs.state_dict()
    state["param_groups"][0]["capturable"] = not records
    state["state"][0]["step"] = 1 if records else torch.tensor(1.0)
    rate = torch.tensor(0.5) if records else None
    ours = torch.optim.AdamW([weight], lr=0.5 if rate is None else rate, betas=(0.1, 0.1))
    Run._load_optimiser(SimpleNamespace(optimiser=ours, rate=rate), state)  # type: ignore[arg-type]
    (group,) = ours.param_groups
    assert group["betas"] == (0.8, 0.9) and group["capturable"] is False
    assert group["lr"] is rate if records else group["lr"] == 0.5
    kept = ours.state[weight]
    assert kept["step"].dtype == torch.float32 and float(kept["step"]) == 1.0
    torch.testing.assert_close(kept["exp_avg"], torch.full((3,), 0.2))
    ours.step()
    assert float(kept["step"]) == 2.0
