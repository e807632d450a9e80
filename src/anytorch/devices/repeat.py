"""Make a device compute the same bits in every run, where that needs a setting."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anytorch.devices.locate import locate

if TYPE_CHECKING:
    import torch


def prepare_to_repeat(device: torch.device) -> None:
    """Set the variables that a device's libraries read before their first product; call it earlier. They stay set."""
    backend, _ = locate(device)
    wanted: Mapping[str, str] = getattr(backend, "repeatable_environment", {})
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """A context in which torch sums in a fixed order and raises RuntimeError for operations that cannot.

    On an accelerator attention's gradients, among others, are summed by whoever comes first otherwise: two runs from the
    same seed then part after a few steps. A CPU's are in order anyway. What was set before is put back. torch has one such
    switch for the whole process: what other threads compute meanwhile is held to it, too.
    """
    backend, _ = locate(device)
    if backend.torch_type == "cpu":
        yield
        return
    import torch

    deterministic: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads what it has not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = before[2]
