"""The handle of a fitted model: it brings every block to its home, knows where it is, and gives everything back.

`place` is the second half of `fit` and `load` (the first is in `fitting`, up to the plan): reserve and allocate (`_open`),
one block after another to its home (`_place`), then the module's own methods are patched and the model runs (`_start`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytorch.devices.oom import telling_out_of_memory
from anytorch.errors import UsageError
from anytorch.memory.formats import pack_block, packing_of, unpacked_nbytes
from anytorch.memory.heap import trim
from anytorch.memory.homes import BlockHomes, FittedState, device_buffer
from anytorch.memory.images import Image, views_of
from anytorch.memory.ledger import Ledger
from anytorch.memory.levels import Size
from anytorch.memory.module_patches import StateLoading, attach, detach
from anytorch.memory.mover import Mover
from anytorch.memory.parked import give_up, park, wake
from anytorch.memory.reader import Reader
from anytorch.memory.running import Running
from anytorch.memory.saving import save_state
from anytorch.memory.sizes import parse_nbytes
from anytorch.memory.spill import Spill
from anytorch.memory.types import TierPlan, Tiers
from anytorch.memory.units import Found

UNPACKED = "unpacked block"  # in the ledger
HANDLE = "_anytorch_fitted"  # in the model's __dict__: the handle lives exactly as long as the model


class Fitted(FittedState):
    """A fitted model at its blocks' homes. Owns the files, threads and memory; `unfit` (or the process's end) frees them."""

    def __init__(
        self,
        model: nn.Module,
        tiers: Tiers,
        found: Found,
        plan: TierPlan,
        *,
        verify: bool = True,
        rest_format: str | None = None,
    ) -> None:
        moving = [name for name, home in plan.homes.items() if home != "device"] if rest_format is not None else []
        packings = {name: made for name in moving if (made := packing_of(found, name, str(rest_format))) is not None}
        ledger = Ledger({level.kind: level.capacity for level in tiers.levels})
        disk = tiers.find("disk")
        reader = Reader(verify=verify, direct=disk is None or disk.direct)
        super().__init__(torch.device(tiers.device.place), tiers, found, plan, packings, ledger, reader)
        self.live: torch.Tensor | None = None
        self.rest_format = rest_format
        self._model = weakref.ref(model)
        self.block_homes: BlockHomes
        self.mover: Mover
        self.origins = {id(p): p.device for group in found.groups.values() for p in group.parameters}
        self.running: Running | None = None
        self._moved: list[str] = []  # blocks whose parameters are parked
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._closed = False

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None, "the model was deleted"
        return model

    # --- setting up ------------------------------------------------------------------------------------------------

    def place(self, images: dict[str, Image], *, from_files: bool = False) -> None:
        """Bring every block to its home: from the model's parameters, or from the files that the images name.

        On any failure everything is given back and the parameters have the values they had; then the failure is raised.
        """
        with telling_out_of_memory("fitting the model", "nothing was changed: free memory, or lower the budgets"):
            try:
                self._open(images)
                for name in self.found.groups:
                    (self._place_file if from_files else self._place)(name)
                self._start()
                trim()  # the weights that rest elsewhere now were freed, and are the process's until they are given back
            except BaseException:
                self.close() if from_files else self.put_back()
                raise

    def _open(self, images: dict[str, Image]) -> None:
        """Reserve and allocate what moves blocks, and what stays on the device whatever the plan."""
        self.images = images
        self.ledger.reserve("device", "buffers", self.found.extras_nbytes(self.model))
        self.move_extras(self.device)
        self.block_homes = BlockHomes(self)
        self.mover = Mover(self, self.block_homes.host)
        if self.plan.nbytes_at("host"):
            self.block_homes.make_host(self.plan.nbytes_at("host"))
        if self.packings:
            assert self.rest_format is not None
            nbytes = unpacked_nbytes(self.found, self.rest_format)
            self.live = device_buffer(self.ledger, UNPACKED, nbytes, self.device)
        self.block_homes.load_through(self.mover.ring)

    def _place(self, name: str) -> None:
        group = self.found.groups[name]
        if self.plan.homes[name] == "device":
            self.ledger.reserve("device", f"block {name}", self.images[name].nbytes)
            for parameter in group.parameters:
                parameter.data = parameter.data.to(self.device)
            return
        stored = {path: parameter.detach() for path, parameter in group.tensors().items()}
        self.block_homes.store(name, pack_block(self.packings[name], stored) if name in self.packings else stored)
        self._park(name)

    def _place_file(self, name: str) -> None:
        """Read a block that lives in memory from its files; others stay there. One that is to rest packed is packed anew."""
        home, block_homes = self.plan.homes[name], self.block_homes
        if home == "device":
            views = views_of(self.images[name], block_homes.load_resident(name))
            for path, parameter in self.found.groups[name].tensors().items():
                parameter.data = views[path]
            return
        if name in self.packings:
            block_homes.store(name, pack_block(self.packings[name], self._read_whole(name)))
        elif home == "host":
            block_homes.load_host(name)
        self._park(name)

    def _read_whole(self, name: str) -> dict[str, torch.Tensor]:
        """A block's tensors from its files before they are packed, in the memory that they will be unpacked to later."""
        assert self.live is not None
        live = self.packings[name].live
        target = {view.name: self.live[view.offset : view.offset + view.nbytes] for view in live.views}
        for chunk, wanted in self.block_homes.chunks(name):
            for view in self.images[name].views:
                begin = max(view.offset, chunk.image_offset)
                end = min(view.offset + view.nbytes, chunk.image_offset + chunk.nbytes)
                if begin < end:
                    part = wanted[begin - chunk.image_offset : end - chunk.image_offset]
                    target[view.name][begin - view.offset : end - view.offset].copy_(part)
        return views_of(live, self.live[: live.nbytes])

    def _park(self, name: str) -> None:
        """Let a block's parameters go of their memory: it is complete at its home, so there is a second copy now."""
        self._moved.append(name)
        for parameter in self.found.groups[name].parameters:
            park(parameter, self.device)

    def _start(self) -> None:
        """Let the model run from its blocks' homes: every block is there."""
        self._unbind()
        self.block_homes.loaded()
        self.running = Running(self, self.mover, self.block_homes, self.live)
        attach(self.model, self.running, StateLoading(self))
        self.model.__dict__[HANDLE] = self
        # A model that is dropped, and the end of the process, leave no thread and no file behind.
        self._finalizer = weakref.finalize(self.model, _give_back, self.reader, self.block_homes.spills)

    def move_extras(self, device: torch.device) -> None:
        for parameter in self.found.staying:
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device and id(buffer) not in self.found.moving:
                    module._buffers[name] = buffer.to(device)

    def _unbind(self) -> None:
        """Drop what packed layers bound to kernels: it points at memory that their codes are no longer in."""
        for layers in self.found.packed_layers.values():
            for layer in layers:
                layer._bound.clear()

    # --- reading ---------------------------------------------------------------------------------------------------

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of a block as they rest: on the device, in host memory, or mapped from the file (no memory)."""
        self._check_open()
        assert self.running is not None
        return self.running.resting(name)

    def write_back(self, block: str, weights: Mapping[str, torch.Tensor]) -> None:
        """New values take the place of a block's old ones at its home (see `BlockHomes.rewrite`)."""
        assert self.running is not None
        self.block_homes.rewrite(block, weights)
        self.running.forget_views(block)

    @property
    def memory_level(self) -> str:
        """The ledger's name for the host's RAM: a level of its own, or the device that computes in it."""
        return "host" if self.tiers.find("host") is not None else "device"

    def stats(self) -> dict[str, Any]:
        """What was moved so far, and what each level holds and held at most."""
        levels = {
            level: {"capacity": use.capacity, "used": use.used, "peak": use.peak}
            for level in self.ledger.levels()
            for use in (self.ledger.use(level),)
        }
        return {"levels": levels, **vars(self.mover.stats), "disk_read_nbytes": self.reader.nbytes_read}

    def explain(self) -> str:
        return self.plan.explain()

    def save(
        self, folder: str | Path, *, shard_nbytes: Size = "5GB", sums: dict[Path, tuple[int, int]] | None = None
    ) -> list[Path]:
        """Write all weights and buffers as safetensors (with an index if there are several files), block by block.

        `sums` gets the size and the CRC-32 of each file of tensors.
        """
        return save_state(self.model.state_dict(), Path(folder), parse_nbytes(shard_nbytes, "shard_nbytes"), sums)

    # --- undoing ---------------------------------------------------------------------------------------------------

    def unfit(self, device: str | torch.device | None = None) -> None:
        """Bring every weight back and give everything else back. The model then is an ordinary one."""
        self._check_open()
        target = torch.device(device) if device is not None else None
        if self.running is not None:
            self.running.finish()
        with telling_out_of_memory("bringing all weights back", "the model stays fitted: free memory and try again"):
            if target is not None:
                self.move_extras(target)
            self.put_back(target)

    def put_back(self, target: torch.device | None = None) -> None:
        """Every parked parameter gets its values in memory of its own, then all files, threads and buffers go."""
        try:
            self._wake_all(target)
        except BaseException:
            if self.running is not None:  # it stays a fitted model, whole: every block is still at its home
                for parameter in self._parked():
                    park(parameter, self.device)
                self.move_extras(self.device)
            raise
        detach(self.model)
        self.model.__dict__.pop(HANDLE, None)
        self._moved.clear()
        self._unbind()
        for group in self.found.groups.values():
            for parameter in group.parameters:
                place = target or self.origins[id(parameter)]
                if place.type != "meta" and parameter.device != place:
                    parameter.data = parameter.data.to(place)
        self.close()

    def _parked(self) -> list[torch.Tensor]:
        return [parameter for name in self._moved for parameter in self.found.groups[name].parameters]

    def _wake_all(self, target: torch.device | None) -> None:
        for name in self._moved:
            self.mover.wait_unchanged(name)
            resting = self.block_homes.tensors(name)
            group = self.found.groups[name]
            for path, parameter in group.tensors().items():
                place = target or self.origins[id(parameter)]
                wake(parameter, resting[path].to(place if place.type != "meta" else self.device, copy=True))

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(
                "this fitted model is closed",
                hint="its weights outside the device are gone: load or create the model again",
            )

    def close(self) -> None:
        """Free threads, files and buffers now. May be called twice; close an optimizer before.

        The model is an ordinary one afterwards. Its weights on the device stay; those that were not are lost, and using one
        raises UsageError: `unfit` keeps them. Neither refers to the other any more, so the model is
        freed with its last user, not by the next garbage collection.
        """
        if self._closed:
            return
        self._closed = True
        model = self._model()
        if model is not None:
            detach(model)
            model.__dict__.pop(HANDLE, None)
        for parameter in self._parked():
            give_up(parameter)
        self._moved.clear()
        with ExitStack() as stack:  # from the last to the first, and all of them, also when one fails
            stack.callback(self._let_go)
            stack.callback(self.reader.close)
            if hasattr(self, "block_homes"):
                stack.callback(_give_back, self.reader, self.block_homes.spills)
                stack.callback(self.block_homes.close)
            if hasattr(self, "mover"):
                stack.callback(self.mover.close)
            if self.running is not None:
                stack.callback(self.running.close)
                self.running = None

    def _let_go(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        if self.live is not None:
            self.live = None
            self.ledger.release("device", UNPACKED)
        self.found = Found((), {}, (), {})  # its units, groups and slots are the model's modules and weights


def _give_back(reader: Reader, spills: list[Spill]) -> None:
    reader.close()
    for spill in spills:
        spill.close()
