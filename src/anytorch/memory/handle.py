"""The handle of a fitted model: what it owns, what it knows, and the ways out."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytorch.errors import UsageError
from anytorch.memory.attached import attach, detach
from anytorch.memory.formats import Packing, packing_of
from anytorch.memory.images import Image
from anytorch.memory.ledger import Ledger
from anytorch.memory.levels import Size
from anytorch.memory.mover import Mover
from anytorch.memory.parked import give_up, park, wake
from anytorch.memory.planning import extras_nbytes, live_nbytes
from anytorch.memory.reader import Reader
from anytorch.memory.rest import Rest, device_buffer
from anytorch.memory.rewriting import Loading
from anytorch.memory.running import Running
from anytorch.memory.saving import save_state
from anytorch.memory.sizes import parse_nbytes
from anytorch.memory.spill import Spill
from anytorch.memory.transfers import Transfers
from anytorch.memory.types import Plan, Tiers
from anytorch.memory.units import Found

UNPACKED = "unpacked block"  # in the ledger
HANDLE = "_anytorch_fitted"  # in the model's __dict__: the handle lives exactly as long as the model


class Fitted:
    """A model at its homes. Owns the files, threads and memory; `unfit` (or the end of the process) gives them back."""

    def __init__(
        self,
        model: nn.Module,
        tiers: Tiers,
        found: Found,
        plan: Plan,
        *,
        verify: bool = True,
        rest_format: str | None = None,
    ) -> None:
        self.packings: dict[str, Packing] = {}
        if rest_format is not None:
            made = {n: packing_of(found, n, rest_format) for n, home in plan.homes.items() if home != "device"}
            self.packings = {name: packing for name, packing in made.items() if packing is not None}
        self.live: torch.Tensor | None = None
        self.rest_format = rest_format
        self._model = weakref.ref(model)
        self.tiers = tiers
        self.found = found
        self.plan = plan
        self.device = torch.device(tiers.device.place)
        self.ledger = Ledger({level.kind: level.capacity for level in tiers.levels})
        disk = tiers.find("disk")
        self.reader = Reader(verify=verify, direct=disk is None or disk.direct)
        self.spill: Spill | None = None
        self.images: dict[str, Image] = {}  # one for everybody: a block that is written anew gets a new one here
        self.rest: Rest
        self.mover: Mover
        self.origins = {id(p): p.device for group in found.groups.values() for p in group.parameters}
        self.running: Running | None = None
        self._moved: list[str] = []  # blocks whose parameters are parked
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._closed = False

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None, "the model is gone"
        return model

    # --- setting up (`placement`) ----------------------------------------------------------------------------------

    def open(self, images: dict[str, Image]) -> None:
        """Reserve and allocate what moves blocks, and what stays on the device whatever the plan."""
        self.images = images
        self.ledger.reserve("device", "buffers", extras_nbytes(self.model, self.found))
        self.move_extras(self.device)
        host = self.tiers.find("host")
        how: dict[str, Any] = {
            "ledger": self.ledger,
            "reader": self.reader,
            "shared": self.tiers.shared,
            "pinned": bool(host and host.pinned),
        }
        self.rest = Rest(self.device, self.found.groups, images, self.plan.homes, self.packings, **how)
        transfers = Transfers(self.device, self.rest.host, staging_nbytes=self.plan.staging_nbytes, **how)
        self.mover = Mover(
            images, self.plan.homes, self.plan.steps, transfers, ring_nbytes=self.plan.ring_nbytes, ledger=self.ledger
        )
        in_host = sum(self.plan.blocks[name].resting for name, home in self.plan.homes.items() if home == "host")
        if in_host:
            self.rest.make_host(in_host)
        if self.packings:
            assert self.rest_format is not None
            nbytes = live_nbytes(self.found, self.rest_format)
            self.live = device_buffer(self.ledger, UNPACKED, nbytes, self.device)
        self.rest.load_through(self.mover.ring)

    def park(self, name: str) -> None:
        """A block is complete at its home: its parameters let go of their memory."""
        self._moved.append(name)
        for parameter in self.found.groups[name].parameters:
            park(parameter, self.device)

    def start(self) -> None:
        """Every block is at its home: the model runs from there."""
        self._unbind()
        self.rest.loaded()
        if self.spill is not None:
            self.spill.let_go()
        self.running = Running(self.mover, self.rest, self.found, self.packings, self.live)
        attach(self.model, self.running, Loading(self))
        self.model.__dict__[HANDLE] = self
        # A model that is dropped, and the end of the process, leave no thread and no file behind.
        self._finalizer = weakref.finalize(self.model, _give_back, self.reader, self.spill)

    def move_extras(self, device: torch.device) -> None:
        for parameter in self.found.rest:
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device and id(buffer) not in self.found.moving:
                    module._buffers[name] = buffer.to(device)

    def _unbind(self) -> None:
        """What packed layers bound to kernels points at memory that their codes are no longer in."""
        for layers in self.found.packed_layers.values():
            for layer in layers:
                layer._bound.clear()

    # --- reading ---------------------------------------------------------------------------------------------------

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of a block as they rest: on the device, in host memory, or mapped from the file (no memory)."""
        self._check_open()
        assert self.running is not None
        return self.running.resting(name)

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

    def save(self, folder: str | Path, *, shard_nbytes: Size = "5GB") -> list[Path]:
        """Write all weights and buffers as safetensors (with an index if there are several files), block by block."""
        return save_state(self.model.state_dict(), Path(folder), parse_nbytes(shard_nbytes, "shard_nbytes"))

    # --- undoing ---------------------------------------------------------------------------------------------------

    def unfit(self, device: str | torch.device | None = None) -> None:
        """Bring every weight back and give everything else back. The model then is an ordinary one."""
        self._check_open()
        target = torch.device(device) if device is not None else None
        if self.running is not None:
            self.running.finish()
        if target is not None:
            self.move_extras(target)
        self.put_back(target)

    def put_back(self, target: torch.device | None = None) -> None:
        """Every parked parameter gets its values in memory of its own, then all files, threads and buffers go."""
        try:
            self._wake_all(target)
        except BaseException:
            if self.running is not None:  # it stays a fitted model, whole: every block is still at its home
                for name in self._moved:
                    for parameter in self.found.groups[name].parameters:
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

    def _wake_all(self, target: torch.device | None) -> None:
        for name in self._moved:
            self.mover.wait_unchanged(name)
            resting = self.rest.tensors(name)
            group = self.found.groups[name]
            for path, parameter in zip(group.paths, group.parameters, strict=True):
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
        raises UsageError: `unfit` keeps them. Nothing of ours refers to the model any more, nor the other way round, so that
        it goes with its last user and not with the garbage collector's next round.
        """
        if self._closed:
            return
        self._closed = True
        model = self._model()
        if model is not None:
            detach(model)
            model.__dict__.pop(HANDLE, None)
        for name in self._moved:
            for parameter in self.found.groups[name].parameters:
                give_up(parameter)
        self._moved.clear()
        if self.running is not None:
            self.running.close()
            self.running = None
        if hasattr(self, "mover"):
            self.mover.close()
        if hasattr(self, "rest"):
            self.rest.close()
        self.reader.close()
        if self.spill is not None:
            self.spill.close()
        if self._finalizer is not None:
            self._finalizer.detach()
        if self.live is not None:
            self.live = None
            self.ledger.release("device", UNPACKED)
        self.found = Found((), {}, (), {})  # its units, groups and slots are the model's modules and weights


def _give_back(reader: Reader, spill: Spill | None) -> None:
    reader.close()
    if spill is not None:
        spill.close()
