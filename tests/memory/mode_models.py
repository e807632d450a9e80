"""The model that tests of the modes run, and the fixture that puts torch back after each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from anytorch_compat import modes as vb
from torch import nn

EXACT: dict[str, Any] = {"mixed_precision": False, "matmul_precision": "highest"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Model(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def small_model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(autouse=True)
def off_again(quick_packed_layers: None) -> Any:
    before = patched()
    yield
    vb.disable()
    assert patched() == before


def patched() -> tuple[Any, ...]:
    module = nn.Module
    return module.__call__, module.to, module.train, module.requires_grad_, nn.utils.stateless._functional_call
