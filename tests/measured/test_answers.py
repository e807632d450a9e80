"""What makes an answer wrong, whatever its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from anytorch.devices import stopwatch  # noqa: E402
from anytorch.errors import WrongAnswer  # noqa: E402
from anytorch.measured.answers import near  # noqa: E402
from anytorch.measured.engine import Candidate, measure  # noqa: E402
from anytorch.measured.verdict import Question  # noqa: E402

WANTED = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
RIGHT = WANTED.float()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (RIGHT.double(), "the answer is torch.float64, not torch.float32"),
        (RIGHT.half(), "the answer is torch.float16"),
        (RIGHT.reshape(4), "shape"),
        (RIGHT[:1], "shape (1, 2), not (2, 2)"),
        (RIGHT.new_empty(0), "shape (0,)"),
    ],
)
def test_another_shape_or_dtype(answer: Any, words: str) -> None:
    with pytest.raises(WrongAnswer) as caught:
        near(WANTED, dtype=torch.float32)(answer)
    assert words in str(caught.value)


def test_the_error_is_a_share_of_the_size() -> None:
    assert near(WANTED)(RIGHT) == 0.0
    assert near(WANTED)(RIGHT * 1.1) == pytest.approx(0.1)
    assert near(lambda: WANTED, part=lambda whole: whole["y"])({"y": RIGHT}) == 0.0
    largest = near(WANTED, distance=lambda found, wanted: float((found - wanted).abs().max()))
    assert largest(RIGHT + torch.tensor([0.0, 0.5])) == 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_wrong_where_a_number_is_wanted(bad: float) -> None:
    spoilt = RIGHT.clone()
    spoilt[0, 0] = bad
    assert not near(WANTED)(spoilt) <= 1e9
    masked = WANTED.clone()
    masked[0, 0] = bad  # as the caller's own data may be: nothing is asked there
    assert near(masked)(RIGHT) == 0.0 and near(masked)(RIGHT * 2) == pytest.approx(1.0)


def test_inputs_must_stay_as_they_were() -> None:
    x = torch.tensor([1.0, float("nan"), 3.0])
    before = x.clone()
    question = Question("kind", "case", "cpu")

    def spoils() -> Any:
        x.mul_(2)
        return RIGHT

    candidates = [Candidate.of("spoils", spoils), Candidate.of("right", lambda: RIGHT)]
    found = measure(question, candidates, near(WANTED, inputs=[x]), most_error=1e-3)
    assert found.chosen == "right" and found.trials[0].refused == "wrong: it changed its input 0"
    torch.testing.assert_close(x, before, equal_nan=True)


class FakeEvent:
    """As torch.cuda.Event: milliseconds between two records."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


def test_a_device_with_events_is_timed_by_its_own_clock() -> None:
    waits: list[int] = []

    def run() -> None:
        FakeEvent.now += 0.25

    seconds = stopwatch._by_events(FakeEvent, lambda: waits.append(1))
    assert seconds(run, 4) == pytest.approx(0.25) and len(waits) == 2


def test_a_device_is_timed_while_it_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events recorded on the first card would say nothing about the second."""
    current = [0]

    @contextmanager
    def scope(device: Any) -> Iterator[None]:
        current[0] = device.index
        yield
        current[0] = 0

    class Event(FakeEvent):
        def record(self) -> None:
            assert current == [1]
            super().record()

    module = SimpleNamespace(Event=Event, device=scope)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(stopwatch, "synchronize", lambda device: None)
    watch = stopwatch.stopwatch_of(torch.device("cuda", 1))
    assert watch.seconds(lambda: setattr(FakeEvent, "now", FakeEvent.now + 0.5), 2) == pytest.approx(0.5)
    assert current == [0]


def test_the_cpu_is_timed_by_the_wall_clock_and_a_lack_of_memory_passes() -> None:
    watch = stopwatch.stopwatch_of(torch.device("cpu"))
    assert watch.seconds(lambda: None, 10) < 0.1
    assert watch.is_passing(torch.OutOfMemoryError("CUDA out of memory")) and not watch.is_passing(RuntimeError("x"))
