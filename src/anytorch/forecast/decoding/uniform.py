"""Uniform numbers of torch's CPU generator from our C++ where there is a compiler: the same ones, several times as fast.

The library is compiled once, in a thread; until it is there, and where it cannot be, torch draws.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytorch import logs, native, settings
from anytorch.errors import AnytorchError

log = logs.logger(__name__)

SOURCE = Path(__file__).with_name("uniform.cpp")
WORDS = 624
# torch's state of a generator as bytes: the seed; how many words are left, and whether there is a seed (32 bits each); the
# place of the next word; the words, in 64 bits each; and what normal numbers need.
SIZE, LEFT, NEXT, FIRST_WORD = 5056, 8, 16, 24


def fill(numbers: Tensor, generator: torch.Generator) -> None:
    """What `numbers.uniform_(generator=generator)` does to contiguous float64 on the host."""
    library = library_for(settings.cache_folder()).library
    if library is None:
        numbers.uniform_(generator=generator)
    else:
        fill_by(library, numbers, generator)


def fill_by(library: Any, numbers: Tensor, generator: torch.Generator) -> None:
    if not numbers.numel():
        return
    state = generator.get_state()
    left, place = state[LEFT : LEFT + 4].view(torch.int32), state[NEXT : NEXT + 8].view(torch.int64)
    words = state[FIRST_WORD : FIRST_WORD + 8 * WORDS].view(torch.int64)
    current = words.to(torch.uint32)
    # One word is "left" when the next draw makes new ones.
    at = ctypes.c_int32(WORDS if int(left) == 1 else int(place))
    library.uniform(current.data_ptr(), ctypes.byref(at), numbers.data_ptr(), numbers.numel())
    words.copy_(current.to(torch.int64))
    left.fill_(WORDS + 1 - at.value)
    place.fill_(at.value)
    generator.set_state(state)


class UniformLibrary:
    """The compiled library, used once it has drawn the same numbers as torch."""

    def __init__(self) -> None:
        self.library: Any = None
        self.builder = threading.Thread(target=self._build, name="anytorch-uniform", daemon=True)
        self.builder.start()

    def _build(self) -> None:
        try:
            library = native.load("uniform", [SOURCE])
        except AnytorchError as exc:  # no compiler, or a setting that names none
            log.info("random numbers are drawn by torch: %s", exc)
            return
        library.uniform.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        library.uniform.restype = None
        if draws_the_same(library):
            self.library = library
        else:
            log.info("random numbers are drawn by torch: this torch version draws differently")


@lru_cache(maxsize=2)
def library_for(cache: Path) -> UniformLibrary:
    return UniformLibrary()


def draws_the_same(library: Any) -> bool:
    """Numbers and states after a few draws of all kinds of lengths."""
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    if len(ours.get_state()) != SIZE:
        return False
    for count in (1, 311, 312, 313, 1000):
        found, wanted = torch.empty(2, count, dtype=torch.float64)
        fill_by(library, found, ours)
        wanted.uniform_(generator=theirs)
        # A single 32-bit draw in between: pairs of words then lie across two states.
        same = torch.equal(torch.rand(1, generator=ours), torch.rand(1, generator=theirs))
        if not (same and torch.equal(found, wanted) and torch.equal(ours.get_state(), theirs.get_state())):
            return False
    return True
