"""Memory for keys and values: where there is too little, how much is needed and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from anytorch.counts import counted
from anytorch.devices.memory import memory
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import OutOfMemory
from anytorch.memory.sizes import words


@contextmanager
def room_for(
    nbytes: int, rows: int, positions: int, device: torch.device, fitting: Callable[[int], int]
) -> Iterator[None]:
    """A context in which so many bytes are made for rows of so many positions. `fitting(bytes)`: how many positions of a row
    they have room for. Raises OutOfMemory."""
    spare = spare_nbytes(device)
    try:
        # Linux lends a process more than there is, and ends it when it is used: so the CPU is asked first.
        if device.type == "cpu" and spare is not None and nbytes > spare:
            raise MemoryError
        yield
    except Exception as exc:
        if not is_out_of_memory(exc):
            raise
        message = f"keys and values of {counted(rows, 'row')} of {counted(positions, 'position')} need {words(nbytes)}"
        hint = "use fewer positions (max_seq_length), fewer rows or another device"
        if spare is not None:
            fits = min(fitting(spare // rows), positions - 1)
            message += f"; {words(spare)} are free on {device}, which is room for {counted(fits, 'position')}"
            if fits > 0:
                hint = f"use max_seq_length={fits} or less" + (", or fewer rows" if rows > 1 else "")
            else:
                hint = "use fewer rows, or another device"
        raise OutOfMemory(message + (" of each" if rows > 1 and spare is not None else ""), hint=hint) from exc


def spare_nbytes(device: torch.device) -> int | None:
    """What is free on a device, with what torch keeps there for itself; None where unknown."""
    use = memory(device)
    if use.free is None or device.type == "cpu" or use.reserved is None or use.allocated is None:
        return use.free
    return use.free + max(0, use.reserved - use.allocated)
