"""`pin_memory()` and `DataLoader(pin_memory=True)` go on working once the device is registered.

torch asks the one accelerator of the process for page-locked memory, and a device written in Python has no way to answer:
without this, every pinned DataLoader in the process raises. WebGPU uploads through staging buffers of its own and gains
nothing from locked pages, so an ordinary copy is what it needs.
"""

from __future__ import annotations

import warnings

import torch

_said = False


def register(library: torch.library.Library) -> None:
    library.impl("_pin_memory", pin, "CPU")


def pin(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A plain copy; the first one says so, for a process that also uses another GPU loses a little by it."""
    global _said
    if not _said:
        _said = True
        warnings.warn(
            "pin_memory() makes ordinary copies while the webgpu device is registered: torch asks that device for "
            "page-locked memory, which WebGPU neither has nor needs",
            stacklevel=2,
        )
    return tensor.clone()
