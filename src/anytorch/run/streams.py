"""Streams and events: the device's own where it has them; elsewhere one stream, in order, and events that measure."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import Place


class Event:
    """A point in the one stream of a device that works in order. One with timing waits for the work before it."""

    _place: Place

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self._at: float | None = None

    @property
    def device(self) -> torch.device:
        return self._place.shown[self._place.current]

    def record(self, stream: Any = None) -> None:
        if self.enable_timing:
            self._place.synchronize()
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end._at - self._at) * 1e3

    def synchronize(self) -> None:
        if self._at is not None:
            self._place.synchronize()

    def wait(self, stream: Any = None) -> None:
        """Nothing to do: what comes later in the program runs later."""

    def query(self) -> bool:
        self.synchronize()
        return True

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {'recorded' if self._at is not None else 'uninitialized'}>"


class Stream:
    """The one stream of a device that works in order, under as many names as the program likes."""

    _place: Place
    _made = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        Stream._made += 1
        self.stream_id = self.cuda_stream = Stream._made
        self.priority = priority
        self._index = self._place.index_of(device)

    @property
    def device(self) -> torch.device:
        return self._place.shown[self._index]

    @property
    def device_index(self) -> int:
        return self._index

    def wait_event(self, event: Any) -> None:
        """Nothing to do: what comes later in the program runs later."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to do: what comes later in the program runs later."""

    def record_event(self, event: Event | None = None) -> Event:
        event = type(self)._event() if event is None else event
        event.record(self)
        return event

    _event: Any = Event

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._place.synchronize(self._index)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def install(patches: Patches, place: Place, ledger: Ledger) -> None:
    cuda: Any = torch.cuda
    own = [name for name in ("Stream", "Event", "stream", "current_stream") if place.has(name)]
    if len(own) == 4:
        for name in (*own, "StreamContext", "default_stream", "set_stream"):
            if hasattr(place.module, name):
                patches.set(cuda, name, getattr(place.module, name))
        return
    event = type("Event", (Event,), {"_place": place, "__module__": "torch.cuda"})
    stream = type("Stream", (Stream,), {"_place": place, "_event": event, "__module__": "torch.cuda"})
    current = [stream()]
    default = current[0]

    class StreamContext:
        """`with torch.cuda.stream(s):` makes it the current one, by name."""

        def __init__(self, chosen: Any) -> None:
            self.stream = chosen

        def __enter__(self) -> None:
            if self.stream is not None:
                ledger.ignore("torch.cuda.stream(…)")
                current.append(self.stream)

        def __exit__(self, *about: Any) -> None:
            if self.stream is not None:
                current.pop()

    def set_stream(chosen: Any) -> None:
        if chosen is not None:
            current[-1] = chosen

    for name, value in {
        "Stream": stream,
        "ExternalStream": stream,
        "Event": event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "set_stream": set_stream,
        "current_stream": lambda device=None: current[-1],
        "default_stream": lambda device=None: default,
    }.items():
        patches.set(cuda, name, value)
    patches.set(torch.cuda.streams, "Stream", stream)
    patches.set(torch.cuda.streams, "Event", event)
