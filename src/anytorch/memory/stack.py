"""Tensors by key over several levels of memory. Nothing is ever lost, and no level ever holds more than its budget.

A tensor is on exactly one level at every instant. A move reserves room at the target, makes a complete copy there, and
changes the entry in one assignment; then the source is given up. Whatever happens in between leaves the tensor where it was.

The lock guards the books alone. No thread holds it while bytes move: an entry whose bytes are being read or copied is
*busy*, and only threads that need that entry, or the room that it leaves, wait for it. Ctrl-C waits, too: for the tensor
that is under way.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anytorch import interrupts, logs, settings
from anytorch.devices.choose import resolve
from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.buffers import host_buffer
from anytorch.memory.images import Piece
from anytorch.memory.ledger import Ledger
from anytorch.memory.levels import create_tiers
from anytorch.memory.reader import Reader
from anytorch.memory.sizes import words
from anytorch.memory.spill import Spill
from anytorch.safetensors_files import StoredTensor, torch_dtype
from anytorch.workers import Workers

if TYPE_CHECKING:
    from typing_extensions import Self

log = logs.logger(__name__)
MIB = 2**20
BOUNCE = 4 * MIB
NAME = "tensor"  # of the one tensor in a file
LOOK_S = 0.1  # how often a waiting thread looks whether Ctrl-C was pressed
DISK_NAMES = ("ssd", "disk", "nvme", "hdd")
CPU = torch.device("cpu")


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
    holds: set[object] = field(default_factory=set)  # one of each `hold`
    busy: bool = False  # a thread reads or copies it without the lock: nobody else moves, replaces or removes it


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
        self._changed = threading.Condition(threading.Lock())
        self._at_work: Counter[int] = Counter()  # level → copies under way from or to it
        self._clock = 0
        self._spills: dict[int, Spill] = {}
        self._opening = threading.Lock()  # of a level's folder, which is made when it is first written to
        self._reader = Reader()
        self._bounces: list[torch.Tensor] = []  # buffers that no read uses now

    # --- the dictionary --------------------------------------------------------------------------------------------

    def put(self, key: str, tensor: torch.Tensor, priority: int = 5, *, level: int | None = None) -> int:
        """Store a tensor at the fastest level that has or can get room for it (or at `level`); returns the level.

        An older tensor of that key is given up only when the new one is in. Raises BudgetTooSmall when no level can take it.
        """
        tensor = _own(tensor)
        with self._books():
            self._clock += 1
            name = f"{key} (new {self._clock})"
            candidates = range(len(self.places)) if level is None else (level,)
            for index in candidates:
                if self._swap(key, tensor, priority, index):
                    return index
                if self._make_room(index, tensor.nbytes, {key}, patient=True):
                    self.ledger.reserve(str(index), name, tensor.nbytes)
                    entry = Entry(index, tensor, tensor.nbytes, priority, self._clock)
                    try:
                        with self._moving(entry, index):
                            entry.value = self._copy_to(tensor, index)
                        old = self._replaceable(key)
                    except BaseException:
                        self.ledger.release(str(index), name)
                        self._discard(entry.value)
                        raise
                    self._entries[key] = entry
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

    def _replaceable(self, key: str) -> Entry | None:
        """The entry of a key when nobody is at work on it; None for an unknown key. Raises UsageError for a held one."""
        entry = self._at_rest(key)
        if entry is not None and entry.holds:
            raise UsageError(f"{key!r} is held and cannot be replaced")
        return entry

    def _swap(self, key: str, tensor: torch.Tensor, priority: int, level: int) -> bool:
        """Replace a tensor where it is, if the new one is on that device already: nothing has to exist twice for that."""
        old = self._replaceable(key)
        if old is None or old.level != level or self.places[level].device != tensor.device:
            return False
        if self.ledger.free(str(level)) + old.nbytes < tensor.nbytes:
            return False
        self._entries[key] = Entry(level, tensor, tensor.nbytes, priority, self._clock)
        self.ledger.resize(str(level), key, tensor.nbytes)
        return True

    def get(self, key: str) -> torch.Tensor | None:
        """The tensor, on the fastest level's device if there is room for it there; None for an unknown key.

        What does not fit on the fastest level comes from the level where it is: a disk's is read into host memory.
        """
        with self._books():
            return self._get(key)

    def _get(self, key: str) -> torch.Tensor | None:
        self.stats.requests += 1
        entry = self._readable(key)
        if entry is None:
            return None
        self._clock += 1
        entry.period, entry.last_use = self._clock - entry.last_use, self._clock
        self.stats.hits[entry.level] += 1
        if entry.level > 0 and not entry.busy:
            self._promote(key, entry, {key}, patient=True)
            entry = self._readable(key)  # somebody may have moved it on, or removed it, while the lock was free
        return None if entry is None else self._value(entry)

    def remove(self, key: str) -> torch.Tensor | None:
        """Take a tensor out; None for an unknown key."""
        with self._books():
            entry = self._at_rest(key)
            if entry is None:
                return None
            tensor = self._value(entry)
            del self._entries[key]
            self._give_up(key, entry)
            return tensor

    @contextmanager
    def hold(self, key: str) -> Iterator[torch.Tensor]:
        """`with store.hold(key) as tensor:` keeps the tensor where it is until the block ends."""
        mine, entry = object(), None
        try:
            with self._books():
                tensor = self._get(key)
                entry = self._at_rest(key)
                if tensor is None or entry is None:
                    raise UsageError(f"there is no tensor {key!r}", hint="register it first")
                tensor = entry.value if isinstance(entry.value, torch.Tensor) else tensor
                entry.holds.add(mine)
            yield tensor
        finally:
            if entry is not None:
                entry.holds.discard(mine)  # one step, which needs no lock and cannot be broken in two

    def promote(self, keys: Iterable[str]) -> None:
        """Bring tensors up as far as there is room that nothing needed sooner takes. For prefetching."""
        wanted = list(keys)
        for key in wanted:
            with self._books():
                entry = self._at_rest(key)
                if entry is not None and entry.level > 0:
                    self._promote(key, entry, set(wanted), patient=False)

    def level_of(self, key: str) -> int | None:
        with self._books():
            entry = self._entries.get(key)
            return None if entry is None else entry.level

    def keys(self) -> list[str]:
        with self._books():
            return list(self._entries)

    def count(self, level: int) -> int:
        with self._books():
            return sum(entry.level == level for entry in self._entries.values())

    def close(self) -> None:
        """Give memory, threads and files back, when no bytes move any more."""
        with self._books():
            while self._at_work.total():
                self._wait()
            self._entries.clear()
            self._reader.close()
            for spill in self._spills.values():
                spill.close()
            self._spills.clear()

    # --- waiting ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _books(self) -> Iterator[None]:
        """The lock, with Ctrl-C held back: between any two steps of a change it would leave half of it."""
        with interrupts.held_back(), self._changed:
            yield

    @contextmanager
    def _moving(self, entry: Entry, *levels: int) -> Iterator[None]:
        """Let go of the lock while an entry's bytes move between levels; within it, nobody may wait for another entry."""
        entry.busy = True
        self._at_work.update(levels)
        held, stopped = True, None
        try:
            self._changed.release()
            held = False
            yield
        finally:
            # `_books` holds Ctrl-C back; a program's own handler may raise all the same, while the lock is waited for.
            while not held:
                try:
                    held = self._changed.acquire()
                except KeyboardInterrupt as exc:
                    stopped = exc
            entry.busy = False
            self._at_work.subtract(levels)
            self._changed.notify_all()
            if stopped is not None:
                raise stopped

    def _wait(self) -> None:
        """Wait a while for somebody's bytes to have moved, or for Ctrl-C: nothing of this thread's is half done here.

        Who calls looks again at what he waits for. The condition's own answer is no guide: when the while is just over, it
        says that nothing came although a notice did, and no other may come.
        """
        self._changed.wait(LOOK_S)
        interrupts.check()

    def _at_rest(self, key: str) -> Entry | None:
        """The entry of a key, when nobody is at work on it; None for an unknown key."""
        while (entry := self._entries.get(key)) is not None and entry.busy:
            self._wait()
        return entry

    def _readable(self, key: str) -> Entry | None:
        """The same, except that a tensor in memory is there also while it is copied elsewhere."""
        entry = self._entries.get(key)
        return entry if entry is not None and isinstance(entry.value, torch.Tensor) else self._at_rest(key)

    # --- moving ----------------------------------------------------------------------------------------------------

    def _next_use(self, entry: Entry) -> float:
        """When a tensor will be needed again if it comes round as it did; a tensor used once is needed last."""
        return entry.last_use + entry.period if entry.period is not None else math.inf

    def _promote(self, key: str, entry: Entry, keep: set[str], *, patient: bool) -> None:
        """Bring an entry up. `patient`: the caller uses it now, so its place must not depend on copies under way."""
        for target in range(entry.level):
            if self._make_room(target, entry.nbytes, keep | {key}, patient=patient):
                if self._is_still(key, entry) and entry.level > target:
                    self._move(key, entry, target)
                    self.stats.promotions += 1
                return

    def _is_still(self, key: str, entry: Entry) -> bool:
        """True if an entry is the one of its key and can be moved: making room for it may have let others in."""
        return self._entries.get(key) is entry and not entry.busy and not entry.holds

    def _make_room(self, level: int, nbytes: int, keep: set[str], *, patient: bool) -> bool:
        """Demote tensors until `nbytes` are free at a level. False, with nothing lost, when that cannot be.

        `patient`: wait for copies under way from or to that level, which may leave room. Without it, they count as staying.
        """
        if nbytes > self.places[level].capacity:
            return False
        while self.ledger.free(str(level)) < nbytes:
            interrupts.check()  # one tensor has moved, the next has not
            if not self._demote_one(level, keep, patient):
                if not patient or not self._at_work[level]:
                    return False
                self._wait()
        return True

    def _demote_one(self, level: int, keep: set[str], patient: bool) -> bool:
        """Move one tensor down from a level. False when none can be."""
        # Lower priority first, then what is needed last (Belady), then what was used last: a cycle returns to it last.
        victims = sorted(
            ((k, e) for k, e in self._entries.items() if e.level == level and self._is_still(k, e) and k not in keep),
            key=lambda item: (item[1].priority, -self._next_use(item[1]), -item[1].last_use),
        )
        for key, entry in victims:
            for lower in range(level + 1, len(self.places)):
                if self._make_room(lower, entry.nbytes, keep | {key}, patient=patient):
                    if self._is_still(key, entry) and entry.level == level:
                        self._move(key, entry, lower)
                        self.stats.evictions[level] += 1
                        self.stats.demotions += 1
                    return True  # if it is gone, somebody else made the room
        return False

    def _move(self, key: str, entry: Entry, level: int) -> None:
        source, old = entry.level, entry.value
        self.ledger.reserve(str(level), key, entry.nbytes)
        try:
            with self._moving(entry, source, level):
                value = self._copy_to(old, level)
        except BaseException:
            self.ledger.release(str(level), key)
            raise
        entry.value, entry.level = value, level
        self._discard(old)
        self.ledger.release(str(source), key)

    def _give_up(self, key: str, entry: Entry) -> None:
        self._discard(entry.value)
        self.ledger.release(str(entry.level), key)

    def _discard(self, value: torch.Tensor | StoredTensor) -> None:
        if isinstance(value, StoredTensor):
            self._reader.forget(value.path)
            try:
                Path(value.path).unlink(missing_ok=True)
            except OSError as exc:  # it goes with its folder; the books, which follow, must not stop here
                log.warning("%s cannot be removed before the store is closed: %s", value.path, exc.strerror)

    def _value(self, entry: Entry) -> torch.Tensor:
        """An entry's tensor; one on disk is read into host memory, without the lock."""
        value = entry.value
        if isinstance(value, torch.Tensor):
            return value
        with self._moving(entry, entry.level):
            return self._read(value, CPU)

    def _copy_to(self, value: torch.Tensor | StoredTensor, level: int) -> torch.Tensor | StoredTensor:
        place = self.places[level]
        if isinstance(value, StoredTensor):
            value = self._read(value, place.device or CPU)
        if place.device is not None:
            return value.to(place.device)
        assert place.folder is not None
        with self._opening:
            if level not in self._spills:
                self._spills[level] = Spill(place.folder)
        return self._spills[level].write({NAME: value.cpu()})[NAME]

    def _read(self, located: StoredTensor, device: torch.device) -> torch.Tensor:
        """Through a small buffer of our own, checked: a device's tensor never lies in host memory as a whole."""
        target = torch.empty(located.shape, dtype=torch_dtype(located), device=device)
        flat = target.view(-1).view(torch.uint8) if target.numel() else target.view(-1)
        try:
            bounce = self._bounces.pop()  # without the lock: another reader may take the last one first
        except IndexError:
            bounce = host_buffer(BOUNCE)
        piece = Piece(located.path, located.offset, located.nbytes, 0, located.checksums)
        for chunk, wanted in self._reader.through([piece], bounce):
            flat[chunk.image_offset : chunk.image_offset + chunk.nbytes].copy_(wanted)
        self._bounces.append(bounce)
        return target


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that keeps no larger storage alive than it needs."""
    tensor = tensor.detach().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


@dataclass(frozen=True)
class StackLevel:
    """One level of a stack as it was asked for. `device` is a torch device, "ssd", or a folder."""

    capacity_mb: float
    device: str
    speed_gbps: float

    @property
    def place(self) -> StoreLevel:
        capacity = int(self.capacity_mb * MIB)
        if self.device.lower() in DISK_NAMES:
            return StoreLevel(capacity, None, settings.cache_folder() / "tiers")
        if "/" in self.device or "\\" in self.device:
            return StoreLevel(capacity, None, Path(self.device))
        return StoreLevel(capacity, resolve(self.device).device)


class TensorStack(TensorStore):
    """Tensors over a device, host memory and a disk, each level within its capacity.

    `config` is `{"levels": [{"capacity_mb": …, "device": …, "speed_gbps": …}, …]}`, fastest first; without it, the levels of
    the best device here with what is free. A tensor you got from `access` and keep is yours: the stack may have moved its
    own copy on since; `hold(key)` keeps it in place.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        given = (config or {}).get("levels") or default_levels()
        self.wanted = [_checked(level, number) for number, level in enumerate(given)]
        super().__init__([level.place for level in self.wanted])
        self._ahead: Workers | None = None
        self._pending: list[Future[None]] = []

    def register(self, key: str, tensor: torch.Tensor, priority: int = 5) -> None:
        """Store a tensor under a key, replacing an older one. Raises BudgetTooSmall when the whole stack is too full."""
        self.put(key, tensor, priority)

    def access(self, key: str) -> torch.Tensor | None:
        """The tensor, brought to level 0 if it can be; None if it was never registered."""
        return self.get(key)

    def prefetch(self, keys: Sequence[str]) -> None:
        """Begin to bring tensors to level 0 in the background. What level 0 has no room for stays where it is."""
        if self._ahead is None:
            self._ahead = Workers(1, thread_name_prefix="anytorch-prefetch")
        self._pending = [future for future in self._pending if not future.done()]
        self._pending.append(self._ahead.submit(self.promote, list(keys)))

    def wait(self) -> None:
        """Return when every prefetch has ended; raises what one of them raised."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.level_of(key) is not None

    def __len__(self) -> int:
        return len(self.keys())

    def close(self) -> None:
        """Give memory, threads and files back."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True, cancel_futures=True)
            self._ahead = None
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_levels() -> list[dict[str, Any]]:
    """The levels of the best device here, from what is free, with measured speeds."""
    tiers = create_tiers(resolve(None).device, device_bandwidth=True)
    return [
        {
            "capacity_mb": level.capacity / MIB,
            "device": level.place,
            "speed_gbps": level.read_gb_per_s or 0.0,
        }
        for level in tiers.levels
    ]


def _checked(level: Mapping[str, Any], number: int) -> StackLevel:
    try:
        capacity = float(level["capacity_mb"])
        device = str(level["device"])
        speed = float(level.get("speed_gbps", level.get("transfer_speed_gbps", 0.0)))
    except (KeyError, TypeError, ValueError) as exc:
        raise UsageError(
            f"level {number} is invalid: {exc}",
            hint='write {"capacity_mb": 2000, "device": "cpu", "speed_gbps": 50}',
        ) from exc
    if not capacity >= 0:
        raise UsageError(f"level {number} has an invalid capacity of {capacity} MiB; use 0 or more")
    return StackLevel(capacity, device, speed)
