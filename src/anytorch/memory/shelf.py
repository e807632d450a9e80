"""Tensors that belong to a block and rest beside it: its gradients between backward and step, its optimizer states.

A block's shelf is in memory where the budget has room for it, otherwise on disk. What is on disk is replaced whole: the new
version is complete before the old one goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from anytorch.errors import BudgetTooSmall
from anytorch.memory.spill import Spill
from anytorch.safetensors_files import StoredTensor

if TYPE_CHECKING:
    from anytorch.memory.handle import Fitted

Tensors = dict[str, torch.Tensor]


def memory_level(fitted: Fitted) -> str:
    """The ledger's name for the host's RAM: a level of its own, or the device that computes in it."""
    return "host" if fitted.tiers.find("host") is not None else "device"


def spill_of(fitted: Fitted) -> Spill:
    disk = fitted.tiers.find("disk")
    if disk is None:
        raise BudgetTooSmall(
            "training needs more memory than the budgets have, and there is no disk level",
            hint="raise host_budget, or leave disk= at its default",
        )
    if fitted.spill is None:
        fitted.spill = Spill(disk.place)
        weakref.finalize(fitted.model, fitted.spill.close)  # the fitted model's own finalizer began without it
    return fitted.spill


class Shelf:
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
        """Keep these tensors (on the CPU, the shelf's own from now on) in place of those it had for the block.

        `before_disk` is called before they are written to disk: they may still be on their way from the device.
        """
        ledger, holder, level = self.fitted.ledger, f"{self.what} of {block}", memory_level(self.fitted)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if block not in self._on_disk:
            try:
                ledger.resize(level, holder, nbytes)
            except BudgetTooSmall:
                pass  # what is there stays until the new tensors are on disk
            else:
                self._in_memory[block] = dict(tensors)
                return
        spill = spill_of(self.fitted)
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
            self.fitted.ledger.release(memory_level(self.fitted), f"{self.what} of {block}")
        self._remove(block)

    def _remove(self, block: str) -> None:
        located = self._on_disk.pop(block, None)
        if located and self.fitted.spill is not None:
            self.fitted.spill.remove(next(iter(located.values())).path)
            self.fitted.ledger.release("disk", f"{self.what} of {block}")

    def blocks(self) -> list[str]:
        return [*self._in_memory, *self._on_disk]

    def clear(self) -> None:
        for block in self.blocks():
            self.drop(block)
