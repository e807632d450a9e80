"""Device memory that packed blocks are unpacked to: one unit's at a time, for its forward or for its backward."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anytorch.memory.formats import Packing, unpack_block
from anytorch.memory.images import Image, views_of
from anytorch.memory.transfers import Copies
from anytorch.memory.units import Unit


class UnpackScratch:
    """A thread that took it may take it again; the others wait until it was given back as often.

    Backward takes it in the thread that runs a node and gives it back where its end is told, which may be another thread:
    so this is no lock of `threading`, whose owner alone can open it.
    """

    def __init__(
        self, memory: torch.Tensor, packings: Mapping[str, Packing], units: Sequence[Unit], copies: Copies
    ) -> None:
        self.memory = memory
        self._packings = packings
        self._copies = copies
        self._starts = {unit.name: _starts(unit, packings) for unit in units}
        self._given_back = threading.Condition()
        self._owner: int | None = None
        self._times = 0
        self._used: Any = None  # event on the computing stream, after the last use
        self.step: str | None = None  # whose blocks are in it
        self._sources: dict[str, torch.Tensor] = {}  # block → the buffer in the ring that it was unpacked from
        self._views: dict[tuple[str, str], dict[str, torch.Tensor]] = {}

    def take(self) -> None:
        with self._given_back:
            me = threading.get_ident()
            while self._owner not in (None, me):
                self._given_back.wait()
            self._owner = me
            self._times += 1
            self._copies.compute_after(self._used)

    def give_back(self) -> None:
        with self._given_back:
            self._times -= 1
            if not self._times:
                self._owner = None
                self._used = self._copies.computed()
                self._given_back.notify_all()

    def has(self, step: str, block: str, buffer: torch.Tensor) -> bool:
        """Was the block unpacked for this step from this very buffer? The ring makes a new one for every fetch."""
        return self.step == step and self._sources.get(block) is buffer

    def unpack(self, step: str, block: str, image: Image, buffer: torch.Tensor) -> None:
        """Put a block's weights in the place that they have for this step. Whoever asks has taken it."""
        if self.step != step:
            self.step, self._sources = step, {}
        self._sources.pop(block, None)  # unpacking that fails half-way leaves nothing that is taken for whole
        with torch.inference_mode(False), torch.no_grad():
            unpack_block(self._packings[block], views_of(image, buffer), self.views(step, block))
        self._sources[block] = buffer

    def views(self, step: str, block: str) -> dict[str, torch.Tensor]:
        """The tensors of a block where they are unpacked for this step, by path."""
        if (step, block) not in self._views:
            live, start = self._packings[block].live, self._starts[step][block]
            with torch.inference_mode(False), torch.no_grad():
                self._views[step, block] = views_of(live, self.memory[start : start + live.nbytes])
        return self._views[step, block]

    def close(self) -> None:
        """Let go of the memory."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.step, self._sources = None, {}
        self._views.clear()

    def offset(self, tensor: torch.Tensor) -> int | None:
        """A tensor's byte offset in the scratch memory, if it lies there."""
        if tensor.untyped_storage().data_ptr() != self.memory.untyped_storage().data_ptr():
            return None
        return tensor.data_ptr() - self.memory.data_ptr()


def _starts(unit: Unit, packings: Mapping[str, Packing]) -> dict[str, int]:
    """Where each packed block of a unit begins."""
    starts, end = {}, 0
    for name in unit.blocks:
        if name in packings:
            starts[name] = end
            end += packings[name].live.nbytes
    return starts
