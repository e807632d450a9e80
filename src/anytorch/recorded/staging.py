"""Between the host's arrays and the device: pinned memory in and out, and an event that says when an answer is there.

A ring of slots, each with memory for one chunk's inputs and outputs. A slot is used again only after its last answer has
been fetched. On a device without pinned memory or events the copies simply wait.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anytorch import logs
from anytorch.recorded.moves import scatter_rows

log = logs.logger(__name__)


def can_stage(device: torch.device) -> bool:
    """True if the device has pinned memory and events, found by trying, since torch does not tell."""
    if device.type == "cpu":
        return False  # its memory is the host's
    try:
        event: Any = torch.Event(device=device)
        with logs.warnings_unheard():  # a device without such memory may say so: that is the answer we are after
            host = torch.arange(4, dtype=torch.int32).pin_memory()
            back = torch.empty(4, dtype=torch.int32).pin_memory()
        back.copy_(host.to(device, non_blocking=True), non_blocking=True)
        event.record()
        event.synchronize()
        return bool(host.is_pinned()) and back.tolist() == [0, 1, 2, 3]
    except (RuntimeError, NotImplementedError, TypeError, AssertionError, ValueError) as exc:
        log.debug("%s copies without pinned memory: %s", device, exc)
        return False


class Slot:
    """Memory for one chunk under way: `numbers` int32 on the host, and where its vectors will be."""

    def __init__(self, numbers: int, rows: int, width: int, device: torch.device, staged: bool) -> None:
        self.device, self.staged = device, staged
        self.host_numbers = torch.zeros(numbers, dtype=torch.int32, pin_memory=staged)
        self.numbers: npt.NDArray[np.int32] = self.host_numbers.numpy()
        self.event: Any = None
        self.host_vectors: Tensor | None = None
        self.vectors: Tensor | None = None  # on the device, where there is no pinned memory
        self.part: Part | None = None  # whose answer is still in here
        if staged:
            # Blocking: a thread that waits for the device should not take a core from the tokenizer.
            self.event = torch.Event(device=device, blocking=True)
            self.host_vectors = torch.empty((rows, width), dtype=torch.float32, pin_memory=True)

    def send(self, count: int, target: Tensor) -> None:
        """The first `count` numbers into `target` on the device, without waiting where that is possible."""
        target[:count].copy_(self.host_numbers[:count], non_blocking=self.staged)

    def keep(self, vectors: Tensor, rows: int) -> None:
        """Start fetching the first `rows` vectors."""
        if self.host_vectors is not None:
            self.host_vectors[:rows].copy_(vectors[:rows], non_blocking=True)
            self.event.record()
        else:
            self.vectors = vectors[:rows]

    def fetch(self, rows: int) -> npt.NDArray[np.float32]:
        """The vectors, as soon as the device has them: valid until the slot is used again."""
        if self.host_vectors is not None:
            self.event.synchronize()
            return self.host_vectors[:rows].numpy()
        assert self.vectors is not None
        found = self.vectors.cpu().numpy()
        self.vectors = None
        return found


class Part:
    """One chunk's share of an answer: where its vectors go in the caller's array."""

    def __init__(self, slot: Slot, out: npt.NDArray[np.float32], texts: npt.NDArray[np.intp]) -> None:
        self.slot: Slot | None = slot
        self.out, self.texts = out, texts
        self._lock = threading.Lock()  # whoever asks and whoever needs the slot again may come at the same time
        slot.part = self

    def collect(self) -> None:
        """Wait for the vectors and put them in their rows. Only the first call does anything; all return when it is done."""
        with self._lock:
            if self.slot is None:
                return
            vectors = self.slot.fetch(len(self.texts))
            if self.slot.staged:
                scatter_rows(vectors, self.texts, self.out)
            else:
                self.out[self.texts] = vectors
            self.slot.part = None
            self.slot = None


class Ring:
    """`count` slots in turn, made when they are first needed."""

    def __init__(self, count: int, numbers: int, rows: int, width: int, device: torch.device, staged: bool) -> None:
        self._size = (numbers, rows, width, device, staged)
        self._slots: list[Slot | None] = [None] * count
        self._next = 0

    def take(self) -> Slot:
        index = self._next
        self._next = (index + 1) % len(self._slots)
        slot = self._slots[index]
        if slot is None:
            slot = self._slots[index] = Slot(*self._size)
        if slot.part is not None:
            slot.part.collect()  # its owner has not asked yet: the answer goes to its array now
        return slot

    def clear(self) -> None:
        for slot in self._slots:
            if slot is not None and slot.part is not None:
                slot.part.collect()
        self._slots = [None] * len(self._slots)
