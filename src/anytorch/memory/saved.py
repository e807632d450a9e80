"""What stands for a tensor that autograd saves: where to find it again, or its values in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Reference:
    """A saved tensor that lies in the ring or the room, as what it takes to make it again after these were overwritten."""

    step: str
    block: str | None  # None: in the room, where a step's blocks have their places
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Offloaded:
    """A saved activation in host memory (pinned, where it is not the device's own), and the device it belongs on."""

    values: torch.Tensor
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Offloaded:
        away = tensor.device.type != "cpu"
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=away)
        return Offloaded(values.copy_(tensor), tensor.device)

    def back(self) -> torch.Tensor:
        return self.values.to(self.device, non_blocking=True)
