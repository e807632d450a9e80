"""What an optimizer keeps for the parameters of streamed blocks: tensors on a shelf beside each block, and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anytorch.memory.shelf import Shelf

if TYPE_CHECKING:
    from anytorch.memory.handle import Fitted

OF = "::"  # between a parameter's path and the name of its state


class States(Shelf):
    """A shelf whose tensors are called "path::state"; `numbers` has the state that is no tensor, by block and path."""

    def __init__(self, fitted: Fitted) -> None:
        super().__init__(fitted, "optimizer state")
        self.numbers: dict[str, dict[str, dict[str, Any]]] = {}

    def of(self, block: str, path: str) -> dict[str, Any]:
        """One parameter's state; {} if it has none yet."""
        return self._of(block, path, self.take(block))

    def _of(self, block: str, path: str, stored: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        prefix = f"{path}{OF}"
        found: dict[str, Any] = dict(self.numbers.get(block, {}).get(path, {}))
        found.update({key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)})
        return found

    def give(self, block: str, by_path: Mapping[str, Mapping[str, Any]]) -> None:
        """States of some of a block's parameters, as the shelf's own; what else the block has stays."""
        tensors = dict(self.take(block))
        for path, state in by_path.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{path}{OF}{key}"] = value
                else:
                    self.numbers.setdefault(block, {}).setdefault(path, {})[key] = value
        if tensors:
            self.put(block, tensors)

    def lend(self, block: str, optimizer: torch.optim.Optimizer, shadows: Mapping[str, nn.Parameter]) -> None:
        """Let an optimizer over stand-ins of a block's parameters work with their states."""
        stored = self.take(block)
        for path, shadow in shadows.items():
            state = self._of(block, path, stored)
            if state:
                optimizer.state[shadow] = state

    def take_back(self, block: str, optimizer: torch.optim.Optimizer, shadows: Mapping[str, nn.Parameter]) -> None:
        self.give(block, {path: optimizer.state.get(shadow, {}) for path, shadow in shadows.items()})

    def clear(self) -> None:
        super().clear()
        self.numbers.clear()
