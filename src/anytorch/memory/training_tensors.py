"""What training keeps beside a block: its gradients between backward and step, and its optimizer states.

A block's tensors are in memory where the budget has room for them, otherwise on disk. What is on disk is replaced whole: the
new version is complete before the old one goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anytorch.errors import BudgetTooSmall
from anytorch.memory.transfers import Copies
from anytorch.safetensors_files import StoredTensor

if TYPE_CHECKING:
    from anytorch.memory.fitted_model import Fitted

Tensors = dict[str, torch.Tensor]


class BlockTensors:
    """`what` names it in the ledger. `put` and `take` work on all tensors of a block at once."""

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
        spill = self.fitted.block_homes.open_spill()
        if before_disk is not None:
            before_disk()
        ledger.reserve("disk", f"new {holder}", nbytes)
        try:
            located = spill.write(tensors)
        except BaseException:
            ledger.release("disk", f"new {holder}")
            raise
        self.drop(block)
        ledger.release("disk", f"new {holder}")
        ledger.reserve("disk", holder, nbytes)
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
        self._remove(block)

    def _remove(self, block: str) -> None:
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
    """Gradients, which come one by one. `parameters`: what is trained of each block."""

    def __init__(self, fitted: Fitted, parameters: Mapping[str, Sized]) -> None:
        super().__init__(fitted, "gradients")
        self._sizes = {block: len(found) for block, found in parameters.items()}
        self._pending: dict[str, Tensors] = {}  # of the block that backward is at
        self._down = Copies(fitted.device)
        self.copied: dict[str, Any] = {}  # block → the event after which its gradients are in host memory

    def add(self, block: str, path: str, gradient: torch.Tensor) -> None:
        """backward has a gradient: it leaves the device, and is put to its block's when that has all of them."""
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
        """Backward is over: blocks of which some parameters took no part in it have no more to come."""
        for block in list(self._pending):
            self._keep(block)

    def drop_pending(self) -> None:
        self._pending.clear()

    def ready(self, block: str) -> Callable[[], bool]:
        """A question: are the block's gradients in host memory?"""
        event = self.copied.get(block)
        return event.query if event is not None else _at_once

    def wait_for(self, block: str) -> None:
        """Return when the block's gradients are in host memory."""
        event = self.copied.pop(block, None)
        if event is not None:
            event.synchronize()

    def clear(self) -> None:
        self._pending.clear()
        super().clear()


def _at_once() -> bool:
    return True


def is_shared(gradient: torch.Tensor) -> bool:
    """May something else own this memory (a view of another gradient)?"""
    return gradient._base is not None or gradient.untyped_storage().nbytes() != gradient.nbytes


OF = "::"  # between a parameter's path and the name of its state


class OptimizerStates(BlockTensors):
    """Tensors that are called "path::state"; `numbers` has the state that is no tensor, by block and path."""

    def __init__(self, fitted: Fitted) -> None:
        super().__init__(fitted, "optimizer state")
        self.numbers: dict[str, dict[str, dict[str, Any]]] = {}

    def of(self, block: str, path: str) -> dict[str, Any]:
        """One parameter's state; {} if it has none yet."""
        return self._of(block, path, self.take(block))

    def _of(self, block: str, path: str, stored: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        prefix = f"{path}{OF}"
        found: dict[str, Any] = dict(self.numbers.get(block, {}).get(path, {}))
        found.update({key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)})
        return found

    def give(self, block: str, by_path: Mapping[str, Mapping[str, Any]]) -> None:
        """States of some of a block's parameters, from now on ours; what else the block has stays."""
        tensors = dict(self.take(block))
        for path, state in by_path.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{path}{OF}{key}"] = value
                else:
                    self.numbers.setdefault(block, {}).setdefault(path, {})[key] = value
        if tensors:
            self.put(block, tensors)

    def lend(self, block: str, optimizer: torch.optim.Optimizer, shadows: Mapping[str, nn.Parameter]) -> None:
        """Let an optimizer over stand-ins of a block's parameters work with their states."""
        stored = self.take(block)
        for path, shadow in shadows.items():
            state = self._of(block, path, stored)
            if state:
                optimizer.state[shadow] = state

    def take_back(self, block: str, optimizer: torch.optim.Optimizer, shadows: Mapping[str, nn.Parameter]) -> None:
        self.give(block, {path: optimizer.state.get(shadow, {}) for path, shadow in shadows.items()})

    def clear(self) -> None:
        super().clear()
        self.numbers.clear()
