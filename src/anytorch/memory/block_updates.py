"""What training does to blocks that are not on the device: their gradients and optimizer states, and their updates.

A block's tensors are in memory where the budget has room for them, otherwise on disk. What is on disk is replaced whole: the
new version is complete before the old one goes.

A block is updated on the CPU where it rests, by our own loop or by torch's optimizer. One thread does so beside what else
the program does, of what is ready what is needed first. A block that waits for its update or is being updated cannot be
fetched to the device (`Mover.begin_change`), so nothing ever computes with half of one: a step that needs the block waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anytorch.errors import BudgetTooSmall, ModelError, UsageError
from anytorch.memory.buffers import parts_of
from anytorch.memory.fused import MOMENTS, Update, can_do, kind_of
from anytorch.memory.fused import step as step_natively
from anytorch.memory.mover import Mover
from anytorch.memory.sizes import words
from anytorch.memory.transfers import Copies
from anytorch.safetensors_files import StoredTensor
from anytorch.workers import start

if TYPE_CHECKING:
    from anytorch.memory.fitted_model import Fitted

Tensors = dict[str, torch.Tensor]
Factory = Callable[..., torch.optim.Optimizer]
Groups = Sequence[Mapping[str, Any]]  # an optimizer's param_groups
Options = Sequence[Mapping[str, Any]]  # of every parameter group
OF = "::"  # between a parameter's path and the name of its state
WORKING = "optimizer step"  # in the ledger
THREAD_NAME = "anytorch-optimizer"
POLL_S = 0.0003
GO_BACK = "go back to the last checkpoint (anytorch.memory.resume_training)"


# --- gradients and states ----------------------------------------------------------------------------------------------


class BlockTensors:
    """Keep tensors for each block, in memory or on disk; `put` and `take` take all of a block's. `what`: in the ledger."""

    def __init__(self, fitted: Fitted, what: str) -> None:
        self.fitted = fitted
        self.what = what
        self._in_memory: dict[str, Tensors] = {}
        self._on_disk: dict[str, dict[str, StoredTensor]] = {}

    def __contains__(self, block: str) -> bool:
        return block in self._in_memory or block in self._on_disk

    def put(
        self, block: str, tensors: Mapping[str, torch.Tensor], before_disk: Callable[[], None] | None = None
    ) -> None:
        """Keep these tensors (on the CPU, ours from now on) in place of those it had for the block.

        `before_disk` is called before they are written to disk: they may still be on their way from the device.
        """
        ledger, holder, level = self.fitted.ledger, f"{self.what} of {block}", self.fitted.memory_level
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if block not in self._on_disk:
            try:
                ledger.resize(level, holder, nbytes)
            except BudgetTooSmall:
                pass  # what is there stays until the new tensors are on disk
            else:
                self._in_memory[block] = dict(tensors)
                return
        if before_disk is not None:
            before_disk()
        with self.fitted.block_homes.replacing(holder, tensors) as located:
            self.drop(block)
        self._on_disk[block] = located

    def take(self, block: str) -> Tensors:
        """The block's tensors, to be changed in place and `put` back; {} if it has none yet."""
        if block in self._in_memory:
            return self._in_memory[block]
        located = self._on_disk.get(block)
        if located is None:
            return {}
        return self.fitted.reader.read_tensors(located.values())

    def drop(self, block: str) -> None:
        if self._in_memory.pop(block, None) is not None:
            self.fitted.ledger.release(self.fitted.memory_level, f"{self.what} of {block}")
        located = self._on_disk.pop(block, None)
        if located:
            self.fitted.block_homes.remove_file(next(iter(located.values())).path)
            self.fitted.ledger.release("disk", f"{self.what} of {block}")

    def blocks(self) -> list[str]:
        return [*self._in_memory, *self._on_disk]

    def clear(self) -> None:
        for block in self.blocks():
            self.drop(block)


class Gradients(BlockTensors):
    """Collect each block's gradients, which come one by one. `parameters`: what is trained of each block."""

    def __init__(self, fitted: Fitted, parameters: Mapping[str, Sized]) -> None:
        super().__init__(fitted, "gradients")
        self._sizes = {block: len(found) for block, found in parameters.items()}
        self._pending: dict[str, Tensors] = {}  # of the block that backward is at
        self._down = Copies(fitted.device)
        self.copied: dict[str, Any] = {}  # block → the event after which its gradients are in host memory

    def add(self, block: str, path: str, gradient: torch.Tensor) -> None:
        """Take a gradient that backward made off the device; it joins its block's others when all of them are there."""
        if path in self._pending.get(block, ()):
            self._keep(block)  # an earlier backward that some parameters of the block took no part in
        pending = self._pending.setdefault(block, {})
        pending[path] = self._to_host(gradient.detach())
        if len(pending) == self._sizes[block]:
            self._keep(block)

    def _to_host(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient in host memory: at once, or under way beside what the device computes (`arrive` waits for it)."""
        if not self._down.asynchronous:
            return gradient.to("cpu", copy=gradient.device.type == "cpu" and is_shared(gradient))
        target = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
        self._down.copy_after(self._down.computed())
        with self._down.use():
            target.copy_(gradient, non_blocking=True)
        gradient.record_stream(self._down.stream)  # its memory is not given to others before the copy is done
        return target

    def _keep(self, block: str) -> None:
        """Add the gradients of this backward to those of earlier ones."""
        new = self._pending.pop(block)
        if block in self:
            self.arrive()
        there = self.take(block)
        for path, gradient in new.items():
            if path in there:
                there[path].add_(gradient)
            else:
                there[path] = gradient
        self.put(block, there, before_disk=self.arrive)
        self.copied[block] = self._down.copied()

    def arrive(self) -> None:
        """Return when all gradients are in host memory."""
        self._down.synchronize()

    def is_whole(self, block: str) -> bool:
        """True if backward has made all of the block's gradients."""
        return block in self and block not in self._pending

    def keep_rest(self) -> None:
        """Keep the gradients of blocks that are not complete: backward is over, and some parameters took no part in it."""
        for block in list(self._pending):
            self._keep(block)

    def drop_pending(self) -> None:
        self._pending.clear()

    def ready(self, block: str) -> Callable[[], bool]:
        """Return a function that says whether the block's gradients are in host memory."""
        event = self.copied.get(block)
        return event.query if event is not None else lambda: True

    def wait_for(self, block: str) -> None:
        """Return when the block's gradients are in host memory."""
        event = self.copied.pop(block, None)
        if event is not None:
            event.synchronize()

    def clear(self) -> None:
        self._pending.clear()
        super().clear()


def is_shared(gradient: torch.Tensor) -> bool:
    """Return True if something else may own this memory (the gradient is a view of another one)."""
    return gradient._base is not None or gradient.untyped_storage().nbytes() != gradient.nbytes


class OptimizerStates(BlockTensors):
    """Keep optimizer states as tensors called "path::state"; `numbers` has what is no tensor, by block and path."""

    def __init__(self, fitted: Fitted) -> None:
        super().__init__(fitted, "optimizer state")
        self.numbers: dict[str, dict[str, dict[str, Any]]] = {}

    def of(self, block: str, path: str) -> dict[str, Any]:
        """One parameter's state; {} if it has none yet."""
        return self.among(self.take(block), block, path)

    def among(self, stored: Mapping[str, torch.Tensor], block: str, path: str) -> dict[str, Any]:
        """The same from what `take` gave for its block."""
        prefix = f"{path}{OF}"
        found: dict[str, Any] = dict(self.numbers.get(block, {}).get(path, {}))
        found.update({key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)})
        return found

    def give(self, block: str, by_path: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over states of some of a block's parameters; what else the block has stays."""
        tensors = dict(self.take(block))
        for path, state in by_path.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{path}{OF}{key}"] = value
                else:
                    self.numbers.setdefault(block, {}).setdefault(path, {})[key] = value
        if tensors:
            self.put(block, tensors)

    def clear(self) -> None:
        super().clear()
        self.numbers.clear()


# --- updates -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedBlocks:
    blocks: Mapping[str, Sequence[tuple[str, torch.Tensor]]]  # the trained parameters of each block, by path
    places: Mapping[int, tuple[str, str]]  # a parameter's id → its block and path
    groups: Mapping[tuple[str, str], int]  # block and path → the parameter's group
    alone: Mapping[str, Sequence[str]]  # step → the blocks that no other step uses


def trained_of(fitted: Fitted, param_groups: Groups) -> TrainedBlocks:
    """Find what an optimizer's parameter groups train. Raises UsageError where a trained weight rests in few bits."""
    wanted = {id(p) for group in param_groups for p in group["params"] if p.requires_grad}
    blocks = {
        name: found
        for name, group in fitted.found.groups.items()
        if fitted.plan.homes[name] != "device"
        and (found := [(path, p) for path, p in group.tensors().items() if id(p) in wanted])
    }
    refuse_packed(fitted, blocks)
    places = {id(p): (name, path) for name, found in blocks.items() for path, p in found}
    groups = {
        places[id(p)]: index for index, group in enumerate(param_groups) for p in group["params"] if id(p) in places
    }
    uses = Counter(name for unit in fitted.found.units for name in unit.blocks)
    alone = {unit.name: [name for name in unit.blocks if uses[name] == 1] for unit in fitted.found.units}
    return TrainedBlocks(blocks, places, groups, alone)


def refuse_packed(fitted: Fitted, blocks: Mapping[str, Sequence[tuple[str, torch.Tensor]]]) -> None:
    """Raise UsageError for a trained weight that rests packed: a step's small changes would be lost in its codes."""
    for name, found in blocks.items():
        packing = fitted.packings.get(name)
        for path, _ in found:
            if packing and (path in packing.weights or fitted.plan.homes[name] == "disk"):
                raise UsageError(
                    f"{path} is in a block stored as {fitted.rest_format}, which cannot be trained",
                    hint="fit the model without rest_format, freeze it (requires_grad_(False)), or keep what is "
                    "trained on the device with resident=[…]",
                )


def reserve_working_memory(fitted: Fitted, trained: TrainedBlocks, moments: int) -> None:
    """Reserve what a step holds at once: the largest block's weights, gradients and states, if not in memory anyway."""
    largest = max((sum(p.nbytes for _, p in found) for found in trained.blocks.values()), default=0)
    ledger, level = fitted.ledger, fitted.memory_level
    needed = (2 + moments) * largest
    try:
        ledger.reserve(level, WORKING, needed)
    except BudgetTooSmall as exc:
        keyword = "host_reserve" if level == "host" else "reserve"
        raise BudgetTooSmall(
            f"a step of the optimizer needs {words(needed)} at level {level} for its largest block, and "
            f"{words(ledger.free(level))} are free",
            hint=f"anytorch.memory.fit(model, …, {keyword}={needed}) keeps that much free",
        ) from exc


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class BlockStep:
    """Does one block's step on the CPU. `groups`: the parameter group of every (block, path) that is trained."""

    def __init__(
        self, fitted: Fitted, factory: Factory, groups: Mapping[tuple[str, str], int], states: OptimizerStates
    ) -> None:
        self._fitted = fitted
        self._factory = factory
        self._groups = groups
        self._states = states
        self._kind = kind_of(factory)

    def __call__(self, block: str, gradients: Tensors, scale: torch.Tensor | None, options: Options) -> None:
        """Update a block's weights at home and its states. `scale` is what clipping multiplies gradients by."""
        with torch.no_grad():
            if not self._natively(block, gradients, scale, options):
                self._by_torch(block, gradients, scale, options)

    def _natively(self, block: str, gradients: Tensors, scale: torch.Tensor | None, options: Options) -> bool:
        """Update a block by our own loop if it gives torch's bits. Return False, with nothing changed, if it does not."""
        host = self._fitted.block_homes.host
        if self._kind is None or block not in host:
            return False
        states, pieces = self._states.take(block), host[block]
        views = {view.name: view for view in self._fitted.images[block].views}
        updates = []
        for path, gradient in gradients.items():
            state = {key: states[name] for key in (*MOMENTS, "step") if (name := f"{path}{OF}{key}") in states}
            view = views[path]
            dtype: torch.dtype = getattr(torch, view.dtype)
            weight = [part.view(dtype) for part in parts_of(pieces, view.offset, view.nbytes)]
            update = Update(weight, gradient, state, options[self._groups[block, path]])
            if not can_do(self._kind, update):
                return False
            updates.append(update)
        step_natively(self._kind, updates, None if scale is None else float(scale), torch.get_num_threads())
        self._states.put(block, states)
        return True

    def _by_torch(self, block: str, gradients: Tensors, scale: torch.Tensor | None, options: Options) -> None:
        resting = self._fitted.block_homes.tensors(block)
        home = self._fitted.block_homes.host.get(block, [])
        # Weights that lie in host memory in one piece are updated where they are; others in a copy that is written back.
        weights = {path: t if lies_in(t := resting[path], home) else t.clone() for path in gradients}
        shadows = {path: nn.Parameter(weight) for path, weight in weights.items()}
        for path, shadow in shadows.items():
            shadow.grad = gradients[path] if scale is None else gradients[path] * scale
        optimizer = self._optimizer(block, shadows, options)
        stored = self._states.take(block)
        for path, shadow in shadows.items():
            state = self._states.among(stored, block, path)
            if state:
                optimizer.state[shadow] = state
        optimizer.step()
        self._states.give(block, {path: optimizer.state.get(shadow, {}) for path, shadow in shadows.items()})
        copies = {path: shadow.detach() for path, shadow in shadows.items() if not lies_in(shadow, home)}
        if copies:
            self._fitted.write_back(block, copies)

    def _optimizer(self, block: str, shadows: Mapping[str, nn.Parameter], options: Options) -> torch.optim.Optimizer:
        """Make an optimizer over one block's weights on the CPU, with the options of the groups they belong to."""
        members: dict[int, list[nn.Parameter]] = {}
        for path, shadow in shadows.items():
            members.setdefault(self._groups[block, path], []).append(shadow)
        return self._factory([{**options[index], "params": mine} for index, mine in sorted(members.items())])


def lies_in(tensor: torch.Tensor, pieces: list[torch.Tensor]) -> bool:
    address = tensor.data_ptr()
    return any(piece.data_ptr() <= address < piece.data_ptr() + piece.numel() for piece in pieces)


def tried(factory: Factory, options: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """An optimizer's defaults, and how many tensors it keeps for each parameter: seen by letting it take one step."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = factory([parameter], **options)
    optimizer.step()
    kept = optimizer.state[parameter].values()
    return optimizer.defaults, sum(isinstance(value, torch.Tensor) and value.dim() > 0 for value in kept)


@dataclass(frozen=True)
class Work:
    do: Callable[[], None]
    ready: Callable[[], bool]  # are its gradients there? The device sends them in its own time


def half_a_step(failure: object) -> ModelError:
    return ModelError(
        f"a step of the optimizer failed, so some weights are updated and others are not: {failure}", hint=GO_BACK
    )


class Updates:
    """`add` queues the update of a block, `wait` returns when all are done. A thread exists only while there is work."""

    def __init__(self, mover: Mover, order: Sequence[str]) -> None:
        self._mover = mover
        self._rank = {name: rank for rank, name in enumerate(order)}
        self._waiting: dict[str, Work] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def add(self, name: str, do: Callable[[], None], ready: Callable[[], bool]) -> None:
        """Queue a block's update; the block cannot be fetched from now on until it is done.

        Raises NoThread, with the block as it was, where the system gives none.
        """
        self._mover.begin_change(name)
        try:
            with self._changed:
                if self._thread is None:
                    # No daemon: a program that ends after its last step waits for it. A thread that the interpreter ends
                    # in the middle of torch's code takes the process down with it.
                    thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=False)
                    start(thread)  # begins when `_changed` is free, so it finds what is added next
                    self._thread = thread
                self._waiting[name] = Work(do, ready)
        except BaseException:
            self._mover.end_change(name)
            raise

    def __contains__(self, name: str) -> bool:
        with self._changed:
            return name in self._waiting

    def names(self) -> set[str]:
        """Blocks that wait for their update or are being updated."""
        with self._changed:
            return set(self._waiting)

    def wait(self) -> None:
        """Return when every update is done. Raises ModelError if one failed: the weights are then not to be trusted."""
        with self._changed:
            while self._thread is not None:
                self._changed.wait()
            failure, self._failure = self._failure, None
        if failure is not None:
            raise half_a_step(failure) from failure

    def failed(self) -> bool:
        return self._failure is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                name = self._next()
                if name is None:
                    self._changed.wait(POLL_S)
                    continue
                work = self._waiting[name]
            try:
                if self._failure is None:
                    work.do()
            except BaseException as exc:  # noqa: BLE001  (raised by `wait`, in the thread that asked for the step)
                self._failure = exc
            finally:
                with self._changed:
                    del self._waiting[name]
                self._mover.end_change(name)

    def _next(self) -> str | None:
        ready = [name for name, work in self._waiting.items() if self._is_ready(work)]
        return min(ready, key=self._rank.__getitem__, default=None)

    def _is_ready(self, work: Work) -> bool:
        """Return True if a block's turn can come now; after a failure always, as what it waits for may never come."""
        if self._failure is None:
            try:
                return work.ready()
            except BaseException as exc:  # noqa: BLE001  (an error of the device; raised by `wait`)
                self._failure = exc
        return True
