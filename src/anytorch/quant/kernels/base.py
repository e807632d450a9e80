"""What a way of computing is: it says whether it can serve a weight, and gets ready once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from anytorch.quant.tensor import QuantTensor

Run = Callable[[torch.Tensor], torch.Tensor]  # (m × columns) → (m × rows), in the input's dtype


@dataclass(frozen=True)
class Prepared:
    """A kernel with one weight's tensors bound to it."""

    run: Run
    extra_nbytes: int = 0  # held beyond the packed weight


class Kernel:
    """One has a `bind`, or a `prepare` of its own."""

    name: str
    batch_invariant = False  # True: the same input row gives the same bits whatever stands beside it in the batch
    rounds_inputs = False  # True: to bfloat16, which prefer="speed" alone allows

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        """Why this kernel cannot compute with that weight, `m` rows of inputs of that dtype; "" when it can. Cheap."""
        return ""

    def prepare(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        """Bind a weight. May convert it to a layout of its own, and says how many bytes that takes."""
        return self.bind(weight, None if bias is None else bias.detach().to(dtype), dtype)

    def bind(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        """The same with a bias that has the inputs' dtype."""
        raise NotImplementedError


def nbytes_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
