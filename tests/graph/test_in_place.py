"""Inputs that a compiled graph changes: written in place where nobody reads the old values, else when the graph is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anytorch.graph import compiler, in_place, tracing


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that change inputs in the graphs that are compiled."""
    seen: list[str] = []

    def watched(module: Any) -> Callable[..., Any]:
        made = in_place.with_changes(module)
        targets = [node.target for node in module.graph.nodes]
        seen.extend(getattr(one, "__name__", str(one)) for one in targets if one in in_place.IN_PLACE.values())
        assert not any(one is torch.ops.aten.copy_.default for one in targets)
        return made

    monkeypatch.setattr(compiler, "with_changes", watched)
    torch._dynamo.reset()
    return seen


def both(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Eager and compiled give the same results and leave the same inputs behind, twice."""
    compiled = torch.compile(function, backend=compiler.compile_graph, dynamic=False)
    ours, theirs = [one.clone() for one in tensors], [one.clone() for one in tensors]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(*ours), function(*theirs))
            torch.testing.assert_close(ours, theirs)


def slice_of_a_cache(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache[:, 2:3] = (x * 2).relu()
    return cache.sum(1) + x[:, 0]


def selected_row(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.select(1, 3).copy_((x * 2).relu()[:, 0])
    return cache.sum(1)


def at_positions(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    where = torch.tensor([1], device=cache.device)
    return cache.index_copy_(1, where, (x * 3).tanh()).sum(1)


@pytest.mark.parametrize(
    ("function", "name"),
    [(slice_of_a_cache, "write_slice"), (selected_row, "write_selected"), (at_positions, "index_copy_.default")],
)
def test_a_caches_new_row_is_written_into_it(function: Callable[..., Any], name: str, written: list[str]) -> None:
    torch.manual_seed(0)
    both(function, torch.randn(2, 5, 8), torch.randn(2, 1, 8))
    assert [one.removeprefix("aten::") for one in written] == [name]


def reads_before(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    old = cache * 2
    cache[:, 2:3] = x
    return old + cache


def from_its_own_values(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache[:, 2:3] = cache[:, 1:2] + x
    return cache * 1.5


def whole(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    old = cache * 3
    cache.add_(x)
    return (old + x).relu(), (cache * x).tanh()


@pytest.mark.parametrize("function", [reads_before, from_its_own_values, whole])
def test_who_reads_the_old_values_reads_them(function: Callable[..., Any], written: list[str]) -> None:
    torch.manual_seed(0)
    both(function, torch.randn(2, 5, 8), torch.randn(2, 1, 8))
    assert written == []


def test_two_caches_and_a_number_that_is_converted(written: list[str]) -> None:
    def step(keys: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        keys[:, 1:2] = x.exp()
        values[:, 1:2] = x.sin()
        return (keys.float() * values).sum(-1)

    torch.manual_seed(0)
    both(step, torch.randn(2, 4, 8).bfloat16(), torch.randn(2, 4, 8), torch.randn(2, 1, 8))
    assert written == ["write_slice"] * 2


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(y)


def copied_over(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * 2 + y).relu(), x.copy_(y.expand_as(x))


def written_and_returned(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.index_copy_(1, torch.tensor([1]), (x * 3).tanh()), x * 2


@pytest.mark.parametrize("function", [added, copied_over, written_and_returned])
def test_a_changed_input_may_be_returned(function: Callable[..., Any], written: list[str]) -> None:
    torch.manual_seed(0)
    both(function, torch.randn(2, 5, 8), torch.randn(2, 1, 8))


def test_a_row_that_is_put_into_a_new_tensor_is_part_of_a_kernel(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of x[:, 0] is one: models that read their first token have it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    inside: set[Any] = set()

    def watched(module: Any) -> Any:
        inside.update(node.target for node in module.graph.nodes)
        return tracing.traced(module)

    monkeypatch.setattr(compiler, "traced", watched)

    def first(x: torch.Tensor) -> torch.Tensor:
        return (x.relu()[:, 0] * 3).tanh()

    x = torch.randn(4, 5, 8)
    grads = []
    for function in (first, torch.compile(first, backend=compiler.compile_graph, dynamic=False)):
        given = x.clone().requires_grad_()
        function(given).square().sum().backward()
        grads.append(given.grad)
    torch.testing.assert_close(*grads)
    assert torch.ops.aten.select_scatter.default in inside
