"""Tensors by key over several levels of memory. Nothing is ever lost, and no level ever holds more than its budget.

A tensor is on exactly one level at every instant. A move reserves room at the target, makes a complete copy there, and
changes the entry in one assignment; then the source is given up. Whatever happens in between leaves the tensor where it was.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.buffers import bytes_of, host_buffer
from anytorch.memory.images import Piece, dtype_name
from anytorch.memory.ledger import Ledger
from anytorch.memory.reader import Reader, chunks_of
from anytorch.memory.sizes import words
from anytorch.memory.spill import Spill
from anytorch.safetensors_files import StoredTensor, torch_dtype

MIB = 2**20
BOUNCE = 4 * MIB
NAME = "tensor"  # of the one tensor in a file


@dataclass(frozen=True)
class StoreLevel:
    """One level: a torch device with a budget, or a folder."""

    capacity: int
    device: torch.device | None  # None: a disk
    folder: Path | None = None


@dataclass
class Entry:
    level: int
    value: torch.Tensor | StoredTensor
    nbytes: int
    priority: int
    last_use: int
    period: int | None = None  # uses of other keys between the last two uses of this one
    holds: int = 0


@dataclass
class StoreStats:
    hits: list[int]  # per level: found there when asked for
    evictions: list[int]
    promotions: int = 0
    demotions: int = 0
    requests: int = 0


class TensorStore:
    """`put`, `get`, `remove`, `hold`; safe to use from several threads."""

    def __init__(self, places: Sequence[StoreLevel]) -> None:
        if not places:
            raise UsageError("a store needs at least one level")
        self.places = tuple(places)
        self.ledger = Ledger({str(index): place.capacity for index, place in enumerate(places)})
        self.stats = StoreStats([0] * len(places), [0] * len(places))
        self._entries: dict[str, Entry] = {}
        self._lock = threading.RLock()
        self._clock = 0
        self._spills: dict[int, Spill] = {}
        self._reader = Reader(threads=1)
        self._bounce: torch.Tensor | None = None

    # --- the dictionary --------------------------------------------------------------------------------------------

    def put(self, key: str, tensor: torch.Tensor, priority: int = 5, *, level: int | None = None) -> int:
        """Store a tensor at the fastest level that has or can get room for it (or at `level`); returns the level.

        An older tensor of that key is given up only when the new one is in. Raises BudgetTooSmall when no level can take it.
        """
        tensor = _own(tensor)
        with self._lock:
            self._clock += 1
            old = self._entries.get(key)
            if old is not None and old.holds:
                raise UsageError(f"{key!r} is held and cannot be replaced")
            name = f"{key} (new)" if old is not None else key
            candidates = range(len(self.places)) if level is None else (level,)
            for index in candidates:
                if old is not None and self._swap(key, old, tensor, priority, index):
                    return index
                if self._make_room(index, tensor.nbytes, keep={key}):
                    self.ledger.reserve(str(index), name, tensor.nbytes)
                    try:
                        value = self._copy_to(tensor, index)
                    except BaseException:
                        self.ledger.release(str(index), name)
                        raise
                    self._entries[key] = Entry(index, value, tensor.nbytes, priority, self._clock)
                    if old is not None:
                        self._give_up(key, old)
                        self.ledger.release(str(index), name)
                        self.ledger.reserve(str(index), key, tensor.nbytes)
                    return index
            raise BudgetTooSmall(
                f"no level has room for {key!r} of {words(tensor.nbytes)}: "
                + ", ".join(f"level {i} has {words(self.ledger.free(str(i)))} free" for i in candidates),
                hint="raise a level's capacity, or remove tensors",
            )

    def _swap(self, key: str, old: Entry, tensor: torch.Tensor, priority: int, level: int) -> bool:
        """Replace a tensor where it is, if the new one is on that device already: nothing has to exist twice for that."""
        if old.level != level or self.places[level].device != tensor.device:
            return False
        if self.ledger.free(str(level)) + old.nbytes < tensor.nbytes:
            return False
        self._entries[key] = Entry(level, tensor, tensor.nbytes, priority, self._clock)
        self.ledger.release(str(level), key)
        self.ledger.reserve(str(level), key, tensor.nbytes)
        return True

    def get(self, key: str) -> torch.Tensor | None:
        """The tensor, on the fastest level's device if there is room for it there; None for an unknown key.

        What does not fit on the fastest level comes from the level where it is: a disk's is read into host memory.
        """
        with self._lock:
            entry = self._entries.get(key)
            self.stats.requests += 1
            if entry is None:
                return None
            self._touch(entry)
            self.stats.hits[entry.level] += 1
            if entry.level > 0:
                self._promote(key, entry)
            value = entry.value
            return value if isinstance(value, torch.Tensor) else self._read(value, torch.device("cpu"))

    def remove(self, key: str) -> torch.Tensor | None:
        """Take a tensor out; None for an unknown key."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            value = entry.value
            tensor = value if isinstance(value, torch.Tensor) else self._read(value, torch.device("cpu"))
            del self._entries[key]
            self._give_up(key, entry)
            return tensor

    @contextmanager
    def hold(self, key: str) -> Iterator[torch.Tensor]:
        """The tensor, kept where it is until the block ends."""
        with self._lock:
            tensor = self.get(key)
            if tensor is None:
                raise UsageError(f"there is no tensor {key!r}", hint="register it first")
            entry = self._entries[key]
            entry.holds += 1
        try:
            yield tensor
        finally:
            with self._lock:
                entry.holds -= 1

    def promote(self, keys: Iterable[str]) -> None:
        """Bring tensors up as far as there is room that nothing needed sooner takes. For prefetching."""
        wanted = list(keys)
        for key in wanted:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None and entry.level > 0:
                    self._promote(key, entry, keep=set(wanted))

    def level_of(self, key: str) -> int | None:
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else entry.level

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._entries)

    def count(self, level: int) -> int:
        with self._lock:
            return sum(entry.level == level for entry in self._entries.values())

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._reader.close()
            for spill in self._spills.values():
                spill.close()
            self._spills.clear()

    # --- moving ----------------------------------------------------------------------------------------------------

    def _touch(self, entry: Entry) -> None:
        self._clock += 1
        entry.period = self._clock - entry.last_use
        entry.last_use = self._clock

    def _next_use(self, entry: Entry) -> float:
        """When a tensor will be needed again if it comes round as it did; a tensor used once is needed last."""
        return entry.last_use + entry.period if entry.period is not None else math.inf

    def _promote(self, key: str, entry: Entry, keep: set[str] | None = None) -> None:
        for target in range(entry.level):
            if self._make_room(target, entry.nbytes, keep={key} | (keep or set())):
                self._move(key, entry, target)
                self.stats.promotions += 1
                return

    def _make_room(self, level: int, nbytes: int, keep: set[str]) -> bool:
        """Demote tensors until `nbytes` are free at a level. False, with nothing lost, when that cannot be."""
        if nbytes > self.places[level].capacity:
            return False
        while self.ledger.free(str(level)) < nbytes:
            if level + 1 >= len(self.places):
                return False
            # Lower priority first, then what is needed last (Belady), then what was used last: a cycle returns to it last.
            victims = sorted(
                ((k, e) for k, e in self._entries.items() if e.level == level and not e.holds and k not in keep),
                key=lambda item: (item[1].priority, -self._next_use(item[1]), -item[1].last_use),
            )
            for key, entry in victims:
                lower = next(
                    (i for i in range(level + 1, len(self.places)) if self._make_room(i, entry.nbytes, keep | {key})),
                    None,
                )
                if lower is not None:
                    self._move(key, entry, lower)
                    self.stats.evictions[level] += 1
                    self.stats.demotions += 1
                    break
            else:
                return False
        return True

    def _move(self, key: str, entry: Entry, level: int) -> None:
        source = entry.level
        self.ledger.reserve(str(level), key, entry.nbytes)
        try:
            value = self._copy_to(entry.value, level)
        except BaseException:
            self.ledger.release(str(level), key)
            raise
        old = entry.value
        entry.value, entry.level = value, level
        self._discard(old)
        self.ledger.release(str(source), key)

    def _give_up(self, key: str, entry: Entry) -> None:
        self._discard(entry.value)
        self.ledger.release(str(entry.level), key)

    def _discard(self, value: torch.Tensor | StoredTensor) -> None:
        if isinstance(value, StoredTensor):
            self._reader.forget(value.path)
            Path(value.path).unlink(missing_ok=True)

    def _copy_to(self, value: torch.Tensor | StoredTensor, level: int) -> torch.Tensor | StoredTensor:
        place = self.places[level]
        if place.device is not None:
            if isinstance(value, StoredTensor):
                return self._read(value, place.device)
            return value.to(place.device) if value.device != place.device else value
        if isinstance(value, StoredTensor):
            value = self._read(value, torch.device("cpu"))
        assert place.folder is not None
        if level not in self._spills:
            self._spills[level] = Spill(place.folder)
        return self._spills[level].write({NAME: value.cpu()})[NAME]

    def _read(self, located: StoredTensor, device: torch.device) -> torch.Tensor:
        """Through a small buffer of our own, checked: a device's tensor never lies in host memory as a whole."""
        target = torch.empty(located.shape, dtype=torch_dtype(located), device=device)
        flat = target.view(-1).view(torch.uint8) if target.numel() else target.view(-1)
        if self._bounce is None:
            self._bounce = host_buffer(BOUNCE)
        view = bytes_of(self._bounce)
        piece = Piece(located.path, located.offset, located.nbytes, 0, located.checksums)
        for chunk in chunks_of(piece, BOUNCE):
            self._reader.read_chunk(chunk, view[: chunk.read_nbytes])
            wanted = self._bounce[chunk.lead : chunk.lead + chunk.nbytes]
            self._reader.check(chunk, wanted)
            flat[chunk.image_offset : chunk.image_offset + chunk.nbytes].copy_(wanted)
        return target


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that keeps no larger storage alive than it needs."""
    tensor = tensor.detach().contiguous()
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()
    dtype_name(tensor.dtype)
    return tensor


def describe(store: TensorStore, level: int) -> dict[str, Any]:
    use = store.ledger.use(str(level))
    return {"capacity": use.capacity, "used": use.used, "peak": use.peak, "tensors": store.count(level)}
