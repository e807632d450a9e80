"""Unpacked tensors are unbound, as eager torch does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anytorch.graph.unpacked import with_unbinds


def traced(work: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, torch.fx.GraphModule]:
    kept: list[torch.fx.GraphModule] = []

    def back_end(module: torch.fx.GraphModule, _: Any) -> Any:
        kept.append(with_unbinds(module))
        return module.forward

    torch._dynamo.reset()
    made = torch.compile(work, backend=back_end, fullgraph=True)(*inputs)
    return made, kept[0]


def unbinds(module: torch.fx.GraphModule) -> int:
    return sum(node.target is torch.unbind for node in module.graph.nodes)


def test_unpacking_is_one_unbind_with_the_same_values_and_gradients() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * 2).permute(1, 0, 2)
        return q * k + v.exp()

    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    made, module = traced(work, x)
    want = work(x)
    assert unbinds(module) == 1
    torch.testing.assert_close(made, want)
    torch.testing.assert_close(torch.autograd.grad(made.sum(), x), torch.autograd.grad(want.sum(), x))


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x[0] + x[1],  # a part is left out
        lambda x: (x * 2)[0] + (x * 2)[-1],  # numbers from the end
        lambda x: x.sin()[0, 1] + x.cos()[1:].sum(),
        lambda x: (lambda y: y[0] * y[1] * y[2] + y.sum())(x * 2),  # the whole is used as well
        lambda x: (lambda y: y[0].mul_(2) + y[1] + y[2])(x * 2),  # parts of an unbind may not be written to
        lambda x: (lambda a, b: a + b)(*torch.split(x * 2, [1, 2], 1)),  # parts of a tuple, not of a tensor
    ],
)
def test_other_indexings_stay_as_they_are(work: Callable[..., Any]) -> None:
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    made, module = traced(work, x)
    assert not unbinds(module)
    torch.testing.assert_close(made, work(x))


def test_a_graph_that_adds_in_place_stays_as_it_is() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        a, b = x * 2
        y = a * b
        y += 1
        return y

    assert not unbinds(traced(work, torch.randn(2, 3))[1])
