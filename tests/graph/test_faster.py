"""A compiled graph beside the traced one: the faster is called, and comparing them leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from anytorch.graph import compiler, faster
from anytorch.graph.faster import Faster


class Side:
    """A function that keeps what it was called with."""

    def __init__(self, function: Any, takes_s: float) -> None:
        self.function, self.takes_s, self.calls = function, takes_s, 0

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        ran.append(self)
        return self.function(*inputs)


ran: list[Side] = []


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock a side takes what it says."""
    ran.clear()
    honest = faster.stopwatch_of

    def seconds(run: Any, count: int) -> float:
        run()
        return ran[-1].takes_s

    monkeypatch.setattr(faster, "stopwatch_of", lambda device: replace(honest(device), seconds=seconds))


@pytest.mark.parametrize(("plain_s", "ours_s", "wins"), [(2.0, 1.0, "ours"), (1.0, 2.0, "plain"), (1.0, 1.0, "plain")])
def test_the_faster_one_is_called_from_the_second_call_on(plain_s: float, ours_s: float, wins: str) -> None:
    plain, ours = Side(lambda x: (x * 2,), plain_s), Side(lambda x: (x * 2,), ours_s)
    both, x = Faster(plain, ours), torch.ones(3)
    for _ in range(3):
        assert both(x)[0].tolist() == [2, 2, 2]
    count = (plain.calls, ours.calls)
    both(x)
    assert (plain.calls, ours.calls) == ((count[0], count[1] + 1) if wins == "ours" else (count[0] + 1, count[1]))


def test_what_a_graph_writes_to_is_written_once() -> None:
    """Running statistics, caches: comparing runs the graph many times."""

    def counts(x: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor]:
        seen.add_(1)
        return (x + seen,)

    both, seen = Faster(Side(counts, 1.0), Side(counts, 2.0)), torch.zeros(1)
    assert both(torch.zeros(1), seen)[0].item() == 1 and seen.item() == 1
    assert both(torch.zeros(1), seen)[0].item() == 2 and seen.item() == 2


def test_no_gradient_hook_or_random_number_is_used_up() -> None:
    weight = nn.Parameter(torch.ones(3))
    called = []
    weight.register_hook(lambda grad: called.append(1))
    function = lambda w: (w * torch.rand(3),)  # noqa: E731
    both = Faster(Side(function, 1.0), Side(function, 2.0))
    torch.manual_seed(3)
    (made,) = both(weight)
    after = torch.rand(1)
    torch.manual_seed(3)
    torch.testing.assert_close(made.detach(), torch.rand(3))
    assert torch.equal(after, torch.rand(1)) and not called and weight.grad is None
    made.sum().backward()
    assert called == [1] and weight.grad is not None


def test_gradients_are_part_of_what_is_timed() -> None:
    steps = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            steps.append(1)
            return grad * 2

    function = lambda x: (Counted.apply(x),)  # noqa: E731
    both = Faster(Side(function, 1.0), Side(function, 2.0))
    both(torch.ones(2, requires_grad=True))
    assert len(steps) >= 2 * faster.ROUNDS
    steps.clear()
    with torch.no_grad():
        Faster(Side(function, 1.0), Side(function, 2.0))(torch.ones(2, requires_grad=True))
    assert not steps


def test_tensors_made_in_inference_mode_are_written_once_too() -> None:
    def counts(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.add_(1),)

    plain, ours = Side(counts, 1.0), Side(counts, 2.0)
    with torch.inference_mode():
        both, x = Faster(plain, ours), torch.zeros(2)
        for number in (1, 2, 3):
            both(x)
            assert x.tolist() == [number, number]
    assert plain.calls > 2


def test_a_lack_of_memory_leaves_the_compiled_graph() -> None:
    def full(x: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("none left")

    ours = Side(lambda x: (x,), 2.0)
    both = Faster(Side(full, 1.0), ours)
    both(torch.ones(2))
    before = ours.calls
    both(torch.ones(2))
    assert ours.calls == before + 1


def test_while_commands_are_recorded_it_is_ours_whichever_is_faster() -> None:
    plain, ours = Side(lambda x: (x * 2,), 1.0), Side(lambda x: (x * 2,), 2.0)
    recording: list[bool] = []
    both, x = Faster(plain, ours, records=lambda: bool(recording)), torch.ones(3)
    for _ in range(2):
        both(x)
    assert ran[-1] is plain
    recording.append(True)
    both(x)
    assert ran[-1] is ours


def test_a_long_step_is_timed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a model waits for this: three calls of each in a round were minutes of a large one."""
    asked: list[int] = []
    honest = faster.stopwatch_of(torch.device("cpu"))

    def seconds(run: Any, count: int) -> float:
        asked.append(count)
        return ran[-1].takes_s if run() is None else 0.0

    monkeypatch.setattr(faster, "stopwatch_of", lambda device: replace(honest, seconds=seconds))
    Faster(Side(lambda x: (x * 2,), 0.5), Side(lambda x: (x * 2,), 0.001))(torch.ones(3))
    assert asked == [1, 1, *[1, faster.CALLS] * (faster.ROUNDS - 1)]


called: list[int] = []


@torch.library.custom_op("anytorch_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    called.append(1)
    return x * 2


@counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("where", ["straight", "in a branch"])
def test_an_op_that_may_do_more_than_compute_is_called_once_for_each_call(few: None, where: str) -> None:
    """A stranger's op may count, send or wait for others: nobody may call it to find out how long it takes."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x) * 2
        if where == "straight":
            return counted(x) + 1
        made: torch.Tensor = torch.cond(x.sum() > -1e9, lambda x: counted(x) + 1, lambda x: x - 1, (x,))
        return made

    torch._dynamo.reset()
    fast, x = torch.compile(function, backend=compiler.compile_graph), torch.ones(5)
    called.clear()
    for count in (1, 2):
        torch.testing.assert_close(fast(x), torch.tanh(x) * 4 + 1)
        assert len(called) == count
