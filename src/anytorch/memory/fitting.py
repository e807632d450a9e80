"""Putting a model's blocks at their homes, and running it from there: `fit`, `unfit`, and the handle `Fitted`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from anytorch import logs
from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.attached import attach, detach
from anytorch.memory.buffers import scatter
from anytorch.memory.formats import Packing, pack_block, packing_of, resting_nbytes
from anytorch.memory.images import Image, from_files, packed, views_of
from anytorch.memory.ledger import Ledger
from anytorch.memory.levels import Size, create_tiers, speeds_of
from anytorch.memory.mover import Mover
from anytorch.memory.parked import give_up, park, wake
from anytorch.memory.plan import least_device_nbytes, make_plan
from anytorch.memory.reader import Reader
from anytorch.memory.rewriting import Loading
from anytorch.memory.running import Running
from anytorch.memory.saving import save_state
from anytorch.memory.sizes import parse_nbytes, words
from anytorch.memory.spill import Spill
from anytorch.memory.types import Block, Budgets, Plan, Speeds, Step, Tiers
from anytorch.memory.units import Found, find_units

log = logs.logger(__name__)
Model = TypeVar("Model", bound=nn.Module)
LEAVES = "leaves"
HANDLE = "_anytorch_fitted"  # in the model's __dict__: the handle lives exactly as long as the model


def fit(
    model: Model,
    device: str | torch.device | None = "auto",
    *,
    device_budget: Size | None = None,
    host_budget: Size | None = None,
    disk: str | Path | bool | None = None,
    disk_budget: Size | None = None,
    blocks: Sequence[str] | str | None = None,
    resident: Sequence[str] = (),
    reserve: Size = 0,
    host_reserve: Size = 0,
    speeds: Speeds | None = None,
    compute_s: float = 0.0,
    verify: bool = True,
    rest_format: str | None = None,
    training: bool = False,
) -> Model:
    """Make a model run on a device within memory budgets; returns the same object.

    What does not fit on the device rests in host memory, then on disk, and is brought up block by block while the device
    computes. Budgets that are not given come from what is free. `reserve` is kept free of the device budget for
    activations, `host_reserve` of the host's (an optimizer works there); `compute_s` is how long one pass computes, for a
    better plan. `blocks` and `resident` name modules (patterns allowed) that move as one and that stay on the device;
    blocks="leaves" moves every leaf module by itself: less memory passes weights on, and more of them stay, in a model
    whose layers only call their children. `training` plans for forward and backward.
    `rest_format` ("int8", "int4", "fp4", …: the names of `anytorch.quant`) lets the linear layers of blocks that are not
    resident rest in fewer bits, which is lossy. The model is left as it was if anything fails.

    Raises BudgetTooSmall, which names the smallest budget that works.

    >>> import torch, anytorch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    >>> model = anytorch.memory.fit(model, "cpu", device_budget="20KB")
    >>> model(torch.ones(1, 64)).shape
    torch.Size([1, 64])
    """
    if HANDLE in model.__dict__:
        raise UsageError("this model is fitted already", hint="anytorch.memory.unfit(model) first")
    tiers = create_tiers(
        device,
        device_budget=device_budget,
        host_budget=host_budget,
        disk=disk,
        disk_budget=disk_budget,
        speeds=speeds,
    )
    found, plan = plan_for(
        model,
        tiers,
        blocks=blocks,
        resident=resident,
        reserve=parse_nbytes(reserve, "reserve"),
        host_reserve=parse_nbytes(host_reserve, "host_reserve"),
        compute_s=compute_s,
        rest_format=rest_format,
        training=training,
    )
    handle = Fitted(model, tiers, found, plan, verify=verify, rest_format=rest_format)
    handle.place()
    return model


def fitted(model: nn.Module) -> Fitted:
    """The handle of a fitted model: its plan, ledger, statistics, `save`, `unfit`. Raises UsageError if it is not fitted."""
    handle: Fitted | None = model.__dict__.get(HANDLE)
    if handle is None:
        raise UsageError("this model is not fitted", hint="anytorch.memory.fit(model, …) first")
    return handle


def unfit(model: Model, device: str | torch.device | None = None) -> Model:
    """Bring every weight back: to the device it was on before, or to `device`. Needs the memory for all of them."""
    fitted(model).unfit(device)
    return model


def plan_for(
    model: nn.Module,
    tiers: Tiers,
    *,
    blocks: Sequence[str] | str | None = None,
    resident: Sequence[str] = (),
    reserve: int = 0,
    host_reserve: int = 0,
    compute_s: float = 0.0,
    on_disk: bool = False,
    sizes: Callable[[Found], dict[str, Block]] | None = None,
    rest_format: str | None = None,
    training: bool = False,
    codes: bool = True,
) -> tuple[Found, Plan]:
    """Units and plan of a model. If a layer as a whole does not fit, every leaf module becomes a unit of its own."""
    if isinstance(blocks, str) and blocks != LEAVES:
        blocks = (blocks,)
    for finest in (True,) if blocks == LEAVES else (False, True):
        blocks = None if isinstance(blocks, str) else blocks
        found = find_units(model, blocks=blocks, resident=resident, finest=finest, codes=codes)
        try:
            chosen, kept = (sizes or packed_sizes)(found), reserve
            if rest_format is not None:
                whole = sum(block.nbytes for block in chosen.values()) + extras_nbytes(model, found) + reserve
                if whole > tiers.device.capacity:
                    chosen, kept = resting_sizes(found, rest_format), reserve + live_nbytes(found, rest_format)
            return found, _plan(model, found, tiers, (kept, host_reserve), compute_s, on_disk, chosen, training)
        except BudgetTooSmall:
            if finest or blocks is not None:
                raise
    raise AssertionError("unreachable")


def packed_sizes(found: Found) -> dict[str, Block]:
    return {name: Block(name, packed_image(found, name).nbytes) for name in found.groups}


def resting_sizes(found: Found, rest_format: str) -> dict[str, Block]:
    sizes = {}
    for name, block in packed_sizes(found).items():
        packing = packing_of(found, name, rest_format)
        sizes[name] = Block(name, block.nbytes, resting_nbytes(packing)) if packing else block
    return sizes


def live_nbytes(found: Found, rest_format: str) -> int:
    """Device memory that the packed blocks of one unit are unpacked to: the largest unit's."""
    packings = {name: packing_of(found, name, rest_format) for name in found.groups}
    return max(sum(p.live.nbytes for name in unit.blocks if (p := packings[name])) for unit in found.units)


def packed_image(found: Found, name: str) -> Image:
    group = found.groups[name]
    return packed(name, dict(zip(group.paths, group.parameters, strict=True)))


def extras_nbytes(model: nn.Module, found: Found) -> int:
    """What stays on the device whatever the plan: buffers, and parameters that nothing moves."""
    moving = found.moving
    tensors = {id(t): t for t in (*found.rest, *model.buffers()) if id(t) not in moving}
    return sum(tensor.nbytes for tensor in tensors.values())


def _plan(
    model: nn.Module,
    found: Found,
    tiers: Tiers,
    reserved: tuple[int, int],  # on the device, in host memory
    compute_s: float,
    on_disk: bool,
    blocks: Mapping[str, Block],
    training: bool,
) -> Plan:
    extras = extras_nbytes(model, found)
    kept = extras + reserved[0]
    if not found.units:
        raise UsageError("this model has no parameters that could be moved", hint="use model.to(device)")
    host, disk = tiers.find("host"), tiers.find("disk")
    budgets = Budgets(
        max(0, tiers.device.capacity - kept),
        max(0, host.capacity - reserved[1]) if host else None,
        disk.capacity if disk else None,
    )
    total = sum(block.nbytes for block in blocks.values())
    steps = [
        Step(unit.name, unit.blocks, compute_s * sum(blocks[b].nbytes for b in unit.blocks) / max(1, total))
        for unit in found.units
    ]
    try:
        return make_plan(list(blocks.values()), steps, budgets, speeds_of(tiers), on_disk=on_disk, training=training)
    except BudgetTooSmall as exc:
        least = least_device_nbytes(blocks, steps)
        if not kept or budgets.device >= least:
            raise
        message = f"{exc.message} (besides {words(kept)} kept for buffers and activations)"
        hint = f"the smallest device budget that works is {least + kept} bytes ({words(least + kept)})"
        raise BudgetTooSmall(message, hint=hint) from exc


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
        self.images: dict[str, Image] = {}
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

    # --- placing ---------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Move every block to its home. On any failure everything is put back, then the failure is raised."""
        try:
            self.ledger.reserve("device", "buffers", extras_nbytes(self.model, self.found))
            self._move_extras(self.device)
            mover = self._make_mover({name: packed_image(self.found, name) for name in self.found.groups})
            self._make_live()
            for name in self.found.groups:
                self._place_block(name, mover)
            self._start(mover)
        except BaseException:
            self._put_back()
            raise

    def place_from(self, images: dict[str, Image]) -> None:
        """The same for a model whose weights are in files: what lives in memory is read, the rest stays where it is."""
        try:
            self.ledger.reserve("device", "buffers", extras_nbytes(self.model, self.found))
            self._move_extras(self.device)
            mover = self._make_mover(images)
            self._make_live()
            for name, group in self.found.groups.items():
                home = self.plan.homes[name]
                if name in self.packings:
                    self._put(name, pack_block(self.packings[name], self._read_live(name, mover)), mover)
                    continue
                if home == "device":
                    buffer = mover.add_resident(name)
                    mover.load(name, buffer)
                    views = views_of(images[name], buffer)
                    for path, parameter in zip(group.paths, group.parameters, strict=True):
                        parameter.data = views[path]
                    continue
                if home == "host":
                    mover.load_host(name)
                self._moved.append(name)
                for parameter in group.parameters:
                    park(parameter, self.device)
            mover.loaded()
            self._start(mover)
        except BaseException:
            self.close()
            raise

    def _make_mover(self, images: dict[str, Image]) -> Mover:
        self.images = images
        host = self.tiers.find("host")
        mover = Mover(
            self.device,
            images,
            self.plan.homes,
            self.plan.steps,
            ring_nbytes=self.plan.ring_nbytes,
            staging_nbytes=self.plan.staging_nbytes,
            ledger=self.ledger,
            reader=self.reader,
            shared=self.tiers.shared,
            pinned=bool(host and host.pinned),
        )
        self.mover = mover
        in_host = sum(self.plan.blocks[name].resting for name, home in self.plan.homes.items() if home == "host")
        if in_host:
            mover.make_host(in_host)
        return mover

    def _place_block(self, name: str, mover: Mover) -> None:
        group = self.found.groups[name]
        home = self.plan.homes[name]
        if home == "device":
            self.ledger.reserve("device", f"block {name}", self.images[name].nbytes)
            for parameter in group.parameters:
                parameter.data = parameter.data.to(self.device)
            return
        stored: dict[str, torch.Tensor] = {
            path: parameter.detach() for path, parameter in zip(group.paths, group.parameters, strict=True)
        }
        if name in self.packings:
            stored = pack_block(self.packings[name], stored)
        self._put(name, stored, mover)

    def _put(self, name: str, stored: dict[str, torch.Tensor], mover: Mover) -> None:
        """Store a block at its home below the device, and park its parameters."""
        if self.plan.homes[name] == "host":
            self.images[name] = mover.images[name] = packed(name, stored)
            pieces = mover.add_host(name)
            for view in self.images[name].views:
                flat = stored[view.name].cpu().contiguous().view(-1).view(torch.uint8)
                scatter(flat, pieces, view.offset)
        else:
            self.write_block(name, stored)
        # Only now is there a second, complete copy: the first one may go.
        self._moved.append(name)
        for parameter in self.found.groups[name].parameters:
            park(parameter, self.device)

    def _read_live(self, name: str, mover: Mover) -> dict[str, torch.Tensor]:
        """A block's whole tensors from its files, in the memory that it will be unpacked to later."""
        assert self.live is not None
        live = self.packings[name].live
        target = {view.name: self.live[view.offset : view.offset + view.nbytes] for view in live.views}
        for chunk, wanted in mover.chunks(name):
            for view in self.images[name].views:
                begin = max(view.offset, chunk.image_offset)
                end = min(view.offset + view.nbytes, chunk.image_offset + chunk.nbytes)
                if begin < end:
                    part = wanted[begin - chunk.image_offset : end - chunk.image_offset]
                    target[view.name][begin - view.offset : end - view.offset].copy_(part)
        return views_of(live, self.live[: live.nbytes])

    def _make_live(self) -> None:
        if not self.packings:
            return
        assert self.rest_format is not None
        nbytes = live_nbytes(self.found, self.rest_format)
        self.ledger.reserve("device", "unpacked block", nbytes)
        self.live = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def write_block(self, name: str, tensors: dict[str, Any]) -> None:
        """Write a block to a file of our own and remember where it is."""
        disk = self.tiers.find("disk")
        assert disk is not None
        if self.spill is None:
            self.spill = Spill(disk.place)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self.ledger.reserve("disk", f"block {name}", nbytes)
        try:
            located = self.spill.write({path: tensor.detach().cpu() for path, tensor in tensors.items()})
        except BaseException:
            self.ledger.release("disk", f"block {name}")
            raise
        image = from_files(name, located.values(), in_place=self.tiers.shared)
        self.images[name] = self.mover.images[name] = image

    def _move_extras(self, device: torch.device) -> None:
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

    def _start(self, mover: Mover) -> None:
        self._unbind()
        self.running = self._reading(mover)
        attach(self.model, self.running, Loading(self))
        self.model.__dict__[HANDLE] = self
        # A model that is dropped, and the end of the process, leave no thread and no file behind.
        self._finalizer = weakref.finalize(self.model, _give_back, self.reader, self.spill)

    def _reading(self, mover: Mover) -> Running:
        return Running(mover, self.found, self.images, self.plan.homes, self.device, self.packings, self.live)

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
            self._move_extras(target)
        self._put_back(target)

    def _put_back(self, target: torch.device | None = None) -> None:
        """Every parked parameter gets its values in memory of its own, then all files, threads and buffers go."""
        try:
            self._wake_all(target)
        except BaseException:
            if self.running is not None:  # it stays a fitted model, whole: every block is still at its home
                for name in self._moved:
                    for parameter in self.found.groups[name].parameters:
                        park(parameter, self.device)
                self._move_extras(self.device)
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
        reading = self.running
        if reading is None and self._moved:
            reading = self._reading(self.mover)
        for name in self._moved:
            assert reading is not None
            resting = reading.resting(name)
            group = self.found.groups[name]
            for path, parameter in zip(group.paths, group.parameters, strict=True):
                place = target or self.origins[id(parameter)]
                wake(parameter, resting[path].to(place if place.type != "meta" else self.device, copy=True))

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(
                "this fitted model is closed", hint="what was not on the device is gone: load or make it again"
            )

    def close(self) -> None:
        """Give threads, files and buffers back, now. Calling it twice is no error; give an optimizer back before.

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
        self.reader.close()
        if self.spill is not None:
            self.spill.close()
        if self._finalizer is not None:
            self._finalizer.detach()
        if self.live is not None:
            self.live = None
            self.ledger.release("device", "unpacked block")
        self.found = Found((), {}, (), {})  # its units, groups and slots are the model's modules and weights


def _give_back(reader: Reader, spill: Spill | None) -> None:
    reader.close()
    if spill is not None:
        spill.close()
