"""One seed for everything that draws random numbers. The same seed gives different numbers on different device types."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from anytorch.devices.registry import registry
from anytorch.errors import UsageError


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
