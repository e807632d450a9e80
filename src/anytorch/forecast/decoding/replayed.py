"""Record and replay the parts a forecast runs once (encoding, prompts, decoding), to save their launches.

A part is a function of tensors. Its inputs are copied to where the recording reads them; what it gives back is a copy, so
that the next call does not overwrite it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from anytorch.recorded.graphs import MOST_GRAPHS, Recorder


class Replayed:
    """Calls functions; those that come again with the same shapes are recorded and replayed, if `record`."""

    def __init__(self, device: torch.device, record: bool) -> None:
        self.device = device
        self.recorder = Recorder(device) if record else None
        self.inputs: dict[Hashable, list[Tensor]] = {}

    def __call__(self, name: Hashable, work: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """`work(*given)`, on the device. `name` stands for all that it depends on besides the tensors."""
        if self.recorder is None or self.recorder.failed:
            return work(*(part.to(self.device) for part in given))
        key = (name, *((part.shape, part.dtype) for part in given))
        kept = self.inputs.get(key)
        if kept is None:
            if len(self.inputs) >= MOST_GRAPHS:
                self.inputs.clear()
                self.recorder.clear()
            kept = self.inputs[key] = [part.to(self.device, copy=True) for part in given]
        else:
            for there, part in zip(kept, given, strict=True):
                there.copy_(part)
        return self.recorder.run(key, lambda: work(*kept)).clone()
