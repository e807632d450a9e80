"""Weights that rest in fewer bits: packed when a block is put at its home, unpacked on the device before each use.

Only the matrices of linear layers are packed; embeddings, norms and biases rest as they are. It is lossy, and asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anytorch.memory.images import Image, packed, views_of
from anytorch.memory.transfers import Copies
from anytorch.memory.units import Found, Unit
from anytorch.quant.conv1d import is_conv1d
from anytorch.quant.formats import Format, parse
from anytorch.quant.tensor import PARTS, QuantTensor, expected_parts, pack, unpack

LEAST_ELEMENTS = 4096  # below that there is nothing to save
# Elements unpacked in one go: bounds the temporary memory on the device. What fits a CPU's caches is unpacked several times
# as fast there (4096 × 2048 int4: 59 ms and 75 MiB by 4 Mi elements, 13 ms and 6 MiB by 256 Ki); a GPU wants few launches.
AT_ONCE, AT_ONCE_ON_CPU = 4 * 2**20, 2**18
SEPARATOR = "::"  # between a weight's path and the name of its part


@dataclass(frozen=True)
class Packing:
    """How one block rests: which of its tensors are packed, and the image they are unpacked to."""

    format: Format
    live: Image
    weights: frozenset[str]  # the paths of those that are packed


def packing_of(found: Found, name: str, format: str) -> Packing | None:
    """Return how a block is packed in a format; None if it has nothing that can be packed."""
    group = found.groups[name]
    weights = frozenset(path for path, parameter in group.tensors().items() if packable(found, parameter))
    return Packing(parse(format), group.image(), weights) if weights else None


def unpacked_nbytes(found: Found, format: str) -> int:
    """Device memory that the packed blocks of one unit are unpacked to: the largest unit's."""
    packings = {name: packing_of(found, name, format) for name in found.groups}
    return max(sum(p.live.nbytes for name in unit.blocks if (p := packings[name])) for unit in found.units)


def packable(found: Found, parameter: torch.Tensor) -> bool:
    owners = [slot.owner for slot in found.slots[id(parameter)]]
    return (
        parameter.ndim == 2
        and parameter.is_floating_point()
        and parameter.numel() >= LEAST_ELEMENTS
        and all(isinstance(owner, nn.Linear) or is_conv1d(owner) for owner in owners)
    )


def resting_nbytes(packing: Packing) -> int:
    """The length of the packed image, without packing anything."""
    stored: dict[str, torch.Tensor] = {}
    for view in packing.live.views:
        parts = {"": (view.shape, getattr(torch, view.dtype))}
        if view.name in packing.weights:
            parts = expected_parts(packing.format, view.shape)
        for part, (shape, dtype) in parts.items():
            stored[f"{view.name}{SEPARATOR}{part}"] = torch.empty(shape, dtype=dtype, device="meta")
    return packed("", stored).nbytes


def pack_block(packing: Packing, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a block's tensors as they are stored: packed parts under "path::part", other tensors under their path."""
    stored: dict[str, torch.Tensor] = {}
    for path, tensor in tensors.items():
        if path not in packing.weights:
            stored[path] = tensor
            continue
        quantized = pack(tensor.detach(), packing.format)
        for part in PARTS:
            if part in quantized.parts:
                stored[f"{path}{SEPARATOR}{part}"] = quantized.parts[part].contiguous()
    return stored


def unpack_block(packing: Packing, stored: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """Unpack stored tensors into the weights (`targets`) on the same device, some rows at a time."""
    for path, target in targets.items():
        if path not in packing.weights:
            target.copy_(stored[path])
            continue
        parts = {part: stored[key] for part in PARTS if (key := f"{path}{SEPARATOR}{part}") in stored}
        rows, columns = target.shape
        step = max(1, (AT_ONCE_ON_CPU if target.device.type == "cpu" else AT_ONCE) // columns)
        for row in range(0, rows, step):
            end = min(rows, row + step)
            some = {name: part if part.ndim == 0 else part[row:end] for name, part in parts.items()}
            target[row:end].copy_(unpack(QuantTensor(packing.format, (end - row, columns), target.dtype, some)))


def whole_tensors(packing: Packing, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights a block stands for, in memory of their own: for state_dict and unfit."""
    device = next(iter(stored.values())).device
    found = {
        view.name: torch.empty(view.shape, dtype=getattr(torch, view.dtype), device=device)
        for view in packing.live.views
    }
    unpack_block(packing, stored, found)
    return found


# --- where they are unpacked to: one unit's at a time, for its forward or for its backward ------------------------------


class UnpackScratch:
    """Device memory for one unit's unpacked blocks. A thread that took it may take it again; others wait for its return.

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
        """Return True if the block was unpacked for this step from this very buffer; every fetch makes a new one."""
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
