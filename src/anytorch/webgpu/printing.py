"""`print(tensor)`: torch works out widths and precisions in float64, which no shader has, with a dozen small ops."""

from __future__ import annotations

from typing import Any

import torch

from anytorch.webgpu.tensors import is_ours


def patch_formatter() -> None:
    """Look at the numbers on the CPU. The formatter is given at most a thousand of them: large tensors are cut before."""
    formatter: Any = torch._tensor_str._Formatter
    original = formatter.__init__

    def initialise(self: Any, tensor: torch.Tensor) -> None:
        original(self, tensor.detach().cpu() if is_ours(tensor) else tensor)

    formatter.__init__ = initialise
