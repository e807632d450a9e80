"""LSTM, GRU and RNN modules against the CPU: outputs, and the gradients of the input and of every weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.webgpu.test_matmul import make

pytestmark = pytest.mark.native


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_modules_train(webgpu: Any, kind: Any, bias: bool) -> None:
    torch.manual_seed(0)
    module = kind(6, 8, num_layers=2, bias=bias, batch_first=True, bidirectional=bias)
    ours = copy.deepcopy(module).to("webgpu")
    x = make(3, 4, 6, grad=True)
    y = x.detach().to("webgpu").requires_grad_()
    expected, found = module(x)[0], ours(y)[0]
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    expected.sin().sum().backward()
    found.sin().sum().backward()
    assert y.grad is not None and x.grad is not None
    torch.testing.assert_close(y.grad.cpu(), x.grad, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(ours.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell])
def test_whether_there_are_biases_is_not_asked_of_the_tensors(
    webgpu: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`None in (bias, …)` compares a tensor with None, which torch refuses slowly; a cell runs for every step of a text."""
    torch.manual_seed(0)
    module = kind(6, 8)
    ours, x = copy.deepcopy(module).to("webgpu"), make(3, 6)
    compared: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "__eq__", lambda *operands: compared.append(operands) or NotImplemented)
    found = ours(x.to("webgpu"))
    monkeypatch.undo()
    assert not compared
    first, expected = (one[0] if isinstance(one, tuple) else one for one in (found, module(x)))
    torch.testing.assert_close(first.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell])
def test_cells_of_halves(webgpu: Any, kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = kind(6, 8)
    x = make(3, 6)
    expected = module(x)
    found = copy.deepcopy(module).to("webgpu", dtype)(x.to("webgpu", dtype))
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.cpu().float(), theirs, rtol=3e-2, atol=3e-2)


def test_the_cell_state_may_be_all_that_is_used(webgpu: Any) -> None:
    torch.manual_seed(0)
    module = torch.nn.LSTMCell(4, 5)
    ours = copy.deepcopy(module).to("webgpu")
    x = make(2, 4)
    module(x)[1].sum().backward()
    ours(x.to("webgpu"))[1].sum().backward()
    for mine, theirs in zip(ours.parameters(), module.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)
