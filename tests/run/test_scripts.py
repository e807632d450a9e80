"""TorchScript that names CUDA: its graphs run on the stand-in."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning", "ignore::FutureWarning")


def helper(x: torch.Tensor) -> torch.Tensor:
    return x.cuda()


def everything(x: torch.Tensor, n: int) -> torch.Tensor:
    device = torch.device("cuda:0")
    y = torch.zeros(n, device="cuda") + helper(x)
    if n > 1:
        for _ in range(2):
            y = y + x.cuda() + x.to("cuda")
    return y + torch.arange(n, device=device) + torch.ones([n], device="cpu").to(device)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(self.inner(x.cuda()))

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2, device="cuda")


def test_functions(cuda: Any, fresh_ledger: Any) -> None:
    scripted = cuda.jit.script(everything)
    for _ in range(3):  # the first calls are profiled, later ones optimized
        y = scripted(cuda.ones(2), 2)
        assert y.is_cuda and y.tolist() == [6.0, 7.0]
    assert fresh_ledger.redirected["cuda in TorchScript"].count >= 4


def test_modules_and_what_is_saved_of_them(cuda: Any) -> None:
    layer = Layer().cuda()
    scripted = cuda.jit.script(layer)
    expected = layer(cuda.ones(1, 2))
    assert scripted(cuda.ones(1, 2)).is_cuda and cuda.allclose(scripted(cuda.ones(1, 2)), expected)
    saved = io.BytesIO()
    cuda.jit.save(scripted, saved)
    saved.seek(0)
    assert cuda.allclose(cuda.jit.load(saved)(cuda.ones(1, 2)), expected)


def test_functions_that_are_traced(cuda: Any) -> None:
    traced = cuda.jit.trace(lambda x: x.cuda() + cuda.ones(2, device="cuda"), cuda.ones(2))
    assert traced(cuda.zeros(2)).is_cuda and traced(cuda.zeros(2)).tolist() == [1.0, 1.0]


def test_a_device_that_is_not_there(cuda: Any) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        cuda.jit.script(elsewhere)


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    return x.to("cuda:9")
