"""The same bits from the same work, run after run, on devices where that has to be asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anytorch.devices.locate import locate

if TYPE_CHECKING:
    import torch


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Inside, torch takes algorithms that sum in a fixed order, and refuses operations that have none (RuntimeError).

    On an accelerator attention's gradients, among others, are summed by whoever comes first otherwise: two runs from the
    same seed then part after a few steps. A CPU's are in order anyway. What was set before is put back.
    """
    backend, _ = locate(device)
    if backend.torch_type == "cpu":
        yield
        return
    import torch

    deterministic: Any = torch.utils.deterministic
    wanted: Mapping[str, str] = getattr(backend, "repeatable_environment", {})
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )
    os.environ.update(added)
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads what it has not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = before[2]
        for name in added:
            os.environ.pop(name, None)
