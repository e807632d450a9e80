"""`torch.accelerator` agrees with `torch.cuda`: the program's accelerator is CUDA. torch's own code sees the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import NAME, Device, Place
from anytorch.run.tensors import program_asks

# Functions of torch.accelerator, and those of torch.cuda that are the same.
SAME = {
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "device_index": "device",
    "synchronize": "synchronize",
    "current_stream": "current_stream",
    "set_stream": "set_stream",
    "empty_cache": "empty_cache",
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "memory_reserved": "memory_reserved",
    "max_memory_reserved": "max_memory_reserved",
    "memory_stats": "memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "reset_accumulated_memory_stats": "reset_accumulated_memory_stats",
    "get_memory_info": "mem_get_info",
}

# What torch's own code is told where the CPU stands in. A build for CUDA has CUDA as its accelerator, with or without a
# card, and asks torch.cuda, which answers as the program expects: torch.compile then asked a missing card for its stream.
NONE: dict[str, Callable[..., Any]] = {"is_available": lambda: False, "device_count": lambda: 0}

FOR_PROGRAMS = "torch.nn.parallel"  # torch's own code that does what the program could, on the program's accelerator


def install(patches: Patches, place: Place, ledger: Ledger) -> None:
    """To be called when torch.cuda has its functions of the stand-in."""
    accelerator: Any = torch.accelerator

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available and not place.count() else Device(NAME)

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: place.count() > 0,
        "device_count": place.count,
        "current_accelerator": current_accelerator,
        "current_device_index": lambda: place.current,
        "current_device_idx": lambda: place.current,
        **{name: getattr(torch.cuda, other) for name, other in SAME.items()},
    }
    for name, ours in answers.items():
        plain = getattr(accelerator, name, None)
        if plain is not None:  # some are newer than the oldest torch we take
            if place.host:
                plain = NONE.get(name, plain)
            patches.set(accelerator, name, _by_who_asks(ours, plain, f"torch.accelerator.{name}()", ledger))


def _by_who_asks(ours: Any, plain: Any, label: str, ledger: Ledger) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        if not program_asks(2) and not sys._getframe(1).f_globals.get("__name__", "").startswith(FOR_PROGRAMS):
            return plain(*args, **kwargs)
        ledger.redirect(label)
        return ours(*args, **kwargs)

    return ask
