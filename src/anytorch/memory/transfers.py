"""Bytes on their way to the device: copies from host memory, and reads from disk, through staging buffers or straight in.

Where the device has memory of its own, reading threads fill pinned buffers that the copy stream empties. Where it computes
in host RAM they read into the target itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from anytorch import logs
from anytorch.memory.buffers import bytes_of, gather, host_buffer
from anytorch.memory.images import Image
from anytorch.memory.reader import Chunk, chunks_of

if TYPE_CHECKING:
    from anytorch.memory.homes import FittedState

log = logs.logger(__name__)


class Copies:
    """A copy stream of one device.

    `asynchronous`: copies are queued and events order them. Otherwise (the CPU, a device without streams) a copy has
    happened when it returns, and events are None.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = None
        self._entering = threading.Lock()
        if device.type != "cpu":
            try:
                self.stream = torch.Stream(device=device)
                self.event()
            except (RuntimeError, NotImplementedError, AttributeError) as exc:
                log.info("%s has no streams, copies wait for each other: %s", device, str(exc).splitlines()[0])
                self.stream = None

    @property
    def asynchronous(self) -> bool:
        return self.stream is not None

    def event(self) -> Any:
        return torch.Event(device=self.device) if self.stream is not None else None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Operations inside are queued on the copy stream. Any thread may do so, one at a time: a torch.Stream remembers
        in itself which stream it replaced."""
        if self.stream is None:
            yield
        else:
            with self._entering, self.stream:
                yield

    def copied(self) -> Any:
        """An event for everything queued on the copy stream so far."""
        event = self.event()
        if event is not None:
            event.record(self.stream)
        return event

    def computed(self) -> Any:
        """An event for everything queued on the current stream of the calling thread."""
        event = self.event()
        if event is not None:
            event.record(torch.accelerator.current_stream(self.device))
        return event

    def copy_after(self, event: Any) -> None:
        """Later copies wait for the event; the host does not."""
        if event is not None:
            self.stream.wait_event(event)

    def compute_after(self, event: Any) -> None:
        """Later work on the current stream waits for the event; the host does not."""
        if event is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


MIB = 2**20
STAGING_CHUNKS = 8


@dataclass
class UnderWay:
    """The reads and copies that have to end before an image is there."""

    futures: list[Future[None]] = field(default_factory=list)  # reads and copies, most of them by other threads
    arrived: Any = None  # event on the copy stream
    work: Callable[[], None] | None = None  # what `futures[0]` stands for, if a thread that uses the device must do it


def do(work: Callable[[], None], future: Future[None]) -> None:
    """Do what a future stands for, unless it was cancelled; what it raises is raised by the future."""
    if future.set_running_or_notify_cancel():
        try:
            work()
        except BaseException as exc:
            future.set_exception(exc)  # whoever needs the block is told
            if not isinstance(exc, Exception):
                raise
        else:
            future.set_result(None)


class Transfers:
    """Bring images from their homes to the device, through staging buffers that are reserved and allocated here, once."""

    def __init__(self, state: FittedState, host: Mapping[str, list[torch.Tensor]]) -> None:
        """`host`: where the blocks that live in host memory lie there, in pieces."""
        self.device = state.device
        self.copies = Copies(state.device)
        self.reader = state.reader
        self._host = host
        self._ledger = state.ledger
        self._shared = state.tiers.shared
        self._staging: queue.SimpleQueue[tuple[torch.Tensor, memoryview, list[Any]]] = queue.SimpleQueue()
        self._staging_chunk = 0
        level = state.tiers.find("host")
        if state.plan.staging_nbytes and not self._shared:
            self._make_staging(state.plan.staging_nbytes, level is not None and level.pinned)

    def _make_staging(self, nbytes: int, pinned: bool) -> None:
        self._ledger.reserve("host", "staging", nbytes)
        chunk = max(MIB, nbytes // STAGING_CHUNKS // MIB * MIB)
        if pinned:
            chunk = 2 ** (chunk.bit_length() - 1)  # what the pinned allocator would round it up to
        self._staging_chunk = chunk
        for _ in range(max(1, nbytes // chunk)):
            buffer = host_buffer(chunk, pinned=pinned, lasting=True)
            self._staging.put((buffer, bytes_of(buffer), []))

    def begin(self, image: Image, target: torch.Tensor) -> UnderWay:
        """Begin to bring an image from its home into device memory. Reads nothing itself, so that a lock may be held."""
        if image.name in self._host:
            return self._from_host(self._host[image.name], target)
        if self._shared:
            return UnderWay(self.reader.start(image.pieces, target))
        chunks = [chunk for piece in image.pieces for chunk in chunks_of(piece, self._staging_chunk)]
        if self.copies.asynchronous or self.device.type == "cpu":
            return UnderWay([self.reader.submit(partial(self._through_staging, chunk, target)) for chunk in chunks])

        def read_all() -> None:
            for chunk in chunks:
                self._through_staging(chunk, target)

        return UnderWay([Future()], work=read_all)

    def _from_host(self, pieces: list[torch.Tensor], target: torch.Tensor) -> UnderWay:
        if self.copies.asynchronous:
            with self.copies.use():
                gather(pieces, target, non_blocking=True)
            return UnderWay(arrived=self.copies.copied())
        if self.device.type == "cpu":
            return UnderWay([self.reader.submit(lambda: gather(pieces, target))])
        return UnderWay([Future()], work=partial(gather, pieces, target))

    def _through_staging(self, chunk: Chunk, target: torch.Tensor) -> None:
        """Disk → a staging buffer → the ring. Only this reading thread waits until the buffer can be used again."""
        buffer, view, busy = self._staging.get()
        try:
            while busy:
                busy.pop().synchronize()
            self.reader.read_chunk(chunk, view)
            wanted = buffer[chunk.lead : chunk.lead + chunk.nbytes]
            self.reader.check(chunk, wanted)
            with self.copies.use():
                target[chunk.image_offset : chunk.image_offset + chunk.nbytes].copy_(wanted, non_blocking=True)
                event = self.copies.copied()
            if event is not None:
                busy.append(event)
        finally:
            self._staging.put((buffer, view, busy))

    def close(self) -> None:
        """Wait for the copy stream and give the staging buffers back."""
        self.copies.synchronize()
        if "host" in self._ledger.levels():
            self._ledger.release("host", "staging")
        self._staging = queue.SimpleQueue()
