"""A fitted model at work: weights are there while their module runs, parked otherwise, and fetched again for backward.

A model with packed blocks has one scratch memory that they are unpacked to. Whoever runs a unit, forward or backward, takes
it before anything else, so such a model computes one unit at a time, whatever the number of threads.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from anytorch.errors import UsageError
from anytorch.memory.formats import UnpackScratch
from anytorch.memory.homes import BlockHomes, FittedState
from anytorch.memory.images import views_of
from anytorch.memory.mover import Mover
from anytorch.memory.parked import PARKED, park, wake
from anytorch.memory.ring import AGAIN, BACKWARD, FORWARD, TRAINING
from anytorch.memory.units import Unit


@dataclass(frozen=True)
class SavedReference:
    """What autograd saves of a tensor in the ring or the scratch: what it takes to make it again when it was overwritten."""

    step: str
    block: str | None  # None: in the scratch memory, where a step's blocks have their places
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class OffloadedActivation:
    """A saved activation in host memory (pinned, where it is not the device's own), and the device it belongs on."""

    values: torch.Tensor
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> OffloadedActivation:
        away = tensor.device.type != "cpu"
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=away)
        return OffloadedActivation(values.copy_(tensor), tensor.device)

    def back(self) -> torch.Tensor:
        return self.values.to(self.device, non_blocking=True)


class Running:
    def __init__(self, state: FittedState, mover: Mover, block_homes: BlockHomes, live: torch.Tensor | None) -> None:
        """`live`: the device memory that packed blocks are unpacked to, where there are some."""
        self.mover = mover
        self.block_homes = block_homes
        self.found = state.found
        self.packings = state.packings
        self.images = state.images
        self.homes = state.plan.homes
        self.device = state.device
        units = state.found.units
        self.scratch = UnpackScratch(live, state.packings, units, mover.copies) if live is not None else None
        self.units = tuple(u for u in units if any(self.homes[b] != "device" for b in u.blocks))
        self._units = {unit.name: unit for unit in self.units}
        self._lock = threading.RLock()
        self._awake: Counter[str] = Counter()  # block → how many running forwards use it
        self._views: dict[tuple[str, int], list[torch.Tensor]] = {}
        # Thread → the step whose blocks its backward holds, and the number of that backward.
        self._holding: dict[int, tuple[str, int]] = {}
        self.offload = False  # activations wait for backward in host memory
        self._backwards = 0  # how many steps backward has asked for so far
        self._again: set[str] = set()  # steps computed again whose graph is not gone through
        self.forwards: Counter[str] = (
            Counter()
        )  # per step, since an optimizer's last step; counted for `after_backward`
        self.after_backward: Callable[[str], None] | None = None  # told of a step used once that will not come again

    # --- forward ---------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> None:
        """Bring a unit's weights to the device and let its Parameters show them, before its forward."""
        if self.scratch is not None:
            self.scratch.take()
        entered: list[str] = []
        try:
            if in_backward() and self._held_step() != unit.name:
                self._let_go()  # what is computed again in backward needs the place; what backward still needs comes again
            buffers = self.mover.acquire(unit.name, self._way(unit))
            try:
                with self._lock:
                    self._wake(unit, buffers, entered)
            except BaseException:
                self._park(entered)
                self.mover.release(unit.name)
                raise
        except BaseException:
            if self.scratch is not None:
                self.scratch.give_back()
            raise

    def _way(self, unit: Unit) -> str:
        if in_backward():
            self._again.add(unit.name)
            return AGAIN
        if self.after_backward is not None:
            self.forwards[unit.name] += 1
        return TRAINING if unit.module.training else FORWARD

    def leave(self, unit: Unit) -> None:
        """Park a unit's Parameters and release its blocks, after its forward, however that ended."""
        self._park([name for name in unit.blocks if self.homes[name] != "device"])
        self.mover.release(unit.name)
        if self.scratch is not None:
            self.scratch.give_back()

    def _wake(self, unit: Unit, buffers: Mapping[str, torch.Tensor], entered: list[str]) -> None:
        self._refuse_nesting(unit)
        for name in unit.blocks:
            if self.homes[name] == "device":
                continue
            self._awake[name] += 1
            entered.append(name)
            if self._awake[name] > 1:
                continue
            packed = name in self.packings
            views = self._unpacked(unit, name, buffers[name]) if packed else self._views_in(name, buffers[name])
            for parameter, view in zip(self.found.groups[name].parameters, views, strict=True):
                wake(parameter, view)

    def _park(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                self._awake[name] -= 1
                if not self._awake[name]:
                    for parameter in self.found.groups[name].parameters:
                        park(parameter, self.device)
                    for layer in self.found.packed_layers[name]:
                        layer._bound.clear()

    def _unpacked(self, unit: Unit, name: str, buffer: torch.Tensor) -> list[torch.Tensor]:
        """A packed block's tensors in the scratch memory, which the calling thread has taken."""
        assert self.scratch is not None
        if not self.scratch.has(unit.name, name, buffer):
            self.scratch.unpack(unit.name, name, self.images[name], buffer)
        views = self.scratch.views(unit.name, name)
        return [views[path] for path in self.found.groups[name].paths]

    def _refuse_nesting(self, unit: Unit) -> None:
        """Raise UsageError for a packed unit within another one's forward: the scratch memory holds one of them."""
        if self.scratch is None or self.scratch.step == unit.name or self.packings.keys().isdisjoint(unit.blocks):
            return
        outer = next((name for name in self.packings if self._awake.get(name)), None)
        if outer is not None:
            raise UsageError(
                f"{unit.name!r} is used within the forward of {outer!r}, and both are stored packed: there is "
                "memory to unpack only one of them at a time",
                hint="name a module that holds both with blocks=[…], keep one on the device with resident=[…], or leave "
                "rest_format out",
            )

    def _views_in(self, name: str, buffer: torch.Tensor) -> list[torch.Tensor]:
        """A block's tensors in one place of the ring; blocks come back to the same places, so these are kept."""
        key = (name, buffer.data_ptr())
        if key not in self._views:
            with torch.inference_mode(False), torch.no_grad():
                by_path = views_of(self.images[name], buffer)
                self._views[key] = [by_path[path] for path in self.found.groups[name].paths]
        return self._views[key]

    def forget_views(self, name: str) -> None:
        for key in [key for key in self._views if key[0] == name]:
            del self._views[key]

    # --- backward --------------------------------------------------------------------------------------------------

    def pack(self, unit: Unit, tensor: torch.Tensor) -> torch.Tensor | SavedReference | OffloadedActivation:
        """Return what autograd keeps of a tensor: of one in the ring or the scratch, which is overwritten, its place."""
        if isinstance(tensor, PARKED):
            tensor = tensor.data
        place = self._place(tensor)
        if place is None:
            # An operation's own output, kept as it is, would keep its graph and with it the model alive for ever.
            return OffloadedActivation.of(tensor) if self.offload else tensor.detach()
        return SavedReference(unit.name, *place, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def _place(self, tensor: torch.Tensor) -> tuple[str | None, int] | None:
        offset = self.scratch.offset(tensor) if self.scratch is not None else None
        return self.mover.ring_offset(tensor) if offset is None else (None, offset)

    def unpack(self, saved: torch.Tensor | SavedReference | OffloadedActivation) -> torch.Tensor:
        """Return the tensor behind what `pack` gave: its block is fetched again and held while backward needs its step."""
        if isinstance(saved, OffloadedActivation):
            return saved.back()
        if not isinstance(saved, SavedReference):
            return saved
        if self.scratch is not None:
            self.scratch.take()  # until the tensor is found; then backward holds it, as it does the ring's blocks
        try:
            if self._held_step() != saved.step:
                self._let_go()
                self._begin_backward(saved.step)
            return self._found_again(saved)
        finally:
            if self.scratch is not None:
                self.scratch.give_back()

    def _begin_backward(self, step: str) -> None:
        self.mover.acquire(step, BACKWARD)
        if self.scratch is not None:
            self.scratch.take()
        with self._lock:
            self._backwards = number = self._backwards + 1
            self._holding[threading.get_ident()] = (step, number)
        # Called when this backward ends, whichever step came last; dropped, and so finalized, when it fails.
        ending = partial(self._ended, number)
        weakref.finalize(ending, self._finish_own, number).atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(ending)

    def _found_again(self, saved: SavedReference) -> torch.Tensor:
        if saved.block is None:
            assert self.scratch is not None
            unit = self._units[saved.step]
            self._refuse_nesting(unit)
            for name in unit.blocks:
                if name in self.packings:
                    self._unpacked(unit, name, self.mover.held(name))
            buffer = self.scratch.memory
        else:
            buffer = self.mover.held(saved.block)
        whole = buffer[saved.offset :]
        whole = whole[: whole.numel() // saved.dtype.itemsize * saved.dtype.itemsize].view(saved.dtype)
        return whole.as_strided(saved.size, saved.stride)

    def _ended(self, number: int) -> None:
        """End a graph's backward. What was computed again for it is not needed by the rest of this backward."""
        self._finish_own(number)
        if number != self._backwards:
            return
        over, self._again = self._again, set()
        if self.after_backward is not None:
            for step in over:
                if self.forwards.get(step) == 1:
                    self.after_backward(step)

    def forget_passes(self) -> None:
        """Forget what was counted for an optimizer's step that is over or given up, also by a broken-off backward."""
        self.forwards.clear()
        self._again.clear()

    def _held_step(self) -> str | None:
        """The step whose blocks the calling thread's backward holds."""
        return self._holding.get(threading.get_ident(), (None, 0))[0]

    def _finish_own(self, number: int) -> None:
        """Let go of what a backward holds. Its end may be told in another thread than the one that ran it."""
        with self._lock:
            thread = next((thread for thread, (_, held) in self._holding.items() if held == number), None)
        if thread is not None:
            self._let_go(thread)

    def _let_go(self, thread: int | None = None) -> None:
        """Release what a thread's backward (the calling thread's own by default) holds of the ring and the scratch."""
        with self._lock:
            step, _ = self._holding.pop(threading.get_ident() if thread is None else thread, (None, 0))
        if step is not None:
            self.mover.release(step)
            if self.scratch is not None:
                self.scratch.give_back()

    def finish(self) -> None:
        """Release what all backwards hold: they are over, or were given up."""
        for thread in list(self._holding):
            self._let_go(thread)

    def close(self) -> None:
        """Let go of the ring and the scratch memory: a graph that nobody went through may keep this object for long."""
        self.finish()
        self._views.clear()
        if self.scratch is not None:
            self.scratch.close()

    # --- at rest ---------------------------------------------------------------------------------------------------

    def resting(self, name: str) -> dict[str, torch.Tensor]:
        """A block's tensors as they rest, when nobody changes them."""
        self.mover.wait_unchanged(name)
        return self.block_homes.tensors(name)

    def parked_slots(self) -> dict[nn.Module, dict[str, str]]:
        """Owner → parameter name → block, for every parameter that does not rest on the device."""
        slots: dict[nn.Module, dict[str, str]] = {}
        for name, group in self.found.groups.items():
            if self.homes[name] != "device":
                for parameter in group.parameters:
                    for slot in self.found.slots[id(parameter)]:
                        slots.setdefault(slot.owner, {})[slot.name] = name
        return slots

    def show(self, names: Mapping[str, str], module: nn.Module, *_: Any) -> None:
        """Let a module's parameters show their values at rest, for state_dict. `names`: parameter → block."""
        for key, block in names.items():
            parameter = held_by(module, key)
            if isinstance(parameter, PARKED):
                wake(parameter, self.resting(block)[self.path_of(parameter, block)])

    def hide(self, names: Mapping[str, str], module: nn.Module, *_: Any) -> None:
        """Park them again."""
        for key, block in names.items():
            parameter = held_by(module, key)
            if not self._awake.get(block):
                park(parameter, self.device)

    def path_of(self, parameter: torch.Tensor, block: str) -> str:
        return next(path for path, p in self.found.groups[block].tensors().items() if p is parameter)


def held_by(module: nn.Module, name: str) -> torch.Tensor:
    """A module's parameter or buffer."""
    parameter = module._parameters.get(name)
    found = parameter if parameter is not None else module._buffers[name]
    assert found is not None
    return found


def in_backward() -> bool:
    """Return True if the calling thread is within backward (which computes a checkpointed block again)."""
    return torch._C._current_graph_task_id() != -1
