"""Gradients of streamed blocks: they leave the device as backward makes them, and wait on a shelf for the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import TYPE_CHECKING, Any

import torch

from anytorch.memory.shelf import Shelf, Tensors
from anytorch.memory.streams import Copies

if TYPE_CHECKING:
    from anytorch.memory.handle import Fitted


class Gradients(Shelf):
    """A shelf that gradients come to one by one. `parameters`: what is trained of each block."""

    def __init__(self, fitted: Fitted, parameters: Mapping[str, Sized]) -> None:
        super().__init__(fitted, "gradients")
        self._sizes = {block: len(found) for block, found in parameters.items()}
        self._pending: dict[str, Tensors] = {}  # of the block that backward is at
        self._down = Copies(fitted.device)
        self.copied: dict[str, Any] = {}  # block → the event after which its gradients are in host memory

    def add(self, block: str, path: str, gradient: torch.Tensor) -> None:
        """backward has a gradient: it leaves the device, and goes to the shelf when its block has all of them."""
        if path in self._pending.get(block, ()):
            self._shelve(block)  # an earlier backward that some parameters of the block took no part in
        pending = self._pending.setdefault(block, {})
        pending[path] = self._to_host(gradient.detach())
        if len(pending) == self._sizes[block]:
            self._shelve(block)

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

    def _shelve(self, block: str) -> None:
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

    def shelve_rest(self) -> None:
        """Backward is over: blocks of which some parameters took no part in it have no more to come."""
        for block in list(self._pending):
            self._shelve(block)

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
