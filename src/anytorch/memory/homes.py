"""The homes of blocks: where each rests (on the device, in host memory, on disk), how it gets there, and how it is read.

Storing a block anew makes the new version complete before the old one goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from anytorch import logs
from anytorch.errors import BudgetTooSmall, ModelError
from anytorch.memory.buffers import HostArena, host_buffer, parts_of, scatter
from anytorch.memory.formats import Packing, pack_block, whole_tensors
from anytorch.memory.images import Image, View, from_files, packed
from anytorch.memory.ledger import Ledger
from anytorch.memory.reader import Chunk, Reader, checksums_of
from anytorch.memory.spill import Spill
from anytorch.memory.types import TierPlan, Tiers
from anytorch.memory.units import Found
from anytorch.safetensors_files import StoredTensor, map_file

log = logs.logger(__name__)
MIB = 2**20
LOAD_CHUNK = 16 * MIB
LOADING = "set-up"  # in the ledger


@dataclass(eq=False)
class FittedState:
    """What the parts of a fitted model share."""

    device: torch.device
    tiers: Tiers
    found: Found
    plan: TierPlan
    packings: dict[str, Packing]
    ledger: Ledger
    reader: Reader
    images: dict[str, Image] = field(default_factory=dict)  # a block that is written anew gets a new one here


class BlockHomes:
    """`host` says where the bytes of blocks lie in host memory, in pieces; the state's `images` which files hold others."""

    def __init__(self, state: FittedState) -> None:
        self.host: dict[str, list[torch.Tensor]] = {}
        self.spills: list[Spill] = []  # at most one, made for the first block that is written to disk
        self._state = state
        self._ledger = state.ledger
        self._reader = state.reader
        self._tiers = state.tiers
        self._resident: list[str] = []
        self._host_arena: HostArena | None = None
        self._load_buffer: torch.Tensor | None = None

    # --- setting up ------------------------------------------------------------------------------------------------

    def load_resident(self, name: str) -> torch.Tensor:
        """Read the image of a block that stays on the device from its files to memory there, which its weights keep."""
        image = self._state.images[name]
        target = device_buffer(self._ledger, f"block {name}", image.nbytes, self._state.device)
        self._resident.append(name)
        if self._tiers.shared:
            self._reader.read(image.pieces, target)
        else:
            for chunk, wanted in self.chunks(name):
                target[chunk.image_offset : chunk.image_offset + chunk.nbytes].copy_(wanted)
        return target

    def make_host(self, nbytes: int) -> None:
        """Reserve the host memory for all blocks that live there, at once."""
        self._ledger.reserve("host", "blocks", nbytes)
        host = self._tiers.find("host")
        self._host_arena = HostArena(nbytes, pinned=host is not None and host.pinned)

    def add_host(self, name: str) -> list[torch.Tensor]:
        assert self._host_arena is not None
        self.host[name] = self._host_arena.take(self._state.images[name].nbytes)
        return self.host[name]

    def load_host(self, name: str) -> None:
        """Read an image from its files into the host memory of its own."""
        pieces = self.add_host(name)
        for chunk, wanted in self.chunks(name):
            scatter(wanted, pieces, chunk.image_offset)

    def chunks(self, name: str) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """An image's bytes from its files, checked, in a buffer that the next ones overwrite. For setting up alone."""
        buffer = self._load_buffer if self._load_buffer is not None else self._make_load_buffer()
        return self._reader.through(self._state.images[name].pieces, buffer)

    def load_through(self, ring: torch.Tensor) -> None:
        """Let setting up read through the ring, which nobody uses yet, if it is the host's memory and holds a read."""
        if ring.device.type == "cpu" and ring.numel() >= MIB:
            self._load_buffer = ring[: min(LOAD_CHUNK, ring.numel() // MIB * MIB)]

    def _make_load_buffer(self) -> torch.Tensor:
        """Allocate the buffer for setting up: what the budget has left beside what is still to come, at least one read."""
        level = "host" if "host" in self._ledger.levels() else "device"
        homes, images = self._state.plan.homes, self._state.images
        coming = [name for name, home in homes.items() if home == level == "device" and name not in self._resident]
        free = max(0, self._ledger.free(level) - sum(images[name].nbytes for name in coming))
        size = max(MIB, min(LOAD_CHUNK, free // MIB * MIB))
        self._ledger.reserve(level, LOADING, min(size, free))
        self._load_buffer = host_buffer(size)
        return self._load_buffer

    def loaded(self) -> None:
        """Drop the buffers of setting up."""
        self._load_buffer = None
        for spill in self.spills:
            spill.let_go()
        for level in self._ledger.levels():
            self._ledger.release(level, LOADING)

    # --- storing ---------------------------------------------------------------------------------------------------

    def store(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store a block (of a packed one, its codes) at its home below the device for the first time."""
        if self._state.plan.homes[name] == "disk":
            self._write(name, tensors)
            return
        self._state.images[name] = packed(name, tensors)
        self.add_host(name)
        self._scatter(name, tensors)

    def rewrite(self, name: str, weights: Mapping[str, torch.Tensor]) -> None:
        """New values take the place of a block's old ones at its home; parameters that are not named keep theirs.

        The caller makes sure that the block is not fetched meanwhile (`Mover.begin_change`) or that the ring is emptied
        afterwards.
        """
        packing = self._state.packings.get(name)
        if packing is not None or name not in self.host:
            weights = {path: weights.get(path, tensor) for path, tensor in self.tensors(name).items()}
        if packing is not None:
            weights = pack_block(packing, {path: tensor.detach().cpu() for path, tensor in weights.items()})
        if name in self.host:
            self._scatter(name, weights)
        else:
            self._write(name, weights)

    def _scatter(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        for view in self._state.images[name].views:
            if view.name in tensors:
                flat = tensors[view.name].detach().cpu().contiguous().view(-1).view(torch.uint8)
                scatter(flat, self.host[name], view.offset)

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        with self.replacing(f"block {name}", tensors) as stored:
            # From here on the new file is the truth; the old one goes if it is ours, never if it is the checkpoint's.
            before = {piece.path for piece in self._state.images[name].pieces}
            self._state.images[name] = from_files(name, stored.values(), in_place=self._tiers.shared)
            for path in before:
                if path.startswith(str(self.open_spill().folder)):
                    self.remove_file(path)

    @contextmanager
    def replacing(self, holder: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, StoredTensor]]:
        """Write a new file of our own and say where its tensors lie. The block that gets it gives the holder's old file up;
        until it has, the ledger counts both."""
        spill, nbytes = self.open_spill(), sum(tensor.nbytes for tensor in tensors.values())
        with self._ledger.holding("disk", f"new {holder}", nbytes):
            yield spill.write({path: tensor.detach().cpu() for path, tensor in tensors.items()})
            self._ledger.release("disk", holder)
        self._ledger.reserve("disk", holder, nbytes)

    def open_spill(self) -> Spill:
        """The folder of our own files. Raises BudgetTooSmall where there is no disk level."""
        disk = self._tiers.find("disk")
        if disk is None:
            raise BudgetTooSmall(
                "training needs more memory than the budgets have, and there is no disk level",
                hint="raise host_budget, or leave disk= at its default",
            )
        if not self.spills:
            self.spills.append(Spill(disk.place))
        return self.spills[0]

    def remove_file(self, path: str) -> None:
        """Remove a file of our own. An open one would keep its space on the disk, so it is closed, too.

        One that cannot be removed goes with its folder: what replaced it is there, and the work goes on.
        """
        self._reader.forget(path)
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as exc:
            log.warning("%s cannot be removed and takes its space until the model is closed: %s", path, exc.strerror)

    # --- reading ---------------------------------------------------------------------------------------------------

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """A block's tensors as they rest, by path: the parameters, host memory, or the file mapped into memory.

        Of a packed block, the weights its codes stand for. Does not wait for a change of the block to end.
        """
        if name in self._state.packings and self._state.plan.homes[name] != "device":
            return whole_tensors(self._state.packings[name], self._stored(name))
        return self._stored(name)

    def _stored(self, name: str) -> dict[str, torch.Tensor]:
        group, image = self._state.found.groups[name], self._state.images[name]
        if self._state.plan.homes[name] == "device":
            return group.tensors()
        if name in self.host:
            return {view.name: _from_pieces(self.host[name], view) for view in image.views}
        mapped = {piece.path: map_file(piece.path) for piece in image.pieces}
        found: dict[str, torch.Tensor] = {}
        for piece in image.pieces:
            data = mapped[piece.path][piece.file_offset : piece.file_offset + piece.nbytes]
            if piece.checksums is not None and self._reader.verify and checksums_of(data) != piece.checksums:
                raise ModelError(f"{piece.path} is damaged: its checksum is not the one it was written with")
            for view in image.views:
                begin = view.offset - piece.image_offset
                if begin >= 0 and begin + view.nbytes <= piece.nbytes:
                    found[view.name] = _typed(data[begin : begin + view.nbytes], view)
        return found

    def close(self) -> None:
        """Give the host memory back. The device's belongs to the weights in it; the budget is freed of both."""
        for name in self._resident:
            self._ledger.release("device", f"block {name}")
        self._resident.clear()
        if "host" in self._ledger.levels():
            self._ledger.release("host", "blocks")
        self.host.clear()
        self._host_arena = None
        self.loaded()


def device_buffer(ledger: Ledger, holder: str, nbytes: int, device: torch.device) -> torch.Tensor:
    """Reserve bytes in the ledger and allocate them on a device; on the CPU, page-aligned, so that disks read into it."""
    ledger.reserve("device", holder, nbytes)
    try:
        if device.type == "cpu":
            return host_buffer(nbytes, lasting=True)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except BaseException:
        ledger.release("device", holder)
        raise


def _typed(data: torch.Tensor, view: View) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, view.dtype)
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(view.shape)


def _from_pieces(pieces: list[torch.Tensor], view: View) -> torch.Tensor:
    parts = parts_of(pieces, view.offset, view.nbytes)
    return _typed(parts[0] if len(parts) == 1 else torch.cat(parts), view)
