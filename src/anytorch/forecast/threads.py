"""CPU threads for many small steps on a machine that others use, too.

torch's OpenMP threads wait by spinning. A step of generation is dozens of small products with a barrier after each; where
another job holds a core, the others spin for its time slice: two threads then burned eleven times the CPU time of one and
took longer. So no more threads are used than there are cores with nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from anytorch.devices.tune import trusted_setting
from anytorch.errors import UsageError
from anytorch.probe import snapshot


def good_threads(stored: int | None, usable: int, load: float | None, current: int) -> int:
    """What `anytorch optimize` measured or a person set; else the cores that are idle, at least one. Pure."""
    if stored is not None:
        return stored
    if load is None:  # this system does not tell
        return min(current, usable)
    return max(1, min(current, usable, round(usable - load)))


@contextmanager
def quiet_threads(wanted: int | Literal["auto"] | None) -> Iterator[None]:
    """Set torch's threads for a forecast, and put them back."""
    if wanted not in (None, "auto") and not (isinstance(wanted, int) and wanted >= 1):
        raise UsageError(f"threads is {wanted!r}; use a number from 1, 'auto', or None")
    before = torch.get_num_threads()
    if wanted == "auto":
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        wanted = good_threads(trusted_setting("threads").value, snapshot().cpu.good_threads, load, before)
    if wanted is None or wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
