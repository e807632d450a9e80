"""Copies to a device beside its computing, through torch's device-neutral streams and events; plain copies elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anytorch import logs

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
