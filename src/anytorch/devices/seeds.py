"""Runs that can be repeated: one seed for everything that draws random numbers, and sums in a fixed order.

The same seed gives different numbers on different device types.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anytorch.devices.locate import locate
from anytorch.devices.registry import registry
from anytorch.errors import UsageError

if TYPE_CHECKING:
    import torch


def seed(value: int = 42) -> int:
    """Seed Python, NumPy and torch on every device that this torch can drive; returns the seed.

    NumPy and torch are seeded if they are installed. torch seeds a device that is not initialised yet when it is.
    """
    import random
    from importlib.util import find_spec

    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise UsageError(f"invalid seed {value!r}: use a whole number from 0 to 2**63 - 1")
    random.seed(value)
    if "numpy" in sys.modules or find_spec("numpy"):
        import numpy

        numpy.random.seed(value % 2**32)  # NumPy's legacy generator takes 32 bits
    if "torch" in sys.modules or find_spec("torch"):
        import torch

        torch.manual_seed(value)  # the CPU, and every device type torch knows
        for backend in registry().backends.values():
            backend.seed(value)
    return value


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """A context that restores the caller's random state afterwards, on every device in use.

    A device that sleeps is not woken: it is seeded as the caller's last `torch.manual_seed` would have done it.
    """
    import torch

    backends = list(registry().backends.values())
    before = torch.get_rng_state()
    # A plug-in need not know of states: it is seeded.
    kept = [asked() if callable(asked := getattr(backend, "random_states", None)) else None for backend in backends]
    try:
        yield
    finally:
        torch.set_rng_state(before)
        for backend, states in zip(backends, kept, strict=True):
            if states is None:
                backend.seed(torch.initial_seed())
            else:
                backend.restore_random_states(states)  # type: ignore[attr-defined]


# --- the same bits in every run, where that needs a setting -----------------------------------------------------------


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
