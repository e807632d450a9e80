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
